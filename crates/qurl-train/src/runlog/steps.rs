//! The figures of steps, written twice: as lines for whoever reads files, and as events for TensorBoard.

use super::{EventFile, LogError, Logged, MetricsFile, flatten};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

const METRICS: &str = "metrics.jsonl";

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
    /// The log of a run's own steps, of which those up to the checkpoint that the run continues `from` are
    /// kept; what is later is cut off, and what is lost is taken from there.
    pub fn of_run(dir: &Path, from: Option<&(u64, PathBuf)>) -> Result<StepLog, LogError> {
        let step = from.map_or(0, |(step, _)| *step);
        // Checkpoints of an older program have none.
        let saved = from.map(|(_, checkpoint)| std::fs::read_to_string(checkpoint.join(METRICS)));
        let saved = saved.and_then(Result::ok).unwrap_or_default();
        StepLog::open(&dir.join(METRICS), &dir.join("tensorboard"), step, &saved)
    }

    /// The log of the warm start of a run, begun anew.
    pub fn of_warm_start(dir: &Path) -> Result<StepLog, LogError> {
        StepLog::open(&dir.join("warm_start.jsonl"), &dir.join("tensorboard/warm_start"), 0, "")
    }

    /// A log that writes nothing: rank 0 writes for all.
    pub fn silent() -> StepLog {
        StepLog { files: None, seconds: 0.0 }
    }

    fn open(metrics: &Path, events: &Path, step: u64, saved: &str) -> Result<StepLog, LogError> {
        let path = metrics.to_path_buf();
        let metrics = MetricsFile::open(metrics, step, saved)?;
        let events = EventFile::open(events, step, metrics.kept())?;
        Ok(StepLog { files: Some(Files { path, metrics, events }), seconds: 0.0 })
    }

    /// What a user should know of a run that continues after `step` steps: lines that were lost.
    pub fn warning(&self, step: u64) -> Option<String> {
        let files = self.files.as_ref()?;
        let (kept, restored) = (files.metrics.steps() as u64, files.metrics.restored());
        let name = files.path.display();
        match () {
            () if kept != step => Some(format!("warning: {name} has {kept} of the {step} steps done so far")),
            () if restored > 0 => Some(format!(
                "warning: {name} had lost {restored} of the {step} steps done so far; they are those of the \
                 checkpoint now, without times"
            )),
            () => None,
        }
    }

    /// Lines that were kept; afterwards they are only in the file.
    pub fn take_kept(&mut self) -> Vec<serde_json::Value> {
        self.files.as_mut().map_or_else(Vec::new, |files| files.metrics.take_kept())
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

    /// Writes the record of a step; returns what a user should know, if anything.
    pub fn record(&mut self, step: u64, record: &impl Serialize) -> Result<Option<String>, LogError> {
        let Some(Files { path, metrics, events }) = &mut self.files else { return Ok(None) };
        let began = Instant::now();
        let vanished = metrics.write(record)?;
        let value =
            serde_json::to_value(record).map_err(|source| LogError::Json { file: path.clone(), source })?;
        events.write(step, &flatten(&value))?;
        self.seconds += began.elapsed().as_secs_f64();
        Ok(vanished.then(|| format!("{} had vanished and was written again", path.display())))
    }

    /// What a checkpoint after these steps needs.
    pub fn logged(&self) -> Result<Logged, LogError> {
        let Some(files) = &self.files else { return Ok(Logged::default()) };
        let lines = Some(files.metrics.lines()?);
        Ok(Logged { files: vec![files.metrics.file()?, files.events.file()?], lines })
    }
}
