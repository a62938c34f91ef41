//! Every recipe of the paper starts and does two steps. Only sizes are overridden, to fit two cores: batch,
//! samples, response length, cache, held-out problems and their samples, steps, and shards (512 for 8
//! sequences otherwise). A model of random weights never answers right, so that dynamic sampling would never
//! find a group with both: for DAPO alone the verdict comes from a command, which wraps the recipe's own data
//! set and calls every other response right, by its length.

use super::data::{Pair, shared, sums, write_dapo, write_deepscaler, write_gsm8k};
use super::model::{Published, QWEN25_05B_INSTRUCT, QWEN25_MATH_7B, R1_DISTILL_15B};
use crate::common::{Run, directory, qurl_in};
use qurl_tasks::tasks::{self, Synthetic};
use qurl_train::recipe::Recipe;
use qurl_train::start::Start;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Which tokenizer, and hence which problems and vocabulary.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Qwen's, the real vocabulary size, and problems of the real sets: needs the shared data.
    Real,
    /// Characters, and made problems: everywhere.
    Made,
}

/// Sizes that fit two cores.
const SIZES: [&str; 9] = [
    "data.train_batch_size=4",
    "data.max_response_length=12",
    "actor.ppo_mini_batch_size=2",
    "rollout.kv_cache_mb=256",
    "trainer.micro_tokens=512",
    "run.test_problems=2",
    "run.test_k=2",
    "run.total_steps=2",
    "run.full_kl_positions=8",
];

/// A directory with the model and both files of problems; none where the shared data is needed and absent.
fn place(recipe: &str, kind: Kind, model: &Published, sets: [&str; 2]) -> Option<(PathBuf, [Vec<Pair>; 2])> {
    let dir = directory(&format!("paper-{recipe}-{kind:?}"));
    let pairs = match kind {
        Kind::Real => {
            if !model.save_with_qwen_tokenizer(&dir.join("model")) {
                return None;
            }
            [shared(sets[0], 40)?, shared(sets[1], 4)?]
        }
        Kind::Made => {
            model.save_with_characters(&dir.join("model"));
            [sums(0, 20), sums(30, 4)]
        }
    };
    Some((dir, pairs))
}

/// A recipe of the project.
fn recipe(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../recipes/{name}.toml"))
}

/// `qurl train` with a recipe, the model beside it, the sizes, and what else it needs.
fn train(dir: &Path, recipe: &Path, more: &[&str]) -> Run {
    let path = recipe.display().to_string();
    let mut args = vec!["train", &path, "--run", "run", "--device", "cpu", "--set", "model.path=model"];
    for set in SIZES.iter().chain(more) {
        args.extend(["--set", set]);
    }
    qurl_in(dir, &args, "")
}

/// The files of problems.
const JSONL: [&str; 2] = ["task.files=['train.jsonl']", "task.test_files=['test.jsonl']"];
const PARQUET: [&str; 2] = ["task.files=['train.parquet']", "task.test_files=['test.jsonl']"];

/// The records of a run that did two steps and left a model with this context.
fn two_steps(dir: &Path, done: &Run, context: usize) -> Vec<Value> {
    assert_eq!(done.status, 0, "{}", done.stderr);
    let text = std::fs::read_to_string(dir.join("run/metrics.jsonl")).expect("metrics");
    let records: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a record")).collect();
    assert_eq!(records.len(), 2);
    for record in &records {
        assert_eq!(record["groups"], 4, "{record}");
        assert_eq!((&record["updates"], &record["skipped_updates"]), (&2.into(), &0.into()), "{record}");
        assert!(
            record["mismatch"]["rho_max"].as_f64().is_some_and(|rho| rho > 1.0),
            "int8 rollouts: {record}"
        );
    }
    let saved = std::fs::read_to_string(dir.join("run/model/config.json")).expect("the saved model");
    let saved: Value = serde_json::from_str(&saved).expect("JSON");
    assert_eq!(saved["max_position_embeddings"], context);
    records
}

