//! Where `qurl sft` and `qurl report` write: looked at before the work, and never over something else
//! unasked.

use super::support::{RECIPE, place, trained};
use crate::common::qurl_in;

#[test]
fn a_place_that_cannot_be_used_is_refused_before_training() {
    let dir = place("supervised-places");
    let sft = |more: &[&str]| qurl_in(&dir, &[&["sft", "tiny.toml", "--steps", "2"], more].concat(), "");
    for run in ["tiny.toml", "tiny.toml/model"] {
        let refused = sft(&["--run", run]);
        refused.assert_bad(&["--run", run]);
        assert!(!refused.stderr.contains("loss"), "it trained first: {}", refused.stderr);
    }
    assert_eq!(sft(&["--run", "run"]).status, 0);
    let weights = || std::fs::read(dir.join("run/model/model.safetensors")).expect("weights");
    let before = weights();
    sft(&["--run", "run", "--set", "trainer.seed=9"])
        .assert_bad(&["--run run: there is a run already (recipe.toml); choose another directory"]);
    std::fs::create_dir_all(dir.join("full")).expect("created");
    std::fs::write(dir.join("full/notes.txt"), "mine").expect("written");
    sft(&["--run", "full"]).assert_bad(&["--run full: holds notes.txt, expected a new or empty directory"]);
    assert_eq!(weights(), before);

    // The model of one run is the start of the next, and not written over.
    let task = RECIPE.find("[task]").expect("a task");
    std::fs::write(dir.join("from.toml"), format!("[model]\npath = \"run/model\"\n\n{}", &RECIPE[task..]))
        .expect("written");
    let from = |run: &str| qurl_in(&dir, &["sft", "from.toml", "--steps", "2", "--run", run], "");
    from("run/model").assert_bad(&["--run run/model: holds"]);
    assert_eq!(from("next").status, 0);
    assert_eq!(weights(), before);
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
    for run in ["runs/sft-1", "runs/sft-2"] {
        let summary = qurl_in(&dir, &["sft", "tiny.toml", "--steps", "2", "--json"], "").json();
        assert_eq!((&summary["run"], &summary["model"]), (&run.into(), &format!("{run}/model").into()));
        assert!(dir.join(run).join("model/model.safetensors").exists());
    }
}

#[test]
fn a_report_needs_a_place_that_can_be_written() {
    let dir = place("report-places");
    trained(&dir, "run", &["--set", "sft.steps=2", "--set", "run.total_steps=1"]);
    qurl_in(&dir, &["report", "run", "--out", "tiny.toml/x.html"], "")
        .assert_bad(&["tiny.toml/x.html", "cannot be written"]);
    qurl_in(&dir, &["report", "run", "--out", "no/such/x.html"], "").assert_bad(&["no/such/x.html"]);
}
