//! What a model is: the checked contents of `config.json`.
//!
//! Files in the wild spell the same thing in two ways (`rope_theta` and `rope_scaling`, or
//! `rope_parameters`; `torch_dtype` or `dtype`) and may ask for things this code does not compute.
//! Both spellings end in the same [`ModelConfig`]; anything that would change the result and is not
//! implemented is refused here by name, so that a wrong model can never run quietly.

mod named;
mod quantization;
mod read;
mod write;

pub use write::Purpose;

use std::fmt;

/// The largest value any single dimension may have: far above published models, small enough that the
/// size of every tensor and of the whole model fits 64 bits.
const MAX_DIM: usize = 1 << 24;
/// More layers than any published model; a bound so that a corrupt file cannot ask for endless memory.
const MAX_LAYERS: usize = 4096;

/// Model families that share our architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Qwen2 and Qwen2.5: bias on the query, key and value projections.
    Qwen2,
    /// Qwen3: RMSNorm on every query and key head, head size given explicitly.
    Qwen3,
    /// Llama 2 and 3, possibly with scaled rotary frequencies.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
}

impl Family {
    /// Every family, in the order in which messages list them.
    pub const ALL: [Family; 4] = [Family::Qwen2, Family::Qwen3, Family::Llama, Family::Mistral];

    /// The `model_type` of `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
            Family::Llama => "llama",
            Family::Mistral => "mistral",
        }
    }

    /// The prefix of the class names in `architectures`, as in `Qwen2ForCausalLM`.
    pub fn class_prefix(self) -> &'static str {
        match self {
            Family::Qwen2 => "Qwen2",
            Family::Qwen3 => "Qwen3",
            Family::Llama => "Llama",
            Family::Mistral => "Mistral",
        }
    }

    /// Whether query, key and value projections carry a bias.
    pub fn has_qkv_bias(self) -> bool {
        matches!(self, Family::Qwen2)
    }

    /// Whether query and key heads are normalised before the rotation.
    pub fn has_qk_norm(self) -> bool {
        matches!(self, Family::Qwen3)
    }
}

/// Number formats in which weights are stored on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// The name `config.json` uses.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::Bf16 => "bfloat16",
            Dtype::F16 => "float16",
        }
    }

    /// Bytes of one stored number.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How rotary frequencies are stretched beyond the context they were trained with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// Plain frequencies.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear ramp between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are scaled fully.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length before scaling.
        original_max_position_embeddings: usize,
    },
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Stretching of the frequencies.
    pub scaling: RopeScaling,
}

/// Attention that sees no further back than a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    /// A query sees itself and the `size - 1` positions before it.
    pub size: usize,
    /// Which layers have it; the others see everything.
    pub layers: Vec<bool>,
}

/// The six numbers that size a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dims {
    /// V: rows of the embedding.
    pub vocab_size: usize,
    /// d: width of the residual stream.
    pub hidden_size: usize,
    /// f: width of the gated MLP.
    pub intermediate_size: usize,
    /// L: transformer blocks.
    pub num_layers: usize,
    /// H: query heads.
    pub num_heads: usize,
    /// KV: key and value heads.
    pub num_kv_heads: usize,
}

/// A checked model configuration. Fields are plain; after changing them call [`ModelConfig::check`].
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Which published architecture this is, hence how files name and spell things.
    pub family: Family,
    /// V: rows of the embedding.
    pub vocab_size: usize,
    /// d: width of the residual stream.
    pub hidden_size: usize,
    /// f: width of the gated MLP.
    pub intermediate_size: usize,
    /// L: transformer blocks.
    pub num_layers: usize,
    /// H: query heads.
    pub num_heads: usize,
    /// KV: key and value heads; a divisor of `num_heads`.
    pub num_kv_heads: usize,
    /// hd: width of one head; even. `num_heads * head_dim` need not equal `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square inside RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The longest sequence the model was made for.
    pub max_position_embeddings: usize,
    /// Layers with a sliding window, where there are some.
    pub sliding_window: Option<SlidingWindow>,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether query, key and value projections carry a bias.
    pub qkv_bias: bool,
    /// Whether query and key heads are normalised.
    pub qk_norm: bool,
    /// Beginning of text, where the model has one.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence; may be empty or several.
    pub eos_token_ids: Vec<u32>,
    /// Padding, where the model has one.
    pub pad_token_id: Option<u32>,
    /// Standard deviation of freshly initialised weights.
    pub initializer_range: f32,
    /// Number format of the stored weights.
    pub dtype: Dtype,
    /// The scale of update-aware quantization that the weights carry, 1 for none: the matrices after norms
    /// are divided by it, the norms' gains multiplied. What the model computes does not depend on it; it is a
    /// mark (`qurl.uaq` in `config.json`), so that nobody scales them again.
    pub uaq: f32,
}

