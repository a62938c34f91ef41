//! Runs in other programs that track experiments, read back by those programs themselves, offline.

use crate::common::python::python;
use crate::common::{directory, qurl_in};
use qurl_train::runlog::flatten;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// A run of three steps as `qurl train` leaves it behind, with names that are no good as file names.
fn write_run(dir: &Path, seed: u64) {
    std::fs::create_dir_all(dir).expect("made");
    let recipe = format!(
        "[run]\ntotal_steps = 3\n[task]\nsystem = \"two\\nlines: # '\"\n[trainer]\nseed = {seed}\n\
         [actor]\nlr = 1e-6\n"
    );
    std::fs::write(dir.join("recipe.toml"), recipe).expect("written");
    let line = |step: u64| {
        json!({"step": step, "reward": 0.5 / step as f64,
               "mismatch": {"kl": 1.25e-7 * step as f64, "corr": null},
               "reward_parts": {"../../x": 1.0, "näh <b>": step}, "weight_update": {"layers": [0.5, 0.25]},
               "timing": {"total": 1.5}})
        .to_string()
            + "\n"
    };
    std::fs::write(dir.join("metrics.jsonl"), (1..=3).map(line).collect::<String>()).expect("written");
    std::fs::write(dir.join("summary.json"), "{\"accuracy_before\": 0.5, \"accuracy_after\": 0.75}")
        .expect("written");
}

