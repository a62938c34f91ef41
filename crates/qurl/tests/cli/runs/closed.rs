//! Outputs that are closed or full: the work continues and is saved, and nothing panics.

use super::support::{lines, place};
use crate::common::{closed, full, qurl_in, qurl_to};
use std::path::Path;

const FEW: [&str; 4] = ["--set", "sft.steps=3", "--set", "run.total_steps=2"];

fn train(run: &str) -> Vec<&str> {
    [&["train", "tiny.toml", "--run", run][..], &FEW].concat()
}

fn assert_saved(run: &Path) {
    assert_eq!(lines(run), 2);
    for file in ["model/model.safetensors", "report.html", "summary.json"] {
        assert!(run.join(file).exists(), "{file}");
    }
}

#[test]
fn a_run_outlives_the_readers_of_its_outputs() {
    let dir = place("closed-train");
    assert_eq!(qurl_to(&dir, &train("both"), closed(), closed()), 0, "as in 2>&1 | head -1");
    assert_saved(&dir.join("both"));
    if let Some(full) = full() {
        let file = |name: &str| std::fs::File::create(dir.join(name)).expect("a file");
        assert_eq!(qurl_to(&dir, &train("full-stderr"), file("out"), full.try_clone().expect("a handle")), 0);
        assert_saved(&dir.join("full-stderr"));
        assert!(
            std::fs::read_to_string(dir.join("out")).expect("text").contains("accuracy"),
            "the result is printed"
        );
        assert_eq!(
            qurl_to(&dir, &train("full-stdout"), full, file("err")),
            1,
            "the result could not be printed"
        );
        assert_saved(&dir.join("full-stdout"));
        let said = std::fs::read_to_string(dir.join("err")).expect("text");
        assert!(
            said.contains("qurl: standard output cannot be written") && !said.contains("panicked"),
            "{said}"
        );
    }
    for more in [&[][..], &["--json"]] {
        assert_eq!(qurl_to(&dir, &[&["report", "both"], more].concat(), closed(), closed()), 0);
    }
}

#[test]
fn so_do_supervised_training_and_comparisons() {
    let dir = place("closed-sft");
    let sft = ["sft", "tiny.toml", "--set", "sft.steps=3", "--run", "sft"];
    assert_eq!(qurl_to(&dir, &sft, closed(), closed()), 0);
    let generate = ["generate", "--model", "sft/model", "--prompt-ids", "3,4", "--max-new", "4", "--json"];
    qurl_in(&dir, &generate, "").json();

    let eval = [
        "eval",
        "--model",
        "sft/model",
        "--task",
        "addition:1",
        "--limit",
        "4",
        "--k",
        "1",
        "--max-new",
        "8",
    ];
    assert_eq!(qurl_to(&dir, &[&eval[..], &["--out", "eval"]].concat(), closed(), closed()), 0);
    assert!(dir.join("eval/summary.json").exists());

    let compare = [&["compare", "tiny.toml", "--methods", "full", "--run", "c"][..], &FEW].concat();
    assert_eq!(qurl_to(&dir, &compare, closed(), closed()), 0);
    assert!(dir.join("c/compare.json").exists());
}
