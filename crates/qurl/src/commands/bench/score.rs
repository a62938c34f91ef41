//! `qurl bench score`: log-probs of whole sequences under random weights, by the forward pass that a step of
//! reinforcement learning scores its rollouts with.
//!
//! All formats are measured in turn, round by round, so that a change of clocks meets all of them alike. The
//! limit counts two operations per weight and token of the blocks at the peak of their format, those of the
//! head and of causal attention at that of bf16.

use super::machine::Machine;
use super::{Document, median, print_json, shape};
use crate::device::DeviceArg;
use crate::input::bad;
use crate::output::out;
use qurl_kernels::Format;
use qurl_kernels::types::KvFormat;
use qurl_model::ModelConfig;
use qurl_model::compute::{Network, NetworkOptions, Recompute, Tape, TapeOptions, Targets, whole_batch};
use qurl_model::rng::CounterRng;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Model shape: "default", "5m", or a published one such as qwen2.5-0.5b
    #[arg(long, default_value = "qwen2.5-0.5b")]
    shape: String,
    /// Number formats of the blocks' weights
    #[arg(long, value_delimiter = ',', default_values_t = [Format::Bf16, Format::Int8])]
    formats: Vec<Format>,
    /// Number format of keys and values in eight-bit formats; elsewhere they are in bf16 or f32
    #[arg(long)]
    kv: Option<KvFormat>,
    /// The output head in the format of the blocks, too
    #[arg(long)]
    quantize_head: bool,
    /// Sequences of a micro-batch
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 1024)]
    length: usize,
    /// Tokens of it that are scored, the last ones
    #[arg(long)]
    response: Option<usize>,
    /// Timed rounds, after one that is not
    #[arg(long, default_value_t = 5)]
    rounds: usize,
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
    kv_format: &'static str,
    batch: usize,
    length: usize,
    tokens_per_s: f64,
    limit_tokens_per_s: f64,
    share: f64,
    /// Beside the first format.
    speedup: f64,
}

pub fn run<D: Machine>(device: Arc<D>, args: Args) -> anyhow::Result<()> {
    let response = args.response.unwrap_or(args.length.saturating_sub(1));
    let counts = [args.batch, args.rounds, response];
    if counts.contains(&0) || response >= args.length || args.formats.is_empty() {
        return Err(bad(
            "--batch, --rounds and --response must be at least 1, --length more than --response",
        ));
    }
    let config = shape::config(&args.shape)?;
    let mut queue = device.queue()?;
    let mut networks = Vec::new();
    for &format in &args.formats {
        let options = NetworkOptions { positions: args.length, ..NetworkOptions::inference(&config, format) };
        let options = if args.quantize_head { options.quantize_head() } else { options };
        let kv_format = args.kv.filter(|_| format.is_quantized()).unwrap_or(options.kv_format);
        let options = NetworkOptions { kv_format, ..options };
        let peaks = (D::peak_gflops(&mut queue, format)?, D::peak_gflops(&mut queue, Format::Bf16)?);
        let net = Network::<D>::random(&mut queue, &config, options, 7)?;
        let tape = TapeOptions {
            rows: args.batch * args.length,
            sequences: args.batch,
            recompute: Recompute::Block,
        };
        // The tape of an update keeps activations; scoring needs those of one block.
        let tape = Tape::with_kv(&*device, &net, kv_format, tape)?;
        networks.push((net, tape, peaks, Vec::new()));
    }
    let rng = CounterRng::new(&[7]);
    let token = |i: usize| rng.below_at(i as u64, config.vocab_size as u64) as u32;
    let sequences: Vec<Vec<u32>> =
        (0..args.batch).map(|s| (0..args.length).map(|t| token(s * args.length + t)).collect()).collect();
    let batch = whole_batch(&sequences);
    let targets = Targets::of(&sequences, |_, position| position >= args.length - response);
    for round in 0..=args.rounds {
        for (net, tape, _, times) in &mut networks {
            let start = Instant::now();
            tape.score(&mut queue, &*net, &batch, &targets, 1.0)?;
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let tokens = (args.batch * args.length) as f64;
    let mut rows: Vec<Row> = Vec::new();
    for (net, _, peaks, times) in networks {
        let head = if args.quantize_head { peaks.0 } else { peaks.1 };
        let seconds_a_token = limit(&config, args.length, response, (peaks.0, peaks.1, head));
        let (tokens_per_s, limit_tokens_per_s) = (tokens / median(times), 1.0 / seconds_a_token);
        let speedup = tokens_per_s / rows.first().map_or(tokens_per_s, |first| first.tokens_per_s);
        rows.push(Row {
            case: "score",
            shape: args.shape.clone(),
            format: net.options().format.to_string(),
            kv_format: net.options().kv_format.name(),
            batch: args.batch,
            length: args.length,
            tokens_per_s,
            limit_tokens_per_s,
            share: tokens_per_s / limit_tokens_per_s,
            speedup,
        });
    }
    if args.json {
        return print_json(&Document { machine: device.info().description, results: rows });
    }
    out!("{}, {}, {} x {} tokens", device.info().description, args.shape, args.batch, args.length)?;
    for row in &rows {
        out!(
            "{:9} {:9.0} tokens/s of {:9.0} ({:2.0}%)  {:.2} times",
            row.format,
            row.tokens_per_s,
            row.limit_tokens_per_s,
            100.0 * row.share,
            row.speedup
        )?;
    }
    Ok(())
}

/// Seconds a token at these peaks in GFLOP/s: of the blocks, of attention, of the head.
fn limit(config: &ModelConfig, length: usize, response: usize, (blocks, full, head): (f64, f64, f64)) -> f64 {
    let head_weights = (config.vocab_size * config.hidden_size) as f64;
    let embeddings = if config.tie_word_embeddings { 1.0 } else { 2.0 };
    let in_blocks = config.param_count() as f64 - embeddings * head_weights;
    let attention = 2.0 * (config.num_layers * config.q_dim() * length) as f64;
    let scored = response as f64 / length as f64;
    (2.0 * in_blocks / blocks + attention / full + scored * 2.0 * head_weights / head) / 1e9
}
