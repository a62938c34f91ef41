//! Recipes: what a run does, as written in TOML.
//!
//! A recipe is parsed once, with every unknown key refused, and checked before anything is written; what
//! comes out is complete (defaults filled in) and can be written back. Any key can be overridden on the
//! command line by its path, `trainer.seed=7`, before the recipe is parsed.

mod compare;
mod doubts;
mod explain;
mod lora;
mod model;
mod own;
mod paths;
mod ranges;
pub mod reference;
mod rl;
pub(crate) mod schema;
mod sft;
mod source;
mod task;

pub use compare::{Change, Changes};
pub use lora::{LoraSource, TargetModules};
pub use model::{ModelSource, NewModel};
pub use paths::RELATIVE_TO;
pub use rl::{
    Alarm, AlarmAction, Algorithm, Data, FilterGroups, KlInReward, NormNoise, RlPlan, Rollout, Run, Stage,
    Updates, Workers,
};
pub use schema::json_schema;
pub use sft::Sft;
pub use task::{DatasetSource, TaskSource, TaskSourceError};

use qurl_kernels::{DeviceKind, Format};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use source::Source;
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
    /// Not TOML, an unknown or missing key, or a value of the wrong type.
    #[error("{reason}")]
    Parse {
        /// Everything that is wrong, a line each: the place, the key and what was expected.
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
    #[error("{place}: key `{key}` is {found}, expected {expected}")]
    Invalid {
        /// File and line, or the override.
        place: String,
        /// Path of the key.
        key: String,
        /// The value.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// No problem is left.
    #[error("{place}: key `{key}` leaves no problem to {what}: {why}")]
    NothingLeft {
        /// File and line, or the override.
        place: String,
        /// Path of the key.
        key: String,
        /// What the problems would be for.
        what: &'static str,
        /// What took them away.
        why: String,
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Trainer {
    /// Everything random follows from it: the same recipe with the same seed gives the same bits.
    pub seed: u64,
    /// Number format of the training; weights, moments and sums are kept in f32 either way.
    #[serde(with = "format_name")]
    #[schemars(schema_with = "schema::trained_formats")]
    pub compute: Format,
    /// Which weights run the forward passes of reinforcement learning: `full`, or those of the `rollout`.
    pub forward: Forward,
    /// Most tokens that are trained on at once, or one longest sequence where that has more. It bounds
    /// memory; results do not depend on it beyond rounding.
    pub micro_tokens: usize,
    /// Keep only the inputs of the blocks and compute the rest again in the backward pass: less memory, a
    /// third more work.
    pub recompute: bool,
    /// Pack the weights of blocks once, for the forward pass, and unpack a layer's where the backward pass
    /// needs them: 2 bytes a parameter of the blocks less memory in bf16, for a copy of each layer's weights
    /// in every backward pass. It changes no bit.
    #[serde(skip_serializing_if = "is_false")]
    pub pack_once: bool,
    /// Shards that a mini-batch is cut into, a power of two. Each adds up a gradient of its own, and these
    /// are added in a fixed binary tree. A run may have any number of ranks that divides it and has the same
    /// bits with all of them; other shards round otherwise. One rank holds a few gradients more with many
    /// shards.
    pub shards: usize,
    /// What several ranks divide among them, by ZeRO's stages: 1 for master weights and moments; 3 for
    /// gradients and the weights packed for training, too, which are then gathered block by block in every
    /// pass. It changes no bit. With 3, shards that are one micro-batch each take the least memory.
    pub zero_stage: usize,
    /// Write a checkpoint every so many steps; 0 for none but the one that Ctrl-C makes. A warm start writes
    /// none.
    pub save_freq: u64,
    /// Most memory of the device that a run may take, in MiB, with the driver's share: a run whose plan needs
    /// more is refused, as one that the device does not hold. By default all that is free. On a CPU it is the
    /// machine's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_budget_mb: Option<usize>,
    /// How many of the newest checkpoints are kept; a run resumes from the newest.
    pub keep_last: usize,
    /// How many of the checkpoints with the highest test accuracy are kept beside them, or in supervised
    /// training with the lowest validation loss.
    pub keep_best: usize,
    /// Where to compute; `auto` is a GPU if there is one, else the CPU.
    #[serde(with = "device_name")]
    #[schemars(schema_with = "schema::devices")]
    pub device: DeviceKind,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            seed: 1,
            compute: Format::Bf16,
            forward: Forward::Full,
            micro_tokens: 2048,
            recompute: false,
            pack_once: false,
            shards: 1,
            zero_stage: 1,
            save_freq: 10,
            memory_budget_mb: None,
            keep_last: 2,
            keep_best: 1,
            device: DeviceKind::Auto,
        }
    }
}

/// For keys that are written only where they are set.
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

/// The weights that run the forward passes of reinforcement learning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Forward {
    /// Those of `trainer.compute`: the rollout's quantization is corrected for by the objective.
    #[default]
    Full,
    /// The engine's own packed weights, in `rollout.format` with the head and the cache of keys and values as
    /// the engine has them. Gradients go straight through the rounding to the weights in `trainer.compute`.
    /// The policy that samples is then the policy that is trained, to the bit, nothing is left to correct
    /// for, and scoring is as fast as prefill. After each update the weights are packed again. Held-out
    /// problems are solved by these weights, too: it is the quantized model that gets better.
    Rollout,
}

