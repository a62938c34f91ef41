//! Prompts of one's own: templates, system messages, worked examples, and what is wrong with them.

use qurl_tasks::data::Row;
use qurl_tasks::grader::Policy;
use qurl_tasks::presets::{DAPO, PLAIN, QWEN_MATH, Template};
use qurl_tasks::prompt::PromptRule;
use qurl_tasks::tasks::DatasetTask;
use qurl_tasks::{Message, Prompt, Split, Task};
use serde_json::json;

fn rule(rule: serde_json::Value) -> PromptRule {
    serde_json::from_value(rule).expect("a rule")
}

fn row(problem: Prompt) -> Row {
    let extra = json!({"choices": ["3", "4"], "level": 2, "source": "sums"});
    Row { id: "r1".into(), problem, answer: "SECRET".into(), source: None, extra }
}

fn text(text: &str) -> Prompt {
    Prompt::Text(text.into())
}

fn chat(messages: &[(&str, &str)]) -> Prompt {
    let message =
        |(role, content): &(&str, &str)| Message { role: (*role).into(), content: (*content).into() };
    Prompt::Chat(messages.iter().map(message).collect())
}

/// The prompt of a row of text, through a task.
fn prompt(given: serde_json::Value, template: Template, problem: Prompt) -> Prompt {
    let compiled = rule(given).compile(template).expect("a template");
    let task = DatasetTask::new("t", vec![row(problem)], template, Policy::default(), 0.0);
    let task = task.with_prompt(&compiled).expect("prompts");
    let problem = task.draw(Split::Train, 1, 0).expect("a problem");
    assert!(!problem.prompt.plain().contains("SECRET"));
    problem.prompt
}

#[test]
fn templates_know_the_fields_of_a_row() {
    let user = "{{ problem }}\n{% for choice in choices %}\n- {{ choice }}\n{% endfor %}\nLevel {{ level \
     }}, {{ id }}:\n";
    let made = prompt(json!({"user": user, "chat": false}), PLAIN, text("2+2?"));
    assert_eq!(made, text("2+2?\n- 3\n- 4\nLevel 2, r1:\n"), "the last line break stays");
    let made = prompt(json!({"user": "{{ problem }}", "system": "From {{ source }}."}), PLAIN, text("2+2?"));
    assert_eq!(made, chat(&[("system", "From sums."), ("user", "2+2?")]));
}

#[test]
fn what_is_not_said_is_as_the_template_says() {
    let dapo = DAPO.apply("2+2?");
    assert_eq!(prompt(json!({}), DAPO, text("2+2?")), dapo);
    let Prompt::Chat(messages) = &dapo else { panic!("{dapo:?}") };
    let with_system = prompt(json!({"system": "Be brief."}), DAPO, text("2+2?"));
    assert_eq!(with_system, chat(&[("system", "Be brief."), ("user", &messages[0].content)]));
    let system = QWEN_MATH.system.expect("a system message");
    let made = prompt(json!({"user": "Q: {{ problem }}"}), QWEN_MATH, text("2+2?"));
    assert_eq!(made, chat(&[("system", system), ("user", "Q: 2+2?")]));
}

#[test]
fn examples_come_before_the_problem() {
    let examples = json!([{"problem": "1+1?", "response": "2"}, {"problem": "1+2?", "response": "3"}]);
    let few = |chat: bool| json!({"user": "Q: {{ problem }}\nA: ", "chat": chat, "examples": examples});
    let made = prompt(few(false), PLAIN, text("2+2?"));
    assert_eq!(made, text("Q: 1+1?\nA: 2\n\nQ: 1+2?\nA: 3\n\nQ: 2+2?\nA: "));
    let asked = |problem: &str| format!("Q: {problem}\nA: ");
    let made = prompt(few(true), PLAIN, text("2+2?"));
    let turns = [("user", asked("1+1?")), ("assistant", "2".into()), ("user", asked("1+2?"))];
    let more = [("assistant", "3".into()), ("user", asked("2+2?"))];
    let turns: Vec<(&str, &str)> =
        turns.iter().chain(&more).map(|(role, said)| (*role, said.as_str())).collect();
    assert_eq!(made, chat(&turns));
}

