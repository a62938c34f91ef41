//! `qurl sft`: supervised training, from a recipe or from the embedded default.

use super::reward_guard;
use super::train::run_dir::{Kind, RECIPE, RunDir};
use super::train::{
    agree, ended, finished_before, note_left_out, note_ranks, overlaps, write_file, write_json,
};
use crate::device::RecipeDevice;
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::ranks::{RanksArg, on_ranks, start_local};
use crate::report::{RunData, render};
use crate::stop::Stop;
use crate::view::{Mode, TrainView};
use qurl_kernels::collective::Collective;
use qurl_kernels::{Device, Queue};
use qurl_model::compute::NetworkOptions;
use qurl_rollout::{Engine, EngineOptions, Sampling, WeightVersion};
use qurl_tasks::task::{Split, Task};
use qurl_train::checkpoint::ModelFiles;
use qurl_train::memory::MemoryPlan;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Recipe, Sft};
use qurl_train::run::{Memory, RunParts, SUMMARY};
use qurl_train::runlog::StepLog;
use qurl_train::sft::{Examples, SftBest, SftRun, SftSummary, SftTrainer};
use qurl_train::solve::{SolveOptions, accuracy, draw_problems, held_out, solve};
use qurl_train::start::Start;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The embedded recipe.
pub const DEFAULT: &str = include_str!("../../../../recipes/sft.toml");

/// Options of `qurl sft`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl sft recipes/sft.toml --steps 100 --run runs/sft")]
pub struct Args {
    /// Recipe file; without one the embedded default trains a small model from nothing
    recipe: Option<PathBuf>,
    /// Overrides a key of the recipe, as in --set trainer.seed=7
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Steps, instead of the recipe's sft.steps
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=i64::MAX as u64))]
    steps: Option<u64>,
    /// Directory of the run, which receives the model as DIR/model (default: the next free runs/sft-N)
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
    let (recipe, sft) = recipe_of(&args)?.for_sft().or_bad()?;
    let recipe = args.device.put_into(recipe);
    if let Some(ranks) = args.ranks.to_start()? {
        Ranks::new(Arc::new(Collective::counted(0, ranks)), &recipe).or_bad()?;
        return start_local(ranks, recipe.trainer.device);
    }
    on_ranks!(recipe.trainer.device, (device, ranks) => run_on(device, ranks, args, recipe, sft, began))
}

/// The recipe that was named, that of the run that is resumed, or the embedded default.
fn recipe_of(args: &Args) -> anyhow::Result<Recipe> {
    let mut overrides = args.overrides.clone();
    overrides.extend(args.steps.map(|steps| format!("sft.steps={steps}")));
    let recipe = match (&args.recipe, args.run.as_ref().filter(|_| args.resume)) {
        (Some(path), _) => Recipe::read(path, &overrides),
        (None, Some(run)) if run.join(RECIPE).exists() => Recipe::read(&run.join(RECIPE), &overrides),
        (None, Some(run)) => {
            let what = "there is nothing to resume; name the recipe to begin a run there";
            return Err(bad(format!("--resume: {} does not exist: {what}", run.join(RECIPE).display())));
        }
        (None, None) => Recipe::parse(DEFAULT, "embedded default", &overrides),
    };
    recipe.or_bad()
}

