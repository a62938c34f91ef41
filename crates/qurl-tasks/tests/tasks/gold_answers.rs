//! Every right answer of every data set equals itself, and nearly all are understood as formulas or words.

use qurl_tasks::data::read;
use qurl_tasks::grader::{Policy, Understood, equivalent, grade, understand};

const SETS: &[&str] = &[
    "gsm8k/train.jsonl.gz",
    "gsm8k/test.jsonl",
    "dapo17k/train.jsonl.gz",
    "deepscaler/train_partial.jsonl.gz",
    "deepscaler/train_aime.jsonl",
    "math/train.jsonl",
    "math/test.jsonl.gz",
    "math500/test.jsonl",
    "aime24/test.jsonl",
    "aime25/test.jsonl",
    "amc23/test.jsonl",
    "amc/test.jsonl",
    "minerva/test.jsonl",
    "olympiad_bench/test.jsonl",
    "countdown/train.jsonl",
    "countdown/test.jsonl",
];

#[test]
fn every_gold_answer_equals_itself() {
    let Some(data) = crate::common::shared_data() else { return };
    println!("{:36} {:>6} {:>8} {:>6} {:>5} {:>8}", "set", "rows", "formula", "words", "raw", "parsed");
    for set in SETS {
        let (mut formula, mut words, mut raw) = (0, 0, Vec::new());
        for row in read(&data.join(set)).unwrap() {
            let answer = row.answer.as_str();
            match understand(answer) {
                Understood::Formula => formula += 1,
                Understood::Words => words += 1,
                Understood::Raw => raw.push(answer.to_string()),
            }
            assert!(equivalent(answer, answer), "{set}: {answer:?} is not itself");
            let balanced = answer.matches('{').count() == answer.matches('}').count();
            if balanced {
                let boxed = format!("Therefore the result is $\\boxed{{{answer}}}$.");
                assert!(grade(answer, &boxed, Policy::Equivalence).equal, "{set}: {answer:?} in a box");
            }
        }
        let rows = formula + words + raw.len();
        let parsed = 100.0 * (rows - raw.len()) as f64 / rows as f64;
        println!("{set:36} {rows:>6} {formula:>8} {words:>6} {:>5} {parsed:>7.2}%", raw.len());
        for answer in &raw {
            println!("    not parsed: {answer:?}");
        }
        assert!(parsed >= 95.0, "{set}: only {parsed:.2}% parsed");
    }
}
