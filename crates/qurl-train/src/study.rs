//! A study: recipes times methods times seeds, and claims about what their runs show.
//!
//! A study file names recipes (with overrides), methods (those of `qurl compare`, with overrides) and seeds;
//! each combination is a cell, which is an ordinary run. Cells of a seed differ in nothing but what recipe
//! and method say: same starting weights, same problems, same random numbers. So claims are decided by
//! differences of pairs with the same seed ([`stats`]), and a verdict says how many pairs there were and how
//! far the mean of their differences may be from what was seen.

mod claim;
mod figures;
pub mod stats;

pub use claim::{Claim, Kind, Verdict, decide};
pub use figures::{CellFigures, METRICS};

use crate::compare::Method;
use crate::recipe::{Recipe, RecipeError};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What is wrong with a study.
#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    /// The file cannot be read.
    #[error("{}: {error}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// It is no TOML, or has keys or values that mean nothing.
    #[error("{}: {reason}", path.display())]
    Parse {
        /// Which.
        path: PathBuf,
        /// Where and why.
        reason: String,
    },
    /// A value that its key cannot have.
    #[error("{}: key `{key}` is {found}, expected {expected}", path.display())]
    Invalid {
        /// The study's file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// The recipe of a cell.
    #[error("cell {cell}: {error}")]
    Recipe {
        /// Which.
        cell: String,
        /// What is wrong with it.
        error: RecipeError,
    },
}

/// A study as written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// What it is called.
    pub name: String,
    /// What it is about.
    #[serde(default)]
    pub about: String,
    /// Seeds; every cell is run once with each.
    pub seeds: Vec<u64>,
    /// Cells that run at the same time.
    #[serde(default = "one")]
    pub parallel: usize,
    /// The warm start of the first seed is that of all: where seeds shall differ in reinforcement learning
    /// only.
    #[serde(default)]
    pub shared_warm_start: bool,
    /// What the table and plots show.
    #[serde(default = "default_metrics")]
    pub metrics: Vec<String>,
    /// Recipes.
    pub recipes: Vec<StudyRecipe>,
    /// Methods.
    pub methods: Vec<StudyMethod>,
    /// What is to be decided.
    #[serde(default)]
    pub claims: Vec<Claim>,
}

/// A recipe of a study.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StudyRecipe {
    /// What claims call it.
    pub name: String,
    /// Its file; relative to that of the study.
    pub file: PathBuf,
    /// Overrides `key=value`.
    #[serde(default)]
    pub set: Vec<String>,
}

/// A method of a study.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StudyMethod {
    /// What claims call it.
    pub name: String,
    /// The method of `qurl compare` that it is; by default the one with its name.
    #[serde(default)]
    pub method: Option<String>,
    /// Overrides `key=value`, after those of the method.
    #[serde(default)]
    pub set: Vec<String>,
}

fn one() -> usize {
    1
}

fn default_metrics() -> Vec<String> {
    ["accuracy_final", "accuracy_best", "mismatch_kl", "rho_max"].map(str::to_string).to_vec()
}

/// A run of a study.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Its recipe.
    pub recipe_name: String,
    /// Its method.
    pub method: String,
    /// Its seed.
    pub seed: u64,
    /// The recipe that runs; with its warm start still in it.
    pub recipe: Recipe,
}

impl Cell {
    /// Where its run is, in the study's directory.
    pub fn path(&self) -> PathBuf {
        Path::new(&self.recipe_name).join(&self.method).join(format!("seed-{}", self.seed))
    }

    /// The text of the recipe that runs from a model instead of its own warm start; of the whole recipe where
    /// there is none.
    pub fn recipe_text(&self, model: Option<&Path>) -> String {
        let Some(model) = model else { return self.recipe.to_toml() };
        let mut recipe = self.recipe.clone();
        recipe.sft = None;
        let mut table = toml::Table::try_from(&recipe).unwrap_or_default();
        let path = toml::Value::String(model.display().to_string());
        table.insert(
            "model".to_string(),
            toml::Value::Table([("path".to_string(), path)].into_iter().collect()),
        );
        table.to_string()
    }

