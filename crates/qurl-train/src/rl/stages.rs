//! The beginning of a stage: what separate runs, each started from the model of the one before, would have
//! anew.
//!
//! All of it happens between two steps and changes only what a checkpoint holds, so a run that resumes from a
//! checkpoint taken before, at or after the beginning of a stage computes the same bits.

use super::{RlTrainer, TrainError};
use qurl_kernels::Device;
use qurl_rl::KlCoefficient;

impl<D: Device> RlTrainer<D> {
    /// Where a stage begins with this step: the new reference and the new optimizers that it asks for.
    pub(super) fn begin_stage(&mut self) -> Result<(), TrainError> {
        let Some(stage) = self.plan.run.stages.iter().find(|s| s.from_step == self.step) else {
            return Ok(());
        };
        tracing::debug!(step = self.step, stage.new_reference, stage.new_optimizer, "stage begins");
        if stage.new_optimizer {
            self.actor.reset_optimizer(&mut self.queue)?;
            if let Some(critic) = &mut self.critic {
                critic.reset_optimizer(&mut self.queue)?;
            }
        }
        if stage.new_reference
            && let Some(reference) = &mut self.reference
        {
            self.actor.refreeze(&mut self.queue, reference)?;
            // What a checkpoint keeps as the reference.
            self.start.weights = self.actor.weights(&mut self.queue)?;
            let settings = self.plan.algorithm.kl_in_reward.as_ref();
            self.kl = settings.map(|k| KlCoefficient::new(k.kl_ctrl)).transpose()?;
        }
        Ok(())
    }
}