/// Scales of update-aware quantization that are taken. Far outside, scaled weights leave the range of f32.
pub const UAQ_SCALES: std::ops::RangeInclusive<f32> = 1.0 / 64.0..=64.0;

/// Why a configuration was not accepted. Every message names the file and the key.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not a JSON object.
    #[error("{file}: expected a JSON object: {reason}")]
    Json {
        /// The file.
        file: String,
        /// What the parser said.
        reason: String,
    },
    /// A key that has no default is not there.
    #[error("{file}: key `{key}` is missing, expected {expected}")]
    Missing {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What should be there.
        expected: String,
    },
    /// A value of the wrong type, out of range or in contradiction with another.
    #[error("{file}: key `{key}` is {found}, expected {expected}")]
    Invalid {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The value as written.
        found: String,
        /// What would be accepted.
        expected: String,
    },
    /// A valid value that asks for something this program does not compute.
    #[error("{file}: key `{key}` is {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The value as written.
        found: String,
        /// What would be accepted.
        supported: String,
    },
    /// No published shape of that name.
    #[error("unknown model shape `{name}`, known: {known}")]
    UnknownShape {
        /// The name asked for.
        name: String,
        /// All names, separated by commas.
        known: String,
    },
}

impl ModelConfig {
    /// A model of the given size with the family's published constants, untied, stored as f32.
    ///
    /// `head_dim` is `hidden_size / num_heads`; set the field and call [`ModelConfig::check`] for another.
    pub fn from_dims(family: Family, dims: Dims) -> Result<ModelConfig, ConfigError> {
        let theta = match family {
            Family::Qwen2 | Family::Qwen3 | Family::Mistral => 1e6,
            Family::Llama => 1e4,
        };
        let config = ModelConfig {
            family,
            vocab_size: dims.vocab_size,
            hidden_size: dims.hidden_size,
            intermediate_size: dims.intermediate_size,
            num_layers: dims.num_layers,
            num_heads: dims.num_heads,
            num_kv_heads: dims.num_kv_heads,
            head_dim: dims.hidden_size / dims.num_heads.max(1),
            rms_norm_eps: match family {
                Family::Qwen2 | Family::Qwen3 => 1e-6,
                Family::Llama | Family::Mistral => 1e-5,
            },
            rope: Rope { theta, scaling: RopeScaling::None },
            max_position_embeddings: 32768,
            sliding_window: None,
            tie_word_embeddings: false,
            qkv_bias: family.has_qkv_bias(),
            qk_norm: family.has_qk_norm(),
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
            initializer_range: 0.02,
            dtype: Dtype::F32,
            uaq: 1.0,
        };
        config.check("model dimensions")?;
        Ok(config)
    }

