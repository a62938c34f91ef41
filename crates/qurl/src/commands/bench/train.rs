//! `qurl bench train`: whole training steps (forward, backward, AdamW) on random tokens.
//!
//! The default is a Llama-style model of 5,082,368 parameters on 16 x 256 tokens a step. The limit counts the
//! multiply-adds that the step cannot do without (6 per weight and token, and causal attention) over the peak
//! of the machine's unit, measured in the same run.

use super::machine::Machine;
use super::{Document, median, print_json, shape};
use crate::device::DeviceArg;
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::system::peak_rss_mb;
use qurl_kernels::{DeviceError, Format, Queue};
use qurl_model::ModelConfig;
use qurl_model::compute::{Recompute, TapeOptions, Targets, whole_batch};
use qurl_model::rng::CounterRng;
use qurl_train::learner::{Learner, LearnerOptions, LossGradient, LossScope};
use qurl_train::memory::MemoryPlan;
use qurl_train::optimizer::AdamWOptions;
use qurl_train::ranks::Ranks;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Model shape: "5m", "default", or a published one such as qwen2.5-0.5b
    #[arg(long, default_value = "5m")]
    shape: String,
    /// Number formats to compute in
    #[arg(long, value_delimiter = ',', default_values_t = [Format::F32, Format::Bf16])]
    formats: Vec<Format>,
    /// Sequences per step
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 256)]
    length: usize,
    /// Most tokens of a micro-batch
    #[arg(long, default_value_t = 1024)]
    micro_tokens: usize,
    /// Timed steps
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Shards that the gradients of a step are added up in, a power of two (see trainer.shards)
    #[arg(long, default_value_t = 1)]
    shards: usize,
    /// Compute none, mlp or block again in the backward pass (see trainer.recompute); block if it is not said
    #[arg(long, value_name = "WHAT", num_args = 0..=1, default_value_t = Recompute::None,
        default_missing_value = "block")]
    recompute: Recompute,
    /// Pack the weights of blocks for the forward pass alone (see trainer.pack_once)
    #[arg(long)]
    pack_once: bool,
    #[command(flatten)]
    pub device: DeviceArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    case: &'static str,
    shape: String,
    format: String,
    batch: usize,
    length: usize,
    shards: usize,
    tokens_per_s: f64,
    limit_tokens_per_s: f64,
    share: f64,
    gflops: f64,
    peak_gflops: f64,
    peak_rss_mb: Option<f64>,
    loss: f64,
}

pub fn run<D: Machine>(device: Arc<D>, args: Args) -> anyhow::Result<()> {
    if args.batch == 0 || args.length < 2 || args.steps == 0 {
        return Err(bad("--batch and --steps must be at least 1, --length at least 2"));
    }
    if !args.shards.is_power_of_two() {
        return Err(bad(format!("--shards is {}, expected a power of two", args.shards)));
    }
    let config = shape::config(&args.shape)?;
    let mut rows = Vec::new();
    if !args.json {
        out!("{}", device.info().description)?;
        out!("{} parameters, {} x {} tokens per step, AdamW", config.param_count(), args.batch, args.length)?;
    }
    for &format in &args.formats {
        let row = measure(&device, &config, &args, format)?;
        if !args.json {
            out!(
                "{:5} {:8.0} tokens/s of {:6.0} ({:2.0}%)  {:6.1} GFLOP/s of {:6.1}  peak memory {:.0} MB",
                row.format,
                row.tokens_per_s,
                row.limit_tokens_per_s,
                100.0 * row.share,
                row.gflops,
                row.peak_gflops,
                row.peak_rss_mb.unwrap_or(f64::NAN)
            )?;
        }
        rows.push(row);
    }
    if args.json {
        print_json(&Document { machine: device.info().description, results: rows })?;
    }
    Ok(())
}

fn measure<D: Machine>(
    device: &Arc<D>,
    config: &ModelConfig,
    args: &Args,
    format: Format,
) -> anyhow::Result<Row> {
    let tape = TapeOptions {
        rows: args.micro_tokens.max(args.length),
        sequences: args.batch,
        recompute: args.recompute,
    };
    let options = LearnerOptions {
        lora: None,
        compute: format,
        positions: args.length,
        pack_once: args.pack_once,
        kv_format: None,
        tape,
        adamw: AdamWOptions::default(),
    };
    let ranks = Ranks::sharded(args.shards);
    MemoryPlan::of_learner(&**device, config, options, &ranks)?.check(&**device, None).or_bad()?;
    let mut queue = device.queue()?;
    let peak = D::peak_gflops(&mut queue, format)?;
    let weights = shape::weights(config);
    let mut learner = Learner::<D>::on_ranks(&mut queue, config, &weights, options, &ranks)?;
    drop(weights);
    let rng = CounterRng::new(&[7]);
    let token = |i: usize| rng.below_at(i as u64, config.vocab_size as u64) as u32;
    let sequences: Vec<Vec<u32>> =
        (0..args.batch).map(|s| (0..args.length).map(|t| token(s * args.length + t)).collect()).collect();
    let lengths = vec![args.length; args.batch];
    let shards = ranks.own_shards_of(&lengths, tape);
    let scored = (args.batch * (args.length - 1)) as f32;
    let mut loss = 0.0;
    let mut times = Vec::new();
    for step in 0..args.steps + 2 {
        let start = Instant::now();
        loss = 0.0;
        for shard in &shards {
            learner.begin_shard(&mut queue, shard.passes)?;
            for range in &shard.micros {
                let part = &sequences[range.clone()];
                learner.accumulate(
                    &mut queue,
                    &whole_batch(part),
                    Targets::of(part, |_, _| true),
                    1.0,
                    LossScope::Token,
                    |_, out| {
                        loss -= out.logp.iter().map(|&x| x as f64).sum::<f64>() / scored as f64;
                        let dlogp = vec![-1.0 / scored; out.logp.len()];
                        Ok::<_, DeviceError>(LossGradient { dlogp, dentropy: Vec::new() })
                    },
                )?;
            }
            learner.end_shard(&mut queue)?;
        }
        learner.update(&mut queue, 1e-3)?;
        queue.synchronize()?;
        if step >= 2 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let seconds = median(times);
    let flops = flops_per_token(config, args.length) * (args.batch * args.length) as f64;
    let tokens = (args.batch * args.length) as f64;
    let limit = tokens / (flops / 1e9 / peak);
    Ok(Row {
        case: "train",
        shape: args.shape.clone(),
        format: format.to_string(),
        batch: args.batch,
        length: args.length,
        shards: args.shards,
        tokens_per_s: tokens / seconds,
        limit_tokens_per_s: limit,
        share: tokens / seconds / limit,
        gflops: flops / 1e9 / seconds,
        peak_gflops: peak,
        peak_rss_mb: peak_rss_mb(),
        loss,
    })
}

/// Forward and backward: six operations per weight of a GEMM, and causal attention.
fn flops_per_token(config: &ModelConfig, length: usize) -> f64 {
    let embedding = if config.tie_word_embeddings { 0 } else { config.vocab_size * config.hidden_size };
    let in_gemms = config.param_count() as f64 - embedding as f64;
    6.0 * in_gemms + 6.0 * (config.num_layers * config.q_dim() * length) as f64
}
