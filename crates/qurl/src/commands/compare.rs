//! `qurl compare`: the paper's grid of methods on one recipe.
//!
//! For every seed the warm start is made once and all methods start from it with the same problems. Each
//! method and seed has a run directory of its own, as `qurl train` writes it, so that `qurl report` and
//! TensorBoard read them; the table goes to standard output and, with all figures, to `compare.json`. With
//! `--resume` finished runs are read and those that were cut resume from their checkpoints.

mod one_run;
mod plan;
mod table;

use super::reward_guard;
use super::train::{foresee_memory, note_dropped, overlaps, recipe_or_default, write_file};
use crate::device::{RecipeDevice, on_device};
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::report::{read_runs, render};
use crate::stop::Stop;
use crate::view::{Mode, TrainView};
use anyhow::Context;
use one_run::one_run;
use plan::{Plan, directory};
use qurl_kernels::Device;
use qurl_model::Params;
use qurl_tasks::task::Split;
use qurl_train::compare::{Method, RunFigures, Spread};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::Recipe;
use qurl_train::rl::prepare;
use qurl_train::runlog::RunLock;
use qurl_train::sft::{self, Examples, SftError, SftRecord};
use qurl_train::start::Start;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use table::{Document, rows, table};

/// Options of `qurl compare`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl compare --seeds 3 --methods full,naive,tis,acr,acr-uaq --set \
                  rollout.format=int4")]
pub struct Args {
    /// Recipe file; without one the embedded default
    recipe: Option<PathBuf>,
    /// Methods to run: full, naive, quantized-is, decoupled, tis, acr, acr-uaq, kpop, dppo, sequence-mis,
    /// off-policy-mask, m2po, rollout-forward, acr-uaq-2, acr-uaq-3, acr-lr-x1.5, acr-lr-x2, acr-stochastic
    #[arg(long, value_delimiter = ',', value_name = "METHOD")]
    methods: Vec<String>,
    /// Run an ablation instead of the grid
    #[arg(long, value_enum, conflicts_with = "methods")]
    ablate: Option<Ablation>,
    /// Number of seeds, from the recipe's on (default: 1)
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: Option<u64>,
    /// Overrides a key of the recipe, as in --set rollout.format=int4
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Steps, instead of the recipe's run.total_steps
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=i64::MAX as u64))]
    steps: Option<u64>,
    /// Directory of the comparison (default: the next free runs/compare-N)
    #[arg(long)]
    run: Option<PathBuf>,
    /// Resume the comparison in --run: finished runs stay as they are, those that were cut continue;
    /// --methods and --seeds can add to it
    #[arg(long, requires = "run")]
    resume: bool,
    /// Keep the model and the best checkpoints of every run, not only its figures
    #[arg(long)]
    keep_models: bool,
    #[command(flatten)]
    device: RecipeDevice,
    /// Show warnings and the result only
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

/// An ablation of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Ablation {
    /// Invariant scales 1, 1.5, 2, 3; learning rates times 1.5 and 2; stochastic rounding (Table 4)
    Uaq,
    /// KPop, DPPO, sequence MIS, the off-policy mask, M2PO, and the rollout's weights in training
    Corrections,
}

/// What all runs of a comparison have in common.
struct Comparison<'a> {
    dir: &'a Path,
    /// What the recipe is called.
    file: &'a str,
    keep_models: bool,
    stop: &'a Stop,
}

impl Comparison<'_> {
    fn how_to_resume(&self) -> String {
        format!("qurl compare --run {} --resume", self.dir.display())
    }
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let methods = methods(&args)?;
    let mut overrides = args.overrides.clone();
    overrides.extend(args.steps.map(|steps| format!("run.total_steps={steps}")));
    let begun = match &args.run {
        Some(dir) if args.resume => Some(Plan::read(dir)?),
        _ => None,
    };
    let (base, file) = match (&begun, &args.recipe) {
        (Some(plan), None) => {
            (Recipe::parse(&plan.recipe, &plan.file, &overrides).or_bad()?, plan.file.clone())
        }
        (_, path) => recipe_or_default(path.as_deref(), &overrides)?,
    };
    let mut base = args.device.put_into(base);
    match &begun {
        Some(plan) => base.continue_as(&Recipe::parse(&plan.recipe, &plan.file, &[]).or_bad()?),
        None => base.begin_in(&std::env::current_dir().context("the current directory")?),
    }
    let plan = match begun {
        Some(plan) => {
            plan.check(&base, args.run.as_deref().unwrap_or(Path::new(".")))?;
            let asked = if args.methods.is_empty() && args.ablate.is_none() { &[][..] } else { &methods };
            plan.extended(asked, args.seeds, args.keep_models)
        }
        None => Plan {
            file,
            recipe: base.to_toml(),
            methods: methods.iter().map(|method| method.name()).collect(),
            seeds: args.seeds.unwrap_or(1),
            keep_models: args.keep_models,
        },
    };
    for method in plan.methods()? {
        recipe_of(method, &base, base.trainer.seed)?;
    }
    on_device!(base.trainer.device, device => run_on(device, args, base, plan))
}

