//! Typed reading of JSON configuration files: every error names the file, the key, the value and what
//! was expected. A JSON `null` counts as absent.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::ConfigError;

/// Bytes of a configuration file; published ones have a few thousand.
const MAX_FILE: u64 = 16 * qurl_files::MIB;

/// The text of a configuration file.
pub(crate) fn read_text(path: &Path) -> Result<String, ConfigError> {
    qurl_files::read_text(path, MAX_FILE)
        .map_err(|source| ConfigError::Io { file: path.display().to_string(), source })
}

/// Parses a JSON object; `file` names it in messages.
pub(crate) fn parse_object(text: &str, file: &str) -> Result<Map<String, Value>, ConfigError> {
    serde_json::from_str(text)
        .map_err(|error| ConfigError::Json { file: file.to_string(), reason: error.to_string() })
}

/// Typed access to one JSON object, with errors that name the file and the whole key.
pub(crate) struct Keys<'a> {
    file: &'a str,
    prefix: &'static str,
    pub(crate) map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(file: &'a str, map: &'a Map<String, Value>) -> Keys<'a> {
        Keys { file, prefix: "", map }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn found(&self, key: &str) -> String {
        self.map.get(key).map_or_else(|| "absent".to_string(), Value::to_string)
    }

    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(crate) fn invalid(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Invalid {
            file: self.file.to_string(),
            key: self.full(key),
            found: self.found(key),
            expected: expected.to_string(),
        }
    }

    pub(crate) fn unsupported(&self, key: &str, supported: &str) -> ConfigError {
        ConfigError::Unsupported {
            file: self.file.to_string(),
            key: self.full(key),
            found: self.found(key),
            supported: supported.to_string(),
        }
    }

    pub(crate) fn missing(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Missing {
            file: self.file.to_string(),
            key: self.full(key),
            expected: expected.to_string(),
        }
    }

    /// The value through `convert`, `None` where absent.
    pub(crate) fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => convert(value).map(Some).ok_or_else(|| self.invalid(key, expected)),
        }
    }

    pub(crate) fn usize(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.typed(key, "a whole number", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    pub(crate) fn required_usize(&self, key: &str) -> Result<usize, ConfigError> {
        self.usize(key)?.ok_or_else(|| self.missing(key, "a whole number"))
    }

    pub(crate) fn f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(crate) fn required_f64(&self, key: &str) -> Result<f64, ConfigError> {
        self.f64(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(crate) fn str(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(crate) fn object(&self, key: &str, prefix: &'static str) -> Result<Option<Keys<'a>>, ConfigError> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Keys { file: self.file, prefix, map }))
    }

    /// A token id; -1 is an old way to say that there is none.
    pub(crate) fn token(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        if self.get(key).is_some_and(|value| value.as_i64() == Some(-1)) {
            return Ok(None);
        }
        self.typed(key, "a token id", token_id)
    }

    /// A token id or a list of them.
    pub(crate) fn tokens(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let ids = self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(list) => list.iter().map(token_id).collect(),
            one => token_id(one).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok())
}

/// An f32 as the shortest decimal that reads back as the same f32: 1e-6 rather than 9.99999997e-7.
pub(crate) fn short_f32(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or_else(|_| json!(value), |v| json!(v))
}
