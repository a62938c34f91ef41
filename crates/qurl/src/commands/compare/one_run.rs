//! One method with one seed: a run as `qurl train` makes it, with its checkpoints while it runs.

use super::Comparison;
use crate::commands::reward_guard;
use crate::commands::train::run_dir::{Kind, RunDir};
use crate::commands::train::{ended, write_json};
use crate::input::OrBad;
use crate::view::TrainView;
use anyhow::Context;
use qurl_kernels::Device;
use qurl_model::Params;
use qurl_train::checkpoint::ModelFiles;
use qurl_train::compare::RunFigures;
use qurl_train::recipe::Recipe;
use qurl_train::rl::{RlTrainer, Tested, prepare};
use qurl_train::run::{Event, Outcome, Run, RunParts, SUMMARY};
use qurl_train::runlog::RunLog;
use qurl_train::start::Start;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The weights after the warm start of a seed; nothing where a recipe has none. They are made when they are
/// asked for.
pub type WarmWeights<'a> = dyn FnMut(&mut TrainView) -> anyhow::Result<Option<Params<Vec<f32>>>> + 'a;

/// Makes the run, continues it where it was cut, or only reads it where it is finished.
pub fn one_run<D: Device>(
    device: &Arc<D>,
    comparison: &Comparison,
    recipe: &Recipe,
    path: &Path,
    weights: &mut WarmWeights,
    view: &mut TrainView,
) -> anyhow::Result<RunFigures> {
    if let Some(summary) = finished(path, recipe)? {
        view.note(&format!("{} is finished", path.display()));
        if comparison.keep_models && summary.get("broken").is_none() && !path.join("model").is_dir() {
            view.warn(&format!("warning: {}: its model was not kept", path.display()));
        }
        return over(path, &summary, comparison);
    }
    let (stop, began) = (comparison.stop, Instant::now());
    let mut task = recipe.task().or_bad()?.launch(&reward_guard::launch(stop.at_once())?).or_bad()?;
    let mut start = Start::from_recipe(recipe, &*task).or_bad()?;
    prepare(&**device, recipe, comparison.file, &start, &mut *task).or_bad()?;
    let begun = path.join("recipe.toml").exists();
    let dir = RunDir::open(Kind::Train, Some(path), begun, recipe, view)?;
    let log = RunLog::open(&dir.path, dir.from.as_ref())?;
    log.warning(dir.step()).iter().for_each(|warning| view.warn(warning));
    let plan = recipe.rl(comparison.file).or_bad()?;
    let parameters = start.config.param_count();
    let checkpoint = if recipe.trainer.save_freq > 0 { plan.checkpoint_bytes(parameters) } else { 0 };
    dir.store.check_space(checkpoint, &ModelFiles::of(&start))?;
    if dir.from.is_none()
        && let Some(weights) = weights(view)?
    {
        start.weights = weights;
    }
    let trainer = RlTrainer::new(device, recipe, comparison.file, start, task).or_bad()?;
    let parts = RunParts { path: dir.path.clone(), store: dir.store.clone(), from: dir.from.clone(), log };
    let stopped = |error| ended(error, stop, &comparison.how_to_resume());
    let mut run = Run::begin(trainer, recipe, parts).map_err(stopped)?;
    write_json(&path.join(SUMMARY), &run.begun())?;
    view.evaluated(run.before().accuracy);
    view.begin("RL", run.trainer().steps_done(), plan.run.total_steps);
    let outcome = run.steps(
        || stop.requested(),
        |event| match event {
            Event::Step(record) => view.step(record),
            Event::Warning(text) => view.warn(&text),
        },
    );
    view.finish();
    match outcome.map_err(stopped)? {
        Outcome::Done => {
            let mut summary = run.summary(None, began.elapsed().as_secs_f64())?;
            match comparison.keep_models {
                true => run.save_model()?,
                false => summary.best.model = None,
            }
            write_json(&path.join(SUMMARY), &summary)?;
        }
        Outcome::Broken { step, symptom } => {
            let mut summary = run.broken(step, &symptom)?;
            view.warn(&format!("{}; this run ends here", summary.broken));
            summary.last_good = summary.last_good.filter(|_| comparison.keep_models);
            write_json(&path.join(SUMMARY), &summary)?;
        }
    }
    drop(dir);
    let summary = finished(path, recipe)?;
    let summary =
        summary.with_context(|| format!("{}: {SUMMARY} is not that of a run's end", path.display()))?;
    over(path, &summary, comparison)
}

/// What the table says of a run that is over, of which no more is kept than was asked for.
fn over(path: &Path, summary: &Value, comparison: &Comparison) -> anyhow::Result<RunFigures> {
    let checkpoints = path.join("checkpoints");
    if !comparison.keep_models && checkpoints.is_dir() {
        std::fs::remove_dir_all(&checkpoints)
            .with_context(|| format!("removing {}", checkpoints.display()))?;
    }
    figures(path, summary)
}

/// The summary of a run of this recipe that is over; its checkpoints are not looked at, because they may be
/// gone.
fn finished(path: &Path, recipe: &Recipe) -> anyhow::Result<Option<Value>> {
    let read = |name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
    if read("recipe.toml") != recipe.to_toml() {
        return Ok(None);
    }
    let summary: Value = serde_json::from_str(&read(SUMMARY)).unwrap_or_default();
    let over = summary.get("accuracy_after").or(summary.get("broken")).is_some();
    Ok(over.then_some(summary))
}

/// The figures of a run, from its files.
fn figures(path: &Path, summary: &Value) -> anyhow::Result<RunFigures> {
    let file = path.join("metrics.jsonl");
    let text = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>();
    let lines = lines.with_context(|| format!("reading {}", file.display()))?;
    let number = |key: &str| summary.get(key).and_then(Value::as_f64);
    let accuracy = number("accuracy_before")
        .with_context(|| format!("{}: has no `accuracy_before`", path.join(SUMMARY).display()))?;
    let before = Tested { accuracy, reward: None, avg_at_k: number("avg_at_k_before") };
    let broken_at = summary.get("broken_at").and_then(Value::as_u64);
    Ok(RunFigures::of(before, &lines, broken_at))
}
