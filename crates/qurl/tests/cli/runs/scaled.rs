//! Update-aware quantization does not stack: a run hands its model on as if it had never been scaled, what is
//! scaled is marked, and what is marked is not scaled again.

use super::support::{RECIPE, place, train, trained};
use crate::common::{Run, qurl_in};
use qurl_model::hf;
use serde_json::Value;
use std::path::Path;

/// Two steps and nothing else, scaled by a power of two.
const SHORT: [&str; 6] =
    ["--set", "run.total_steps=2", "--set", "rollout.uaq=2.0", "--set", "rollout.format=f32"];

/// The mark in a directory's `config.json`.
fn mark(dir: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(dir.join("config.json")).expect("a configuration");
    let config: Value = serde_json::from_str(&text).expect("JSON");
    config.get("qurl").map(|ours| ours["uaq"].as_f64().expect("a number"))
}

fn scores(dir: &Path, model: &str) -> String {
    let done = qurl_in(dir, &["score", "--model", model], "{\"ids\":[1,5,7,9,4,6,8,3,5,2]}");
    assert_eq!(done.status, 0, "{}", done.stderr);
    done.stdout
}

/// The gains of a model's first norm.
fn gains(dir: &Path) -> Vec<f32> {
    hf::load(dir).expect("a model").params.layers[0].attn_norm.clone()
}

/// How many times larger the gains of `a` are than those of `b`, on average.
fn times(a: &Path, b: &Path) -> f32 {
    let (a, b) = (gains(a), gains(b));
    a.iter().zip(&b).map(|(a, b)| a / b).sum::<f32>() / a.len() as f32
}

/// A run that starts from `model` and hardly moves it.
fn go_on(dir: &Path, model: &str, run: &str, uaq: &str) -> Run {
    let (_, rest) = RECIPE.split_once("[task]").expect("a task");
    let (task, rest) = rest.split_once("[sft]").expect("a warm start");
    let (_, rest) = rest.split_once("[data]").expect("sizes");
    let text = format!("[model]\npath = \"{model}\"\n[task]{task}[data]{rest}");
    std::fs::write(dir.join("on.toml"), text).expect("written");
    let set = format!("rollout.uaq={uaq}");
    let more = ["--set", "run.total_steps=1", "--set", "actor.lr=1e-7", "--set", &set];
    qurl_in(dir, &[&["train", "on.toml", "--run", run][..], &more].concat(), "")
}

#[test]
fn runs_in_a_row_do_not_stack() {
    let dir = place("runs-scaled");
    trained(&dir, "first", &SHORT);
    let (model, checkpoint) = (dir.join("first/model"), dir.join("first/checkpoints/step-2"));
    assert_eq!((mark(&model), mark(&checkpoint)), (None, Some(2.0)));
    assert_eq!(mark(&checkpoint.join("critic")), Some(2.0));
    assert_eq!(times(&checkpoint, &model), 2.0);
    assert_eq!(
        scores(&dir, "first/model"),
        scores(&dir, "first/checkpoints/step-2"),
        "the same model, bit for bit"
    );

    // On from the model: scaled once more, not twice.
    assert_eq!(go_on(&dir, "first/model", "second", "1.5").status, 0);
    let second = dir.join("second/checkpoints/step-1");
    assert_eq!(mark(&second), Some(1.5));
    assert!((times(&second, &model) - 1.5).abs() < 1e-3, "{} times", times(&second, &model));
    assert!((times(&dir.join("second/model"), &model) - 1.0).abs() < 1e-3);

    // On from a checkpoint: with its own scale it is taken as it is, without one the scaling is taken off.
    for (uaq, run, expected) in [("2.0", "same", 2.0), ("1.0", "none", 1.0)] {
        let done = go_on(&dir, "first/checkpoints/step-2", run, uaq);
        assert_eq!(done.status, 0, "{}", done.stderr);
        let state = dir.join(run).join("checkpoints/step-1");
        assert_eq!(mark(&state), (expected != 1.0).then_some(f64::from(expected)));
        assert!((times(&state, &model) - expected).abs() < 1e-3, "{run}: {} times", times(&state, &model));
        assert_eq!(mark(&dir.join(run).join("model")), None);
        assert!((times(&dir.join(run).join("model"), &model) - 1.0).abs() < 1e-3, "{run}");
    }

    // Any other scale would be a second one: refused by name, before anything is written.
    let refused = go_on(&dir, "first/checkpoints/step-2", "twice", "1.5");
    refused.assert_bad(&["rollout.uaq", "1.5", "first/checkpoints/step-2", "scaled by 2", "qurl.uaq"]);
    assert!(!dir.join("twice").exists());
}

#[test]
fn a_scaled_model_is_written_where_it_is_asked_for() {
    let dir = place("runs-export-uaq");
    trained(&dir, "run", &[&SHORT[..], &["--set", "run.export_uaq=true"]].concat());
    let (model, checkpoint) = (dir.join("run/model"), dir.join("run/checkpoints/step-2"));
    assert_eq!(mark(&model), Some(2.0));
    let weights = |dir: &Path| std::fs::read(dir.join("model.safetensors")).expect("weights");
    assert_eq!(weights(&model), weights(&checkpoint));
    // What is written may be changed while the run lasts: no step depends on it.
    trained(&dir, "run", &[&SHORT[..], &["--resume", "--set", "run.export_uaq=false"]].concat());
    assert_eq!((mark(&model), mark(&checkpoint)), (None, Some(2.0)));
    train(&dir, "other", &["--set", "run.export_uaq=2"]).assert_bad(&["run.export_uaq"]);
}
