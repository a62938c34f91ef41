//! `qurl train`: reinforcement learning, from a recipe or from the embedded default.

mod end;
pub mod run_dir;

pub use end::finished_before;

use super::reward_guard;
use crate::device::RecipeDevice;
use crate::input::{OrBad, bad};
use crate::ranks::{RanksArg, on_ranks, start_local};
use crate::stop::Stop;
use crate::target;
use crate::view::{Mode, TrainView};
use crate::workers::Workers;
use anyhow::Context;
use qurl_kernels::Device;
use qurl_kernels::collective::Collective;
use qurl_model::{ModelConfig, Params};
use qurl_tasks::task::{Dropped, Split, Task};
use qurl_train::checkpoint::ModelFiles;
use qurl_train::memory::MemoryPlan;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Recipe, RlPlan, Sft};
use qurl_train::rl::{RlTrainer, prepare};
use qurl_train::run::{Event, Outcome, Run, RunError, RunParts, SUMMARY};
use qurl_train::runlog::{RunLog, StepLog};
use qurl_train::sft::{self, Examples, LeftOut, SftRecord};
use qurl_train::start::Start;
use run_dir::{Kind, RECIPE, RunDir};
use serde::Serialize;
use std::ops::ControlFlow;
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
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=i64::MAX as u64))]
    steps: Option<u64>,
    /// Directory of the run (default: the next free runs/train-N)
    #[arg(long)]
    run: Option<PathBuf>,
    /// Resume the run in --run from its newest whole checkpoint; without a recipe, with its own
    #[arg(long, requires = "run")]
    resume: bool,
    #[command(flatten)]
    ranks: RanksArg,
    #[command(flatten)]
    device: RecipeDevice,
    /// Show warnings and the result only
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let began = Instant::now();
    let (mut recipe, file) = recipe_of(&args)?;
    match args.run.as_ref().filter(|_| args.resume).map(|run| run.join(RECIPE)).filter(|path| path.exists()) {
        // One that cannot be read is told where it is compared.
        Some(begun) => _ = Recipe::read(&begun, &[]).map(|begun| recipe.continue_as(&begun)),
        None => recipe.begin_in(&std::env::current_dir().context("the current directory")?),
    }
    let recipe = args.device.put_into(recipe);
    let plan = recipe.rl(&file).or_bad()?;
    recipe.task().or_bad()?;
    if let Some(count) = args.ranks.to_start()? {
        let ranks = Ranks::new(Arc::new(Collective::counted(0, count)), &recipe).or_bad()?;
        if plan.rollout.workers.is_some() {
            crate::workers::prepare(&ranks)?;
        }
        return start_local(count, recipe.trainer.device);
    }
    on_ranks!(recipe.trainer.device, (device, ranks) => {
        run_on(device, ranks, args, recipe, file, plan, began)
    })
}

