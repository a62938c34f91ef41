//! Requests and replies: one JSON object each, whether a command reads and writes them as lines or a server
//! as lists.
//!
//! A reply has a `score`, which is the reward and may be any finite number; where the judge knows it,
//! `correct`, whether the response is right; and `parts`, numbers with names that say what the score is made
//! of. The first reply decides whether replies name their requests, whether they say `correct`, and which
//! parts they have: a reply that differs is a mistake, and an average over some of the responses would hide
//! it.

use super::error::Slip;
use crate::task::Attempt;
use serde_json::{Map, Value, json};

/// Longest name of a part, in characters.
const MAX_NAME: usize = 64;
/// Most parts of a reply.
const MAX_PARTS: usize = 64;

/// What a judge says of one response.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    /// The reward.
    pub score: f64,
    /// Whether the response is right, where the judge says so.
    pub correct: Option<bool>,
    /// What the score is made of, by name.
    pub parts: Vec<(String, f64)>,
}

/// What all replies of a judge have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Style {
    /// They name their requests.
    pub by_request: bool,
    correct: bool,
    /// In alphabetical order.
    parts: Vec<String>,
}

/// The replies of a batch so far.
pub(super) struct Replies {
    /// The number of the first request.
    first: u64,
    replies: Vec<Option<Reply>>,
    pub answered: usize,
}

impl Replies {
    pub fn new(first: u64, count: usize) -> Replies {
        Replies { first, replies: vec![None; count], answered: 0 }
    }

    /// Takes a reply: of the request that it names, or of the first one without a reply.
    pub fn take(&mut self, value: Value, style: &mut Option<Style>) -> Result<(), Slip> {
        let (request, reply) = reply_of(value)?;
        let mut parts: Vec<String> = reply.parts.iter().map(|(name, _)| name.clone()).collect();
        parts.sort();
        let found = Style { by_request: request.is_some(), correct: reply.correct.is_some(), parts };
        let usual = style.get_or_insert_with(|| found.clone());
        match () {
            () if usual.by_request && !found.by_request => return Err(Slip::NoRequest),
            () if !usual.by_request && found.by_request => return Err(Slip::Request),
            () if usual.correct && !found.correct => return Err(Slip::NoCorrect),
            () if !usual.correct && found.correct => return Err(Slip::Correct),
            () if usual.parts != found.parts => return Err(Slip::Parts(listed(&usual.parts))),
            () => {}
        }
        let last = self.first + self.replies.len() as u64 - 1;
        let index = match request {
            None => self.answered,
            Some(request) => match request.as_u64().filter(|number| *number <= last) {
                None => return Err(Slip::UnknownRequest { first: self.first, last }),
                // All requests of earlier batches have their replies.
                Some(number) if number < self.first => return Err(Slip::Doubled(number)),
                Some(number) => (number - self.first) as usize,
            },
        };
        if self.replies[index].replace(reply).is_some() {
            return Err(Slip::Doubled(self.first + index as u64));
        }
        self.answered += 1;
        Ok(())
    }

    /// The first request without a reply.
    pub fn missing(&self) -> u64 {
        let index = self.replies.iter().position(Option::is_none).unwrap_or(self.replies.len());
        self.first + index as u64
    }

    /// All replies, in the order of the requests.
    pub fn all(self) -> Vec<Reply> {
        self.replies.into_iter().flatten().collect()
    }
}

/// One response as a judge reads it.
pub(super) fn request(number: u64, attempt: &Attempt) -> Value {
    let problem = attempt.problem;
    let mut request = json!({
        "request": number,
        "id": problem.id,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "response": attempt.response,
        "tokens": attempt.tokens,
        "truncated": attempt.truncated,
    });
    if !problem.extra.is_null() {
        request["extra"] = problem.extra.clone();
    }
    request
}

/// JSON as a judge writes it. Python's writes what JSON does not have, NaN and Infinity: these are named.
pub(super) fn parse(text: &str) -> Result<Value, Slip> {
    let text = text.trim();
    let error = match serde_json::from_str(text) {
        Ok(value) => return Ok(value),
        Err(error) => error.to_string(),
    };
    if ["NaN", "-NaN", "Infinity", "-Infinity", "nan", "-nan", "inf", "-inf"].contains(&text) {
        return Err(Slip::NotFinite(format!("`score` is {text}")));
    }
    for word in ["NaN", "-Infinity", "Infinity"] {
        // As a text it can be read, and its key found.
        let quoted = format!("\"{word}\"");
        let marked = text.replace(&format!(": {word}"), &format!(": {quoted}"));
        let marked = marked.replace(&format!(":{word}"), &format!(":{quoted}"));
        if marked != text {
            let key = |fields: &Map<String, Value>| {
                fields.iter().find(|(_, v)| v.as_str() == Some(word)).map(|(k, _)| k.clone())
            };
            let named = serde_json::from_str::<Value>(&marked).ok().and_then(|value| {
                let fields = value.as_object()?;
                let part = || Some(format!("parts.{}", key(fields.get("parts")?.as_object()?)?));
                key(fields).or_else(part)
            });
            return Err(Slip::NotFinite(match named {
                Some(key) => format!("`{key}` is {word}"),
                None => format!("there is {word}"),
            }));
        }
    }
    match error.contains("out of range") {
        true => Err(Slip::NotFinite("there is a number beyond all floating-point ones".into())),
        false => Err(Slip::NotAScore),
    }
}

/// A reply, and the request that it names, if it does.
fn reply_of(mut value: Value) -> Result<(Option<Value>, Reply), Slip> {
    let Value::Object(fields) = &mut value else {
        let score = finite("score", value.as_f64().ok_or(Slip::NotAScore)?)?;
        return Ok((None, Reply { score, correct: None, parts: Vec::new() }));
    };
    let request = fields.remove("request");
    let score = finite("score", fields.get("score").and_then(Value::as_f64).ok_or(Slip::NotAScore)?)?;
    let correct = match fields.get("correct") {
        None => None,
        Some(Value::Bool(correct)) => Some(*correct),
        Some(number) => match number.as_f64() {
            Some(1.0) => Some(true),
            Some(0.0) => Some(false),
            _ => return Err(Slip::NotCorrect),
        },
    };
    let parts = match fields.get("parts") {
        None => Vec::new(),
        Some(Value::Object(parts)) if parts.len() <= MAX_PARTS => {
            parts.iter().map(part).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(Slip::NotParts),
    };
    Ok((request, Reply { score, correct, parts }))
}

fn part((name, value): (&String, &Value)) -> Result<(String, f64), Slip> {
    let number = value.as_f64().or(value.as_bool().map(f64::from));
    match number.filter(|_| is_name(name)) {
        Some(number) => Ok((name.clone(), finite(&format!("parts.{name}"), number)?)),
        None => Err(Slip::NotParts),
    }
}

/// Whether a text can name a reward or a part of one: it becomes a key of `metrics.jsonl` and a tag of
/// TensorBoard.
pub fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | ' ');
    !name.trim().is_empty() && name.chars().count() <= MAX_NAME && name.chars().all(plain)
}

/// Rewards are trained on as f32.
fn finite(key: &str, number: f64) -> Result<f64, Slip> {
    match (number as f32).is_finite() {
        true => Ok(number),
        false if number.is_finite() => Err(Slip::TooLarge(format!("`{key}` is {number:e}"))),
        false => Err(Slip::NotFinite(format!("`{key}` is {number:e}"))),
    }
}

fn listed(names: &[String]) -> String {
    match names {
        [] => "no `parts`".into(),
        names => format!("the parts {}", names.join(", ")),
    }
}
