//! Rewards, prompts and answers of one's own: what recipes say, and the exact messages where they are wrong.

use super::{error, with_task};
use crate::recipe::{Recipe, TaskSource};
use qurl_tasks::presets::DAPO;

/// Every kind of reward, a prompt and a rule, from line 11 on.
const OWN: &str = r#"type = "dataset"
files = ["train.jsonl"]
preset = "dapo"
extract = { type = "pattern", pattern = 'Answer: (.*)' }

[task.prompt]
system = "Be brief."
user = """
{{ problem }}
Think."""
examples = [{ problem = "1+1?", response = "Answer: 2" }]

[[task.rewards]]
type = "correct"

[[task.rewards]]
type = "grader"
policy = "percent_as_ratio"
extract = { type = "tag" }
weight = 0

[[task.rewards]]
type = "pattern"
pattern = '^So'
weight = -0.5

[[task.rewards]]
type = "tags"

[[task.rewards]]
type = "length"
full_at = 10
zero_at = 20

[[task.rewards]]
type = "format"

[[task.rewards]]
type = "command"
name = "style"
command = ["python3", "style.py"]

[[task.rewards]]
type = "http"
url = "http://localhost:8000/score"
time_limit_s = 5.5
"#;

#[test]
fn all_of_it_is_read_and_written() {
    let recipe = Recipe::parse(&with_task(OWN), "r.toml", &[]).expect("good");
    let again = Recipe::parse(&recipe.to_toml(), "again", &[]).expect("what is written can be read");
    assert_eq!(again, recipe);
    let Some(TaskSource::Dataset(source)) = &recipe.task else { panic!("{:?}", recipe.task) };
    let names: Vec<&str> = source.rewards.iter().map(|rule| rule.name()).collect();
    assert_eq!(names, ["correct", "grader", "pattern", "tags", "length", "format", "style", "http"]);
    let weights: Vec<f64> = source.rewards.iter().map(|rule| rule.weight()).collect();
    assert_eq!(weights, [1.0, 0.0, -0.5, 1.0, 1.0, 1.0, 1.0, 1.0]);
    assert_eq!(source.policy().expect("a policy").name(), "equivalence", "DAPO's looks for answers itself");
    assert_eq!(source.template().expect("a template"), DAPO);
    // A generated task has rewards too.
    let synthetic =
        "type = \"synthetic\"\nkind = \"addition\"\nlevel = 2\n[[task.rewards]]\ntype = \"correct\"\n";
    let recipe = Recipe::parse(&with_task(synthetic), "r.toml", &[]).expect("good");
    assert_eq!(recipe.task().expect("[task]").rewards().len(), 1);
    assert!(recipe.task().expect("[task]").task().is_ok());
}

/// The message about a text in place of another one of [`OWN`].
fn wrong(old: &str, new: &str) -> String {
    assert!(OWN.contains(old), "{old}");
    error(&with_task(&OWN.replacen(old, new, 1)), &[])
}

