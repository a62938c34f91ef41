//! What a run writes: every number for TensorBoard, rollouts for people, events for RUST_LOG, checkpoints for
//! transformers.

use super::support::{place, trained};
use crate::common::python::python;
use crate::common::{qurl_in, qurl_with};
use qurl_train::runlog::flatten;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn tensorboard_and_transformers_read_what_is_written() {
    let dir = place("runs-python");
    trained(&dir, "run", &["--set", "run.total_steps=6"]);
    let mut expected: BTreeMap<String, Vec<(u64, f64)>> = BTreeMap::new();
    for record in json_lines(&dir.join("run/metrics.jsonl")) {
        let step = record["step"].as_u64().expect("a step");
        for (tag, value) in flatten(&record) {
            expected.entry(tag).or_default().push((step, f64::from(value as f32)));
        }
    }
    for tag in [
        "reward",
        "reward_parts/format",
        "test_reward",
        "mismatch/kl",
        "timing/rollout",
        "timing/log",
        "timing/checkpoint",
        "weight_update/layers/0",
    ] {
        assert!(expected.contains_key(tag), "{tag} of {:?}", expected.keys());
    }
    let Some(python) = python(&["tensorboard", "torch", "transformers"]) else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/run_directory.py");
    let checkpoint = dir.join("run/checkpoints/step-6");
    let output = Command::new(python).arg(script).arg(dir.join("run/tensorboard")).arg(&checkpoint).output();
    let output = output.expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let scalars: BTreeMap<String, Vec<(u64, f64)>> =
        serde_json::from_value(found["scalars"].clone()).expect("scalars");
    assert_eq!(scalars.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (tag, values) in &expected {
        assert_eq!(&scalars[tag], values, "{tag}");
    }
    let line = json!({"ids": found["ids"]}).to_string();
    let model = checkpoint.display().to_string();
    let scored = qurl_in(&dir, &["score", "--model", &model, "--format", "f32"], &line);
    let ours = scored.json()["logprobs"].clone();
    for (ours, theirs) in ours
        .as_array()
        .expect("log-probs")
        .iter()
        .skip(1)
        .zip(found["logprobs"].as_array().expect("log-probs"))
    {
        let (ours, theirs) = (ours.as_f64().expect("a number"), theirs.as_f64().expect("a number"));
        assert!((ours - theirs).abs() < 1e-4, "{ours} against {theirs}");
    }
}

#[test]
fn rollouts_for_people() {
    let dir = place("runs-rollouts");
    trained(&dir, "run", &["--set", "run.total_steps=10", "--set", "run.rollout_log_samples=5"]);
    let names = |folder: &str| {
        let entries = std::fs::read_dir(dir.join("run").join(folder)).expect("a folder").flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names("rollouts"), ["step-000001.jsonl", "step-000005.jsonl", "step-000010.jsonl"]);
    let samples = json_lines(&dir.join("run/rollouts/step-000010.jsonl"));
    assert_eq!(samples.len(), 5);
    for sample in samples {
        assert_eq!(sample["step"], 10);
        let strings =
            |key: &str| sample[key].as_str().unwrap_or_else(|| panic!("{key} of {sample}")).to_string();
        assert!(!strings("problem").is_empty() && !strings("prompt").is_empty());
        let tokens: Vec<String> = serde_json::from_value(sample["tokens"].clone()).expect("texts");
        let special = ["<pad>", "<bos>", "<eos>", "<unk>"];
        let said =
            tokens.iter().filter(|token| !special.contains(&token.as_str())).cloned().collect::<String>();
        assert_eq!(said, strings("response"));
        let floats = |key: &str| serde_json::from_value::<Vec<f32>>(sample[key].clone()).expect("numbers");
        let (rho, behav, prox) = (floats("rho"), floats("behav"), floats("prox"));
        assert_eq!([rho.len(), behav.len(), prox.len()], [tokens.len(); 3]);
        assert_eq!(sample["ids"].as_array().expect("ids").len(), tokens.len());
        for ((rho, behav), prox) in rho.iter().zip(behav).zip(prox) {
            assert!((f64::from(*rho) - (f64::from(prox) - f64::from(behav)).exp()).abs() < 1e-6);
        }
        let parts = &sample["reward_parts"];
        assert!(
            sample["correct"].is_boolean() && parts["format"].is_f64() && sample["reward"].is_f64(),
            "{sample}"
        );
        assert!(["stop", "length"].contains(&sample["finish"].as_str().expect("a word")));
        // Advantages of generalized estimation differ from token to token; their mean stands beside them.
        let mean = sample["advantage"].as_f64().expect("a number");
        let each = floats("advantages");
        assert!((each.iter().map(|&a| f64::from(a)).sum::<f64>() / each.len() as f64 - mean).abs() < 1e-9);
    }
    trained(&dir, "none", &["--set", "run.total_steps=2", "--set", "run.rollout_log_freq=0"]);
    assert_eq!(std::fs::read_dir(dir.join("none/rollouts")).expect("a folder").count(), 0);
}

#[test]
fn rust_log_traces_on_standard_error() {
    let dir = place("runs-traced");
    let args = ["train", "tiny.toml", "--run", "run", "--set", "run.total_steps=2", "--quiet", "--json"];
    let traced = qurl_with(&dir, &args, &[("RUST_LOG", "qurl_train=debug")], "");
    traced.json();
    assert!(
        traced.stderr.contains("checkpoint written") && traced.stderr.contains("step done"),
        "{}",
        traced.stderr
    );
    let args = ["train", "tiny.toml", "--run", "silent", "--set", "run.total_steps=2", "--quiet", "--json"];
    let silent = qurl_with(&dir, &args, &[], "");
    assert_eq!(silent.stderr, "");
}
