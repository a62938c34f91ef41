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
    /// Files of JSON lines with `prompt` and `response`, or with chat `messages`. Without any the task's worked solutions are
    /// learned. Paths are relative to the recipe's directory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
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
    /// Held-out problems that `qurl sft` solves greedily at the end; 0 for none.
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
        check.that("sft.warmup_steps", self.warmup_steps, warmup, &expected)
    }
}
