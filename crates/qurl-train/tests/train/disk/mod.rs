//! A run on a disk that fails: power that goes at any moment, and calls that return errors.
//!
//! The layer through which runs change files (`qurl_files::disk`) is watched. A simulated disk
//! ([`simulated`]) replays what a run has done up to some moment, forgets what was not synced, wholly or in
//! part and in any order, and the run is resumed on what is left: from the last whole checkpoint, with the
//! same bits.

mod simulated;

use qurl_files::disk::{Change, Watch, watch};
use qurl_kernels::cpu::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_train::checkpoint::{Keep, Store};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::run::{Outcome, Run, RunError, RunParts};
use qurl_train::runlog::RunLog;
use qurl_train::start::Start;
use simulated::{Disk, Random, Recorded};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Two checkpoints of a model of a few hundred weights, with a reference, and the older one removed.
const RECIPE: &str = r#"
[model.new]
hidden_size = 16
intermediate_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 32

[task]
type = "synthetic"
kind = "addition"
level = 1
format_weight = 0.5

[data]
train_batch_size = 2
max_prompt_length = 8
max_response_length = 4

[rollout]
n = 2
kv_cache_mb = 1

[algorithm]
adv_estimator = { type = "grpo" }
kl_loss_coef = 0.01

[actor]
lr = 1e-2
ppo_mini_batch_size = 2

[run]
total_steps = 4
test_freq = 0
test_problems = 2
rollout_log_freq = 2
rollout_log_samples = 1

[trainer]
compute = "f32"
save_freq = 2
keep_last = 1
keep_best = 0
"#;

fn cpu() -> Arc<Cpu> {
    Arc::new(Cpu::new(Level::best(), 1))
}

fn recipe() -> Recipe {
    Recipe::parse(RECIPE, "tiny.toml", &[]).expect("a recipe")
}

/// A run in a directory, begun or resumed, to its end or to an error.
fn run(dir: &Path) -> Result<(), String> {
    let recipe = recipe();
    let task = recipe.task().expect("[task]").task().expect("a task");
    let start = Start::from_recipe(&recipe, &*task).expect("a start");
    let store =
        Store::open(&dir.join("checkpoints"), Keep { last: 1, best: 0 }).map_err(|e| e.to_string())?;
    let from = store.newest().map_err(|e| e.to_string())?.whole;
    if let Some((step, _)) = &from {
        store.prune(*step).map_err(|e| e.to_string())?; // as the command does: one may be left too many
    }
    let log = RunLog::open(dir, from.as_ref()).map_err(|e| e.to_string())?;
    let trainer =
        RlTrainer::on_ranks(&cpu(), &recipe, "tiny", start, task, Ranks::alone()).expect("a trainer");
    let parts = RunParts { path: dir.to_path_buf(), store, from, log };
    let whole = |error: RunError| {
        // A message, and what caused it.
        let causes = std::iter::successors(std::error::Error::source(&error), |cause| cause.source());
        causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
    };
    let mut run = Run::begin(trainer, &recipe, parts).map_err(whole)?;
    assert_eq!(run.steps(|| false, |_| {}).map_err(whole)?, Outcome::Done);
    run.save_model().map_err(whole)
}

/// Everything that a finished run leaves and that does not depend on the clock.
fn left(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fn collect(dir: &Path, name: &str, files: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(dir).expect("a folder").flatten() {
            let name = format!("{name}/{}", entry.file_name().to_string_lossy());
            match entry.path().is_dir() {
                true => collect(&entry.path(), &name, files),
                false => _ = files.insert(name, std::fs::read(entry.path()).expect("a file")),
            }
        }
    }
    let mut files = BTreeMap::new();
    for part in ["checkpoints", "model", "rollouts"] {
        collect(&dir.join(part), part, &mut files);
    }
    files
}

