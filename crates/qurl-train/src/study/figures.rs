//! What a run of a study gave, from the files in its directory.

use crate::compare::RunFigures;
use crate::rl::Tested;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// What can be compared.
pub const METRICS: [&str; 14] = [
    "accuracy_before",
    "accuracy_final",
    "accuracy_best",
    "accuracy_drop",
    "accuracy_late",
    "avg_at_k_final",
    "broken",
    "clip_fraction",
    "flipped_codes",
    "mismatch_kl",
    "mismatch_kl_max",
    "rejected_fraction",
    "reward",
    "rho_max",
];

/// Figures that have a value at each step, and where the lines of `metrics.jsonl` have them.
const SERIES: [(&str, &str); 7] = [
    ("mismatch_kl", "/mismatch/kl"),
    ("rho_max", "/mismatch/rho_max"),
    ("reward", "/reward"),
    ("flipped_codes", "/flipped_codes/total"),
    ("rejected_fraction", "/rejected_fraction"),
    ("clip_fraction", "/clip_fraction_upper"),
    ("accuracy_late", "/test_accuracy"),
];

/// What one run gave.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CellFigures {
    /// By the names of [`METRICS`]; those that were not measured are not there.
    pub values: BTreeMap<String, f64>,
    /// Mean over the last quarter of a run less that over its first, where there are values at its steps.
    pub growth: BTreeMap<String, f64>,
    /// Steps after which the held-out accuracy was measured, and what it was; that before the first too.
    pub tests: Vec<(u64, f64)>,
}

impl CellFigures {
    /// Of a run with this summary and these lines of `metrics.jsonl`; nothing where the run is not over.
    pub fn of(summary: &Value, records: &[Value]) -> Option<CellFigures> {
        summary.get("accuracy_after").or(summary.get("broken"))?;
        let number = |key: &str| summary.get(key).and_then(Value::as_f64);
        let before = number("accuracy_before")?;
        let tested = Tested { accuracy: before, reward: None, avg_at_k: number("avg_at_k_before") };
        let broken_at = summary.get("broken_at").and_then(Value::as_u64);
        let run = RunFigures::of(tested, records, broken_at);
        let mut values: BTreeMap<String, f64> = [
            ("accuracy_before", run.accuracy_before),
            ("accuracy_final", run.accuracy_final),
            ("accuracy_best", run.accuracy_best),
            ("accuracy_drop", run.accuracy_best - run.accuracy_final),
            ("broken", f64::from(u8::from(run.broken_at.is_some()))),
            ("clip_fraction", run.clip_fraction),
            ("mismatch_kl", run.mismatch_kl),
            ("mismatch_kl_max", run.mismatch_kl_max),
            ("rho_max", run.rho_max),
        ]
        .map(|(key, value)| (key.to_string(), value))
        .into();
        values.extend(run.avg_at_k_final.map(|value| ("avg_at_k_final".to_string(), value)));
        let mut growth = BTreeMap::new();
        for (name, path) in SERIES {
            let series: Vec<f64> =
                records.iter().filter_map(|line| line.pointer(path).and_then(Value::as_f64)).collect();
            let Some((early, late)) = quarters(&series) else { continue };
            growth.insert(name.to_string(), late - early);
            // The mean of the last quarter where a run has no figure of its own.
            let whole = || series.iter().fold(0.0, |sum, x| sum + x) / series.len() as f64;
            let value = if matches!(name, "accuracy_late" | "reward") { late } else { whole() };
            values.entry(name.to_string()).or_insert(value);
        }
        let test = |line: &Value| Some((line["step"].as_u64()?, line["test_accuracy"].as_f64()?));
        let tests = std::iter::once((0, before)).chain(records.iter().filter_map(test)).collect();
        Some(CellFigures { values, growth, tests })
    }

    /// A figure, where it was measured.
    pub fn get(&self, metric: &str) -> Option<f64> {
        self.values.get(metric).copied()
    }

    /// By how much a figure grew over the run, where it has a value at its steps.
    pub fn growth(&self, metric: &str) -> Option<f64> {
        self.growth.get(metric).copied()
    }
}

/// Means of the first and the last quarter; nothing of nothing.
fn quarters(series: &[f64]) -> Option<(f64, f64)> {
    let quarter = series.len().div_ceil(4);
    let mean = |part: &[f64]| part.iter().fold(0.0, |sum, x| sum + x) / part.len() as f64;
    (quarter > 0).then(|| (mean(&series[..quarter]), mean(&series[series.len() - quarter..])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_are_those_of_the_files() {
        let line = |step: u64, kl: f64, test: Option<f64>| {
            let mut line = json!({"step": step, "reward": 0.5, "mismatch": {"kl": kl, "rho_max": 2.0},
                                  "clip_fraction_upper": 0.0, "clip_fraction_lower": 0.0});
            if let Some(test) = test {
                line["test_accuracy"] = test.into();
            }
            line
        };
        let lines: Vec<Value> =
            (1..=8).map(|s| line(s, s as f64, (s % 4 == 0).then_some(s as f64))).collect();
        let summary = json!({"accuracy_before": 0.25, "accuracy_after": 8.0});
        let figures = CellFigures::of(&summary, &lines).expect("a run that is over");
        assert_eq!(figures.get("mismatch_kl"), Some(4.5));
        assert_eq!(figures.growth("mismatch_kl"), Some(7.5 - 1.5));
        assert_eq!((figures.get("accuracy_final"), figures.get("accuracy_late")), (Some(8.0), Some(8.0)));
        assert_eq!((figures.get("accuracy_drop"), figures.get("broken")), (Some(0.0), Some(0.0)));
        assert_eq!(figures.get("flipped_codes"), None);
        assert_eq!(figures.tests, [(0, 0.25), (4, 4.0), (8, 8.0)]);
        assert_eq!(CellFigures::of(&json!({"accuracy_before": 0.25}), &lines), None, "still running");
        let broken = json!({"accuracy_before": 0.25, "broken": "x", "broken_at": 8});
        assert_eq!(CellFigures::of(&broken, &lines).expect("over").get("broken"), Some(1.0));
    }
}
