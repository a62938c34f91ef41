//! `qurl compare`: every method has a run of its own, all from the same start.

use super::support::{lines, place, wait_for};
use crate::common::qurl_in;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::SystemTime;

#[test]
fn methods_side_by_side_from_one_start() {
    let dir = place("compare");
    let few = ["--set", "sft.steps=10", "--steps", "2", "--set", "run.test_freq=1", "--seeds", "2", "--json"];
    let args: Vec<&str> = ["compare", "tiny.toml", "--methods", "full,naive,acr-uaq", "--run", "c"]
        .into_iter()
        .chain(few)
        .collect();
    let document = qurl_in(&dir, &args, "").json();
    let rows = document["rows"].as_array().expect("rows");
    assert_eq!(
        rows.iter().map(|r| r["method"].as_str()).collect::<Vec<_>>(),
        [Some("full"), Some("naive"), Some("acr-uaq")]
    );
    for (row, other) in rows.iter().zip(&rows[1..]) {
        assert_eq!(row["runs"][0]["accuracy_before"], other["runs"][0]["accuracy_before"]);
    }
    // Without quantization the two policies are one; with it they are not.
    assert_eq!(rows[0]["mismatch_kl"]["mean"], 0.0);
    assert_eq!(rows[0]["rho_max"], 1.0);
    assert_eq!(rows[0]["speed_up"], 1.0);
    assert!(rows[1]["rho_max"].as_f64().is_some_and(|rho| rho > 1.0));
    for seed in ["seed-1", "seed-2"] {
        for method in ["full", "naive", "acr-uaq"] {
            let metrics =
                std::fs::read_to_string(dir.join("c").join(seed).join(method).join("metrics.jsonl"));
            assert_eq!(metrics.expect("metrics").lines().count(), 2);
        }
    }
    let report = std::fs::read_to_string(dir.join("c/report.html")).expect("report");
    assert!(report.contains("acr-uaq") && report.contains("naive"));

    assert!(report.contains("\"group\":\"naive\""), "seeds of a method are drawn as one");
    assert!(!dir.join("c/seed-1/full/checkpoints").exists() && !dir.join("c/seed-1/full/model").exists());

    // The same command again is refused; another recipe does not continue it.
    qurl_in(&dir, &args, "").assert_bad(&["--run c: there is a comparison already (plan.json)", "--resume"]);
    let longer = ["compare", "--run", "c", "--resume", "--steps", "3"];
    qurl_in(&dir, &longer, "").assert_bad(&["the comparison in c was begun with another recipe", "2 -> 3"]);
    qurl_in(&dir, &["compare", "--run", "absent", "--resume"], "")
        .assert_bad(&["absent/plan.json", "nothing to resume"]);
    std::fs::create_dir(dir.join("other")).expect("made");
    std::fs::write(dir.join("other/notes.txt"), "").expect("written");
    qurl_in(&dir, &["compare", "tiny.toml", "--run", "other"], "")
        .assert_bad(&["holds notes.txt", "empty directory"]);
    qurl_in(&dir, &["compare", "tiny.toml", "--methods", "full,ppo2"], "")
        .assert_bad(&["ppo2", "quantized-is"]);
}

/// Methods that adapters cannot have are told before the first run, not run as if nothing were wrong.
#[test]
fn methods_that_a_recipe_cannot_have_are_refused_before_the_first_run() {
    let dir = place("compare-refused");
    let tiny = std::fs::read_to_string(dir.join("tiny.toml")).expect("the recipe");
    let table: toml::Table = toml::from_str(&tiny).expect("TOML");
    let without = |(key, _): &(String, toml::Value)| !["model", "sft", "critic"].contains(&key.as_str());
    let text: toml::Table = table.into_iter().filter(without).collect();
    std::fs::write(dir.join("lora.toml"), text.to_string()).expect("written");
    let lora = ["--set", "model.path=base", "--set", "lora.rank=4", "--set", "rollout.uaq=1"];
    let rest = ["--set", "algorithm.adv_estimator={ type = \"grpo\" }", "--set", "trainer.compute=bf16"];
    for (method, key) in [
        ("acr-uaq", "`rollout.uaq` is 1.5"),
        ("acr-stochastic", "`rollout.stochastic_rounding` is true"),
        ("rollout-forward", "`trainer.forward` is rollout"),
    ] {
        let methods = format!("naive,{method}");
        let compare = ["compare", "lora.toml", "--run", "c", "--methods", &methods];
        qurl_in(&dir, &[&compare[..], &lora, &rest].concat(), "").assert_bad(&[
            &format!("method {method}: "),
            key,
            "[lora]",
            "--methods",
        ]);
        assert!(!dir.join("c").exists());
    }
}

/// Every run of a comparison without its timings, and when its metrics were written last.
fn runs(dir: &Path) -> BTreeMap<String, (Vec<Value>, SystemTime)> {
    let mut found = BTreeMap::new();
    for seed in std::fs::read_dir(dir).expect("a directory").flatten().filter(|entry| entry.path().is_dir()) {
        for run in std::fs::read_dir(seed.path()).expect("a directory").flatten() {
            let path = run.path().join("metrics.jsonl");
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            let untimed = |line: &str| {
                let mut record: Value = serde_json::from_str(line).expect("a record");
                record.as_object_mut().expect("an object").remove("timing");
                record
            };
            let name = run.path().strip_prefix(dir).expect("inside").display().to_string();
            let written = path.metadata().and_then(|facts| facts.modified()).expect("a time");
            found.insert(name, (text.lines().map(untimed).collect(), written));
        }
    }
    found
}

