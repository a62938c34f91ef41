//! The directory of a run of `qurl train` or `qurl sft`: new, or one that continues.

use crate::commands::train::write_file;
use crate::input::{OrBad, bad};
use crate::target::free_run;
use crate::view::TrainView;
use qurl_train::checkpoint::{Keep, Store};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Changes, Recipe};
use qurl_train::run::SUMMARY;
use qurl_train::runlog::RunLock;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

/// What runs in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reinforcement learning.
    Train,
    /// Supervised training.
    Sft,
}

impl Kind {
    /// The command.
    fn command(self) -> &'static str {
        match self {
            Kind::Train => "train",
            Kind::Sft => "sft",
        }
    }

    /// The key that says how many steps there are, and how many.
    fn steps(self, recipe: &Recipe) -> (&'static str, u64) {
        match self {
            Kind::Train => ("run.total_steps", recipe.run.as_ref().map_or(0, |run| run.total_steps)),
            Kind::Sft => ("sft.steps", recipe.sft.as_ref().map_or(0, |sft| sft.steps)),
        }
    }

    /// What a recipe in a run's directory is of.
    fn of(recipe: &Recipe) -> Kind {
        if recipe.run.is_some() { Kind::Train } else { Kind::Sft }
    }
}

/// The recipe's file in a run directory.
pub const RECIPE: &str = "recipe.toml";

const CHECKPOINTS: &str = "checkpoints";
const METRICS: &str = "metrics.jsonl";
/// Bytes of a summary or a recipe.
const MAX_FILE: u64 = 16 * qurl_files::MIB;

/// How many checkpoints a recipe wants.
fn keep(recipe: &Recipe) -> Keep {
    Keep { last: recipe.trainer.keep_last, best: recipe.trainer.keep_best }
}

