//! `qurl compare`: the paper's grid of methods on one recipe.
//!
//! For every seed the warm start is made once and all methods go on from it with the same problems. Each method and seed
//! has a run directory of its own, as `qurl train` writes it, so that `qurl report` and TensorBoard read them; the table
//! goes to standard output and, with all figures, to `compare.json`.

use super::reward_guard;
use super::train::run_dir::something_in;
use super::train::{foresee_memory, note_dropped, overlaps, recipe_or_default};
use crate::device::{RecipeDevice, on_device};
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::report::{RunData, render};
use crate::view::{Mode, TrainView};
use anyhow::Context;
use qurl_kernels::Device;
use qurl_model::Params;
use qurl_tasks::task::Split;
use qurl_train::compare::{Method, RunFigures, Spread};
use qurl_train::recipe::Recipe;
use qurl_train::rl::{Health, RlTrainer, Symptom, prepare};
use qurl_train::runlog::{RunLock, RunLog};
use qurl_train::sft::{self, Examples};
use qurl_train::start::Start;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options of `qurl compare`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: qurl compare --seeds 3 --methods full,naive,tis,acr,acr-uaq --set rollout.format=int4"
)]
pub struct Args {
    /// Recipe file; without one the embedded default
    recipe: Option<PathBuf>,
    /// Methods to run: full, naive, quantized-is, decoupled, tis, acr, acr-uaq
    #[arg(long, value_delimiter = ',', value_name = "METHOD")]
    methods: Vec<String>,
    /// Run an ablation instead of the grid
    #[arg(long, value_enum, conflicts_with = "methods")]
    ablate: Option<Ablation>,
    /// Number of seeds, from the recipe's on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    seeds: u64,
    /// Overrides a key of the recipe, as in --set rollout.format=int4
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Steps, instead of the recipe's run.total_steps
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Directory of the comparison (default: the next free runs/compare-N)
    #[arg(long)]
    run: Option<PathBuf>,
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
}

/// A line of the table: a method over all seeds.
#[derive(Serialize)]
struct Row {
    method: String,
    title: String,
    accuracy_final: Spread,
    accuracy_best: Spread,
    /// Mean accuracy of `run.test_k` samples at the end, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    avg_at_k_final: Option<Spread>,
    mismatch_kl: Spread,
    mismatch_kl_max: f64,
    rho_max: f64,
    clip_fraction: Spread,
    rollout_tokens_per_s: Spread,
    /// Against the full-precision rollout of the same comparison, where there is one.
    speed_up: Option<f64>,
    runs: Vec<RunFigures>,
}

#[derive(Serialize)]
struct Document {
    recipe: String,
    format: String,
    device: String,
    seeds: Vec<u64>,
    steps: u64,
    test_k: usize,
    accuracy_before: Spread,
    rows: Vec<Row>,
    report: String,
    run: String,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let methods = methods(&args)?;
    let mut overrides = args.overrides.clone();
    overrides.extend(args.steps.map(|steps| format!("run.total_steps={steps}")));
    let (base, file) = recipe_or_default(args.recipe.as_deref(), &overrides)?;
    let base = args.device.put_into(base);
    on_device!(base.trainer.device, device => run_on(device, args, base, file, methods))
}

