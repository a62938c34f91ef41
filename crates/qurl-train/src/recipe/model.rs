//! `[model]`: a directory, or a new model from nothing.

use super::{Check, RecipeError};
use qurl_model::config::Dims;
use qurl_model::{ConfigError, Family, ModelConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where the model comes from: exactly one of the two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSource {
    /// A Hugging Face directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// With a path: the context to use instead of the one in its config.json, which it may only extend. Positions are
    /// rotated as before, without scaling, and the saved model has this context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// A new model with random weights and a tokenizer of characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewModel>,
}

/// Sizes of a new model, with the names of config.json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewModel {
    /// `qwen2`, `qwen3`, `llama` or `mistral`.
    #[serde(default = "NewModel::default_family")]
    pub family: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads.
    pub num_key_value_heads: usize,
    /// Longest sequence.
    pub max_position_embeddings: usize,
}

impl NewModel {
    fn default_family() -> String {
        "qwen2".to_string()
    }

    fn family(&self) -> Option<Family> {
        [Family::Qwen2, Family::Qwen3, Family::Llama, Family::Mistral]
            .into_iter()
            .find(|f| f.model_type() == self.family)
    }

    /// The configuration for a vocabulary of this size; the head is tied.
    pub fn config(&self, vocab_size: usize) -> Result<ModelConfig, ConfigError> {
        let dims = Dims {
            vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_layers: self.num_hidden_layers,
            num_heads: self.num_attention_heads,
            num_kv_heads: self.num_key_value_heads,
        };
        let mut config = ModelConfig::from_dims(self.family().unwrap_or(Family::Qwen2), dims)?;
        config.max_position_embeddings = self.max_position_embeddings;
        config.tie_word_embeddings = true;
        config.check("recipe, section [model.new]")?;
        Ok(config)
    }
}

impl ModelSource {
    pub(crate) fn check(&self, check: Check) -> Result<(), RecipeError> {
        let one = self.path.is_some() != self.new.is_some();
        let found = if self.path.is_some() { "both a path and [model.new]" } else { "neither a path nor [model.new]" };
        check.that("model", found, one, "either `path` (a Hugging Face directory) or a section [model.new]")?;
        if let Some(context) = self.max_position_embeddings {
            let expected = "nothing: a new model's context is `model.new.max_position_embeddings`";
            check.that("model.max_position_embeddings", context, self.new.is_none(), expected)?;
            check.size("model.max_position_embeddings", context, 1 << 24)?;
        }
        if let Some(new) = &self.new {
            let known = new.family().is_some();
            check.that("model.new.family", &new.family, known, "qwen2, qwen3, llama or mistral")?;
            if let Err(e) = new.config(256) {
                check.that("model.new", e, false, "sizes that fit together")?;
            }
        }
        Ok(())
    }
}