/// A recipe as written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    /// Where the model comes from.
    pub model: ModelSource,
    /// Low-rank adapters are trained beside the frozen model, instead of the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraSource>,
    /// Where problems and rewards come from. Supervised training on files of its own (`sft.files`) needs
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskSource>,
    /// How and where the run computes.
    #[serde(default)]
    pub trainer: Trainer,
    /// Supervised training: what `qurl sft` does, and the warm start of `qurl train`.
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
    /// Where the values stand; for messages.
    #[serde(skip)]
    source: Source,
}

/// Bytes of a recipe's file.
const MAX_FILE: u64 = 4 * qurl_files::MIB;

impl Recipe {
    /// Reads and checks a file, with overrides `key.path=value`. Paths in the file are relative to its
    /// directory, those in overrides to the working directory.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Recipe, RecipeError> {
        let file = path.display().to_string();
        let text = qurl_files::read_text(path, MAX_FILE)
            .map_err(|source| RecipeError::Io { file: file.clone(), source })?;
        Recipe::parse_in(&text, &file, path.parent().unwrap_or(Path::new("")), overrides)
    }

    /// Parses and checks a text; `file` names it in errors. Paths in it are relative to the working
    /// directory.
    pub fn parse(text: &str, file: &str, overrides: &[String]) -> Result<Recipe, RecipeError> {
        Recipe::parse_in(text, file, Path::new(""), overrides)
    }

    fn parse_in(
        text: &str,
        file: &str,
        directory: &Path,
        overrides: &[String],
    ) -> Result<Recipe, RecipeError> {
        let mut table: toml::Table = toml::from_str(text).map_err(|error| not_toml(text, file, &error))?;
        let mut source = Source::new(file, text, directory);
        for entry in overrides {
            source.set(&set(&mut table, entry)?, entry);
        }
        let mut recipe: Recipe = table.clone().try_into().map_err(|error: toml::de::Error| {
            let reason =
                explain::explain(&table, &source).unwrap_or_else(|| format!("{file}: {}", error.message()));
            RecipeError::Parse { reason }
        })?;
        recipe.resolve_paths(&source);
        recipe.source = source;
        recipe.check(file)?;
        Ok(recipe)
    }

    /// The name of what it was read from.
    pub fn file(&self) -> &str {
        self.source.file()
    }

    /// Where a key was set: the line of the file, or the override.
    pub fn place(&self, file: &str, key: &str) -> String {
        self.source.place(file, key)
    }

    /// The recipe with all defaults filled in, as TOML.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).unwrap_or_else(|e| format!("# this recipe cannot be written: {e}\n"))
    }

    fn check(&self, file: &str) -> Result<(), RecipeError> {
        let check = Check { file, source: &self.source };
        self.check_ranges(check)?;
        let trainable = !self.trainer.compute.is_quantized();
        check.that("trainer.compute", self.trainer.compute, trainable, "f32 or bf16")?;
        self.check_forward(check)?;
        let shards = self.trainer.shards;
        check.that("trainer.shards", shards, shards.is_power_of_two(), "a power of two: 1, 2, 4, 8, ...")?;
        let stage = self.trainer.zero_stage;
        check.that("trainer.zero_stage", stage, [1, 3].contains(&stage), "1 or 3")?;
        let expected = "1, since the base of adapters is frozen and held whole by every rank";
        check.that("trainer.zero_stage", stage, stage == 1 || self.lora.is_none(), expected)?;
        self.model.check(check)?;
        self.check_lora(check)?;
        if let Some(task) = &self.task {
            task.check(check)?;
        }
        if let Some(sft) = &self.sft {
            sft.check(check)?;
        }
        let sections =
            [self.data.is_some(), self.rollout.is_some(), self.algorithm.is_some(), self.actor.is_some()];
        if sections.contains(&true) || self.run.is_some() || self.critic.is_some() {
            self.rl(file)?;
        }
        Ok(())
    }

    /// A forward pass of the rollout's weights goes with gradients in bf16 alone: what is kept for them is.
    fn check_forward(&self, check: Check) -> Result<(), RecipeError> {
        if self.trainer.forward == Forward::Full {
            return Ok(());
        }
        let stage = self.trainer.zero_stage;
        let expected = "1, since blocks that come one at a time cannot be run by the rollout's weights; or \
                        trainer.forward = \"full\"";
        check.that("trainer.zero_stage", stage, stage == 1, expected)?;
        let compute = self.trainer.compute;
        let expected = "bf16, which trainer.forward = \"rollout\" computes gradients in";
        check.that("trainer.compute", compute, compute == Format::Bf16, expected)?;
        let format = self.rollout.as_ref().map_or(Rollout::default().format, |r| r.format);
        let expected =
            "a format below f32: with trainer.forward = \"rollout\" gradients are computed in bf16";
        check.that("rollout.format", format, format != Format::F32, expected)?;
        let expected =
            "full: with [lora] the engine's base and adapters run the trainer's forward passes anyway";
        check.that("trainer.forward", "rollout", self.lora.is_none(), expected)?;
        let noisy = self.rollout.as_ref().is_some_and(|r| r.norm_noise.is_some());
        let expected = "no section with trainer.forward = \"rollout\": the noise is on the rollouts only, \
                        and here their weights train, too";
        check.that("rollout.norm_noise", "there", !noisy, expected)?;
        let lag = self.rollout.as_ref().map_or(0, |r| r.lag);
        let expected =
            "0: with trainer.forward = \"rollout\" the engine's weights are those that are trained";
        check.that("rollout.lag", lag, lag == 0, expected)
    }

    fn check_ranges(&self, check: Check) -> Result<(), RecipeError> {
        let reason =
            |error: toml::ser::Error| RecipeError::Parse { reason: format!("{}: {error}", check.file) };
        ranges::check(&toml::Table::try_from(self).map_err(reason)?, check)
    }

    /// Most bytes of the device's memory that a run may take, where there is a limit.
    pub fn memory_budget(&self) -> Option<usize> {
        self.trainer.memory_budget_mb.map(|megabytes| megabytes << 20)
    }

    /// `[task]`; an error where it is missing.
    pub fn task(&self) -> Result<&TaskSource, RecipeError> {
        let (file, section, why) = (self.file().to_string(), "task", RL_NEEDS);
        self.task.as_ref().ok_or(RecipeError::Section { file, section, why })
    }

    /// The recipe of `qurl sft`: what says nothing about supervised training is left out. An error where
    /// `[sft]` is missing.
    pub fn for_sft(&self) -> Result<(Recipe, Sft), RecipeError> {
        let (file, section, why) = (self.file().to_string(), "sft", "`qurl sft` trains by it");
        let sft = self.sft.clone().ok_or(RecipeError::Section { file, section, why })?;
        let only = Recipe {
            data: None,
            rollout: None,
            algorithm: None,
            actor: None,
            critic: None,
            run: None,
            ..self.clone()
        };
        Ok((only, sft))
    }

    /// The checked plan of reinforcement learning; an error where a section is missing. `[task]` may be: a
    /// program can bring a task of its own.
    pub fn rl(&self, file: &str) -> Result<RlPlan, RecipeError> {
        let missing = |section| RecipeError::Section { file: file.to_string(), section, why: RL_NEEDS };
        let preset = self.task.as_ref().and_then(TaskSource::preset);
        let check = Check { file, source: &self.source };
        self.check_ranges(check)?;
        let plan = RlPlan {
            data: self.data.clone().ok_or_else(|| missing("data"))?,
            rollout: self.rollout.clone().unwrap_or_default(),
            algorithm: self.algorithm.clone().ok_or_else(|| missing("algorithm"))?,
            actor: self.actor.clone().ok_or_else(|| missing("actor"))?,
            critic: self.critic.clone(),
            run: self.run.clone().ok_or_else(|| missing("run"))?,
            preset_sampling: preset.map(|p| (p.temperature as f32, p.top_p as f32)),
        };
        plan.check(check)?;
        Ok(plan)
    }
}

