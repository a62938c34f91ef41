//! The cost model against what exchanges really move.

use qurl_kernels::Cpu;
use qurl_kernels::collective::{Collective, Moved};
use qurl_kernels::cpu::level::Level;
use qurl_train::cost::{Work, step_bytes};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::start::Start;
use std::sync::Arc;

/// A recipe of the project without its warm start, with small steps.
fn recipe(name: &str, more: &[&str]) -> Recipe {
    let path = format!("../../recipes/{name}.toml");
    let text = std::fs::read_to_string(&path).expect("a recipe");
    let set = ["trainer.shards=4", "data.train_batch_size=8", "actor.ppo_mini_batch_size=4"];
    let set: Vec<String> = set.iter().chain(more).map(|s| s.to_string()).collect();
    Recipe::parse(&text, &path, &set).expect("a recipe")
}

/// What a rank sent in one step, and what it should have by the model.
fn step(recipe: &Recipe, collective: Collective) -> (Moved, Moved) {
    let (rank, size) = (collective.rank(), collective.size());
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let cpu = Arc::new(Cpu::new(Level::best(), 1));
    let task = recipe.task().expect("[task]").task().expect("a task");
    let start = Start::from_recipe(recipe, &*task).expect("a start");
    let (file, config) = (recipe.file().to_string(), start.config.clone());
    let mut trainer = RlTrainer::on_ranks(&cpu, recipe, &file, start, task, ranks).expect("a trainer");
    let before = trainer.ranks().collective().moved();
    trainer.step().expect("a step");
    let moved = trainer.ranks().collective().moved().since(&before);
    let plan = recipe.rl(&file).expect("a plan");
    let work = Work { response: plan.data.max_response_length, ..Work::of(&plan) };
    (moved, step_bytes(&plan, &config, &work, rank, size))
}

#[test]
fn a_step_moves_what_the_model_says() {
    for (name, more) in [("tiny-grpo", &[][..]), ("tiny-ppo", &["critic.ppo_mini_batch_size=4"])] {
        let recipe = recipe(name, more);
        for size in [1, 2, 4] {
            let (recipe, ranks) = (&recipe, Collective::threads(size));
            let found: Vec<(Moved, Moved)> = std::thread::scope(|scope| {
                let threads = ranks.into_iter().map(|ranks| scope.spawn(move || step(recipe, ranks)));
                threads.collect::<Vec<_>>().into_iter().map(|t| t.join().expect("a rank that ends")).collect()
            });
            for (rank, (moved, model)) in found.into_iter().enumerate() {
                let what = format!("{name}, rank {rank} of {size}: {moved:?}, by the model {model:?}");
                assert_eq!(
                    (moved.all_to_all, moved.all_gather),
                    (model.all_to_all, model.all_gather),
                    "{what}"
                );
                assert_eq!(moved.broadcast, 0, "{what}");
                assert!(size == 1 || moved.all_to_all + moved.all_gather > 0, "{what}");
                // Facts about tokens: no more than with all responses at their limit.
                assert!(moved.host <= model.host, "{what}");
            }
        }
    }
}
