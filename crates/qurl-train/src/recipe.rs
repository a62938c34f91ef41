//! Recipes: what a run does, as written in TOML.
//!
//! A recipe is parsed once, with every unknown key refused, and checked before anything is written; what comes out is
//! complete (defaults filled in) and can be written back. Any key can be overridden on the command line by its path,
//! `trainer.seed=7`, before the recipe is parsed.

mod blame;
mod compare;
mod model;
mod rl;
mod sft;
mod task;

pub use compare::{Change, Changes};
pub use model::{ModelSource, NewModel};
pub use rl::{Alarm, AlarmAction, Algorithm, Data, FilterGroups, KlInReward, RlPlan, Rollout, Run, Stage, Updates};
pub use sft::Sft;
pub use task::{DatasetSource, TaskSource, TaskSourceError};

use qurl_kernels::{Device, Format};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Why a recipe cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML, an unknown key, or a value of the wrong type.
    #[error("{file}: {reason}")]
    Parse {
        /// The file.
        file: String,
        /// What the parser said: line, key and what was expected.
        reason: String,
    },
    /// An override that is not `key=value`.
    #[error("--set {found}: {reason}")]
    Override {
        /// As given.
        found: String,
        /// What is wrong.
        reason: String,
    },
    /// A value that is out of range or contradicts another.
    #[error("{file}: key `{key}` is {found}, expected {expected}")]
    Invalid {
        /// The file.
        file: String,
        /// Path of the key.
        key: String,
        /// The value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A section that the command needs is not there.
    #[error("{file}: section `[{section}]` is missing; {why}")]
    Section {
        /// The file.
        file: String,
        /// Name of the section.
        section: &'static str,
        /// What needs it.
        why: &'static str,
    },
}

/// How and where a run computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Trainer {
    /// Everything random follows from it.
    pub seed: u64,
    /// `f32` or `bf16` (with f32 master weights, moments and sums).
    #[serde(with = "format_name")]
    pub compute: Format,
    /// Most tokens of a micro-batch, or one longest sequence where that has more.
    pub micro_tokens: usize,
    /// Keep only the inputs of the blocks and compute them again in the backward pass: less memory, a third more work.
    pub recompute: bool,
    /// Reinforcement learning: a checkpoint every so many steps; 0 for none but the one that Ctrl-C makes.
    pub save_freq: u64,
    /// Newest checkpoints that are kept, at least 1.
    pub keep_last: usize,
    /// Checkpoints with the highest test accuracy that are kept beside them.
    pub keep_best: usize,
    /// Where to compute: `auto` (a GPU if there is one), `cpu` or `cuda`.
    #[serde(with = "device_name")]
    pub device: Device,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            seed: 1,
            compute: Format::Bf16,
            micro_tokens: 2048,
            recompute: false,
            save_freq: 10,
            keep_last: 2,
            keep_best: 1,
            device: Device::Auto,
        }
    }
}

/// A recipe as written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Where the model comes from.
    pub model: ModelSource,
    /// Where problems and rewards come from.
    pub task: TaskSource,
    /// How and where the run computes.
    #[serde(default)]
    pub trainer: Trainer,
    /// Supervised training.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sft: Option<Sft>,
    /// Reinforcement learning: sizes of a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Data>,
    /// How responses are sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// From rewards to the loss.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<Algorithm>,
    /// The actor's updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub actor: Option<Updates>,
    /// The critic's updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub critic: Option<Updates>,
    /// How long, and what is measured on the way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<Run>,
}

