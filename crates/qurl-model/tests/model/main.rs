//! Proof of the model crate: what is read and written (`config`, `hf`, `tokenizer`, `chat`, `params`), and
//! what is computed, against transformers (`compute_goldens` on the CPU, `device_goldens` on every device).

mod chat;
mod common;
mod compute_goldens;
mod config;
mod device_adapters;
mod device_goldens;
mod hf;
mod hostile_tokenizers;
mod params;
mod tokenizer;
mod transformers;