    /// The recipe of its warm start with this seed, where it has one: equal texts make equal weights.
    pub fn warm_start(&self, seed: u64) -> Result<Option<String>, RecipeError> {
        if self.recipe.sft.is_none() {
            return Ok(None);
        }
        let (mut only, _) = self.recipe.for_sft()?;
        only.trainer.seed = seed;
        // What says nothing about the weights.
        only.trainer.forward = Default::default();
        Ok(Some(only.to_toml()))
    }
}

impl Study {
    /// Reads and checks a study, and the recipes of all its cells.
    pub fn read(path: &Path) -> Result<(Study, Vec<Cell>), StudyError> {
        let text = qurl_files::read_text(path, qurl_files::MIB)
            .map_err(|error| StudyError::File { path: path.into(), error })?;
        let study = Study::parse(&text, path)?;
        let cells = study.cells(path)?;
        Ok((study, cells))
    }

    fn parse(text: &str, path: &Path) -> Result<Study, StudyError> {
        let study: Study = toml::from_str(text).map_err(|error| {
            let line =
                error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count());
            let reason = format!("line {}: {}", line + 1, error.message().trim_end().replace('\n', "; "));
            StudyError::Parse { path: path.into(), reason }
        })?;
        study.check(path)?;
        Ok(study)
    }

    fn check(&self, path: &Path) -> Result<(), StudyError> {
        let that = |key: &str, found: String, ok: bool, expected: &str| match ok {
            true => Ok(()),
            false => {
                let (key, expected) = (key.to_string(), expected.to_string());
                Err(StudyError::Invalid { path: path.into(), key, found, expected })
            }
        };
        let distinct = |list: &[String]| {
            let set: std::collections::BTreeSet<&String> = list.iter().collect();
            !list.is_empty() && set.len() == list.len()
        };
        let seeds: Vec<String> = self.seeds.iter().map(u64::to_string).collect();
        that("seeds", format!("{seeds:?}"), distinct(&seeds), "some different numbers")?;
        let parallel = (1..=64).contains(&self.parallel);
        that("parallel", self.parallel.to_string(), parallel, "a whole number from 1 to 64")?;
        let recipes: Vec<String> = self.recipes.iter().map(|r| r.name.clone()).collect();
        let methods: Vec<String> = self.methods.iter().map(|m| m.name.clone()).collect();
        for (key, names) in [("recipes.name", &recipes), ("methods.name", &methods)] {
            that(key, format!("{names:?}"), distinct(names), "some different names")?;
            let plain = |name: &&String| !name.is_empty() && name.chars().all(is_of_a_name);
            let wrong = names.iter().find(|name| !plain(name));
            let found = wrong.map_or(String::new(), |name| format!("{name:?}"));
            that(
                key,
                found,
                wrong.is_none(),
                "letters, digits, '-', '_' and '.', since it names a directory",
            )?;
        }
        for metric in &self.metrics {
            let expected = format!("some of {}", METRICS.join(", "));
            that("metrics", format!("{metric:?}"), METRICS.contains(&metric.as_str()), &expected)?;
        }
        for method in &self.methods {
            let name = method.method.as_ref().unwrap_or(&method.name);
            let names = Method::all().map(Method::name).collect::<Vec<_>>().join(", ");
            let key = if method.method.is_some() { "methods.method" } else { "methods.name" };
            that(key, format!("{name:?}"), Method::named(name).is_some(), &format!("a method: {names}"))?;
        }
        for claim in &self.claims {
            claim.check(&recipes, &methods).map_err(|(key, found, expected)| StudyError::Invalid {
                path: path.into(),
                key: format!("claims.{key}"),
                found,
                expected,
            })?;
        }
        Ok(())
    }

    /// All cells, seed by seed, so that the first seeds of all are there before the last of any.
    fn cells(&self, path: &Path) -> Result<Vec<Cell>, StudyError> {
        let directory = path.parent().unwrap_or(Path::new(""));
        let mut cells = Vec::new();
        for &seed in &self.seeds {
            for recipe in &self.recipes {
                for method in &self.methods {
                    let name = format!("{}/{}/seed-{seed}", recipe.name, method.name);
                    let wrong = |error| StudyError::Recipe { cell: name.clone(), error };
                    let base = Recipe::read(&directory.join(&recipe.file), &recipe.set).map_err(wrong)?;
                    let known = method.method.as_ref().unwrap_or(&method.name);
                    let Some(known) = Method::named(known) else { continue };
                    let text = known.change(&base, seed).to_toml();
                    let file = recipe.file.display().to_string();
                    let whole = Recipe::parse(&text, &file, &method.set).map_err(wrong)?;
                    whole.rl(&file).map_err(wrong)?;
                    let (recipe_name, method) = (recipe.name.clone(), method.name.clone());
                    cells.push(Cell { recipe_name, method, seed, recipe: whole });
                }
            }
        }
        Ok(cells)
    }
}

