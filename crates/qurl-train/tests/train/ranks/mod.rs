//! The same bits for one, two and four ranks: the records of all steps and the final weights, with all that a
//! step can do, and of runs that are resumed with another number of ranks. The ranks are threads here; what
//! moves their bytes otherwise is tested where it is.

mod divided;
mod faults;
mod resumed;

use crate::common::tiny::{self, bits, cpu, warmed};
use qurl_kernels::collective::Collective;
use qurl_model::Params;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::sft::{self, Examples, SftRecord};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Wide enough that its matrices are cut into pieces: two blocks of the gradient's norm and more.
const WIDE: &[&str] = &["model.new.hidden_size=64", "model.new.intermediate_size=192"];
/// Sizes that no number of ranks divides, and everything that a run measures.
const UNEVEN: &[&str] = &[
    "data.train_batch_size=6",
    "data.max_response_length=16",
    "rollout.n=3",
    "rollout.kv_cache_mb=8",
    "actor.ppo_mini_batch_size=3",
    "actor.ppo_epochs=2",
    "run.test_freq=2",
    "run.test_problems=7",
    "run.test_k=2",
    "run.update_metrics_freq=1",
    "run.rollout_log_freq=0",
    "trainer.micro_tokens=64",
    "trainer.shards=4",
    "trainer.save_freq=2",
];
const SHORT_SFT: &[&str] = &["sft.steps=12", "sft.batch_size=10", "sft.validation_freq=6"];

const GRPO: &[&str] = &["algorithm.kl_loss_coef=0.01", "algorithm.entropy_coeff=0.01"];
const PPO: &[&str] = &[
    "rollout.n=1",
    "data.train_batch_size=10",
    "actor.ppo_mini_batch_size=5",
    "algorithm.adv_estimator={ type = \"gae\" }",
    "critic={ lr = 1e-3, ppo_mini_batch_size = 5, cliprange_value = 0.5 }",
    "algorithm.kl_in_reward={ kl_ctrl = { type = \"fixed\", kl_coef = 0.01 } }",
    "trainer.compute=bf16",
];
const DAPO: &[&str] = &[
    "algorithm.filter_groups={ max_num_gen_batches = 6, allow_fewer = true }",
    "algorithm.overlong_buffer={ len = 8 }",
    "rollout.uaq=1.5",
];

fn recipe(overrides: &[&str]) -> Recipe {
    tiny::recipe(&[WIDE, SHORT_SFT, UNEVEN, overrides].concat())
}

/// Runs `rank` at all ranks of a run, as threads; what each gives, by rank.
fn on_ranks<T: Send>(count: usize, rank: impl Fn(Collective) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = Collective::threads(count)
            .into_iter()
            .map(|collective| scope.spawn(move || rank(collective)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank that ends")).collect()
    })
}

/// A record as its line of metrics.jsonl, without times.
fn line(record: &impl serde::Serialize) -> String {
    let mut value = serde_json::to_value(record).expect("JSON");
    value.as_object_mut().expect("an object").remove("timing");
    value.to_string()
}

/// A warm start and three steps, with their records, the tests between them, and the weights.
fn trained(recipe: &Recipe, collective: Collective) -> (Vec<String>, Vec<u32>) {
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let (cpu, mut lines) = (cpu(1), Vec::new());
    let (mut start, task) = tiny::start(recipe);
    let settings = recipe.sft.as_ref().expect("sft");
    let examples = Examples::open(settings, recipe.trainer.seed, &start, Some(&*task)).expect("examples");
    let keep = |record: &mut SftRecord| {
        lines.push(line(record));
        Ok::<_, sft::SftError>(ControlFlow::Continue(()))
    };
    let (weights, _) =
        sft::warm_start(&cpu, recipe, settings, &start, &examples, &ranks, keep).expect("warm start");
    drop(examples);
    start.weights = weights;
    let mut trainer = RlTrainer::on_ranks(&cpu, recipe, "tiny", start, task, ranks).expect("trainer");
    for _ in 0..3 {
        lines.push(line(&trainer.step().expect("step")));
        lines.push(format!("{:?}", trainer.evaluate().expect("an evaluation")));
    }
    let shown = trainer.sampled_rollouts(4).expect("rollouts");
    lines.extend(shown.iter().map(|rollout| serde_json::to_string(rollout).expect("JSON")));
    (lines, bits(&trainer.weights().expect("weights")))
}

