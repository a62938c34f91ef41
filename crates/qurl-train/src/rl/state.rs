//! The state of a run in and out: what a checkpoint holds of a trainer.

use super::{RlTrainer, TrainError};
use crate::base;
use crate::checkpoint::Snapshot;
use crate::divided::Frozen;
use crate::start::StartAdapters;
use qurl_kernels::{Device, Rounding};
use qurl_model::{ModelConfig, Params};
use qurl_quant::uaq;

impl<D: Device> RlTrainer<D> {
    /// Steps done so far.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// The actor (or its adapters) as the run hands it on: with the scaling of update-aware quantization
    /// taken off, so that the next run may scale it again, unless the recipe keeps it (`run.export_uaq`). The
    /// configuration says which.
    pub fn model(&mut self) -> Result<(ModelConfig, Params<Vec<f32>>), TrainError> {
        let (mut config, mut weights) = (self.start.config.clone(), self.actor.weights(&mut self.queue)?);
        if !self.plan.run.export_uaq && self.start.adapters.is_none() {
            uaq::rescale(&mut weights, &mut config, 1.0)?;
        }
        Ok((config, weights))
    }

    /// A copy of everything that the next steps depend on. `recipe` is the text that goes into the
    /// checkpoint.
    pub fn snapshot(&mut self, recipe: &str) -> Result<Snapshot, TrainError> {
        let critic = self.critic.as_mut().map(|c| c.snapshot(&mut self.queue)).transpose()?;
        let reference = self.kept_reference().map(|_| self.start.weights.clone());
        let mut snapshot = Snapshot::new(
            self.step,
            self.drawn,
            recipe.to_string(),
            self.problems,
            self.kl,
            self.actor.snapshot(&mut self.queue)?,
            critic,
            reference,
            self.measured.clone(),
            self.lag.after(self.plan.rollout.old_versions_after(self.step)),
        );
        snapshot.state.base = self.actor.base_sums().map(<[u64]>::to_vec);
        Ok(snapshot)
    }

    /// The reference, where it is not the frozen base.
    fn kept_reference(&self) -> Option<&Frozen<D>> {
        self.reference.as_ref().filter(|_| self.start.adapters.is_none())
    }

    /// Takes over the state of a run with the same recipe; a warning where it cannot know whether the frozen
    /// base is the same.
    pub fn restore(&mut self, snapshot: Snapshot) -> Result<Option<String>, TrainError> {
        let there = [snapshot.critic.is_some(), snapshot.reference.is_some(), snapshot.measured.is_some()];
        let wanted = [self.critic.is_some(), self.kept_reference().is_some(), self.measured.is_some()];
        if there != wanted {
            return Err(TrainError::OtherState { found: there, expected: wanted });
        }
        if snapshot.state.problems.is_some_and(|problems| problems != self.problems) {
            return Err(TrainError::OtherProblems);
        }
        let warning = match (&self.start.adapters, self.actor.base_sums()) {
            (Some(StartAdapters { dir, .. }), Some(own)) => {
                base::check(dir, &self.start.config, own, snapshot.state.base.as_deref())?
            }
            _ => None,
        };
        let found: Vec<u64> = snapshot.old.iter().map(|old| old.version).collect();
        let expected: Vec<u64> = self.plan.rollout.old_versions_after(snapshot.state.step).collect();
        if found != expected {
            return Err(TrainError::OtherLag { found, expected });
        }
        self.lag.restore(snapshot.old);
        if let (Some(reference), Some(weights)) = (&mut self.reference, snapshot.reference) {
            // By way of the actor's memory, which is written next: a second copy on the device might not fit.
            self.actor.master.write(&mut self.queue, &weights);
            self.actor.refreeze(&mut self.queue, reference)?;
            self.start.weights = weights;
        }
        self.actor.restore(&mut self.queue, &snapshot.actor)?;
        if let (Some(critic), Some(state)) = (&mut self.critic, &snapshot.critic) {
            critic.restore(&mut self.queue, state)?;
        }
        self.measured = snapshot.measured;
        self.kl = snapshot.state.kl;
        self.step = snapshot.state.step;
        self.drawn = snapshot.state.drawn;
        let version = self.version()?;
        let (queue, master) = (&mut self.queue, &mut self.actor.master);
        self.engine.load_with(version, |net| net.refresh_leaves(queue, master, Rounding::Nearest))?;
        Ok(warning)
    }
}
