//! `task.extract`: each rule finds what it says and nothing else, and the policy only compares.

use qurl_tasks::data::Row;
use qurl_tasks::grader::{Extract, ExtractRule, Policy, grade_by_rule};
use qurl_tasks::presets::PLAIN;
use qurl_tasks::tasks::DatasetTask;
use qurl_tasks::{Prompt, Split, Task};
use serde_json::json;

fn rule(given: serde_json::Value) -> Extract {
    serde_json::from_value::<ExtractRule>(given).expect("a rule").compile().expect("a good rule")
}

#[test]
fn each_rule_finds_the_last_one() {
    let answer = json!({"type": "pattern", "pattern": r"(?i)answer\s*=\s*(-?\d+)"});
    let cases: &[(serde_json::Value, &str, Option<&str>)] = &[
        (json!({"type": "boxed"}), r"\boxed{1} so \boxed{\frac{1}{2}}.", Some(r"\frac{1}{2}")),
        (json!({"type": "boxed"}), "#### 4", None),
        (json!({"type": "after"}), "#### 3\nno\n####  4 apples \nmore", Some("4 apples")),
        (json!({"type": "after"}), "####\n\n 4", Some("4")),
        (json!({"type": "after"}), r"\boxed{4}", None),
        (json!({"type": "after"}), "4 ####", None),
        (json!({"type": "after", "marker": "Answer:"}), "Answer: x\nAnswer: y", Some("y")),
        (json!({"type": "tag"}), "<answer>1</answer> <answer>\n2 </answer>", Some("2")),
        (json!({"type": "tag"}), "<answer>1", None),
        (json!({"type": "tag", "tag": "final"}), "<answer>1</answer><final>2</final>", Some("2")),
        (answer.clone(), "Answer = 3, answer=-4", Some("-4")),
        (answer, "answer is 4", None),
        (json!({"type": "last-number"}), "3 of 12 are 25%", Some("25%")),
        (json!({"type": "last-number"}), "it is -1,234.5, no?", Some("-1,234.5")),
        (json!({"type": "last-number"}), "none", None),
        (json!({"type": "whole"}), "  4 \n", Some("4")),
        (json!({"type": "whole"}), " ", None),
    ];
    for (given, response, expected) in cases {
        assert_eq!(rule(given.clone()).find(response).as_deref(), *expected, "{given} {response:?}");
    }
}

#[test]
fn the_policy_compares_and_does_not_search() {
    let after = rule(json!({"type": "after"}));
    let equal = |gold: &str, response: &str, policy| grade_by_rule(gold, response, &after, policy).equal;
    assert!(equal("1/2", "#### 0.5", Policy::Equivalence));
    assert!(!equal("1/2", r"\boxed{1/2} #### 0.6", Policy::Equivalence), "the box is none of its business");
    assert!(!equal("1/2", "1/2", Policy::Equivalence), "there is no marker");
    assert!(!equal("1/2", "#### 0.5", Policy::DapoNormalize), "texts that differ");
    assert!(
        equal("1234", "#### 1,234", Policy::Gsm8kStrict) && !equal("72", "#### 72.0", Policy::Gsm8kStrict)
    );
    assert!(
        equal("1/2", "#### 2/4", Policy::Equivalence) && !equal("1/2", "#### 2/4", Policy::ReducedFraction)
    );
    assert!(
        equal("0.5", "#### 50%", Policy::PercentAsRatio) && !equal("50", "#### 50%", Policy::PercentAsRatio)
    );
    let grade = grade_by_rule("4", "#### five", &after, Policy::Equivalence);
    assert_eq!((grade.equal, grade.extracted.as_deref()), (false, Some("five")));
}

#[test]
fn a_task_finds_answers_by_its_rule() {
    let row = Row {
        id: "r".into(),
        problem: Prompt::Text("2+2?".into()),
        answer: "4".into(),
        source: None,
        extra: serde_json::Value::Null,
    };
    let task = DatasetTask::new("t", vec![row], PLAIN, Policy::Equivalence, 0.0)
        .with_extract(rule(json!({"type": "tag"})))
        .with_format_weight(0.5);
    let problem = task.draw(Split::Train, 1, 0).expect("a problem");
    let verdict = |response: &str| {
        let verdict = task.verify(&problem, response);
        (verdict.correct, verdict.reward, verdict.extracted)
    };
    assert_eq!(verdict("<answer>4</answer>"), (true, 1.0, Some("4".into())));
    assert_eq!(verdict("4 <answer>5</answer>"), (false, 0.5, Some("5".into())));
    assert_eq!(verdict(r"\boxed{4}"), (false, 0.0, None));
}

#[test]
fn rules_that_cannot_be_are_refused() {
    let wrong = |given: serde_json::Value| {
        let rule = serde_json::from_value::<ExtractRule>(given).expect("a rule");
        rule.compile().expect_err("wrong").to_string()
    };
    assert_eq!(
        wrong(json!({"type": "pattern", "pattern": r"(\d+) of (\d+)"})),
        "key `pattern` is \"(\\\\d+) of (\\\\d+)\", expected one group in round brackets, the answer; \
         there are 2"
    );
    assert_eq!(
        wrong(json!({"type": "pattern", "pattern": "(?=x)"})),
        "key `pattern` is \"(?=x)\", expected a regular expression: look-around, including look-ahead and \
         look-behind, is not \
         supported"
    );
    assert_eq!(
        wrong(json!({"type": "after", "marker": " "})),
        "key `marker` is \" \", expected a text such as ####"
    );
    assert_eq!(
        wrong(json!({"type": "tag", "tag": "<a>"})),
        "key `tag` is \"<a>\", expected a name without angle brackets, such as answer"
    );
    assert!(serde_json::from_value::<ExtractRule>(json!({"type": "boxed", "tag": "x"})).is_err());
}
