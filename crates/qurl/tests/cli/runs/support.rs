//! A tiny recipe with every kind of state there is (critic, adaptive KL, reference, measured weights, scaled
//! weights), and what two runs of it are compared by.

use crate::common::{Run, directory, qurl_in};
use qurl_train::runlog::EventReader;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const RECIPE: &str = r#"
[model.new]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 64

[task]
type = "synthetic"
kind = "addition"
level = 1
format_weight = 0.5

[sft]
steps = 40
batch_size = 16
lr = 5e-3
max_length = 48

[data]
train_batch_size = 4
max_prompt_length = 8
max_response_length = 24

[rollout]
n = 4
format = "int8"
uaq = 1.5
kv_cache_mb = 16

[algorithm]
adv_estimator = { type = "gae" }
kl_in_reward = { kl_ctrl = { type = "adaptive", kl_coef = 0.01, target_kl = 0.01, horizon = 50.0 } }

[actor]
lr = 1e-3
ppo_mini_batch_size = 2

[critic]
lr = 1e-3
ppo_mini_batch_size = 2

[run]
total_steps = 20
test_freq = 8
test_problems = 8
update_metrics_freq = 3
rollout_log_freq = 5
rollout_log_samples = 3

[trainer]
compute = "f32"
micro_tokens = 128
save_freq = 4
keep_last = 2
keep_best = 1
"#;

/// A directory with the recipe in it.
pub fn place(name: &str) -> PathBuf {
    let dir = directory(name);
    std::fs::write(dir.join("tiny.toml"), RECIPE).expect("written");
    dir
}

/// `qurl train tiny.toml --run RUN` with more arguments, to its end.
pub fn train(dir: &Path, run: &str, more: &[&str]) -> Run {
    let mut args = vec!["train", "tiny.toml", "--run", run];
    args.extend(more);
    qurl_in(dir, &args, "")
}

/// The same, and it must succeed.
pub fn trained(dir: &Path, run: &str, more: &[&str]) -> Run {
    let done = train(dir, run, more);
    assert_eq!(done.status, 0, "{}", done.stderr);
    done
}

/// The same in the background.
pub fn spawn(dir: &Path, run: &str, more: &[&str]) -> Child {
    spawn_with(dir, run, more, &[])
}

/// [`spawn`] with variables of the environment.
pub fn spawn_with(dir: &Path, run: &str, more: &[&str], environment: &[(&str, &str)]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_qurl"))
        .args(["train", "tiny.toml", "--run", run])
        .args(more)
        .envs(environment.iter().copied())
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts")
}

/// Sends a signal by its name.
pub fn signal(child: &Child, name: &str) {
    let sent =
        Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status().expect("kill");
    assert!(sent.success());
}

/// Waits until something holds; a run that ends first is left to the caller. Far too long a wait is a
/// failure.
pub fn wait_for(child: &mut Child, mut holds: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(120) {
        if holds() {
            return true;
        }
        if child.try_wait().expect("a child").is_some() {
            return holds();
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    panic!("waited in vain");
}

/// Lines of a run's `metrics.jsonl` so far.
pub fn lines(run: &Path) -> usize {
    std::fs::read(run.join("metrics.jsonl")).map_or(0, |bytes| bytes.iter().filter(|&&b| b == b'\n').count())
}

/// Everything about a run that does not depend on the clock: records without timings, scalars without
/// timings, and all files of rollouts, checkpoints and the final model.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    records: Vec<Value>,
    scalars: Vec<(u64, String, u32)>,
    files: BTreeMap<String, Vec<u8>>,
}

impl Outcome {
    pub fn of(run: &Path) -> Outcome {
        let text = std::fs::read_to_string(run.join("metrics.jsonl")).expect("metrics");
        let untimed = |line: &str| {
            let mut record: Value = serde_json::from_str(line).expect("a record");
            let timing = record.as_object_mut().and_then(|r| r.remove("timing"));
            assert!(timing.is_some_and(|t| t["log"].is_f64() && t["checkpoint"].is_f64()), "{line}");
            record
        };
        let events = std::fs::read(run.join("tensorboard/events.out.tfevents.qurl")).expect("events");
        let mut scalars = Vec::new();
        for event in EventReader::new(&events) {
            let untimed = event.scalars.into_iter().filter(|(tag, _)| !tag.starts_with("timing/"));
            scalars.extend(untimed.map(|(tag, value)| (event.step, tag, value.to_bits())));
        }
        let mut files = BTreeMap::new();
        // Supervised training has no rollouts.
        for part in ["rollouts", "checkpoints", "model"].into_iter().filter(|part| run.join(part).exists()) {
            collect(&run.join(part), part, &mut files);
        }
        Outcome { records: text.lines().map(untimed).collect(), scalars, files }
    }

    /// Fails with the first difference, not with all bytes of both.
    pub fn assert_same(&self, other: &Outcome, what: &str) {
        for (a, b) in self.records.iter().zip(&other.records) {
            assert_eq!(a, b, "{what}");
        }
        assert_eq!(self.records.len(), other.records.len(), "{what}: steps");
        let differing = self.scalars.iter().zip(&other.scalars).find(|(a, b)| a != b);
        assert!(differing.is_none() && self.scalars.len() == other.scalars.len(), "{what}: {differing:?}");
        let names = |o: &Outcome| o.files.keys().cloned().collect::<Vec<String>>();
        assert_eq!(names(self), names(other), "{what}: files");
        for (name, bytes) in &self.files {
            assert!(other.files.get(name) == Some(bytes), "{what}: {name} differs");
        }
    }

    /// The same but for checkpoints, whose moments are in as many files as there were ranks.
    pub fn assert_same_training(&self, other: &Outcome, what: &str) {
        let without_checkpoints = |outcome: &Outcome| {
            let files = outcome.files.iter().filter(|(name, _)| !name.starts_with("checkpoints/"));
            Outcome {
                records: outcome.records.clone(),
                scalars: outcome.scalars.clone(),
                files: files.map(|(name, bytes)| (name.clone(), bytes.clone())).collect(),
            }
        };
        without_checkpoints(self).assert_same(&without_checkpoints(other), what);
    }

    /// Whether some step had a gradient.
    pub fn learned(&self) -> bool {
        self.records.iter().any(|record| record["grad_norm"].as_f64().is_some_and(|norm| norm > 0.0))
    }

    /// The final weights.
    pub fn weights(&self) -> &[u8] {
        &self.files["model/model.safetensors"]
    }
}

fn collect(dir: &Path, name: &str, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(dir).expect("a directory").flatten() {
        let name = format!("{name}/{}", entry.file_name().to_string_lossy());
        if entry.path().is_dir() {
            collect(&entry.path(), &name, files);
        } else {
            files.insert(name, std::fs::read(entry.path()).expect("a file"));
        }
    }
}

/// Copies a run directory.
pub fn copy(from: &Path, to: &Path) {
    if to.exists() {
        std::fs::remove_dir_all(to).expect("removed");
    }
    std::fs::create_dir_all(to).expect("created");
    for entry in std::fs::read_dir(from).expect("a directory").flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("copied");
        }
    }
}
