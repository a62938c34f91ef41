//! `qurl recipe check`: everything that a run finds out before its first step, without the run.

use crate::device;
use crate::input::OrBad;
use crate::output::{self, out};
use anyhow::Context;
use qurl_kernels::Backend;
use qurl_tasks::reward::RewardRule;
use qurl_tasks::task::{Dropped, Split};
use qurl_train::memory::MemoryPlan;
use qurl_train::recipe::{Recipe, RlPlan, TaskSource};
use qurl_train::rl::prepare;
use qurl_train::sft::Examples;
use qurl_train::start::Start;
use serde::Serialize;
use std::env;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Why there is no figure for the time of a step.
const NO_TIME: &str =
    "not estimated: it depends on how long the responses get; `qurl train FILE --steps 2` measures it";

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
    problems: Problems,
    #[serde(skip_serializing_if = "Option::is_none")]
    supervised: Option<Supervised>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reinforcement: Option<Reinforcement>,
    memory: Vec<Part>,
    memory_mib: usize,
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
    too_long: usize,
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

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let recipe = args.device.put_into(Recipe::read(&args.recipe, &args.overrides).or_bad()?);
    let report = match device::look(recipe.trainer.device)? {
        device::Opened::Cpu(backend) => look(&backend, &recipe)?,
        device::Opened::Cuda(backend) => look(&backend, &recipe)?,
    };
    match args.json {
        true => Ok(out!("{}", serde_json::to_string(&report)?)?),
        false => Ok(output::text(&text(&report))?),
    }
}

fn look<B: Backend>(backend: &B, recipe: &Recipe) -> anyhow::Result<Report> {
    let file = recipe.file();
    let mut task = recipe.task.problems().or_bad()?;
    let start = Start::from_recipe(recipe, &*task).or_bad()?;
    let mut warnings: Vec<String> = start.warning.iter().cloned().collect();
    warnings.extend(recipe.doubts(task.len(Split::Train)));
    warnings.extend(missing_programs(recipe));
    let (mut dropped, mut memory, mut reinforcement) = (Dropped::default(), MemoryPlan::default(), None);
    let supervised = match &recipe.sft {
        Some(sft) => {
            memory = MemoryPlan::of_sft(recipe, sft, &start.config);
            let examples = Examples::open(sft, recipe.trainer.seed, &start, &*task).or_bad()?;
            let (count, too_long) = match &examples {
                Examples::Files { examples, too_long, .. } => {
                    warnings.extend(recipe.doubt_of_examples(examples.len()));
                    (Some(examples.len()), *too_long)
                }
                Examples::Task { .. } => (None, 0),
            };
            Some(Supervised { steps: sft.steps, batch_size: sft.batch_size, examples: count, too_long })
        }
        None => None,
    };
    if recipe.sft.is_none() || recipe.run.is_some() {
        let plan = recipe.rl(file).or_bad()?;
        dropped = prepare(backend, recipe, file, &start, &mut *task).or_bad()?;
        memory = MemoryPlan::of_rl(recipe, &plan, &start.config);
        reinforcement = Some(step_of(&plan));
    }
    memory.check(backend).or_bad().context("this recipe does not fit")?;
    let problems = Problems {
        train: task.len(Split::Train),
        test: task.len(Split::Test),
        overlaps: task.overlaps(),
        too_long_train: dropped.train,
        too_long_test: dropped.test,
    };
    let config = &start.config;
    let from = recipe.model.path.as_ref().map_or("new".to_string(), |path| path.display().to_string());
    Ok(Report {
        recipe: file.to_string(),
        device: backend.describe(),
        model: Model {
            from,
            parameters: config.param_count(),
            context: config.max_position_embeddings,
            vocabulary: config.vocab_size,
        },
        problems,
        supervised,
        reinforcement,
        memory: memory
            .parts()
            .iter()
            .map(|(part, bytes)| Part { part: part.clone(), mib: bytes >> 20 })
            .collect(),
        memory_mib: memory.total() >> 20,
        time_of_a_step: NO_TIME,
        warnings,
    })
}

/// That a reward command, which is not started here, could not be.
fn missing_programs(recipe: &Recipe) -> Vec<String> {
    let mut missing = Vec::new();
    for (i, rule) in recipe.task.rewards().iter().enumerate() {
        let RewardRule::Command { command, .. } = rule else { continue };
        let Some(program) = command.first() else { continue };
        let path = env::var_os("PATH").unwrap_or_default();
        let there = match program.contains('/') {
            true => Path::new(program).exists(),
            false => env::split_paths(&path).any(|dir| dir.join(program).exists()),
        };
        let key = match &recipe.task {
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
    match (problems.train, problems.test) {
        (Some(train), Some(test)) => _ = writeln!(text, "problems: {train} to train on, {test} held out"),
        _ => text.push_str("problems: generated without end\n"),
    }
    let _ = writeln!(
        text,
        "left out: {} that are among the test problems; too long are {} to train on and {} held out",
        problems.overlaps, problems.too_long_train, problems.too_long_test
    );
    if let Some(sft) = &report.supervised {
        let examples =
            sft.examples.map_or("the task's worked solutions".to_string(), |n| format!("{n} examples"));
        let _ = writeln!(
            text,
            "supervised: {} steps of {} sequences of {examples} ({} too long)",
            sft.steps, sft.batch_size, sft.too_long
        );
    }
    if let Some(rl) = &report.reinforcement {
        let _ = writeln!(
            text,
            "reinforcement learning: {} steps of {} prompts, {} responses (at most {} tokens) and {} updates",
            rl.steps, rl.prompts, rl.responses, rl.max_tokens, rl.updates
        );
    }
    let _ = writeln!(text, "memory: {} MiB", report.memory_mib);
    for Part { part, mib } in &report.memory {
        let _ = writeln!(text, "  {part}: {mib} MiB");
    }
    let _ = writeln!(text, "time of a step: {}", report.time_of_a_step);
    for warning in &report.warnings {
        let _ = writeln!(text, "warning: {warning}");
    }
    text
}
