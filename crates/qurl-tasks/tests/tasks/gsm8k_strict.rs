//! `gsm8k_strict` against what verl's scorer says of the same responses (`compute_score(...,
//! method="strict")`).

use qurl_tasks::grader::{Policy, grade};
use qurl_tasks::presets::EvalPreset;
use qurl_tasks::tasks::DatasetTask;
use qurl_tasks::{Split, Task};

fn strict(gold: &str, response: &str) -> (bool, Option<String>) {
    let graded = grade(gold, response, Policy::Gsm8kStrict);
    (graded.equal, graded.extracted)
}

/// Right answer, response, what is extracted, whether it is right.
const CASES: [(&str, &str, Option<&str>, bool); 24] = [
    ("72", "48 + 24 = 72\n#### 72", Some("72"), true),
    ("72", "#### 72 clips altogether.", Some("72"), true),
    ("72", "The answer is \\boxed{72}.", None, false),
    ("72", "72 clips altogether.", None, false),
    ("72", "", None, false),
    ("72", "####72", None, false),
    ("72", "####  72", None, false),
    ("72", "###### 72", Some("72"), true),
    ("72", "### 72", None, false),
    // One space and then the number: nothing between, not even a currency sign.
    ("72", "#### $72", None, false),
    ("72", "#### **72**", None, false),
    ("72", "####\u{a0}72", None, false),
    // Texts are compared, not numbers.
    ("72", "#### 72.", Some("72."), false),
    ("72", "#### 72.0", Some("72.0"), false),
    ("72", "#### 072", Some("072"), false),
    ("72", "#### 72$", Some("72"), true),
    ("1234567", "#### 1,234,567", Some("1234567"), true),
    ("3.5", "#### 3.5 hours", Some("3.5"), true),
    ("-5", "#### -5", Some("-5"), true),
    ("-5", "#### 5", Some("5"), false),
    ("5", "#### --5", None, false),
    // The last match counts, and what does not match is not the last.
    ("72", "#### 71\nno, wait\n#### 72", Some("72"), true),
    ("72", "#### 72\n#### 71", Some("71"), false),
    ("72", "#### 72\n#### unknown", Some("72"), true),
];

#[test]
fn verl_s_verdicts() {
    for (gold, response, extracted, right) in CASES {
        assert_eq!(strict(gold, response), (right, extracted.map(String::from)), "{gold} {response:?}");
    }
    // The right answer as verl stores it, as a row with commas has it, and as the data set's own solution.
    for gold in ["1234", "1,234", "so it is 1,234\n#### 1,234", " 1234 "] {
        assert!(strict(gold, "#### 1,234").0, "{gold}");
        assert!(!strict(gold, "#### 1,235").0, "{gold}");
    }
}

#[test]
fn only_the_last_300_characters_are_searched() {
    for filler in ["x", "é", "数", "🙂"] {
        let after = |count: usize| format!("#### 72{}", filler.repeat(count));
        assert_eq!(strict("72", &after(293)), (true, Some("72".into())), "{filler}: all 300 characters");
        assert_eq!(
            strict("72", &after(294)),
            (false, None),
            "{filler}: the mark begins one character too early"
        );
        let before = format!("{}#### 72", filler.repeat(1000));
        assert!(strict("72", &before).0, "{filler}");
        // A number cut by the window is what is left of it only with its mark.
        let cut = format!("#### 7\n#### 72{}", filler.repeat(290));
        assert_eq!(strict("72", &cut).1.as_deref(), Some("72"), "{filler}");
    }
}

#[test]
fn the_preset_scores_as_verl_does() {
    let preset = EvalPreset::named("gsm8k").unwrap();
    assert_eq!((preset.policy, preset.max_new_tokens), (Policy::Gsm8kStrict, 512));
    assert_eq!("gsm8k_strict".parse::<Policy>().unwrap(), preset.policy);
    let Some(data) = crate::common::shared_data() else { return };
    let rows = qurl_tasks::data::read(&data.join("gsm8k/train.jsonl.gz")).unwrap();
    let task = DatasetTask::new("gsm8k", rows, preset.template, preset.policy, 0.0);
    for index in 0..7473 {
        let problem = task.draw(Split::Train, 1, index).unwrap();
        let solution = task.worked_solution(&problem).unwrap();
        assert_eq!(task.verify(&problem, &solution).reward, 1.0, "{solution}");
        assert_eq!(task.verify(&problem, &format!("\\boxed{{{}}}", problem.answer)).reward, 0.0);
        let (steps, _) = solution.split_once("####").unwrap();
        assert_eq!(task.verify(&problem, steps).reward, 0.0, "{steps}");
    }
}