/// What one of our scripts prints.
fn told(python: &str, script: &str, arguments: &[&Path]) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(script);
    let output = Command::new(python).arg(script).args(arguments).output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn mlflow_reads_what_is_exported() {
    let dir = directory("export-mlflow");
    write_run(&dir.join("c/seed-1/full"), 1);
    write_run(&dir.join("c/seed-2/full"), 2);
    let export = ["export", "c", "--to", "mlflow", "--out", "the store", "--experiment", "my \"own\": 1"];
    let written = qurl_in(&dir, &[&export[..], &["--json"]].concat(), "").json();
    let experiment = written["experiment_id"].as_str().expect("an id").to_string();
    assert_eq!(written["runs"][1]["name"], "full, seed 2");
    let first = written["runs"][0]["run_id"].as_str().expect("an id").to_string();
    let home = dir.join("the store").join(&experiment).join(&first);
    let kl = std::fs::read_to_string(home.join("metrics/mismatch/kl")).expect("a metric");
    let fields: Vec<Vec<&str>> = kl.lines().map(|line| line.split(' ').collect()).collect();
    assert_eq!(fields.iter().map(|f| (f[1], f[2])).collect::<Vec<_>>()[1], ("0.00000025", "2"));
    let at = |i: usize| fields[i][0].parse::<u64>().expect("milliseconds");
    assert_eq!((at(1) - at(0), at(2) - at(1)), (1500, 1500), "as long as the steps took");
    assert!(home.join("metrics/reward_parts/__/__/x").is_file(), "no name leads out of the store");
    // Again, with one more step: the same run in the same experiment, and nothing is left beside it.
    let metrics = dir.join("c/seed-1/full/metrics.jsonl");
    let text = std::fs::read_to_string(&metrics).expect("metrics");
    std::fs::write(
        &metrics,
        text.clone() + &text.lines().next().expect("a line").replace("\"step\":1", "\"step\":4"),
    )
    .expect("written");
    let again = qurl_in(&dir, &[&export[..], &["--json"]].concat(), "").json();
    assert_eq!((&again["experiment_id"], &again["runs"][0]["run_id"]), (&json!(experiment), &json!(first)));
    let count = std::fs::read_dir(dir.join("the store").join(&experiment)).expect("an experiment").count();
    assert_eq!(count, 3, "two runs and meta.yaml");

    let Some(python) = python(&["mlflow"]) else { return };
    let found = told(&python, "mlflow_store.py", &[&dir.join("the store"), Path::new("my \"own\": 1")]);
    let runs = found["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 2, "{found}");
    let run = runs.iter().find(|run| run["id"] == first.as_str()).expect("the first run");
    assert_eq!((&run["name"], &run["status"]), (&json!("full, seed 1"), &json!("FINISHED")));
    assert_eq!(run["params"]["task.system"], "two\nlines: # '");
    assert_eq!(
        (&run["params"]["actor.lr"], &run["params"]["trainer.seed"]),
        (&json!("0.000001"), &json!("1"))
    );
    assert_eq!(run["artifacts"], json!(["recipe.toml", "summary.json"]));
    let mut expected: BTreeMap<String, Vec<(u64, f64)>> = BTreeMap::new();
    for line in std::fs::read_to_string(&metrics).expect("metrics").lines() {
        let record: Value = serde_json::from_str(line).expect("a record");
        for (name, value) in flatten(&record) {
            let name = name.replace("../../x", "__/__/x").replace("näh <b>", "n_h _b_");
            expected.entry(name).or_default().push((record["step"].as_u64().expect("a step"), value));
        }
    }
    let metrics: BTreeMap<String, Vec<(u64, f64)>> =
        serde_json::from_value(run["metrics"].clone()).expect("metrics");
    assert_eq!(metrics, expected);
}

#[test]
fn mistakes_of_export_are_named() {
    let dir = directory("export-mistakes");
    std::fs::write(dir.join("notes.txt"), "").expect("written");
    qurl_in(&dir, &["export", ".", "--to", "mlflow"], "").assert_bad(&["is no run", "notes.txt"]);
    write_run(&dir.join("run"), 1);
    qurl_in(&dir, &["export", "run"], "").assert_bad(&["--to"]);
    qurl_in(&dir, &["export", "run", "--to", "excel"], "").assert_bad(&["excel", "mlflow"]);
    qurl_in(&dir, &["export", "run", "--to", "mlflow", "--out", "notes.txt"], "")
        .assert_bad(&["--out notes.txt"]);
    qurl_in(&dir, &["export", "run", "--to", "mlflow", "--experiment", " "], "")
        .assert_bad(&["--experiment"]);
}

#[test]
fn the_script_of_the_guide_follows_a_run_into_weights_and_biases() {
    let page = include_str!("../../../../docs/tracking.md");
    let script =
        page.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a script");
    assert!(script.lines().count() <= 10, "ten lines were promised");
    let Some(python) = python(&["wandb"]) else { return };
    let dir = directory("follow-wandb");
    let run = dir.join("run");
    write_run(&run, 1);
    let whole = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
    // The run continues while the script follows it: half a line first, the rest later.
    let cut = whole.len() - 20;
    std::fs::write(run.join("metrics.jsonl"), &whole[..cut]).expect("written");
    let mut follower = Command::new(&python)
        .args(["-c", script, "run"])
        .current_dir(&dir)
        .env("WANDB_MODE", "offline")
        .env("WANDB_SILENT", "true")
        .spawn()
        .expect("python starts");
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(follower.try_wait().expect("a child").is_none(), "it waits for the last step");
    let mut file = std::fs::File::options().append(true).open(run.join("metrics.jsonl")).expect("opened");
    std::io::Write::write_all(&mut file, &whole.as_bytes()[cut..]).expect("written");
    assert!(follower.wait().expect("it ends").success());
    let found = told(&python, "wandb_file.py", &[&dir]);
    let rows = found["history"].as_array().expect("a history");
    assert_eq!(rows.len(), 3, "{found}");
    assert_eq!((&rows[2]["_step"], &rows[1]["reward"]), (&json!(3), &json!(0.25)));
    let kl = rows[2].get("mismatch.kl").or(rows[2].pointer("/mismatch/kl"));
    assert_eq!(kl, Some(&json!(3.75e-7)), "{found}");
    assert_eq!(found["config"]["actor"]["lr"], 1e-6);
    assert_eq!(found["name"], "run");
}