fn run_on<D: Device>(
    device: Arc<D>,
    ranks: Arc<Collective>,
    args: Args,
    recipe: Recipe,
    file: String,
    plan: RlPlan,
    began: Instant,
) -> anyhow::Result<()> {
    let ranks = Ranks::new(ranks, &recipe).or_bad()?;
    if plan.rollout.workers.is_some() {
        crate::workers::prepare(&ranks)?;
    }
    let stop = Stop::watch()?;
    let mut task = recipe.task().or_bad()?.launch(&reward_guard::launch(stop.at_once())?).or_bad()?;
    let mut start = Start::from_recipe(&recipe, &*task).or_bad()?;
    agree(&ranks, &recipe, &start, Some(&*task))?;
    let mut view = TrainView::new(Mode::of_rank(&ranks, args.quiet, args.json));
    overlaps(&*task).iter().for_each(|note| view.warn(note));
    // What is wrong is told alone, without the doubts that come of it.
    let dropped = prepare(&*device, &recipe, &file, &start, &mut *task).or_bad()?;
    recipe.doubts(task.len(Split::Train)).iter().for_each(|doubt| view.warn(&format!("warning: {doubt}")));
    note_dropped(dropped, &plan, &view);
    foresee_memory(&*device, &recipe, &plan, &start.config, &ranks, &view)?;
    let dir = RunDir::open_on(&ranks, Kind::Train, args.run.as_deref(), args.resume, &recipe, &view)?;
    if let Some(summary) = &dir.finished {
        return if ranks.is_first() { finished_before(summary, &dir, args.json) } else { Ok(()) };
    }
    let (parameters, name) = (start.config.param_count(), device.info().description);
    view.note(&format!("{parameters} parameters, {name}, run in {}", dir.path.display()));
    start.warning.iter().for_each(|warning| view.warn(&format!("warning: {warning}")));
    note_ranks(&ranks, &view);
    let log = if ranks.is_first() { RunLog::open(&dir.path, dir.from.as_ref())? } else { RunLog::silent() };
    log.warning(dir.step()).iter().for_each(|warning| view.warn(warning));
    let files = ModelFiles::of(&start);
    let trained = files.trained();
    if trained < parameters {
        view.note(&format!("{trained} parameters of adapters are trained"));
    }
    let checkpoint = if recipe.trainer.save_freq > 0 { plan.checkpoint_bytes(trained) } else { 0 };
    dir.store.check_space(checkpoint, &files)?;

    if let (Some(settings), None) = (&recipe.sft, &dir.from) {
        start.weights =
            warm_start(&device, &recipe, settings, &start, &*task, &ranks, &stop, &dir, &mut view)?;
    }
    let mut trainer = RlTrainer::on_ranks(&device, &recipe, &file, start, task, ranks.clone()).or_bad()?;
    let workers = match &plan.rollout.workers {
        Some(settings) => Some(Workers::listen(&mut trainer, settings, &stop, &view)?),
        None => None,
    };
    let parts = RunParts { path: dir.path.clone(), store: dir.store.clone(), from: dir.from.clone(), log };
    let mut run =
        Run::begin(trainer, &recipe, parts).map_err(|error| ended(error, &stop, &dir.how_to_resume()))?;
    let (before, begun) = (run.before(), run.begun());
    if ranks.is_first() {
        write_json(&dir.path.join(SUMMARY), &begun)?;
    }
    view.evaluated(before.accuracy);
    let avg =
        before.avg_at_k.map_or(String::new(), |avg| format!(", Avg@{} {:.1}%", plan.run.test_k, 100.0 * avg));
    let (percent, held_out) = (100.0 * before.accuracy, run.trainer().held_out());
    view.note(&format!("accuracy before: {percent:.1}% of {held_out} held-out problems{avg}"));

    view.begin("RL", run.trainer().steps_done(), plan.run.total_steps);
    let outcome = run.steps(
        || stop.requested(),
        |event| match event {
            Event::Step(record) => {
                workers.iter().flat_map(Workers::notes).for_each(|note| view.warn(&note));
                view.step(record);
            }
            Event::Warning(text) => view.warn(&text),
        },
    );
    workers.iter().flat_map(Workers::notes).for_each(|note| view.warn(&note));
    view.finish();
    let outcome = outcome.map_err(|error| ended(error, &stop, &dir.how_to_resume()))?;
    workers.iter().for_each(Workers::over);
    drop(workers);
    match outcome {
        Outcome::Done => end::done(run, &plan, began, &dir.path, args.json, &view),
        Outcome::Broken { step, symptom } => end::broken(run, step, &symptom, &dir.path, &view),
    }
}

/// The error that ends the command: stopped runs end with the status of their signal, and all that can be
/// resumed say how.
pub fn ended(error: RunError, stop: &Stop, how: &str) -> anyhow::Error {
    let how = format!("resume with: {how}");
    match error {
        RunError::Stopped { .. } | RunError::Cancelled => stop.error(format!("{error}; {how}")),
        RunError::Checkpoint(source) => anyhow::Error::new(source)
            .context(format!("writing a checkpoint (earlier ones are whole; {how})")),
        error if error.is_of_another_run() => bad(error),
        error => error.into(),
    }
}

/// The recipe that was named, that of the run that continues, or the embedded default; and what to call it.
fn recipe_of(args: &Args) -> anyhow::Result<(Recipe, String)> {
    let mut overrides = args.overrides.clone();
    overrides.extend(args.steps.map(|steps| format!("run.total_steps={steps}")));
    let of_the_run =
        args.run.as_ref().filter(|_| args.resume && args.recipe.is_none()).map(|run| run.join(RECIPE));
    if let Some(path) = of_the_run.as_ref().filter(|path| !path.exists()) {
        let what = "nothing to resume; name the recipe to begin a run there";
        return Err(bad(format!("--resume: {} does not exist: {what}", path.display())));
    }
    if let Some(path) = of_the_run {
        // Its paths are absolute; those that an older program wrote are relative to the working directory.
        let (file, text) = (
            path.display().to_string(),
            qurl_files::read_text(&path, qurl_files::MIB).context(RECIPE).or_bad()?,
        );
        return Ok((Recipe::parse(&text, &file, &overrides).or_bad()?, file));
    }
    recipe_or_default(args.recipe.as_deref(), &overrides)
}

/// A recipe file, or without one the embedded default; and what to call it.
pub fn recipe_or_default(path: Option<&Path>, overrides: &[String]) -> anyhow::Result<(Recipe, String)> {
    let (recipe, file) = match path {
        Some(path) => (Recipe::read(path, overrides), path.display().to_string()),
        None => (Recipe::parse(DEFAULT, "embedded default", overrides), "embedded default".to_string()),
    };
    Ok((recipe.or_bad()?, file))
}

