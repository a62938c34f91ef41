//! What is left of a run of supervised training: its model and its summary.

use super::{SftError, SftRun};
use crate::checkpoint::ModelFiles;
use crate::run::{Memory, RunError};
use qurl_kernels::Device;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// `summary.json` while the run lasts: what no line of `metrics.jsonl` holds.
#[derive(Clone, Debug, Serialize)]
pub struct SftBegun {
    /// Validation loss before the first step, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss_before: Option<f64>,
    /// Parameters of the model.
    pub parameters: u64,
    /// Where it computes.
    pub device: String,
}

/// The model with the lowest validation loss.
#[derive(Clone, Debug, Serialize)]
pub struct SftBest {
    /// Its loss.
    pub validation_loss: f64,
    /// The step it was seen after, 0 for the start.
    pub step: u64,
    /// Where it is, if it was kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// `summary.json` at the end of a run.
#[derive(Clone, Debug, Serialize)]
pub struct SftSummary {
    /// What was known before the first step.
    #[serde(flatten)]
    pub begun: SftBegun,
    /// Loss of the first batch, before anything was learned.
    pub first_loss: f64,
    /// Loss of the last batch.
    pub last_loss: f64,
    /// Validation loss at the end, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss_after: Option<f64>,
    /// The best model on the way, where there is a validation loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<SftBest>,
    /// Greedy accuracy at the end on held-out problems, where there are some.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// Steps that were made.
    pub steps: u64,
    /// Updates that were skipped.
    pub skipped_updates: u64,
    /// Tokens computed, prompts included.
    pub tokens: u64,
    /// The same per second of the updates.
    pub tokens_per_s: f64,
    /// Where the device has memory of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Seconds of this process, and of the steps of those before it where the run was resumed.
    pub seconds: f64,
    /// Seconds by phase.
    pub seconds_by_phase: BTreeMap<String, f64>,
    /// The trained model.
    pub model: String,
    /// The report.
    pub report: String,
    /// The run's directory.
    pub run: String,
}

impl<D: Device> SftRun<'_, D> {
    /// What is known before the first step.
    pub fn begun(&self) -> SftBegun {
        SftBegun {
            validation_loss_before: self.before,
            parameters: self.start.config.param_count(),
            device: self.trainer.device().info().description,
        }
    }

    fn model_path(&self) -> PathBuf {
        self.path.join("model")
    }

    /// Saves the trained model as `model/` in the run's directory.
    pub fn save_model(&mut self) -> Result<(), RunError> {
        let weights = self.trainer.weights().map_err(SftError::from)?;
        if !self.trainer.ranks().is_first() {
            return Ok(());
        }
        let (dir, start) = (self.model_path(), self.start);
        ModelFiles::of(start)
            .save(&dir, &start.config, &weights, start.config.dtype)
            .map_err(|source| RunError::Model { dir, source: Box::new(source) })
    }

    /// The summary of a finished run, after `seconds` of this process.
    pub fn summary(&self, accuracy: Option<f64>, seconds: f64) -> Result<SftSummary, RunError> {
        let totals = &self.totals;
        let memory = self.trainer.device().memory();
        let update = totals.seconds.get("update").copied().unwrap_or(f64::NAN);
        Ok(SftSummary {
            begun: self.begun(),
            first_loss: totals.first_loss.unwrap_or(f64::NAN),
            last_loss: totals.last_loss.unwrap_or(f64::NAN),
            validation_loss_after: totals.validated,
            best: self.best()?,
            accuracy,
            steps: totals.steps,
            skipped_updates: totals.skipped,
            tokens: totals.tokens,
            tokens_per_s: totals.tokens as f64 / update,
            memory: self.memory.as_ref().zip(memory).map(|(plan, memory)| Memory::of(plan, memory)),
            seconds: self.seconds_before + seconds,
            seconds_by_phase: totals.seconds.clone(),
            model: self.model_path().display().to_string(),
            report: self.path.join("report.html").display().to_string(),
            run: self.path.display().to_string(),
        })
    }

    /// The lowest validation loss, of equal ones the newest, and where its model is.
    fn best(&self) -> Result<Option<SftBest>, RunError> {
        let losses = self.before.map(|loss| (loss, 0)).into_iter().chain(self.totals.lowest);
        let lowest = losses.reduce(lower);
        let Some((validation_loss, step)) = lowest else { return Ok(None) };
        let model = match step {
            step if step == self.trainer.steps_done() => Some(self.model_path()),
            0 => self.start_path.clone(),
            step => self.keeper.kept(step).map_err(RunError::Resume)?,
        };
        let model = model.map(|path| path.display().to_string());
        Ok(Some(SftBest { validation_loss, step, model }))
    }
}

/// The lower of two losses with their steps, of equal ones the newer.
fn lower(best: (f64, u64), next: (f64, u64)) -> (f64, u64) {
    if next.0 <= best.0 { next } else { best }
}

/// Sums over the steps of a run: nothing is kept of a step itself.
#[derive(Default)]
pub(super) struct SftTotals {
    steps: u64,
    skipped: u64,
    tokens: u64,
    first_loss: Option<f64>,
    last_loss: Option<f64>,
    /// The newest validation loss.
    validated: Option<f64>,
    /// The lowest one after a step, and the step.
    lowest: Option<(f64, u64)>,
    /// Seconds by phase.
    pub(super) seconds: BTreeMap<String, f64>,
}

impl SftTotals {
    /// Adds a step, as a line of `metrics.jsonl` holds it.
    pub(super) fn add(&mut self, line: &Value) {
        let count = |key: &str| line[key].as_u64().unwrap_or(0);
        self.skipped += count("skipped_updates");
        self.tokens += count("tokens");
        let loss = line["loss"].as_f64();
        if self.steps == 0 {
            self.first_loss = loss;
        }
        self.last_loss = loss;
        self.steps += 1;
        if let Some(validated) = line["validation_loss"].as_f64() {
            self.validated = Some(validated);
            let now = (validated, count("step"));
            self.lowest = Some(self.lowest.map_or(now, |lowest| lower(lowest, now)));
        }
        for (phase, time) in line["timing"].as_object().into_iter().flatten() {
            *self.seconds.entry(phase.clone()).or_default() += time.as_f64().unwrap_or(0.0);
        }
    }
}
