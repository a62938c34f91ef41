//! What a machine cannot beat in each phase of a step: multiply-adds (times two) at the rate of large GEMMs
//! in the format that makes them, and bytes at the bandwidth of memory. Only work that the step cannot do
//! without is counted ([`NetworkWork`]): recomputation, padding and prefill that is made twice are ours, and
//! weights that are frozen have no gradients and no moments.

use super::super::machine::Machine;
use qurl_kernels::Format;
use qurl_rollout::Engine;
use qurl_train::cost::NetworkWork;
use qurl_train::recipe::{Recipe, RlPlan, Updates};
use qurl_train::rl::{RlTrainer, RolloutBatch};
use std::collections::BTreeMap;

/// Rates of the machine, measured.
pub struct Rates {
    /// Bytes a second.
    memory: f64,
    /// Operations a second by format.
    formats: Vec<(Format, f64)>,
}

impl Rates {
    /// Measures them in these formats.
    pub fn measure<D: Machine>(queue: &mut D::Queue, formats: &[Format]) -> anyhow::Result<Rates> {
        let mut rates = Rates { memory: D::bandwidth(queue)?, formats: Vec::new() };
        for &format in formats {
            if !rates.formats.iter().any(|(known, _)| *known == format) {
                rates.formats.push((format, 1e9 * D::peak_gflops(queue, format)?));
            }
        }
        Ok(rates)
    }

    /// That of a format which was measured.
    fn of(&self, format: Format) -> f64 {
        self.formats.iter().find(|(known, _)| *known == format).map_or(f64::NAN, |(_, rate)| *rate)
    }
}

/// Least seconds of the phases of the trainer's last step. Judging has no limit.
pub fn of_last_step<D: Machine>(
    trainer: &RlTrainer<D>,
    recipe: &Recipe,
    rates: &Rates,
    prompt: usize,
) -> BTreeMap<&'static str, f64> {
    let (plan, batch, engine) = (trainer.plan(), trainer.last_batch(), trainer.engine());
    let config = &trainer.start().config;
    let actor = NetworkWork::actor(recipe, plan, config);
    let sampler = NetworkWork::sampler(recipe, plan, config);
    let reference = NetworkWork::reference(recipe, plan, config);
    let critic = NetworkWork::critic(recipe, config);
    let packing = sampler.packing_bytes(engine.network().weight_bytes());
    let of_update = |of: &Updates, network: &NetworkWork, targets: usize| {
        let epoch = network.training(&batch.lengths(), targets).seconds(|format| rates.of(format));
        let updates = of.ppo_epochs * batch.mini_batches(of.ppo_mini_batch_size).len();
        of.ppo_epochs as f64 * epoch + updates as f64 * network.update_bytes(&of.optim) / rates.memory
    };
    let by_actor = of_update(&plan.actor, &actor, batch.tokens());
    let by_critic = plan.critic.as_ref().map(|of| of_update(of, &critic, 0));
    BTreeMap::from([
        ("quantize", packing / rates.memory),
        ("rollout", rollout(plan, &sampler, engine, batch, rates, prompt)),
        ("score", score(trainer, [&actor, &reference, &critic], batch, rates)),
        ("update", by_actor + by_critic.unwrap_or(0.0)),
    ])
}

/// Every prompt is prefilled once. No more than `max_num_seqs` sequences decode in a step, which reads all
/// packed weights, and every new token reads the keys and values before it.
fn rollout<D: Machine>(
    plan: &RlPlan,
    sampler: &NetworkWork,
    engine: &Engine<D>,
    batch: &RolloutBatch,
    rates: &Rates,
    prompt: usize,
) -> f64 {
    let rate = |format| rates.of(format);
    let lengths: Vec<usize> = batch.lengths().iter().map(|length| length - prompt).collect();
    let (tokens, longest) = (batch.tokens(), lengths.iter().copied().max().unwrap_or(0));
    let prompts = vec![prompt; plan.data.train_batch_size];
    let prefill = sampler.forward(&prompts, 0).seconds(rate);
    let seen: f64 = lengths.iter().map(|&new| (new * prompt + new * new / 2) as f64).sum();
    let token_bytes = engine.page_bytes() as f64 / engine.pages().page_size() as f64;
    let steps = tokens.div_ceil(plan.rollout.max_num_seqs).max(longest);
    let bytes = steps as f64 * engine.network().weight_bytes() as f64 + seen * token_bytes;
    prefill + (bytes / rates.memory).max(sampler.decoding(tokens).seconds(rate))
}

/// Forward passes of the actor where the update does not say prox, of the reference and of the critic.
fn score<D: Machine>(
    trainer: &RlTrainer<D>,
    [actor, reference, critic]: [&NetworkWork; 3],
    batch: &RolloutBatch,
    rates: &Rates,
) -> f64 {
    let (plan, lengths, rate) = (trainer.plan(), batch.lengths(), |format| rates.of(format));
    let first = trainer.scored_by_update(batch).end;
    let scored = batch.token_range(first..batch.sequences()).len();
    let mut seconds = actor.forward(&lengths[first..], scored).seconds(rate);
    if plan.algorithm.needs_reference() {
        seconds += reference.forward(&lengths, batch.tokens()).seconds(rate);
    }
    if plan.critic.is_some() {
        seconds += critic.forward(&lengths, 0).seconds(rate);
    }
    seconds
}