#[test]
fn rows_of_one_user_message_are_problems_too() {
    let user = json!({"user": "{{ problem }}!"});
    let alone = chat(&[("user", "2+2?")]);
    assert_eq!(prompt(user.clone(), PLAIN, alone.clone()), chat(&[("user", "2+2?!")]));
    let own = chat(&[("system", "Its own."), ("user", "2+2?")]);
    assert_eq!(prompt(user.clone(), PLAIN, own.clone()), chat(&[("system", "Its own."), ("user", "2+2?!")]));
    let ours = json!({"system": "Ours."});
    assert_eq!(prompt(ours, PLAIN, own), chat(&[("system", "Ours."), ("user", "2+2?")]));
    let long = chat(&[("user", "2+2?"), ("assistant", "5"), ("user", "No!")]);
    let compiled = rule(user).compile(PLAIN).expect("a template");
    let error = compiled.apply(&row(long)).expect_err("several turns").to_string();
    assert!(
        error.contains("the row is a chat of user, assistant, user") && error.contains("row r1"),
        "{error}"
    );
}

/// Held-out problems are chosen by what the file says, whatever the prompt makes of it.
#[test]
fn a_prompt_does_not_move_problems_between_splits() {
    let rows: Vec<Row> =
        (0..200).map(|i| Row { id: i.to_string(), ..row(text(&format!("{i}+1?"))) }).collect();
    let ids = |task: &DatasetTask| -> Vec<String> {
        let count = task.len(Split::Test).expect("a count");
        (0..count).filter_map(|i| Some(task.draw(Split::Test, 1, i)?.id)).collect()
    };
    let plain = DatasetTask::new("t", rows, PLAIN, Policy::default(), 0.2);
    let compiled = rule(json!({"user": "Always {{ problem }}"})).compile(PLAIN).expect("a template");
    let prompted = plain.clone().with_prompt(&compiled).expect("prompts");
    assert_eq!(ids(&plain), ids(&prompted));
    assert_ne!(plain.fingerprint(), prompted.fingerprint(), "another prompt is another run");
}

#[test]
fn what_is_wrong_is_said_with_key_and_line() {
    for (given, message) in [
        (
            json!({"user": "{{ problem }}\n{% if x %}"}),
            "key `user` is \"{{ problem }}\\n{% if x %}\", expected a template; line 2: syntax error: \
             unexpected end of input, \
             expected end of block",
        ),
        (
            json!({"user": "Solve {problem}."}),
            "key `user` is \"Solve {problem}.\", expected a template with {{ problem }} in it, or all \
             prompts are the same",
        ),
        (
            json!({"user": "{{ problem }} {{ answer }}"}),
            "key `user` is \"{{ problem }} {{ answer }}\", expected a template without {{ answer }}: it \
             would give the answer away",
        ),
        (
            json!({"system": "x", "chat": false}),
            "key `system` is \"x\", expected nothing where `chat` is false",
        ),
        (
            json!({"examples": [{"problem": "x", "response": " "}]}),
            "key `examples[0].response` is \" \", expected a text",
        ),
    ] {
        assert_eq!(rule(given).compile(PLAIN).expect_err("wrong").to_string(), message);
    }
    let error = |given: serde_json::Value| {
        let compiled = rule(given).compile(PLAIN).expect("a template");
        compiled.apply(&row(text("2+2?"))).expect_err("wrong").to_string()
    };
    assert_eq!(
        error(json!({"user": "{{ problem }}\n{{ choice }}"})),
        "user, line 2 of the template: there is no \"choice\"; there are choices, id, level, problem, \
         source (row r1)"
    );
    assert_eq!(
        error(json!({"user": "{{ problem }} {{ level }}", "examples": [{"problem": "x", "response": "y"}]})),
        "user, line 1 of the template: there is no \"level\"; there are id, problem (task.prompt.examples[0])"
    );
    let unknown = serde_json::from_value::<PromptRule>(json!({"usr": "x"})).expect_err("unknown").to_string();
    assert!(unknown.contains("usr"), "{unknown}");
}
