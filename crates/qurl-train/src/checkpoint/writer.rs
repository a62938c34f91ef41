//! Checkpoints written on a thread of their own, one at a time, while training continues.

use super::{CheckpointError, ModelFiles, Snapshot, Store};
use std::fs::File;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

/// Writes the checkpoints of a run.
pub struct Writer {
    shared: Arc<(Store, ModelFiles)>,
    running: Option<JoinHandle<Result<(), CheckpointError>>>,
    newest: Option<u64>,
}

impl Writer {
    /// A writer into a store; `newest` is the step that the run resumes from.
    pub fn new(store: Store, model: ModelFiles, newest: Option<u64>) -> Writer {
        Writer { shared: Arc::new((store, model)), running: None, newest }
    }

    /// Whether the newest checkpoint, there or under way, is of this step.
    pub fn has(&self, step: u64) -> bool {
        self.newest == Some(step)
    }

    /// An error of a write that has ended meanwhile.
    pub fn poll(&mut self) -> Result<(), CheckpointError> {
        match &self.running {
            Some(thread) if thread.is_finished() => self.finish(),
            _ => Ok(()),
        }
    }

    /// Waits for the write that is under way, if any.
    pub fn finish(&mut self) -> Result<(), CheckpointError> {
        match self.running.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(CheckpointError::WriterPanicked),
            None => Ok(()),
        }
    }

    /// Writes a checkpoint in the background, after what is in `logs`: a checkpoint that is there means that
    /// the logs up to its step are. One that is still being written is waited for.
    pub fn start(&mut self, snapshot: Snapshot, logs: Vec<File>) -> Result<(), CheckpointError> {
        self.finish()?;
        let shared = self.shared.clone();
        let step = snapshot.state.step;
        let write = move || {
            let began = Instant::now();
            let (store, model) = &*shared;
            for log in logs {
                log.sync_data()
                    .map_err(CheckpointError::io(store.dir(), "have the logs beside it synced"))?;
            }
            let path = store.write(&snapshot, model)?;
            store.prune(step)?;
            let seconds = began.elapsed().as_secs_f64();
            tracing::info!(step, bytes = snapshot.bytes(), seconds, path = %path.display(), "checkpoint \
                                                                                             written");
            Ok(())
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_string()).spawn(write);
        self.running =
            Some(thread.map_err(CheckpointError::io(self.shared.0.dir(), "be written by a new thread"))?);
        self.newest = Some(step);
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // On the way out after another error, which matters more; what was written is checked when it is
        // read.
        if let Err(error) = self.finish() {
            tracing::error!(%error, "checkpoint not written");
        }
    }
}
