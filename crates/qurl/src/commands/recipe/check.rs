//! `qurl recipe check`: everything that a run finds out before its first step, without the run.

use super::time::{self, StepTime};
use crate::commands::bench::machine::Machine;
use crate::device::{self, on_device};
use crate::input::OrBad;
use crate::output::{self, out};
use anyhow::Context;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::{Cuda, Device};
use qurl_model::ModelConfig;
use qurl_tasks::reward::RewardRule;
use qurl_tasks::task::{Dropped, Split, Task};
use qurl_train::memory::MemoryPlan;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Recipe, RlPlan, Sft, TaskSource};
use qurl_train::rl::{TrainError, prepare};
use qurl_train::sft::{Examples, LeftOut};
use qurl_train::solve::draw_problems;
use qurl_train::start::Start;
use serde::Serialize;
use std::env;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Problems whose prompts are counted for the mean of their tokens.
const MEAN_OF_PROMPTS: u64 = 64;

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
    /// Plan the memory for a GPU of this kind in place of the device: h200, h100, a100-80, a100-40, l40s, l4,
    /// a10, rtx3090, rtx4090 or rtx5090
    #[arg(long, value_name = "KIND", value_parser = device::gpu)]
    gpu: Option<GpuProfile>,
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
    memory_on: String,
    /// Page-locked memory of the host.
    memory_on_host_mib: usize,
    /// Estimates, for sequences at half and at the whole of their limit.
    time_of_a_step: Vec<StepTime>,
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_time: Option<String>,
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
    let report = on_device!(recipe.trainer.device, device => look(&device, args.gpu.as_ref(), &recipe)?);
    match args.json {
        true => Ok(out!("{}", serde_json::to_string(&report)?)?),
        false => Ok(output::text(&text(&report))?),
    }
}

fn look<D: Machine>(on: &Arc<D>, gpu: Option<&GpuProfile>, recipe: &Recipe) -> anyhow::Result<Report> {
    let device = &**on;
    let planned_on = gpu.map(Cuda::counting_as);
    let file = recipe.file();
    let mut task = recipe.task.as_ref().map(TaskSource::problems).transpose().or_bad()?;
    let start = Start::of_sft(recipe, task.as_deref()).or_bad()?;
    let mut warnings: Vec<String> = start.warning.iter().cloned().collect();
    warnings.extend(recipe.doubts(task.as_ref().and_then(|task| task.len(Split::Train))));
    warnings.extend(missing_programs(recipe));
    let (mut dropped, mut memory, mut reinforcement) = (Dropped::default(), None, None);
    let mut rl_plan = None;
    let supervised = match &recipe.sft {
        Some(sft) => {
            let config = &start.config;
            memory = match &planned_on {
                Some(gpu) => memory_of_sft(gpu, recipe, sft, config)?,
                None => memory_of_sft(device, recipe, sft, config)?,
            };
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
        memory = match &planned_on {
            Some(gpu) => memory_of_rl(gpu, recipe, &plan, &start.config)?,
            None => memory_of_rl(device, recipe, &plan, &start.config)?,
        };
        reinforcement = Some(step_of(&plan));
        rl_plan = Some(plan);
    }
    let estimated = estimate(on, recipe, rl_plan.as_ref(), &start, task.as_deref());
    let (time_of_a_step, no_time) = match estimated {
        Ok(times) => (times, None),
        Err(error) => (Vec::new(), Some(format!("{error:#}"))),
    };
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
        time_of_a_step,
        no_time,
        reinforcement,
        memory_on: match (gpu, device.memory()) {
            (Some(gpu), _) => gpu.name.clone(),
            (None, Some(_)) => "this device".to_string(),
            (None, None) => "a GPU such as NVIDIA H200".to_string(),
        },
        memory: memory.iter().flat_map(MemoryPlan::parts).map(Part::of).collect(),
        memory_mib: memory.as_ref().map_or(0, |memory| memory.total() >> 20),
        memory_on_host_mib: memory.map_or(0, |memory| memory.on_host() >> 20),
        warnings,
    })
}

