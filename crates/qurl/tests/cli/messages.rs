//! What is said where a recipe, a data set or a model's files cannot be used: the place to blame, once, and
//! nothing that contradicts it.

use crate::common::{Run, directory, qurl_in, tiny_model};
use crate::models::{TempDir, qurl, saved};
use qurl_model::Family;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const RECIPE: &str = r#"[model]
path = "model"
[task]
type = "dataset"
files = ["problems.jsonl"]
held_out = 0.3
[[task.rewards]]
type = "correct"
weight = 1.0
[data]
train_batch_size = 2
max_prompt_length = 8
max_response_length = 8
[rollout]
n = 2
kv_cache_mb = 4
[algorithm]
adv_estimator = { type = "grpo" }
[actor]
lr = 1e-4
ppo_mini_batch_size = 2
[run]
total_steps = 1
test_problems = 4
[trainer]
compute = "f32"
"#;

fn place(name: &str) -> PathBuf {
    let dir = directory(name);
    tiny_model(&dir.join("model"), "0123456789+=");
    std::fs::write(dir.join("r.toml"), RECIPE).expect("written");
    let problem = |n: u32| format!("{}\n", json!({"problem": format!("{n}+1="), "answer": n + 1}));
    std::fs::write(dir.join("problems.jsonl"), (0..20).map(problem).collect::<String>()).expect("written");
    dir
}

fn train(dir: &Path, more: &[&str]) -> Run {
    qurl_in(dir, &[&["train", "r.toml", "--run", "run"], more].concat(), "")
}

/// The command is refused with this and no other line.
fn refused(dir: &Path, more: &[&str], message: &str) {
    let run = train(dir, more);
    run.assert_bad(&[]);
    assert_eq!(run.stderr.trim_end(), format!("qurl: {message}"));
}

#[test]
fn overrides_are_named_and_doubts_are_not_said_beside_errors() {
    let dir = place("messages-overrides");
    refused(
        &dir,
        &["--set", "task.held_out=0"],
        "--set task.held_out=0: key `task.held_out` leaves no problem to measure on: it is 0; hold out a \
         share of task.files with it, or give task.test_files",
    );
    refused(
        &dir,
        &["--set", "task.held_out=0.999"],
        "r.toml, line 5: key `task.files` leaves no problem to train on: task.held_out = 0.999 holds out the \
         others",
    );
    refused(
        &dir,
        &["--set", "task.rewards[0].weight=0"],
        "--set task.rewards[0].weight=0: key `task.rewards` is a list of weights of 0, expected at least one \
         other weight",
    );
    refused(
        &dir,
        &["--set", "task.rewards[0].weight=two"],
        "--set task.rewards[0].weight=two: key `task.rewards[0].weight` is \"two\", expected a number from \
         -1000000 to 1000000",
    );
    refused(
        &dir,
        &["--set", "task.rewards[1].weight=2"],
        "--set task.rewards[1].weight=2: `rewards` has 1 entries, the first of them `rewards[0]`",
    );
    refused(
        &dir,
        &["--set", "task.rewards.weight=2"],
        "--set task.rewards.weight=2: `rewards` is a list; `rewards[0]` is its first entry",
    );
    let steps = train(&dir, &["--steps", "18446744073709551615"]);
    steps.assert_bad(&["'--steps <STEPS>'", "is not in 1..=9223372036854775807"]);
    let row =
        "key `task.prompt.user`, line 1: there is no \"nope\"; there are id, problem (row problems.jsonl:1)";
    refused(&dir, &["--set", "task.prompt.user={{ nope }}"], row);
    assert!(!dir.join("run").exists());
    let done = train(&dir, &["--set", "task.rewards[0].weight=2", "--quiet"]);
    assert_eq!(done.status, 0, "{}", done.stderr);
    let recipe = std::fs::read_to_string(dir.join("run/recipe.toml")).expect("a recipe");
    assert!(recipe.contains("weight = 2"), "{recipe}");
}

#[test]
fn a_budget_counts_on_a_cpu() {
    let dir = place("messages-budget");
    let refused = train(&dir, &["--set", "trainer.memory_budget_mb=1"]);
    refused.assert_bad(&["the machine (trainer.memory_budget_mb = 1)", "together"]);
}

