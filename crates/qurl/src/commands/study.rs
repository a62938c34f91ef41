//! `qurl study`: a grid of recipes, methods and seeds, and verdicts on what is claimed of it.
//!
//! Each cell is a run of `qurl train` in a process of its own with a directory of its own, so that several
//! small runs share a device, a broken run ends no other, and `qurl report` reads them. A warm start that
//! several cells share is made once, by `qurl sft`. With `--resume` finished cells are kept and those that
//! were cut continue from their checkpoints. Everything that is said is computed from the files of the cells.

mod page;
mod runner;

use crate::input::{OrBad, bad};
use crate::output::{self, out};
use crate::stop::Stop;
use crate::target::{self, free_run};
use anyhow::Context;
use qurl_train::runlog::RunLock;
use qurl_train::study::stats::Estimate;
use qurl_train::study::{Cell, Results, Study, Verdict, decide};
use runner::{Runner, State};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Options of `qurl study`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl study recipes/studies/uaq.toml --run runs/uaq --parallel 4")]
pub struct Args {
    /// Study file: recipes, methods, seeds and claims
    file: PathBuf,
    /// Directory of the study (default: the next free runs/study-N)
    #[arg(long)]
    run: Option<PathBuf>,
    /// Resume the study in --run: finished cells stay as they are, those that were cut continue
    #[arg(long, requires = "run")]
    resume: bool,
    /// Cells that run at the same time, instead of the study's own number
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=64))]
    parallel: Option<u64>,
    /// Run only cells whose path (RECIPE/METHOD/seed-N) contains one of these texts
    #[arg(long, value_delimiter = ',', value_name = "TEXT")]
    only: Vec<String>,
    /// Run nothing: say what the finished cells show
    #[arg(long, requires = "resume")]
    report: bool,
    /// List the cells and exit
    #[arg(long)]
    list: bool,
    /// Show warnings and the result only
    #[arg(long, short)]
    quiet: bool,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

/// The study's file in its directory.
const COPY: &str = "study.toml";

/// `study.json`.
#[derive(Serialize)]
struct Document {
    name: String,
    about: String,
    seeds: Vec<u64>,
    metrics: Vec<String>,
    rows: Vec<Row>,
    verdicts: Vec<Verdict>,
    cells: Vec<CellRow>,
    run: String,
}

/// A method on a recipe over all seeds.
#[derive(Serialize)]
struct Row {
    recipe: String,
    method: String,
    /// Seeds whose cells are over.
    seeds: usize,
    figures: BTreeMap<String, Estimate>,
}

/// One run.
#[derive(Serialize)]
struct CellRow {
    recipe: String,
    method: String,
    seed: u64,
    state: State,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    figures: BTreeMap<String, f64>,
    tests: Vec<(u64, f64)>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let (study, cells) = Study::read(&args.file).or_bad()?;
    check_only(&args.only, &cells)?;
    if args.list {
        return list(&cells, &args);
    }
    let dir = directory(&args)?;
    let _lock = RunLock::take(&dir).map_err(|e| bad(format!("--run {e}")))?;
    keep_copy(&args, &dir)?;
    let parallel = args.parallel.map_or(study.parallel, |n| n as usize);
    let asked = |cell: &Cell| {
        let path = cell.path().display().to_string();
        !args.report && (args.only.is_empty() || args.only.iter().any(|text| path.contains(text)))
    };
    let stop = Stop::watch()?;
    let runner = Runner { dir: &dir, parallel, stop: &stop, quiet: args.quiet || args.json };
    let states = runner.run(&study, &cells, asked)?;

