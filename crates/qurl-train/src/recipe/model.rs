//! `[model]`: a directory, or a new model from nothing.

use super::{Check, RecipeError, schema};
use qurl_model::config::Dims;
use qurl_model::{ConfigError, Family, ModelConfig};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where the model comes from: exactly one of the two.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelSource {
    /// A model directory as Hugging Face saves it (config.json, safetensors, tokenizer files), or an id of
    /// the hub such as `Qwen/Qwen2.5-0.5B` whose snapshot is in the local cache. Either this or
    /// `[model.new]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// The longest sequence to allow instead of the one in the model's config.json, which it may only extend.
    /// Positions are rotated as before, without scaling, and the saved model has this context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// A new model with random weights, with a tokenizer of the characters that the task uses. Either this or
    /// `model.path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new: Option<NewModel>,
}

/// Sizes of a new model, with the names of config.json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NewModel {
    /// The architecture.
    #[serde(default = "NewModel::default_family")]
    #[schemars(schema_with = "schema::families")]
    pub family: String,
    /// Width of the residual stream; a multiple of `num_attention_heads`.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads of a block.
    pub num_attention_heads: usize,
    /// Key and value heads of a block; a divisor of `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// The longest sequence in tokens, prompt and response together.
    pub max_position_embeddings: usize,
}

impl NewModel {
    /// Architectures that a new model can have.
    pub(super) const FAMILIES: [Family; 4] = [Family::Qwen2, Family::Qwen3, Family::Llama, Family::Mistral];

    fn default_family() -> String {
        "qwen2".to_string()
    }

    fn family(&self) -> Option<Family> {
        Self::FAMILIES.into_iter().find(|f| f.model_type() == self.family)
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
        let found = if self.path.is_some() {
            "both a path and [model.new]"
        } else {
            "neither a path nor [model.new]"
        };
        check.that(
            "model",
            found,
            one,
            "either `path` (a Hugging Face directory) or a section [model.new]",
        )?;
        if let Some(context) = self.max_position_embeddings {
            let expected = "nothing: a new model's context is `model.new.max_position_embeddings`";
            check.that("model.max_position_embeddings", context, self.new.is_none(), expected)?;
        }
        if let Some(new) = &self.new {
            check.name(
                "model.new.family",
                &new.family,
                &NewModel::FAMILIES.map(|family| family.model_type()),
            )?;
            if let Err(e) = new.config(256) {
                check.that("model.new", e, false, "sizes that fit together")?;
            }
        }
        Ok(())
    }
}
