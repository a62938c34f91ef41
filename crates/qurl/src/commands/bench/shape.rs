//! Model shapes by name, and random weights for them at the speed of copying.

use crate::commands::sft;
use crate::input::OrBad;
use qurl_model::config::Dims;
use qurl_model::params::shapes;
use qurl_model::rng::CounterRng;
use qurl_model::{ConfigError, Family, ModelConfig, ParamKind, Params};
use qurl_train::recipe::Recipe;
use qurl_train::start::Start;

/// Random numbers that are repeated over all weights; a prime, so that the rows of a matrix differ.
const BLOCK: usize = 1_048_573;

/// A published shape, `5m`, or `default`: the small model that the embedded recipe trains.
pub fn config(name: &str) -> anyhow::Result<ModelConfig> {
    match name {
        "5m" => five_million(),
        "default" => default(),
        _ => ModelConfig::named(name).map_err(with_ours).or_bad(),
    }
}

/// The error for an unknown name with all names that are known here.
fn with_ours(error: ConfigError) -> ConfigError {
    match error {
        ConfigError::UnknownShape { name, known } => {
            ConfigError::UnknownShape { name, known: format!("default, 5m, {known}") }
        }
        error => error,
    }
}

fn five_million() -> anyhow::Result<ModelConfig> {
    let dims = Dims {
        vocab_size: 512,
        hidden_size: 256,
        intermediate_size: 704,
        num_layers: 6,
        num_heads: 4,
        num_kv_heads: 4,
    };
    let mut config = ModelConfig::from_dims(Family::Llama, dims).or_bad()?;
    config.tie_word_embeddings = false;
    Ok(config)
}

fn default() -> anyhow::Result<ModelConfig> {
    let recipe = Recipe::parse(sft::DEFAULT, "embedded default", &[]).or_bad()?;
    let task = recipe.task().or_bad()?.task().or_bad()?;
    Ok(Start::from_recipe(&recipe, &*task).or_bad()?.config)
}

/// Weights with the spread of fresh ones, made by repeating one block of random numbers: what they are does
/// not matter to a benchmark, waiting for half a billion of them does.
pub fn weights(config: &ModelConfig) -> Params<Vec<f32>> {
    let mut block = vec![0.0f32; BLOCK];
    CounterRng::new(&[5]).fill_normal(&mut block, config.initializer_range);
    let mut place = 0;
    shapes(config, false).map(|info| match info.kind {
        kind if kind.is_norm() => vec![1.0; info.len()],
        ParamKind::QkvBias => vec![0.0; info.len()],
        _ => {
            let mut values = Vec::with_capacity(info.len());
            while values.len() < info.len() {
                let part = &block[place..(place + info.len() - values.len()).min(BLOCK)];
                values.extend_from_slice(part);
                place = (place + part.len()) % BLOCK;
            }
            values
        }
    })
}
