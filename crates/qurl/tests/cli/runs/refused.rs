//! What is refused: another recipe, a second process, a run that is there already.

use super::support::{Outcome, lines, place, spawn, train, trained, wait_for};
use crate::common::qurl_in;

#[test]
fn another_recipe_is_refused_by_its_keys() {
    let dir = place("runs-recipe");
    trained(&dir, "run", &["--set", "run.total_steps=4"]);
    let before = Outcome::of(&dir.join("run"));
    let changed =
        ["--resume", "--set", "trainer.seed=7", "--set", "actor.lr=0.5", "--set", "run.total_steps=4"];
    train(&dir, "run", &changed).assert_bad(&[
        "another recipe",
        "trainer.seed: 1 -> 7",
        "actor.lr: 0.001 -> 0.5",
    ]);
    train(&dir, "run", &["--resume", "--set", "run.total_steps=3"])
        .assert_bad(&["run.total_steps", "has 4 already"]);
    Outcome::of(&dir.join("run")).assert_same(&before, "a refusal changes nothing");

    // Longer, and with other bookkeeping: the same run.
    let more = ["--resume", "--set", "run.total_steps=10", "--set", "trainer.keep_last=5"];
    let done = trained(&dir, "run", &more);
    assert!(done.stderr.contains("run.total_steps: 4 -> 10"), "{}", done.stderr);
    trained(&dir, "whole", &["--set", "run.total_steps=10"]);
    assert_eq!(Outcome::of(&dir.join("run")).weights(), Outcome::of(&dir.join("whole")).weights());
    let stored = std::fs::read_to_string(dir.join("run/recipe.toml")).expect("a recipe");
    assert!(stored.contains("total_steps = 10") && stored.contains("keep_last = 5"), "{stored}");

    // A schedule that looks at the end of the run would have been another one.
    let cosine = ["--set", "actor.decay=cosine", "--set", "run.total_steps=4"];
    trained(&dir, "cosine", &cosine);
    let more = ["--resume", "--set", "actor.decay=cosine", "--set", "run.total_steps=10"];
    train(&dir, "cosine", &more).assert_bad(&["run.total_steps: 4 -> 10"]);
}

#[test]
fn one_process_per_run_directory() {
    let dir = place("runs-lock");
    let long = ["--set", "run.total_steps=1000000"];
    let mut first = spawn(&dir, "run", &long);
    assert!(wait_for(&mut first, || dir.join("run/checkpoints/step-4").exists()));
    let pid = first.id().to_string();
    train(&dir, "run", &["--resume"]).assert_bad(&["another process", &pid]);
    train(&dir, "run", &[]).assert_bad(&["another process", &pid]);
    first.kill().expect("killed");
    first.wait().expect("ended");
    // What the dead process left of its lock does not matter, and without --resume nothing is overwritten.
    train(&dir, "run", &[]).assert_bad(&["there is a run already", "--resume"]);
    let step = lines(&dir.join("run")) as u64 + 4;
    let done = trained(&dir, "run", &["--resume", "--set", &format!("run.total_steps={step}")]);
    assert!(done.stderr.contains("resumes after step"), "{}", done.stderr);
}

#[test]
fn a_run_that_is_over_or_not_there() {
    let dir = place("runs-over");
    trained(&dir, "run", &["--set", "run.total_steps=2"]);
    let whole = Outcome::of(&dir.join("run"));
    let again = qurl_in(&dir, &["train", "--run", "run", "--resume", "--json"], "");
    assert_eq!(again.json()["steps"], 2);
    Outcome::of(&dir.join("run")).assert_same(&whole, "nothing is left to do");
    qurl_in(&dir, &["train", "--run", "nowhere", "--resume"], "").assert_bad(&["nowhere", "recipe.toml"]);
    qurl_in(&dir, &["train", "--resume"], "").assert_bad(&["--run"]);
    assert!(!dir.join("nowhere").exists());
}

/// What can be known at the start is said at the start, by file and key, and leaves nothing behind.
#[test]
fn mistakes_are_found_before_anything_is_trained() {
    let dir = place("runs-mistakes");
    let cases: [(&str, &[&str]); 19] = [
        ("rollout.page_size=8", &["rollout.page_size", "multiple of 16"]),
        ("rollout.kv_cache_mb=0", &["rollout.kv_cache_mb"]),
        ("rollout.kv_cache_mb=17592186044416", &["rollout.kv_cache_mb"]),
        ("rollout.max_num_seqs=0", &["rollout.max_num_seqs"]),
        ("rollout.max_num_batched_tokens=0", &["rollout.max_num_batched_tokens"]),
        ("rollout.n=1000000000", &["rollout.n", "65536"]),
        ("rollout.uaq=1e300", &["rollout.uaq", "64"]),
        ("rollout={n=4,top_k=1000,allow_truncated_sampling=true}", &["rollout.top_k", "vocabulary"]),
        ("data.train_batch_size=9223372036854775800", &["data.train_batch_size"]),
        ("data.max_response_length=100", &["data.max_response_length", "context", "64"]),
        ("data.max_prompt_length=2", &["data.max_prompt_length"]),
        ("run.stages=[{from_step=1,max_response_length=100}]", &["data.max_response_length", "64"]),
        ("run.stages=[{from_step=2,max_response_length=9},{from_step=1,max_response_length=9}]", &["[2, 1]"]),
        ("run.test_problems=0", &["run.test_problems"]),
        ("run.alarm.mismatch_kl=nan", &["run.alarm.mismatch_kl"]),
        ("algorithm.kl_loss_coef=nan", &["algorithm.kl_loss_coef"]),
        ("algorithm.entropy_coeff=1e300", &["algorithm.entropy_coeff"]),
        ("algorithm.loss_scale_factor=0.0", &["algorithm.loss_scale_factor"]),
        ("sft.batch_size=1000000000000", &["sft.batch_size"]),
    ];
    for (change, expected) in cases {
        let place = if expected[0] == "data.max_response_length" && change.starts_with("run.stages") {
            "tiny.toml, line ".to_string() // of the key that the stage replaces
        } else {
            format!("--set {change}: ")
        };
        train(&dir, "run", &["--set", change]).assert_bad(&[&[place.as_str()], expected].concat());
        assert!(!dir.join("run").exists(), "{change}: a directory is left");
    }
}

/// Nothing of others is overwritten, and no run continues by accident.
#[test]
fn a_directory_with_anything_in_it_is_not_a_new_run() {
    let dir = place("runs-strangers");
    std::fs::create_dir_all(dir.join("thesis/model")).expect("made");
    train(&dir, "thesis", &[]).assert_bad(&["thesis", "model", "empty"]);
    trained(&dir, "run", &["--set", "run.total_steps=4"]);
    std::fs::remove_file(dir.join("run/recipe.toml")).expect("removed");
    let before = Outcome::of(&dir.join("run"));
    train(&dir, "run", &["--set", "actor.lr=0.5"]).assert_bad(&["run", "empty"]);
    Outcome::of(&dir.join("run")).assert_same(&before, "a refusal changes nothing");
}
