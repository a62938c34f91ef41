//! Typed reading of a request: errors name the key, what was there and what was expected.

use super::document::StreamUsage;
use super::error::ApiError;
use serde_json::{Map, Value};

/// Most bytes of a `cache_salt`, which every first page of its prompts keeps.
const MAX_SALT: usize = 512;

/// The keys of a JSON object. `null` counts as absent.
#[derive(Clone, Copy)]
pub struct Fields<'a>(&'a Map<String, Value>);

/// A value that is not as expected.
fn wrong(key: &str, value: &Value, expected: &str) -> ApiError {
    let mut found = value.to_string();
    if let Some((end, _)) = found.char_indices().nth(60) {
        found.truncate(end);
        found.push_str("..");
    }
    ApiError::invalid(key, format!("{key} = {found}: expected {expected}"))
}

impl<'a> Fields<'a> {
    /// The keys of a body.
    pub fn of(body: &'a Value) -> Result<Fields<'a>, ApiError> {
        body.as_object().map(Fields).ok_or_else(|| ApiError::bad("the body is no JSON object"))
    }

    /// The keys of an object inside; nothing where it is absent.
    pub fn object(self, key: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.read(key, "an object", |value| value.as_object().map(Fields))
    }

    /// A value, unless absent.
    pub fn get(self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A value through `convert`.
    pub fn read<T>(
        self,
        key: &str,
        expected: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        convert(value).map(Some).ok_or_else(|| wrong(key, value, expected))
    }

    /// The value is not as expected.
    pub fn wrong(self, key: &str, expected: &str) -> ApiError {
        wrong(key, self.get(key).unwrap_or(&Value::Null), expected)
    }

    /// A number.
    pub fn f32(self, key: &str) -> Result<Option<f32>, ApiError> {
        self.read(key, "a number", |value| value.as_f64().map(|x| x as f32))
    }

    /// A whole number, 0 or more.
    pub fn usize(self, key: &str) -> Result<Option<usize>, ApiError> {
        self.read(key, "a whole number, 0 or more", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// A whole number.
    pub fn i64(self, key: &str) -> Result<Option<i64>, ApiError> {
        self.read(key, "a whole number", Value::as_i64)
    }

    /// True or false; false where absent.
    pub fn is(self, key: &str) -> Result<bool, ApiError> {
        self.is_or(key, false)
    }

    /// True or false.
    pub fn is_or(self, key: &str, absent: bool) -> Result<bool, ApiError> {
        Ok(self.read(key, "true or false", Value::as_bool)?.unwrap_or(absent))
    }

    /// Whether the answer is to be a stream, and where that tells what it used.
    pub fn stream(self) -> Result<Option<StreamUsage>, ApiError> {
        let usage = match self.object("stream_options")? {
            None => StreamUsage::default(),
            Some(options) => StreamUsage {
                at_end: options.is("include_usage")?,
                always: options.is("continuous_usage_stats")?,
            },
        };
        Ok(self.is("stream")?.then_some(usage))
    }

    /// A text.
    pub fn text(self, key: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(key, "a text", Value::as_str)
    }

    /// A text or a list of texts.
    pub fn texts(self, key: &str) -> Result<Vec<String>, ApiError> {
        let texts = self.read(key, "a text or a list of texts", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|text| text.as_str().map(str::to_string)).collect(),
            _ => None,
        })?;
        Ok(texts.unwrap_or_default())
    }

    /// The `cache_salt`: texts that differ set apart what prompts share; prime-rl has one for every version
    /// of the weights.
    pub fn salt(self) -> Result<Vec<u32>, ApiError> {
        let salt = self.text("cache_salt")?.unwrap_or_default();
        if salt.len() > MAX_SALT {
            return Err(self.wrong("cache_salt", &format!("a text of at most {MAX_SALT} bytes")));
        }
        Ok(salt.bytes().map(u32::from).collect())
    }

    /// A list of token ids.
    pub fn ids(self, key: &str) -> Result<Option<Vec<u32>>, ApiError> {
        self.read(key, "a list of token ids", ids)
    }

    /// Refuses a key that would change the answer in a way that is not implemented, unless its value says
    /// that it should not.
    pub fn refuse(self, key: &str, harmless: impl FnOnce(&Value) -> bool) -> Result<(), ApiError> {
        match self.get(key) {
            Some(value) if !harmless(value) => {
                let found = value.to_string().chars().take(60).collect::<String>();
                Err(ApiError::invalid(key, format!("{key} = {found} is not supported")))
            }
            _ => Ok(()),
        }
    }
}

/// A token id.
pub fn id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// A list of token ids.
pub fn ids(value: &Value) -> Option<Vec<u32>> {
    value.as_array()?.iter().map(id).collect()
}

/// Whether a value is empty: an object or a text with nothing in it, null or false, or a list of such.
pub fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.iter().all(is_empty),
        Value::Object(map) => map.is_empty(),
        Value::String(text) => text.is_empty(),
        other => other == &Value::Bool(false),
    }
}

/// Whether a value is this number.
pub fn is_number(expected: f64) -> impl FnOnce(&Value) -> bool {
    move |value| value.as_f64() == Some(expected)
}