/// The name of something in a directory, other than a lock.
pub fn something_in(dir: &Path) -> anyhow::Result<Option<String>> {
    let unreadable = |e: std::io::Error| bad(format!("--run {}: cannot be read: {e}", dir.display()));
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
        if name != RunLock::FILE {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

/// A run directory that no other process writes to.
pub struct RunDir {
    /// Where it is.
    pub path: PathBuf,
    /// Its checkpoints.
    pub store: Store,
    /// Step and directory of the checkpoint that the run resumes from.
    pub from: Option<(u64, PathBuf)>,
    /// Its summary, where the run has made all of its steps: nothing is left to do.
    pub finished: Option<String>,
    kind: Kind,
    /// Held by rank 0, for all.
    _lock: Option<RunLock>,
}

impl RunDir {
    /// [`RunDir::open`] by rank 0, for all: the others see the same directory.
    pub fn open_on(
        ranks: &Ranks,
        kind: Kind,
        asked: Option<&Path>,
        resume: bool,
        recipe: &Recipe,
        view: &TrainView,
    ) -> anyhow::Result<RunDir> {
        let opened = match ranks.is_first() {
            true => Some(RunDir::open(kind, asked, resume, recipe, view)?),
            false => None,
        };
        let path = opened.as_ref().map(|dir| std::path::absolute(&dir.path)).transpose()?;
        let path = ranks.of_first(path.map_or(String::new(), |path| path.display().to_string()))?;
        let step = ranks.of_first(opened.as_ref().and_then(|dir| Some(dir.from.as_ref()?.0)))?;
        let finished = ranks.of_first(opened.as_ref().and_then(|dir| dir.finished.clone()))?;
        let others = || {
            let path = PathBuf::from(path);
            let store = Store::of_first(&path.join(CHECKPOINTS), keep(recipe));
            let from = step.map(|step| (step, store.path(step)));
            RunDir { path, store, from, finished, kind, _lock: None }
        };
        Ok(opened.unwrap_or_else(others))
    }

    /// Makes the directory, or takes the one of a run that is to continue, and locks it.
    pub fn open(
        kind: Kind,
        asked: Option<&Path>,
        resume: bool,
        recipe: &Recipe,
        view: &TrainView,
    ) -> anyhow::Result<RunDir> {
        let path = match asked {
            Some(dir) => dir.to_path_buf(),
            None => free_run(kind.command()),
        };
        let name = path.display();
        qurl_files::disk::create_dir_all(&path)
            .map_err(|e| bad(format!("--run {name}: cannot be made: {e}")))?;
        let lock = RunLock::take(&path).map_err(|e| bad(format!("--run {e}")))?;
        if !resume && path.join(RECIPE).exists() {
            let hint = "choose another directory, or continue it with --resume";
            return Err(bad(format!("--run {name}: there is a run already ({RECIPE}); {hint}")));
        }
        if let Some(found) = something_in(&path)?.filter(|_| !resume) {
            return Err(bad(format!("--run {name}: holds {found}, expected a new or empty directory")));
        }
        let store = Store::open(&path.join(CHECKPOINTS), keep(recipe))?;
        let newest = store.newest()?;
        for torn in &newest.torn {
            let (step, error) = (torn.step, &torn.error);
            view.warn(&format!(
                "warning: the checkpoint of step {step} is not whole and is ignored: {error}"
            ));
        }
        let mut dir = RunDir { path, store, from: newest.whole, finished: None, kind, _lock: Some(lock) };
        if resume {
            dir.check_recipe(recipe, view)?;
            dir.finished = dir.summary_if_finished(recipe);
            if dir.finished.is_some() {
                return Ok(dir);
            }
        }
        dir.write_recipe(recipe)?;
        for torn in &newest.torn {
            let place = dir.store.set_aside(torn.step)?;
            let (step, place) = (torn.step, place.display());
            view.warn(&format!("the damaged checkpoint of step {step} is now {place}, and can be removed"));
        }
        if let Some((step, _)) = dir.from {
            dir.store.prune(step)?; // a process killed between writing and clearing up left one too many
        }
        Ok(dir)
    }

    /// The summary of a run that has made all steps of this recipe and written its model. Of the keys that
    /// may differ, one alone changes what is left of such a run.
    fn summary_if_finished(&self, recipe: &Recipe) -> Option<String> {
        let read = |file: &str| qurl_files::read_text(&self.path.join(file), MAX_FILE).ok();
        let (text, (_, total)) = (read(SUMMARY)?, self.kind.steps(recipe));
        let summary: serde_json::Value = serde_json::from_str(&text).ok()?;
        let made = self.step() == total && summary["steps"] == total && self.path.join("model").is_dir();
        let file = self.path.join(RECIPE).display().to_string();
        let changes = Changes::between(&Recipe::parse(&read(RECIPE)?, &file, &[]).ok()?, recipe);
        let same = changes.refused.is_empty() && changes.allowed.iter().all(|c| c.key != "run.export_uaq");
        (made && same).then_some(text)
    }

    /// The step that the run resumes from.
    pub fn step(&self) -> u64 {
        self.from.as_ref().map_or(0, |(step, _)| *step)
    }

    /// How to resume this run.
    pub fn how_to_resume(&self) -> String {
        format!("qurl {} --run {} --resume", self.kind.command(), self.path.display())
    }

    /// Refuses a recipe that would make it another run.
    fn check_recipe(&self, recipe: &Recipe, view: &TrainView) -> anyhow::Result<()> {
        let name = self.path.display();
        let (file, text) = match &self.from {
            Some((step, _)) => (format!("checkpoint of step {step}"), self.store.recipe(*step)?),
            None => match std::fs::read_to_string(self.path.join(RECIPE)) {
                Ok(text) => (self.path.join(RECIPE).display().to_string(), text),
                Err(_) => {
                    view.warn(&format!("--resume: there is no run in {name} yet; it begins"));
                    return Ok(());
                }
            },
        };
        let begun = Recipe::parse(&text, &file, &[]).or_bad()?;
        let (kind, other) = (self.kind, Kind::of(&begun));
        if kind != other {
            let (run, with) = (other.command(), kind.command());
            return Err(bad(format!("--resume: {name} holds a run of `qurl {run}`, not of `qurl {with}`")));
        }
        let changes = Changes::between(&begun, recipe);
        if !changes.refused.is_empty() {
            let list: Vec<String> = changes.refused.iter().map(|c| format!("  {c}")).collect();
            let list = list.join("\n");
            return Err(bad(format!("--resume: the run in {name} was begun with another recipe:\n{list}")));
        }
        let (key, total) = self.kind.steps(recipe);
        if total < self.step() {
            let step = self.step();
            return Err(bad(format!(
                "--resume: key `{key}` is {total}, but the run in {name} has {step} already"
            )));
        }
        for change in &changes.allowed {
            view.note(&format!("recipe: {change}"));
        }
        match &self.from {
            Some((step, _)) => view.note(&format!("resumes after step {step}")),
            None => {
                self.check_nothing_lost(recipe)?;
                view.warn(&format!("--resume: the run in {name} has no checkpoint yet; it begins anew"));
            }
        }
        Ok(())
    }

    /// Refuses to begin anew over steps whose checkpoints are gone: they may be elsewhere, and hours of work.
    fn check_nothing_lost(&self, recipe: &Recipe) -> anyhow::Result<()> {
        let file = self.path.join(METRICS);
        let Ok(metrics) = qurl_files::open(&file) else { return Ok(()) };
        let steps = BufReader::new(metrics).split(b'\n').map_while(Result::ok).count() as u64;
        let every = recipe.trainer.save_freq;
        // The first checkpoint may still be being written until the second one is begun.
        if every == 0 || steps <= 2 * every {
            return Ok(());
        }
        let (file, name) = (file.display(), self.path.display());
        Err(bad(format!(
            "--resume: {file} has {steps} steps, but {name} has no checkpoint, expected one every {every} \
             steps (trainer.save_freq): put {CHECKPOINTS} back, or begin anew in another directory"
        )))
    }

    /// All or nothing, so that a reader never sees half a recipe.
    fn write_recipe(&self, recipe: &Recipe) -> anyhow::Result<()> {
        write_file(&self.path.join(RECIPE), &recipe.to_toml())
    }
}
