//! The updates of a step: the actor by the objective, the critic by the value loss, mini-batch by mini-batch.
//!
//! Until the first update the actor is prox, bit for bit, since scoring and training run the same forward. So
//! the first mini-batch is not scored before: its forward says theta and prox at once.
//!
//! A mini-batch is computed shard by shard, each rank its own shards ([`crate::shards`]). What the loss says
//! on the way is kept token range by token range and added up afterwards by all ranks, in the order of the
//! sequences: the figures of a step, too, are the same for any number of ranks.

use super::batch::View;
use super::probe::FullKl;
use super::record::Said;
use super::score::by_micro_batches;
use super::{RlTrainer, RolloutBatch, StepRecord, TrainError};
use crate::learner::{LossGradient, LossScope};
use crate::ranks::{Ranks, Shard};
use qurl_kernels::Device;
use qurl_model::compute::{TapeOptions, whole_batch};
use qurl_rl::entropy::entropy_bonus;
use qurl_rl::value::value_loss;
use qurl_rl::{Aggregation, Denominator, Mismatch, Tokens, to_f32};
use std::ops::Range;

impl<D: Device> RlTrainer<D> {
    /// The sequences that are not scored, because the first update says their prox: those of its mini-batch,
    /// unless prox is wanted earlier, for rewards or to reject sequences.
    pub fn scored_by_update(&self, batch: &RolloutBatch) -> Range<usize> {
        let first = batch.mini_batches(self.plan.actor.ppo_mini_batch_size).into_iter().next();
        first.filter(|_| !self.plan.algorithm.needs_prox_first()).unwrap_or(0..0)
    }

    /// All updates of a step. What is measured of the rollouts, of all tokens that were `sampled`, is
    /// computed meanwhile, on a thread of its own.
    pub(super) fn updates(
        &mut self,
        batch: &mut RolloutBatch,
        sampled: &[bool],
        full_kl: FullKl,
        record: &mut StepRecord,
    ) -> Result<(), TrainError> {
        record.lr = self.plan.lr_at(&self.plan.actor, self.step);
        let mini_batches = batch.mini_batches(self.plan.actor.ppo_mini_batch_size);
        let epochs = self.plan.actor.ppo_epochs;
        let mut minis = std::iter::repeat_n(mini_batches, epochs).flatten();
        if let Some(first) = minis.next() {
            let known = self.scored_by_update(batch).is_empty();
            let theta = self.update_actor(batch, first.clone(), known, record)?;
            if !known {
                let tokens = batch.token_range(first);
                batch.prox[tokens].copy_from_slice(&theta);
            }
        }
        let batch = &*batch;
        let vocabulary = self.start.config.vocab_size;
        let temperature = f64::from(self.plan.rollout.temperature);
        std::thread::scope(|scope| {
            let measuring = scope.spawn(|| {
                let mismatch = Mismatch::measure(&batch.behav, &batch.prox, sampled, &batch.seq)?;
                Ok::<_, TrainError>((mismatch, full_kl.measure(vocabulary, temperature)?))
            });
            for mini in minis {
                self.update_actor(batch, mini, true, record)?;
            }
            self.update_critic(batch, record)?;
            let measured = measuring.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            record.mismatch = measured.0;
            record.full_kl = FullKl::mean(&self.ranks, measured.1)?;
            Ok(())
        })
    }

    /// One update of the actor on the sequences `mini`; the denominator belongs to the whole mini-batch.
    /// Where prox is not `known`, it is theta. Returns theta, as it was before the update.
    fn update_actor(
        &mut self,
        batch: &RolloutBatch,
        mini: Range<usize>,
        known: bool,
        record: &mut StepRecord,
    ) -> Result<Vec<f32>, TrainError> {
        let algorithm = &self.plan.algorithm;
        let whole = batch.view(mini.clone());
        let denominator = Denominator::count(whole.mask, &whole.seq)?;
        record.add_left_out(whole.mask.len() as u64 - denominator.tokens);
        if denominator.tokens == 0 {
            return Ok(Vec::new());
        }
        let (mut all_theta, mut all_said) = (Vec::new(), Vec::new());
        let mode = algorithm.objective.loss_agg_mode(algorithm.loss_agg_mode);
        let aggregation = Aggregation { mode, loss_scale_factor: algorithm.loss_scale_factor };
        let kept = self.kept_of_mini_batch(batch, mini.clone(), known)?;
        let algorithm = &self.plan.algorithm;
        let first = batch.token_range(mini.clone()).start;
        for shard in own_shards(&self.ranks, batch, mini, self.tape) {
            let (mut theta, mut said) = (Vec::new(), Vec::new());
            self.actor.begin_shard(&mut self.queue, shard.passes)?;
            for micro in shard.micros {
                let packed = whole_batch(&batch.ids(micro.clone()));
                let part = batch.view(micro.clone());
                let weights = aggregation.token_weights(&denominator, part.mask, &part.seq)?;
                let scope = match algorithm.objective.looks_at_sequences() {
                    true => LossScope::Sequence,
                    false => LossScope::Token,
                };
                self.actor.accumulate_straight(
                    &mut self.queue,
                    self.straight.then(|| self.engine.network()),
                    &packed,
                    batch.targets(micro.clone()),
                    self.plan.rollout.temperature,
                    scope,
                    |tokens, out| {
                        let at = batch.token_range(micro.clone()).start - first;
                        let kept = kept.as_ref().map(|kept| &kept[at + tokens.start..at + tokens.end]);
                        let part = part.tokens(tokens.clone());
                        let weights = &weights[tokens];
                        let tokens = Tokens {
                            theta: &out.logp,
                            prox: if known { part.prox } else { &out.logp },
                            behav: part.behav,
                            adv: part.advantages,
                            mask: part.mask,
                            seq: &part.seq,
                        };
                        theta.extend_from_slice(&out.logp);
                        let mut outcome = match kept {
                            None => algorithm.objective.evaluate(&tokens, weights)?,
                            kept => algorithm.objective.evaluate_kept(&tokens, weights, kept)?,
                        };
                        let mut reference_kl = None;
                        if algorithm.kl_loss_coef != 0.0 {
                            let (kind, coef) = (algorithm.kl_loss_type, algorithm.kl_loss_coef);
                            let kl = kind.in_loss(coef, &out.logp, part.reference, part.mask, weights)?;
                            outcome.loss += kl.loss;
                            outcome.dlogp.iter_mut().zip(&kl.dlogp).for_each(|(a, b)| *a += b);
                            reference_kl = Some((kl.kl_sum, kl.tokens));
                        }
                        let bonus = entropy_bonus(algorithm.entropy_coeff, &out.entropy, part.mask, weights)?;
                        outcome.loss += bonus.loss;
                        said.push(Said {
                            facts: outcome.facts,
                            loss: outcome.loss,
                            entropy_sum: bonus.entropy_sum,
                            tokens: bonus.tokens,
                            reference_kl,
                        });
                        let dentropy =
                            if algorithm.entropy_coeff == 0.0 { Vec::new() } else { to_f32(&bonus.dentropy) };
                        Ok::<_, TrainError>(LossGradient { dlogp: to_f32(&outcome.dlogp), dentropy })
                    },
                )?;
            }
            self.actor.end_shard(&mut self.queue)?;
            all_theta.push(theta);
            all_said.push(said);
        }
        self.ranks.join_shards(all_said)?.iter().for_each(|said| record.add_said(said));
        record.add_update(self.actor.update(&mut self.queue, record.lr)?);
        if self.straight {
            self.quantize()?; // the next forward pass is of these weights
        }
        Ok(self.ranks.join_shards(all_theta)?)
    }

