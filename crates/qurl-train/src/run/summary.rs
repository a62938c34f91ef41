//! What is left of a run: its model and its summary, or where training broke the last model that worked.

use super::{Run, RunError};
use crate::best::BestSeen;
use crate::checkpoint::ModelFiles;
use crate::memory::MemoryPlan;
use crate::rl::{RolloutSpeed, Symptom, Tested, TrainError};
use qurl_kernels::Device;
use qurl_kernels::device::DeviceMemory;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The file's name in the run's directory.
pub const SUMMARY: &str = "summary.json";

/// `summary.json` while the run lasts: what no line of `metrics.jsonl` holds.
#[derive(Clone, Debug, Serialize)]
pub struct Begun {
    /// Greedy accuracy before the first step.
    pub accuracy_before: f64,
    /// Avg@k before the first step, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub avg_at_k_before: Option<f64>,
    /// Parameters of the model.
    pub parameters: u64,
    /// Where it computes.
    pub device: String,
}

/// The best model that an evaluation of the run saw.
#[derive(Clone, Debug, Serialize)]
pub struct Best {
    /// Avg@k where it was measured, else the greedy accuracy.
    pub accuracy: f64,
    /// The step it was seen after, 0 for the start.
    pub step: u64,
    /// Where it is, if it was kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// Device memory in bytes: what was told before the run and what was allocated at most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    /// The plan.
    pub planned: usize,
    /// The most that was allocated at a time.
    pub peak: usize,
}

impl Memory {
    /// A plan beside what a device says now.
    pub fn of(plan: &MemoryPlan, memory: DeviceMemory) -> Memory {
        Memory { planned: plan.total(), peak: memory.peak }
    }
}

/// `summary.json` at the end of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// What was known before the first step.
    #[serde(flatten)]
    pub begun: Begun,
    /// Greedy accuracy at the end.
    pub accuracy_after: f64,
    /// Avg@k at the end, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub avg_at_k_after: Option<f64>,
    /// The best model on the way.
    pub best: Best,
    /// Mean of KL(behav||prox) over the steps.
    pub mismatch_kl: f64,
    /// Largest rho of all tokens.
    pub rho_max: f64,
    /// Response tokens a second of rollout.
    pub rollout_tokens_per_s: f64,
    /// The final weights on the same problems, in the recipe's format and in bf16, alternating.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout_speed: Option<RolloutSpeed>,
    /// Where the device has memory of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    /// Steps that were made.
    pub steps: u64,
    /// Updates that were skipped.
    pub skipped_updates: u64,
    /// Seconds of this process, and of the steps of those before it where the run was resumed.
    pub seconds: f64,
    /// Seconds by phase.
    pub seconds_by_phase: BTreeMap<String, f64>,
    /// The report.
    pub report: String,
    /// The run's directory.
    pub run: String,
}

/// `summary.json` of a run whose training broke.
#[derive(Clone, Debug, Serialize)]
pub struct Broken {
    /// What was known before the first step.
    #[serde(flatten)]
    pub begun: Begun,
    /// What happened.
    pub broken: String,
    /// The step that showed it last.
    pub broken_at: u64,
    /// The newest model that was seen to work, if it was saved.
    pub last_good: Option<String>,
}

impl<D: Device> Run<D> {
    /// What is known before the first step.
    pub fn begun(&self) -> Begun {
        let Tested { accuracy, avg_at_k, .. } = self.before;
        let parameters = self.trainer.start().config.param_count();
        let device = self.trainer.device().info().description;
        Begun { accuracy_before: accuracy, avg_at_k_before: avg_at_k, parameters, device }
    }

    /// Saves the trained model as `model/` in the run's directory: rank 0 does.
    pub fn save_model(&mut self) -> Result<(), RunError> {
        let (config, weights) = self.trainer.model()?;
        if !self.trainer.ranks().is_first() {
            return Ok(());
        }
        let (dir, start) = (self.path.join("model"), self.trainer.start());
        ModelFiles::of(start)
            .save(&dir, &config, &weights, start.config.dtype)
            .map_err(|source| RunError::Model { dir, source: Box::new(source) })
    }

