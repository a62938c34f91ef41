//! One line of the `qurl objective` command: given tokens in, what a loss does to them out.
//!
//! ```json
//! {"theta":[..],"prox":[..],"behav":[..],"adv":[..],
//!  "objective":{"type":"acr","c":2.0},"loss_agg_mode":"token-mean"}
//! ```
//! in one line gives `{"loss":x,"dlogp":[..],"clip_fraction":y}`. `mask` (default all ones), `seq` (default
//! all zero), `loss_agg_mode` (default `token-mean`) and `loss_scale_factor` may be left out. The line is
//! read by hand and not by derived code, because a debugging aid must say which line, key and value is wrong.

use super::unique::Unique;
use qurl_rl::{Aggregation, LossAggMode, Objective, RlError, Tokens};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use thiserror::Error;

/// The keys of a line.
const KEYS: [&str; 9] =
    ["theta", "prox", "behav", "adv", "mask", "seq", "objective", "loss_agg_mode", "loss_scale_factor"];

/// Longest piece of a user's text that is repeated in a message.
const SHOWN: usize = 60;

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum CaseError {
    /// Not JSON at all; where a number of a known key is to blame, it is named.
    #[error("line {line}, column {column}: not valid JSON{}: {reason}", place(.key, .value))]
    Json {
        /// Line number, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The key whose value could not be read, where known.
        key: Option<String>,
        /// The text that could not be read.
        value: String,
        /// What the JSON reader said.
        reason: String,
    },
    /// A key that must be there is not.
    #[error("line {line}: key `{key}` is missing")]
    Missing {
        /// Line number, from 1.
        line: usize,
        /// The key.
        key: &'static str,
    },
    /// A key that means nothing here.
    #[error("line {line}: unknown key `{key}` with value {value}, expected one of {}", KEYS.join(", "))]
    UnknownKey {
        /// Line number, from 1.
        line: usize,
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
    /// A value that its key cannot have.
    #[error("line {line}: key `{key}` has value {value}, expected {expected}")]
    Value {
        /// Line number, from 1.
        line: usize,
        /// The key, with the position in a list where there is one.
        key: String,
        /// The value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// A list of another length than `theta`.
    #[error("line {line}: key `{key}` has {len} values, expected {expected}, as many as `theta`")]
    Length {
        /// Line number, from 1.
        line: usize,
        /// The key.
        key: &'static str,
        /// Its length.
        len: usize,
        /// The length of `theta`.
        expected: usize,
    },
    /// The numbers are so large that the result is not finite.
    #[error("line {line}: the loss overflows; the largest `adv` is {largest}")]
    Overflow {
        /// Line number, from 1.
        line: usize,
        /// Largest absolute advantage.
        largest: f64,
    },
}

fn place(key: &Option<String>, value: &str) -> String {
    key.as_ref().map_or(String::new(), |key| format!(" in the value of `{key}`, near `{value}`"))
}

/// A parsed line.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    theta: Vec<f64>,
    prox: Vec<f64>,
    behav: Vec<f64>,
    adv: Vec<f64>,
    mask: Vec<bool>,
    seq: Vec<u32>,
    objective: Objective,
    aggregation: Aggregation,
    line: usize,
}

/// What the loss does to the tokens of a line.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseResult {
    /// The loss.
    pub loss: f64,
    /// dL/dlogp of every token.
    pub dlogp: Vec<f64>,
    /// Share of the unmasked tokens that are clipped at the upper or lower bound.
    pub clip_fraction: f64,
}

impl Case {
    /// Reads line number `line` (from 1).
    pub fn parse(line: usize, text: &str) -> Result<Self, CaseError> {
        let Unique(value) = serde_json::from_str(text).map_err(|e| json_error(line, text, &e))?;
        let Value::Object(map) = value else {
            return Err(wrong(line, "(the line)", &value, "a JSON object"));
        };
        if let Some((key, value)) = map.iter().find(|(key, _)| !KEYS.contains(&key.as_str())) {
            return Err(CaseError::UnknownKey { line, key: key.clone(), value: shown(value) });
        }
        let fields = Fields { line, map: &map };
        let theta = fields.numbers("theta", None)?;
        let n = theta.len();
        let objective = objective(line, fields.required("objective")?)?;
        let mode = match map.get("loss_agg_mode") {
            None => LossAggMode::default(),
            Some(v) => serde_json::from_value(v.clone()).map_err(|_| {
                let expected = "one of token-mean, token-sum, seq-mean-token-sum, \
                                seq-mean-token-mean, seq-mean-token-sum-norm";
                wrong(line, "loss_agg_mode", v, expected)
            })?,
        };
        Ok(Self {
            prox: fields.numbers("prox", Some(n))?,
            behav: fields.numbers("behav", Some(n))?,
            adv: fields.numbers("adv", Some(n))?,
            mask: fields.mask(n)?,
            seq: fields.sequences(n)?,
            aggregation: Aggregation {
                mode: objective.loss_agg_mode(mode),
                loss_scale_factor: fields.scale_factor()?,
            },
            theta,
            objective,
            line,
        })
    }