/// A directory with a model whose `config.json` has another value.
fn with_key(key: &str, value: Value) -> TempDir {
    let model = saved(Family::Qwen2);
    let path = model.path().join("config.json");
    let text = std::fs::read_to_string(&path).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config[key] = value;
    std::fs::write(path, config.to_string()).expect("written");
    model
}

#[test]
fn files_of_a_model_are_named_with_the_key() {
    let generate = |model: &TempDir| qurl(&["generate", "--model", model.text(), "--max-new", "2", "1"]);
    let eval = |model: &TempDir| {
        qurl(&["eval", "--model", model.text(), "--task", "addition:1", "--limit", "1", "--k", "1"])
    };
    let heads = with_key("num_attention_heads", json!(0));
    generate(&heads).assert_bad(&["config.json: key `num_attention_heads` is 0, expected", "at least 1"]);
    let eos = with_key("eos_token_id", json!(9999));
    for run in [generate(&eos), eval(&eos)] {
        run.assert_bad(&["/config.json: key `eos_token_id` is 9999, expected", "less than vocab_size = "]);
    }
    let eos = saved(Family::Qwen2);
    std::fs::write(eos.path().join("generation_config.json"), r#"{"eos_token_id": [1, 7777]}"#)
        .expect("written");
    generate(&eos).assert_bad(&["/generation_config.json: key `eos_token_id` is 7777"]);
    let chat = saved(Family::Qwen2);
    std::fs::write(chat.path().join("chat_template.jinja"), "{{ 1 + }}").expect("written");
    let file = format!("{}: line 1 of the chat template", chat.path().join("chat_template.jinja").display());
    generate(&chat).assert_bad(&[&file]);
}

#[test]
fn a_line_is_counted_once() {
    let dir = place("messages-lines");
    std::fs::write(dir.join("bad.jsonl"), "{\"problem\": \"1\", \"answer\": }\n").expect("written");
    let eval = ["eval", "--model", "model", "--k", "1", "--out", "e", "--data"];
    let said = qurl_in(&dir, &[&eval[..], &["bad.jsonl"]].concat(), "");
    said.assert_bad(&["bad.jsonl, line 1: not a JSON object: expected value at column 28"]);
    let lines = "{\"ids\": [1, 2]}\n{\"ids\": x}\n";
    let said = qurl_in(&dir, &["score", "--model", "model"], lines);
    said.assert_bad(&["standard input, line 2: expected value at column 9; expected"]);
    let said = qurl_in(&dir, &["generate", "--model", "model", "--prompts", "-"], "{\"prompt\": x}\n");
    said.assert_bad(&["standard input, line 1: expected value at column 12; expected"]);
}

#[test]
fn one_sample_and_the_greedy_response_have_columns_of_their_own() {
    let dir = place("messages-columns");
    let eval = ["eval", "--model", "model", "--k", "1", "--max-new", "2", "--out", "e"];
    let shown = qurl_in(&dir, &[&eval[..], &["--data", "problems.jsonl", "--limit", "2"]].concat(), "");
    assert_eq!(shown.status, 0, "{}", shown.stderr);
    let titles = shown.stdout.lines().next().unwrap_or_default().to_string();
    let titles: Vec<&str> = titles.split("  ").map(str::trim).filter(|title| !title.is_empty()).collect();
    assert_eq!(titles[2..5], ["greedy Avg@1", "sampled Avg@1", "pass@1"]);
}

#[test]
fn a_damaged_line_is_told_by_an_export_too() {
    let dir = directory("messages-export");
    std::fs::create_dir(dir.join("run")).expect("created");
    let record = "{\"step\":1,\"reward\":0.5,\"timing\":{\"total\":1.0}}\n";
    std::fs::write(dir.join("run/metrics.jsonl"), format!("{record}{{\"step\n")).expect("written");
    for args in [&["report", "run"][..], &["export", "run", "--to", "mlflow"]] {
        let done = qurl_in(&dir, args, "");
        assert_eq!(done.status, 0, "{}", done.stderr);
        assert!(done.stderr.contains("metrics.jsonl, line 2 is not the record of a step"), "{}", done.stderr);
    }
}
