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

pub mod engine;
mod error;
mod generate;
pub mod pages;
pub mod request;
mod rows;
pub mod scheduler;
pub mod sequence;

pub use engine::{Emitted, Engine, EngineOptions, EngineStats, FullBatches, TextDecoder};
pub use error::RolloutError;
pub use request::{FinishReason, Group, Request, RequestId, Sample, SampleKey, Sampling, WeightVersion};
