//! Which states of a run are kept, and when they are written.

use super::{Run, RunError};
use crate::checkpoint::Snapshot;
use crate::rl::Tested;
use qurl_kernels::Device;

impl<D: Device> Run<D> {
    /// Every `trainer.save_freq` steps, at the end, and after a step that is among the best tested; never
    /// while training shows symptoms (unless the recipe does not care), so that what was saved before is not
    /// pushed out.
    pub(super) fn wants_checkpoint(&mut self, step: u64, ends: bool) -> Result<bool, RunError> {
        let healthy = self.health.is_good() || self.health.patience == 0;
        let score = self.tested.map(|tested| tested.score());
        Ok(healthy && self.keeper.wants(step, ends, score).map_err(RunError::Checkpoint)?)
    }

    /// The state as it is, with what an evaluation of it found.
    pub(super) fn snapshot(&mut self, tested: Option<Tested>) -> Result<Snapshot, RunError> {
        let mut snapshot = self.trainer.snapshot(&self.text)?;
        snapshot.state.set_before(self.before);
        snapshot.state.test_accuracy = tested.map(|tested| tested.score());
        Ok(snapshot)
    }

    /// Begins to write a checkpoint of the state as it is.
    pub(super) fn start_checkpoint(&mut self, tested: Option<Tested>) -> Result<(), RunError> {
        let snapshot = self.snapshot(tested)?;
        self.keeper.start(snapshot, self.log.logged()?).map_err(RunError::Checkpoint)
    }

    /// Waits for the checkpoint that is being written, if any.
    pub(super) fn finish_checkpoints(&mut self) -> Result<(), RunError> {
        self.keeper.finish().map_err(RunError::Checkpoint)
    }

    /// Saves the state after the last whole step, if that was not done; also where checkpoints are switched
    /// off.
    pub(super) fn save_here(&mut self) -> Result<(), RunError> {
        if !self.keeper.has(self.trainer.steps_done()) {
            self.start_checkpoint(self.tested)?;
        }
        self.finish_checkpoints()
    }
}
