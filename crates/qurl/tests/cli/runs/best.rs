//! The best model of a run is never deleted: not when it is the start, and not when it was seen between two
//! saves.

use super::support::{place, trained};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

fn checkpoints(run: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(run.join("checkpoints")).expect("checkpoints");
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).expect("a file")).expect("JSON")
}

#[test]
fn a_start_that_was_better_than_what_training_made_of_it_stays() {
    let dir = place("best-start");
    // Enough supervised steps to solve some problems, and a learning rate that destroys all of it.
    let ruin = [
        ["--set", "sft.steps=400"],
        ["--set", "actor.lr=0.5"],
        ["--set", "run.alarm.patience=0"],
        ["--set", "run.test_freq=2"],
        ["--set", "run.test_problems=40"],
        ["--set", "trainer.save_freq=1"],
        ["--set", "trainer.keep_last=2"],
        ["--steps", "6"],
    ]
    .concat();
    let done = trained(&dir, "run", &[&ruin[..], &["--json"]].concat());
    let summary = done.json();
    let (before, after) = (&summary["accuracy_before"], &summary["accuracy_after"]);
    assert!(before.as_f64() > after.as_f64(), "this test needs training that ruins a model: {summary}");
    let run = dir.join("run");
    let kept: BTreeSet<String> = ["step-0", "step-5", "step-6"].map(String::from).into();
    assert_eq!(checkpoints(&run), kept, "the best beside the two newest");
    let state = json(&run.join("checkpoints/step-0/state.json"));
    assert_eq!(state["test_accuracy"], *before, "step 0 carries its accuracy");
    assert_eq!(summary["best"]["step"], 0, "{summary}");
    assert_eq!(summary["best"]["accuracy"], *before);
    assert!(
        summary["best"]["model"].as_str().is_some_and(|path| path.ends_with("checkpoints/step-0")),
        "{summary}"
    );
    // Continuing does not lose it either.
    let more = [&ruin[..ruin.len() - 1], &["8", "--resume"]].concat();
    let text = trained(&dir, "run", &more).stdout;
    assert!(text.contains("after step 0: ") && checkpoints(&run).contains("step-0"), "{text}");
}

#[test]
fn a_tested_step_between_two_saves_is_saved_if_it_is_among_the_best() {
    let dir = place("best-between");
    let settings =
        [["--set", "run.test_freq=3"], ["--set", "trainer.save_freq=100"], ["--set", "trainer.keep_last=1"]]
            .concat();
    // Of three that may be kept for their accuracy, the third tested one is kept whatever it is.
    let three = [&settings[..], &["--set", "trainer.keep_best=3", "--steps", "4"]].concat();
    trained(&dir, "three", &three);
    let kept: BTreeSet<String> = ["step-0", "step-3", "step-4"].map(String::from).into();
    assert_eq!(checkpoints(&dir.join("three")), kept);
    let tested = json(&dir.join("three/checkpoints/step-3/state.json"));
    assert!(tested["test_accuracy"].is_f64(), "{tested}");
    // None is kept for its accuracy where the recipe wants none.
    let none = [&settings[..], &["--set", "trainer.keep_best=0", "--steps", "4"]].concat();
    trained(&dir, "none", &none);
    assert_eq!(checkpoints(&dir.join("none")), ["step-4".to_string()].into());
}
