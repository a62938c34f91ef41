//! PPO, GRPO and DAPO each learn on their recipe of seconds, in its first half (whole at night). The three
//! share one warm start. The default recipe takes a minute and is trained at night; its first steps are among
//! the reference runs of every day.

use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_model::Params;
use qurl_train::recipe::Recipe;
use qurl_train::rl::{RlTrainer, StepRecord};
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const DEFAULT: &str = include_str!("../../../../recipes/default.toml");
const GRPO: &str = include_str!("../../../../recipes/tiny-grpo.toml");
const DAPO: &str = include_str!("../../../../recipes/tiny-dapo.toml");
const PPO: &str = include_str!("../../../../recipes/tiny-ppo.toml");

/// The weights after the recipe's warm start.
fn warm_start(recipe: &Recipe) -> Params<Vec<f32>> {
    let task = recipe.task().expect("[task]").task().expect("task");
    let start = Start::from_recipe(recipe, &*task).expect("start");
    let settings = recipe.sft.as_ref().expect("sft");
    let examples = Examples::open(settings, recipe.trainer.seed, &start, Some(&*task)).expect("examples");
    let cpu = Arc::new(Cpu::new(Level::best(), 2));
    sft::run(&cpu, recipe, settings, &start, &examples, |_| {}).expect("sft")
}

/// The warm start that the tiny recipes share, made once.
fn shared_warm_start(recipe: &Recipe) -> Params<Vec<f32>> {
    static WEIGHTS: OnceLock<(Recipe, Params<Vec<f32>>)> = OnceLock::new();
    let (made_with, weights) = WEIGHTS.get_or_init(|| (recipe.clone(), warm_start(recipe)));
    let same = (&made_with.model, &made_with.task, &made_with.sft, &made_with.trainer)
        == (&recipe.model, &recipe.task, &recipe.sft, &recipe.trainer);
    assert!(same, "the recipes' warm starts differ");
    weights.clone()
}

/// Trains and returns held-out accuracy before and after, and the records of the steps.
fn trained(recipe: &Recipe, name: &str, weights: Params<Vec<f32>>) -> (f64, f64, Vec<StepRecord>) {
    let task = recipe.task().expect("[task]").task().expect("task");
    let start = Start { weights, ..Start::from_recipe(recipe, &*task).expect("start") };
    let mut trainer =
        RlTrainer::new(&Arc::new(Cpu::new(Level::best(), 2)), recipe, name, start, task).expect("trainer");
    let steps = trainer.plan().run.total_steps;
    let before = trainer.evaluate().expect("accuracy").accuracy;
    let records: Vec<_> = (0..steps).map(|_| trainer.step().expect("step")).collect();
    let after = trainer.evaluate().expect("accuracy").accuracy;
    println!("{name}: accuracy {before:.3} -> {after:.3}");
    assert!(records.iter().all(|r| r.skipped_updates == 0 && r.mismatch.is_some_and(|m| m.kl < 0.01)));
    (before, after, records)
}

fn learns(text: &str, name: &str) {
    let _alone = alone();
    let short = (!at_night()).then(|| "run.total_steps=24".to_string());
    let recipe = Recipe::parse(text, name, short.as_slice()).expect("recipe");
    // Supervised training knows no rewards, so recipes may differ in them.
    let plain = ["task.reward={ right = 1.0, wrong = 0.0 }".to_string()];
    let warm = Recipe::parse(text, name, &plain).expect("recipe");
    let (before, after, records) = trained(&recipe, name, shared_warm_start(&warm));
    let reward =
        |records: &[StepRecord]| records.iter().map(|r| r.reward).sum::<f64>() / records.len() as f64;
    let (first, last) = (reward(&records[..5]), reward(&records[records.len() - 5..]));
    assert!(before < 0.7 && after > 0.9, "{name}: accuracy {before} -> {after}");
    assert!(last > first + 0.1, "{name}: reward {first} -> {last}");
}

/// Held while a test trains: each has threads for all cores, and four at a time would wait for each other's.
fn alone() -> MutexGuard<'static, ()> {
    static TRAINING: Mutex<()> = Mutex::new(());
    TRAINING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether `cargo xtask nightly` runs.
fn at_night() -> bool {
    std::env::var_os("QURL_NIGHTLY").is_some()
}

/// What `qurl train` does without a recipe.
#[test]
fn the_default_learns() {
    if !at_night() {
        println!("skipped: a minute, for cargo xtask nightly");
        return;
    }
    let _alone = alone();
    let recipe = Recipe::parse(DEFAULT, "default", &[]).expect("recipe");
    let (before, after, _) = trained(&recipe, "default", warm_start(&recipe));
    assert!(before < 0.5 && after > 0.95, "accuracy {before} -> {after}");
}

#[test]
fn grpo_learns() {
    learns(GRPO, "tiny-grpo");
}

#[test]
fn dapo_learns() {
    learns(DAPO, "tiny-dapo");
}

#[test]
fn ppo_learns() {
    learns(PPO, "tiny-ppo");
}