    /// Evaluates the objective.
    pub fn evaluate(&self) -> Result<CaseResult, CaseError> {
        let internal = |e: RlError| CaseError::Value {
            line: self.line,
            key: "objective".into(),
            value: self.objective.name().into(),
            expected: e.to_string(),
        };
        let accepted =
            self.objective.accepted(&self.behav, &self.prox, &self.mask, &self.seq).map_err(internal)?;
        let mask = accepted.as_ref().unwrap_or(&self.mask);
        let weight = self.aggregation.weights_of(mask, &self.seq).map_err(internal)?;
        let tokens = Tokens {
            theta: &self.theta,
            prox: &self.prox,
            behav: &self.behav,
            adv: &self.adv,
            mask,
            seq: &self.seq,
        };
        let out = self.objective.evaluate(&tokens, &weight).map_err(internal)?;
        if !out.loss.is_finite() || out.dlogp.iter().any(|d| !d.is_finite()) {
            let largest = self.adv.iter().fold(0.0, |m: f64, a| m.max(a.abs()));
            return Err(CaseError::Overflow { line: self.line, largest });
        }
        Ok(CaseResult { loss: out.loss + 0.0, clip_fraction: out.facts.clip_fraction(), dlogp: out.dlogp })
    }
}

/// Reads and evaluates line number `line` (from 1).
pub fn run_line(line: usize, text: &str) -> Result<CaseResult, CaseError> {
    Case::parse(line, text)?.evaluate()
}

/// Typed access to the keys of a line.
struct Fields<'a> {
    line: usize,
    map: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn required(&self, key: &'static str) -> Result<&Value, CaseError> {
        self.map.get(key).ok_or(CaseError::Missing { line: self.line, key })
    }

    /// A list, of as many values as `theta` has.
    fn list<'v>(
        &self,
        key: &'static str,
        value: &'v Value,
        expected: Option<usize>,
    ) -> Result<&'v [Value], CaseError> {
        let Value::Array(items) = value else {
            return Err(wrong(self.line, key, value, "a list of numbers"));
        };
        match expected {
            Some(n) if n != items.len() => {
                Err(CaseError::Length { line: self.line, key, len: items.len(), expected: n })
            }
            _ => Ok(items),
        }
    }

    fn numbers(&self, key: &'static str, expected: Option<usize>) -> Result<Vec<f64>, CaseError> {
        let number = |(i, v): (usize, &Value)| match v.as_f64() {
            Some(x) if v.is_number() && x.is_finite() => Ok(x),
            _ => Err(wrong(self.line, &format!("{key}[{i}]"), v, "a finite number")),
        };
        let items = self.list(key, self.required(key)?, expected)?;
        items.iter().enumerate().map(number).collect()
    }

    fn mask(&self, n: usize) -> Result<Vec<bool>, CaseError> {
        let Some(value) = self.map.get("mask") else {
            return Ok(vec![true; n]);
        };
        let flag = |(i, v): (usize, &Value)| match (v.as_bool(), v.as_f64()) {
            (Some(flag), _) => Ok(flag),
            (None, Some(0.0)) => Ok(false),
            (None, Some(1.0)) => Ok(true),
            _ => Err(wrong(self.line, &format!("mask[{i}]"), v, "0 or 1")),
        };
        self.list("mask", value, Some(n))?.iter().enumerate().map(flag).collect()
    }

    /// Sequence indices, renumbered from 0 without gaps.
    fn sequences(&self, n: usize) -> Result<Vec<u32>, CaseError> {
        let Some(value) = self.map.get("seq") else {
            return Ok(vec![0; n]);
        };
        let mut dense: BTreeMap<u64, u32> = BTreeMap::new();
        let index = |(i, v): (usize, &Value)| {
            let expected = "a whole number not below 0";
            let id = v.as_u64().ok_or_else(|| wrong(self.line, &format!("seq[{i}]"), v, expected))?;
            let next = dense.len() as u32;
            Ok(*dense.entry(id).or_insert(next))
        };
        self.list("seq", value, Some(n))?.iter().enumerate().map(index).collect()
    }

    fn scale_factor(&self) -> Result<Option<f64>, CaseError> {
        match self.map.get("loss_scale_factor") {
            None | Some(Value::Null) => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) if x.is_finite() && x > 0.0 => Ok(Some(x)),
                _ => Err(wrong(self.line, "loss_scale_factor", v, "a finite number above 0")),
            },
        }
    }
}

