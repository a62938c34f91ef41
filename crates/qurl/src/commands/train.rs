//! `qurl train`: reinforcement learning, from a recipe or from the embedded default.

use crate::input::{OrBad, bad};
use crate::view::{Mode, TrainView};
use anyhow::Context;
use qurl_kernels::{Backend, Cpu};
use qurl_model::hf::{SaveOptions, save};
use qurl_train::recipe::{AlarmAction, Recipe};
use qurl_train::rl::{RlTrainer, StepRecord};
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use serde::Serialize;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

const DEFAULT: &str = include_str!("../../../../recipes/default.toml");

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
    steps: u64,
    skipped_updates: u64,
    seconds: f64,
    seconds_by_phase: std::collections::BTreeMap<String, f64>,
    run: String,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let mut overrides = args.overrides.clone();
    overrides.extend(args.steps.map(|steps| format!("run.total_steps={steps}")));
    let (recipe, file) = match &args.recipe {
        Some(path) => (Recipe::read(path, &overrides), path.display().to_string()),
        None => (Recipe::parse(DEFAULT, "embedded default", &overrides), "embedded default".to_string()),
    };
    let recipe = recipe.or_bad()?;
    recipe.rl(&file).or_bad()?;
    let cpu = Arc::new(Cpu::from_env().or_bad()?);
    let task = recipe.task.task().or_bad()?;
    let mut start = Start::from_recipe(&recipe, &*task).or_bad()?;
    let run = run_directory(args.run.as_deref())?;
    std::fs::write(run.join("recipe.toml"), recipe.to_toml()).with_context(|| format!("writing {}", run.display()))?;
    let (parameters, device) = (start.config.param_count(), cpu.describe());
    let mut view = TrainView::new(Mode::choose(args.quiet, args.json));
    view.note(&format!("{parameters} parameters, {device}, run in {}", run.display()));

    if let Some(settings) = &recipe.sft {
        let examples = Examples::open(settings, recipe.trainer.seed, &start, &*task).or_bad()?;
        view.begin("warm start", 0, settings.steps);
        let learner = sft::run(cpu.clone(), &recipe, settings, &start, &examples, |s| view.supervised(s.step, s.loss))
            .or_bad()?;
        let weights = learner.weights()?;
        drop(examples);
        start.weights = weights;
    }

    let mut trainer = RlTrainer::new(cpu, &recipe, &file, start, task).or_bad()?;
    let plan = trainer.plan().clone();
    let accuracy_before = trainer.evaluate()?;
    let begun = Begun { accuracy_before, parameters, device };
    write_json(&run.join("summary.json"), &begun)?;
    view.evaluated(accuracy_before);
    let percent = 100.0 * accuracy_before;
    view.note(&format!("accuracy before: {percent:.1}% of {} held-out problems", plan.run.test_problems));
    let path = run.join("metrics.jsonl");
    let mut metrics = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
    view.begin("RL", 0, plan.run.total_steps);
    let mut totals = Totals::default();
    let mut accuracy_after = accuracy_before;
    for step in 1..=plan.run.total_steps {
        let mut record = trainer.step().with_context(|| format!("step {step}"))?;
        let last = step == plan.run.total_steps;
        if last || (plan.run.test_freq > 0 && step % plan.run.test_freq == 0) {
            accuracy_after = trainer.evaluate()?;
            record.test_accuracy = Some(accuracy_after);
        }
        writeln!(metrics, "{}", serde_json::to_string(&record)?)
            .with_context(|| format!("writing {}", path.display()))?;
        totals.add(&record);
        view.step(&record);
        if let Some(alarm) = alarm(&plan.run.alarm, &record) {
            view.warn(&format!("step {step}: {alarm}"));
            if plan.run.alarm.action == AlarmAction::Stop {
                break;
            }
        }
    }
    view.finish();
    let model = run.join("model");
    let start = trainer.start();
    let options = SaveOptions {
        tokenizer_files: start.tokenizer.files(),
        ..SaveOptions::new(start.config.dtype, &start.generation)
    };
    save(&model, &start.config, &trainer.actor.weights()?, &options)
        .with_context(|| format!("saving {}", model.display()))?;

    let summary = Summary {
        begun,
        accuracy_after,
        mismatch_kl: totals.mismatch_kl / totals.steps.max(1) as f64,
        rho_max: totals.rho_max,
        rollout_tokens_per_s: totals.response_tokens / totals.seconds.get("rollout").copied().unwrap_or(f64::NAN),
        steps: totals.steps,
        skipped_updates: totals.skipped,
        seconds: began.elapsed().as_secs_f64(),
        seconds_by_phase: totals.seconds,
        run: run.display().to_string(),
    };
    write_json(&run.join("summary.json"), &summary)?;
    if args.json {
        println!("{}", serde_json::to_string(&summary)?);
        return Ok(());
    }
    println!(
        "accuracy {:.1}% -> {:.1}% in {} steps, {:.0} s",
        100.0 * accuracy_before,
        100.0 * accuracy_after,
        summary.steps,
        summary.seconds
    );
    println!("mismatch KL(behav||prox) {:.2e}, largest rho {:.3}", summary.mismatch_kl, summary.rho_max);
    println!("rollout {:.0} tokens/s in {}", summary.rollout_tokens_per_s, plan.rollout.format);
    println!("model, recipe and metrics in {}", summary.run);
    Ok(())
}

/// The run's directory, made new: an existing one with metrics is never overwritten.
fn run_directory(asked: Option<&Path>) -> anyhow::Result<PathBuf> {
    let dir = match asked {
        Some(dir) => dir.to_path_buf(),
        None => {
            let free = (1..).map(|i| PathBuf::from(format!("runs/train-{i}"))).find(|dir| !dir.exists());
            free.unwrap_or_else(|| PathBuf::from("runs/train"))
        }
    };
    if dir.join("metrics.jsonl").exists() {
        return Err(bad(format!(
            "--run {}: there is a run already (metrics.jsonl); choose another directory",
            dir.display()
        )));
    }
    std::fs::create_dir_all(&dir).map_err(|e| bad(format!("--run {}: cannot be made: {e}", dir.display())))?;
    Ok(dir)
}

#[derive(Default)]
struct Totals {
    steps: u64,
    skipped: u64,
    mismatch_kl: f64,
    rho_max: f64,
    response_tokens: f64,
    seconds: std::collections::BTreeMap<String, f64>,
}

impl Totals {
    fn add(&mut self, record: &StepRecord) {
        self.steps += 1;
        self.skipped += record.skipped_updates;
        self.response_tokens += record.response_tokens as f64;
        if let Some(mismatch) = &record.mismatch {
            self.mismatch_kl += mismatch.kl;
            self.rho_max = self.rho_max.max(mismatch.rho_max);
        }
        for (phase, seconds) in &record.timing {
            *self.seconds.entry(phase.clone()).or_default() += seconds;
        }
    }
}

fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string(value)?
        + "
";
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