/// The time of a step of supervised training and of reinforcement learning, as far as the recipe has them.
fn estimate<D: Machine>(
    on: &Arc<D>,
    recipe: &Recipe,
    plan: Option<&RlPlan>,
    start: &Start,
    task: Option<&dyn Task>,
) -> anyhow::Result<Vec<StepTime>> {
    let mut queue = on.queue()?;
    let mut times = Vec::new();
    if let Some(sft) = &recipe.sft {
        times.extend(time::of_sft::<D>(&mut queue, recipe, sft, &start.config)?);
    }
    if let (Some(plan), Some(task)) = (plan, task) {
        let prompt = mean_prompt(recipe, start, task)?;
        times.extend(time::of_rl::<D>(&mut queue, recipe, plan, &start.config, prompt)?);
    }
    Ok(times)
}

/// Tokens of a prompt in the mean of some problems to train on, at least 1.
fn mean_prompt(recipe: &Recipe, start: &Start, task: &dyn Task) -> anyhow::Result<usize> {
    let count = task.len(Split::Train).unwrap_or(MEAN_OF_PROMPTS).min(MEAN_OF_PROMPTS);
    let problems = draw_problems(task, Split::Train, recipe.trainer.seed, 0, count).or_bad()?;
    let lengths = problems.iter().map(|problem| Ok(start.encode(&problem.prompt).or_bad()?.len()));
    let tokens: usize = lengths.sum::<anyhow::Result<usize>>()?;
    Ok((tokens / problems.len().max(1)).max(1))
}

/// What supervised training takes of a device; an error where that does not hold it and nothing follows.
fn memory_of_sft<P: Device>(
    on: &P,
    recipe: &Recipe,
    sft: &Sft,
    config: &ModelConfig,
) -> anyhow::Result<Option<MemoryPlan>> {
    let ranks = Ranks::one(recipe);
    let planned = MemoryPlan::of_sft(on, recipe, sft, config, &ranks);
    let memory = foreseen(on, planned.map_err(TrainError::from))?;
    if let Some(memory) = memory.as_ref().filter(|_| recipe.run.is_none()) {
        let fits = memory.check_sft(on, recipe, sft, config, &ranks);
        fits.or_bad().context("this recipe does not fit")?;
    }
    Ok(memory)
}

/// What reinforcement learning takes of a device; an error where that does not hold it.
fn memory_of_rl<P: Device>(
    on: &P,
    recipe: &Recipe,
    plan: &RlPlan,
    config: &ModelConfig,
) -> anyhow::Result<Option<MemoryPlan>> {
    let ranks = Ranks::one(recipe);
    let memory = foreseen(on, MemoryPlan::of_rl(on, recipe, plan, config, &ranks))?;
    if let Some(memory) = &memory {
        let fits = memory.check_rl(on, recipe, plan, config, &ranks);
        fits.or_bad().context("this recipe does not fit")?;
    }
    Ok(memory)
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
        let RewardRule::Command { command, directory, .. } = rule else { continue };
        let Some(program) = command.first() else { continue };
        let path = env::var_os("PATH").unwrap_or_default();
        let there = match program.contains('/') {
            true => directory.as_deref().unwrap_or(Path::new("")).join(program).exists(),
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
    if report.memory_on_host_mib > 0 {
        let _ = writeln!(text, "  on the host, page-locked: {} MiB", report.memory_on_host_mib);
    }
    let command = if report.reinforcement.is_some() { "train" } else { "sft" };
    let _ = match &report.no_time {
        Some(reason) => writeln!(text, "time of a step: not estimated: {reason}"),
        None => writeln!(text, "time of a step: {}", time::ESTIMATED),
    };
    for time in &report.time_of_a_step {
        let _ = writeln!(text, "  {}", time.line());
    }
    let _ = writeln!(
        text,
        "  not counted: rewards, evaluations, checkpoints; `qurl {command} FILE --steps 2` measures all"
    );
    for warning in &report.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}