fn run_on<D: Device>(
    device: Arc<D>,
    ranks: Arc<Collective>,
    args: Args,
    recipe: Recipe,
    sft: Sft,
    began: Instant,
) -> anyhow::Result<()> {
    let ranks = Ranks::new(ranks, &recipe).or_bad()?;
    let stop = Stop::watch()?;
    let launch = reward_guard::launch(stop.at_once())?;
    let task = recipe.task.as_ref().map(|task| task.launch(&launch)).transpose().or_bad()?;
    let task = task.as_deref();
    let start = Start::of_sft(&recipe, task).or_bad()?;
    agree(&ranks, &recipe, &start, task)?;
    let mut view = TrainView::new(Mode::of_rank(&ranks, args.quiet, args.json));
    start.warning.iter().for_each(|warning| view.warn(&format!("warning: {warning}")));
    task.and_then(overlaps).iter().for_each(|note| view.warn(note));
    let problems = task.and_then(|task| task.len(Split::Train));
    let examples = Examples::open(&sft, recipe.trainer.seed, &start, task).or_bad()?;
    let doubts = recipe.doubts(problems).into_iter();
    let of_examples = examples.count().and_then(|count| recipe.doubt_of_examples(count));
    doubts.chain(of_examples).for_each(|doubt| view.warn(&format!("warning: {doubt}")));
    note_left_out(&examples, &sft, &view);
    let memory = MemoryPlan::of_sft(&*device, &recipe, &sft, &start.config, &ranks)?;
    if device.memory().is_some() {
        view.note(&format!("memory: {memory}"));
    }
    memory.check_sft(&*device, &recipe, &sft, &start.config, &ranks).or_bad()?;
    let dir = RunDir::open_on(&ranks, Kind::Sft, args.run.as_deref(), args.resume, &recipe, &view)?;
    if let Some(summary) = &dir.finished {
        return if ranks.is_first() { finished_before(summary, &dir, args.json) } else { Ok(()) };
    }
    let (parameters, name) = (start.config.param_count(), device.info().description);
    view.note(&format!("{parameters} parameters, {name}, run in {}", dir.path.display()));
    note_ranks(&ranks, &view);
    let log =
        if ranks.is_first() { StepLog::of_run(&dir.path, dir.from.as_ref())? } else { StepLog::silent() };
    log.warning(dir.step()).iter().for_each(|warning| view.warn(warning));
    let files = ModelFiles::of(&start);
    let trained = files.trained();
    if trained < parameters {
        view.note(&format!("{trained} parameters of adapters are trained"));
    }
    let checkpoint = if recipe.trainer.save_freq > 0 { sft.checkpoint_bytes(trained) } else { 0 };
    dir.store.check_space(checkpoint, &files)?;

    let trainer = SftTrainer::new(&device, &recipe, &sft, &start, &examples, &ranks)?;
    let parts = RunParts { path: dir.path.clone(), store: dir.store.clone(), from: dir.from.clone(), log };
    let mut run = SftRun::begin(trainer, &recipe, &start, parts)
        .map_err(|error| ended(error, &stop, &dir.how_to_resume()))?;
    if ranks.is_first() {
        write_json(&dir.path.join(SUMMARY), &run.begun())?;
    }
    if let Some(loss) = run.before() {
        view.note(&format!("validation loss before: {loss:.4} on {} examples", examples.validation().len()));
    }
    view.begin("SFT", run.trainer().steps_done(), sft.steps);
    let outcome = run.steps(
        || stop.requested(),
        |record, warnings| {
            view.supervised(record);
            warnings.iter().for_each(|warning| view.warn(warning));
            if record.skipped_updates > 0 {
                view.warn(&format!("step {}: the update was not finite and was skipped", record.step));
            }
        },
    );
    view.finish();
    outcome.map_err(|error| ended(error, &stop, &dir.how_to_resume()))?;

    run.save_model()?;
    let solved = match task {
        Some(task) => greedy_accuracy(run.trainer_mut(), &recipe, &sft, &start, task)?,
        None => None,
    };
    if !ranks.is_first() {
        return Ok(());
    }
    let summary = run.summary(solved, began.elapsed().as_secs_f64())?;
    if let Some(Memory { planned, peak }) = summary.memory {
        view.note(&format!("memory: {} MiB planned, {} MiB allocated at most", planned >> 20, peak >> 20));
    }
    write_json(&dir.path.join(SUMMARY), &summary)?;
    write_file(Path::new(&summary.report), &render(&[RunData::read(Path::new(&summary.run))?]))?;
    match args.json {
        true => Ok(out!("{}", serde_json::to_string(&summary)?)?),
        false => print(&summary, task.map_or(0, |task| held_out(task, sft.test_problems))),
    }
}

/// Greedy accuracy of the trained model on held-out problems of the task; none where there are none.
fn greedy_accuracy<D: Device>(
    trainer: &mut SftTrainer<D>,
    recipe: &Recipe,
    sft: &Sft,
    start: &Start,
    task: &dyn Task,
) -> anyhow::Result<Option<f64>> {
    let (count, seed) = (held_out(task, sft.test_problems), recipe.trainer.seed);
    if count == 0 || task.draw(Split::Test, seed, 0).is_none() {
        return Ok(None);
    }
    let ranks = trainer.ranks().clone();
    let (queue, learner) = trainer.parts();
    let network = match recipe.lora {
        Some(_) => {
            let options = NetworkOptions { trained: false, ..*learner.network().options() };
            learner.sharing(queue, options)?
        }
        None => {
            let options = NetworkOptions::inference(&start.config, recipe.trainer.compute);
            learner.packed(queue, options)?
        }
    };
    let mut engine =
        Engine::new(queue.device().clone(), network, WeightVersion::default(), EngineOptions::default())?;
    let problems = draw_problems(task, Split::Test, seed, 0, count)?;
    let max_new = sft.max_length.min(start.config.max_position_embeddings);
    let max_prompt = usize::MAX; // the engine has its own limit
    let options = SolveOptions {
        max_prompt,
        n: 1,
        sampling: Sampling::greedy(),
        max_new,
        seed,
        step: 0,
        lengths: None,
    };
    Ok(Some(accuracy(&solve(queue, &mut engine, start, task, problems, options, &ranks)?.0)))
}

/// The summary in words.
fn print(summary: &SftSummary, test_problems: u64) -> anyhow::Result<()> {
    let SftSummary { first_loss, last_loss, steps, seconds, tokens_per_s, .. } = summary;
    out!(
        "loss {first_loss:.4} -> {last_loss:.4} in {steps} steps, {seconds:.0} s, {tokens_per_s:.0} tokens/s"
    )?;
    if let Some((before, after)) = summary.begun.validation_loss_before.zip(summary.validation_loss_after) {
        out!("validation loss {before:.4} -> {after:.4}")?;
    }
    if let Some(SftBest { validation_loss, step, model }) =
        summary.best.as_ref().filter(|best| best.step != *steps)
    {
        let place = model.as_ref().map_or(String::new(), |model| format!(": {model}"));
        out!("best {validation_loss:.4} after step {step}{place}")?;
    }
    if let Some(accuracy) = summary.accuracy {
        out!("greedy accuracy on {test_problems} held-out problems: {:.1}%", 100.0 * accuracy)?;
    }
    out!("model saved to {}", summary.model)?;
    out!("report {}; recipe, logs and checkpoints in {}", summary.report, summary.run)?;
    Ok(())
}
