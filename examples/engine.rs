//! The rollout engine alone: a model in, samples with their log-probs out, in any number format. What the
//! trainer would say of the same tokens with the same weights is the same to the last bit, as the last lines
//! show.
//!
//! `cargo run --release -p qurl-examples --bin engine -- MODEL-DIRECTORY "Once upon a time"`, or without
//! arguments for a small random model

#![forbid(unsafe_code)]

use qurl_kernels::{Cpu, Device, Format, Queue};
use qurl_model::compute::{Network, NetworkOptions, score};
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{Dims, Family, ModelConfig, Params, hf, params};
use qurl_rollout::{Engine, EngineOptions, Request, SampleKey, Sampling, WeightVersion};
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

type Model = (ModelConfig, Params<Vec<f32>>, Tokenizer);

fn load(dir: &Path) -> Result<Model, Box<dyn Error>> {
    let model = hf::load(dir)?;
    Ok((model.config, model.params, Tokenizer::load(dir)?))
}

fn random() -> Result<Model, Box<dyn Error>> {
    let tokenizer = Tokenizer::characters("abcdefghijklmnopqrstuvwxyz .", &CharacterSpecials::default())?;
    let (vocab_size, hidden_size, intermediate_size) = (tokenizer.vocab_size(), 64, 192);
    let (num_layers, num_heads, num_kv_heads) = (2, 4, 2);
    let dims = Dims { vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads };
    let config = ModelConfig::from_dims(Family::Qwen2, dims)?;
    let weights = params::init(&config, 1, false);
    Ok((config, weights, tokenizer))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (config, weights, tokenizer) = match arguments.next() {
        Some(dir) => load(Path::new(&dir))?,
        None => random()?,
    };
    let text = arguments.next().unwrap_or("once upon a time".to_string());

    // Weights go to the device once; the network is a packed, here quantized copy of them.
    let device = Arc::new(Cpu::from_env()?);
    let mut queue = device.queue()?;
    let uploaded = weights.as_ref().try_map(|w| queue.upload(w))?;
    let prompt = tokenizer.encode(&text, true)?;
    let options =
        NetworkOptions { positions: prompt.len() + 32, ..NetworkOptions::inference(&config, Format::Int8) };
    let network = || Network::new(&mut device.queue()?, &config, &uploaded, options);

    // Any number of requests at once, each with samples of its own; the key names their random numbers.
    let size = EngineOptions { kv_bytes: 64 << 20, ..EngineOptions::default() };
    let mut engine = Engine::new(device.clone(), network()?, WeightVersion::default(), size)?;
    let request = Request {
        n: 4,
        sampling: Sampling { temperature: 0.8, ..Sampling::default() },
        key: SampleKey { seed: 1, ..SampleKey::default() },
        stop_ids: config.eos_token_ids.clone(),
        ..Request::new(prompt.clone(), 32)
    };
    let group = engine.generate(&mut queue, &[request])?.remove(0);
    for sample in &group.samples {
        let sum: f32 = sample.logprobs.iter().sum();
        println!("{:8.2}  {:?}", sum, tokenizer.decode(&sample.tokens, true)?);
    }

    // One forward pass over prompt and response gives the log-probs that sampling gave token by token.
    let sequences: Vec<Vec<u32>> = group.samples.iter().map(|s| [&prompt[..], &s.tokens].concat()).collect();
    let scored = score(&mut queue, &network()?, &sequences, 0.8, 1024)?;
    let same = group.samples.iter().zip(&scored).all(|(s, out)| out.logp[prompt.len() - 1..] == s.logprobs);
    println!("scored again: {}", if same { "the same bits" } else { "other bits" });
    Ok(())
}
