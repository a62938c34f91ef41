//! The updates of a step: the actor by the objective, the critic by the value loss, mini-batch by mini-batch.

use super::{RlTrainer, RolloutBatch, StepRecord, TrainError};
use crate::learner::{LossGradient, LossScope, micro_batches};
use qurl_kernels::Device;
use qurl_model::compute::whole_batch;
use qurl_rl::entropy::entropy_bonus;
use qurl_rl::value::value_loss;
use qurl_rl::{Aggregation, Denominator, Tokens, to_f32};

impl<D: Device> RlTrainer<D> {
    /// One update of the actor on the sequences `mini`; the denominator belongs to the whole mini-batch.
    pub(super) fn update_actor(
        &mut self,
        batch: &RolloutBatch,
        mini: std::ops::Range<usize>,
        record: &mut StepRecord,
    ) -> Result<(), TrainError> {
        let algorithm = &self.plan.algorithm;
        let whole = batch.view(mini.clone());
        let denominator = Denominator::count(whole.mask, &whole.seq)?;
        if denominator.tokens == 0 {
            return Ok(());
        }
        let mode = algorithm.objective.loss_agg_mode(algorithm.loss_agg_mode);
        let aggregation = Aggregation { mode, loss_scale_factor: algorithm.loss_scale_factor };
        for micro in micro_batches(&batch.lengths()[mini.clone()], self.tape) {
            let micro = mini.start + micro.start..mini.start + micro.end;
            let packed = whole_batch(&batch.ids(micro.clone()));
            let part = batch.view(micro.clone());
            let weights = aggregation.token_weights(&denominator, part.mask, &part.seq)?;
            let scope = match algorithm.objective.looks_at_sequences() {
                true => LossScope::Sequence,
                false => LossScope::Token,
            };
            self.actor.accumulate(
                &mut self.queue,
                &packed,
                batch.targets(micro),
                self.plan.rollout.temperature,
                scope,
                |tokens, out| {
                    let part = part.tokens(tokens.clone());
                    let weights = &weights[tokens];
                    let tokens = Tokens {
                        theta: &out.logp,
                        prox: part.prox,
                        behav: part.behav,
                        adv: part.advantages,
                        mask: part.mask,
                        seq: &part.seq,
                    };
                    let mut outcome = algorithm.objective.evaluate(&tokens, weights)?;
                    if algorithm.kl_loss_coef != 0.0 {
                        let (kind, coef) = (algorithm.kl_loss_type, algorithm.kl_loss_coef);
                        let kl = kind.in_loss(coef, &out.logp, part.reference, part.mask, weights)?;
                        outcome.loss += kl.loss;
                        outcome.dlogp.iter_mut().zip(&kl.dlogp).for_each(|(a, b)| *a += b);
                        record.add_reference_kl(kl.kl_sum, kl.tokens);
                    }
                    let bonus = entropy_bonus(algorithm.entropy_coeff, &out.entropy, part.mask, weights)?;
                    outcome.loss += bonus.loss;
                    record.add_outcome(&outcome, bonus.entropy_sum, bonus.tokens);
                    let dentropy =
                        if algorithm.entropy_coeff == 0.0 { Vec::new() } else { to_f32(&bonus.dentropy) };
                    Ok::<_, TrainError>(LossGradient { dlogp: to_f32(&outcome.dlogp), dentropy })
                },
            )?;
        }
        record.add_update(self.actor.update(&mut self.queue, record.lr)?);
        Ok(())
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
                for micro in micro_batches(&batch.lengths()[mini.clone()], self.tape) {
                    let micro = mini.start + micro.start..mini.start + micro.end;
                    let part = batch.view(micro.clone());
                    let weights = Aggregation::default().token_weights(&denominator, part.mask, &part.seq)?;
                    let packed = whole_batch(&batch.ids(micro.clone()));
                    critic.accumulate_values(
                        &mut self.queue,
                        &packed,
                        &batch.targets(micro).rows,
                        |values| {
                            let (old, returns, range) = (part.values, part.returns, updates.cliprange_value);
                            let loss = value_loss(values, old, returns, part.mask, &weights, range)?;
                            record.add_value_loss(loss.loss);
                            Ok::<_, TrainError>(to_f32(&loss.dvalue))
                        },
                    )?;
                }
                record.add_value_update(critic.update(&mut self.queue, lr)?);
            }
        }
        Ok(())
    }
}
