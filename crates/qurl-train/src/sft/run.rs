//! The run of `qurl sft`: resume or validate first, then step after step train, validate, save and write
//! down; at the end the model and a summary. Checkpoints and logs are those of reinforcement learning
//! ([`crate::run`]), and so is the promise: a run that was stopped or killed at any moment resumes with the
//! same bits.

use super::summary::SftTotals;
use super::{SftError, SftRecord, SftTrainer};
use crate::checkpoint::{Keeper, ModelFiles, Snapshot};
use crate::memory::MemoryPlan;
use crate::recipe::Recipe;
use crate::run::{RunError, RunParts};
use crate::runlog::StepLog;
use crate::start::Start;
use qurl_kernels::Device;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Instant;

/// A run while it runs.
pub struct SftRun<'a, D: Device> {
    pub(super) trainer: SftTrainer<'a, D>,
    pub(super) start: &'a Start,
    pub(super) path: PathBuf,
    /// The recipe with all defaults filled in.
    text: String,
    pub(super) keeper: Keeper,
    log: StepLog,
    /// Sums over all steps, those before a restart included.
    pub(super) totals: SftTotals,
    /// What it is expected to take of the device's memory.
    pub(super) memory: Option<MemoryPlan>,
    /// Where the weights are that the first step started from, if they are anywhere.
    pub(super) start_path: Option<PathBuf>,
    /// Seconds of the steps that earlier processes made.
    pub(super) seconds_before: f64,
    /// Validation loss before the first step, where there is one.
    pub(super) before: Option<f64>,
    /// Validation loss after the last step, where it was taken.
    validated: Option<f64>,
    /// What a user should know of the last step.
    warnings: Vec<String>,
}

impl<'a, D: Device> SftRun<'a, D> {
    /// Takes over the state of the newest checkpoint, or takes the validation loss of the start.
    pub fn begin(
        mut trainer: SftTrainer<'a, D>,
        recipe: &Recipe,
        start: &'a Start,
        parts: RunParts<StepLog>,
    ) -> Result<SftRun<'a, D>, RunError> {
        let RunParts { path, store, from, mut log } = parts;
        let (lines, ranks) = (log.take_kept(), trainer.ranks().clone());
        let mut warnings = Vec::new();
        let (before, validated) = match &from {
            Some((_, path)) => {
                let snapshot = Snapshot::read(path, &start.config, &ranks).map_err(RunError::Resume)?;
                let skipped = |line: &&Value| line["skipped_updates"].as_u64().is_some_and(|n| n > 0);
                let skipped = lines.iter().rev().take_while(skipped).count();
                let skipped = ranks.of_first(skipped).map_err(RunError::Exchange)?;
                warnings.extend(trainer.restore(&snapshot, skipped as u64)?);
                (snapshot.state.validation_loss_before, snapshot.state.validation_loss)
            }
            None => (trainer.validation_loss()?, None),
        };
        let newest = from.map(|(step, _)| step);
        let keeper = Keeper::new(store, ModelFiles::of(start), &ranks, newest, recipe.trainer.save_freq);
        let mut totals = SftTotals::default();
        lines.iter().for_each(|line| totals.add(line));
        let seconds_before = totals.seconds.get("total").copied().unwrap_or(0.0);
        let device = trainer.device();
        let planned = || MemoryPlan::of_sft(device, recipe, trainer.sft(), &start.config, &ranks);
        let memory = device.memory().map(|_| planned()).transpose().map_err(SftError::from)?;
        let (text, start_path) = (recipe.to_toml(), recipe.start_path().cloned());
        Ok(SftRun {
            trainer,
            start,
            path,
            text,
            keeper,
            log,
            totals,
            memory,
            start_path,
            seconds_before,
            before,
            validated,
            warnings,
        })
    }

    /// What is trained.
    pub fn trainer(&self) -> &SftTrainer<'a, D> {
        &self.trainer
    }

    /// The same, to compute with.
    pub fn trainer_mut(&mut self) -> &mut SftTrainer<'a, D> {
        &mut self.trainer
    }

    /// Validation loss before the first step, where there is one.
    pub fn before(&self) -> Option<f64> {
        self.before
    }

    /// Makes all steps that are left, until `stop` says so. `report` sees the record of each, and what a user
    /// should know.
    pub fn steps(
        &mut self,
        stop: impl Fn() -> bool,
        mut report: impl FnMut(&SftRecord, &[String]),
    ) -> Result<(), RunError> {
        while self.trainer.steps_done() < self.trainer.sft().steps {
            if self.trainer.ranks().any(stop()).map_err(RunError::Exchange)? {
                self.save_here()?;
                return Err(RunError::Stopped { step: self.trainer.steps_done() });
            }
            self.keeper.poll().map_err(RunError::Checkpoint)?;
            let mut record = self.trainer.step()?;
            self.after(&mut record)?;
            report(&record, &std::mem::take(&mut self.warnings));
        }
        self.keeper.finish().map_err(RunError::Checkpoint)
    }

    /// What belongs to a step beside training.
    fn after(&mut self, record: &mut SftRecord) -> Result<(), RunError> {
        self.trainer.validate_after(record)?;
        self.validated = record.validation_loss.filter(|loss| loss.is_finite());
        let began = Instant::now();
        let (step, ends) = (record.step, record.step == self.trainer.sft().steps);
        let score = self.validated.map(|loss| -loss);
        let saved = match self.keeper.wants(step, ends, score).map_err(RunError::Checkpoint)? {
            true => {
                self.keeper.finish().map_err(RunError::Checkpoint)?;
                Some(self.snapshot()?)
            }
            false => None,
        };
        record.add_phase("checkpoint", began.elapsed().as_secs_f64());
        record.add_phase("log", self.log.take_seconds());
        if let Some(vanished) = self.log.record(step, record)? {
            self.warnings.push(format!("step {step}: {vanished}"));
        }
        // Plain numbers and maps by name: there is nothing in it that JSON does not have.
        self.totals.add(&serde_json::to_value(&*record).unwrap_or_default());
        match saved {
            Some(snapshot) => self.keeper.start(snapshot, self.log.logged()?).map_err(RunError::Checkpoint),
            None => Ok(()),
        }
    }

    /// The state as it is, with the validation losses that are known.
    fn snapshot(&mut self) -> Result<Snapshot, RunError> {
        let mut snapshot = self.trainer.snapshot(&self.text)?;
        snapshot.state.validation_loss_before = self.before;
        snapshot.state.validation_loss = self.validated;
        Ok(snapshot)
    }

    /// Saves the state after the last whole step, if that was not done; also where checkpoints are switched
    /// off.
    fn save_here(&mut self) -> Result<(), RunError> {
        if !self.keeper.has(self.trainer.steps_done()) {
            let snapshot = self.snapshot()?;
            self.keeper.start(snapshot, self.log.logged()?).map_err(RunError::Checkpoint)?;
        }
        self.keeper.finish().map_err(RunError::Checkpoint)
    }
}
