//! The rollout engine over HTTP, in the dialects of OpenAI, vLLM and SGLang.
//!
//! Three layers, each of which knows only the one below. [`http`] is the stack: it listens, limits what a
//! caller can take of time, memory and connections, and says goodbye; the live page of runs stands on it,
//! too. [`service`] is the engine on a thread of its own, fed by a channel: requests of all clients are one
//! continuous batch, and weights change between them. [`api`] speaks the dialects: it turns bodies into
//! requests and tokens into answers.
//!
//! Log-probs are the sampler's own bits, printed so that the f32 survives, and every answer names the weights
//! that it was computed with. `docs/serve.md` has the routes.
//!
//! # Where to start
//!
//! [`serve`] takes an engine and an address; `qurl serve` is a thin command around it.
#![forbid(unsafe_code)]

pub mod api;
pub mod client;
pub mod http;
mod server;
pub mod service;

pub use server::{ServerError, ServerOptions, serve};
