//! Models: their files, their weights, their forward and backward pass.
//!
//! One architecture family (RMSNorm, RoPE, grouped-query attention, SwiGLU) covers every model we train:
//! Qwen2/2.5, Qwen3, Llama, Mistral and the DeepSeek-R1 distillations.
//!
//! # Where to start
//!
//! - [`hf::load`] reads a Hugging Face directory: [`config`] checks `config.json`, [`params`] lays the
//!   weights out as one plain tree, [`tokenizer`] and [`chat`] turn text into ids; [`hf::save`] writes one.
//! - [`compute::Network`] is a model packed for a device. [`compute::Inference`] runs it for rollouts,
//!   [`compute::Tape`] forward and backward for training: the same kernels in the same order.
//! - [`rng`] holds the counter-based random numbers that initialisation and sampling share.
//!
//! A small model from nothing, and what its leaves are called here and on disk:
//! ```
//! use qurl_model::{Dims, Family, ModelConfig, params};
//!
//! let dims = Dims {
//!     vocab_size: 32,
//!     hidden_size: 64,
//!     intermediate_size: 128,
//!     num_layers: 2,
//!     num_heads: 4,
//!     num_kv_heads: 2,
//! };
//! let config = ModelConfig::from_dims(Family::Qwen2, dims)?;
//! let weights = params::init(&config, 1, false); // seed 1, no value head
//! assert_eq!(weights.iter().map(|leaf| leaf.len() as u64).sum::<u64>(), config.param_count());
//!
//! let layout = params::hf_names(&config, false);
//! let qkv = &layout.layers[0].qkv;
//! assert_eq!((qkv.info.rows, qkv.info.cols), (64 + 32 + 32, 64)); // queries, keys, values
//! assert_eq!(qkv.tensors[1].name, "model.layers.0.self_attn.k_proj.weight");
//! # Ok::<(), qurl_model::ConfigError>(())
//! ```
#![forbid(unsafe_code)]

pub mod chat;
pub mod compute;
pub mod config;
pub mod generation;
pub mod hf;
mod keys;
pub mod lora;
pub mod params;
pub mod rng;
pub mod tokenizer;

pub use chat::{ChatError, ChatTemplate, Message};
pub use config::{ConfigError, Dims, Dtype, Family, ModelConfig, Rope, RopeScaling};
pub use generation::GenerationConfig;
pub use hf::{HfError, LoadedModel};
pub use lora::Lora;
pub use params::{DenseMlp, LayerParams, MlpParams, ParamInfo, ParamKind, Params};
pub use tokenizer::{Tokenizer, TokenizerError};