    let mut results = Results::new();
    let mut rows = Vec::new();
    for (cell, (state, why)) in cells.iter().zip(states) {
        let figures = runner.figures(cell)?;
        let (recipe, method, seed) = (cell.recipe_name.clone(), cell.method.clone(), cell.seed);
        if let Some(figures) = &figures {
            results.insert((recipe.clone(), method.clone(), seed), figures.clone());
        }
        let (figures, tests) = figures.map_or_else(Default::default, |f| (f.values, f.tests));
        rows.push(CellRow { recipe, method, seed, state, why, figures, tests });
    }
    let document = document(&study, &results, rows, &dir);
    write(&dir.join("study.json"), &serde_json::to_string_pretty(&document)?)?;
    write(&dir.join("study.html"), &page::render(&document))?;
    if args.json {
        out!("{}", serde_json::to_string(&document)?)?;
    } else {
        output::text(&page::text(&document))?;
    }
    if stop.requested() {
        let how = format!("qurl study {} --run {} --resume", args.file.display(), dir.display());
        return Err(stop.error(format!("stopped; continue with: {how}")));
    }
    let failed = document.cells.iter().filter(|cell| cell.state == State::Failed).count();
    anyhow::ensure!(failed == 0, "{failed} cells failed; why is in {}", dir.join("study.json").display());
    Ok(())
}

/// Refuses a text that no cell has in its path: nothing would run, and nobody would be told.
fn check_only(only: &[String], cells: &[Cell]) -> anyhow::Result<()> {
    let paths: Vec<String> = cells.iter().map(|cell| cell.path().display().to_string()).collect();
    match only.iter().find(|text| !paths.iter().any(|path| path.contains(*text))) {
        Some(text) => Err(bad(format!("--only {text}: no cell has it; the cells are {}", paths.join(", ")))),
        None => Ok(()),
    }
}

fn list(cells: &[Cell], args: &Args) -> anyhow::Result<()> {
    let paths: Vec<String> = cells.iter().map(|cell| cell.path().display().to_string()).collect();
    match args.json {
        true => out!("{}", serde_json::to_string(&paths)?)?,
        false => paths.iter().try_for_each(|path| out!("{path}"))?,
    }
    Ok(())
}

fn directory(args: &Args) -> anyhow::Result<PathBuf> {
    let dir = match &args.run {
        Some(dir) => dir.clone(),
        None => free_run("study"),
    };
    std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
    Ok(dir)
}

/// Keeps the study's text; an error where the directory has another one, or something else.
fn keep_copy(args: &Args, dir: &Path) -> anyhow::Result<()> {
    let (text, copy) = (qurl_files::read_text(&args.file, qurl_files::MIB)?, dir.join(COPY));
    match std::fs::read_to_string(&copy) {
        Ok(_) if !args.resume => {
            Err(bad(format!("--run {}: has a study already; continue it with --resume", dir.display())))
        }
        // Cells whose recipes have changed begin anew, and others are kept: a study may grow.
        Ok(_) => write(&copy, &text),
        Err(_) if args.resume => {
            Err(bad(format!("--resume: {}: nothing to resume; leave out --resume", copy.display())))
        }
        Err(_) => match crate::commands::train::run_dir::something_in(dir)? {
            Some(name) => Err(bad(format!("--run {}: is not empty: has {name}", dir.display()))),
            None => write(&copy, &text),
        },
    }
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    target::write(path, text)
}

fn document(study: &Study, results: &Results, cells: Vec<CellRow>, dir: &Path) -> Document {
    let recipes: Vec<String> = study.recipes.iter().map(|r| r.name.clone()).collect();
    let mut rows = Vec::new();
    for recipe in &recipes {
        for method in study.methods.iter().map(|m| &m.name) {
            let of = |seed: &u64| results.get(&(recipe.clone(), method.clone(), *seed));
            let runs: Vec<_> = study.seeds.iter().filter_map(of).collect();
            let estimate = |metric: &String| {
                let values: Vec<f64> = runs.iter().filter_map(|run| run.get(metric)).collect();
                Some((metric.clone(), Estimate::of(&values)?))
            };
            let figures = study.metrics.iter().filter_map(estimate).collect();
            rows.push(Row { recipe: recipe.clone(), method: method.clone(), seeds: runs.len(), figures });
        }
    }
    let verdicts =
        study.claims.iter().flat_map(|claim| decide(claim, &recipes, &study.seeds, results)).collect();
    Document {
        name: study.name.clone(),
        about: study.about.clone(),
        seeds: study.seeds.clone(),
        metrics: study.metrics.clone(),
        rows,
        verdicts,
        cells,
        run: dir.display().to_string(),
    }
}
