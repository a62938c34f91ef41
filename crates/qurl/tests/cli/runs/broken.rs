//! Training that is broken ends with an error that says so, and the last model that was seen to work is kept
//! and named.

use super::support::{lines, place, train, trained};
use crate::common::qurl_in;
use serde_json::Value;
use std::path::Path;

/// The model that the message names works: it can be loaded and sampled from.
fn assert_last_good(dir: &Path, stderr: &str) {
    let (_, named) = stderr.trim_end().rsplit_once("the last good model: ").expect("a model is named");
    assert!(named.ends_with("checkpoints/step-0"), "{stderr}");
    let prompt = ["generate", "--model", named, "--prompt-ids", "3,4", "--max-new", "4", "--json"];
    let sampled = qurl_in(dir, &prompt, "").json();
    assert!(sampled["samples"][0]["logprobs"][0].as_f64().is_some_and(f64::is_finite), "{sampled}");
}

#[test]
fn a_learning_rate_and_a_weight_decay_that_break_training_end_the_run() {
    let dir = place("broken");
    for (run, setting) in [("lr", "actor.lr=1e3"), ("decay", "actor.optim.weight_decay=1e6")] {
        let broken = train(&dir, run, &["--set", setting]);
        assert_eq!(broken.status, 1, "{}", broken.stderr);
        assert!(broken.stderr.contains("training is broken"), "{}", broken.stderr);
        let symptoms =
            ["uniform logits", "always writes the same", "were skipped", "not finite", "gradients are zero"];
        assert!(symptoms.iter().any(|s| broken.stderr.contains(s)), "{}", broken.stderr);
        assert_last_good(&dir, &broken.stderr);
        let run = dir.join(run);
        assert!(lines(&run) < 10, "it ends soon");
        assert!(!run.join("model").exists(), "broken weights are not the run's model");
        let summary = std::fs::read_to_string(run.join("summary.json")).expect("a summary");
        let summary: Value = serde_json::from_str(&summary).expect("JSON");
        assert!(
            summary["broken"].as_str().is_some_and(|why| why.contains("training is broken")),
            "{summary}"
        );
        assert!(summary["last_good"].as_str().is_some_and(|path| path.ends_with("step-0")), "{summary}");
        assert!(run.join("report.html").exists());
    }
}

/// The last step has no next one whose rollouts would show what it did; nor does one that nothing follows but
/// an evaluation.
#[test]
fn a_model_that_the_last_step_broke_is_not_saved() {
    let dir = place("broken-last");
    for (run, steps) in [("one", "1"), ("four", "4")] {
        let lr = ["--set", "actor.lr=1e30", "--set", "rollout.uaq=1", "--steps", steps];
        let tested = ["--set", "run.test_freq=1", "--set", "run.alarm.patience=0"];
        let broken = train(&dir, run, &[&lr[..], &tested[..]].concat());
        assert_eq!(broken.status, 1, "{}", broken.stderr);
        assert!(
            broken.stderr.contains("training is broken: step 1: the model is not finite"),
            "{}",
            broken.stderr
        );
        assert_last_good(&dir, &broken.stderr);
        let run = dir.join(run);
        assert!(!run.join("model").exists(), "broken weights are not the run's model");
        assert!(!run.join("checkpoints/step-1").exists(), "nor a checkpoint");
        assert_eq!(lines(&run), 1, "the step that broke it is in the log");
    }
}

#[test]
fn patience_is_a_setting() {
    let dir = place("broken-patience");
    // Large enough to saturate the softmax, too small for a norm to overflow, which no patience bears.
    let patient = ["--set", "actor.lr=10", "--set", "run.alarm.patience=0", "--steps", "6"];
    let done = trained(&dir, "patient", &patient);
    assert!(
        done.stderr.contains("uniform logits") || done.stderr.contains("always writes"),
        "{}",
        done.stderr
    );
    assert_eq!(lines(&dir.join("patient")), 6);
    let hasty = train(&dir, "hasty", &["--set", "actor.lr=10", "--set", "run.alarm.patience=1"]);
    assert_eq!(hasty.status, 1, "{}", hasty.stderr);
    assert!(
        hasty.stderr.contains("1 steps in a row") || hasty.stderr.contains("not finite"),
        "{}",
        hasty.stderr
    );
}