/// What is said where a section of reinforcement learning is missing.
const RL_NEEDS: &str = "reinforcement learning needs [task], [data], [algorithm], [actor] and [run]";

/// What is wrong with a text that is no TOML, and where.
fn not_toml(text: &str, file: &str, error: &toml::de::Error) -> RecipeError {
    let at = error.span().map_or(0, |span| span.start.min(text.len()));
    let before = text.get(..at).unwrap_or_default();
    let (line, column) =
        (before.matches('\n').count() + 1, before.rsplit('\n').next().unwrap_or("").chars().count() + 1);
    let reason = error.message().trim_end().replace('\n', "; ");
    RecipeError::Parse { reason: format!("{file}, line {line}, column {column}: not TOML: {reason}") }
}

/// Writes `Invalid` errors.
#[derive(Clone, Copy)]
pub(crate) struct Check<'a> {
    file: &'a str,
    source: &'a Source,
}

impl Check<'_> {
    /// Refuses a value unless it is `ok`.
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
        let (place, key) = (self.source.place(self.file, key), key.to_string());
        Err(RecipeError::Invalid { place, key, found: found.to_string(), expected: expected.to_string() })
    }

    /// Refuses a name that is none of the known ones.
    pub(crate) fn name(self, key: &str, given: &str, known: &[&str]) -> Result<(), RecipeError> {
        self.that(key, format!("{given:?}"), known.contains(&given), &explain::one_of(known, given))
    }
}

