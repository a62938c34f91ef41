//! Ctrl-C: finish the step, save, say how to resume; a second one stops at once.
#![cfg(unix)]

use super::support::{Outcome, lines, place, signal, spawn, spawn_with, trained, wait_for};
use std::io::{BufRead, BufReader, Read};
use std::process::Child;

/// Status and what was said.
fn end(mut child: Child) -> (Option<i32>, String) {
    let mut said = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    (child.wait().expect("ended").code(), said)
}

#[test]
fn ctrl_c_saves_and_says_how_to_resume() {
    let dir = place("runs-interrupted");
    // Only Ctrl-C saves here, so the checkpoint that the run resumes from is its own.
    let more = ["--set", "trainer.save_freq=0", "--set", "run.total_steps=300"];
    for (name, status) in [("INT", 130), ("TERM", 143)] {
        let run = dir.join(name);
        let mut child = spawn(&dir, name, &more);
        assert!(wait_for(&mut child, || lines(&run) >= 3));
        signal(&child, name);
        let (code, said) = end(child);
        assert_eq!(code, Some(status), "{said}");
        assert!(said.contains(&format!("resume with: qurl train --run {name} --resume")), "{said}");
        let done = lines(&run);
        assert!((3..300).contains(&done), "{done} steps");
        assert!(said.contains(&format!("stopped after step {done};")), "{said}");
        assert!(run.join(format!("checkpoints/step-{done}/manifest.json")).exists());
    }
    // As it says, without naming the recipe; and the same as a run that was never stopped.
    let done = crate::common::qurl_in(&dir, &["train", "--run", "INT", "--resume", "--steps", "300"], "");
    assert_eq!(done.status, 0, "{}", done.stderr);
    trained(&dir, "whole", &more);
    let (resumed, whole) = (Outcome::of(&dir.join("INT")), Outcome::of(&dir.join("whole")));
    assert_eq!(resumed.weights(), whole.weights());
}

#[test]
fn ctrl_c_in_the_warm_start() {
    let dir = place("runs-interrupted-warm");
    let mut child = spawn(&dir, "run", &["--set", "sft.steps=1000000"]);
    assert!(wait_for(&mut child, || dir.join("run/metrics.jsonl").exists()));
    signal(&child, "INT");
    let (code, said) = end(child);
    assert_eq!(code, Some(130), "{said}");
    assert!(said.contains("warm start") && said.contains("--resume"), "{said}");
}

#[test]
fn a_second_ctrl_c_stops_at_once() {
    let dir = place("runs-interrupted-twice");
    // One step of this takes far longer than it takes to send a signal.
    let more = [
        ["--set", "data.train_batch_size=20000"],
        ["--set", "rollout.n=16"],
        ["--set", "algorithm.kl_in_reward.kl_ctrl.horizon=1e6"],
    ]
    .concat();
    let mut child = spawn_with(&dir, "run", &more, &[("RUST_LOG", "qurl_train=debug")]);
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut said = String::new();
    while !said.contains("step begins") {
        assert!(stderr.read_line(&mut said).expect("text") > 0, "it ended before its first step: {said}");
    }
    signal(&child, "INT");
    std::thread::sleep(std::time::Duration::from_millis(50)); // two at once would be one
    signal(&child, "INT");
    stderr.read_to_string(&mut said).expect("text");
    let code = child.wait().expect("ended").code();
    assert_eq!(code, Some(130), "{said}");
    assert!(!said.contains("stopped after"), "it waited for the step: {said}");
    assert_eq!(lines(&dir.join("run")), 0);
}
