//! When the states of a run are written, and what is kept of them: every kind of training does it this way.

use super::{CheckpointError, ModelFiles, Snapshot, Store, Writer};
use crate::ranks::Ranks;
use crate::runlog::Logged;
use std::path::PathBuf;

/// The checkpoints of a run while it runs.
pub struct Keeper {
    store: Store,
    writer: Writer,
    ranks: Ranks,
    save_freq: u64,
}

impl Keeper {
    /// Writes into a store every `save_freq` steps; `newest` is the step that the run resumes from.
    pub fn new(
        store: Store,
        model: ModelFiles,
        ranks: &Ranks,
        newest: Option<u64>,
        save_freq: u64,
    ) -> Keeper {
        let writer = Writer::new(store.clone(), model, ranks.clone(), newest);
        Keeper { store, writer, ranks: ranks.clone(), save_freq }
    }

    /// Whether checkpoints are written at all, but for those of a run that is stopped.
    pub fn is_on(&self) -> bool {
        self.save_freq > 0
    }

    /// Every `save_freq` steps, at the end, and after a step whose score is among the best.
    pub fn wants(&mut self, step: u64, ends: bool, score: Option<f64>) -> Result<bool, CheckpointError> {
        if !self.is_on() {
            return Ok(false);
        }
        if ends || step.is_multiple_of(self.save_freq) {
            return Ok(true);
        }
        let Some(score) = score else { return Ok(false) };
        self.finish()?; // the one being written may be one of the best, too
        let kept = if self.ranks.is_first() { self.store.would_keep(step, score) } else { Ok(false) };
        match kept {
            Ok(kept) => Ok(self.ranks.of_first(kept)?),
            Err(error) => Err(error),
        }
    }

    /// Whether the newest checkpoint, there or under way, is of this step.
    pub fn has(&self, step: u64) -> bool {
        self.writer.has(step)
    }

    /// Begins to write a checkpoint, after what is in the logs.
    pub fn start(&mut self, snapshot: Snapshot, logged: Logged) -> Result<(), CheckpointError> {
        self.writer.start(snapshot, logged)
    }

    /// An error of a write that has ended meanwhile.
    pub fn poll(&mut self) -> Result<(), CheckpointError> {
        self.writer.poll()
    }

    /// Waits for the checkpoint that is being written, if any.
    pub fn finish(&mut self) -> Result<(), CheckpointError> {
        self.writer.finish()
    }

    /// The newest checkpoint of a step up to `newest`, if one is left.
    pub fn newest_up_to(&self, newest: u64) -> Result<Option<PathBuf>, CheckpointError> {
        Ok(self.store.steps()?.into_iter().rfind(|&step| step <= newest).map(|step| self.store.path(step)))
    }

    /// Where the checkpoint of a step is, if it was kept.
    pub fn kept(&self, step: u64) -> Result<Option<PathBuf>, CheckpointError> {
        Ok(self.store.steps()?.contains(&step).then(|| self.store.path(step)))
    }
}