fn is_of_a_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.')
}

/// Figures of the cells that are over, by recipe, method and seed.
pub type Results = BTreeMap<(String, String, u64), CellFigures>;

#[cfg(test)]
mod tests {
    use super::*;

    const STUDY: &str = r#"
name = "test"
seeds = [1, 2]
[[recipes]]
name = "tiny"
file = "tiny-grpo.toml"
set = ["rollout.format=int8"]
[[methods]]
name = "acr"
[[methods]]
name = "slow"
method = "acr"
set = ["actor.lr=1e-6"]
[[claims]]
text = "slow is worse"
kind = "better"
metric = "accuracy_final"
better = "acr"
worse = "slow"
"#;

    fn parse(text: &str) -> Result<Study, StudyError> {
        Study::parse(text, Path::new("study.toml"))
    }

    #[test]
    fn cells_are_all_combinations_with_the_overrides_of_both() {
        let study = parse(STUDY).expect("a study");
        let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/study.toml");
        let cells = study.cells(&recipes).expect("cells");
        let paths: Vec<String> = cells.iter().map(|c| c.path().display().to_string()).collect();
        let expected = ["tiny/acr/seed-1", "tiny/slow/seed-1", "tiny/acr/seed-2", "tiny/slow/seed-2"];
        assert_eq!(paths, expected);
        let lr = |cell: &Cell| cell.recipe.actor.as_ref().expect("actor").lr;
        assert_eq!(lr(&cells[1]), 1e-6);
        assert!(lr(&cells[0]) > 1e-6);
        // The same warm start for all methods of a seed, and another for the next one.
        let warm: Vec<_> = cells.iter().map(|c| c.warm_start(c.seed).expect("warm start")).collect();
        assert!(warm[0].is_some() && warm[0] == warm[1] && warm[0] != warm[2]);
        let text = cells[0].recipe_text(Some(Path::new("some/model")));
        assert_eq!(cells[2].warm_start(1).expect("warm start"), warm[0], "a shared warm start");
        let from_model = Recipe::parse(&text, "cell", &[]).expect("a recipe");
        assert!(from_model.sft.is_none() && text.contains("some/model"));
    }

    #[test]
    fn the_studies_of_the_project_are_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/studies");
        let files: Vec<_> =
            std::fs::read_dir(folder).expect("studies").map(|e| e.expect("a file").path()).collect();
        assert!(files.len() >= 3);
        for file in files {
            let (study, cells) = Study::read(&file).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(cells.len(), study.recipes.len() * study.methods.len() * study.seeds.len());
            assert!(study.seeds.len() >= 5, "{}: verdicts need five seeds", file.display());
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (from, to, expected) in [
            ("seeds = [1, 2]", "seeds = []", "`seeds`"),
            ("seeds = [1, 2]", "seeds = [1, 1]", "`seeds`"),
            ("name = \"slow\"", "name = \"a/b\"", "`methods.name` is \"a/b\""),
            ("method = \"acr\"", "method = \"ppo2\"", "`methods.method` is \"ppo2\""),
            ("name = \"slow\"", "name = \"acr\"", "`methods.name`"),
            ("metric = \"accuracy_final\"", "metric = \"speed\"", "`claims.metric` is \"speed\""),
            ("worse = \"slow\"", "worse = \"fast\"", "`claims.worse` is \"fast\""),
            ("kind = \"better\"", "kind = \"best\"", "line "),
            ("name = \"test\"", "names = \"test\"", "line "),
        ] {
            let error = parse(&STUDY.replace(from, to)).expect_err(to).to_string();
            assert!(error.contains(expected) && error.starts_with("study.toml"), "{to}: {error}");
        }
        let unknown = parse(&STUDY.replace("tiny-grpo", "none")).expect("a study");
        assert!(
            unknown.cells(Path::new("study.toml")).expect_err("no file").to_string().contains("tiny/acr")
        );
    }
}