    /// Checks ranges and consistency; `origin` names the file or the caller in messages.
    pub fn check(&self, origin: &str) -> Result<(), ConfigError> {
        let fail = |key: &str, found: String, expected: &str| {
            Err(ConfigError::Invalid {
                file: origin.to_string(),
                key: key.to_string(),
                found,
                expected: expected.to_string(),
            })
        };
        let dims = [
            ("vocab_size", self.vocab_size, MAX_DIM),
            ("hidden_size", self.hidden_size, MAX_DIM),
            ("intermediate_size", self.intermediate_size, MAX_DIM / 2),
            ("num_hidden_layers", self.num_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_heads, MAX_DIM),
            ("num_key_value_heads", self.num_kv_heads, MAX_DIM),
            ("head_dim", self.head_dim, MAX_DIM),
            ("max_position_embeddings", self.max_position_embeddings, MAX_DIM),
        ];
        for (key, value, max) in dims {
            if value == 0 || value > max {
                return fail(key, value.to_string(), &format!("a whole number from 1 to {max}"));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("a divisor of num_attention_heads = {}", self.num_heads);
            return fail("num_key_value_heads", self.num_kv_heads.to_string(), &expected);
        }
        if !self.head_dim.is_multiple_of(2) {
            return fail("head_dim", self.head_dim.to_string(), "an even number (rotary pairs)");
        }
        let heads = self.num_heads.saturating_add(self.num_kv_heads.saturating_mul(2));
        if heads.saturating_mul(self.head_dim) > MAX_DIM {
            let expected = format!("(heads + 2 key-value heads) * head_dim of at most {MAX_DIM}");
            return fail("head_dim", self.head_dim.to_string(), &expected);
        }
        if !(self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0) {
            return fail("rms_norm_eps", self.rms_norm_eps.to_string(), "a finite number above 0");
        }
        if !(self.initializer_range.is_finite() && self.initializer_range >= 0.0) {
            let found = self.initializer_range.to_string();
            return fail("initializer_range", found, "a finite number, 0 or more");
        }
        if !UAQ_SCALES.contains(&self.uaq) {
            return fail("qurl.uaq", self.uaq.to_string(), "a number from 1/64 to 64, 1 for none");
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return fail("rope_theta", shown(self.rope.theta), "a finite number above 0");
        }
        let positive = |key: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            fail(key, shown(value), "a finite number above 0")
        };
        match self.rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => positive("rope_scaling.factor", factor)?,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                positive("rope_scaling.factor", factor)?;
                positive("rope_scaling.low_freq_factor", low_freq_factor)?;
                positive("rope_scaling.high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    let expected = format!("a number above low_freq_factor = {}", shown(low_freq_factor));
                    let found = shown(high_freq_factor);
                    return fail("rope_scaling.high_freq_factor", found, &expected);
                }
                if original_max_position_embeddings == 0 {
                    let key = "rope_scaling.original_max_position_embeddings";
                    return fail(key, "0".to_string(), "a whole number above 0");
                }
            }
        }
        if let Some(SlidingWindow { size, layers }) = &self.sliding_window {
            if *size == 0 || *size > MAX_DIM {
                return fail(
                    "sliding_window",
                    size.to_string(),
                    &format!("a whole number from 1 to {MAX_DIM}"),
                );
            }
            if layers.len() != self.num_layers {
                let expected = format!("one for each of num_hidden_layers = {}", self.num_layers);
                return fail("layer_types", format!("a list of {}", layers.len()), &expected);
            }
        }
        if self.qkv_bias != self.family.has_qkv_bias() {
            let expected = format!("{} for {}", self.family.has_qkv_bias(), self.family.model_type());
            return fail("qkv_bias", self.qkv_bias.to_string(), &expected);
        }
        if self.qk_norm != self.family.has_qk_norm() {
            let expected = format!("{} for {}", self.family.has_qk_norm(), self.family.model_type());
            return fail("qk_norm", self.qk_norm.to_string(), &expected);
        }
        Ok(())
    }

    /// H * hd: width of all query heads together.
    pub fn q_dim(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// KV * hd: width of all key (or value) heads together.
    pub fn kv_dim(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// The sliding window of a layer: a query sees itself and the `window - 1` positions before it; `None`
    /// sees all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.sliding_window.as_ref().filter(|window| window.layers[layer]).map(|window| window.size)
    }

    /// Rows of the fused projection: queries, then keys, then values.
    pub fn qkv_dim(&self) -> usize {
        self.q_dim() + 2 * self.kv_dim()
    }

    /// Number of parameters without a value head; a tied head counts once.
    pub fn param_count(&self) -> u64 {
        let [v, d, f] = [self.vocab_size, self.hidden_size, self.intermediate_size].map(|n| n as u64);
        let (q, qkv) = (self.q_dim() as u64, self.qkv_dim() as u64);
        let mut layer = 2 * d + qkv * d + q * d + 3 * f * d;
        if self.qkv_bias {
            layer += qkv;
        }
        if self.qk_norm {
            layer += 2 * self.head_dim as u64;
        }
        let heads = if self.tie_word_embeddings { 1 } else { 2 };
        heads * v * d + self.num_layers as u64 * layer + d
    }
}

/// A number in a message, where 1e308 is no line of digits.
pub(crate) fn shown(number: f64) -> String {
    const MAX_DIGITS: usize = 24;
    let digits = number.to_string();
    if digits.len() > MAX_DIGITS { format!("{number:e}") } else { digits }
}
