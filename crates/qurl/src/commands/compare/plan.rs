//! What a comparison is made of, written down before its first run: `--resume` continues it, and can add
//! methods and seeds to it.

use crate::commands::train::run_dir::something_in;
use crate::commands::train::write_file;
use crate::input::{OrBad, bad};
use crate::target::free_run;
use anyhow::Context;
use qurl_train::compare::Method;
use qurl_train::recipe::{Changes, Recipe};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file in the directory of a comparison.
const PLAN: &str = "plan.json";

/// `plan.json`.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// What the recipe is called.
    pub file: String,
    /// The recipe that all methods change, as TOML.
    pub recipe: String,
    /// Names of the methods.
    pub methods: Vec<String>,
    /// Number of seeds, from the recipe's on.
    pub seeds: u64,
    /// Whether models and checkpoints of finished runs are kept.
    pub keep_models: bool,
}

impl Plan {
    /// The plan of the comparison in a directory.
    pub fn read(dir: &Path) -> anyhow::Result<Plan> {
        let path = dir.join(PLAN);
        let text = std::fs::read_to_string(&path).map_err(|e| {
            let what = "nothing to resume; leave out --resume to begin a comparison there";
            bad(format!("--resume: {}: {e}: {what}", path.display()))
        })?;
        serde_json::from_str(&text).with_context(|| format!("--resume: {}", path.display())).or_bad()
    }

    /// The same comparison with more methods and seeds, where it was asked for some, and with what is to be
    /// kept.
    pub fn extended(mut self, methods: &[Method], seeds: Option<u64>, keep_models: bool) -> Plan {
        for name in methods.iter().map(|method| method.name()) {
            if !self.methods.contains(&name) {
                self.methods.push(name);
            }
        }
        self.seeds = self.seeds.max(seeds.unwrap_or(1));
        self.keep_models |= keep_models;
        self
    }

    /// An error where another recipe is to continue it.
    pub fn check(&self, recipe: &Recipe, dir: &Path) -> anyhow::Result<()> {
        let name = dir.display();
        let begun = Recipe::parse(&self.recipe, &dir.join(PLAN).display().to_string(), &[]).or_bad()?;
        let Changes { refused, allowed } = Changes::between(&begun, recipe);
        let list: Vec<String> = refused.iter().chain(&allowed).map(|change| format!("  {change}")).collect();
        if list.is_empty() {
            return Ok(());
        }
        let list = list.join("\n");
        Err(bad(format!("--resume: the comparison in {name} was begun with another recipe:\n{list}")))
    }

    /// Its methods.
    pub fn methods(&self) -> anyhow::Result<Vec<Method>> {
        let find = |name: &String| {
            Method::named(name).ok_or_else(|| bad(format!("{PLAN}: {name:?} is the name of no method")))
        };
        self.methods.iter().map(find).collect()
    }

    /// Writes it down.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let path = dir.join(PLAN);
        write_file(&path, &serde_json::to_string_pretty(self)?)
    }
}

/// The directory of a comparison: new, or the one that continues.
pub fn directory(named: Option<&Path>, resume: bool) -> anyhow::Result<PathBuf> {
    let dir = named.map_or_else(|| free_run("compare"), Path::to_path_buf);
    let name = dir.display();
    std::fs::create_dir_all(&dir).map_err(|e| bad(format!("--run {name}: cannot be made: {e}")))?;
    if resume {
        return Ok(dir);
    }
    if dir.join(PLAN).exists() {
        let hint = "choose another directory, or continue it with --resume";
        return Err(bad(format!("--run {name}: there is a comparison already ({PLAN}); {hint}")));
    }
    match something_in(&dir)? {
        Some(found) => Err(bad(format!("--run {name}: holds {found}, expected a new or empty directory"))),
        None => Ok(dir),
    }
}
