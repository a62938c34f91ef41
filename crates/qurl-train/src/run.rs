//! The loop of a run: resume or evaluate first, then step after step train, measure, save, write down, and
//! notice when training is broken; at the end the model and a summary.
//!
//! Whoever runs it owns the surroundings: the run's directory, the device, what a user sees ([`Event`]) and
//! when to stop. A step that fails before its first update changes nothing, so the state before it is saved
//! and the same step can be tried again.

mod error;
mod keep;
mod summary;
mod totals;

pub use error::RunError;
pub use summary::{Begun, Best, Broken, Memory, SUMMARY, Summary};
pub use totals::Totals;

use crate::checkpoint::{Keeper, ModelFiles, Snapshot, Store};
use crate::memory::MemoryPlan;
use crate::recipe::{Alarm, AlarmAction, Recipe, RlPlan};
use crate::rl::{Health, RlTrainer, StepRecord, Symptom, Tested, TrainError};
use crate::runlog::RunLog;
use qurl_kernels::Device;
use std::path::PathBuf;
use std::time::Instant;

/// What a run reports while it runs.
pub enum Event<'a> {
    /// A step is done.
    Step(&'a StepRecord),
    /// Something that a user should know.
    Warning(String),
}

/// How the steps of a run ended.
#[derive(Clone, Debug, PartialEq)]
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

/// What a run is made of beside its trainer; `L` are its logs.
pub struct RunParts<L> {
    /// Its directory.
    pub path: PathBuf,
    /// Its checkpoints.
    pub store: Store,
    /// Step and directory of the checkpoint to resume from.
    pub from: Option<(u64, PathBuf)>,
    /// Its logs, cut back to that step.
    pub log: L,
}

/// A run while it runs.
pub struct Run<D: Device> {
    trainer: RlTrainer<D>,
    plan: RlPlan,
    path: PathBuf,
    /// The recipe with all defaults filled in.
    text: String,
    keeper: Keeper,
    log: RunLog,
    totals: Totals,
    health: Health,
    /// Where the weights are that the first step started from, if they are anywhere but in a checkpoint.
    start_path: Option<PathBuf>,
    /// What it is expected to take of the device's memory.
    memory: Option<MemoryPlan>,
    /// Seconds of the steps that earlier processes made.
    seconds_before: f64,
    /// The evaluation before the first step.
    before: Tested,
    /// The evaluation after the last step, if there was one.
    tested: Option<Tested>,
    /// What a user should know of the checkpoint, before the next step.
    warning: Option<String>,
}

impl<D: Device> Run<D> {
    /// Takes over the state of the newest checkpoint, or evaluates the start and saves it where it is nowhere
    /// else.
    pub fn begin(
        mut trainer: RlTrainer<D>,
        recipe: &Recipe,
        parts: RunParts<RunLog>,
    ) -> Result<Run<D>, RunError> {
        let RunParts { path, store, from, mut log } = parts;
        let (text, plan) = (recipe.to_toml(), trainer.plan().clone());
        let start_path = recipe.start_path().cloned().filter(|_| recipe.sft.is_none());
        let ranks = trainer.ranks().clone();
        let planned = || MemoryPlan::of_rl(trainer.device(), recipe, &plan, &trainer.start().config, &ranks);
        let memory = trainer.device().memory().map(|_| planned()).transpose()?;
        let newest = from.as_ref().map(|(step, _)| *step);
        let mut keeper =
            Keeper::new(store, ModelFiles::of(trainer.start()), &ranks, newest, recipe.trainer.save_freq);
        let (mut before, mut warning) = (None, None);
        match &from {
            Some((_, path)) => {
                let snapshot =
                    Snapshot::read(path, &trainer.start().config, &ranks).map_err(RunError::Resume)?;
                before = snapshot.state.before();
                warning = trainer.restore(snapshot).map_err(RunError::OtherRun)?;
            }
            None if recipe.sft.is_some() && keeper.is_on() => {
                // The warm start is not to be lost while it is evaluated.
                keeper.start(trainer.snapshot(&text)?, log.logged()?).map_err(RunError::Checkpoint)?;
            }
            None => {}
        }
        let evaluated = before.is_none();
        let before = match before {
            Some(tested) => tested,
            None => unless_cancelled(trainer.evaluate())?,
        };
        let mut totals = Totals::default();
        log.take_kept().iter().for_each(|line| totals.add(line));
        let seconds_before = totals.seconds.get("total").copied().unwrap_or(0.0);
        let health = Health::new(plan.run.alarm.patience);
        let tested = None;
        let mut run = Run {
            trainer,
            plan,
            path,
            text,
            keeper,
            log,
            totals,
            health,
            start_path,
            memory,
            seconds_before,
            before,
            tested,
            warning,
        };
        if evaluated && run.keeper.is_on() && run.trainer.steps_done() == 0 && run.start_path.is_none() {
            // The start of a model that is nowhere else, with its accuracy: it may turn out to be the best
            // there was.
            run.start_checkpoint(Some(before))?;
        }
        Ok(run)
    }

    /// What is trained.
    pub fn trainer(&self) -> &RlTrainer<D> {
        &self.trainer
    }

    /// What was trained, after the run.
    pub fn into_trainer(self) -> RlTrainer<D> {
        self.trainer
    }

    /// The evaluation before the first step.
    pub fn before(&self) -> Tested {
        self.before
    }

