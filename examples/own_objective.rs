//! An objective of your own: you see the log-probs of sampled tokens and answer with the derivatives of your
//! loss by them; model, backward pass and optimizer are the learner's. Here a new model, sampled from in
//! int8, learns to write nothing but the letter `a`.
//!
//! `cargo run --release -p qurl-examples --bin own_objective`

#![forbid(unsafe_code)]

use qurl_kernels::{Cpu, Device, DeviceError, Format, Rounding};
use qurl_model::compute::{Network, NetworkOptions, Recompute, TapeOptions, Targets, whole_batch};
use qurl_model::{Dims, Family, ModelConfig, params};
use qurl_rollout::{Engine, EngineOptions, Request, SampleKey, WeightVersion};
use qurl_train::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use qurl_train::optimizer::AdamWOptions;
use std::error::Error;
use std::sync::Arc;

/// A soft trust region in place of PPO's clip. With r = pi/behav and log-ratio x = log r it maximizes A * r *
/// exp(-x^2 / 2w^2): plain importance sampling where the policies agree, no gradient far away, and no corner
/// between the two. The loss is its negative; this is the derivative by log pi.
fn dlogp(logp: f32, behav: f32, advantage: f32) -> f32 {
    const WIDTH: f32 = 0.3;
    let x = logp - behav;
    -advantage * (x - x * x / (2.0 * WIDTH * WIDTH)).exp() * (1.0 - x / (WIDTH * WIDTH))
}

const A: u32 = 1; // the token of the letter `a`, in a vocabulary of nine
const LENGTH: usize = 12; // tokens of a response
const SAMPLES: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let device = Arc::new(Cpu::from_env()?);
    let mut queue = device.queue()?;
    let (hidden_size, intermediate_size, num_layers) = (32, 64, 1);
    let dims =
        Dims { vocab_size: 9, hidden_size, intermediate_size, num_layers, num_heads: 2, num_kv_heads: 2 };
    let config = ModelConfig::from_dims(Family::Qwen2, dims)?;
    let weights = params::init(&config, 7, false);

    // The policy in full precision, and its quantized copy that samples.
    let positions = 1 + LENGTH;
    let tape = TapeOptions { rows: SAMPLES * positions, sequences: SAMPLES, recompute: Recompute::None };
    let options = LearnerOptions {
        lora: None,
        compute: Format::F32,
        positions,
        pack_once: false,
        kv_format: None,
        tape,
        adamw: AdamWOptions::default(),
    };
    let mut actor = Learner::<Cpu>::new(&mut queue, &config, &weights, options)?;
    let int8 = NetworkOptions { positions, ..NetworkOptions::inference(&config, Format::Int8) };
    let copy = Network::of_leaves(&mut queue, &config, false, &mut actor.master, int8)?;
    let size = EngineOptions { kv_bytes: 1 << 20, ..EngineOptions::default() };
    let mut engine = Engine::new(device.clone(), copy, WeightVersion::default(), size)?;

    let mut shares = Vec::new(); // of the letter `a`, step by step
    for step in 0..30 {
        let version = WeightVersion { version: step, checksum: 0 };
        engine.load_with(version, |copy| {
            copy.refresh_leaves(&mut queue, &mut actor.master, Rounding::Nearest)
        })?;
        let key = SampleKey { step, ..SampleKey::default() };
        let request = Request { n: SAMPLES, key, ..Request::new(vec![0], LENGTH) };
        let group = engine.generate(&mut queue, &[request])?.remove(0);

        // Rewards of your own, and advantages: here each against the mean of its group.
        let is_a = |tokens: &[u32]| tokens.iter().filter(|&&t| t == A).count() as f32 / LENGTH as f32;
        let rewards: Vec<f32> = group.samples.iter().map(|sample| is_a(&sample.tokens)).collect();
        let mean = rewards.iter().sum::<f32>() / SAMPLES as f32;
        shares.push(mean);

        // All tokens but the prompt's are scored; `logp` has them sample by sample, in order.
        let ids: Vec<Vec<u32>> = group.samples.iter().map(|s| [&[0], &s.tokens[..]].concat()).collect();
        let behav: Vec<f32> = group.samples.iter().flat_map(|s| s.logprobs.clone()).collect();
        for _ in 0..2 {
            let targets = Targets::of(&ids, |_, position| position > 0);
            // Each token's loss is its own, so the learner may ask part by part.
            let scope = LossScope::Token;
            actor.accumulate(&mut queue, &whole_batch(&ids), targets, 1.0, scope, |part, out| {
                let of = |(t, &logp): (usize, &f32)| dlogp(logp, behav[t], rewards[t / LENGTH] - mean);
                let dlogp = part.zip(&out.logp).map(|token| of(token) / behav.len() as f32).collect();
                Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
            })?;
            actor.update(&mut queue, 1e-2)?;
        }
        eprintln!("step {step:2}  share of a {mean:.3}");
    }
    println!("share of a {:.2} -> {:.2}", shares[0], shares[shares.len() - 1]);
    Ok(())
}
