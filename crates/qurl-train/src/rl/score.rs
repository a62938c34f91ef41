//! What a step knows of its rollouts before the first update: log-probs under the actor and the reference,
//! values, and the advantages that follow.

use super::{RlTrainer, RolloutBatch, StepRecord, TrainError};
use crate::ranks::Ranks;
use crate::shards::micro_batches;
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::{Batch, TapeOptions, whole_batch};
use qurl_rl::advantage::Rollouts;
use qurl_rl::to_f32;
use std::ops::Range;

impl<D: Device> RlTrainer<D> {
    /// Log-probs of the response tokens under the actor, at the sampling temperature; NaN for those that the
    /// first update computes anyway.
    pub(super) fn prox(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let unscored = self.scored_by_update(batch);
        let (actor, queue) = (&mut self.actor, &mut self.queue);
        let forward = self.straight.then(|| self.engine.network());
        let temperature = self.plan.rollout.temperature;
        let mut prox = vec![f32::NAN; batch.token_range(unscored.clone()).len()];
        let sequences = unscored.end..batch.sequences();
        let scored = by_micro_batches(&self.ranks, batch, sequences, self.tape, |micro| match micro {
            Some((ids, range)) => {
                let targets = batch.targets(range);
                actor.score_with(queue, forward, &ids, &targets, temperature).map(|out| out.logp)
            }
            None => actor.idle(queue).map(|()| Vec::new()),
        })?;
        prox.extend(scored);
        Ok(prox)
    }

    /// The same under the reference model; empty where there is none.
    pub(super) fn reference_logprobs(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let Some(reference) = &self.reference else { return Ok(Vec::new()) };
        let (actor, queue) = (&mut self.actor, &mut self.queue);
        let temperature = self.plan.rollout.temperature;
        by_micro_batches(&self.ranks, batch, 0..batch.sequences(), self.tape, |micro| match micro {
            Some((ids, range)) => {
                let targets = batch.targets(range);
                actor.score_frozen(queue, reference, &ids, &targets, temperature).map(|out| out.logp)
            }
            None => actor.idle_with(queue, reference).map(|()| Vec::new()),
        })
    }

    /// The critic's value of the state before each response token; empty where there is no critic.
    pub(super) fn values(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let Some(critic) = &mut self.critic else { return Ok(Vec::new()) };
        let queue = &mut self.queue;
        by_micro_batches(&self.ranks, batch, 0..batch.sequences(), self.tape, |micro| match micro {
            Some((ids, range)) => critic.values(queue, &ids, &batch.targets(range).rows),
            None => critic.idle(queue).map(|()| Vec::new()),
        })
    }

    /// Rewards of tokens (with KL to the reference taken off where asked), then advantages and returns. What
    /// the objective rejects leaves the mask.
    pub(super) fn advantages(
        &mut self,
        batch: &mut RolloutBatch,
        record: &mut StepRecord,
    ) -> Result<(), TrainError> {
        let mut rewards: Vec<f64> = batch.rewards.iter().map(|&r| r as f64).collect();
        if let (Some(settings), Some(coefficient)) = (&self.plan.algorithm.kl_in_reward, &mut self.kl) {
            let (prox, reference): (Vec<f64>, Vec<f64>) = (wide(&batch.prox), wide(&batch.reference));
            let kl = settings.kl_penalty.in_reward(
                coefficient.value(),
                &rewards,
                &prox,
                &reference,
                &batch.mask,
                &batch.seq,
            )?;
            rewards = kl.rewards;
            record.reference_kl = Some(kl.mean_kl);
            record.kl_coef = Some(coefficient.value());
            coefficient.update(kl.mean_kl, batch.sequences());
        }
        let values = wide(&batch.values);
        let values = self.critic.is_some().then_some(values.as_slice());
        let algorithm = &self.plan.algorithm;
        let accepted = algorithm.objective.accepted(&batch.behav, &batch.prox, &batch.mask, &batch.seq)?;
        let estimate = algorithm.adv_estimator.estimate(&Rollouts {
            rewards: &rewards,
            mask: &batch.mask,
            seq: &batch.seq,
            groups: &batch.groups,
            values,
            accepted: accepted.as_deref(),
        })?;
        batch.advantages = to_f32(&estimate.advantages);
        batch.returns = to_f32(&estimate.returns);
        if let Some(accepted) = accepted {
            batch.mask = accepted;
        }
        Ok(())
    }
}

/// Collects what `score` says of each micro-batch of these sequences, in order. Each rank asks for its part
/// of them; a sequence's scores do not depend on what is computed with it. Where all ranks must pass alike,
/// those that have fewer micro-batches are asked for none.
pub(super) fn by_micro_batches(
    ranks: &Ranks,
    batch: &RolloutBatch,
    sequences: Range<usize>,
    tape: TapeOptions,
    mut score: impl FnMut(Option<(Batch, Range<usize>)>) -> Result<Vec<f32>, DeviceError>,
) -> Result<Vec<f32>, TrainError> {
    let (first, lengths) = (sequences.start, &batch.lengths()[sequences]);
    let part = ranks.part_of(lengths);
    let mut own = Vec::with_capacity(batch.token_range(first + part.start..first + part.end).len());
    let mut micros = micro_batches(&lengths[part.clone()], tape).into_iter();
    for _ in 0..ranks.passes_of(lengths, tape) {
        own.extend(score(micros.next().map(|micro| {
            let first = first + part.start;
            let range = first + micro.start..first + micro.end;
            (whole_batch(&batch.ids(range.clone())), range)
        }))?);
    }
    Ok(ranks.join(own)?)
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v as f64).collect()
}
