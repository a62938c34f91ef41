//! The cost model against what exchanges really move.

use qurl_kernels::Cpu;
use qurl_kernels::collective::{Collective, Moved};
use qurl_kernels::cpu::level::Level;
use qurl_model::ModelConfig;
use qurl_train::cost::{Sharing, Work, step_bytes};
use qurl_train::learner::Passes;
use qurl_train::memory::{DRIVER_RESERVE, MemoryPlan};
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
    assert_eq!(trainer.passed(), Default::default());
    // The weights of a step's last update are gathered by the next one's first pass.
    trainer.step().expect("a step");
    let (before, passed) = (trainer.ranks().collective().moved(), trainer.passed());
    trainer.step().expect("a step");
    let moved = trainer.ranks().collective().moved().since(&before);
    let passes = Passes {
        forward: trainer.passed().forward - passed.forward,
        training: trainer.passed().training - passed.training,
    };
    let plan = recipe.rl(&file).expect("a plan");
    let work = Work { response: plan.data.max_response_length, ..Work::of(&plan) };
    let sharing = Sharing::of(recipe, size);
    (moved, step_bytes(&plan, &config, &work, passes, rank, &sharing))
}

#[test]
fn a_step_moves_what_the_model_says() {
    let (grpo, ppo) = (&[][..], &["critic.ppo_mini_batch_size=4"][..]);
    let divided = ["trainer.zero_stage=3", "trainer.micro_tokens=64"];
    let cases = [("tiny-grpo", grpo.to_vec()), ("tiny-ppo", ppo.to_vec())];
    let cases = cases
        .into_iter()
        .flat_map(|(name, more)| [(name, more.clone()), (name, [&more[..], &divided].concat())]);
    for (name, more) in cases {
        let recipe = recipe(name, &more);
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

#[test]
fn a_rank_of_eight_holds_7b_by_the_recipe_in_80_gb() {
    let path = "../../recipes/aime-dapo.toml";
    let text = std::fs::read_to_string(path).expect("a recipe");
    let recipe = Recipe::parse(&text, path, &[]).expect("a recipe");
    let plan = recipe.rl(path).expect("a plan");
    let mut config = ModelConfig::named("qwen2.5-7b").expect("a shape");
    config.max_position_embeddings = 32768;
    // One micro-batch a shard, which the recipe is made for.
    assert_eq!(plan.passes_of_shard(&plan.actor, &recipe.trainer), 1);
    let cpu = Cpu::new(Level::best(), 1);
    for rank in [0, 7] {
        let ranks = Ranks::new(Arc::new(Collective::counted(rank, 8)), &recipe).expect("ranks");
        let memory = MemoryPlan::of_rl(&cpu, &recipe, &plan, &config, &ranks).expect("a plan");
        let all = memory.total() + DRIVER_RESERVE + Collective::device_bytes();
        assert!(all <= 80_000_000_000, "rank {rank}: {memory}; phases {:?}", memory.phases());
        // It is no gift: half of it would not do.
        assert!(all > 40_000_000_000, "rank {rank}: {memory}");
        println!("rank {rank}: {memory}; phases {:?}", memory.phases());
    }
}
