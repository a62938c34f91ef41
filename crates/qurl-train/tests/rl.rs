//! The RL step as a whole, on a tiny model: reproducible, and without quantization exactly on-policy.

use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_train::recipe::Recipe;
use qurl_train::rl::{RlTrainer, StepRecord};
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use std::sync::Arc;

const TINY: &str = r#"
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
steps = 20
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
kv_cache_mb = 16

[algorithm]
adv_estimator = { type = "grpo" }

[actor]
lr = 1e-3
ppo_mini_batch_size = 2

[run]
total_steps = 3
test_problems = 8

[trainer]
compute = "f32"
micro_tokens = 128
"#;

fn run(overrides: &[&str], threads: usize) -> Vec<StepRecord> {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    let recipe = Recipe::parse(TINY, "tiny", &overrides).expect("recipe");
    let cpu = Arc::new(Cpu::new(Level::best(), threads));
    let task = recipe.task().expect("[task]").task().expect("task");
    let mut start = Start::from_recipe(&recipe, &*task).expect("start");
    let sft = recipe.sft.as_ref().expect("sft");
    let examples = Examples::open(sft, recipe.trainer.seed, &start, Some(&*task)).expect("examples");
    let weights = sft::run(&cpu, &recipe, sft, &start, &examples, |_| {}).expect("warm start");
    drop(examples);
    start.weights = weights;
    let mut trainer = RlTrainer::new(&cpu, &recipe, "tiny", start, task).expect("trainer");
    (0..3)
        .map(|_| {
            let mut record = trainer.step().expect("step");
            record.timing.clear();
            record
        })
        .collect()
}

#[test]
fn same_recipe_same_seed_same_records() {
    let first = run(&[], 1);
    assert!(first.iter().all(|r| r.updates > 0 && r.grad_norm > 0.0), "nothing was learned: {first:?}");
    assert_eq!(run(&[], 2), first);
    assert_ne!(run(&["trainer.seed=2"], 2), first);
}

#[test]
fn an_unquantized_rollout_is_exactly_on_policy() {
    for format in ["f32", "bf16"] {
        let records = run(&[&format!("rollout.format={format}"), &format!("trainer.compute={format}")], 2);
        for record in &records {
            let mismatch = record.mismatch.expect("tokens");
            assert_eq!((mismatch.kl, mismatch.rho_max, mismatch.rho_min), (0.0, 1.0, 1.0), "{format}");
        }
        // Then all objectives are one.
        for objective in ["naive", "quantized-is", "decoupled", "tis"] {
            let other = format!("algorithm.objective={{ type = \"{objective}\" }}");
            let others =
                run(&[&format!("rollout.format={format}"), &format!("trainer.compute={format}"), &other], 2);
            assert_eq!(others, records, "{objective} in {format}");
        }
    }
    let quantized = run(&[], 2);
    assert!(quantized.iter().all(|r| r.mismatch.expect("tokens").rho_max > 1.0), "int8 must differ");
}

/// Sequences of the first mini-batch get their prox from the update's forward. `geo-mask` rejects sequences
/// before the updates, so it has to score all of them; where it accepts every one it is `naive`, to the bit.
#[test]
fn prox_of_the_first_mini_batch_is_what_the_update_computes() {
    let naive = "algorithm.objective={ type = \"naive\" }";
    let geo_mask = "algorithm.objective={ type = \"geo-mask\", low = 0.0, high = 1e300 }";
    let critic = "critic={ lr = 1e-3, ppo_mini_batch_size = 2, cliprange_value = 0.5 }";
    let cases: [&[&str]; 4] = [
        // Two mini-batches of two prompts each, of which one is scored; int8 rollouts, so that prox matters.
        &["actor.ppo_epochs=2"],
        // One update a step: nothing is scored.
        &["actor.ppo_mini_batch_size=4", "trainer.compute=bf16", "trainer.recompute=true"],
        &["algorithm.adv_estimator={ type = \"gae\" }", critic],
        &["algorithm.kl_loss_coef=0.1", "rollout.temperature=0.7", "trainer.micro_tokens=64"],
    ];
    for case in cases {
        let with = run(&[case, &[naive]].concat(), 2);
        let without = run(&[case, &[geo_mask]].concat(), 2);
        // Every figure of metrics.jsonl, bit for bit, and the weights behind those of the later steps.
        assert_eq!(with, without, "{case:?}");
        assert!(with.iter().all(|r| r.mismatch.expect("tokens").rho_max > 1.0), "{case:?}: {with:?}");
        assert!(with.iter().all(|r| r.full_kl.is_some_and(|kl| kl > 0.0)), "{case:?}");
    }
}