    /// How fast the rollouts of the trained model are; nothing where they are not quantized. What fails here
    /// costs a finished run nothing.
    pub fn rollout_speed(&mut self) -> Result<Option<RolloutSpeed>, TrainError> {
        if self.plan.rollout.format.is_quantized() { self.trainer.rollout_speed() } else { Ok(None) }
    }

    /// What it shows of the trained weights that their rollouts failed so, if training is broken: at all
    /// ranks what rank 0 saw.
    pub fn last_symptom(&mut self, failed: Option<&TrainError>) -> Result<Option<Symptom>, RunError> {
        let reason = match failed.and_then(|error| Symptom::of_error(error, self.vocabulary())) {
            Some(Symptom::NotFinite { reason }) => reason,
            _ => String::new(),
        };
        let reason = self.trainer.ranks().of_first(reason).map_err(RunError::Exchange)?;
        let symptom = (!reason.is_empty()).then_some(Symptom::NotFinite { reason });
        // The next step would have sampled with these weights.
        symptom
            .iter()
            .for_each(|symptom| _ = self.health.observe(self.trainer.steps_done() + 1, Some(symptom)));
        Ok(symptom)
    }

    /// The summary of a finished run, after `seconds` of this process.
    pub fn summary(&self, rollout_speed: Option<RolloutSpeed>, seconds: f64) -> Result<Summary, RunError> {
        let (totals, begun) = (&self.totals, self.begun());
        let memory = self.trainer.device().memory();
        let rollout = totals.seconds.get("rollout").copied().unwrap_or(f64::NAN);
        Ok(Summary {
            accuracy_after: totals.test_accuracy.unwrap_or(begun.accuracy_before),
            avg_at_k_after: totals.test_avg_at_k.or(begun.avg_at_k_before),
            best: self.best()?,
            begun,
            mismatch_kl: totals.mismatch_kl / totals.steps.max(1) as f64,
            rho_max: totals.rho_max,
            rollout_tokens_per_s: totals.response_tokens / rollout,
            rollout_speed,
            memory: self.memory.as_ref().zip(memory).map(|(plan, memory)| Memory::of(plan, memory)),
            steps: totals.steps,
            skipped_updates: totals.skipped,
            seconds: self.seconds_before + seconds,
            seconds_by_phase: totals.seconds.clone(),
            report: self.path.join("report.html").display().to_string(),
            run: self.path.display().to_string(),
        })
    }

    /// The summary of a run that broke at `step`.
    pub fn broken(&self, step: u64, symptom: &Symptom) -> Result<Broken, RunError> {
        let patience = self.plan.run.alarm.patience;
        let broken = match symptom {
            Symptom::NotFinite { .. } => format!("training is broken: step {step}: {symptom}"),
            _ => format!(
                "training is broken, as {patience} steps in a row show (run.alarm.patience), the last of \
                 them step {step}: {symptom}"
            ),
        };
        Ok(Broken { begun: self.begun(), broken, broken_at: step, last_good: self.last_good()? })
    }

    /// The newest checkpoint with weights that were seen to work, or the model that the run started from.
    fn last_good(&self) -> Result<Option<String>, RunError> {
        let newest = self.health.last_good().unwrap_or(self.trainer.steps_done());
        let checkpoint = self.keeper.newest_up_to(newest).map_err(RunError::Resume)?;
        let path = checkpoint.or_else(|| self.start_path.clone());
        Ok(path.map(|path| path.display().to_string()))
    }

    fn best(&self) -> Result<Best, RunError> {
        let start = BestSeen { score: self.before.score(), step: 0 };
        let BestSeen { score: accuracy, step } =
            self.totals.best.map_or(start, |later| BestSeen::or(Some(start), later.step, later.score));
        let kept = self.keeper.kept(step).map_err(RunError::Resume)?;
        let model: Option<PathBuf> = match (step, kept) {
            (step, _) if step == self.trainer.steps_done() => Some(self.path.join("model")),
            (_, Some(path)) => Some(path),
            (0, None) => self.start_path.clone(),
            _ => None,
        };
        Ok(Best { accuracy, step, model: model.map(|path| path.display().to_string()) })
    }
}
