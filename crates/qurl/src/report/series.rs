//! The figures of all steps as columns, read line by line from `metrics.jsonl`.
//!
//! Lines are taken as they are: every number becomes a column with the path of its keys for a name
//! (`mismatch.kl`), also one that this version does not know, and one that is missing leaves a gap. Six
//! significant digits are kept, so that thousands of steps make a small page.

use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Figures that are there for every block.
const LAYERED: &[&str] = &["weight_update", "quantization_error", "flipped_codes"];

/// The figures of the steps of a run, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    numbers: Vec<u64>,
    columns: BTreeMap<String, Vec<Option<f64>>>,
    layers: BTreeMap<&'static str, Vec<LayerRow>>,
}

/// One measurement of a figure, block by block.
#[derive(Clone, Debug, PartialEq)]
struct LayerRow {
    step: u64,
    values: Vec<Option<f64>>,
}

impl Steps {
    /// Steps that are there.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// The number of the last step.
    pub fn last(&self) -> Option<u64> {
        self.numbers.last().copied()
    }

    /// Adds a record. A step that was there already (a run that was resumed) takes the place of it and of all
    /// after it. Returns how many steps stand unchanged, or nothing where the record has no step number.
    pub fn push(&mut self, record: &Value) -> Option<usize> {
        let number = record.get("step")?.as_u64()?;
        let kept = self.numbers.partition_point(|&n| n < number);
        self.cut(kept);
        self.set_all("", record);
        let responses = at(record, "response_tokens");
        let speed = |tokens: Option<f64>, phase: &str| tokens.zip(at(record, phase)).map(|(n, s)| n / s);
        self.set("rollout_tokens_per_s", speed(responses, "timing.rollout"));
        self.set("training_tokens_per_s", speed(responses.or(at(record, "tokens")), "timing.update"));
        self.numbers.push(number);
        for column in self.columns.values_mut() {
            column.resize(kept + 1, None);
        }
        for &key in LAYERED {
            let Some(values) = record.get(key).and_then(|l| l.get("layers")).and_then(Value::as_array) else {
                continue;
            };
            let values = values.iter().map(|v| v.as_f64().and_then(rounded)).collect();
            self.layers.entry(key).or_default().push(LayerRow { step: number, values });
        }
        Some(kept)
    }

    /// A column for every number of an object, and of the objects in it. Lists are no columns.
    fn set_all(&mut self, prefix: &str, object: &Value) {
        for (key, value) in object.as_object().into_iter().flatten().filter(|(key, _)| *key != "step") {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                Value::Object(_) => self.set_all(&path, value),
                value => self.set(&path, value.as_f64()),
            }
        }
    }

    fn set(&mut self, key: &str, value: Option<f64>) {
        let Some(value) = value.and_then(rounded) else { return };
        let column = self.columns.entry(key.to_string()).or_default();
        column.resize(self.numbers.len(), None);
        column.push(Some(value));
    }

    fn cut(&mut self, kept: usize) {
        self.numbers.truncate(kept);
        for column in self.columns.values_mut() {
            column.truncate(kept);
        }
        let last = self.last().unwrap_or(0);
        for rows in self.layers.values_mut() {
            rows.retain(|row| row.step <= last && kept > 0);
        }
    }

    /// The values of a column that are there, with the numbers of their steps.
    pub fn numbered(&self, key: &str) -> impl Iterator<Item = (u64, f64)> + Clone {
        let values = self.columns.get(key).into_iter().flatten();
        self.numbers.iter().zip(values).filter_map(|(&step, value)| Some((step, (*value)?)))
    }

    /// The values of a column that are there.
    pub fn values(&self, key: &str) -> impl DoubleEndedIterator<Item = f64> + Clone {
        self.columns.get(key).into_iter().flatten().copied().flatten()
    }

    /// Rows of per-block figures that are there.
    pub fn layer_rows(&self) -> usize {
        self.layers.values().map(Vec::len).sum()
    }

    /// All columns from step number `from` (counted from 0) on, with the numbers of the steps under `step`.
    pub fn columns_from(&self, from: usize) -> Value {
        let mut columns = Map::new();
        columns.insert("step".to_string(), json!(self.numbers.get(from..).unwrap_or_default()));
        for (key, values) in &self.columns {
            columns.insert(key.clone(), json!(values.get(from..).unwrap_or_default()));
        }
        Value::Object(columns)
    }

    /// Per figure, the rows of all measurements.
    pub fn layers_json(&self) -> Value {
        let values = |rows: &[LayerRow]| rows.iter().map(|row| json!(row.values)).collect::<Vec<_>>();
        self.layers
            .iter()
            .map(|(key, rows)| (key.to_string(), json!(values(rows))))
            .collect::<Map<_, _>>()
            .into()
    }
}

