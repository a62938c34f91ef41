//! Where `qurl sft` and `qurl report` write: looked at before the work, and never over something else unasked.

use super::common::qurl_in;
use super::support::{RECIPE, place, trained};
use std::path::Path;

#[test]
fn a_place_that_cannot_be_used_is_refused_before_training() {
    let dir = place("supervised-places");
    let sft =
        |more: &[&str]| qurl_in(&dir, &[&["sft", "tiny.toml", "--set", "sft.steps=2"], more].concat(), "");
    for out in ["tiny.toml", "tiny.toml/model"] {
        let refused = sft(&["--out", out]);
        refused.assert_bad(&["--out", out]);
        assert!(!refused.stderr.contains("loss"), "it trained first: {}", refused.stderr);
    }
    if Path::new("/proc/self").exists() {
        let refused = sft(&["--out", "/proc", "--force"]);
        refused.assert_bad(&["--out: /proc: cannot be written to"]);
        assert!(!refused.stderr.contains("loss"), "it trained first: {}", refused.stderr);
    }

    assert_eq!(sft(&["--out", "model"]).status, 0);
    let weights = || std::fs::read(dir.join("model/model.safetensors")).expect("weights");
    let before = weights();
    let other = ["--out", "model", "--set", "trainer.seed=9"];
    sft(&other).assert_bad(&["--out: model: is not empty", "--force"]);
    assert_eq!(weights(), before);
    assert_eq!(sft(&[&other[..], &["--force"]].concat()).status, 0);
    assert_ne!(weights(), before);
    let names = std::fs::read_dir(dir.join("model")).expect("a directory").flatten();
    assert!(
        names.into_iter().all(|entry| !entry.file_name().to_string_lossy().starts_with('.')),
        "nothing is left over"
    );

    // Not over the model that it starts from, by whatever name.
    let task = RECIPE.find("[task]").expect("a task");
    std::fs::write(dir.join("from.toml"), format!("[model]\npath = \"model\"\n\n{}", &RECIPE[task..]))
        .expect("written");
    let (before, args) = (weights(), ["sft", "from.toml", "--set", "sft.steps=2", "--force", "--out"]);
    for out in ["model", "./model/../model"] {
        qurl_in(&dir, &[&args[..], &[out]].concat(), "").assert_bad(&["--out", out, "is the model itself"]);
    }
    assert_eq!(weights(), before);
    assert_eq!(qurl_in(&dir, &[&args[..], &["next"]].concat(), "").status, 0);
}

#[test]
fn lines_of_examples_are_named_and_causes_said_once() {
    let dir = place("supervised-lines");
    let sft = || {
        qurl_in(&dir, &["sft", "tiny.toml", "--set", "sft.steps=2", "--set", "sft.files=[\"x.jsonl\"]"], "")
    };
    let good = "{\"prompt\":\"1+2=\",\"response\":\"3\"}\n";
    std::fs::write(dir.join("x.jsonl"), format!("\u{feff}{good}")).expect("written");
    assert_eq!(sft().status, 0, "{}", sft().stderr);
    std::fs::write(dir.join("x.jsonl"), [good.as_bytes(), b"{\"prompt\":\"\xff\"}\n"].concat())
        .expect("written");
    sft().assert_bad(&["x.jsonl, line 2: not UTF-8"]);

    let missing = qurl_in(&dir, &["train", "nowhere.toml"], "");
    missing.assert_bad(&["nowhere.toml"]);
    assert_eq!(missing.stderr.matches("os error").count(), 1, "{}", missing.stderr);
}

#[test]
fn models_without_a_place_get_one_each() {
    let dir = place("supervised-free");
    for model in ["runs/sft-1", "runs/sft-2"] {
        let summary = qurl_in(&dir, &["sft", "tiny.toml", "--set", "sft.steps=2", "--json"], "").json();
        assert_eq!(summary["model"], model);
        assert!(dir.join(model).join("model.safetensors").exists());
    }
}

#[test]
fn a_report_needs_a_place_that_can_be_written() {
    let dir = place("report-places");
    trained(&dir, "run", &["--set", "sft.steps=2", "--set", "run.total_steps=1"]);
    qurl_in(&dir, &["report", "run", "--out", "tiny.toml/x.html"], "")
        .assert_bad(&["tiny.toml/x.html", "cannot be made"]);
    qurl_in(&dir, &["report", "run", "--out", "no/such/x.html"], "").assert_bad(&["no/such/x.html"]);
}
