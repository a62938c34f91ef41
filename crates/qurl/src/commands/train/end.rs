//! The end of a run as its user sees it: model, speed of its rollouts, summary and report; or what is left of
//! one that broke.

use super::run_dir::RunDir;
use super::{write_file, write_json};
use crate::output::out;
use crate::report::{RunData, render};
use crate::view::TrainView;
use anyhow::anyhow;
use qurl_kernels::{Device, Format};
use qurl_train::recipe::RlPlan;
use qurl_train::rl::Symptom;
use qurl_train::run::{Best, Memory, Run, SUMMARY, Summary};
use std::path::Path;
use std::time::Instant;

/// Measures the speed of the trained model's rollouts, saves it, writes summary and report. A model that
/// cannot be sampled with is not saved: training broke it.
pub fn done<D: Device>(
    mut run: Run<D>,
    plan: &RlPlan,
    began: Instant,
    dir: &Path,
    json: bool,
    view: &TrainView,
) -> anyhow::Result<()> {
    let rollout_speed = run.rollout_speed();
    if let Some(symptom) = run.last_symptom(rollout_speed.as_ref().err())? {
        let step = run.trainer().steps_done();
        return broken(run, step, &symptom, dir, view);
    }
    run.save_model()?;
    let rollout_speed = rollout_speed.unwrap_or_else(|error| {
        view.warn(&format!("the speed of the rollouts could not be measured: {error}"));
        None
    });
    if !run.trainer().ranks().is_first() {
        return Ok(());
    }
    let summary = run.summary(rollout_speed, began.elapsed().as_secs_f64())?;
    if let Some(Memory { planned, peak }) = summary.memory {
        view.note(&format!("memory: {} MiB planned, {} MiB allocated at most", planned >> 20, peak >> 20));
    }
    let dir = Path::new(&summary.run);
    write_json(&dir.join(SUMMARY), &summary)?;
    write_file(Path::new(&summary.report), &render(&[RunData::read(dir)?]))?;
    match json {
        true => Ok(out!("{}", serde_json::to_string(&summary)?)?),
        false => print(&summary, plan.rollout.format, plan.run.test_k),
    }
}

/// Says that a run had made all of its steps before; nothing is changed.
pub fn finished_before(summary: &str, dir: &RunDir, json: bool) -> anyhow::Result<()> {
    if json {
        return Ok(out!("{}", summary.trim_end())?);
    }
    let (step, run, how) = (dir.step(), dir.path.display(), dir.how_to_resume());
    Ok(out!("the run in {run} is finished: it has made its {step} steps; longer with: {how} --steps N")?)
}

/// Writes summary and report of a run whose training broke, and names what can be used of it. Its last
/// weights are not saved as its model.
pub fn broken<D: Device>(
    run: Run<D>,
    step: u64,
    symptom: &Symptom,
    dir: &Path,
    view: &TrainView,
) -> anyhow::Result<()> {
    let summary = run.broken(step, symptom)?;
    if !run.trainer().ranks().is_first() {
        return Err(anyhow!("{}", summary.broken));
    }
    write_json(&dir.join(SUMMARY), &summary)?;
    let report = dir.join("report.html");
    let written = RunData::read(dir).and_then(|data| write_file(&report, &render(&[data])));
    if let Err(error) = written {
        view.warn(&format!("{}: could not be written: {error}", report.display()));
    }
    let unsaved = || "the run saved no checkpoint of it (trainer.save_freq)".to_string();
    Err(anyhow!("{}; the last good model: {}", summary.broken, summary.last_good.unwrap_or_else(unsaved)))
}

/// The summary in words.
fn print(summary: &Summary, format: Format, test_k: usize) -> anyhow::Result<()> {
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
