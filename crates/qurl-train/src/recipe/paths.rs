//! Paths of a recipe: relative to its file, or to the working directory where the command line gives them.
//!
//! They are made absolute when the recipe is read, so that the recipe in a run's directory means the same
//! files from wherever the run continues.

use super::source::Source;
use super::{Recipe, TaskSource};
use qurl_model::hf::hub;
use qurl_tasks::reward::RewardRule;
use std::path::{Path, PathBuf};

/// For messages about files that are not there.
pub const RELATIVE_TO: &str =
    "paths in a recipe are relative to its directory, those given with --set to the working directory";

impl Recipe {
    /// Makes all paths absolute. An id of the hub becomes the directory of its snapshot, where the local
    /// cache has one.
    pub(super) fn resolve_paths(&mut self, source: &Source) {
        if let Some(path) = &mut self.model.path {
            resolve_model(path, base(source, "model.path"));
        }
        if let Some(path) = self.lora.as_mut().and_then(|lora| lora.path.as_mut()) {
            resolve(std::slice::from_mut(path), base(source, "lora.path"));
        }
        if let Some(task) = &mut self.task {
            resolve_task(task, "task", source);
            for (key, directory) in task.directories() {
                directory
                    .iter_mut()
                    .for_each(|directory| *directory = absolute(base(source, &key), directory));
            }
        }
        if let Some(sft) = &mut self.sft {
            resolve(&mut sft.files, base(source, "sft.files"));
            resolve(&mut sft.validation_files, base(source, "sft.validation_files"));
        }
    }
}

impl TaskSource {
    /// The directories of its reward commands, where they are set or not, by their keys.
    fn directories(&mut self) -> Vec<(String, &mut Option<PathBuf>)> {
        let rules = match self {
            TaskSource::Command { directory, .. } => return vec![("task.directory".to_string(), directory)],
            TaskSource::Synthetic { rewards, .. } => rewards,
            TaskSource::Dataset(source) => &mut source.rewards,
        };
        let of_rule = |(i, rule)| match rule {
            &mut RewardRule::Command { ref mut directory, .. } => {
                Some((format!("task.rewards[{i}].directory"), directory))
            }
            _ => None,
        };
        rules.iter_mut().enumerate().filter_map(of_rule).collect()
    }
}

impl Recipe {
    /// Writes down where reward commands run that no key says it of: a run begins in this directory.
    pub fn begin_in(&mut self, directory: &Path) {
        for (_, of_command) in self.task.iter_mut().flat_map(TaskSource::directories) {
            of_command.get_or_insert_with(|| directory.to_path_buf());
        }
    }

    /// Takes over where the reward commands of a run have run, but for those that say it themselves: the run
    /// continues, wherever that happens.
    pub fn continue_as(&mut self, begun: &Recipe) {
        let Some(mut begun) = begun.task.clone() else { return };
        let begun = begun.directories();
        for (key, of_command) in self.task.iter_mut().flat_map(TaskSource::directories) {
            let known = begun.iter().find(|(other, _)| *other == key);
            let known = known.and_then(|(_, directory)| directory.as_ref());
            *of_command = of_command.take().or_else(|| known.cloned());
        }
    }
}

fn resolve_task(task: &mut TaskSource, section: &str, source: &Source) {
    match task {
        TaskSource::Synthetic { .. } => {}
        TaskSource::Dataset(data) => {
            resolve(&mut data.files, base(source, &format!("{section}.files")));
            resolve(&mut data.test_files, base(source, &format!("{section}.test_files")));
        }
        TaskSource::Command { source: inner, .. } => {
            resolve_task(inner, &format!("{section}.source"), source)
        }
    }
}

/// What the paths of a key are relative to; empty for the working directory.
fn base<'a>(source: &'a Source, key: &str) -> &'a Path {
    match source.override_of(key) {
        Some(_) => Path::new(""),
        None => source.directory(),
    }
}

fn resolve(files: &mut [PathBuf], base: &Path) {
    for file in files {
        *file = absolute(base, file);
    }
}

fn resolve_model(path: &mut PathBuf, base: &Path) {
    let directory = absolute(base, path);
    *path = match hub::id(path).filter(|_| !directory.exists()) {
        Some(id) => hub::cached(id).unwrap_or_else(|| path.clone()),
        None => directory,
    };
}

/// One name for a file, by whatever way it was named: what the way passes through is resolved where it is
/// there.
fn absolute(base: &Path, path: &Path) -> PathBuf {
    let joined = base.join(path);
    let joined = std::path::absolute(&joined).unwrap_or(joined);
    match (joined.parent().and_then(|parent| parent.canonicalize().ok()), joined.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => joined.canonicalize().unwrap_or(joined),
    }
}
