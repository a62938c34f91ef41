//! `run.test_k`: evaluations inside training and in comparisons give Avg@k beside the greedy accuracy.

use super::support::{Outcome, place, trained};
use crate::common::qurl_in;
use serde_json::Value;

#[test]
fn evaluations_of_a_run_sample_too_and_a_resumed_run_has_the_same() {
    let dir = place("avg-at-k");
    let k = ["--set", "run.test_k=4", "--set", "sft.steps=200", "--set", "run.test_freq=4", "--steps", "8"];
    let summary = trained(&dir, "whole", &[&k[..], &["--json"]].concat()).json();
    for key in ["accuracy_before", "avg_at_k_before", "accuracy_after", "avg_at_k_after"] {
        assert!(summary[key].as_f64().is_some_and(|x| (0.0..=1.0).contains(&x)), "{key}: {summary}");
    }
    // Eight problems of four samples each: an average in steps of one in thirty-two.
    let steps = summary["avg_at_k_before"].as_f64().expect("a number") * 32.0;
    assert_eq!(steps, steps.round(), "{summary}");
    let text = std::fs::read_to_string(dir.join("whole/metrics.jsonl")).expect("metrics");
    for record in text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a record")) {
        let due = record["step"].as_u64().is_some_and(|step| step.is_multiple_of(4));
        assert_eq!(record["test_avg_at_k"].is_f64(), due, "{record}");
        assert_eq!(record["test_accuracy"].is_f64(), due, "{record}");
    }
    // What is best goes by Avg@k.
    assert!(summary["best"]["accuracy"].as_f64() >= summary["avg_at_k_before"].as_f64(), "{summary}");

    let half = [&k[..k.len() - 1], &["4"]].concat();
    trained(&dir, "resumed", &half);
    let resumed = trained(
        &dir,
        "resumed",
        &["--resume", "--steps", "8", "--set", "run.test_k=4", "--json"]
            .into_iter()
            .chain(["--set", "sft.steps=200", "--set", "run.test_freq=4"])
            .collect::<Vec<_>>(),
    )
    .json();
    assert_eq!(resumed["avg_at_k_before"], summary["avg_at_k_before"], "kept in the checkpoint");
    assert_eq!(resumed["best"]["accuracy"], summary["best"]["accuracy"]);
    let tested = |run: &str| -> Vec<Value> {
        let text = std::fs::read_to_string(dir.join(run).join("metrics.jsonl")).expect("metrics");
        let records = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a record"));
        records.map(|record| record["test_avg_at_k"].clone()).collect()
    };
    assert_eq!(tested("resumed"), tested("whole"));
    let (whole, resumed) = (Outcome::of(&dir.join("whole")), Outcome::of(&dir.join("resumed")));
    assert!(whole.weights() == resumed.weights(), "sampling in an evaluation leaves no trace in training");
}

#[test]
fn a_comparison_has_a_column_for_it() {
    let dir = place("avg-at-k-compare");
    let args = ["compare", "tiny.toml", "--run", "both", "--methods", "naive,acr", "--steps", "2"];
    let plain = qurl_in(&dir, &args, "");
    assert!(plain.status == 0 && !plain.stdout.contains("Avg@"), "{}{}", plain.stdout, plain.stderr);
    let sampled = [&args[..3], &["sampled"], &args[4..], &["--set", "run.test_k=2"]].concat();
    let sampled = qurl_in(&dir, &sampled, "");
    assert!(
        sampled.status == 0 && sampled.stdout.contains("| Avg@2 % |"),
        "{}{}",
        sampled.stdout,
        sampled.stderr
    );
    let text = std::fs::read_to_string(dir.join("sampled/compare.json")).expect("figures");
    let document: Value = serde_json::from_str(&text).expect("JSON");
    let row = &document["rows"][0];
    assert!(row["avg_at_k_final"]["mean"].is_f64() && row["runs"][0]["avg_at_k_before"].is_f64(), "{row}");
}
