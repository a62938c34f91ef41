//! Reads a run's directory, and again what has been added to it since.
//!
//! `metrics.jsonl` grows a line a step, so only its end is read again. A run that is resumed cuts lines off
//! and writes others: that is noticed because the last line that was read is no longer where it was, and the
//! file is read anew.

use super::rollouts::{self, StepRollouts};
use super::{RunData, Steps};
use anyhow::Context;
use serde_json::Value;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

/// What a look at the files brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The first step (counted from 0) that is new.
    pub steps_from: Option<usize>,
    /// Settings, summary or warm start.
    pub about: bool,
    /// Sampled responses.
    pub rollouts: bool,
}

/// Follows the files of one run.
pub struct Follower {
    metrics: Tail,
    warm_start: Tail,
    recipe: String,
    summary: String,
    rollout_files: Vec<(u64, u64)>,
    run: RunData,
}

impl Follower {
    /// Follows the run in `dir`, of which nothing is read yet. The directory need not be there: the run may
    /// begin later.
    pub fn new(dir: &Path) -> Follower {
        let label =
            dir.file_name().map_or_else(|| "run".to_string(), |name| name.to_string_lossy().into_owned());
        Follower {
            metrics: Tail::default(),
            warm_start: Tail::default(),
            recipe: String::new(),
            summary: String::new(),
            rollout_files: Vec::new(),
            run: RunData { dir: dir.to_path_buf(), label, ..RunData::default() },
        }
    }

    /// The run, to be named among others.
    pub fn run_mut(&mut self) -> &mut RunData {
        &mut self.run
    }

    /// The run as far as it has been read.
    pub fn run(&self) -> &RunData {
        &self.run
    }

    /// The run as far as it has been read.
    pub fn into_run(self) -> RunData {
        self.run
    }

    /// Reads what is new.
    pub fn poll(&mut self) -> anyhow::Result<Change> {
        let steps_from = self.read_metrics()?;
        // A warm start is over before the first step, and small: what is new of it is sent with all that is
        // known.
        let about = self.read_warm_start()? | self.read_about()?;
        let rollouts = self.read_rollouts()?;
        Ok(Change { steps_from, about, rollouts })
    }

    fn read_metrics(&mut self) -> anyhow::Result<Option<usize>> {
        let path = self.run.dir.join("metrics.jsonl");
        let (lines, anew) =
            self.metrics.read(&path).with_context(|| format!("reading {}", path.display()))?;
        let mut first = None;
        if anew {
            self.run.steps = Steps::default();
            self.run.warnings.clear();
            first = Some(0);
        }
        for (number, line) in lines {
            let kept =
                serde_json::from_str::<Value>(&line).ok().and_then(|record| self.run.steps.push(&record));
            match kept {
                Some(kept) => first = Some(first.map_or(kept, |first: usize| first.min(kept))),
                None => {
                    let what = "is not the record of a step and was passed over";
                    self.run
                        .warnings
                        .push(format!("{}: metrics.jsonl, line {number} {what}", self.run.label));
                }
            }
        }
        Ok(first)
    }

    /// Reads what is new of the warm start; whether there is anything.
    fn read_warm_start(&mut self) -> anyhow::Result<bool> {
        let path = self.run.dir.join("warm_start.jsonl");
        let (lines, anew) =
            self.warm_start.read(&path).with_context(|| format!("reading {}", path.display()))?;
        if anew {
            self.run.warm = Steps::default();
        }
        for (_, line) in &lines {
            if let Ok(record) = serde_json::from_str::<Value>(line) {
                self.run.warm.push(&record);
            }
        }
        Ok(anew || !lines.is_empty())
    }

    fn read_about(&mut self) -> anyhow::Result<bool> {
        let mut changed = false;
        let recipe = read_if_there(&self.run.dir.join("recipe.toml"))?;
        if recipe != self.recipe {
            self.run.settings = settings(&recipe);
            self.recipe = recipe;
            changed = true;
        }
        let summary = read_if_there(&self.run.dir.join("summary.json"))?;
        // While it is being written it is not JSON: the next look will find it whole.
        if summary != self.summary
            && let Ok(Value::Object(object)) = serde_json::from_str(&summary)
        {
            self.run.summary = object;
            self.summary = summary;
            changed = true;
        }
        Ok(changed)
    }

    fn read_rollouts(&mut self) -> anyhow::Result<bool> {
        let dir = self.run.dir.join("rollouts");
        let files = rollouts::list(&dir).with_context(|| format!("reading {}", dir.display()))?;
        if files == self.rollout_files {
            return Ok(false);
        }
        let rollouts: Vec<StepRollouts> = rollouts::choose(&files)
            .into_iter()
            .map(|step| rollouts::read(&dir, step))
            .filter_map(Result::ok) // a file that went away since it was listed
            .filter(|step| !step.samples.is_empty())
            .collect();
        self.rollout_files = files;
        self.run.rollouts = rollouts;
        Ok(true)
    }
}

fn read_if_there(path: &Path) -> anyhow::Result<String> {
    match qurl_files::read(path, 64 * qurl_files::MIB) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(String::new()),
        Err(e) => Err(e).with_context(|| format!("reading {}", path.display())),
    }
}

/// The keys of a recipe with their values, flat; within a section its own keys come before those of its
/// parts.
fn settings(recipe: &str) -> Vec<(String, String)> {
    fn flatten(prefix: &str, table: &toml::Table, out: &mut Vec<(String, String)>) {
        let (parts, own): (Vec<_>, Vec<_>) = table.iter().partition(|(_, value)| value.is_table());
        for (key, value) in own.into_iter().chain(parts) {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                toml::Value::Table(table) => flatten(&path, table, out),
                toml::Value::String(text) => out.push((path, text.clone())),
                other => out.push((path, other.to_string())),
            }
        }
    }
    let mut out = Vec::new();
    if let Ok(table) = toml::from_str::<toml::Table>(recipe) {
        flatten("", &table, &mut out);
    }
    out
}

/// The end of a growing file of lines.
#[derive(Default)]
struct Tail {
    offset: u64,
    lines: usize,
    last_line: Vec<u8>,
}

impl Tail {
    /// The whole lines since the last look with their numbers, and whether the file was read from its
    /// beginning although some of it had been read before.
    fn read(&mut self, path: &Path) -> std::io::Result<(Vec<(usize, String)>, bool)> {
        let mut file = match qurl_files::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => {
                let anew = self.offset > 0;
                *self = Tail::default();
                return Ok((Vec::new(), anew));
            }
            Err(e) => return Err(e),
        };
        let anew = self.offset > 0 && !self.still_there(&mut file)?;
        if anew {
            *self = Tail::default();
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let mut lines = Vec::new();
        for line in bytes.split_inclusive(|&b| b == b'\n').filter(|line| line.ends_with(b"\n")) {
            self.offset += line.len() as u64;
            self.lines += 1;
            self.last_line = line.to_vec();
            let text = String::from_utf8_lossy(line);
            if !text.trim().is_empty() {
                lines.push((self.lines, text.trim().to_string()));
            }
        }
        Ok((lines, anew))
    }

    /// Whether the line that was read last is where it was.
    fn still_there(&self, file: &mut File) -> std::io::Result<bool> {
        file.seek(SeekFrom::Start(self.offset - self.last_line.len() as u64))?;
        let mut found = Vec::new();
        file.by_ref().take(self.last_line.len() as u64).read_to_end(&mut found)?;
        Ok(found == self.last_line)
    }
}
