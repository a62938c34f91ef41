//! `[sft]`: supervised training.

use super::{Check, RecipeError};
use crate::optimizer::AdamWOptions;
use crate::schedule::{Decay, Schedule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Supervised training on files, or on the task's worked solutions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sft {
    /// Files of examples: `.jsonl`, `.jsonl.gz` or `.parquet`. A row has `messages`, or `prompt` and
    /// `response` (or `completion`), or `instruction`, `input` and `output`; only what the model is to say is
    /// learned (docs/sft.md). Without any the task's worked solutions are learned. Paths are relative to the
    /// recipe's directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// Files of examples to take the validation loss on; examples of theirs are left out of `sft.files`, and
    /// it is said how many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub validation_files: Vec<PathBuf>,
    /// Share of the examples of `sft.files` that the validation loss is taken on instead of learned, where
    /// there are no `sft.validation_files`.
    #[serde(default)]
    pub held_out: f64,
    /// Take the validation loss every so many steps, beside before the first and after the last; 0 for these
    /// only.
    #[serde(default = "Sft::default_validation_freq")]
    pub validation_freq: u64,
    /// Number of updates.
    pub steps: u64,
    /// Sequences of an update.
    pub batch_size: usize,
    /// The longest sequence in tokens; longer ones are left out, and it is said how many.
    #[serde(default = "Sft::default_max_length")]
    pub max_length: usize,
    /// The learning rate at its peak.
    pub lr: f64,
    /// First steps, over which the learning rate grows to its peak.
    #[serde(default)]
    pub warmup_steps: u64,
    /// What follows the warm-up.
    #[serde(default)]
    pub decay: Decay,
    /// Where the cosine ends, as a share of `sft.lr`.
    #[serde(default)]
    pub min_lr_ratio: f64,
    /// The AdamW optimizer.
    #[serde(default)]
    pub optim: AdamWOptions,
    /// Held-out problems of the task that `qurl sft` solves greedily at the end; 0 for none. Without
    /// `sft.files` the validation loss is that of their worked solutions.
    #[serde(default = "Sft::default_test_problems")]
    pub test_problems: u64,
}

impl Sft {
    fn default_max_length() -> usize {
        1024
    }

    fn default_test_problems() -> u64 {
        200
    }

    fn default_validation_freq() -> u64 {
        50
    }

    /// Bytes of the tensors of a checkpoint of a model with so many parameters: weights and moments in f32.
    pub fn checkpoint_bytes(&self, parameters: u64) -> u64 {
        4 * 3 * parameters
    }

    /// Whether the validation loss is taken after this step.
    pub fn validates_at(&self, step: u64) -> bool {
        step == self.steps || (self.validation_freq > 0 && step.is_multiple_of(self.validation_freq))
    }

    /// The learning rate over the steps.
    pub fn schedule(&self) -> Schedule {
        Schedule {
            peak: self.lr,
            warmup_steps: self.warmup_steps,
            total_steps: self.steps,
            decay: self.decay,
            min_lr_ratio: self.min_lr_ratio,
        }
    }

    pub(crate) fn check(&self, check: Check) -> Result<(), RecipeError> {
        let warmup = self.warmup_steps <= self.steps;
        let expected = format!("at most sft.steps = {}", self.steps);
        check.that("sft.warmup_steps", self.warmup_steps, warmup, &expected)?;
        let (ratio, floor) = (self.min_lr_ratio, self.decay == Decay::Cosine);
        let expected = "0 with sft.decay = \"constant\"";
        check.that("sft.min_lr_ratio", ratio, floor || ratio == 0.0, expected)?;
        let one = self.held_out == 0.0 || self.validation_files.is_empty();
        check.that("sft.held_out", self.held_out, one, "0 where there are sft.validation_files")?;
        let of_files = self.files.is_empty() && (self.held_out > 0.0 || !self.validation_files.is_empty());
        check.that(
            "sft.files",
            "empty",
            !of_files,
            "files where there is sft.validation_files or sft.held_out",
        )
    }
}
