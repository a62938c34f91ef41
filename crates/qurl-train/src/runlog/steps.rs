//! The figures of steps, written twice: as lines for whoever reads files, and as events for TensorBoard.

use super::{EventFile, LogError, MetricsFile, flatten};
use serde::Serialize;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The figures of the steps of a run, or of its warm start.
pub struct StepLog {
    /// None at ranks that write nothing.
    files: Option<Files>,
    /// Time spent on the last record.
    seconds: f64,
}

struct Files {
    path: PathBuf,
    metrics: MetricsFile,
    events: EventFile,
}

impl StepLog {
    /// The log of a run's own steps, of which `step` are kept; what is later is cut off.
    pub fn of_run(dir: &Path, step: u64) -> Result<StepLog, LogError> {
        StepLog::open(&dir.join("metrics.jsonl"), &dir.join("tensorboard"), step)
    }

    /// The log of the warm start of a run, begun anew.
    pub fn of_warm_start(dir: &Path) -> Result<StepLog, LogError> {
        StepLog::open(&dir.join("warm_start.jsonl"), &dir.join("tensorboard/warm_start"), 0)
    }

    /// A log that writes nothing: rank 0 writes for all.
    pub fn silent() -> StepLog {
        StepLog { files: None, seconds: 0.0 }
    }

    fn open(metrics: &Path, events: &Path, step: u64) -> Result<StepLog, LogError> {
        let files = Files {
            path: metrics.to_path_buf(),
            metrics: MetricsFile::open(metrics, step)?,
            events: EventFile::open(events, step)?,
        };
        Ok(StepLog { files: Some(files), seconds: 0.0 })
    }

    /// Lines that were kept.
    pub fn kept(&self) -> &[serde_json::Value] {
        self.files.as_ref().map_or(&[], |files| files.metrics.kept())
    }

    /// Whether it writes nothing.
    pub fn is_silent(&self) -> bool {
        self.files.is_none()
    }

    /// Seconds that the writing of the last record took. They go into the next one, because a record cannot
    /// hold the time of its own writing.
    pub fn take_seconds(&mut self) -> f64 {
        std::mem::take(&mut self.seconds)
    }

    /// Writes the record of a step.
    pub fn record(&mut self, step: u64, record: &impl Serialize) -> Result<(), LogError> {
        let Some(Files { path, metrics, events }) = &mut self.files else { return Ok(()) };
        let began = Instant::now();
        metrics.write(record)?;
        let value =
            serde_json::to_value(record).map_err(|source| LogError::Json { file: path.clone(), source })?;
        events.write(step, &flatten(&value))?;
        self.seconds += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// The files written so far, to be synced to disk by whoever needs them there.
    pub fn files(&self) -> Result<Vec<File>, LogError> {
        match &self.files {
            Some(files) => Ok(vec![files.metrics.file()?, files.events.file()?]),
            None => Ok(Vec::new()),
        }
    }
}