/// Reads the objective; on failure finds the key to blame by trying each beside the type alone, which works
/// because all keys but the type have defaults.
fn objective(line: usize, value: &Value) -> Result<Objective, CaseError> {
    let Value::Object(map) = value else {
        return Err(wrong(line, "objective", value, "an object with a `type`"));
    };
    let types = format!("one of {}", Objective::TYPES.join(", "));
    let Some(kind) = map.get("type") else {
        return Err(wrong(line, "objective.type", &Value::Null, &types));
    };
    let parse = |map: Map<String, Value>| serde_json::from_value::<Objective>(Value::Object(map));
    let only_type: Map<String, Value> = [("type".to_string(), kind.clone())].into_iter().collect();
    if !kind.as_str().is_some_and(|k| Objective::TYPES.contains(&k)) {
        return Err(wrong(line, "objective.type", kind, &types));
    }
    let objective = parse(map.clone()).map_err(|whole| {
        for (key, value) in map.iter().filter(|(key, _)| *key != "type") {
            let mut one = only_type.clone();
            one.insert(key.clone(), value.clone());
            if let Err(e) = parse(one) {
                return wrong(line, &format!("objective.{key}"), value, &reason(&e));
            }
        }
        wrong(line, "objective", value, &reason(&whole))
    })?;
    objective.check().map_err(|e| match e {
        RlError::Setting { key, value, expected } => {
            CaseError::Value { line, key: format!("objective.{key}"), value, expected: expected.into() }
        }
        other => wrong(line, "objective", value, &other.to_string()),
    })?;
    Ok(objective)
}

/// What a parser expected, out of its message.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rsplit_once("expected ") {
        Some((_, "f64")) => "a number".to_string(),
        Some((_, expected)) => expected.to_string(),
        None => text,
    }
}

fn wrong(line: usize, key: &str, value: &Value, expected: &str) -> CaseError {
    CaseError::Value { line, key: key.into(), value: shown(value), expected: expected.into() }
}

/// A value as JSON, cut where it is long.
fn shown(value: &Value) -> String {
    cut(&value.to_string())
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        None => text.to_string(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

/// Names the key and the word at the place where the JSON reader stopped (`NaN`, `1e999`, ...).
fn json_error(line: usize, text: &str, error: &serde_json::Error) -> CaseError {
    // The reader stops after or in the middle of the word: step back to its start.
    let stop = error.column().min(text.len());
    let separators = [',', '[', ']', '{', '}', ':', ' '];
    let bytes = text.as_bytes();
    let separates = |at: usize| separators.contains(&char::from(bytes[at]));
    let mut start = stop.saturating_sub(1);
    while start > 0 && !bytes.is_empty() && !separates(start - 1) {
        start -= 1;
    }
    let word: String = String::from_utf8_lossy(&bytes[start.min(bytes.len())..])
        .chars()
        .take_while(|c| !separators.contains(c))
        .collect();
    let before = String::from_utf8_lossy(&bytes[..start.min(bytes.len())]).into_owned();
    let key = KEYS
        .iter()
        .filter_map(|key| before.rfind(&format!("\"{key}\"")).map(|at| (at, key)))
        .max()
        .map(|(_, key)| key.to_string());
    CaseError::Json {
        line,
        column: error.column(),
        key: key.filter(|_| !word.is_empty()),
        value: cut(&word),
        reason: error.to_string().split(" at line ").next().unwrap_or_default().to_string(),
    }
}
