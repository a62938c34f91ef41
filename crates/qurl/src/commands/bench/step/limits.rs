//! What a machine cannot beat in each phase of a step: multiply-adds (times two) at the rate of large GEMMs,
//! and bytes at the bandwidth of memory. Only work that the step cannot do without is counted: recomputation,
//! padding and prefill that is made twice are ours.

use super::super::machine::Machine;
use qurl_kernels::Format;
use qurl_model::ModelConfig;
use qurl_model::compute::NetworkOptions;
use qurl_rollout::Engine;
use qurl_train::recipe::RlPlan;
use qurl_train::rl::{RlTrainer, RolloutBatch};
use std::collections::BTreeMap;

/// Rates of the machine, measured.
pub struct Rates {
    /// Bytes a second.
    memory: f64,
    /// Operations a second in the formats of the training, and of the rollout's blocks and head.
    training: f64,
    blocks: f64,
    head: f64,
}

impl Rates {
    /// Measures them.
    pub fn measure<D: Machine>(
        queue: &mut D::Queue,
        compute: Format,
        rollout: NetworkOptions,
    ) -> anyhow::Result<Rates> {
        Ok(Rates {
            memory: D::bandwidth(queue)?,
            training: 1e9 * D::peak_gflops(queue, compute)?,
            blocks: 1e9 * D::peak_gflops(queue, rollout.format)?,
            head: 1e9 * D::peak_gflops(queue, rollout.head_format)?,
        })
    }
}

/// Operations of a forward pass.
struct Work {
    /// Of the blocks' linear layers, a token.
    linear: f64,
    /// Of the head, a token.
    head: f64,
    /// Of attention, a token and a position that it sees.
    attention: f64,
}

impl Work {
    fn of(c: &ModelConfig) -> Work {
        let weights = c.num_layers * c.hidden_size * (c.qkv_dim() + c.q_dim() + 3 * c.intermediate_size);
        Work {
            linear: 2.0 * weights as f64,
            head: 2.0 * (c.vocab_size * c.hidden_size) as f64,
            attention: 4.0 * (c.num_layers * c.q_dim()) as f64,
        }
    }

    /// Whole sequences; every token sees itself and those before it.
    fn blocks(&self, lengths: &[usize]) -> f64 {
        let of = |&length: &usize| {
            let (tokens, seen) = (length as f64, (length * (length + 1) / 2) as f64);
            self.linear * tokens + self.attention * seen
        };
        lengths.iter().map(of).sum()
    }
}

/// Least seconds of the phases of the trainer's last step. Judging has no limit.
pub fn of_last_step<D: Machine>(
    trainer: &RlTrainer<D>,
    rates: &Rates,
    prompt: usize,
) -> BTreeMap<&'static str, f64> {
    let (plan, batch, engine) = (trainer.plan(), trainer.last_batch(), trainer.engine());
    let config = &trainer.start().config;
    let parameters = config.param_count() as f64;
    let packed = engine.network().weight_bytes() as f64;
    BTreeMap::from([
        ("quantize", (4.0 * parameters + packed) / rates.memory),
        ("rollout", rollout(plan, engine, batch, rates, prompt)),
        ("score", score(trainer, batch, rates)),
        ("update", update(plan, config, batch, rates)),
    ])
}

/// Every prompt is prefilled once. No more than `max_num_seqs` sequences decode in a step, which reads all
/// packed weights, and every new token reads the keys and values before it.
fn rollout<D: Machine>(
    plan: &RlPlan,
    engine: &Engine<D>,
    batch: &RolloutBatch,
    rates: &Rates,
    prompt: usize,
) -> f64 {
    let work = Work::of(engine.network().config());
    let lengths: Vec<usize> = batch.lengths().iter().map(|length| length - prompt).collect();
    let (tokens, longest) = (batch.tokens(), lengths.iter().copied().max().unwrap_or(0));
    let prompts = vec![prompt; plan.data.train_batch_size];
    let prefill = work.blocks(&prompts) / rates.blocks;
    let seen: f64 = lengths.iter().map(|&new| (new * prompt + new * new / 2) as f64).sum();
    let token_bytes = engine.page_bytes() as f64 / engine.pages().page_size() as f64;
    let steps = tokens.div_ceil(plan.rollout.max_num_seqs).max(longest);
    let bytes = steps as f64 * engine.network().weight_bytes() as f64 + seen * token_bytes;
    let linear = tokens as f64 * (work.linear / rates.blocks + work.head / rates.head);
    prefill + (bytes / rates.memory).max(linear)
}

/// Forward passes of the actor where the update does not say prox, of the reference and of the critic.
fn score<D: Machine>(trainer: &RlTrainer<D>, batch: &RolloutBatch, rates: &Rates) -> f64 {
    let (plan, work) = (trainer.plan(), Work::of(&trainer.start().config));
    let lengths = batch.lengths();
    let first = trainer.scored_by_update(batch).end;
    let scored = batch.token_range(first..batch.sequences()).len() as f64;
    let mut operations = work.blocks(&lengths[first..]) + work.head * scored;
    if plan.algorithm.needs_reference() {
        operations += work.blocks(&lengths) + work.head * batch.tokens() as f64;
    }
    if plan.critic.is_some() {
        operations += work.blocks(&lengths);
    }
    operations / rates.training
}

/// Forward and backward of the actor (and the critic, which has no head) in every epoch, and AdamW, which
/// reads weight, gradient and two moments and writes all but the gradient.
fn update(plan: &RlPlan, config: &ModelConfig, batch: &RolloutBatch, rates: &Rates) -> f64 {
    let work = Work::of(config);
    let blocks = 3.0 * work.blocks(&batch.lengths());
    let head = 3.0 * work.head * batch.tokens() as f64;
    let adamw = 28.0 * config.param_count() as f64 / rates.memory;
    let of = |epochs: usize, mini: usize, operations: f64| {
        let updates = epochs * batch.mini_batches(mini).len();
        epochs as f64 * operations / rates.training + updates as f64 * adamw
    };
    let actor = of(plan.actor.ppo_epochs, plan.actor.ppo_mini_batch_size, blocks + head);
    let critic = plan.critic.as_ref().map(|c| of(c.ppo_epochs, c.ppo_mini_batch_size, blocks));
    actor + critic.unwrap_or(0.0)
}