#[test]
fn messages_name_line_key_value_and_what_was_expected() {
    for (old, new, message) in [
        (
            "pattern = '^So'",
            "pattern = '^(So'",
            "r.toml, line 34: key `task.rewards[2].pattern` is \"^(So\", expected a regular expression: \
             unclosed group",
        ),
        (
            "type = \"tags\"",
            "type = \"tag\"",
            "r.toml, line 38: key `task.rewards[3].type` is \"tag\", expected one of correct, format, \
             grader, pattern, tags, \
             length, command, http; did you mean \"tags\"?",
        ),
        (
            "type = \"tags\"",
            "type = \"tags\"\nwieght = 1",
            "r.toml, line 39: unknown key `task.rewards[3].wieght`; did you mean `task.rewards[3].weight`?",
        ),
        (
            "type = \"tags\"",
            "type = \"correct\"",
            "r.toml, line 37: key `task.rewards[3]` is called \"correct\" like another one, expected a \
             `name` of its own",
        ),
        (
            "type = \"tags\"",
            "type = \"tags\"\nname = \"a/b\"",
            "r.toml, line 39: key `task.rewards[3].name` is \"a/b\", expected letters, digits, `_`, `-` \
             and spaces, at most 64",
        ),
        (
            "weight = -0.5",
            "weight = nan",
            "r.toml, line 35: key `task.rewards[2].weight` is NaN, expected a number from -1000000 to \
             1000000",
        ),
        (
            "zero_at = 20",
            "zero_at = 10",
            "r.toml, line 43: key `task.rewards[4].zero_at` is 10, expected another number than `full_at` \
             = 10",
        ),
        (
            "zero_at = 20",
            "",
            "r.toml, line 40: section [task.rewards[4]] lacks the key `zero_at`: tokens of a response that \
             is given 0: more than \
             `full_at` to favour short ones, less to favour long ones",
        ),
        (
            "command = [\"python3\", \"style.py\"]",
            "command = []",
            "r.toml, line 51: key `task.rewards[6].command` is [], expected a program and its arguments",
        ),
        (
            "http://localhost:8000/score",
            "localhost:8000",
            "r.toml, line 55: key `task.rewards[7].url` is \"localhost:8000\", expected an address \
             http://host:port/path",
        ),
        (
            "extract = { type = \"tag\" }",
            "extract = { type = \"tag\", tag = \"<x>\" }",
            "r.toml, line 29: key `task.rewards[1].extract.tag` is \"<x>\", expected a name without angle \
             brackets, such as answer",
        ),
        (
            "preset = \"dapo\"",
            "policy = \"answer_line\"",
            "r.toml, line 13: key `task.policy` is \"answer_line\", expected one that compares only, since \
             `extract` says what \
             counts as the answer: equivalence, dapo_normalize, percent_as_ratio, reduced_fraction, \
             gsm8k_strict",
        ),
        (
            "pattern = 'Answer: (.*)'",
            "pattern = 'Answer: .*'",
            "r.toml, line 14: key `task.extract.pattern` is \"Answer: .*\", expected one group in round \
             brackets, the answer; \
             there are 0",
        ),
        (
            "type = \"pattern\", pattern = 'Answer: (.*)'",
            "type = \"box\"",
            "r.toml, line 14: key `task.extract.type` is \"box\", expected one of boxed, after, tag, \
             pattern, last-number, whole",
        ),
        (
            "Think.",
            "{{ problem",
            "r.toml, line 18: key `task.prompt.user` is \"{{ problem }}\\n{{ problem\", expected a \
             template; line 2: syntax error: \
             unexpected end of input, expected end of variable block",
        ),
        (
            "{{ problem }}",
            "{problem}",
            "r.toml, line 18: key `task.prompt.user` is \"{problem}\\nThink.\", expected a template with \
             {{ problem }} in it, or \
             all prompts are the same",
        ),
        (
            "preset = \"dapo\"",
            "template = \"dapo\"",
            "r.toml, line 13: key `task.template` is \"dapo\", expected nothing beside `task.prompt.user`, \
             which says the same",
        ),
        (
            "response = \"Answer: 2\"",
            "answer = \"2\"",
            "r.toml, line 21: unknown key `task.prompt.examples[0].answer`; `qurl recipe \
             task.prompt.examples` lists the keys \
             of [task.prompt.examples]\nr.toml, line 21: section [task.prompt.examples[0]] lacks the key \
             `response`: the response, word by word",
        ),
        (
            "preset = \"dapo\"",
            "reward = { right = 2.0 }",
            "r.toml, line 13: key `task.reward` is { right = 2, wrong = 0 }, expected nothing beside \
             [[task.rewards]]; give a \
             reward of the type correct a weight",
        ),
        (
            "preset = \"dapo\"",
            "format_weight = 0.5",
            "r.toml, line 13: key `task.format_weight` is 0.5, expected nothing beside [[task.rewards]]; \
             give a reward of the \
             type format a weight",
        ),
    ] {
        assert_eq!(wrong(old, new), message, "{new}");
    }
    let zero = "type = \"synthetic\"\nkind = \"addition\"\nlevel = 2\n[[task.rewards]]\ntype = \
     \"correct\"\nweight = 0\n";
    assert_eq!(
        error(&with_task(zero), &[]),
        "r.toml, line 14: key `task.rewards` is a list of weights of 0, expected at least one other weight"
    );
    let command = "type = \"command\"\ncommand = [\"x\"]\n[task.source]\ntype = \"synthetic\"\nkind = \
     \"addition\"\nlevel = 2\n\
                   rewards = [{ type = \"correct\" }]\n";
    assert_eq!(
        error(&with_task(command), &[]),
        "r.toml, line 17: key `task.source.rewards` is given, expected nothing: the command judges; give \
         [task] the type of its \
         source to have several"
    );
}

/// What a row lacks is said with its key when the data is read.
#[test]
fn a_template_that_a_row_does_not_fit_is_named() {
    let file = std::env::temp_dir().join(format!("qurl-own-{}.jsonl", std::process::id()));
    std::fs::write(&file, "{\"problem\": \"1+1?\", \"answer\": \"2\"}\n").expect("written");
    let files = format!("task.files=[{:?}]", file.display().to_string());
    let text = with_task(OWN).replace("Think.", "{{ hint }}");
    let recipe = Recipe::parse(&text, "r.toml", &[files, "task.rewards=[]".to_string()]).expect("good");
    let error = recipe.task().expect("[task]").task().err().expect("no hint").to_string();
    std::fs::remove_file(&file).expect("removed");
    let name = file.file_name().expect("a name").to_string_lossy().into_owned();
    assert_eq!(
        error,
        format!("key `task.prompt.user`, line 2: there is no \"hint\"; there are id, problem (row {name}:1)")
    );
}
