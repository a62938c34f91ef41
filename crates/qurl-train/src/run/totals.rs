//! Sums over the steps of a run, those before a restart included: they are taken from the lines of
//! `metrics.jsonl`.

use crate::best::{BestSeen, score_of};
use crate::rl::StepRecord;
use serde_json::Value;
use std::collections::BTreeMap;

/// Sums over the steps of a run.
#[derive(Default)]
pub struct Totals {
    /// Steps.
    pub steps: u64,
    /// Updates that were skipped.
    pub skipped: u64,
    /// Sum of the mismatch KL.
    pub mismatch_kl: f64,
    /// Largest ratio between the policies.
    pub rho_max: f64,
    /// Response tokens.
    pub response_tokens: f64,
    /// Seconds by phase.
    pub seconds: BTreeMap<String, f64>,
    /// The newest greedy test accuracy.
    pub test_accuracy: Option<f64>,
    /// The newest Avg@k.
    pub test_avg_at_k: Option<f64>,
    /// The best evaluation after a step.
    pub best: Option<BestSeen>,
}

impl Totals {
    /// Adds a step.
    pub fn add_record(&mut self, record: &StepRecord) {
        // A record is plain numbers and maps by name: there is nothing in it that JSON does not have.
        self.add(&serde_json::to_value(record).unwrap_or_default());
    }

    /// Adds a step, as a line of `metrics.jsonl` holds it.
    pub fn add(&mut self, record: &Value) {
        let number = |path: &str| record.pointer(path).and_then(Value::as_f64);
        self.steps += 1;
        self.skipped += record["skipped_updates"].as_u64().unwrap_or(0);
        self.response_tokens += number("/response_tokens").unwrap_or(0.0);
        self.mismatch_kl += number("/mismatch/kl").unwrap_or(0.0);
        self.rho_max = self.rho_max.max(number("/mismatch/rho_max").unwrap_or(0.0));
        self.test_accuracy = number("/test_accuracy").or(self.test_accuracy);
        self.test_avg_at_k = number("/test_avg_at_k").or(self.test_avg_at_k);
        if let Some(score) = score_of(record) {
            let step = record["step"].as_u64().unwrap_or(self.steps);
            self.best = Some(BestSeen::or(self.best, step, score));
        }
        for (phase, seconds) in record["timing"].as_object().into_iter().flatten() {
            *self.seconds.entry(phase.clone()).or_default() += seconds.as_f64().unwrap_or(0.0);
        }
    }
}
