//! `qurl recipe check`: everything that a run finds out before its first step, without the run.

use crate::device;
use crate::input::OrBad;
use crate::output::{self, out};
use anyhow::Context;
use qurl_kernels::Device;
use qurl_tasks::reward::RewardRule;
use qurl_tasks::task::{Dropped, Split};
use qurl_train::memory::MemoryPlan;
use qurl_train::recipe::{Recipe, RlPlan, TaskSource};
use qurl_train::rl::{TrainError, prepare};
use qurl_train::sft::{Examples, LeftOut};
use qurl_train::start::Start;
use serde::Serialize;
use std::env;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Why there is no figure for the time of a step.
const NO_TIME: &str =
    "not estimated: it depends on how long the responses get; `qurl train FILE --steps 2` measures it";

/// The same of supervised training.
const NO_TIME_SFT: &str = "not estimated; `qurl sft FILE --steps 2` measures it";

/// Options of `qurl recipe check`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl recipe check mine.toml --set rollout.format=fp8")]
pub struct Args {
    /// Recipe file
    recipe: PathBuf,
    /// Overrides a key of the recipe, as in --set trainer.seed=7
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    #[command(flatten)]
    device: device::RecipeDevice,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// What a run would be.
#[derive(Serialize)]
struct Report {
    recipe: String,
    device: String,
    model: Model,
    #[serde(skip_serializing_if = "Option::is_none")]
    problems: Option<Problems>,
    #[serde(skip_serializing_if = "Option::is_none")]
    supervised: Option<Supervised>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reinforcement: Option<Reinforcement>,
    memory: Vec<Part>,
    memory_mib: usize,
    memory_on: &'static str,
    time_of_a_step: &'static str,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Model {
    from: String,
    parameters: u64,
    context: usize,
    vocabulary: usize,
}

/// Counts of problems; none where they are generated without end.
#[derive(Serialize)]
struct Problems {
    train: Option<u64>,
    test: Option<u64>,
    /// Left out of those to train on, because they are test problems.
    overlaps: u64,
    /// Left out because their prompts are too long.
    too_long_train: u64,
    too_long_test: u64,
}

#[derive(Serialize)]
struct Supervised {
    steps: u64,
    batch_size: usize,
    /// Examples in files; none where they are worked solutions of generated problems.
    examples: Option<usize>,
    /// Examples that the validation loss is taken on.
    validation: usize,
    /// Left out because they are too long, of those to learn and of those to validate on.
    too_long: usize,
    /// Left out of those to learn, because they are among those to validate on.
    overlaps: usize,
}

#[derive(Serialize)]
struct Reinforcement {
    steps: u64,
    prompts: usize,
    responses: usize,
    /// Most tokens of the responses of a step.
    max_tokens: usize,
    updates: usize,
}

#[derive(Serialize)]
struct Part {
    part: String,
    mib: usize,
}

impl Part {
    fn of((part, bytes): &(String, usize)) -> Part {
        Part { part: part.clone(), mib: bytes >> 20 }
    }
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let recipe = args.device.put_into(Recipe::read(&args.recipe, &args.overrides).or_bad()?);
    let report = match device::look(recipe.trainer.device)? {
        device::Opened::Cpu(device) => look(&device, &recipe)?,
        device::Opened::Cuda(device) => look(&device, &recipe)?,
    };
    match args.json {
        true => Ok(out!("{}", serde_json::to_string(&report)?)?),
        false => Ok(output::text(&text(&report))?),
    }
}

fn look<D: Device>(device: &D, recipe: &Recipe) -> anyhow::Result<Report> {
    let file = recipe.file();
    let mut task = recipe.task.as_ref().map(TaskSource::problems).transpose().or_bad()?;
    let start = Start::of_sft(recipe, task.as_deref()).or_bad()?;
    let mut warnings: Vec<String> = start.warning.iter().cloned().collect();
    warnings.extend(recipe.doubts(task.as_ref().and_then(|task| task.len(Split::Train))));
    warnings.extend(missing_programs(recipe));
    let (mut dropped, mut memory, mut reinforcement) = (Dropped::default(), None, None);
    let supervised = match &recipe.sft {
        Some(sft) => {
            let planned = MemoryPlan::of_sft(device, recipe, sft, &start.config);
            memory = foreseen(device, planned.map_err(TrainError::from))?;
            let examples = Examples::open(sft, recipe.trainer.seed, &start, task.as_deref()).or_bad()?;
            warnings.extend(examples.count().and_then(|count| recipe.doubt_of_examples(count)));
            let LeftOut { too_long, too_long_to_validate, overlaps } = examples.left_out();
            Some(Supervised {
                steps: sft.steps,
                batch_size: sft.batch_size,
                examples: examples.count(),
                validation: examples.validation().len(),
                too_long: too_long + too_long_to_validate,
                overlaps,
            })
        }
        None => None,
    };
    if recipe.sft.is_none() || recipe.run.is_some() {
        let plan = recipe.rl(file).or_bad()?;
        recipe.task().or_bad()?;
        if let Some(task) = task.as_deref_mut() {
            dropped = prepare(device, recipe, file, &start, task).or_bad()?;
        }
        memory = foreseen(device, MemoryPlan::of_rl(device, recipe, &plan, &start.config))?;
        reinforcement = Some(step_of(&plan));
    }
    if let Some(memory) = &memory {
        memory.check(device).or_bad().context("this recipe does not fit")?;
    }
    let problems = task.map(|task| Problems {
        train: task.len(Split::Train),
        test: task.len(Split::Test),
        overlaps: task.overlaps(),
        too_long_train: dropped.train,
        too_long_test: dropped.test,
    });
    let config = &start.config;
    let from = recipe.model.path.as_ref().map_or("new".to_string(), |path| path.display().to_string());
    Ok(Report {
        recipe: file.to_string(),
        device: device.info().description,
        model: Model {
            from,
            parameters: config.param_count(),
            context: config.max_position_embeddings,
            vocabulary: config.vocab_size,
        },
        problems,
        supervised,
        time_of_a_step: if reinforcement.is_some() { NO_TIME } else { NO_TIME_SFT },
        reinforcement,
        memory_on: if device.memory().is_some() { "this device" } else { "a GPU such as NVIDIA H200" },
        memory: memory.iter().flat_map(MemoryPlan::parts).map(Part::of).collect(),
        memory_mib: memory.map_or(0, |memory| memory.total() >> 20),
        warnings,
    })
}

/// The plan; a device without memory of its own gets that of a GPU, where a GPU can do it.
fn foreseen<D: Device>(
    device: &D,
    plan: Result<MemoryPlan, TrainError>,
) -> anyhow::Result<Option<MemoryPlan>> {
    match device.memory() {
        Some(_) => Ok(Some(plan.or_bad()?)),
        None => Ok(plan.ok()),
    }
}

/// That a reward command, which is not started here, could not be.
fn missing_programs(recipe: &Recipe) -> Vec<String> {
    let mut missing = Vec::new();
    let Some(task) = &recipe.task else { return missing };
    for (i, rule) in task.rewards().iter().enumerate() {
        let RewardRule::Command { command, .. } = rule else { continue };
        let Some(program) = command.first() else { continue };
        let path = env::var_os("PATH").unwrap_or_default();
        let there = match program.contains('/') {
            true => Path::new(program).exists(),
            false => env::split_paths(&path).any(|dir| dir.join(program).exists()),
        };
        let key = match task {
            TaskSource::Command { .. } => "task.command".to_string(),
            TaskSource::Synthetic { .. } | TaskSource::Dataset(_) => format!("task.rewards[{i}].command"),
        };
        if !there {
            let place = recipe.place(recipe.file(), &key);
            missing.push(format!("{place}: key `{key}` names the program {program:?}, which is not there"));
        }
    }
    missing
}

/// The sizes of the first step.
fn step_of(plan: &RlPlan) -> Reinforcement {
    let (longest, n) = plan.sizes_at(1);
    let prompts = plan.data.train_batch_size;
    Reinforcement {
        steps: plan.run.total_steps,
        prompts,
        responses: prompts * n,
        max_tokens: prompts * n * longest,
        updates: prompts / plan.actor.ppo_mini_batch_size.max(1) * plan.actor.ppo_epochs,
    }
}

fn text(report: &Report) -> String {
    let Report { model, problems, .. } = report;
    let mut text = String::new();
    let _ = writeln!(text, "{}: a run by it could start on {}", report.recipe, report.device);
    let _ = writeln!(
        text,
        "model: {}, {} parameters, a context of {} tokens, a vocabulary of {}",
        model.from, model.parameters, model.context, model.vocabulary
    );
    if let Some(problems) = problems {
        match (problems.train, problems.test) {
            (Some(train), Some(test)) => _ = writeln!(text, "problems: {train} to train on, {test} held out"),
            _ => text.push_str("problems: generated without end\n"),
        }
        let _ = writeln!(
            text,
            "left out: {} that are among the test problems; too long are {} to train on and {} held out",
            problems.overlaps, problems.too_long_train, problems.too_long_test
        );
    }
    if let Some(sft) = &report.supervised {
        let examples =
            sft.examples.map_or("the task's worked solutions".to_string(), |n| format!("{n} examples"));
        let _ = writeln!(
            text,
            "supervised: {} steps of {} sequences of {examples}, {} to validate on; left out: {} too long, \
             {} to learn that are validated on",
            sft.steps, sft.batch_size, sft.validation, sft.too_long, sft.overlaps
        );
    }
    if let Some(rl) = &report.reinforcement {
        let _ = writeln!(
            text,
            "reinforcement learning: {} steps of {} prompts, {} responses (at most {} tokens) and {} updates",
            rl.steps, rl.prompts, rl.responses, rl.max_tokens, rl.updates
        );
    }
    let _ = match report.memory.is_empty() {
        true => writeln!(text, "memory: a GPU does not have a format that this recipe asks for"),
        false => writeln!(text, "memory on {}: {} MiB", report.memory_on, report.memory_mib),
    };
    for Part { part, mib } in &report.memory {
        let _ = writeln!(text, "  {part}: {mib} MiB");
    }
    let _ = writeln!(text, "time of a step: {}", report.time_of_a_step);
    for warning in &report.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}
