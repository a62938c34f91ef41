//! How a model is divided: heads of its own and of a critic, and what a rank keeps by its plan.

use super::{on_ranks, recipe};
use crate::common::tiny::{self, bits, cpu};
use qurl_kernels::collective::Collective;
use qurl_kernels::types::HeadOutput;
use qurl_kernels::{Cpu, Device, DeviceError, Format};
use qurl_model::ModelConfig;
use qurl_model::compute::{Recompute, TapeOptions, Targets, whole_batch};
use qurl_train::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use qurl_train::memory::MemoryPlan;
use qurl_train::optimizer::AdamWOptions;
use qurl_train::ranks::Ranks;
use std::ops::Range;
use std::sync::Arc;

/// Two updates of a model with its own head on made-up sequences; as a critic, too.
fn updated(collective: Collective, stage: usize, rows: usize, critic: bool) -> Vec<u32> {
    let recipe = recipe(&[&format!("trainer.zero_stage={stage}")]);
    let ranks = Ranks::new(Arc::new(collective), &recipe).expect("ranks");
    let mut config = tiny::start(&recipe).0.config;
    config.tie_word_embeddings = false;
    let weights = qurl_model::params::init(&config, 7, critic);
    let tape = TapeOptions { rows, sequences: 8, recompute: Recompute::None };
    let adamw = AdamWOptions::default();
    let options = LearnerOptions {
        compute: Format::Bf16,
        positions: 64,
        pack_once: false,
        kv_format: None,
        tape,
        adamw,
        lora: None,
    };
    let queue = &mut cpu(1).queue().expect("a queue");
    let mut learner = Learner::<Cpu>::on_ranks(queue, &config, &weights, options, &ranks).expect("a learner");
    learner.work(queue).expect("activations");
    let vocabulary = config.vocab_size as u32;
    let sequences: Vec<Vec<u32>> =
        (0..13u32).map(|s| (0..5 + s % 7).map(|t| (31 * s + 7 * t) % vocabulary).collect()).collect();
    let lengths: Vec<usize> = sequences.iter().map(Vec::len).collect();
    for _ in 0..2 {
        for shard in ranks.own_shards_of(&lengths, tape) {
            learner.begin_shard(queue, shard.passes).expect("a shard");
            for micro in shard.micros {
                let ids = &sequences[micro];
                let (batch, targets) = (whole_batch(ids), Targets::of(ids, |_, _| true));
                if critic {
                    let rows = targets.rows;
                    let loss =
                        |values: &[f32]| Ok::<_, DeviceError>(values.iter().map(|v| v - 0.5).collect());
                    learner.accumulate_values(queue, &batch, &rows, loss).expect("a micro-batch");
                } else {
                    let loss = |_: Range<usize>, out: &HeadOutput| {
                        let dlogp = vec![-0.01; out.logp.len()];
                        Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
                    };
                    let scope = LossScope::Sequence;
                    learner.accumulate(queue, &batch, targets, 1.0, scope, loss).expect("a micro-batch");
                }
            }
            learner.end_shard(queue).expect("a shard");
        }
        assert!(learner.update(queue, 1e-3).expect("an update").applied);
    }
    bits(&learner.weights(queue).expect("weights"))
}

#[test]
fn a_head_of_its_own_and_a_value_head_have_the_same_bits_however_they_are_divided() {
    for critic in [false, true] {
        // Shards of one micro-batch, and of several.
        for rows in [64, 16] {
            let alone = updated(Collective::alone(), 1, rows, critic);
            for (count, stage) in [(2, 1), (2, 3), (4, 3)] {
                let found = on_ranks(count, |collective| updated(collective, stage, rows, critic));
                let what = format!("{count} ranks, ZeRO-{stage}, {rows} rows, critic {critic}");
                assert!(found.iter().all(|bits| *bits == alone), "{what}");
            }
        }
    }
}

#[test]
fn weights_and_moments_are_divided_and_gradients_counted_in_the_plan_of_a_rank() {
    let config = ModelConfig::named("qwen2.5-0.5b").expect("a known shape");
    let tape = TapeOptions { rows: 1024, sequences: 8, recompute: Recompute::Block };
    let options = LearnerOptions {
        lora: None,
        compute: Format::Bf16,
        positions: 512,
        pack_once: false,
        kv_format: None,
        tape,
        adamw: AdamWOptions::default(),
    };
    let parameters = config.param_count() as usize;
    let parts = |count: usize, shards: usize, stage: usize| -> Vec<(String, usize)> {
        let stage = format!("trainer.zero_stage={stage}");
        let recipe = recipe(&[&format!("trainer.shards={shards}"), &stage]);
        let ranks = Ranks::new(Arc::new(Collective::counted(count - 1, count)), &recipe).expect("ranks");
        MemoryPlan::of_learner(&*cpu(1), &config, options, &ranks).expect("a plan").parts().to_vec()
    };
    let part = |parts: &[(String, usize)], name: &str| {
        parts.iter().find(|(part, _)| part.ends_with(name)).expect("a part").1
    };
    let (one, eight, divided) = (parts(1, 8, 1), parts(8, 8, 1), parts(8, 32, 3));
    assert_eq!(part(&one, "gradients"), 4 * 4 * parameters, "1 + log2(8) gradients");
    assert_eq!(part(&one, "moments"), 8 * parameters);
    assert_eq!(part(&one, "weights in f32"), 4 * parameters);
    let close = |found: usize, expected: usize, what: &str| {
        assert!(found.abs_diff(expected) < expected / 50, "{what}: {found}, expected about {expected}");
    };
    // The head is the embedding.
    let embedding = 4 * config.vocab_size * config.hidden_size;
    let block = (4 * parameters - embedding) / config.num_layers;
    // An eighth of the weights, in whole blocks, and a place for all of a block, twice where its matrices
    // travel in bf16, and of the embedding.
    close(part(&eight, "weights in f32"), parameters / 2 + embedding + 3 * block / 2, "weights in f32");
    close(part(&eight, "moments"), parameters, "moments");
    // One shard, and everyone's pieces of a block and of the embedding.
    close(part(&eight, "gradients"), 4 * parameters + embedding + block, "gradients");
    // Divided: two blocks and the embedding, two sums of pieces for four rounds, one of the longest piece,
    // everyone's pieces as before.
    let sums = 2 * parameters / 2 + embedding / 8;
    close(part(&divided, "gradients"), 2 * block + embedding + sums + embedding + block, "divided gradients");
    // The embedding in f32, and in bf16 as the head for forward and backward; one block in bf16, twice.
    close(part(&divided, "packed weights"), 2 * embedding + block, "divided packed weights");
    close(part(&divided, "weights in f32"), part(&eight, "weights in f32"), "divided weights in f32");
}
