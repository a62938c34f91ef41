//! `qurl bench rollout`: the engine on random weights of a named shape, in several number formats.
//!
//! Every round runs each format once, and a figure is the median of its rounds: a disturbance of the machine
//! is the same for all formats. A run is a batch of prompts of one length that all sample the same number of
//! tokens. It is cut in two at the moment when the last prompt has got its first token: before lies the
//! prefill, after it the decode. With `--context` there is no prefill: all sequences begin at that many
//! tokens, whose keys and values are arbitrary ([`Engine::fill_pages`]), and only decode is measured.
//!
//! The limits are measured in the same run. A decode step cannot take less time than reading all packed
//! weights and the keys and values of the batch once (from memory, or where all of it fits there from the
//! caches), nor less than the multiply-adds of its linear layers at the peak of the unit.

use super::machine::Machine;
use super::repack::repack_random;
use super::{Document, median, print_json, shape};
use crate::device::DeviceArg;
use crate::input::{OrBad, bad};
use crate::output::{OutputError, out};
use crate::packing::Extent;
use crate::system::peak_rss_mb;
use qurl_kernels::types::KvShape;
use qurl_kernels::{Device, Format, Queue};
use qurl_model::ModelConfig;
use qurl_model::compute::{Network, NetworkOptions};
use qurl_model::lora::{Lora, Modules};
use qurl_model::rng::CounterRng;
use qurl_rollout::{Engine, EngineOptions, Request, SampleKey, WeightVersion};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Model shape: "default" (what `qurl sft` trains), "5m", or a published one such as qwen2.5-0.5b
    #[arg(long, default_value = "qwen2.5-0.5b")]
    shape: String,
    /// Number formats of the weights
    #[arg(long, value_delimiter = ',', default_values_t = [Format::Bf16, Format::Int8])]
    formats: Vec<Format>,
    #[command(flatten)]
    extent: Extent,
    /// Rank of LoRA adapters beside all linear layers; 0 for none
    #[arg(long, default_value_t = 0)]
    lora_rank: usize,
    /// Prompts that are answered together
    #[arg(long, value_delimiter = ',', default_values_t = [32])]
    batch: Vec<usize>,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Measure decode at a context of so many tokens, without computing it: the cache is filled with finite
    /// numbers
    #[arg(long, conflicts_with = "prompt")]
    context: Option<usize>,
    /// New tokens per prompt
    #[arg(long, default_value_t = 128)]
    new: usize,
    /// Most tokens of a step; longer prompts are computed in chunks. As `rollout.max_num_batched_tokens`
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_batched_tokens: Option<u32>,
    /// Tokens of a page of keys and values. As `rollout.page_size`
    #[arg(long)]
    page_size: Option<usize>,
    /// Runs of every format
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[command(flatten)]
    pub device: DeviceArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

impl Args {
    /// Tokens of a sequence before the first new one.
    fn cached(&self) -> usize {
        self.context.unwrap_or(self.prompt)
    }

    /// Size of an engine, as recipes have it on this device where nothing else is asked for; without memory.
    fn engine<D: Device>(&self, device: &D, batch: usize) -> EngineOptions {
        let defaults = EngineOptions::of_device(device);
        EngineOptions {
            page_size: self.page_size.unwrap_or(defaults.page_size),
            max_num_batched_tokens: self
                .max_num_batched_tokens
                .map_or(defaults.max_num_batched_tokens, |most| most as usize),
            max_num_seqs: batch,
            ..defaults
        }
    }
}

#[derive(Serialize)]
struct Row {
    case: &'static str,
    shape: String,
    format: String,
    head_format: String,
    kv_format: &'static str,
    lora_rank: usize,
    batch: usize,
    #[serde(flatten)]
    cached: Cached,
    new: usize,
    rounds: usize,
    /// New tokens a second of the decode phase, the most that the measured limits allow, and the ratio of
    /// both.
    tokens_per_s: f64,
    limit_tokens_per_s: f64,
    share: f64,
    /// Where prompts are computed.
    #[serde(flatten)]
    prefill: Option<Prefill>,
    /// Packed weights and cache read by the decode phase, and what the machine can read.
    gb_per_s: f64,
    peak_gb_per_s: f64,
    /// Multiply-adds (times two) of the linear layers in the decode phase, and what the machine can do.
    gflops: f64,
    peak_gflops: f64,
    weight_mb: f64,
    /// Packing changed f32 weights again, and reading them once at the bandwidth measured on them in between,
    /// in the round with the median of the ratio of both.
    requantize_s: f64,
    read_weights_s: f64,
    peak_rss_mb: Option<f64>,
}