fn gsm8k_ppo(kind: Kind) {
    let sets = ["gsm8k/train.jsonl.gz", "gsm8k/test.jsonl"];
    let Some((dir, [train_rows, test_rows])) = place("gsm8k", kind, &QWEN25_05B_INSTRUCT, sets) else {
        return;
    };
    write_gsm8k(&dir.join("train.jsonl"), &train_rows);
    write_gsm8k(&dir.join("test.jsonl"), &test_rows);
    let done = train(&dir, &recipe("gsm8k-ppo"), &[&JSONL[..], &["critic.ppo_mini_batch_size=2"]].concat());
    for record in two_steps(&dir, &done, 32_768) {
        assert!(record["value_loss"].as_f64().is_some_and(f64::is_finite), "{record}");
        assert_eq!(record["kl_coef"], 0.001);
        assert!(record["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0), "{record}");
    }
    std::fs::remove_dir_all(dir).expect("removed");
}

fn aime_dapo(kind: Kind) {
    let sets = ["dapo17k/train.jsonl.gz", "aime24/test.jsonl"];
    let Some((dir, [train_rows, test_rows])) = place("aime", kind, &QWEN25_MATH_7B, sets) else { return };
    write_dapo(&dir.join("train.parquet"), &train_rows);
    write_deepscaler(&dir.join("test.jsonl"), &test_rows);
    if kind == Kind::Made {
        // With its own context the model could not have the recipe's responses.
        let own = ["data.max_response_length=8192", "model.max_position_embeddings=4096"];
        let refused = train(&dir, &recipe("aime-dapo"), &[&PARQUET[..], &own].concat());
        refused.assert_bad(&[
            "data.max_response_length",
            "10240",
            "at most 4096",
            "model.max_position_embeddings",
        ]);
    }
    let judged = judged_by_length(&dir, "aime-dapo", ["train.parquet", "test.jsonl"]);
    let done = train(&dir, &judged, &["rollout.n=4", "algorithm.overlong_buffer.len=4", "trainer.shards=8"]);
    let noted = "has max_position_embeddings = 4096; the recipe asks for 32768";
    assert!(done.stderr.contains(noted), "{}", done.stderr);
    for record in two_steps(&dir, &done, 32_768) {
        let number = |key: &str| record[key].as_f64().expect("a number");
        // Groups of right and wrong alone, rewarded with 1 and -1.
        assert!(number("accuracy") > 0.0 && number("accuracy") < 1.0, "{record}");
        assert!((number("reward") - (2.0 * number("accuracy") - 1.0)).abs() < 1e-12, "{record}");
        assert!(number("grad_norm") > 0.0, "{record}");
    }
    // What was saved loads with the new context, and is no longer beyond what its files say.
    let saved = dir.join("run/model").display().to_string();
    let overrides =
        ["model.path", "model.max_position_embeddings"].into_iter().zip([saved, "32768".to_string()]);
    let overrides: Vec<String> = overrides.map(|(key, value)| format!("{key}={value}")).collect();
    let recipe = Recipe::read(&judged, &overrides).expect("a recipe");
    let task = Synthetic::new(tasks::Kind::Addition, 1).expect("any task");
    let start = Start::from_recipe(&recipe, &task).expect("the saved model");
    assert_eq!((start.config.max_position_embeddings, start.warning), (32_768, None));
    std::fs::remove_dir_all(dir).expect("removed");
}

fn deepscaler_grpo(kind: Kind) {
    let sets = ["deepscaler/train_aime.jsonl", "aime24/test.jsonl"];
    let Some((dir, [train_rows, test_rows])) = place("deepscaler", kind, &R1_DISTILL_15B, sets) else {
        return;
    };
    write_deepscaler(&dir.join("train.jsonl"), &train_rows);
    write_deepscaler(&dir.join("test.jsonl"), &test_rows);
    let done = train(&dir, &recipe("deepscaler-grpo"), &[&JSONL[..], &["rollout.n=4"]].concat());
    for record in two_steps(&dir, &done, 131_072) {
        assert!(record["reference_kl"].as_f64().is_some_and(f64::is_finite), "{record}");
    }
    std::fs::remove_dir_all(dir).expect("removed");
}

/// The recipe with its `[task]` as the source of a command's, which judges by length; the rewards stay the
/// recipe's.
fn judged_by_length(dir: &Path, name: &str, files: [&str; 2]) -> PathBuf {
    let text = std::fs::read_to_string(recipe(name)).expect("a recipe");
    let mut table: toml::Table = toml::from_str(&text).expect("TOML");
    let Some(toml::Value::Table(mut source)) = table.remove("task") else { panic!("a section [task]") };
    for (key, file) in [("files", files[0]), ("test_files", files[1])] {
        source.insert(key.into(), toml::Value::Array(vec![file.into()]));
    }
    let mut task = toml::Table::new();
    let judge = "while read -r line; do if [ $(( ${#line} % 2 )) = 1 ]; then echo '{\"score\": \
                 1, \"correct\": true}'; else echo '{\"score\": 0, \"correct\": false}'; fi; done";
    task.insert("type".into(), "command".into());
    task.insert("command".into(), toml::Value::Array(["sh", "-c", judge].map(toml::Value::from).to_vec()));
    task.insert("reward".into(), source.remove("reward").expect("rewards"));
    task.insert("source".into(), toml::Value::Table(source));
    table.insert("task".into(), toml::Value::Table(task));
    let path = dir.join(format!("{name}.toml"));
    std::fs::write(&path, toml::to_string(&table).expect("TOML")).expect("written");
    path
}

#[test]
fn gsm8k_ppo_starts() {
    gsm8k_ppo(Kind::Made);
}

#[test]
fn gsm8k_ppo_starts_with_the_real_tokenizer() {
    gsm8k_ppo(Kind::Real);
}

#[cfg(unix)] // the command that judges is a shell's
#[test]
fn aime_dapo_starts() {
    aime_dapo(Kind::Made);
}

#[cfg(unix)]
#[test]
fn aime_dapo_starts_with_the_real_tokenizer() {
    aime_dapo(Kind::Real);
}

#[test]
fn deepscaler_grpo_starts() {
    deepscaler_grpo(Kind::Made);
}

#[test]
fn deepscaler_grpo_starts_with_the_real_tokenizer() {
    deepscaler_grpo(Kind::Real);
}