impl Recipe {
    /// Reads and checks a file, with overrides `key.path=value`.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Recipe, RecipeError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| RecipeError::Io { file: file.clone(), source })?;
        Recipe::parse(&text, &file, overrides)
    }

    /// Parses and checks a text; `file` names it in errors.
    pub fn parse(text: &str, file: &str, overrides: &[String]) -> Result<Recipe, RecipeError> {
        let parse = |e: toml::de::Error| RecipeError::Parse {
            file: file.to_string(),
            reason: e.to_string().trim_end().to_string(),
        };
        let recipe_of = |text: &str| {
            toml::from_str::<Recipe>(text).map_err(|e| {
                let error_of =
                    |table: &toml::Table| Some(table.clone().try_into::<Recipe>().err()?.message().to_string());
                let key = toml::from_str(text).ok().and_then(|table| blame::key_to_blame(&table, error_of));
                let place = key.map_or(String::new(), |key| format!("key `{key}`: "));
                RecipeError::Parse { file: file.to_string(), reason: format!("{place}{}", e.to_string().trim_end()) }
            })
        };
        let recipe: Recipe = if overrides.is_empty() {
            recipe_of(text)?
        } else {
            let mut table: toml::Table = toml::from_str(text).map_err(parse)?;
            for entry in overrides {
                set(&mut table, entry)?;
            }
            // Parsed again from text, so that errors show the line.
            let text = toml::to_string(&table)
                .map_err(|e| RecipeError::Parse { file: file.to_string(), reason: e.to_string() })?;
            recipe_of(&text)?
        };
        recipe.check(file)?;
        Ok(recipe)
    }

    /// The recipe with all defaults filled in, as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|e| format!("# this recipe cannot be written: {e}\n"))
    }

    fn check(&self, file: &str) -> Result<(), RecipeError> {
        let check = Check { file };
        let micro = self.trainer.micro_tokens;
        check.that("trainer.micro_tokens", micro, (16..=1 << 24).contains(&micro), "16 to 16777216")?;
        let trainable = !self.trainer.compute.is_quantized();
        check.that("trainer.compute", self.trainer.compute, trainable, "f32 or bf16")?;
        let keep_last = self.trainer.keep_last;
        check.that("trainer.keep_last", keep_last, keep_last > 0, "at least 1: a run goes on from the newest")?;
        self.model.check(check)?;
        self.task.check(check)?;
        if let Some(sft) = &self.sft {
            sft.check(check)?;
        }
        let sections = [self.data.is_some(), self.rollout.is_some(), self.algorithm.is_some(), self.actor.is_some()];
        if sections.contains(&true) || self.run.is_some() || self.critic.is_some() {
            self.rl(file)?;
        }
        Ok(())
    }

    /// The checked plan of reinforcement learning; an error where a section is missing.
    pub fn rl(&self, file: &str) -> Result<RlPlan, RecipeError> {
        let missing = |section| {
            let why = "reinforcement learning needs [data], [algorithm], [actor] and [run]";
            RecipeError::Section { file: file.to_string(), section, why }
        };
        let plan = RlPlan {
            data: self.data.clone().ok_or_else(|| missing("data"))?,
            rollout: self.rollout.clone().unwrap_or_default(),
            algorithm: self.algorithm.clone().ok_or_else(|| missing("algorithm"))?,
            actor: self.actor.clone().ok_or_else(|| missing("actor"))?,
            critic: self.critic.clone(),
            run: self.run.clone().ok_or_else(|| missing("run"))?,
            preset_sampling: self.task.preset().map(|p| (p.temperature as f32, p.top_p as f32)),
        };
        plan.check(Check { file })?;
        Ok(plan)
    }
}

/// Writes `Invalid` errors.
#[derive(Clone, Copy)]
pub(crate) struct Check<'a> {
    file: &'a str,
}

impl Check<'_> {
    /// A number of things: at least one, and not so many that it must be a mistake.
    pub(crate) fn size(self, key: &str, found: usize, most: usize) -> Result<(), RecipeError> {
        self.that(key, found, (1..=most).contains(&found), &format!("1 to {most}"))
    }

    pub(crate) fn that(
        self,
        key: &str,
        found: impl std::fmt::Display,
        ok: bool,
        expected: &str,
    ) -> Result<(), RecipeError> {
        if ok {
            return Ok(());
        }
        let (file, key) = (self.file.to_string(), key.to_string());
        Err(RecipeError::Invalid { file, key, found: found.to_string(), expected: expected.to_string() })
    }
}

/// Applies one override. The value is TOML; what is not is taken as a string.
fn set(table: &mut toml::Table, entry: &str) -> Result<(), RecipeError> {
    let wrong = |reason: String| RecipeError::Override { found: entry.to_string(), reason };
    let Some((path, text)) = entry.split_once('=') else {
        return Err(wrong("expected key=value, such as trainer.seed=7".to_string()));
    };
    let keys: Vec<&str> = path.trim().split('.').collect();
    if keys.iter().any(|k| k.is_empty()) {
        return Err(wrong("the key has an empty part".to_string()));
    }
    let value = match toml::from_str::<toml::Table>(&format!("value = {text}")) {
        Ok(mut parsed) => parsed.remove("value").unwrap_or_else(|| toml::Value::String(text.to_string())),
        Err(_) => toml::Value::String(text.trim().to_string()),
    };
    let Some((last, parents)) = keys.split_last() else { return Err(wrong("no key".to_string())) };
    let mut table = table;
    for key in parents {
        let next = table.entry(key.to_string()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        match next {
            toml::Value::Table(next) => table = next,
            _ => return Err(wrong(format!("`{key}` is a value, not a section"))),
        }
    }
    table.insert(last.to_string(), value);
    Ok(())
}

/// A format by its name.
pub(crate) mod format_name {
    use qurl_kernels::Format;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(format: &Format, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(format.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Format, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Devices by their names.
pub(crate) mod device_name {
    use qurl_kernels::Device;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(device: &Device, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(device.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Device, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
