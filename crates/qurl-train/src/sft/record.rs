//! What one step of supervised training did: a line of `metrics.jsonl`, or of a warm start's
//! `warm_start.jsonl`.

use serde::Serialize;
use std::collections::BTreeMap;

/// What one step did. Names that reinforcement learning has, too, mean the same there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SftRecord {
    /// Number of the step, from 1.
    pub step: u64,
    /// How often the files were gone through by its end; none where examples are generated without end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epoch: Option<f64>,
    /// Mean negative log-prob of the learned tokens of the batch, before the update.
    pub loss: f64,
    /// The same of the examples to validate on, after the update, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Updates that were applied, 1 or 0.
    pub updates: u64,
    /// Updates that were skipped because the gradient was not finite.
    pub skipped_updates: u64,
    /// Tokens computed, prompts included.
    pub tokens: usize,
    /// Tokens that the loss counts.
    pub learned_tokens: usize,
    /// Seconds of the phases, and `total`.
    pub timing: BTreeMap<String, f64>,
}

impl SftRecord {
    /// Adds the time of a phase.
    pub fn add_phase(&mut self, name: &str, seconds: f64) {
        for name in [name, "total"] {
            *self.timing.entry(name.to_string()).or_default() += seconds;
        }
    }

    /// Tokens per second of the update.
    pub fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.timing.get("update").copied().unwrap_or(f64::NAN)
    }
}