#[test]
fn ppo_with_a_critic_and_dapo() {
    let critic = "critic={ lr = 1e-3, ppo_mini_batch_size = 2, cliprange_value = 0.5 }";
    let records = run(
        &[
            "algorithm.adv_estimator={ type = \"gae\" }",
            critic,
            "algorithm.kl_in_reward={ kl_ctrl = { type = \"fixed\", kl_coef = 0.01 } }",
        ],
        2,
    );
    assert!(records.iter().all(|r| r.value_loss.is_some_and(f64::is_finite) && r.reference_kl.is_some()));
    assert_eq!(records[0].reference_kl, Some(0.0), "the reference is the actor at first");
    assert!(records[2].reference_kl != Some(0.0));

    let records = run(
        &[
            "algorithm.filter_groups={ max_num_gen_batches = 3 }",
            "algorithm.overlong_buffer={ len = 8 }",
            "algorithm.entropy_coeff=0.01",
            "algorithm.kl_loss_coef=0.001",
            "actor.ppo_epochs=2",
        ],
        2,
    );
    assert!(records.iter().all(|r| (1..=3).contains(&r.gen_batches) && r.groups <= 4));
    for record in &records {
        assert_eq!(record.sampled_groups, record.gen_batches * 4, "all that was sampled is counted");
        assert!(
            (record.groups..=record.sampled_groups).contains(&record.mixed_groups),
            "what was kept is mixed"
        );
    }
}

#[test]
fn stages_change_the_sizes_of_a_step() {
    let records = run(
        &["run.stages=[{ from_step = 2, max_response_length = 6, n = 2 }, { from_step = 3, \
             max_response_length = 9 }]"],
        1,
    );
    // The last stage does not say how many: those of the rollout, not of the stage before.
    for (record, (length, n)) in records.iter().zip([(24, 4), (6, 2), (9, 4)]) {
        let responses = record.response_tokens as f64 / record.response_length;
        assert_eq!(responses.round() as usize, 4 * n, "step {}", record.step);
        assert!(
            record.response_tokens <= 4 * n * length,
            "step {}: {} tokens",
            record.step,
            record.response_tokens
        );
    }
    // A model of twenty supervised steps writes on to the limit now and then.
    assert!(records[1].truncated > 0.0 && records[1].response_length <= 6.0, "{:?}", records[1]);
}

#[test]
fn stochastic_rounding_is_seeded_and_differs_from_the_nearest() {
    let kl = |records: &[StepRecord]| records[0].mismatch.expect("mismatch").k3_kl;
    let nearest = run(&[], 1);
    let stochastic = run(&["rollout.stochastic_rounding=true"], 1);
    assert_eq!(run(&["rollout.stochastic_rounding=true"], 2), stochastic);
    assert!(kl(&stochastic) > kl(&nearest), "{} and {}", kl(&stochastic), kl(&nearest));
}

#[test]
fn kl_over_the_whole_vocabulary_is_there_and_zero_without_quantization() {
    assert!(run(&[], 1).iter().all(|r| r.full_kl.is_some_and(|kl| kl > 0.0 && kl < 0.1)));
    assert!(run(&["rollout.format=f32"], 1).iter().all(|r| r.full_kl == Some(0.0)));
    assert!(run(&["run.full_kl_positions=0"], 1).iter().all(|r| r.full_kl.is_none()));
}