    /// Which tokens of a mini-batch an objective keeps that looks at all of them before it says anything of
    /// one (`m2po`): theta of the whole mini-batch is computed once more than elsewhere.
    fn kept_of_mini_batch(
        &mut self,
        batch: &RolloutBatch,
        mini: Range<usize>,
        known: bool,
    ) -> Result<Option<Vec<bool>>, TrainError> {
        let objective = self.plan.algorithm.objective;
        if !objective.looks_at_mini_batch() {
            return Ok(None);
        }
        let (actor, queue) = (&mut self.actor, &mut self.queue);
        let forward = self.straight.then(|| self.engine.network());
        let temperature = self.plan.rollout.temperature;
        let theta = by_micro_batches(&self.ranks, batch, mini.clone(), self.tape, |micro| match micro {
            Some((ids, range)) => {
                let targets = batch.targets(range);
                actor.score_with(queue, forward, &ids, &targets, temperature).map(|out| out.logp)
            }
            None => actor.idle(queue).map(|()| Vec::new()),
        })?;
        let View { seq, mask, behav, prox, advantages: adv, .. } = batch.view(mini);
        let prox = if known { prox } else { &theta };
        Ok(objective.kept(&Tokens { theta: &theta, prox, behav, adv, mask, seq: &seq }))
    }

    /// The critic's updates on the same batch.
    pub(super) fn update_critic(
        &mut self,
        batch: &RolloutBatch,
        record: &mut StepRecord,
    ) -> Result<(), TrainError> {
        let (Some(critic), Some(updates)) = (&mut self.critic, &self.plan.critic) else { return Ok(()) };
        let lr = self.plan.lr_at(updates, self.step);
        for _ in 0..updates.ppo_epochs {
            for mini in batch.mini_batches(updates.ppo_mini_batch_size) {
                let whole = batch.view(mini.clone());
                let denominator = Denominator::count(whole.mask, &whole.seq)?;
                if denominator.tokens == 0 {
                    continue; // as the actor: an update without a gradient is one of decay and momentum
                }
                let mut all_losses = Vec::new();
                for shard in own_shards(&self.ranks, batch, mini, self.tape) {
                    let mut losses = Vec::new();
                    critic.begin_shard(&mut self.queue, shard.passes)?;
                    for micro in shard.micros {
                        let part = batch.view(micro.clone());
                        let weights =
                            Aggregation::default().token_weights(&denominator, part.mask, &part.seq)?;
                        let packed = whole_batch(&batch.ids(micro.clone()));
                        let rows = batch.targets(micro).rows;
                        critic.accumulate_values(&mut self.queue, &packed, &rows, |values| {
                            let (old, returns, range) = (part.values, part.returns, updates.cliprange_value);
                            let loss = value_loss(values, old, returns, part.mask, &weights, range)?;
                            losses.push(loss.loss);
                            Ok::<_, TrainError>(to_f32(&loss.dvalue))
                        })?;
                    }
                    critic.end_shard(&mut self.queue)?;
                    all_losses.push(losses);
                }
                self.ranks.join_shards(all_losses)?.iter().for_each(|&loss| record.add_value_loss(loss));
                record.add_value_update(critic.update(&mut self.queue, lr)?);
            }
        }
        Ok(())
    }
}

/// This rank's shards of a mini-batch, as ranges of sequences of the whole batch.
fn own_shards(ranks: &Ranks, batch: &RolloutBatch, mini: Range<usize>, tape: TapeOptions) -> Vec<Shard> {
    let mut shards = ranks.own_shards_of(&batch.lengths()[mini.clone()], tape);
    for micro in shards.iter_mut().flat_map(|shard| &mut shard.micros) {
        *micro = mini.start + micro.start..mini.start + micro.end;
    }
    shards
}