/// The number at a path such as `mismatch.kl`.
fn at(record: &Value, path: &str) -> Option<f64> {
    path.split('.').try_fold(record, |value, key| value.get(key))?.as_f64()
}

/// Six significant digits; nothing for what is not finite.
fn rounded(value: f64) -> Option<f64> {
    if !value.is_finite() {
        return None;
    }
    format!("{value:.5e}").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, reward: f64) -> Value {
        json!({"step": step, "reward": reward, "response_tokens": 100,
               "timing": {"rollout": 0.5, "total": 1.0},
               "mismatch": {"kl": 1.23456789e-4}, "parts": {"style": {"x": 1}}, "note": "text", "list": [1]})
    }

    #[test]
    fn columns_have_a_gap_where_a_field_is_missing() {
        let mut steps = Steps::default();
        steps.push(&record(1, 0.5));
        let mut late = record(2, 0.75);
        late["test_accuracy"] = json!(0.5);
        late["weight_update"] = json!({"total": 0.1, "layers": [0.1, 0.2]});
        late["mismatch"] = Value::Null;
        steps.push(&late);
        let columns = steps.columns_from(0);
        assert_eq!(columns["step"], json!([1, 2]));
        assert_eq!(columns["test_accuracy"], json!([null, 0.5]));
        assert_eq!(columns["mismatch.kl"], json!([1.23457e-4, null]));
        assert_eq!(columns["rollout_tokens_per_s"], json!([200.0, 200.0]));
        assert!(columns.get("training_tokens_per_s").is_none());
        assert_eq!(columns["parts.style.x"], json!([1.0, 1.0]), "whatever its name is");
        assert!(["note", "list", "weight_update.layers"].iter().all(|key| columns.get(key).is_none()));
        assert_eq!(steps.columns_from(1)["reward"], json!([0.75]));
        assert_eq!(steps.layers_json(), json!({"weight_update": [[0.1, 0.2]]}));
    }

    #[test]
    fn a_resumed_run_takes_the_place_of_what_was_cut_off() {
        let mut steps = Steps::default();
        for step in 1..=4 {
            let mut r = record(step, step as f64);
            r["flipped_codes"] = json!({"total": 0.1, "layers": [step]});
            assert_eq!(steps.push(&r), Some(step as usize - 1));
        }
        assert_eq!(steps.push(&record(3, 30.0)), Some(2));
        assert_eq!(steps.columns_from(0)["reward"], json!([1.0, 2.0, 30.0]));
        assert_eq!(steps.layers_json(), json!({"flipped_codes": [[1.0], [2.0]]}));
        assert_eq!(steps.push(&record(1, 10.0)), Some(0));
        assert_eq!((steps.len(), steps.layer_rows()), (1, 0));
        assert_eq!(steps.push(&json!({"reward": 1})), None, "no step number");
    }

    #[test]
    fn parts_of_rewards_are_columns_by_their_names() {
        let mut steps = Steps::default();
        for (step, style) in [(1, -0.5), (2, -0.25)] {
            let mut r = record(step, 1.0);
            r["reward_parts"] = json!({"correct": 0.5, "judge/style": style});
            r["test_reward"] = json!(-2);
            steps.push(&r);
        }
        let columns = steps.columns_from(0);
        assert_eq!(columns["reward_parts.judge/style"], json!([-0.5, -0.25]));
        assert_eq!(
            (&columns["reward_parts.correct"], &columns["test_reward"]),
            (&json!([0.5, 0.5]), &json!([-2.0, -2.0]))
        );
        assert!(columns.get("reward_parts").is_none());
    }

    #[test]
    fn numbers_are_short_and_finite() {
        assert_eq!(rounded(17853.0), Some(17853.0));
        assert_eq!(rounded(1.0 / 3.0), Some(0.333333));
        assert_eq!(rounded(f64::NAN), None);
    }
}