#[test]
fn a_comparison_that_was_cut_continues_as_if_it_had_not_been() {
    let dir = place("compare-resumed");
    let whole = ["compare", "tiny.toml", "--methods", "full,acr-uaq", "--seeds", "2", "--json"];
    let expected = qurl_in(&dir, &[&whole[..], &["--run", "whole"]].concat(), "").json();
    // Stopped by Ctrl-C in the second run, then killed in the one after it.
    let spawn = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_qurl"));
        command.args(arguments).current_dir(&dir).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().expect("the command starts")
    };
    let mut first = spawn(&[&whole[..], &["--run", "cut"]].concat());
    let cut = dir.join("cut");
    assert!(wait_for(&mut first, || lines(&cut.join("seed-1/acr-uaq")) >= 3));
    assert!(Command::new("kill").args(["-INT", &first.id().to_string()]).status().expect("kill").success());
    let ended = first.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(130), "{said}");
    assert!(said.contains("resume with: qurl compare --run cut --resume"), "{said}");
    let resume = ["compare", "--run", "cut", "--resume", "--json"];
    let mut second = spawn(&resume);
    assert!(wait_for(&mut second, || lines(&cut.join("seed-2/full")) >= 6));
    second.kill().expect("killed");
    let stopped = second.wait_with_output().expect("it ended");
    assert!(String::from_utf8_lossy(&stopped.stderr).contains("resumes after step"), "from its checkpoint");
    let before = runs(&cut);
    let third = qurl_in(&dir, &resume, "");
    assert!(third.stderr.contains("cut/seed-1/full is finished"), "{}", third.stderr);
    let document = third.json();

    let (found, original) = (runs(&cut), runs(&dir.join("whole")));
    assert_eq!(found.keys().collect::<Vec<_>>(), original.keys().collect::<Vec<_>>());
    for (name, (records, written)) in &found {
        assert_eq!(records, &original[name].0, "{name}");
        let untouched = before.get(name).is_some_and(|(_, earlier)| earlier == written);
        assert_eq!(untouched, name.starts_with("seed-1/"), "{name}: only what is not finished is made");
    }
    for (row, other) in
        document["rows"].as_array().expect("rows").iter().zip(expected["rows"].as_array().expect("rows"))
    {
        for key in ["accuracy_final", "accuracy_best", "mismatch_kl", "rho_max", "clip_fraction"] {
            assert_eq!(row[key], other[key], "{key}");
        }
    }
}

#[test]
fn models_are_kept_where_asked_and_a_comparison_can_grow() {
    let dir = place("compare-grows");
    let few = ["--set", "sft.steps=5", "--steps", "2", "--set", "run.test_k=2"];
    let begin =
        [&["compare", "tiny.toml", "--methods", "full", "--run", "c", "--keep-models"], &few[..]].concat();
    let first = qurl_in(&dir, &begin, "");
    assert_eq!(first.status, 0, "{}", first.stderr);
    assert!(
        first.stdout.contains("| best Avg@2 % |") && !first.stdout.contains('±'),
        "one seed has no spread: {}",
        first.stdout
    );
    let run = dir.join("c/seed-1/full");
    assert!(run.join("model/model.safetensors").is_file() && run.join("checkpoints").is_dir());
    let made = run.join("metrics.jsonl").metadata().and_then(|facts| facts.modified()).expect("a time");
    let more = ["compare", "--run", "c", "--resume", "--methods", "naive", "--seeds", "2"];
    let grown = qurl_in(&dir, &more, "");
    assert_eq!(grown.status, 0, "{}", grown.stderr);
    assert!(grown.stdout.contains('±') && grown.stdout.contains("2 seeds"), "{}", grown.stdout);
    assert_eq!(runs(&dir.join("c")).len(), 4, "two methods with two seeds");
    assert_eq!(
        run.join("metrics.jsonl").metadata().and_then(|facts| facts.modified()).expect("a time"),
        made
    );
    assert!(dir.join("c/seed-2/naive/model").is_dir(), "kept as was asked for at first");

    let report = qurl_in(&dir, &["report", "c", "--json"], "").json();
    let names: Vec<&str> =
        report["runs"].as_array().expect("runs").iter().filter_map(|r| r["run"].as_str()).collect();
    assert_eq!(names, ["full, seed 1", "naive, seed 1", "full, seed 2", "naive, seed 2"]);
    // What is best is the same everywhere: Avg@k where it is measured, the start included.
    let table: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("c/compare.json")).expect("a file"))
            .expect("JSON");
    let summary: Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("summary.json")).expect("a file"))
            .expect("JSON");
    let figures = &report["runs"][0]["figures"];
    assert_eq!(summary["best"]["accuracy"], table["rows"][0]["runs"][0]["accuracy_best"]);
    assert_eq!(summary["best"]["accuracy"], figures["accuracy_best"]);
    assert_eq!(summary["best"]["step"], figures["best_step"]);
    assert_eq!(summary["best"]["step"], table["rows"][0]["runs"][0]["best_step"]);
}