    /// Makes all steps that are left, until `stop` says so.
    pub fn steps(
        &mut self,
        stop: impl Fn() -> bool,
        mut report: impl FnMut(Event),
    ) -> Result<Outcome, RunError> {
        self.warning.take().into_iter().for_each(|warning| report(Event::Warning(warning)));
        while self.trainer.steps_done() < self.plan.run.total_steps {
            if self.trainer.ranks().any(stop()).map_err(RunError::Exchange)? {
                return Err(self.stopped()?);
            }
            self.keeper.poll().map_err(RunError::Checkpoint)?;
            let step = self.trainer.steps_done() + 1;
            let record = match self.trainer.step() {
                Ok(record) => record,
                Err(error) => return self.failed(step, error),
            };
            if let Some(outcome) = self.after(record, &mut report)? {
                self.finish_checkpoints()?;
                return Ok(outcome);
            }
        }
        self.finish_checkpoints()?;
        Ok(Outcome::Done)
    }

    /// What belongs to a step beside training; an outcome where it was the last.
    fn after(
        &mut self,
        mut record: StepRecord,
        report: &mut impl FnMut(Event),
    ) -> Result<Option<Outcome>, RunError> {
        let (step, run) = (record.step, self.plan.run.clone());
        let symptom = Symptom::of(&record, self.vocabulary());
        let broken = self.health.observe(step, symptom.as_ref());
        let alarm = alarm(&run.alarm, &record);
        let stopped = alarm.is_some() && run.alarm.action == AlarmAction::Stop;
        let ends = stopped || broken || step == run.total_steps;
        self.tested = None;
        // What only the evaluation after this step shows: weights that cannot be sampled with.
        let mut unsampled = None;
        if ends || (run.test_freq > 0 && step.is_multiple_of(run.test_freq)) {
            let began = Instant::now();
            let tested = self.trainer.evaluate();
            unsampled = tested.as_ref().err().and_then(|e| Symptom::of_error(e, self.vocabulary()));
            self.tested = match &unsampled {
                Some(symptom) => {
                    self.health.observe(step + 1, Some(symptom));
                    None
                }
                None => Some(unless_cancelled(tested)?),
            };
            self.tested.into_iter().for_each(|tested| record.add_test(tested));
            record.add_phase("test", began.elapsed().as_secs_f64());
        }
        let began = Instant::now();
        let saved = match unsampled.is_none() && self.wants_checkpoint(step, ends)? {
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
        let vanished = self.log.record(&record)?;
        if let Some(snapshot) = saved {
            self.keeper.start(snapshot, self.log.logged()?).map_err(RunError::Checkpoint)?;
        }
        self.totals.add_record(&record);
        report(Event::Step(&record));
        let mut warn = |text: String| report(Event::Warning(format!("step {step}: {text}")));
        vanished.into_iter().for_each(&mut warn);
        if let Some(alarm) = alarm {
            let end = if stopped { "; the run ends here (run.alarm.action)" } else { "" };
            warn(format!("{alarm}{end}"));
        }
        if record.skipped_updates > 0 {
            let (skipped, all) = (record.skipped_updates, record.updates + record.skipped_updates);
            warn(format!("{skipped} of {all} updates were not finite and were skipped"));
        }
        symptom.iter().for_each(|symptom| warn(symptom.to_string()));
        if record.groups == 0 {
            warn("no mini-batch of groups with different rewards: nothing was learned".to_string());
        }
        Ok(match unsampled.or(symptom) {
            Some(symptom @ Symptom::NotFinite { .. }) => Some(Outcome::Broken { step, symptom }),
            Some(symptom) if broken => Some(Outcome::Broken { step, symptom }),
            _ if ends => Some(Outcome::Done),
            _ => None,
        })
    }

    /// A step that failed. If it changed nothing, the state before it is saved.
    fn failed(&mut self, step: u64, error: TrainError) -> Result<Outcome, RunError> {
        if let Some(symptom) = Symptom::of_error(&error, self.vocabulary()) {
            // What is not finite cannot be sampled with; anything else may be chance.
            let broken = self.health.observe(step, Some(&symptom));
            if broken || matches!(symptom, Symptom::NotFinite { .. }) {
                self.finish_checkpoints()?;
                return Ok(Outcome::Broken { step, symptom });
            }
        }
        if error.is_cancelled() {
            return Err(self.stopped()?);
        }
        let unchanged = self.trainer.steps_done() < step;
        // What failed at one rank alone leaves the others where no checkpoint can be agreed upon.
        let alone = self.trainer.ranks().size() > 1 && !error.is_of_all_ranks();
        if unchanged && !alone && self.keeper.is_on() {
            self.save_here()?;
        }
        Err(RunError::Step { step, source: error })
    }

    fn stopped(&mut self) -> Result<RunError, RunError> {
        self.save_here()?;
        Ok(RunError::Stopped { step: self.trainer.steps_done() })
    }

    fn vocabulary(&self) -> usize {
        self.trainer.start().config.vocab_size
    }
}

/// A wait for scores that a signal cut short is nobody's failure.
fn unless_cancelled<T>(outcome: Result<T, TrainError>) -> Result<T, RunError> {
    outcome.map_err(|error| if error.is_cancelled() { RunError::Cancelled } else { RunError::Train(error) })
}

/// What is out of its band, if anything.
fn alarm(band: &Alarm, record: &StepRecord) -> Option<String> {
    let kl = record.mismatch.map_or(0.0, |m| m.kl);
    if kl > band.mismatch_kl || !kl.is_finite() {
        return Some(format!("mismatch KL {kl:.4} is above run.alarm.mismatch_kl = {}", band.mismatch_kl));
    }
    let entropy = record.rollout_entropy;
    let outside = entropy < band.entropy_low || entropy > band.entropy_high;
    outside.then(|| {
        format!("entropy {entropy:.4} is outside of run.alarm {} to {}", band.entropy_low, band.entropy_high)
    })
}