fn run_on<D: Device>(device: Arc<D>, args: Args, base: Recipe, whole: Plan) -> anyhow::Result<()> {
    let stop = Stop::watch()?;
    let (file, methods) = (whole.file.clone(), whole.methods()?);
    let plan = base.rl(&file).or_bad()?;
    let mut task = base.task().or_bad()?.launch(&reward_guard::launch(stop.at_once())?).or_bad()?;
    let start = Start::from_recipe(&base, &*task).or_bad()?;
    let dropped = prepare(&*device, &base, &file, &start, &mut *task).or_bad()?;
    let dir = directory(args.run.as_deref(), args.resume)?;
    let _lock = RunLock::take(&dir).map_err(|e| bad(format!("--run {e}")))?;
    whole.write(&dir)?;
    let mut view = TrainView::new(Mode::choose(args.quiet, args.json));
    let seeds: Vec<u64> = (0..whole.seeds).map(|i| base.trainer.seed + i).collect();
    let runs = methods.len() * seeds.len();
    view.note(&format!(
        "{runs} runs of {} steps, {}, in {}",
        plan.run.total_steps,
        device.info().description,
        dir.display()
    ));
    start.warning.iter().for_each(|warning| view.warn(&format!("warning: {warning}")));
    overlaps(&*task).iter().for_each(|note| view.warn(note));
    base.doubts(task.len(Split::Train)).iter().for_each(|doubt| view.warn(&format!("warning: {doubt}")));
    note_dropped(dropped, &plan, &view);
    foresee_memory(&*device, &base, &plan, &start.config, &Ranks::one(&base), &view)?;

    let comparison = Comparison { dir: &dir, file: &file, keep_models: whole.keep_models, stop: &stop };
    let mut figures: Vec<Vec<RunFigures>> = vec![Vec::new(); methods.len()];
    for &seed in &seeds {
        let mut warm: Option<Option<Params<Vec<f32>>>> = None;
        let mut weights = |view: &mut TrainView| {
            if warm.is_none() {
                warm = Some(warm_start(&device, &base, seed, &comparison, view)?);
            }
            Ok(warm.clone().flatten())
        };
        for (method, figures) in methods.iter().zip(&mut figures) {
            let path = dir.join(format!("seed-{seed}")).join(method.name());
            view.note(&format!("seed {seed}: {}", method.title()));
            let recipe = recipe_of(*method, &base, seed)?;
            figures.push(one_run(&device, &comparison, &recipe, &path, &mut weights, &mut view)?);
        }
    }

    let report = dir.join("report.html");
    write_file(&report, &render(&read_runs(std::slice::from_ref(&dir))?))?;
    let document = Document {
        recipe: file.clone(),
        format: plan.rollout.format.to_string(),
        device: device.info().description,
        accuracy_before: Spread::of(figures[0].iter().map(|f| f.accuracy_before)),
        steps: plan.run.total_steps,
        test_k: plan.run.test_k,
        seeds,
        rows: rows(&methods, figures),
        report: report.display().to_string(),
        run: dir.display().to_string(),
    };
    let path = dir.join("compare.json");
    write_file(&path, &serde_json::to_string_pretty(&document)?)?;
    if args.json {
        out!("{}", serde_json::to_string(&document)?)?;
    } else {
        crate::output::text(&table(&document))?;
    }
    Ok(())
}

/// The recipe of a method, checked as one that is read.
fn recipe_of(method: Method, base: &Recipe, seed: u64) -> anyhow::Result<Recipe> {
    let name = method.name();
    method.recipe(base, seed).map_err(|error| {
        bad(format!("method {name}: {error}; name the methods that go with this recipe with --methods"))
    })
}

fn methods(args: &Args) -> anyhow::Result<Vec<Method>> {
    if args.methods.is_empty() {
        return Ok(match args.ablate {
            Some(Ablation::Uaq) => Method::UAQ_ABLATION.to_vec(),
            Some(Ablation::Corrections) => Method::CORRECTIONS.to_vec(),
            None => Method::GRID.to_vec(),
        });
    }
    let find = |name: &String| {
        Method::named(name).ok_or_else(|| {
            let names = Method::all().map(Method::name).collect::<Vec<_>>().join(", ");
            bad(format!("--methods {name}: unknown method, expected some of {names}"))
        })
    };
    args.methods.iter().map(find).collect()
}

/// The weights that all methods of a seed start from. They are the same bits whenever they are made.
fn warm_start<D: Device>(
    device: &Arc<D>,
    base: &Recipe,
    seed: u64,
    comparison: &Comparison,
    view: &mut TrainView,
) -> anyhow::Result<Option<Params<Vec<f32>>>> {
    let (mut recipe, stop) = (base.clone(), comparison.stop);
    recipe.trainer.seed = seed;
    let Some(settings) = &recipe.sft else { return Ok(None) };
    let task = recipe.task().or_bad()?.launch(&reward_guard::launch(stop.at_once())?).or_bad()?;
    let start = Start::from_recipe(&recipe, &*task).or_bad()?;
    let examples = Examples::open(settings, seed, &start, Some(&*task)).or_bad()?;
    view.begin("warm start", 0, settings.steps);
    let on_step = |record: &mut SftRecord| {
        view.supervised(record);
        Ok::<_, SftError>(if stop.requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    };
    let (weights, flow) =
        sft::warm_start(device, &recipe, settings, &start, &examples, &Ranks::one(&recipe), on_step)
            .or_bad()?;
    view.finish();
    if flow.is_break() {
        let how = comparison.how_to_resume();
        return Err(stop.error(format!("stopped in the warm start, which begins anew with: {how}")));
    }
    Ok(Some(weights))
}
