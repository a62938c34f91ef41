//! What is tried: for each target its seeds and what is done with an input.

mod answers;
mod checkpoints;
mod data;
mod models;
mod recipes;
mod requests;

use crate::input::{self, Input};
use std::error::Error;
use std::path::{Path, PathBuf};

/// Does what a target does with an input; whether it was accepted.
pub type Run = Box<dyn FnMut(&Input) -> bool>;

/// Good inputs, or why they could not be made.
pub type Made = Result<Vec<Input>, Box<dyn Error>>;

/// One thing that reads what others made.
pub struct Target {
    /// On the command line, and of the folders of its inputs.
    pub name: &'static str,
    /// What is read, for the help.
    pub about: &'static str,
    /// Words that mean something there.
    pub words: &'static [&'static str],
    /// Good inputs that are made, beside those in `corpus`. They may use an empty folder.
    pub made: fn(&Path) -> Made,
    /// Prepares what inputs are tried on, with an empty folder.
    pub open: fn(&Path) -> Result<Run, Box<dyn Error>>,
}

/// All of them.
pub static TARGETS: [Target; 8] = [
    models::TOKENIZER,
    models::TEMPLATE,
    models::MODEL,
    recipes::RECIPE,
    data::DATA,
    checkpoints::CHECKPOINT,
    requests::HTTP,
    answers::GRADER,
];

/// A target by its name.
pub fn find(name: &str) -> Result<&'static Target, String> {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    let found = TARGETS.iter().find(|target| target.name == name);
    found.ok_or_else(|| format!("no target '{name}'; there are {}", names.join(", ")))
}

/// The seeds of a target: what it makes, its folders in `corpus`, and in `regressions` the inputs that once
/// failed. The first inputs of a run are the seeds themselves.
pub fn seeds(target: &Target, scratch: &Path) -> Result<Vec<Input>, Box<dyn Error>> {
    let folder = scratch.join("seeds");
    std::fs::create_dir_all(&folder)?;
    let mut seeds = (target.made)(&folder)?;
    std::fs::remove_dir_all(&folder)?;
    for place in ["corpus", "regressions"] {
        let folder = package().join(place).join(target.name);
        if folder.is_dir() {
            seeds.extend(input::folders(&folder)?);
        }
    }
    Ok(seeds)
}

/// The folder of this package, as it was where it was built.
fn package() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}
