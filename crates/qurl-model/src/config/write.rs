//! Writing `config.json`: both spellings, so that old and current readers see the same model.

use serde_json::{Map, Value, json};

use super::{Family, ModelConfig, RopeScaling, SlidingWindow};
use crate::keys::short_f32;

/// Which class of the reader's library a saved directory is meant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A language model: `...ForCausalLM`.
    CausalLm,
    /// A critic with one output per token: `...ForSequenceClassification` with one label.
    Critic,
}

impl ModelConfig {
    /// The contents of `config.json` for a language model.
    pub fn to_json(&self) -> Value {
        self.to_json_for(Purpose::CausalLm)
    }

    /// The contents of `config.json` for a language model or a critic.
    pub fn to_json_for(&self, purpose: Purpose) -> Value {
        let class = match purpose {
            Purpose::CausalLm => "ForCausalLM",
            Purpose::Critic => "ForSequenceClassification",
        };
        let mut map = Map::new();
        let mut put = |key: &str, value: Value| {
            map.insert(key.to_string(), value);
        };
        put("architectures", json!([format!("{}{class}", self.family.class_prefix())]));
        put("model_type", json!(self.family.model_type()));
        put("vocab_size", json!(self.vocab_size));
        put("hidden_size", json!(self.hidden_size));
        put("intermediate_size", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.num_layers));
        put("num_attention_heads", json!(self.num_heads));
        put("num_key_value_heads", json!(self.num_kv_heads));
        put("head_dim", json!(self.head_dim));
        put("hidden_act", json!("silu"));
        put("rms_norm_eps", short_f32(self.rms_norm_eps));
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("initializer_range", short_f32(self.initializer_range));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        put("attention_dropout", json!(0.0));
        put("use_cache", json!(true));
        match self.family {
            Family::Qwen2 => put("use_sliding_window", json!(self.sliding_window.is_some())),
            Family::Qwen3 => {
                put("use_sliding_window", json!(self.sliding_window.is_some()));
                put("attention_bias", json!(false));
            }
            Family::Llama => {
                put("attention_bias", json!(false));
                put("mlp_bias", json!(false));
            }
            Family::Mistral => put("sliding_window", Value::Null),
        }
        if let Some(SlidingWindow { size, layers }) = &self.sliding_window {
            put("sliding_window", json!(size));
            if self.family != Family::Mistral {
                let kind = |&window| if window { "sliding_attention" } else { "full_attention" };
                put("layer_types", json!(layers.iter().map(kind).collect::<Vec<_>>()));
                // For readers that do not know the list: windows from this layer on.
                put("max_window_layers", json!(layers.iter().take_while(|&&window| !window).count()));
            }
        }
        put("bos_token_id", json!(self.bos_token_id));
        put(
            "eos_token_id",
            match self.eos_token_ids.as_slice() {
                [] => Value::Null,
                [one] => json!(one),
                several => json!(several),
            },
        );
        put("pad_token_id", json!(self.pad_token_id));
        put("rope_theta", json!(self.rope.theta));
        let scaling = self.rope_scaling();
        let mut parameters = scaling.clone().unwrap_or_else(|| {
            let mut plain = Map::new();
            plain.insert("rope_type".to_string(), json!("default"));
            plain
        });
        parameters.insert("rope_theta".to_string(), json!(self.rope.theta));
        put("rope_scaling", scaling.map_or(Value::Null, Value::Object));
        put("rope_parameters", Value::Object(parameters));
        put("dtype", json!(self.dtype.name()));
        put("torch_dtype", json!(self.dtype.name()));
        if self.uaq != 1.0 {
            put("qurl", json!({"uaq": short_f32(self.uaq)}));
        }
        if purpose == Purpose::Critic {
            put("id2label", json!({"0": "value"}));
            put("label2id", json!({"value": 0}));
        }
        Value::Object(map)
    }

    fn rope_scaling(&self) -> Option<Map<String, Value>> {
        let value = match self.rope.scaling {
            RopeScaling::None => return None,
            RopeScaling::Linear { factor } => {
                json!({"rope_type": "linear", "type": "linear", "factor": factor})
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                json!({
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low_freq_factor,
                    "high_freq_factor": high_freq_factor,
                    "original_max_position_embeddings": original_max_position_embeddings,
                })
            }
        };
        value.as_object().cloned()
    }
}
