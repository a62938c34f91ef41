//! Reading `config.json`: both spellings in, refusals by name.
//!
//! Defaults of absent keys are those of the published classes. A JSON `null` counts as absent.

use std::path::Path;

use serde_json::Value;

use super::{
    ConfigError, Dtype, Family, MAX_LAYERS, ModelConfig, Rope, RopeScaling, SlidingWindow, quantization,
};
use crate::keys::{Keys, parse_object, read_text};

const MODEL_TYPES: &str = "qwen2, qwen3, llama, mistral (dense)";

impl ModelConfig {
    /// Reads and checks a `config.json`.
    pub fn read(path: &Path) -> Result<ModelConfig, ConfigError> {
        Self::from_json(&read_text(path)?, &path.display().to_string())
    }

    /// Parses the text of a `config.json`; `file` names it in messages.
    pub fn from_json(text: &str, file: &str) -> Result<ModelConfig, ConfigError> {
        let map = parse_object(text, file)?;
        let keys = Keys::new(file, &map);
        let family = family(&keys)?;
        refuse_unsupported(&keys, family)?;

        let hidden_size = keys.required_usize("hidden_size")?;
        let num_heads = keys.required_usize("num_attention_heads")?;
        if num_heads == 0 {
            return Err(keys.invalid("num_attention_heads", "a whole number of at least 1"));
        }
        let num_kv_heads = match (keys.usize("num_key_value_heads")?, family) {
            (Some(n), _) => n,
            (None, Family::Llama) => num_heads,
            (None, _) => keys.required_usize("num_key_value_heads")?,
        };
        let head_dim = match (keys.usize("head_dim")?, family) {
            (Some(n), _) => n,
            (None, Family::Qwen3) => 128,
            (None, _) if hidden_size.is_multiple_of(num_heads) => hidden_size / num_heads,
            (None, _) => {
                let expected =
                    format!("a multiple of num_attention_heads = {num_heads} where head_dim is not given");
                return Err(keys.invalid("hidden_size", &expected));
            }
        };
        let num_layers = keys.required_usize("num_hidden_layers")?;
        let max_position_embeddings = keys.required_usize("max_position_embeddings")?;
        let (default_bos, default_eos) = match family {
            Family::Llama | Family::Mistral => (Some(1), vec![2]),
            Family::Qwen2 | Family::Qwen3 => (None, Vec::new()),
        };
        let config = ModelConfig {
            family,
            vocab_size: keys.required_usize("vocab_size")?,
            hidden_size,
            intermediate_size: keys.required_usize("intermediate_size")?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: keys.f64("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: rope(&keys, max_position_embeddings)?,
            max_position_embeddings,
            sliding_window: sliding_window(&keys, family, num_layers)?,
            tie_word_embeddings: keys.bool("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: family.has_qkv_bias(),
            qk_norm: family.has_qk_norm(),
            bos_token_id: if map.contains_key("bos_token_id") {
                keys.token("bos_token_id")?
            } else {
                default_bos
            },
            eos_token_ids: if map.contains_key("eos_token_id") {
                keys.tokens("eos_token_id")?
            } else {
                default_eos
            },
            pad_token_id: keys.token("pad_token_id")?,
            initializer_range: keys.f64("initializer_range")?.unwrap_or(0.02) as f32,
            dtype: dtype(&keys)?,
            uaq: uaq(&keys)?,
        };
        config.check(file)?;
        Ok(config)
    }
}

fn family(keys: &Keys) -> Result<Family, ConfigError> {
    let Some(model_type) = keys.str("model_type")? else {
        return Err(keys.missing("model_type", MODEL_TYPES));
    };
    Family::ALL
        .into_iter()
        .find(|family| family.model_type() == model_type)
        .ok_or_else(|| keys.unsupported("model_type", MODEL_TYPES))
}

/// Which layers see no further back than a window. An absent `sliding_window` is the published classes'
/// default of 4096.
fn sliding_window(
    keys: &Keys,
    family: Family,
    num_layers: usize,
) -> Result<Option<SlidingWindow>, ConfigError> {
    const DEFAULT: usize = 4096;
    const DEFAULT_FULL_LAYERS: usize = 28;
    let absent = !keys.map.contains_key("sliding_window");
    let size = keys.usize("sliding_window")?.or(absent.then_some(DEFAULT));
    let (size, first) = match family {
        Family::Llama => (None, 0),
        Family::Mistral => (size, 0),
        Family::Qwen2 | Family::Qwen3 => {
            let used = keys.bool("use_sliding_window")?.unwrap_or(false);
            let first = keys.usize("max_window_layers")?.unwrap_or(DEFAULT_FULL_LAYERS);
            (size.filter(|_| used), first)
        }
    };
    let listed = layer_types(keys)?;
    let Some(size) = size else {
        return match listed.is_some_and(|layers| layers.contains(&true)) {
            true => Err(keys.unsupported("layer_types", "full_attention where no sliding_window is given")),
            false => Ok(None),
        };
    };
    if family == Family::Mistral && listed.as_ref().is_some_and(|layers| layers.contains(&false)) {
        return Err(keys.unsupported("layer_types", "sliding_attention in every layer of mistral"));
    }
    // The number of layers is checked later.
    let by_place = || (0..num_layers.min(MAX_LAYERS)).map(|layer| layer >= first).collect();
    let layers: Vec<bool> = listed.unwrap_or_else(by_place);
    Ok(layers.contains(&true).then_some(SlidingWindow { size, layers }))
}

/// Whether each layer has a window, where the file lists them.
fn layer_types(keys: &Keys) -> Result<Option<Vec<bool>>, ConfigError> {
    let Some(types) = keys.get("layer_types") else { return Ok(None) };
    let kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Some(false),
        Some("sliding_attention") => Some(true),
        _ => None,
    };
    let layers: Option<Vec<bool>> = types.as_array().and_then(|list| list.iter().map(kind).collect());
    let supported = "a list of full_attention and sliding_attention";
    layers.map(Some).ok_or_else(|| keys.unsupported("layer_types", supported))
}

/// Everything that would change the computation and is not implemented.
fn refuse_unsupported(keys: &Keys, family: Family) -> Result<(), ConfigError> {
    let activation = keys.str("hidden_act")?;
    if activation.is_some_and(|name| name != "silu" && name != "swish") {
        return Err(keys.unsupported("hidden_act", "silu"));
    }
    for key in ["num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"] {
        if keys.get(key).is_some_and(|value| value.as_u64() != Some(0)) {
            return Err(keys.unsupported(key, "dense models only (no mixture of experts)"));
        }
    }
    if family != Family::Qwen2 && keys.bool("attention_bias")?.unwrap_or(false) {
        return Err(
            keys.unsupported("attention_bias", "false (only Qwen2 has biases, on query, key and value)")
        );
    }
    if keys.bool("mlp_bias")?.unwrap_or(false) {
        return Err(keys.unsupported("mlp_bias", "false"));
    }
    quantization::check(keys)
}

/// The mark of weights that were scaled for update-aware quantization: `"qurl": {"uaq": 1.5}`.
fn uaq(keys: &Keys) -> Result<f32, ConfigError> {
    let Some(ours) = keys.object("qurl", "qurl.")? else { return Ok(1.0) };
    if let Some(unknown) = ours.map.keys().find(|key| *key != "uaq") {
        return Err(ours.unsupported(unknown, "uaq only"));
    }
    Ok(ours.f64("uaq")?.unwrap_or(1.0) as f32)
}

fn dtype(keys: &Keys) -> Result<Dtype, ConfigError> {
    let key = if keys.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match keys.str(key)?.map(|name| name.trim_start_matches("torch.")) {
        None | Some("float32") => Ok(Dtype::F32),
        Some("bfloat16") => Ok(Dtype::Bf16),
        Some("float16") => Ok(Dtype::F16),
        Some(_) => Err(keys.unsupported(key, "float32, bfloat16, float16")),
    }
}

/// `rope_theta` and `rope_scaling` (old) or `rope_parameters` (new); where both are given they must agree.
fn rope(keys: &Keys, max_position_embeddings: usize) -> Result<Rope, ConfigError> {
    let refuse_partial = |keys: &Keys| match keys.f64("partial_rotary_factor")? {
        Some(share) if share != 1.0 => Err(keys.unsupported("partial_rotary_factor", "1.0 (whole heads)")),
        _ => Ok(()),
    };
    refuse_partial(keys)?;
    let old_theta = keys.f64("rope_theta")?;
    let old = keys.object("rope_scaling", "rope_scaling.")?;
    let new = keys.object("rope_parameters", "rope_parameters.")?;

    let mut theta = old_theta;
    let mut scaling = None;
    for (name, group) in [("rope_scaling", &old), ("rope_parameters", &new)] {
        let Some(group) = group else { continue };
        if group.map.values().any(Value::is_object) {
            return Err(keys.unsupported(name, "one set of parameters for all layers"));
        }
        refuse_partial(group)?;
        if let Some(inner) = group.f64("rope_theta")? {
            if theta.is_some_and(|outer| outer != inner) {
                let other = super::shown(theta.unwrap_or(inner));
                let expected = format!("the same value as the other rope_theta, {other}");
                return Err(group.invalid("rope_theta", &expected));
            }
            theta = Some(inner);
        }
        let this = rope_scaling(group, max_position_embeddings)?;
        if scaling.is_some_and(|other| other != this) {
            return Err(keys.invalid(name, "the same scaling as rope_scaling"));
        }
        scaling = Some(this);
    }
    Ok(Rope { theta: theta.unwrap_or(1e4), scaling: scaling.unwrap_or(RopeScaling::None) })
}

fn rope_scaling(keys: &Keys, max_position_embeddings: usize) -> Result<RopeScaling, ConfigError> {
    let key = if keys.get("rope_type").is_some() { "rope_type" } else { "type" };
    match keys.str(key)? {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: keys.required_f64("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: keys.required_f64("factor")?,
            low_freq_factor: keys.required_f64("low_freq_factor")?,
            high_freq_factor: keys.required_f64("high_freq_factor")?,
            original_max_position_embeddings: keys
                .usize("original_max_position_embeddings")?
                .unwrap_or(max_position_embeddings),
        }),
        Some(_) => Err(keys.unsupported(key, "default, linear, llama3")),
    }
}