/// The two parts of `rewards[0]`.
fn place_of_list(key: &str) -> Option<(&str, usize)> {
    let (list, place) = key.strip_suffix(']')?.split_once('[')?;
    Some((list, place.parse().ok()?))
}

/// An entry of a list that is there.
fn entry_of<'a>(table: &'a mut toml::Table, list: &str, place: usize) -> Result<&'a mut toml::Value, String> {
    let Some(toml::Value::Array(entries)) = table.get_mut(list) else {
        return Err(format!("there is no list `{list}`; set all of it"));
    };
    let count = entries.len();
    entries
        .get_mut(place)
        .ok_or_else(|| format!("`{list}` has {count} entries, the first of them `{list}[0]`"))
}

/// Applies one override and gives its key. The value is TOML; what is not is taken as a string.
fn set(table: &mut toml::Table, entry: &str) -> Result<String, RecipeError> {
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
        let next = match place_of_list(key) {
            Some((list, place)) => entry_of(table, list, place).map_err(wrong)?,
            None => table.entry(key.to_string()).or_insert_with(|| toml::Value::Table(toml::Table::new())),
        };
        match next {
            toml::Value::Table(next) => table = next,
            toml::Value::Array(_) => {
                return Err(wrong(format!("`{key}` is a list; `{key}[0]` is its first entry")));
            }
            _ => return Err(wrong(format!("`{key}` is a value, not a section"))),
        }
    }
    match place_of_list(last) {
        Some((list, place)) => *entry_of(table, list, place).map_err(wrong)? = value,
        None => _ = table.insert(last.to_string(), value),
    }
    let key = path.trim().to_string();
    if key == "model.path" {
        table.remove("new"); // a model in place of a new one
    }
    Ok(key)
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
    use qurl_kernels::DeviceKind;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(device: &DeviceKind, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(device.name())
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<DeviceKind, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests;
