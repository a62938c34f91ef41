//! Checkpoints written on a thread of their own, one at a time, while training continues.
//!
//! Every rank writes its files under the checkpoint's temporary name, and rank 0 puts it into its place once
//! all have: that is agreed upon where the run's own thread asks ([`Writer::poll`], [`Writer::finish`]),
//! which all ranks do at the same places, so that exchanges keep their order.

use super::tensors::Pieces;
use super::{CheckpointError, ModelFiles, Snapshot, Store};
use crate::ranks::Ranks;
use crate::runlog::Logged;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

type Thread = JoinHandle<Result<(), CheckpointError>>;

/// Writes the checkpoints of a run.
pub struct Writer {
    shared: Arc<(Store, ModelFiles)>,
    ranks: Ranks,
    running: Stage,
    newest: Option<u64>,
}

/// What is under way.
enum Stage {
    /// Nothing.
    Idle,
    /// This rank's files, and at the only rank all that follows.
    Writing(u64, Thread),
    /// All ranks have written; rank 0 commits.
    Committing(Option<Thread>),
}

impl Writer {
    /// A writer into a store; `newest` is the step that the run resumes from.
    pub fn new(store: Store, model: ModelFiles, ranks: Ranks, newest: Option<u64>) -> Writer {
        Writer { shared: Arc::new((store, model)), ranks, running: Stage::Idle, newest }
    }

    /// Whether the newest checkpoint, there or under way, is of this step.
    pub fn has(&self, step: u64) -> bool {
        self.newest == Some(step)
    }

    /// An error of a write that has ended meanwhile.
    pub fn poll(&mut self) -> Result<(), CheckpointError> {
        let busy = match &self.running {
            Stage::Idle => return Ok(()),
            Stage::Writing(_, thread) | Stage::Committing(Some(thread)) => !thread.is_finished(),
            Stage::Committing(None) => false,
        };
        if self.ranks.any(busy)? { Ok(()) } else { self.advance() }
    }

    /// Waits for the write that is under way, if any.
    pub fn finish(&mut self) -> Result<(), CheckpointError> {
        while !matches!(self.running, Stage::Idle) {
            self.advance()?;
        }
        Ok(())
    }

    /// Waits for the stage at hand, at all ranks, and begins the next.
    fn advance(&mut self) -> Result<(), CheckpointError> {
        match std::mem::replace(&mut self.running, Stage::Idle) {
            Stage::Idle => Ok(()),
            Stage::Writing(_, thread) if self.ranks.size() == 1 => join(thread),
            Stage::Writing(step, thread) => {
                self.agree(join(thread))?;
                let commit = self.ranks.is_first().then(|| self.spawn(move |store, _| commit(store, step)));
                self.running = Stage::Committing(commit.transpose()?);
                Ok(())
            }
            Stage::Committing(thread) => self.agree(thread.map_or(Ok(()), join)),
        }
    }

    /// The error of this rank, or that of another.
    fn agree(&self, own: Result<(), CheckpointError>) -> Result<(), CheckpointError> {
        let reason = own.as_ref().err().map(ToString::to_string);
        let failed = self.ranks.join(vec![reason])?;
        own?;
        match failed.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?))) {
            Some((rank, reason)) => Err(CheckpointError::OtherRank { rank, reason }),
            None => Ok(()),
        }
    }

    /// Writes a checkpoint in the background, after what is in the logs: a checkpoint that is there means
    /// that the logs up to its step are. One that is still being written is waited for.
    pub fn start(&mut self, snapshot: Snapshot, logged: Logged) -> Result<(), CheckpointError> {
        self.finish()?;
        let step = snapshot.state.step;
        let pieces = Pieces { rank: self.ranks.rank(), ranks: self.ranks.size() };
        let write = move |store: &Store, model: &ModelFiles| {
            let began = Instant::now();
            for log in &logged.files {
                log.sync().map_err(CheckpointError::io(store.dir(), "have the logs beside it synced"))?;
            }
            store.write_part(&snapshot, model, pieces, &logged.lines)?;
            let seconds = began.elapsed().as_secs_f64();
            tracing::info!(step, bytes = snapshot.bytes(), seconds, "checkpoint written");
            if pieces == Pieces::ALL { commit(store, step) } else { Ok(()) }
        };
        self.running = Stage::Writing(step, self.spawn(write)?);
        self.newest = Some(step);
        Ok(())
    }

    fn spawn(
        &self,
        work: impl FnOnce(&Store, &ModelFiles) -> Result<(), CheckpointError> + Send + 'static,
    ) -> Result<Thread, CheckpointError> {
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name("checkpoint".to_string());
        let thread = thread.spawn(move || work(&shared.0, &shared.1));
        thread.map_err(CheckpointError::io(self.shared.0.dir(), "be written by a new thread"))
    }
}

/// Puts a checkpoint into its place and removes those that need not be kept.
fn commit(store: &Store, step: u64) -> Result<(), CheckpointError> {
    let path = store.commit(step)?;
    tracing::info!(step, path = %path.display(), "checkpoint in place");
    store.prune(step)
}

fn join(thread: Thread) -> Result<(), CheckpointError> {
    thread.join().unwrap_or(Err(CheckpointError::WriterPanicked))
}

impl Drop for Writer {
    fn drop(&mut self) {
        // On the way out after another error, which matters more, and without an exchange, since the other
        // ranks may be elsewhere; what was written is checked when it is read.
        let thread = match std::mem::replace(&mut self.running, Stage::Idle) {
            Stage::Writing(_, thread) | Stage::Committing(Some(thread)) => thread,
            Stage::Idle | Stage::Committing(None) => return,
        };
        if let Err(error) = join(thread) {
            tracing::error!(%error, "checkpoint not written");
        }
    }
}