/// Steps in `metrics.jsonl`.
fn steps(dir: &Path) -> Vec<u64> {
    let text = std::fs::read_to_string(dir.join("metrics.jsonl")).expect("metrics");
    let step = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("a line")["step"].as_u64();
    text.lines().map(|line| step(line).expect("a step")).collect()
}

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("qurl-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder");
        Scratch(path)
    }

    fn empty(&self) -> &Path {
        std::fs::remove_dir_all(&self.0).expect("emptied");
        std::fs::create_dir_all(&self.0).expect("a folder");
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// How many of the moments a test looks at: all of them at night.
fn every(of_the_gate: usize) -> usize {
    if std::env::var_os("QURL_NIGHTLY").is_some() { 1 } else { of_the_gate }
}

#[test]
fn power_may_go_at_any_moment() {
    let (whole, crashed) = (Scratch::new("power-whole"), Scratch::new("power-crashed"));
    let recorded = Arc::new(Recorded::default());
    let watching = watch(&whole.0, recorded.clone());
    run(&whole.0).expect("a run");
    drop(watching);
    let expected = left(&whole.0);
    let changes = recorded.changes(&whole.0);
    // After which change a checkpoint is promised: the directory was synced that got its name.
    let mut promised: Vec<(usize, u64)> = Vec::new();
    let mut named = None;
    for (at, change) in changes.iter().enumerate() {
        if let Some(step) =
            change.renamed_to().and_then(|name| name.strip_prefix("checkpoints/step-")?.parse().ok())
        {
            named = Some(step);
        }
        if change.is_sync_of("checkpoints")
            && let Some(step) = named.take()
        {
            promised.push((at + 1, step));
        }
    }
    assert_eq!(promised.iter().map(|(_, step)| *step).collect::<Vec<u64>>(), [0, 2, 4]);
    let mut disk = Disk::default();
    let (mut crashes, mut resumed, mut found) = (0, 0, BTreeMap::<u64, usize>::new());
    for at in 0..=changes.len() {
        let least = promised.iter().filter(|(after, _)| *after <= at).map(|(_, step)| *step).max();
        for seed in 0..if every(2) == 1 { 4 } else { 2 } {
            crashes += 1;
            let dir = crashed.empty();
            disk.after_a_crash(&mut Random::new(seed + 4 * at as u64), dir);
            let place = dir.join("checkpoints");
            let store = Store::open(&place, Keep { last: 1, best: 0 }).expect("a store");
            let newest = store.newest().unwrap_or_else(|e| panic!("after change {at}, seed {seed}: {e}"));
            let step = newest.whole.as_ref().map(|(step, _)| *step);
            assert!(step >= least, "after change {at}, seed {seed}: {step:?} instead of {least:?}");
            *found.entry(step.unwrap_or(99)).or_default() += 1;
            if let Some((step @ 4, path)) = &newest.whole {
                // The newest checkpoint is that of the run, byte for byte.
                for (name, bytes) in
                    expected.iter().filter(|(name, _)| name.starts_with("checkpoints/step-4/"))
                {
                    let file = path.join(name.strip_prefix("checkpoints/step-4/").expect("its name"));
                    assert!(std::fs::read(file).is_ok_and(|found| found == *bytes), "{name} of step {step}");
                }
            }
            if seed == 0 && at % every(41) == 0 {
                resumed += 1;
                run(dir).unwrap_or_else(|e| panic!("resumed after change {at}: {e}"));
                assert_eq!(steps(dir), [1, 2, 3, 4], "after change {at}");
                let same = left(dir) == expected;
                assert!(same, "resumed after change {at}: other files or bytes");
            }
        }
        if let Some(change) = changes.get(at) {
            disk.make(change);
        }
    }
    println!("{} changes, {crashes} crashes, found {found:?}, {resumed} resumed", changes.len());
    assert!(changes.len() > 100 && found.len() == 4, "{found:?}");
}

/// Refuses the n-th change.
struct Refused {
    nth: usize,
    seen: AtomicUsize,
    error: i32,
}

impl Watch for Refused {
    fn before(&self, _: Change) -> io::Result<()> {
        match self.seen.fetch_add(1, Ordering::SeqCst) == self.nth {
            true => Err(io::Error::from_raw_os_error(self.error)),
            false => Ok(()),
        }
    }

    fn after(&self, _: Change) {}
}

#[test]
fn any_call_may_fail() {
    const NO_SPACE: i32 = 28;
    const IO_ERROR: i32 = 5;
    let whole = Scratch::new("calls-whole");
    run(&whole.0).expect("a run");
    let expected = left(&whole.0);
    let dir = Scratch::new("calls-failed");
    let (mut failed, mut survived) = (0, 0);
    for nth in (0..).step_by(every(13)) {
        let dir = dir.empty();
        let error = if nth % 2 == 0 { NO_SPACE } else { IO_ERROR };
        let refused = Arc::new(Refused { nth, seen: AtomicUsize::new(0), error });
        let watching = watch(dir, refused.clone());
        let ended = run(dir);
        drop(watching);
        let over = refused.seen.load(Ordering::SeqCst) <= nth;
        match ended {
            // What is only cleaned up may fail.
            Ok(()) => survived += 1,
            Err(message) => {
                failed += 1;
                assert!(message.contains(&format!("(os error {error})")), "call {nth}: {message}");
                assert!(message.contains(&dir.display().to_string()), "call {nth} names no file: {message}");
            }
        }
        run(dir).unwrap_or_else(|e| panic!("resumed after call {nth}: {e}"));
        assert_eq!(steps(dir), [1, 2, 3, 4], "call {nth}");
        assert!(left(dir) == expected, "resumed after call {nth}: other files or bytes");
        if over {
            break;
        }
    }
    println!("{failed} calls ended the run, {survived} did not");
    assert!(failed > 10);
}
