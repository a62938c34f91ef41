//! The steps of a run, one after the other: train, measure, save, write down, and notice when training is broken.

use super::run_dir::RunDir;
use super::totals::Totals;
use super::unless_cancelled;
use crate::stop::Stop;
use crate::view::TrainView;
use anyhow::Context;
use qurl_kernels::Backend;
use qurl_train::checkpoint::{Snapshot, Store, Writer};
use qurl_train::recipe::{Alarm, AlarmAction, RlPlan};
use qurl_train::rl::{Health, RlTrainer, StepRecord, Symptom, Tested, TrainError};
use qurl_train::runlog::RunLog;
use std::time::Instant;

/// How the steps of a run ended.
pub enum Outcome {
    /// All were made, or an alarm of the recipe ended them.
    Done,
    /// Training is broken.
    Broken {
        /// The step that showed it last.
        step: u64,
        /// What it showed.
        symptom: Symptom,
    },
}

/// Writes the checkpoints of a run.
pub struct Checkpoints {
    /// In the background.
    pub writer: Writer,
    /// Where they are.
    pub store: Store,
    /// `trainer.save_freq`.
    pub save_freq: u64,
    /// The recipe.
    pub text: String,
    /// The evaluation before the first step.
    pub before: Tested,
}

/// A run while it goes on.
pub struct Steps<'a, B: Backend> {
    /// What is trained.
    pub trainer: RlTrainer<B>,
    /// Where its states go.
    pub checkpoints: Checkpoints,
    /// Where its figures go.
    pub log: RunLog,
    /// Sums over its steps.
    pub totals: Totals,
    /// Whether training is still training.
    pub health: Health,
    /// The evaluation after the last step, if there was one.
    pub tested: Option<Tested>,
    /// The checked recipe.
    pub plan: &'a RlPlan,
    /// Its directory.
    pub dir: &'a RunDir,
    /// Whether the user wants it to end.
    pub stop: &'a Stop,
}

