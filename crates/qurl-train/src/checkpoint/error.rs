//! What can be wrong with a checkpoint.

use qurl_kernels::collective::CollectiveError;
use qurl_model::HfError;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused.
    #[error("{}: cannot {action}: {source}", file.display())]
    Io {
        /// The file or directory.
        file: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model directory.
    #[error(transparent)]
    Model(#[from] HfError),
    /// The disk is too full.
    #[error(
        "{}: a checkpoint and the final model, together {need} bytes, do not fit, {free} bytes are free; \
         free some, or keep fewer (`trainer.keep_last`, `trainer.keep_best`)",
        dir.display()
    )]
    Full {
        /// Where it should go.
        dir: PathBuf,
        /// What it takes.
        need: u64,
        /// What is there.
        free: u64,
    },
    /// A file is not what the manifest says.
    #[error("{}: {found}, expected {expected}", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// There are checkpoints, but none is whole.
    #[error("{}: no checkpoint is whole, so there is nothing to resume from; the newest: \
             {newest}", dir.display())]
    NoneWhole {
        /// The directory of the checkpoints.
        dir: PathBuf,
        /// What is wrong with the newest.
        newest: String,
    },
    /// The checkpoint belongs to another model.
    #[error("the checkpoint does not fit the recipe's model: {0}")]
    Layout(String),
    /// Another rank could not write its part.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// Which.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// An exchange with other ranks.
    #[error(transparent)]
    Exchange(#[from] CollectiveError),
    /// The thread that writes ended without a word.
    #[error("the thread that writes checkpoints panicked; the checkpoints before it are whole")]
    WriterPanicked,
}

impl CheckpointError {
    /// For `map_err`: what the system refused to do with a file.
    pub(super) fn io(file: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> CheckpointError {
        let file = file.to_path_buf();
        move |source| CheckpointError::Io { file, action, source }
    }

    /// A file that holds something else than it should.
    pub(super) fn damaged(file: &Path, found: impl ToString, expected: impl ToString) -> CheckpointError {
        let (found, expected) = (found.to_string(), expected.to_string());
        CheckpointError::Damaged { file: file.to_path_buf(), found, expected }
    }
}
