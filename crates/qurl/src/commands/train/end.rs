//! The end of a run: its model, its summary and its report; and what is left of a run that broke.

use super::steps::Steps;
use super::write_json;
use crate::output::out;
use crate::report::{RunData, render};
use crate::view::TrainView;
use anyhow::{Context, anyhow};
use qurl_kernels::Backend;
use qurl_model::hf::{SaveOptions, save};
use qurl_train::memory::MemoryPlan;
use qurl_train::rl::{RolloutSpeed, Symptom, Tested};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// The file's name in the run's directory.
pub const SUMMARY: &str = "summary.json";

/// `summary.json` of the run directory while the run goes on: what no line of `metrics.jsonl` holds.
#[derive(Serialize)]
pub struct Begun {
    accuracy_before: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    avg_at_k_before: Option<f64>,
    parameters: u64,
    device: String,
}

impl Begun {
    /// What is known before the first step.
    pub fn new(before: Tested, parameters: u64, device: String) -> Begun {
        Begun { accuracy_before: before.accuracy, avg_at_k_before: before.avg_at_k, parameters, device }
    }
}

/// The best model that an evaluation of the run saw.
#[derive(Clone, Debug, Serialize)]
struct Best {
    /// Avg@k where it was measured, else the greedy accuracy.
    accuracy: f64,
    /// The step it was seen after, 0 for the start.
    step: u64,
    /// Where it is, if it was kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
}

/// Device memory in bytes: what was told before the run and what was allocated at most.
#[derive(Clone, Copy, Debug, Serialize)]
struct Memory {
    planned: usize,
    peak: usize,
}

/// What `--json` prints, and `summary.json` at the end.
#[derive(Serialize)]
struct Summary {
    #[serde(flatten)]
    begun: Begun,
    accuracy_after: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    avg_at_k_after: Option<f64>,
    best: Best,
    mismatch_kl: f64,
    rho_max: f64,
    rollout_tokens_per_s: f64,
    /// The final weights on the same problems, in the recipe's format and in bf16, alternating.
    #[serde(skip_serializing_if = "Option::is_none")]
    rollout_speed: Option<RolloutSpeed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Memory>,
    steps: u64,
    skipped_updates: u64,
    seconds: f64,
    seconds_by_phase: BTreeMap<String, f64>,
    report: String,
    run: String,
}

/// A run that has made its last step.
pub struct End<'a, B: Backend> {
    /// The run.
    pub run: Steps<'a, B>,
    /// What was known before its first step.
    pub begun: Begun,
    /// The directory of the model it started from, where it has one.
    pub start_path: Option<PathBuf>,
    /// What it was expected to take of the device's memory.
    pub memory: MemoryPlan,
    /// Where it computed.
    pub backend: &'a B,
    /// When the command began.
    pub began: Instant,
    /// Whether to print JSON.
    pub json: bool,
}

