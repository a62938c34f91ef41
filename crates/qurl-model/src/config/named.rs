//! Published shapes by name, so that benchmarks can run a model of a known size with random weights
//! and without its files.

use super::{ConfigError, Dims, Dtype, Family, ModelConfig};

/// name, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied.
type Shape = (&'static str, usize, usize, usize, usize, usize, usize, bool);

const QWEN25: [Shape; 6] = [
    ("qwen2.5-0.5b", 896, 4864, 24, 14, 2, 151_936, true),
    ("qwen2.5-1.5b", 1536, 8960, 28, 12, 2, 151_936, true),
    ("qwen2.5-3b", 2048, 11_008, 36, 16, 2, 151_936, true),
    ("qwen2.5-7b", 3584, 18_944, 28, 28, 4, 152_064, false),
    ("qwen2.5-14b", 5120, 13_824, 48, 40, 8, 152_064, false),
    ("qwen2.5-32b", 5120, 27_648, 64, 40, 8, 152_064, false),
];

const END_OF_TEXT: u32 = 151_643;

impl ModelConfig {
    /// The names [`ModelConfig::named`] knows.
    pub fn shape_names() -> impl Iterator<Item = &'static str> {
        QWEN25.iter().map(|shape| shape.0)
    }

    /// The configuration of a published model, case-insensitive: `qwen2.5-0.5b`, `-1.5b`, `-7b`, `-14b`,
    /// `-32b`.
    pub fn named(name: &str) -> Result<ModelConfig, ConfigError> {
        let shape = QWEN25.iter().find(|shape| shape.0.eq_ignore_ascii_case(name)).copied();
        let Some((_, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, vocab_size, tied)) =
            shape
        else {
            return Err(ConfigError::UnknownShape {
                name: name.to_string(),
                known: Self::shape_names().collect::<Vec<_>>().join(", "),
            });
        };
        let dims = Dims { vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads };
        let mut config = ModelConfig::from_dims(Family::Qwen2, dims)?;
        config.tie_word_embeddings = tied;
        config.bos_token_id = Some(END_OF_TEXT);
        config.eos_token_ids = vec![END_OF_TEXT];
        config.dtype = Dtype::Bf16;
        Ok(config)
    }
}