/// Every rank of every number of ranks has the records and the weights of one rank, whatever they divide.
fn same_bits(overrides: &[&str]) {
    let recipe = |stage: &str| recipe(&[overrides, &[stage]].concat());
    let (first, third) = (recipe("trainer.zero_stage=1"), recipe("trainer.zero_stage=3"));
    let alone = trained(&first, Collective::alone());
    assert!(alone.0.iter().any(|line| line.contains("\"updates\":")), "{:?}", alone.0);
    for (count, stage, recipe) in [(2, 1, &first), (4, 1, &first), (2, 3, &third), (4, 3, &third)] {
        for (rank, found) in on_ranks(count, |c| trained(recipe, c)).into_iter().enumerate() {
            for (found, expected) in found.0.iter().zip(&alone.0) {
                assert_eq!(found, expected, "rank {rank} of {count}, ZeRO-{stage}");
            }
            assert_eq!(found.0.len(), alone.0.len());
            assert!(found.1 == alone.1, "the weights of rank {rank} of {count} differ, ZeRO-{stage}");
        }
    }
}

#[test]
fn shards_of_one_micro_batch_have_the_same_bits_on_any_number_of_ranks() {
    // Else a shard takes several: then a rank keeps the gradients of all blocks.
    same_bits(&["trainer.micro_tokens=256", "trainer.recompute=true"]);
}

#[test]
fn grpo_with_a_reference_has_the_same_bits_on_any_number_of_ranks() {
    same_bits(GRPO);
}

#[test]
fn ppo_with_a_critic_has_the_same_bits_on_any_number_of_ranks() {
    same_bits(PPO);
}

#[test]
fn dapo_with_dynamic_sampling_has_the_same_bits_on_any_number_of_ranks() {
    same_bits(DAPO);
}

/// Three steps from such a model, or from the adapters of the recipe: their records and the weights.
fn stepped(recipe: &Recipe, from: &Params<Vec<f32>>, collective: Collective) -> (Vec<String>, Vec<u32>) {
    let ranks = Ranks::new(Arc::new(collective), recipe).expect("ranks");
    let (mut start, task) = tiny::start(recipe);
    if start.adapters.is_none() {
        start.weights = from.clone();
    }
    let mut trainer = RlTrainer::on_ranks(&cpu(1), recipe, "tiny", start, task, ranks).expect("trainer");
    let mut lines: Vec<String> = (0..3).map(|_| line(&trainer.step().expect("step"))).collect();
    lines.push(format!("{:?}", trainer.evaluate().expect("an evaluation")));
    (lines, bits(&trainer.weights().expect("weights")))
}

/// [`stepped`] on one rank, and on so many with ZeRO of a stage.
fn same_steps(recipe: &Recipe, from: &Params<Vec<f32>>, cases: &[(usize, usize)]) -> (Vec<String>, Vec<u32>) {
    let alone = stepped(recipe, from, Collective::alone());
    for &(count, stage) in cases {
        let mut recipe = recipe.clone();
        recipe.trainer.zero_stage = stage;
        for (rank, found) in on_ranks(count, |c| stepped(&recipe, from, c)).into_iter().enumerate() {
            assert_eq!(found.0, alone.0, "rank {rank} of {count}, ZeRO-{stage}");
            assert!(found.1 == alone.1, "the weights of rank {rank} of {count} differ, ZeRO-{stage}");
        }
    }
    alone
}

#[test]
fn lag_and_forward_passes_of_the_rollout_have_the_same_bits_on_any_number_of_ranks() {
    let weights = warmed(&cpu(1), &recipe(&[]));
    let lag = same_steps(&recipe(&["rollout.lag=1", "trainer.compute=bf16"]), &weights, &[(2, 1), (4, 3)]);
    assert!(lag.0[2].contains("\"rollout_version\":2"), "step 3 samples with older weights: {:?}", lag.0[2]);
    let straight = ["trainer.forward=rollout", "trainer.compute=bf16"];
    let straight = same_steps(&recipe(&straight), &weights, &[(2, 1), (4, 1)]);
    assert!(straight.0[0].contains("\"rho_max\":1.0,"), "{:?}", straight.0[0]);
}

#[test]
fn shards_round_otherwise_and_one_is_what_was_before_shards() {
    let weights = |shards: &str| trained(&recipe(&[GRPO, &[shards]].concat()), Collective::alone()).1;
    assert_ne!(weights("trainer.shards=1"), weights("trainer.shards=4"));
}
