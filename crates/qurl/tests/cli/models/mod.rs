//! Small models on disk for the commands that load one.

use crate::common::{self, Run};
use qurl_model::hf::{self, SaveOptions};
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{Dims, Dtype, Family, GenerationConfig, ModelConfig, Params, params};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

pub const ALPHABET: &str = "0123456789abcdefghijklmnopqrstuvwxyz +-=.?";

/// A directory that is removed when the test ends.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("qurl-cli-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary directory");
        TempDir(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn text(&self) -> &str {
        self.0.to_str().expect("a path in UTF-8")
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::characters(ALPHABET, &CharacterSpecials::default()).expect("a tokenizer of characters")
}

/// A model with spread-out probabilities and a context of 96 tokens.
pub fn model(family: Family) -> (ModelConfig, Params<Vec<f32>>) {
    let dims = Dims {
        vocab_size: tokenizer().vocab_size(),
        hidden_size: 64,
        intermediate_size: 192,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
    };
    let mut config = ModelConfig::from_dims(family, dims).expect("sizes that fit together");
    config.initializer_range = 0.15;
    config.max_position_embeddings = 96;
    config.eos_token_ids = tokenizer().eos().into_iter().collect();
    let weights = params::init(&config, 7, false);
    (config, weights)
}

/// Writes a model with its tokenizer.
pub fn save(dir: &Path, config: &ModelConfig, weights: &Params<Vec<f32>>) {
    let generation =
        GenerationConfig { eos_token_ids: config.eos_token_ids.clone(), ..GenerationConfig::default() };
    let tokenizer = tokenizer();
    let options =
        SaveOptions { tokenizer_files: tokenizer.files(), ..SaveOptions::new(Dtype::F32, &generation) };
    hf::save(dir, config, weights, &options).expect("saving");
}

/// A directory with a model in it.
pub fn saved(family: Family) -> TempDir {
    let dir = TempDir::new();
    let (config, weights) = model(family);
    save(dir.path(), &config, &weights);
    dir
}

/// Runs `qurl` without input.
pub fn qurl(arguments: &[&str]) -> Run {
    common::qurl(arguments, "")
}
