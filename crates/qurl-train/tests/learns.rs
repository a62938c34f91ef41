//! PPO, GRPO and DAPO each learn on their recipe of seconds. All start from one warm start, which their recipes share.

use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_model::Params;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use std::sync::{Arc, OnceLock};

const GRPO: &str = include_str!("../../../recipes/tiny-grpo.toml");
const DAPO: &str = include_str!("../../../recipes/tiny-dapo.toml");
const PPO: &str = include_str!("../../../recipes/tiny-ppo.toml");

/// The weights after the recipes' warm start, made once.
fn warm_start(recipe: &Recipe) -> Params<Vec<f32>> {
    static WEIGHTS: OnceLock<(Recipe, Params<Vec<f32>>)> = OnceLock::new();
    let (made_with, weights) = WEIGHTS.get_or_init(|| {
        let task = recipe.task.task().expect("task");
        let start = Start::from_recipe(recipe, &*task).expect("start");
        let settings = recipe.sft.as_ref().expect("sft");
        let examples = Examples::open(settings, recipe.trainer.seed, &start, &*task).expect("examples");
        let cpu = Arc::new(Cpu::new(Level::best(), 2));
        let learner = sft::run(cpu, recipe, settings, &start, &examples, |_| {}).expect("sft");
        (recipe.clone(), learner.weights().expect("weights"))
    });
    let same = (&made_with.model, &made_with.task, &made_with.sft, &made_with.trainer)
        == (&recipe.model, &recipe.task, &recipe.sft, &recipe.trainer);
    assert!(same, "the recipes' warm starts differ");
    weights.clone()
}

fn learns(text: &str, name: &str) {
    let recipe = Recipe::parse(text, name, &[]).expect("recipe");
    let weights = warm_start(&recipe);
    let task = recipe.task.task().expect("task");
    let start = Start { weights, ..Start::from_recipe(&recipe, &*task).expect("start") };
    let mut trainer =
        RlTrainer::new(Arc::new(Cpu::new(Level::best(), 2)), &recipe, name, start, task).expect("trainer");
    let steps = trainer.plan().run.total_steps;
    let before = trainer.evaluate().expect("accuracy");
    let records: Vec<_> = (0..steps).map(|_| trainer.step().expect("step")).collect();
    let after = trainer.evaluate().expect("accuracy");
    let reward =
        |records: &[qurl_train::rl::StepRecord]| records.iter().map(|r| r.reward).sum::<f64>() / records.len() as f64;
    let (first, last) = (reward(&records[..5]), reward(&records[records.len() - 5..]));
    println!("{name}: accuracy {before:.3} -> {after:.3}, reward {first:.3} -> {last:.3}");
    assert!(before < 0.7 && after > 0.9, "{name}: accuracy {before} -> {after}");
    assert!(last > first + 0.1, "{name}: reward {first} -> {last}");
    assert!(records.iter().all(|r| r.skipped_updates == 0 && r.mismatch.is_some_and(|m| m.kl < 0.01)));
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