fn run_on<D: Device>(
    device: Arc<D>,
    args: Args,
    base: Recipe,
    file: String,
    methods: Vec<Method>,
) -> anyhow::Result<()> {
    let plan = base.rl(&file).or_bad()?;
    let mut task = base.task().or_bad()?.launch(&reward_guard::launch(Arc::default())?).or_bad()?;
    let start = Start::from_recipe(&base, &*task).or_bad()?;
    let dropped = prepare(&*device, &base, &file, &start, &mut *task).or_bad()?;
    let dir = directory(args.run.as_deref())?;
    let _lock = RunLock::take(&dir).map_err(|e| bad(format!("--run {e}")))?;
    let mut view = TrainView::new(Mode::choose(args.quiet, args.json));
    let seeds: Vec<u64> = (0..args.seeds).map(|i| base.trainer.seed + i).collect();
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
    foresee_memory(&*device, &base, &plan, &start.config, &view)?;

    let mut figures: Vec<Vec<RunFigures>> = vec![Vec::new(); methods.len()];
    for &seed in &seeds {
        let weights = warm_start(&device, &base, seed, &mut view)?;
        for (method, figures) in methods.iter().zip(&mut figures) {
            let run_dir = dir.join(format!("seed-{seed}")).join(method.name());
            view.note(&format!("seed {seed}: {}", method.title()));
            figures.push(one_run(
                &device,
                &method.recipe(&base, seed),
                &file,
                &weights,
                &run_dir,
                &mut view,
            )?);
        }
    }

    let report = dir.join("report.html");
    let shown: Vec<PathBuf> =
        methods.iter().map(|m| dir.join(format!("seed-{}", seeds[0])).join(m.name())).collect();
    let data = shown.iter().map(|dir| RunData::read(dir)).collect::<anyhow::Result<Vec<RunData>>>()?;
    std::fs::write(&report, render(&data)).with_context(|| format!("writing {}", report.display()))?;
    let document = Document {
        recipe: file,
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
    std::fs::write(&path, serde_json::to_string_pretty(&document)?)
        .with_context(|| format!("writing {}", path.display()))?;
    if args.json {
        out!("{}", serde_json::to_string(&document)?)?;
    } else {
        crate::output::text(&table(&document))?;
    }
    Ok(())
}

fn methods(args: &Args) -> anyhow::Result<Vec<Method>> {
    let known = match args.ablate {
        Some(Ablation::Uaq) => Method::UAQ_ABLATION,
        None => Method::GRID,
    };
    if args.methods.is_empty() {
        return Ok(known.to_vec());
    }
    let find = |name: &String| {
        known.into_iter().find(|m| m.name() == *name).ok_or_else(|| {
            let names = known.map(Method::name).join(", ");
            bad(format!("--methods {name}: unknown method, expected some of {names}"))
        })
    };
    args.methods.iter().map(find).collect()
}

/// A new directory for all runs.
fn directory(asked: Option<&Path>) -> anyhow::Result<PathBuf> {
    let free = || (1..).map(|i| PathBuf::from(format!("runs/compare-{i}"))).find(|dir| !dir.exists());
    let dir = asked.map(Path::to_path_buf).or_else(free).unwrap_or_else(|| PathBuf::from("runs/compare"));
    std::fs::create_dir_all(&dir)
        .map_err(|e| bad(format!("--run {}: cannot be made: {e}", dir.display())))?;
    if let Some(found) = something_in(&dir)? {
        return Err(bad(format!(
            "--run {}: holds {found}, expected a new or empty directory",
            dir.display()
        )));
    }
    Ok(dir)
}

/// The weights that all methods of a seed start from.
fn warm_start<D: Device>(
    device: &Arc<D>,
    base: &Recipe,
    seed: u64,
    view: &mut TrainView,
) -> anyhow::Result<Option<Params<Vec<f32>>>> {
    let mut recipe = base.clone();
    recipe.trainer.seed = seed;
    let Some(settings) = &recipe.sft else { return Ok(None) };
    let task = recipe.task().or_bad()?.launch(&reward_guard::launch(Arc::default())?).or_bad()?;
    let start = Start::from_recipe(&recipe, &*task).or_bad()?;
    let examples = Examples::open(settings, seed, &start, Some(&*task)).or_bad()?;
    view.begin("warm start", 0, settings.steps);
    let weights = sft::run(device, &recipe, settings, &start, &examples, |record| {
        view.supervised(record);
    })
    .or_bad()?;
    view.finish();
    Ok(Some(weights))
}

/// One method with one seed, written down as `qurl train` does.
fn one_run<D: Device>(
    device: &Arc<D>,
    recipe: &Recipe,
    file: &str,
    weights: &Option<Params<Vec<f32>>>,
    dir: &Path,
    view: &mut TrainView,
) -> anyhow::Result<RunFigures> {
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let path = dir.join("recipe.toml");
    std::fs::write(&path, recipe.to_toml()).with_context(|| format!("writing {}", path.display()))?;
    let mut task = recipe.task().or_bad()?.launch(&reward_guard::launch(Arc::default())?).or_bad()?;
    let mut start = Start::from_recipe(recipe, &*task).or_bad()?;
    prepare(&**device, recipe, file, &start, &mut *task).or_bad()?;
    if let Some(weights) = weights {
        start.weights = weights.clone();
    }
    let parameters = start.config.param_count();
    let mut trainer = RlTrainer::new(device, recipe, file, start, task).or_bad()?;
    let (plan, vocabulary) = (trainer.plan().clone(), trainer.start().config.vocab_size);
    let mut log = RunLog::open(dir, 0)?;
    let before = trainer.evaluate()?;
    let mut figures = RunFigures::new(before);
    let mut health = Health::new(plan.run.alarm.patience);
    view.begin("RL", 0, plan.run.total_steps);
    for step in 1..=plan.run.total_steps {
        let broke = |symptom: &Symptom| format!("step {step}: {symptom}; this run ends here");
        let mut record = match trainer.step() {
            Err(error) if let Some(symptom) = Symptom::of_error(&error, vocabulary) => {
                figures.broken_at = Some(step);
                view.warn(&broke(&symptom));
                break;
            }
            record => record.with_context(|| format!("step {step}"))?,
        };
        let symptom = Symptom::of(&record, vocabulary);
        if health.observe(step, symptom.as_ref()) {
            figures.broken_at = Some(step);
        }
        let last = step == plan.run.total_steps || figures.broken_at.is_some();
        if last || (plan.run.test_freq > 0 && step.is_multiple_of(plan.run.test_freq)) {
            record.add_test(trainer.evaluate()?);
        }
        if plan.run.logs_rollouts_at(step) {
            log.rollouts(step, &trainer.sampled_rollouts(plan.run.rollout_log_samples)?)?;
        }
        log.record(&record)?;
        figures.add(&record);
        view.step(&record);
        if let (Some(symptom), Some(_)) = (symptom, figures.broken_at) {
            view.warn(&broke(&symptom));
            break;
        }
    }
    view.finish();
    let path = dir.join("summary.json");
    let summary = serde_json::json!({
        "accuracy_before": before.accuracy,
        "avg_at_k_before": before.avg_at_k,
        "accuracy_after": figures.accuracy_final,
        "avg_at_k_after": figures.avg_at_k_final,
        "parameters": parameters,
        "device": device.info().description,
    });
    std::fs::write(&path, summary.to_string()).with_context(|| format!("writing {}", path.display()))?;
    Ok(figures)
}

fn rows(methods: &[Method], figures: Vec<Vec<RunFigures>>) -> Vec<Row> {
    let speed = |runs: &[RunFigures]| Spread::of(runs.iter().map(RunFigures::tokens_per_s));
    let full = methods.iter().position(|m| *m == Method::Full).map(|i| speed(&figures[i]).mean);
    let row = |(method, runs): (&Method, Vec<RunFigures>)| {
        let spread = |f: fn(&RunFigures) -> f64| Spread::of(runs.iter().map(f));
        let largest = |f: fn(&RunFigures) -> f64| runs.iter().map(f).fold(f64::NEG_INFINITY, f64::max);
        Row {
            method: method.name(),
            title: method.title(),
            accuracy_final: spread(|r| r.accuracy_final),
            accuracy_best: spread(|r| r.accuracy_best),
            avg_at_k_final: runs
                .iter()
                .all(|r| r.avg_at_k_final.is_some())
                .then(|| Spread::of(runs.iter().filter_map(|r| r.avg_at_k_final))),
            mismatch_kl: spread(|r| r.mismatch_kl),
            mismatch_kl_max: largest(|r| r.mismatch_kl_max),
            rho_max: largest(|r| r.rho_max),
            clip_fraction: spread(|r| r.clip_fraction),
            rollout_tokens_per_s: speed(&runs),
            speed_up: full.map(|full| speed(&runs).mean / full),
            runs,
        }
    };
    methods.iter().zip(figures).map(row).collect()
}

/// The table, in Markdown.
fn table(document: &Document) -> String {
    // One seed says nothing about the spread of seeds.
    let percent = |s: Spread| match document.seeds.len() {
        1 => format!("{:.1}", 100.0 * s.mean),
        _ => format!("{:.1} ± {:.1}", 100.0 * s.mean, 100.0 * s.deviation),
    };
    let mut text = format!(
        "{} rollouts, {} steps, {} seeds; held-out accuracy before: {}%\n\n",
        document.format,
        document.steps,
        document.seeds.len(),
        percent(document.accuracy_before)
    );
    let k = document.test_k;
    let (title, rule) = if k > 0 { (format!(" Avg@{k} % |"), "---|") } else { (String::new(), "") };
    text += &format!(
        "| method | final % | best % |{title} mismatch KL | its maximum | max rho | clipped % | rollout tokens/s | speed-up |\n\
         |---|---|---|{rule}---|---|---|---|---|---|\n"
    );
    for row in &document.rows {
        let speed_up = row.speed_up.map_or("-".to_string(), |x| format!("{x:.2}x"));
        let avg_at_k = row.avg_at_k_final.map_or(String::new(), |spread| format!(" {} |", percent(spread)));
        let broken: Vec<String> = row.runs.iter().filter_map(|r| Some(r.broken_at?.to_string())).collect();
        let broken = match broken.len() {
            0 => String::new(),
            _ => format!(" (broke at step {})", broken.join(", ")),
        };
        text += &format!(
            "| {}{broken} | {} | {} |{avg_at_k} {:.1e} | {:.1e} | {:.3} | {:.2} | {:.0} | {speed_up} |\n",
            row.title,
            percent(row.accuracy_final),
            percent(row.accuracy_best),
            row.mismatch_kl.mean,
            row.mismatch_kl_max,
            row.rho_max,
            100.0 * row.clip_fraction.mean,
            row.rollout_tokens_per_s.mean,
        );
    }
    text + &format!("\ncurves of the first seed: {}\n", document.report)
}
