//! One architecture family (RMSNorm, RoPE, grouped-query attention, SwiGLU) covers every model we train:
//! Qwen2/2.5, Qwen3, Llama, Mistral and the DeepSeek-R1 distillations.
//!
//! The host side reads and writes Hugging Face directories: [`config`] checks `config.json`, [`params`]
//! lays the weights out as one plain tree, [`hf`] loads and saves them, [`tokenizer`] and [`chat`] turn
//! text into ids. [`rng`] holds the counter-based random numbers that initialisation and sampling share.

pub mod chat;
pub mod compute;
pub mod config;
pub mod generation;
pub mod hf;
mod keys;
pub mod params;
pub mod rng;
pub mod tokenizer;

pub use chat::{ChatError, ChatTemplate, Message};
pub use config::{ConfigError, Dims, Dtype, Family, ModelConfig, Rope, RopeScaling};
pub use generation::GenerationConfig;
pub use hf::{HfError, LoadedModel};
pub use params::{DenseMlp, LayerParams, MlpParams, ParamInfo, ParamKind, Params};
pub use tokenizer::{Tokenizer, TokenizerError};
