//! `qurl study`: cells are runs of their own, finished ones are kept, and verdicts are those of their files.

use super::support::place;
use crate::common::qurl_in;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const STUDY: &str = r#"
name = "A small <study>"
seeds = [1, 2]
parallel = 2
[[recipes]]
name = "int8"
file = "tiny.toml"
set = ["sft.steps=10", "run.total_steps=4", "run.test_freq=2", "trainer.compute=bf16"]
[[methods]]
name = "acr"
[[methods]]
name = "straight"
method = "rollout-forward"
set = ["actor.lr=1e-4"]
[[claims]]
text = "Ratios of ACR are larger"
kind = "better"
metric = "rho_max"
better = "acr"
worse = "straight"
[[claims]]
text = "The mismatch grows"
kind = "grows"
metric = "mismatch_kl"
method = "straight"
"#;

/// When the metrics of every cell were written.
fn written(dir: &Path) -> BTreeMap<PathBuf, SystemTime> {
    let cells = ["acr", "straight"].iter().flat_map(|m| [1, 2].map(|s| format!("s/int8/{m}/seed-{s}")));
    let file = |cell: String| dir.join(cell).join("metrics.jsonl");
    let time = |file: PathBuf| (file.clone(), file.metadata().expect("metrics").modified().expect("a time"));
    cells.map(file).map(time).collect()
}

#[test]
fn a_grid_with_verdicts_that_can_be_resumed() {
    let dir = place("study");
    std::fs::write(dir.join("study.toml"), STUDY).expect("written");
    let list = qurl_in(&dir, &["study", "study.toml", "--list", "--json"], "").json();
    assert_eq!(list.as_array().map(Vec::len), Some(4));

    qurl_in(&dir, &["study", "study.toml", "--run", "s", "--only", "acr/,acrr", "--json"], "").assert_bad(&[
        "--only acrr: no cell has it",
        "int8/acr/seed-1, ",
        "int8/straight/seed-2",
    ]);
    assert!(!dir.join("s").exists(), "nothing was begun");

    // A part first, then the rest.
    let part = ["study", "study.toml", "--run", "s", "--only", "acr/", "--json"];
    let document = qurl_in(&dir, &part, "").json();
    let state =
        |d: &Value| d["cells"].as_array().expect("cells").iter().filter(|c| c["state"] == "over").count();
    assert_eq!(state(&document), 2);
    qurl_in(&dir, &part, "").assert_bad(&["--run s: has a study already", "--resume"]);
    let resume = ["study", "study.toml", "--run", "s", "--resume", "--json"];
    let document = qurl_in(&dir, &resume, "").json();
    assert_eq!(state(&document), 4);
    assert_eq!(
        std::fs::read_dir(dir.join("s/warm")).expect("warm").flatten().filter(|e| e.path().is_dir()).count(),
        2
    );

    // What the trainer runs forward with is what samples.
    let rho = |method: &str| {
        let rows = document["rows"].as_array().expect("rows");
        rows.iter().find(|r| r["method"] == method).expect("a row")["figures"]["rho_max"]["mean"].clone()
    };
    assert_eq!(rho("straight"), 1.0);
    assert!(rho("acr").as_f64().is_some_and(|rho| rho > 1.0));
    // Both methods of a seed begin with the same weights.
    let cells = document["cells"].as_array().expect("cells");
    for seed in [1, 2] {
        let mut of_seed =
            cells.iter().filter(|c| c["seed"] == seed).map(|c| &c["figures"]["accuracy_before"]);
        assert_eq!(of_seed.next(), of_seed.next());
    }
    let verdicts = document["verdicts"].as_array().expect("verdicts");
    assert!(
        verdicts.iter().all(|v| v["verdict"] == "not decided" && v["estimate"]["n"] == 2),
        "{verdicts:?}"
    );
    assert!(verdicts[0]["estimate"]["mean"].as_f64().is_some_and(|mean| mean > 0.0));
    assert_eq!(verdicts[0]["p_above"], 0.25);
    assert_eq!(verdicts[1]["estimate"]["mean"], 0.0);
    let page = std::fs::read_to_string(dir.join("s/study.html")).expect("a page");
    assert!(
        page.contains("A small &lt;study&gt;") && page.contains("Ratios of ACR") && page.contains("<svg")
    );

    // Again: nothing runs, and it says the same.
    let before = written(&dir);
    let again = qurl_in(&dir, &resume, "").json();
    assert_eq!((&again, written(&dir)), (&document, before.clone()));
    // A recipe that has changed begins anew, others stay.
    let changed = STUDY.replace("actor.lr=1e-4", "actor.lr=2e-4");
    std::fs::write(dir.join("study.toml"), changed).expect("written");
    assert_eq!(state(&qurl_in(&dir, &resume, "").json()), 4);
    let after = written(&dir);
    for (file, time) in &before {
        let kept = file.display().to_string().contains("acr");
        assert_eq!(after[file] == *time, kept, "{}", file.display());
    }

    std::fs::write(dir.join("study.toml"), STUDY.replace("rollout-forward", "none")).expect("written");
    qurl_in(&dir, &["study", "study.toml"], "").assert_bad(&["study.toml", "`methods.method` is \"none\""]);
    qurl_in(&dir, &["study", "absent.toml"], "").assert_bad(&["absent.toml"]);
}