impl<B: Backend> End<'_, B> {
    /// Saves the model, measures the speed of its rollouts, writes summary and report.
    pub fn done(mut self, view: &TrainView) -> anyhow::Result<()> {
        self.save_model()?;
        let plan = self.run.plan;
        let rollout_speed = match plan.rollout.format.is_quantized().then(|| self.run.trainer.rollout_speed()) {
            Some(Ok(speed)) => Some(speed),
            Some(Err(error)) => {
                view.warn(&format!("the speed of the rollouts could not be measured: {error}"));
                None
            }
            None => None,
        };
        let memory = self.memory_use();
        if let Some(Memory { planned, peak }) = memory {
            view.note(&format!("memory: {} MiB planned, {} MiB allocated at most", planned >> 20, peak >> 20));
        }
        let path = &self.run.dir.path;
        let (totals, report) = (&self.run.totals, path.join("report.html"));
        let before = self.begun.accuracy_before;
        let summary = Summary {
            accuracy_after: totals.test_accuracy.unwrap_or(before),
            avg_at_k_after: totals.test_avg_at_k.or(self.begun.avg_at_k_before),
            best: self.best()?,
            begun: self.begun,
            mismatch_kl: totals.mismatch_kl / totals.steps.max(1) as f64,
            rho_max: totals.rho_max,
            rollout_tokens_per_s: totals.response_tokens / totals.seconds.get("rollout").copied().unwrap_or(f64::NAN),
            rollout_speed,
            memory,
            steps: totals.steps,
            skipped_updates: totals.skipped,
            seconds: self.began.elapsed().as_secs_f64(),
            seconds_by_phase: totals.seconds.clone(),
            report: report.display().to_string(),
            run: path.display().to_string(),
        };
        write_json(&path.join(SUMMARY), &summary)?;
        std::fs::write(&report, render(&[RunData::read(path)?]))
            .with_context(|| format!("writing {}", report.display()))?;
        if self.json {
            return out!("{}", serde_json::to_string(&summary)?).map_err(Into::into);
        }
        print(&summary, plan.rollout.format, plan.run.test_k)
    }

    /// Writes summary and report of a run whose training broke, and names what can be used of it. Its last weights are
    /// not saved as its model.
    pub fn broken(self, step: u64, symptom: &Symptom, view: &TrainView) -> anyhow::Result<()> {
        let path = &self.run.dir.path;
        let patience = self.run.plan.run.alarm.patience;
        let why = match symptom {
            Symptom::NotFinite { .. } => format!("training is broken: step {step}: {symptom}"),
            _ => format!(
                "training is broken, as {patience} steps in a row show (run.alarm.patience), the last of them step \
                 {step}: {symptom}"
            ),
        };
        let good = self.last_good()?;
        #[derive(Serialize)]
        struct Broken {
            #[serde(flatten)]
            begun: Begun,
            broken: String,
            last_good: Option<String>,
        }
        let where_it_is =
            good.clone().unwrap_or_else(|| "the run saved no checkpoint of it (trainer.save_freq)".to_string());
        write_json(&path.join(SUMMARY), &Broken { begun: self.begun, broken: why.clone(), last_good: good })?;
        let report = path.join("report.html");
        let written = RunData::read(path).and_then(|data| Ok(std::fs::write(&report, render(&[data]))?));
        if let Err(error) = written {
            view.warn(&format!("{}: could not be written: {error}", report.display()));
        }
        Err(anyhow!("{why}; the last good model: {where_it_is}"))
    }

    /// The newest checkpoint with weights that were seen to work, or the model that the run started from.
    fn last_good(&self) -> anyhow::Result<Option<String>> {
        let newest = self.run.health.last_good().unwrap_or(self.run.trainer.steps_done());
        let steps = self.run.checkpoints.store.steps()?;
        let checkpoint = steps.into_iter().rfind(|&step| step <= newest);
        let path = checkpoint.map(|step| self.run.checkpoints.store.path(step)).or_else(|| self.start_path.clone());
        Ok(path.map(|path| path.display().to_string()))
    }

    fn best(&self) -> anyhow::Result<Best> {
        let before = self.run.checkpoints.before.score();
        let (accuracy, step) = match self.run.totals.best {
            Some((accuracy, step)) if accuracy >= before => (accuracy, step),
            _ => (before, 0),
        };
        let run = &self.run;
        let model = match step {
            step if step == run.trainer.steps_done() => Some(run.dir.path.join("model")),
            step if run.checkpoints.store.steps()?.contains(&step) => Some(run.checkpoints.store.path(step)),
            0 => self.start_path.clone(),
            _ => None,
        };
        Ok(Best { accuracy, step, model: model.map(|path| path.display().to_string()) })
    }

    fn memory_use(&self) -> Option<Memory> {
        self.backend.peak_memory().map(|peak| Memory { planned: self.memory.total(), peak })
    }

    fn save_model(&self) -> anyhow::Result<()> {
        let model = self.run.dir.path.join("model");
        let start = self.run.trainer.start();
        let options = SaveOptions {
            tokenizer_files: start.tokenizer.files(),
            ..SaveOptions::new(start.config.dtype, &start.generation)
        };
        let (config, weights) = self.run.trainer.model()?;
        save(&model, &config, &weights, &options).with_context(|| format!("saving {}", model.display()))
    }
}

/// The summary in words.
fn print(summary: &Summary, format: qurl_kernels::Format, test_k: usize) -> anyhow::Result<()> {
    out!(
        "accuracy {:.1}% -> {:.1}% in {} steps, {:.0} s",
        100.0 * summary.begun.accuracy_before,
        100.0 * summary.accuracy_after,
        summary.steps,
        summary.seconds
    )?;
    if let Some((before, after)) = summary.begun.avg_at_k_before.zip(summary.avg_at_k_after) {
        out!("Avg@{test_k} {:.1}% -> {:.1}%", 100.0 * before, 100.0 * after)?;
    }
    let Best { accuracy, step, model } = &summary.best;
    if *step != summary.steps {
        let place = model.as_ref().map_or(String::new(), |model| format!(": {model}"));
        out!("best {:.1}% after step {step}{place}", 100.0 * accuracy)?;
    }
    out!("mismatch KL(behav||prox) {:.2e}, largest rho {:.3}", summary.mismatch_kl, summary.rho_max)?;
    out!("rollout {:.0} tokens/s in {format}", summary.rollout_tokens_per_s)?;
    if let Some(speed) = &summary.rollout_speed {
        let (quantized, bf16) = (speed.tokens_per_s, speed.bf16_tokens_per_s);
        let times = quantized / bf16;
        out!("  the final model alone: {quantized:.0} in {format}, {bf16:.0} in bf16 ({times:.2} times)")?;
    }
    out!("report {}; model, recipe, logs and checkpoints in {}", summary.report, summary.run)?;
    Ok(())
}
