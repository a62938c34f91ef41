//! `[sft]`: supervised training.

use super::{Check, RecipeError};
use crate::optimizer::AdamWOptions;
use crate::schedule::{Decay, Schedule};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Supervised training on files, or on the task's worked solutions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sft {
    /// JSON lines with `prompt` and `response`, or with chat `messages`; none means the task's worked solutions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<PathBuf>,
    /// Updates.
    pub steps: u64,
    /// Sequences per update.
    pub batch_size: usize,
    /// Longest sequence in tokens; longer ones are left out and counted.
    #[serde(default = "Sft::default_max_length")]
    pub max_length: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Steps of linear warm-up.
    #[serde(default)]
    pub warmup_steps: u64,
    /// `constant` or `cosine` after the warm-up.
    #[serde(default)]
    pub decay: Decay,
    /// Where the cosine ends, as a share of the peak.
    #[serde(default)]
    pub min_lr_ratio: f64,
    /// The optimizer.
    #[serde(default)]
    pub optim: AdamWOptions,
    /// Held-out problems that are solved greedily at the end; 0 for none.
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
        check.that("sft.steps", self.steps, self.steps > 0, "at least 1")?;
        check.size("sft.batch_size", self.batch_size, 1 << 20)?;
        let length = self.max_length;
        check.that("sft.max_length", length, (2..=1 << 24).contains(&length), "2 to 16777216")?;
        check.that("sft.lr", self.lr, self.lr.is_finite() && self.lr > 0.0, "a positive number")?;
        let warmup = self.warmup_steps <= self.steps;
        check.that("sft.warmup_steps", self.warmup_steps, warmup, "at most sft.steps")?;
        check.that(
            "sft.min_lr_ratio",
            self.min_lr_ratio,
            (0.0..=1.0).contains(&self.min_lr_ratio),
            "a number from 0 to 1",
        )?;
        self.optim.check(check, "sft.optim")
    }
}

impl AdamWOptions {
    pub(crate) fn check(&self, check: Check, section: &str) -> Result<(), RecipeError> {
        let key = |name: &str| format!("{section}.{name}");
        check.that(&key("beta1"), self.beta1, (0.0..1.0).contains(&self.beta1), "a number from 0 to below 1")?;
        check.that(&key("beta2"), self.beta2, (0.0..1.0).contains(&self.beta2), "a number from 0 to below 1")?;
        check.that(&key("eps"), self.eps, self.eps > 0.0 && self.eps.is_finite(), "a positive number")?;
        let decay = self.weight_decay >= 0.0 && self.weight_decay.is_finite();
        check.that(&key("weight_decay"), self.weight_decay, decay, "0 or a positive number")?;
        check.that(&key("clip_grad"), self.clip_grad, self.clip_grad > 0.0, "a positive number")
    }
}