impl<B: Backend> Steps<'_, B> {
    /// Makes all steps that are left.
    pub fn all(&mut self, view: &mut TrainView) -> anyhow::Result<Outcome> {
        while self.trainer.steps_done() < self.plan.run.total_steps {
            if self.stop.asked() {
                return Err(self.stopped()?);
            }
            self.checkpoints.writer.poll().with_context(|| self.failed_checkpoint())?;
            let step = self.trainer.steps_done() + 1;
            let record = match self.trainer.step() {
                Ok(record) => record,
                Err(error) => return self.failed(step, error),
            };
            if let Some(outcome) = self.after(record, view)? {
                self.finish_checkpoints()?;
                return Ok(outcome);
            }
        }
        self.finish_checkpoints()?;
        Ok(Outcome::Done)
    }

    /// What belongs to a step beside training; an outcome where it was the last.
    fn after(&mut self, mut record: StepRecord, view: &mut TrainView) -> anyhow::Result<Option<Outcome>> {
        let (step, run) = (record.step, &self.plan.run);
        let symptom = Symptom::of(&record, self.vocabulary());
        let broken = self.health.observe(step, symptom.as_ref());
        let alarm = alarm(&run.alarm, &record);
        let stopped = alarm.is_some() && run.alarm.action == AlarmAction::Stop;
        let ends = stopped || broken || step == run.total_steps;
        self.tested = None;
        if ends || (run.test_freq > 0 && step.is_multiple_of(run.test_freq)) {
            let began = Instant::now();
            self.tested = match self.trainer.evaluate() {
                // Weights that cannot even be sampled with: the next step says so.
                Err(error) if Symptom::of_error(&error, self.vocabulary()).is_some() => None,
                tested => Some(unless_cancelled(tested, self.stop, self.dir)?),
            };
            self.tested.into_iter().for_each(|tested| record.add_test(tested));
            record.add_phase("test", began.elapsed().as_secs_f64());
        }
        let began = Instant::now();
        let saved = match self.wants_checkpoint(step, ends)? {
            true => {
                self.finish_checkpoints()?;
                Some(self.snapshot(self.tested)?)
            }
            false => None,
        };
        record.add_phase("checkpoint", began.elapsed().as_secs_f64());
        let began = Instant::now();
        if run.logs_rollouts_at(step) {
            self.log.rollouts(step, &self.trainer.sampled_rollouts(run.rollout_log_samples)?)?;
        }
        record.add_phase("log", self.log.take_seconds() + began.elapsed().as_secs_f64());
        self.log.record(&record)?;
        if let Some(snapshot) = saved {
            self.checkpoints.writer.start(snapshot, self.log.files()?)?;
        }
        self.totals.add(&serde_json::to_value(&record)?);
        view.step(&record);
        if let Some(alarm) = alarm {
            let end = if stopped { "; the run ends here (run.alarm.action)" } else { "" };
            view.warn(&format!("step {step}: {alarm}{end}"));
        }
        if record.skipped_updates > 0 {
            let (skipped, all) = (record.skipped_updates, record.updates + record.skipped_updates);
            view.warn(&format!("step {step}: {skipped} of {all} updates were not finite and were skipped"));
        }
        if let Some(symptom) = &symptom {
            view.warn(&format!("step {step}: {symptom}"));
        }
        if record.groups == 0 {
            view.warn(&format!("step {step}: no mini-batch of groups with different rewards: nothing was learned"));
        }
        Ok(match symptom {
            Some(symptom) if broken => Some(Outcome::Broken { step, symptom }),
            _ if ends => Some(Outcome::Done),
            _ => None,
        })
    }

    /// Every `trainer.save_freq` steps, at the end, and after a step that is among the best tested; never while training
    /// shows symptoms (unless the recipe does not care), so that what was saved before is not pushed out.
    fn wants_checkpoint(&mut self, step: u64, ends: bool) -> anyhow::Result<bool> {
        let freq = self.checkpoints.save_freq;
        let healthy = self.health.is_good() || self.health.patience == 0;
        if freq == 0 || !healthy {
            return Ok(false);
        }
        if ends || step.is_multiple_of(freq) {
            return Ok(true);
        }
        let Some(tested) = self.tested else { return Ok(false) };
        self.finish_checkpoints()?; // it may be one of the best, too
        Ok(self.checkpoints.store.would_keep(tested.score())?)
    }

    fn snapshot(&self, tested: Option<Tested>) -> anyhow::Result<Snapshot> {
        let mut snapshot = self.trainer.snapshot(&self.checkpoints.text)?;
        snapshot.state.set_before(self.checkpoints.before);
        snapshot.state.test_accuracy = tested.map(|tested| tested.score());
        Ok(snapshot)
    }

    /// Writes a checkpoint of the state as it is, unless checkpoints are switched off.
    pub fn save(&mut self, tested: Option<Tested>) -> anyhow::Result<()> {
        if self.checkpoints.save_freq > 0 {
            let snapshot = self.snapshot(tested)?;
            self.checkpoints.writer.start(snapshot, self.log.files()?)?;
        }
        Ok(())
    }

    /// Waits for the checkpoint that is being written, if any.
    fn finish_checkpoints(&mut self) -> anyhow::Result<()> {
        self.checkpoints.writer.finish().with_context(|| self.failed_checkpoint())
    }

    /// Saves the state after the last whole step, if that was not done; also where checkpoints are switched off.
    fn save_here(&mut self) -> anyhow::Result<()> {
        if !self.checkpoints.writer.has(self.trainer.steps_done()) {
            let snapshot = self.snapshot(self.tested)?;
            self.checkpoints.writer.start(snapshot, self.log.files()?)?;
        }
        self.finish_checkpoints()
    }

    fn stopped(&mut self) -> anyhow::Result<anyhow::Error> {
        self.save_here()?;
        let (step, how) = (self.trainer.steps_done(), self.dir.how_to_go_on());
        Ok(self.stop.error(format!("stopped after step {step}; go on with: {how}")))
    }

    /// A step that failed. If it changed nothing, the state before it is saved.
    fn failed(&mut self, step: u64, error: TrainError) -> anyhow::Result<Outcome> {
        if let Some(symptom) = Symptom::of_error(&error, self.vocabulary()) {
            self.health.observe(step, Some(&symptom));
            self.finish_checkpoints()?;
            return Ok(Outcome::Broken { step, symptom });
        }
        if error.is_cancelled() {
            return Err(self.stopped()?);
        }
        let unchanged = self.trainer.steps_done() < step;
        if unchanged && self.checkpoints.save_freq > 0 {
            self.save_here()?;
        }
        Err(anyhow::Error::new(error).context(format!("step {step}")))
    }

    fn vocabulary(&self) -> usize {
        self.trainer.start().config.vocab_size
    }

    fn failed_checkpoint(&self) -> String {
        format!("writing a checkpoint (earlier ones are whole; go on with: {})", self.dir.how_to_go_on())
    }
}

/// What is out of its band, if anything.
fn alarm(band: &Alarm, record: &StepRecord) -> Option<String> {
    let kl = record.mismatch.map_or(0.0, |m| m.kl);
    if kl > band.mismatch_kl || !kl.is_finite() {
        return Some(format!("mismatch KL {kl:.4} is above run.alarm.mismatch_kl = {}", band.mismatch_kl));
    }
    let entropy = record.rollout_entropy;
    let outside = entropy < band.entropy_low || entropy > band.entropy_high;
    outside
        .then(|| format!("entropy {entropy:.4} is outside of run.alarm {} to {}", band.entropy_low, band.entropy_high))
}
