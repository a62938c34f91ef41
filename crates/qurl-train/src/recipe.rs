//! Recipes: what a run does, as written in TOML.
//!
//! A recipe is parsed once, with every unknown key refused, and checked before anything is written; what
//! comes out is complete (defaults filled in) and can be written back. Any key can be overridden on the
//! command line by its path, `trainer.seed=7`, before the recipe is parsed.

mod compare;
mod doubts;
mod error;
mod explain;
mod lora;
mod model;
mod names;
mod overrides;
mod own;
mod paths;
mod ranges;
pub mod reference;
mod rl;
pub(crate) mod schema;
mod sft;
mod source;
mod task;
mod trainer;

pub use compare::{Change, Changes};
pub use error::RecipeError;
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
pub use trainer::{Forward, Trainer};

pub(crate) use error::Check;
pub(crate) use names::{device_name, format_name, recompute_name};
pub(crate) use trainer::is_false;

use crate::memory::DRIVER_RESERVE;
use qurl_kernels::device::MemoryLimit;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use source::Source;
use std::path::Path;

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
            source.set(&overrides::set(&mut table, entry)?, entry);
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

    /// Checks a recipe that a program has changed, as it is checked when it is read.
    pub fn checked(self) -> Result<Recipe, RecipeError> {
        self.check(self.file())?;
        Ok(self)
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

    fn check_ranges(&self, check: Check) -> Result<(), RecipeError> {
        let reason =
            |error: toml::ser::Error| RecipeError::Parse { reason: format!("{}: {error}", check.file) };
        ranges::check(&toml::Table::try_from(self).map_err(reason)?, check)
    }

    /// Most bytes of the device's memory that a run may take, where there is a limit.
    pub fn memory_budget(&self) -> Option<usize> {
        self.trainer.memory_budget_mb.map(|megabytes| megabytes << 20)
    }

    /// What a run may allocate by that on a device with memory of its own: the driver has its share, too.
    pub fn memory_limit(&self) -> Option<MemoryLimit> {
        let bytes = self.memory_budget()?.saturating_sub(DRIVER_RESERVE);
        Some(MemoryLimit { bytes, set_by: "trainer.memory_budget_mb" })
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

#[cfg(test)]
mod tests;
