//! `qurl train`: reinforcement learning, from a recipe or from the embedded default.

pub mod run_dir;
mod totals;

use super::reward_guard;
use crate::device::{RecipeDevice, on_device};
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::report::{RunData, render};
use crate::stop::Stop;
use crate::view::{Mode, TrainView};
use anyhow::Context;
use qurl_kernels::Backend;
use qurl_model::hf::{SaveOptions, save};
use qurl_model::{ModelConfig, Params};
use qurl_tasks::task::{Dropped, Task};
use qurl_train::checkpoint::{ModelFiles, Snapshot, Writer};
use qurl_train::memory::MemoryPlan;
use qurl_train::recipe::{AlarmAction, Recipe, RlPlan, Sft};
use qurl_train::rl::{RlTrainer, RolloutSpeed, StepRecord, TrainError, prepare};
use qurl_train::runlog::RunLog;
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use run_dir::{RECIPE, RunDir};
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use totals::Totals;

const DEFAULT: &str = include_str!("../../../../recipes/default.toml");
/// Rollouts in each format for the summary's comparison of speeds.
const SPEED_ROUNDS: usize = 3;

/// Options of `qurl train`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl train recipes/default.toml --set rollout.format=fp8 --run runs/fp8")]
pub struct Args {
    /// Recipe file; without one the embedded default trains a small model from nothing
    recipe: Option<PathBuf>,
    /// Overrides a key of the recipe, as in --set trainer.seed=7
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Steps, instead of the recipe's run.total_steps
    #[arg(long)]
    steps: Option<u64>,
    /// Directory of the run (default: the next free runs/train-N)
    #[arg(long)]
    run: Option<PathBuf>,
    /// Go on with the run in --run from its newest whole checkpoint; without a recipe, with its own
    #[arg(long, requires = "run")]
    resume: bool,
    #[command(flatten)]
    device: RecipeDevice,
    /// Show warnings and the result only
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

/// `summary.json` of the run directory while the run goes on: what no line of `metrics.jsonl` holds.
#[derive(Serialize)]
struct Begun {
    accuracy_before: f64,
    parameters: u64,
    device: String,
}

/// What `--json` prints, and `summary.json` at the end.
#[derive(Serialize)]
struct Summary {
    #[serde(flatten)]
    begun: Begun,
    accuracy_after: f64,
    mismatch_kl: f64,
    rho_max: f64,
    rollout_tokens_per_s: f64,
    /// The final weights on the same problems, in the recipe's format and in bf16, in turns.
    #[serde(skip_serializing_if = "Option::is_none")]
    rollout_speed: Option<RolloutSpeed>,
    steps: u64,
    skipped_updates: u64,
    seconds: f64,
    seconds_by_phase: std::collections::BTreeMap<String, f64>,
    report: String,
    run: String,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let (recipe, file) = recipe_of(&args)?;
    let recipe = args.device.put_into(recipe);
    let plan = recipe.rl(&file).or_bad()?;
    on_device!(recipe.trainer.device, backend => run_on(backend, args, recipe, file, plan, began))
}

fn run_on<B: Backend>(
    backend: Arc<B>,
    args: Args,
    recipe: Recipe,
    file: String,
    plan: RlPlan,
    began: Instant,
) -> anyhow::Result<()> {
    let stop = Stop::watch()?;
    let mut task = recipe.task.launch(&reward_guard::launch(stop.at_once())?).or_bad()?;
    let mut start = Start::from_recipe(&recipe, &*task).or_bad()?;
    let mut view = TrainView::new(Mode::choose(args.quiet, args.json));
    overlaps(&*task).iter().for_each(|note| view.warn(note));
    note_dropped(prepare(&*backend, &recipe, &file, &start, &mut *task).or_bad()?, &plan, &view);
    foresee_memory(&*backend, &recipe, &plan, &start.config, &view)?;
    let dir = RunDir::open(args.run.as_deref(), args.resume, &recipe, &view)?;
    let (parameters, device) = (start.config.param_count(), backend.describe());
    view.note(&format!("{parameters} parameters, {device}, run in {}", dir.path.display()));
    start.warning.iter().for_each(|warning| view.warn(&format!("warning: {warning}")));
    let mut log = RunLog::open(&dir.path, dir.step())?;
    if log.kept().len() as u64 != dir.step() {
        let (kept, step) = (log.kept().len(), dir.step());
        view.warn(&format!("warning: metrics.jsonl has {kept} of the {step} steps done so far"));
    }
    let mut writer = Writer::new(dir.store.clone(), ModelFiles::of(&start), dir.from.as_ref().map(|(step, _)| *step));

    if let (Some(settings), None) = (&recipe.sft, &dir.from) {
        start.weights = warm_start(&backend, &recipe, settings, &start, &*task, &stop, &dir, &mut view)?;
    }
    let mut trainer = RlTrainer::new(backend, &recipe, &file, start, task).or_bad()?;
    let text = recipe.to_toml();
    let mut accuracy_before = None;
    match &dir.from {
        Some((_, path)) => {
            let snapshot = Snapshot::read(path, &trainer.start().config)?;
            accuracy_before = snapshot.state.accuracy_before;
            trainer.restore(snapshot).or_bad()?;
        }
        None if recipe.sft.is_some() && recipe.trainer.save_freq > 0 => {
            writer.start(trainer.snapshot(&text)?, log.files()?)?; // the warm start is not to be lost
        }
        None => {}
    }
    let accuracy_before = match accuracy_before {
        Some(accuracy) => accuracy,
        None => unless_cancelled(trainer.evaluate(), &stop, &dir)?,
    };
    let begun = Begun { accuracy_before, parameters, device };
    let summary_file = dir.path.join("summary.json");
    write_json(&summary_file, &begun)?;
    view.evaluated(accuracy_before);
    let percent = 100.0 * accuracy_before;
    view.note(&format!("accuracy before: {percent:.1}% of {} held-out problems", trainer.held_out()));

    view.begin("RL", trainer.steps_done(), plan.run.total_steps);
    let mut totals = Totals::default();
    log.kept().iter().for_each(|line| totals.add(line));
    let mut tested = None;
    while trainer.steps_done() < plan.run.total_steps {
        if stop.asked() {
            let step = trainer.steps_done();
            if !writer.has(step) {
                writer.start(snapshot(&trainer, &text, accuracy_before, tested)?, log.files()?)?;
            }
            writer.finish()?;
            return Err(stop.error(format!("stopped after step {step}; go on with: {}", dir.how_to_go_on())));
        }
        writer.poll().with_context(|| failed_checkpoint(&dir))?;
        let step = trainer.steps_done() + 1;
        let mut record = unless_cancelled(trainer.step(), &stop, &dir).with_context(|| format!("step {step}"))?;
        let alarm = alarm(&plan.run.alarm, &record);
        let stopped = alarm.is_some() && plan.run.alarm.action == AlarmAction::Stop;
        let ends = stopped || step == plan.run.total_steps;
        tested = None;
        if ends || (plan.run.test_freq > 0 && step.is_multiple_of(plan.run.test_freq)) {
            let began = Instant::now();
            tested = Some(unless_cancelled(trainer.evaluate(), &stop, &dir)?);
            record.test_accuracy = tested;
            record.add_phase("test", began.elapsed().as_secs_f64());
        }
        let freq = recipe.trainer.save_freq;
        let began = Instant::now();
        let saved = match freq > 0 && (ends || step.is_multiple_of(freq)) {
            true => {
                writer.finish().with_context(|| failed_checkpoint(&dir))?;
                Some(snapshot(&trainer, &text, accuracy_before, tested)?)
            }
            false => None,
        };
        record.add_phase("checkpoint", began.elapsed().as_secs_f64());
        let began = Instant::now();
        if plan.run.logs_rollouts_at(step) {
            log.rollouts(step, &trainer.sampled_rollouts(plan.run.rollout_log_samples)?)?;
        }
        record.add_phase("log", log.take_seconds() + began.elapsed().as_secs_f64());
        log.record(&record)?;
        if let Some(snapshot) = saved {
            writer.start(snapshot, log.files()?)?;
        }
        totals.add(&serde_json::to_value(&record)?);
        view.step(&record);
        if let Some(alarm) = alarm {
            let end = if stopped { "; the run ends here (run.alarm.action)" } else { "" };
            view.warn(&format!("step {step}: {alarm}{end}"));
        }
        if record.skipped_updates > 0 {
            let (skipped, all) = (record.skipped_updates, record.updates + record.skipped_updates);
            view.warn(&format!("step {step}: {skipped} of {all} updates were not finite and were skipped"));
        }
        if ends {
            break;
        }
    }
    view.finish();
    writer.finish().with_context(|| failed_checkpoint(&dir))?;
    let model = dir.path.join("model");
    let start = trainer.start();
    let options = SaveOptions {
        tokenizer_files: start.tokenizer.files(),
        ..SaveOptions::new(start.config.dtype, &start.generation)
    };
    save(&model, &start.config, &trainer.actor.weights()?, &options)
        .with_context(|| format!("saving {}", model.display()))?;

    let rollout_speed = plan.rollout.format.is_quantized().then(|| trainer.rollout_speed(SPEED_ROUNDS)).transpose()?;
    let report = dir.path.join("report.html");
    let summary = Summary {
        begun,
        accuracy_after: totals.test_accuracy.unwrap_or(accuracy_before),
        mismatch_kl: totals.mismatch_kl / totals.steps.max(1) as f64,
        rho_max: totals.rho_max,
        rollout_tokens_per_s: totals.response_tokens / totals.seconds.get("rollout").copied().unwrap_or(f64::NAN),
        rollout_speed,
        steps: totals.steps,
        skipped_updates: totals.skipped,
        seconds: began.elapsed().as_secs_f64(),
        seconds_by_phase: totals.seconds,
        report: report.display().to_string(),
        run: dir.path.display().to_string(),
    };
    write_json(&summary_file, &summary)?;
    std::fs::write(&report, render(&[RunData::read(&dir.path)?]))
        .with_context(|| format!("writing {}", report.display()))?;
    if args.json {
        out!("{}", serde_json::to_string(&summary)?)?;
        return Ok(());
    }
    out!(
        "accuracy {:.1}% -> {:.1}% in {} steps, {:.0} s",
        100.0 * accuracy_before,
        100.0 * summary.accuracy_after,
        summary.steps,
        summary.seconds
    )?;
    out!("mismatch KL(behav||prox) {:.2e}, largest rho {:.3}", summary.mismatch_kl, summary.rho_max)?;
    out!("rollout {:.0} tokens/s in {}", summary.rollout_tokens_per_s, plan.rollout.format)?;
    if let Some(speed) = &summary.rollout_speed {
        let (quantized, bf16) = (speed.tokens_per_s, speed.bf16_tokens_per_s);
        let times = quantized / bf16;
        let format = plan.rollout.format;
        out!("  the final model alone: {quantized:.0} in {format}, {bf16:.0} in bf16 ({times:.2} times)")?;
    }
    out!("report {}; model, recipe, logs and checkpoints in {}", summary.report, summary.run)?;
    Ok(())
}

/// The recipe that was named, that of the run that goes on, or the embedded default; and what to call it.
fn recipe_of(args: &Args) -> anyhow::Result<(Recipe, String)> {
    let mut overrides = args.overrides.clone();
    overrides.extend(args.steps.map(|steps| format!("run.total_steps={steps}")));
    let of_the_run = args.run.as_ref().filter(|_| args.resume && args.recipe.is_none()).map(|run| run.join(RECIPE));
    if let Some(path) = of_the_run.as_ref().filter(|path| !path.exists()) {
        let what = "nothing to go on with; name the recipe to begin a run there";
        return Err(bad(format!("--resume: {} does not exist: {what}", path.display())));
    }
    recipe_or_default(args.recipe.as_deref().or(of_the_run.as_deref()), &overrides)
}

/// A recipe file, or without one the embedded default; and what to call it.
pub fn recipe_or_default(path: Option<&Path>, overrides: &[String]) -> anyhow::Result<(Recipe, String)> {
    let (recipe, file) = match path {
        Some(path) => (Recipe::read(path, overrides), path.display().to_string()),
        None => (Recipe::parse(DEFAULT, "embedded default", overrides), "embedded default".to_string()),
    };
    Ok((recipe.or_bad()?, file))
}

/// A wait for scores that a signal cut short ends the run as stopped: it is nobody's failure.
fn unless_cancelled<T>(outcome: Result<T, TrainError>, stop: &Stop, dir: &RunDir) -> anyhow::Result<T> {
    outcome.map_err(|error| match error.is_cancelled() {
        true => stop.error(format!("stopped while waiting for scores; go on with: {}", dir.how_to_go_on())),
        false => error.into(),
    })
}

/// That problems to train on are left out because they are test problems, if any are.
pub fn overlaps(task: &dyn Task) -> Option<String> {
    let count = task.overlaps();
    (count > 0).then(|| format!("{count} problems to train on are left out: they are among those of task.test_files"))
}

/// Says that problems were left out, if any were.
pub fn note_dropped(dropped: Dropped, plan: &RlPlan, view: &TrainView) {
    if dropped != Dropped::default() {
        let (Dropped { train, test }, most) = (dropped, plan.data.max_prompt_length);
        let what = format!("{train} problems to train on and {test} held-out ones are left out");
        view.warn(&format!("{what}: their prompts have more than data.max_prompt_length = {most} tokens"));
    }
}

/// On a device with its own memory, says what a run will need there; an error if it is too much.
pub fn foresee_memory<B: Backend>(
    backend: &B,
    recipe: &Recipe,
    plan: &RlPlan,
    config: &ModelConfig,
    view: &TrainView,
) -> anyhow::Result<()> {
    if backend.memory().is_some() {
        let memory = MemoryPlan::of_rl(recipe, plan, config);
        view.note(&format!("memory: {memory}"));
        memory.check(backend).or_bad()?;
    }
    Ok(())
}

/// Supervised training first; the weights it ends with.
fn warm_start<B: Backend>(
    backend: &Arc<B>,
    recipe: &Recipe,
    settings: &Sft,
    start: &Start,
    task: &dyn Task,
    stop: &Stop,
    dir: &RunDir,
    view: &mut TrainView,
) -> anyhow::Result<Params<Vec<f32>>> {
    let examples = Examples::open(settings, recipe.trainer.seed, start, task).or_bad()?;
    view.begin("warm start", 0, settings.steps);
    let (learner, flow) = sft::run_while(backend.clone(), recipe, settings, start, &examples, |step| {
        view.supervised(step.step, step.loss);
        if stop.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .or_bad()?;
    if flow.is_break() {
        let message = format!("stopped in the warm start, which begins anew with: {}", dir.how_to_go_on());
        return Err(stop.error(message));
    }
    Ok(learner.weights()?)
}

/// The state of the run for a checkpoint.
fn snapshot<B: Backend>(
    trainer: &RlTrainer<B>,
    recipe: &str,
    accuracy_before: f64,
    tested: Option<f64>,
) -> anyhow::Result<Snapshot> {
    let mut snapshot = trainer.snapshot(recipe)?;
    snapshot.state.accuracy_before = Some(accuracy_before);
    snapshot.state.test_accuracy = tested;
    Ok(snapshot)
}

fn failed_checkpoint(dir: &RunDir) -> String {
    format!("writing a checkpoint (earlier ones are whole; go on with: {})", dir.how_to_go_on())
}

fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let text = format!("{}\n", serde_json::to_string(value)?);
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// What is out of its band, if anything.
fn alarm(band: &qurl_train::recipe::Alarm, record: &StepRecord) -> Option<String> {
    let kl = record.mismatch.map_or(0.0, |m| m.kl);
    if kl > band.mismatch_kl || !kl.is_finite() {
        return Some(format!("mismatch KL {kl:.4} is above run.alarm.mismatch_kl = {}", band.mismatch_kl));
    }
    let entropy = record.rollout_entropy;
    let outside = entropy < band.entropy_low || entropy > band.entropy_high;
    outside
        .then(|| format!("entropy {entropy:.4} is outside of run.alarm {} to {}", band.entropy_low, band.entropy_high))
}