/// Tokens of a sequence before the first new one.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Cached {
    Prompt(usize),
    Context(usize),
}

/// What prompts take.
#[derive(Serialize)]
struct Prefill {
    /// New tokens a second from the first prompt token to the last new one.
    total_tokens_per_s: f64,
    prefill_tokens_per_s: f64,
    prefill_limit_tokens_per_s: f64,
    /// Mean over the prompts, all of which arrive at the same time.
    first_token_s: f64,
}

/// Parameters above which formats are measured one after the other: their packed weights may not fit
/// together.
const APART: u64 = 10_000_000_000;

/// The runs of a format and the limits of the machine: the best arithmetic that any round saw, and readings
/// of the memory before and after every run, because neighbours on the same machine may take half of its
/// bandwidth for a while.
#[derive(Default)]
struct Measured {
    times: Vec<Times>,
    /// Bytes a second from an array as large as what a decode step reads, which for a small model is in the
    /// caches.
    step_memory: Vec<f64>,
    block_gflops: f64,
    head_gflops: f64,
}

impl Measured {
    fn arithmetic<D: Machine>(&mut self, queue: &mut D::Queue, engine: &Engine<D>) -> anyhow::Result<()> {
        let options = engine.network().options();
        self.block_gflops = self.block_gflops.max(D::peak_gflops(queue, options.format)?);
        self.head_gflops = self.head_gflops.max(D::peak_gflops(queue, options.head_format)?);
        Ok(())
    }

    fn read<D: Machine>(
        &mut self,
        queue: &mut D::Queue,
        engine: &Engine<D>,
        batch: usize,
        args: &Args,
    ) -> anyhow::Result<()> {
        self.step_memory.push(D::bandwidth_of(queue, step_bytes(engine, batch, args) as usize)?);
        Ok(())
    }
}

/// Bytes that a decode step in the middle of a run reads: all packed weights, and the keys and values of the
/// batch.
fn step_bytes<D: Machine>(engine: &Engine<D>, batch: usize, args: &Args) -> f64 {
    let token_bytes = engine.page_bytes() as f64 / engine.pages().page_size() as f64;
    let cached = args.cached() as f64 + args.new as f64 / 2.0;
    engine.network().weight_bytes() as f64 + batch as f64 * token_bytes * cached
}

/// What one run took.
struct Times {
    first_token: f64,
    prefill: f64,
    total: f64,
    /// Tokens that the decode phase sampled.
    decoded: usize,
    requantize: f64,
    /// Reading the f32 weights once, at the bandwidth measured on them.
    reading: f64,
}

pub fn run<D: Machine>(device: Arc<D>, args: Args) -> anyhow::Result<()> {
    let positive = [args.cached(), args.rounds, args.formats.len(), args.batch.len()].iter().all(|&x| x > 0);
    if !positive || args.new < 2 || args.batch.contains(&0) {
        let counts = "--batch, --prompt, --context, --rounds and --formats must be at least 1";
        return Err(bad(format!("{counts}, --new at least 2")));
    }
    let config = shape::config(&args.shape)?;
    let positions = args.cached() + args.new;
    let option = if args.context.is_some() { "--context" } else { "--prompt" };
    if positions > config.max_position_embeddings {
        return Err(bad(format!(
            "{option} and --new are {positions} tokens, the context of {} is {}",
            args.shape, config.max_position_embeddings
        )));
    }
    if !args.json {
        out!("{}", device.info().description)?;
        out!(
            "{}: {} parameters, {} of {}, {} new tokens, median of {} rounds",
            args.shape,
            config.param_count(),
            if args.context.is_some() { "contexts" } else { "prompts" },
            args.cached(),
            args.new,
            args.rounds
        )?;
    }
    let mut rows = Vec::new();
    let mut queue = device.queue()?;
    for &batch in &args.batch {
        rows.extend(measure::<D>(&mut queue, &config, batch, positions, &args)?);
    }
    if args.json {
        print_json(&Document { machine: device.info().description, results: rows })?;
    }
    Ok(())
}