/// Refuses ranks that would not train the same thing: recipes, weights and problems are compared.
pub fn agree(ranks: &Ranks, recipe: &Recipe, start: &Start, task: Option<&dyn Task>) -> anyhow::Result<()> {
    if ranks.size() == 1 {
        return Ok(());
    }
    let hash = |number: u64| format!("{number:016x}");
    let of_recipe = recipe.values().into_iter().map(|(key, value)| (format!("key `{key}`"), value));
    let mut facts: Vec<(String, String)> = of_recipe.collect();
    facts.push(("the hash of the weights".to_string(), hash(start.checksum())));
    facts.extend(task.map(|task| ("the hash of the problems".to_string(), hash(task.fingerprint()))));
    let facts: Vec<(&str, String)> =
        facts.iter().map(|(name, value)| (name.as_str(), value.replace('\n', " "))).collect();
    ranks.collective().agree(&facts).or_bad()
}

/// Says how many ranks train, if there are several.
pub fn note_ranks(ranks: &Ranks, view: &TrainView) {
    if ranks.size() > 1 {
        let (size, each) = (ranks.size(), ranks.shards_each());
        view.note(&format!("{size} ranks with {each} shards each: {}", ranks.collective().description()));
    }
}

/// That problems to train on are left out because they are test problems, if any are.
pub fn overlaps(task: &dyn Task) -> Option<String> {
    let count = task.overlaps();
    (count > 0).then(|| {
        format!("{count} problems to train on are left out: they are among those of task.test_files")
    })
}

/// Says that problems were left out, if any were.
pub fn note_dropped(dropped: Dropped, plan: &RlPlan, view: &TrainView) {
    if dropped != Dropped::default() {
        let (Dropped { train, test }, most) = (dropped, plan.data.max_prompt_length);
        let what = format!("{train} problems to train on and {test} held-out ones are left out");
        view.warn(&format!("{what}: their prompts have more than data.max_prompt_length = {most} tokens"));
    }
}

/// Says that examples were left out, if any were.
pub fn note_left_out(examples: &Examples, sft: &Sft, view: &TrainView) {
    let LeftOut { too_long, too_long_to_validate, overlaps } = examples.left_out();
    if too_long + too_long_to_validate > 0 {
        let what =
            format!("{too_long} examples to learn and {too_long_to_validate} to validate on are left out");
        view.warn(&format!("{what}: they have more than sft.max_length = {} tokens", sft.max_length));
    }
    if overlaps > 0 {
        view.warn(&format!(
            "{overlaps} examples to learn are left out: they are among those of sft.validation_files"
        ));
    }
}

/// On a device with its own memory, says what a run will need there; an error if it is too much.
pub fn foresee_memory<D: Device>(
    device: &D,
    recipe: &Recipe,
    plan: &RlPlan,
    config: &ModelConfig,
    ranks: &Ranks,
    view: &TrainView,
) -> anyhow::Result<()> {
    let memory = MemoryPlan::of_rl(device, recipe, plan, config, ranks);
    if device.memory().is_none() {
        // A CPU has formats that the GPU which counts does not have: what cannot be counted is not foreseen.
        if let (Err(error), Some(_)) = (&memory, recipe.memory_budget()) {
            view.warn(&format!("warning: trainer.memory_budget_mb bounds nothing here: {error}"));
        }
        return memory.map_or(Ok(()), |memory| memory.check_rl(device, recipe, plan, config, ranks).or_bad());
    }
    let (memory, each) = (memory?, if ranks.size() > 1 { " of each rank" } else { "" });
    view.note(&format!("memory{each}: {memory}"));
    memory.check_rl(device, recipe, plan, config, ranks).or_bad()
}

/// Supervised training first; the weights it ends with.
fn warm_start<D: Device>(
    device: &Arc<D>,
    recipe: &Recipe,
    settings: &Sft,
    start: &Start,
    task: &dyn Task,
    ranks: &Ranks,
    stop: &Stop,
    dir: &RunDir,
    view: &mut TrainView,
) -> anyhow::Result<Params<Vec<f32>>> {
    let examples = Examples::open(settings, recipe.trainer.seed, start, Some(task)).or_bad()?;
    note_left_out(&examples, settings, view);
    let mut log = if ranks.is_first() { StepLog::of_warm_start(&dir.path)? } else { StepLog::silent() };
    view.begin("warm start", 0, settings.steps);
    let on_step = |record: &mut SftRecord| -> anyhow::Result<ControlFlow<()>> {
        record.add_phase("log", log.take_seconds());
        let vanished = log.record(record.step, record)?;
        view.supervised(record);
        vanished.iter().for_each(|warning| view.warn(warning));
        Ok(if stop.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let (weights, flow) = sft::warm_start(device, recipe, settings, start, &examples, ranks, on_step)?;
    if flow.is_break() {
        let message = format!("stopped in the warm start, which begins anew with: {}", dir.how_to_resume());
        return Err(stop.error(message));
    }
    Ok(weights)
}

/// A file with one JSON document.
pub fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    let text = format!("{}\n", serde_json::to_string(value)?);
    write_file(path, &text)
}

/// A file of a run, all or nothing. A FIFO or a device of that name is replaced: it would be waited for.
pub fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    if path.metadata().is_ok_and(|there| !there.is_file()) {
        std::fs::remove_file(path).with_context(|| format!("{}: cannot be replaced", path.display()))?;
    }
    target::write(path, text)
}
