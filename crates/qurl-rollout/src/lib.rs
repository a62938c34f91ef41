//! The rollout engine: prompts in, samples with their behaviour log-probs out.
//!
//! [`Engine::step`](engine::Engine::step) is three calls: the [`scheduler`] decides which tokens of which
//! sequences are computed now, the model of `qurl-model` computes them (the very forward pass that the
//! trainer runs), and the sampled tokens are committed; on a device that computes on its own, the next step
//! is launched before that. [`pages`] is the memory of keys and values, shared by the samples of a prompt;
//! [`sequence`] is what is known about one sample. Scheduler and pages are plain data that know nothing of a
//! device.
//!
//! A sample depends on its weights, its prompt and its key (seed, step, prompt, sample) alone: not on the
//! batch, the order of requests, the number of threads, the size of a page, nor on how often it was preempted
//! and recomputed.
//!
//! # Where to start
//!
//! An [`Engine`] is made of a packed network and [`EngineOptions`]; a [`Request`] is a prompt with its
//! [`Sampling`] and [`SampleKey`], a [`Group`] its samples. `docs/rollout.md` has the design.
//!
//! Two samples of a prompt from a random int8 model; each token comes with the log-prob it was sampled with:
//! ```
//! use qurl_kernels::{Cpu, Device, Format};
//! use qurl_model::compute::{Network, NetworkOptions};
//! use qurl_model::{Dims, Family, ModelConfig};
//! use qurl_rollout::{Engine, EngineOptions, Request, WeightVersion};
//! use std::sync::Arc;
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
//! let device = Arc::new(Cpu::from_env()?);
//! let mut queue = device.queue()?;
//! let options = NetworkOptions::inference(&config, Format::Int8);
//! let network = Network::random(&mut queue, &config, options, 1)?;
//! let options = EngineOptions { kv_bytes: 1 << 20, ..EngineOptions::default() };
//! let mut engine = Engine::new(device, network, WeightVersion::default(), options)?;
//!
//! let request = Request { n: 2, ..Request::new(vec![1, 2, 3], 8) };
//! let group = engine.generate(&mut queue, &[request])?.remove(0);
//! for sample in &group.samples {
//!     assert_eq!(sample.tokens.len(), 8);
//!     assert!(sample.logprobs.iter().all(|logp| *logp < 0.0));
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod engine;
mod error;
mod generate;
pub mod pages;
mod prefixes;
pub mod request;
mod rows;
pub mod scheduler;
pub mod sequence;

pub use engine::{Emitted, Engine, EngineOptions, EngineStats, FullBatches, TextDecoder};
pub use error::RolloutError;
pub use request::{
    FinishReason, Group, MIN_TEMPERATURE, Request, RequestId, Sample, SampleKey, Sampling, TopTokens,
    WeightVersion,
};
