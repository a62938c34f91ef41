//! Why a run ends before its end, whether it is one of reinforcement learning or of supervised training: what
//! fails in training itself is the trainer's error, what fails around it (checkpoints, logs, the model's
//! files, a signal) is the same for both.

use crate::checkpoint::CheckpointError;
use crate::rl::TrainError;
use crate::runlog::LogError;
use crate::sft::SftError;
use qurl_kernels::collective::CollectiveError;
use qurl_model::HfError;
use std::path::PathBuf;

/// Why a run ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A step failed.
    #[error("step {step}")]
    Step {
        /// Which.
        step: u64,
        /// Why.
        source: TrainError,
    },
    /// The trainer failed beside its steps: an evaluation, a copy of its state.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// Supervised training failed.
    #[error(transparent)]
    Supervised(#[from] SftError),
    /// An exchange with other ranks.
    #[error(transparent)]
    Exchange(CollectiveError),
    /// The checkpoint belongs to another run of reinforcement learning.
    #[error(transparent)]
    OtherRun(TrainError),
    /// A checkpoint could not be written; earlier ones are whole.
    #[error("writing a checkpoint (earlier ones are whole)")]
    Checkpoint(#[source] CheckpointError),
    /// A checkpoint could not be read.
    #[error(transparent)]
    Resume(CheckpointError),
    /// The logs could not be written.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The model could not be saved.
    #[error("saving {}", dir.display())]
    Model {
        /// Where.
        dir: PathBuf,
        /// Why.
        source: Box<HfError>,
    },
    /// The user wanted it to stop, and its state was saved.
    #[error("stopped after step {step}")]
    Stopped {
        /// The last step that was made.
        step: u64,
    },
    /// The user wanted it to stop while it waited for scores beside a step.
    #[error("stopped while waiting for scores")]
    Cancelled,
}

impl RunError {
    /// Whether the checkpoint to resume from belongs to another run.
    pub fn is_of_another_run(&self) -> bool {
        matches!(self, RunError::OtherRun(_) | RunError::Supervised(SftError::OtherExamples))
    }
}
