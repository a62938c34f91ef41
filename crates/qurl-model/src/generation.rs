//! `generation_config.json`: how the authors of a model sample from it and where they stop.
//!
//! Instruction-tuned models list more stop tokens here than in `config.json`, so the stop tokens of a
//! model are always taken from here. Keys we do not interpret are kept and written back.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::{ConfigError, ModelConfig};
use crate::keys::{Keys, parse_object, read_text, short_f32};

/// The file's name inside a model directory.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// Sampling defaults that come with a model. `None` means that the model does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Beginning of text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Padding.
    pub pad_token_id: Option<u32>,
    /// Whether to sample at all; otherwise greedy.
    pub do_sample: Option<bool>,
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Keep the smallest set of tokens with at least this mass.
    pub top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: Option<usize>,
    /// Keep tokens with at least this share of the most likely one's probability.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens seen before.
    pub repetition_penalty: Option<f32>,
    /// Longest sequence including the prompt.
    pub max_length: Option<usize>,
    /// Most tokens to generate.
    pub max_new_tokens: Option<usize>,
    /// Keys that are carried along.
    pub other: Map<String, Value>,
}

const READ_KEYS: [&str; 11] = [
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_length",
    "max_new_tokens",
];

impl GenerationConfig {
    /// What a directory without the file means: the special tokens of `config.json`.
    pub fn from_model(config: &ModelConfig) -> GenerationConfig {
        GenerationConfig {
            bos_token_id: config.bos_token_id,
            eos_token_ids: config.eos_token_ids.clone(),
            pad_token_id: config.pad_token_id,
            ..GenerationConfig::default()
        }
    }

    /// Reads the file of a model directory, or takes [`GenerationConfig::from_model`] where there is none.
    pub fn load(dir: &Path, config: &ModelConfig) -> Result<GenerationConfig, ConfigError> {
        let path = dir.join(GENERATION_CONFIG);
        match read_text(&path) {
            Ok(text) => Self::from_json(&text, &path.display().to_string(), config),
            Err(ConfigError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Ok(Self::from_model(config))
            }
            Err(error) => Err(error),
        }
    }

    /// Refuses end tokens that the model cannot say, by the file and the key that name them.
    pub fn check_end_tokens(&self, config: &ModelConfig, dir: &Path) -> Result<(), ConfigError> {
        for (file, ids) in [("config.json", &config.eos_token_ids), (GENERATION_CONFIG, &self.eos_token_ids)]
        {
            if let Some(id) = ids.iter().find(|id| **id as usize >= config.vocab_size) {
                let below = config.vocab_size;
                return Err(ConfigError::Invalid {
                    file: dir.join(file).display().to_string(),
                    key: "eos_token_id".to_string(),
                    found: id.to_string(),
                    expected: format!("tokens of the vocabulary: less than vocab_size = {below}"),
                });
            }
        }
        Ok(())
    }

    /// Parses the text; special tokens that it leaves out come from the model's configuration.
    pub fn from_json(text: &str, file: &str, config: &ModelConfig) -> Result<GenerationConfig, ConfigError> {
        let mut map = parse_object(text, file)?;
        let keys = Keys::new(file, &map);
        let eos_token_ids = match keys.get("eos_token_id") {
            Some(_) => keys.tokens("eos_token_id")?,
            None => config.eos_token_ids.clone(),
        };
        let positive = |key: &str| in_range(&keys, key, "a number above 0", |x| x > 0.0);
        let share = |key: &str| in_range(&keys, key, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x));
        let temperature = in_range(&keys, "temperature", "a number, 0 or more", |x| x >= 0.0)?;
        let mut generation = GenerationConfig {
            bos_token_id: keys.token("bos_token_id")?.or(config.bos_token_id),
            eos_token_ids,
            pad_token_id: keys.token("pad_token_id")?.or(config.pad_token_id),
            do_sample: keys.bool("do_sample")?,
            temperature,
            top_p: share("top_p")?,
            top_k: keys.usize("top_k")?,
            min_p: share("min_p")?,
            repetition_penalty: positive("repetition_penalty")?,
            max_length: keys.usize("max_length")?,
            max_new_tokens: keys.usize("max_new_tokens")?,
            other: Map::new(),
        };
        map.retain(|key, _| !READ_KEYS.contains(&key.as_str()));
        generation.other = map;
        Ok(generation)
    }

    /// The contents of the file.
    pub fn to_json(&self) -> Value {
        let mut map = Map::new();
        let mut put = |key: &str, value: Option<Value>| {
            if let Some(value) = value {
                map.insert(key.to_string(), value);
            }
        };
        let eos = match self.eos_token_ids.as_slice() {
            [] => None,
            [one] => Some(json!(one)),
            several => Some(json!(several)),
        };
        put("bos_token_id", self.bos_token_id.map(|v| json!(v)));
        put("eos_token_id", eos);
        put("pad_token_id", self.pad_token_id.map(|v| json!(v)));
        put("do_sample", self.do_sample.map(|v| json!(v)));
        put("temperature", self.temperature.map(short_f32));
        put("top_p", self.top_p.map(short_f32));
        put("top_k", self.top_k.map(|v| json!(v)));
        put("min_p", self.min_p.map(short_f32));
        put("repetition_penalty", self.repetition_penalty.map(short_f32));
        put("max_length", self.max_length.map(|v| json!(v)));
        put("max_new_tokens", self.max_new_tokens.map(|v| json!(v)));
        map.extend(self.other.iter().map(|(k, v)| (k.clone(), v.clone())));
        Value::Object(map)
    }
}

fn in_range(
    keys: &Keys,
    key: &str,
    expected: &str,
    accepts: impl Fn(f64) -> bool,
) -> Result<Option<f32>, ConfigError> {
    match keys.f64(key)? {
        Some(value) if !accepts(value) => Err(keys.invalid(key, expected)),
        value => Ok(value.map(|v| v as f32)),
    }
}