/// All formats at one batch size. Where the engines of all formats fit beside each other, the rounds
/// alternate; else one format comes after the other.
fn measure<D: Machine>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    batch: usize,
    positions: usize,
    args: &Args,
) -> anyhow::Result<Vec<Row>> {
    let lora = Lora { rank: args.lora_rank, alpha: 1.0, rslora: false, targets: Modules::ALL };
    let lora = (args.lora_rank > 0).then_some(lora);
    let options = |format| NetworkOptions { positions, lora, ..args.extent.options(config, format) };
    let mut together = 0;
    for &format in &args.formats {
        let weights = 2 * config.param_count() as usize; // at most, but for f32
        let size = args.engine(&**queue.device(), batch);
        together += weights + kv_bytes(&**queue.device(), config, options(format), size);
    }
    // An eighth of the memory for f32 weights that are packed, workspace and the driver.
    let fits = queue.device().memory().is_none_or(|memory| together < memory.free / 8 * 7);
    let apart = config.param_count() > APART || !fits;
    let groups: Vec<&[Format]> = if apart { args.formats.chunks(1).collect() } else { vec![&args.formats] };
    let mut rows = Vec::new();
    for formats in groups {
        let mut engines = Vec::new();
        for &format in formats {
            let size = args.engine(&**queue.device(), batch);
            let mut engine = engine::<D>(queue, config, options(format), size)?;
            if args.context.is_some() {
                engine.fill_pages(queue, 5)?;
            }
            engines.push(engine);
        }
        let mut measured: Vec<Measured> = engines.iter().map(|_| Measured::default()).collect();
        for round in 0..args.rounds {
            for (engine, measured) in engines.iter_mut().zip(&mut measured) {
                measured.arithmetic(queue, engine)?;
                measured.read(queue, engine, batch, args)?;
                measured.times.push(once(queue, engine, batch, round as u64, args)?);
                measured.read(queue, engine, batch, args)?;
            }
        }
        for (engine, measured) in engines.iter().zip(&measured) {
            let row = summarize(engine, measured, batch, args);
            if !args.json {
                print_row(&row)?;
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn engine<D: Machine>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    options: NetworkOptions,
    size: EngineOptions,
) -> anyhow::Result<Engine<D>> {
    let device = queue.device().clone();
    let kv_bytes = kv_bytes(&*device, config, options, size);
    let network = Network::random(queue, config, options, 5)?;
    Engine::new(device, network, WeightVersion::default(), EngineOptions { kv_bytes, ..size }).or_bad()
}

/// Memory for the keys and values of a whole batch.
fn kv_bytes<D: Device>(
    device: &D,
    config: &ModelConfig,
    options: NetworkOptions,
    size: EngineOptions,
) -> usize {
    let page_size = size.page_size;
    let shape = KvShape {
        format: options.kv_format,
        pages: 1,
        page_size,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
    };
    // Some pages more than the batch fills, as the scheduler keeps a few free.
    let pages = size.max_num_seqs * options.positions.div_ceil(page_size.max(1)) * 51 / 50 + 2;
    device.kv_page_bytes(shape) * config.num_layers * pages
}

/// Packs the weights anew and answers one batch of prompts.
fn once<D: Machine>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    batch: usize,
    round: u64,
    args: &Args,
) -> anyhow::Result<Times> {
    // The bandwidth may change from one moment and from one place to the next, so it is measured in between,
    // on the weights themselves. That also pushes those that are packed first out of the caches.
    let (mut requantize, mut made, mut bytes, mut seconds) = (0.0, 0, 0.0, 0.0);
    let mut bandwidth = Ok(1.0);
    engine.load_with(WeightVersion { version: round, checksum: 0 }, |network| {
        repack_random::<D>(queue, network, 6 + round, |queue, weights, packing| {
            if made % D::PACKED_TOGETHER == 0 && bandwidth.is_ok() {
                bandwidth = D::bandwidth_from(queue, weights);
            }
            let group = 4.0 * weights.iter().map(|weights| D::len(weights)).sum::<usize>() as f64;
            (made, bytes) = (made + 1, bytes + group);
            seconds += group / bandwidth.as_ref().unwrap_or(&1.0);
            requantize += packing(queue)?;
            Ok(())
        })
    })?;
    bandwidth?;
    let reading = 4.0 * engine.network().config().param_count() as f64 * seconds / bytes;

    let vocabulary = engine.network().config().vocab_size as u64;
    let start = Instant::now();
    for prompt in 0..batch as u64 {
        let rng = CounterRng::new(&[11, round, prompt]);
        let ids = (0..args.cached() as u64).map(|i| rng.below_at(i, vocabulary) as u32).collect();
        let key = SampleKey { seed: 1, step: round, prompt };
        let request = Request { key, ..Request::new(ids, args.new) };
        match args.context {
            Some(_) => engine.submit_at_context(request)?,
            None => engine.submit(request)?,
        };
    }
    let (mut waiting, mut decoded, mut first_token, mut prefill) = (BTreeSet::new(), 0, 0.0, 0.0);
    while engine.unfinished() > 0 {
        let emitted = engine.step(queue)?;
        if waiting.len() == batch {
            decoded += emitted.len();
            continue;
        }
        prefill = start.elapsed().as_secs_f64();
        for token in emitted {
            if waiting.insert(token.request) {
                first_token += prefill / batch as f64;
            }
        }
    }
    let total = start.elapsed().as_secs_f64();
    engine.finished();
    Ok(Times { first_token, prefill, total, decoded, requantize, reading })
}

fn summarize<D: Machine>(engine: &Engine<D>, measured: &Measured, batch: usize, args: &Args) -> Row {
    let of = |figure: fn(&Times) -> f64| median(measured.times.iter().map(figure).collect());
    let network = engine.network();
    let (options, config) = (network.options(), network.config());
    let block_gflop = 2e-9 * block_weights(config) as f64;
    let head_gflop = 2e-9 * (config.vocab_size * config.hidden_size) as f64;
    let token_gflop = block_gflop + head_gflop;
    let token_seconds = block_gflop / measured.block_gflops + head_gflop / measured.head_gflops;
    let step_bytes = step_bytes(engine, batch, args);
    let step_memory = median(measured.step_memory.clone());
    let limit = batch as f64 / (step_bytes / step_memory).max(batch as f64 * token_seconds);
    let tokens_per_s = of(|t| t.decoded as f64 / (t.total - t.prefill));
    let mut packing: Vec<(f64, f64)> = measured.times.iter().map(|t| (t.requantize, t.reading)).collect();
    packing.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
    let (requantize_s, read_weights_s) = packing[packing.len() / 2];
    Row {
        case: "rollout",
        shape: args.shape.clone(),
        format: options.format.to_string(),
        head_format: options.head_format.to_string(),
        kv_format: options.kv_format.name(),
        lora_rank: args.lora_rank,
        batch,
        cached: args.context.map_or(Cached::Prompt(args.prompt), Cached::Context),
        new: args.new,
        rounds: args.rounds,
        tokens_per_s,
        limit_tokens_per_s: limit,
        share: tokens_per_s / limit,
        prefill: args.context.is_none().then(|| Prefill {
            total_tokens_per_s: (batch * args.new) as f64 / of(|t| t.total),
            prefill_tokens_per_s: (batch * args.prompt) as f64 / of(|t| t.prefill),
            // The head is computed for the last token of a prompt only.
            prefill_limit_tokens_per_s: measured.block_gflops / block_gflop,
            first_token_s: of(|t| t.first_token),
        }),
        gb_per_s: tokens_per_s / batch as f64 * step_bytes / 1e9,
        peak_gb_per_s: step_memory / 1e9,
        gflops: tokens_per_s * token_gflop,
        peak_gflops: token_gflop / token_seconds,
        weight_mb: network.weight_bytes() as f64 / 1e6,
        requantize_s,
        read_weights_s,
        peak_rss_mb: peak_rss_mb(),
    }
}

/// Weights of the blocks' linear layers.
fn block_weights(c: &ModelConfig) -> usize {
    c.num_layers * c.hidden_size * (c.qkv_dim() + c.q_dim() + 3 * c.intermediate_size)
}

fn print_row(row: &Row) -> Result<(), OutputError> {
    out!(
        "{:9} cache {:4} batch {:3}: {:7.1} tokens/s of {:7.1} ({:3.0}%)  {:5.1} of {:4.1} GB/s  \
         {:5.0} of {:5.0} GFLOP/s",
        row.format,
        row.kv_format,
        row.batch,
        row.tokens_per_s,
        row.limit_tokens_per_s,
        100.0 * row.share,
        row.gb_per_s,
        row.peak_gb_per_s,
        row.gflops,
        row.peak_gflops
    )?;
    let Some(prefill) = &row.prefill else { return Ok(()) };
    out!(
        "          prefill {:7.1} tokens/s of {:7.1}  first token {:.3} s  all {:7.1} tokens/s  \
         requantizing {:.3} s, reading f32 {:.3} s",
        prefill.prefill_tokens_per_s,
        prefill.prefill_limit_tokens_per_s,
        prefill.first_token_s,
        prefill.total_tokens_per_s,
        row.requantize_s,
        row.read_weights_s
    )
}
