//! `[actor]` and `[critic]`: an optimizer and how often it is used.

use crate::optimizer::AdamWOptions;
use crate::recipe::{Check, RecipeError};
use crate::schedule::{Decay, Schedule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[actor]` and `[critic]`: an optimizer and how often it is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Updates {
    /// The learning rate at its peak.
    pub lr: f64,
    /// First steps, over which the learning rate grows to its peak.
    #[serde(default)]
    pub lr_warmup_steps: u64,
    /// What follows the warm-up.
    #[serde(default)]
    pub decay: Decay,
    /// Where the cosine ends, as a share of the peak.
    #[serde(default)]
    pub min_lr_ratio: f64,
    /// Prompts of a mini-batch, each of which makes one update; a divisor of `data.train_batch_size`.
    pub ppo_mini_batch_size: usize,
    /// Passes over the responses of a step.
    #[serde(default = "Updates::one")]
    pub ppo_epochs: usize,
    /// The AdamW optimizer.
    #[serde(default)]
    pub optim: AdamWOptions,
    /// How far a value of the critic may move from its old one in a step; for `[critic]` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cliprange_value: Option<f64>,
}

impl Updates {
    fn one() -> usize {
        1
    }

    /// The learning rate over the steps of a run.
    pub fn schedule(&self, total_steps: u64) -> Schedule {
        Schedule {
            peak: self.lr,
            warmup_steps: self.lr_warmup_steps,
            total_steps,
            decay: self.decay,
            min_lr_ratio: self.min_lr_ratio,
        }
    }

    pub(super) fn check(&self, check: Check, section: &str, batch: usize) -> Result<(), RecipeError> {
        let key = |name: &str| format!("{section}.{name}");
        let mini = self.ppo_mini_batch_size;
        let fits = mini > 0 && mini <= batch && batch.is_multiple_of(mini);
        let expected = format!("a divisor of data.train_batch_size = {batch}");
        check.that(&key("ppo_mini_batch_size"), mini, fits, &expected)?;
        let floor = self.decay == Decay::Cosine || self.min_lr_ratio == 0.0;
        let expected = format!("0 with {section}.decay = \"constant\"");
        check.that(&key("min_lr_ratio"), self.min_lr_ratio, floor, &expected)
    }
}
