//! The cells of a study as processes: warm starts first, each once, then the runs, several at a time.

use crate::output::err;
use crate::stop::Stop;
use anyhow::Context;
use qurl_train::run::SUMMARY;
use qurl_train::study::{Cell, CellFigures, Study};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How far a cell is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Its run is over, or training broke.
    Over,
    /// Its run was cut, or has not begun.
    Open,
    /// Its process ended with an error.
    Failed,
}

/// Runs cells.
pub struct Runner<'a> {
    /// The study's directory.
    pub dir: &'a Path,
    /// Processes at the same time.
    pub parallel: usize,
    pub stop: &'a Stop,
    pub quiet: bool,
}

/// A process to run: what it is called, its arguments, where its directory and its recipe are.
struct Job {
    name: String,
    command: &'static str,
    recipe: PathBuf,
    run: PathBuf,
}

impl Runner<'_> {
    /// Runs the cells that are asked for and not over; says of each how far it is, and why it failed.
    pub fn run(
        &self,
        study: &Study,
        cells: &[Cell],
        asked: impl Fn(&Cell) -> bool,
    ) -> anyhow::Result<Vec<(State, Option<String>)>> {
        let mut open = Vec::new();
        for cell in cells.iter().filter(|cell| asked(cell)) {
            if self.figures(cell)?.is_none() {
                open.push(cell);
            }
        }
        let mut models = BTreeMap::new();
        let mut warm = Vec::new();
        for cell in &open {
            let seed = if study.shared_warm_start { study.seeds[0] } else { cell.seed };
            let Some(text) = cell.warm_start(seed)? else { continue };
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            let name = format!("warm/{:016x}", hasher.finish());
            let run = self.dir.join(&name);
            let recipe = self.write_recipe(&name, &text)?;
            let model = run.join("model");
            if !model.is_dir() && !warm.iter().any(|job: &Job| job.run == run) {
                warm.push(Job { name, command: "sft", recipe, run });
            }
            models.insert(cell.path(), model);
        }
        let failed_warm = self.run_jobs(&warm)?;
        let mut jobs = Vec::new();
        for cell in &open {
            let name = cell.path().display().to_string();
            let model = models.get(&cell.path());
            if model.is_some_and(|model| !model.is_dir()) {
                continue; // its warm start was stopped, or failed
            }
            let model = model.map(std::path::absolute).transpose()?;
            let recipe = self.write_recipe(&name, &cell.recipe_text(model.as_deref()))?;
            jobs.push(Job { run: self.dir.join(&name), name, command: "train", recipe });
        }
        let failed = self.run_jobs(&jobs)?;
        let state = |cell: &Cell| {
            let name = cell.path().display().to_string();
            let warm = models.get(&cell.path()).and_then(|model| failed_warm.get(model.parent()?));
            Ok(match (self.figures(cell)?, failed.get(&self.dir.join(name)).or(warm)) {
                (Some(_), _) => (State::Over, None),
                (None, Some(why)) => (State::Failed, Some(why.clone())),
                (None, None) => (State::Open, None),
            })
        };
        cells.iter().map(state).collect()
    }

    /// What a cell gave, if its run is over and was one of this recipe.
    pub fn figures(&self, cell: &Cell) -> anyhow::Result<Option<CellFigures>> {
        let name = cell.path();
        let run = self.dir.join(&name);
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
        let summary: Value = serde_json::from_str(&read(run.join(SUMMARY))).unwrap_or_default();
        // The recipe that it ran by says which model it began with; all else must be as it is now.
        let begun = read(self.recipe_path(&name.display().to_string()));
        let model = toml::from_str::<toml::Table>(&begun).ok();
        let model = model.as_ref().and_then(|table| table.get("model")?.get("path")?.as_str());
        if begun != cell.recipe_text(model.filter(|_| cell.recipe.sft.is_some()).map(Path::new)) {
            return Ok(None);
        }
        let file = run.join("metrics.jsonl");
        let lines = read(file.clone());
        let lines: Vec<Value> = lines
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .with_context(|| format!("reading {}", file.display()))?;
        Ok(CellFigures::of(&summary, &lines))
    }

    fn recipe_path(&self, name: &str) -> PathBuf {
        self.dir.join("recipes").join(format!("{}.toml", name.replace('/', "--")))
    }

    /// Writes the recipe of a process. Where another one stood, its run begins anew.
    fn write_recipe(&self, name: &str, text: &str) -> anyhow::Result<PathBuf> {
        let (path, run) = (self.recipe_path(name), self.dir.join(name));
        let folder = self.dir.join("recipes");
        std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        let same = std::fs::read_to_string(&path).is_ok_and(|old| old == text);
        if !same {
            if run.is_dir() {
                std::fs::remove_dir_all(&run).with_context(|| format!("removing {}", run.display()))?;
            }
            crate::target::write(&path, text)?;
        }
        Ok(path)
    }

    /// Runs processes, several at a time; gives the last words of those that failed, by their directories.
    fn run_jobs(&self, jobs: &[Job]) -> anyhow::Result<BTreeMap<PathBuf, String>> {
        let (next, failed) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
        let program = std::env::current_exe().context("finding this program")?;
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        // On a CPU, processes share its cores.
        let share = threads.div_ceil(self.parallel.min(jobs.len().max(1)));
        let work = || -> anyhow::Result<()> {
            while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                if self.stop.requested() {
                    break;
                }
                if !self.quiet {
                    err!("{} of {}: {}", next.load(Ordering::Relaxed).min(jobs.len()), jobs.len(), job.name);
                }
                let why = run_one(&program, job, share)?;
                // One that was stopped has saved, and is open.
                if let Some(why) = why.filter(|_| !self.stop.requested()) {
                    err!("{}: {why}", job.name);
                    let mut failed = failed.lock().unwrap_or_else(|e| e.into_inner());
                    failed.insert(job.run.clone(), why);
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.parallel).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })?;
        Ok(failed.into_inner().unwrap_or_else(|e| e.into_inner()))
    }
}

/// Runs a process to its end; gives its last words where it failed. One that was stopped saves and fails, and
/// a run that training broke fails, too: what it left says which.
fn run_one(program: &Path, job: &Job, threads: usize) -> anyhow::Result<Option<String>> {
    if let Some(parent) = job.run.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
    }
    let log = job.run.with_extension("log");
    let file = File::create(&log).with_context(|| format!("writing {}", log.display()))?;
    let mut command = Command::new(program);
    command.arg(job.command).arg(&job.recipe).arg("--run").arg(&job.run).arg("--quiet");
    if job.run.join("recipe.toml").exists() {
        command.arg("--resume");
    }
    if std::env::var_os("QURL_THREADS").is_none() {
        command.env("QURL_THREADS", threads.to_string());
    }
    let status = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file)
        .status()
        .with_context(|| format!("starting {}", program.display()))?;
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("said nothing").to_string();
    Ok((!status.success()).then_some(last))
}
