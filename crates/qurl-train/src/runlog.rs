//! What a run writes down, in its run directory:
//!
//! | file | holds |
//! |---|---|
//! | `metrics.jsonl` | one [`StepRecord`] or [`SftRecord`] a step |
//! | `warm_start.jsonl` | the same of the warm start |
//! | `tensorboard/events.out.tfevents.qurl` | the same numbers for TensorBoard |
//! | `tensorboard/warm_start/` | those of the warm start |
//! | `rollouts/step-000010.jsonl` | a few rollouts of the step, one per line |
//! | `run.lock` | the process that writes here, held by a lock of the system |
//!
//! Everything is flushed after every step, so that others can look while the run lasts. A run that continues
//! from a checkpoint first cuts off what was written after it: the steps are done again and written again.
//!
//! [`StepRecord`]: crate::rl::StepRecord
//! [`SftRecord`]: crate::sft::SftRecord

mod events;
mod lock;
mod metrics;
mod steps;

pub use events::{EventFile, EventReader, flatten};
pub use lock::RunLock;
pub use metrics::{Lines, MetricsFile};
pub use steps::StepLog;

use crate::rl::{SampledRollout, StepRecord};
use qurl_files::disk::{self, DiskFile};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Why a log could not be written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
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
    /// Another process writes here.
    #[error("{}: another process{} trains in this directory; wait for it, stop it, or choose another \
             --run", dir.display(), pid.map_or(String::new(), |p| format!(" ({p})")))]
    InUse {
        /// The run directory.
        dir: PathBuf,
        /// The process, if it could be read.
        pid: Option<u32>,
    },
    /// A record that cannot be written as JSON.
    #[error("{}: {source}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        source: serde_json::Error,
    },
}

impl LogError {
    fn io(file: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> LogError {
        let file = file.to_path_buf();
        move |source| LogError::Io { file, action, source }
    }
}

/// The logs of a run of reinforcement learning.
pub struct RunLog {
    dir: PathBuf,
    steps: StepLog,
}

/// What a checkpoint needs of the logs beside it.
#[derive(Debug, Default)]
pub struct Logged {
    /// Files that have to be on disk before it is.
    pub files: Vec<DiskFile>,
    /// The lines of `metrics.jsonl`; none where nothing is written.
    pub lines: Option<Lines>,
}

impl RunLog {
    /// Opens the logs of a run of which the steps up to the checkpoint that it continues `from` are kept;
    /// what is later is cut off.
    pub fn open(dir: &Path, from: Option<&(u64, PathBuf)>) -> Result<RunLog, LogError> {
        let step = from.map_or(0, |(step, _)| *step);
        let folder = dir.join("rollouts");
        disk::create_dir_all(&folder).map_err(LogError::io(&folder, "be created"))?;
        for entry in std::fs::read_dir(&folder).map_err(LogError::io(&folder, "be listed"))?.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let number = |name: &str| name.strip_prefix("step-")?.strip_suffix(".jsonl")?.parse::<u64>().ok();
            if number(&name).is_some_and(|n| n > step) {
                disk::remove(&entry.path()).map_err(LogError::io(&entry.path(), "be removed"))?;
            }
        }
        Ok(RunLog { dir: dir.to_path_buf(), steps: StepLog::of_run(dir, from)? })
    }

    /// Logs of a rank that writes nothing.
    pub fn silent() -> RunLog {
        RunLog { dir: PathBuf::new(), steps: StepLog::silent() }
    }

    /// Lines of `metrics.jsonl` that were kept; afterwards they are only in the file.
    pub fn take_kept(&mut self) -> Vec<serde_json::Value> {
        self.steps.take_kept()
    }

    /// What a user should know of lines that were lost.
    pub fn warning(&self, step: u64) -> Option<String> {
        self.steps.warning(step)
    }

    /// Writes rollouts of a step.
    pub fn rollouts(&mut self, step: u64, sampled: &[SampledRollout]) -> Result<(), LogError> {
        if self.steps.is_silent() {
            return Ok(());
        }
        let path = self.dir.join(format!("rollouts/step-{step:06}.jsonl"));
        let mut file = BufWriter::with_capacity(
            1 << 20,
            DiskFile::create(&path).map_err(LogError::io(&path, "be created"))?,
        );
        for rollout in sampled {
            let line = serde_json::to_string(rollout)
                .map_err(|source| LogError::Json { file: path.clone(), source })?;
            writeln!(file, "{line}").map_err(LogError::io(&path, "be written"))?;
        }
        let file = file.into_inner().map_err(|e| LogError::io(&path, "be written")(e.into_error()))?;
        // Few steps have one: it is on disk before any checkpoint after it.
        file.sync().map_err(LogError::io(&path, "be synced"))
    }

    /// Seconds that the writing of the last record took ([`StepLog::take_seconds`]).
    pub fn take_seconds(&mut self) -> f64 {
        self.steps.take_seconds()
    }

    /// Writes the record of a step; returns what a user should know, if anything.
    pub fn record(&mut self, record: &StepRecord) -> Result<Option<String>, LogError> {
        self.steps.record(record.step, record)
    }

    /// What a checkpoint after these steps needs.
    pub fn logged(&self) -> Result<Logged, LogError> {
        self.steps.logged()
    }
}
