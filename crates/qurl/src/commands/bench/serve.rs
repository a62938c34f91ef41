//! `qurl bench serve`: a server under load, as its clients see it.
//!
//! Requests arrive at random moments (a Poisson process with a fixed seed) at each of some rates, the last of
//! which may be `inf`: all at once. Every client reads its answer as a stream and takes note of when it
//! asked, when the first token came and when each further one did. The server is the real one, in this
//! process on a loopback address and with random weights of a named shape, or another one that `--url` names.
//!
//! With a server of its own the same requests are also given to its engine directly, all at once: what HTTP
//! costs is the difference to that.

mod load;
mod plot;

use super::machine::Machine;
use super::{Document, print_json, shape};
use crate::device::{DeviceArg, on_device};
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::packing::Extent;
use load::{Figures, Rate, Sizes};
use qurl_kernels::types::KvShape;
use qurl_kernels::{Format, Queue};
use qurl_model::ModelConfig;
use qurl_model::compute::{Network, NetworkOptions};
use qurl_rollout::{Engine, EngineOptions, SampleKey, WeightVersion};
use qurl_serve::api::{ModelFacts, Texts};
use qurl_serve::http::Listener;
use qurl_serve::{ServerError, ServerOptions, serve};
use serde::Serialize;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Requests a second, one measurement each; inf lets all arrive at once
    #[arg(long, value_delimiter = ',', default_value = "inf")]
    rates: Vec<Rate>,
    /// Requests of a measurement
    #[arg(long, default_value_t = 64)]
    requests: usize,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// New tokens of a request
    #[arg(long, default_value_t = 128)]
    new: usize,
    /// JSON lines {"prompt":N,"new":N} in place of --prompt and --new, used again and again
    #[arg(long, value_name = "FILE")]
    lengths: Option<PathBuf>,
    /// Most sequences that the server computes at the same time
    #[arg(long, default_value_t = 64)]
    max_num_seqs: usize,
    /// A server that runs already, in place of one with random weights: http://HOST:PORT
    #[arg(long, value_name = "URL", conflicts_with_all = ["shape", "formats"])]
    url: Option<String>,
    /// Key of that server; QURL_API_KEY may hold it, too
    #[arg(long, value_name = "KEY", requires = "url")]
    api_key: Option<String>,
    /// Draw the figures over the rates into an HTML file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// A measurement.
#[derive(Serialize)]
struct Row {
    case: &'static str,
    shape: Option<String>,
    /// Of the weights; that of another server is not known.
    format: Option<String>,
    kv_format: Option<&'static str>,
    max_num_seqs: Option<usize>,
    #[serde(flatten)]
    figures: Figures,
    /// Where all arrive at once at a server of our own: what its engine does without HTTP, and the share of
    /// it that clients get.
    engine_tokens_per_s: Option<f64>,
    engine_share: Option<f64>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let counts =
        [args.requests, args.prompt, args.new, args.max_num_seqs, args.rates.len(), args.formats.len()];
    if counts.contains(&0) {
        let options = "--requests, --prompt, --new, --max-num-seqs, --rates and --formats";
        return Err(bad(format!("{options} must be at least 1")));
    }
    if let Some(plot) = &args.plot {
        crate::target::create(plot)?; // a wrong name is told before the work
    }
    let sizes = Sizes::read(args.lengths.as_deref(), args.prompt, args.new)?;
    let (machine, rows) = match &args.url {
        Some(url) => (url.clone(), of_other(url, &args, &sizes)?),
        None => on_device!(args.device.get(), device => of_own(device, &args, &sizes))?,
    };
    if let Some(plot) = &args.plot {
        let lines: Vec<(String, &Figures)> =
            rows.iter().map(|row| (row.format.clone().unwrap_or_default(), &row.figures)).collect();
        std::fs::write(plot, plot::page(&args.shape, &lines))
            .map_err(|e| bad(format!("--plot {}: cannot be written: {e}", plot.display())))?;
    }
    if args.json {
        print_json(&Document { machine, results: rows })?;
    }
    Ok(())
}

/// A server that runs already.
fn of_other(url: &str, args: &Args, sizes: &Sizes) -> anyhow::Result<Vec<Row>> {
    let wrong = |what: &str| bad(format!("--url {url}: {what}"));
    let host = url.strip_prefix("http://").ok_or_else(|| wrong("expected http://HOST:PORT"))?;
    let host = host.trim_end_matches('/').trim_end_matches("/v1");
    let address = host.to_socket_addrs().map_err(|e| wrong(&e.to_string()))?.next();
    let address = address.ok_or_else(|| wrong("no such host"))?;
    let key = args.api_key.clone().or_else(|| std::env::var("QURL_API_KEY").ok());
    // Ids that every vocabulary has, those of a few characters, too.
    measure(address, key.as_deref(), 16, args, sizes, |figures| Row {
        case: "serve",
        shape: None,
        format: None,
        kv_format: None,
        max_num_seqs: None,
        figures,
        engine_tokens_per_s: None,
        engine_share: None,
    })
}

/// Servers of our own, one for each format after the other.
fn of_own<D: Machine>(device: Arc<D>, args: &Args, sizes: &Sizes) -> anyhow::Result<(String, Vec<Row>)> {
    let config = shape::config(&args.shape)?;
    let positions = sizes.longest();
    if positions > config.max_position_embeddings {
        return Err(bad(format!(
            "a request has {positions} tokens, the context of {} is {}",
            args.shape, config.max_position_embeddings
        )));
    }
    if !args.json {
        out!("{}", device.info().description)?;
    }
    let mut rows = Vec::new();
    for &format in &args.formats {
        let mut queue = device.queue()?;
        let mut engine = engine::<D>(&mut queue, &config, format, positions, args)?;
        // The first round also records the steps.
        let direct = (0..2).map(|round| directly(&mut queue, &mut engine, round, args, sizes));
        let direct = direct.collect::<anyhow::Result<Vec<f64>>>()?[1];
        let kv_format = engine.network().options().kv_format.name();
        let facts = ModelFacts {
            names: vec![args.shape.clone()],
            dir: None,
            max_model_len: positions,
            config: config.clone(),
            format: format.to_string(),
        };
        let listener = Listener::bind(IpAddr::from([127, 0, 0, 1]), 0)?;
        let (address, vocabulary) = (listener.address(), config.vocab_size as u32);
        let options = ServerOptions { max_waiting: args.requests, ..ServerOptions::default() };
        let stop = AtomicBool::new(false);
        let measured = std::thread::scope(|scope| {
            let serving = scope.spawn(|| {
                let stop = || stop.load(Ordering::Relaxed);
                serve(&listener, queue, engine, (Texts::none(), facts), options, stop)
            });
            let measured = measure(address, None, vocabulary, args, sizes, |figures| {
                let all = figures.rate.is_none();
                let share = figures.tokens_per_s / direct;
                Row {
                    case: "serve",
                    shape: Some(args.shape.clone()),
                    format: Some(format.to_string()),
                    kv_format: Some(kv_format),
                    max_num_seqs: Some(args.max_num_seqs),
                    figures,
                    engine_tokens_per_s: all.then_some(direct),
                    engine_share: all.then_some(share),
                }
            });
            stop.store(true, Ordering::Relaxed);
            let served: Result<(), ServerError> = serving
                .join()
                .unwrap_or_else(|_| Err(ServerError::Engine("the server panicked".to_string())));
            served?;
            measured
        })?;
        rows.extend(measured);
    }
    Ok((device.info().description, rows))
}

/// All rates at one server.
fn measure(
    address: SocketAddr,
    key: Option<&str>,
    vocabulary: u32,
    args: &Args,
    sizes: &Sizes,
    row: impl Fn(Figures) -> Row,
) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (round, &rate) in args.rates.iter().enumerate() {
        let figures = load::run(address, key, vocabulary, rate, args.requests, round as u64, sizes)?;
        let row = row(figures);
        if !args.json {
            print_row(&row)?;
        }
        rows.push(row);
    }
    Ok(rows)
}

fn print_row(row: &Row) -> anyhow::Result<()> {
    let f = &row.figures;
    let milliseconds = |x: f64| 1e3 * x;
    out!(
        "{:9} {:>8} requests/s: {:6.2} done/s {:8.1} tokens/s  first token {:7.1} / {:7.1} / {:7.1} ms  \
         next {:6.2} / {:6.2} / {:6.2} ms  whole {:7.2} / {:7.2} s{}",
        row.format.as_deref().unwrap_or("server"),
        f.rate.map_or("inf".to_string(), |rate| rate.to_string()),
        f.requests_per_s,
        f.tokens_per_s,
        milliseconds(f.first_token_s.p50),
        milliseconds(f.first_token_s.p90),
        milliseconds(f.first_token_s.p99),
        milliseconds(f.between_tokens_s.p50),
        milliseconds(f.between_tokens_s.p90),
        milliseconds(f.between_tokens_s.p99),
        f.request_s.p50,
        f.request_s.p99,
        match row.engine_share {
            Some(share) => format!("  {:.1}% of the engine alone", 100.0 * share),
            None => String::new(),
        }
    )?;
    Ok(())
}

fn engine<D: Machine>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    format: Format,
    positions: usize,
    args: &Args,
) -> anyhow::Result<Engine<D>> {
    let options = NetworkOptions { positions, ..args.extent.options(config, format) };
    let network = Network::random(queue, config, options, 5)?;
    let page_size = D::engine().page_size;
    let (kv_heads, head_dim) = (config.num_kv_heads, config.head_dim);
    let shape = KvShape { format: options.kv_format, pages: 1, page_size, kv_heads, head_dim };
    // Some pages more than the places fill, as the scheduler keeps a few free.
    let pages = args.max_num_seqs * positions.div_ceil(page_size) * 11 / 10 + 2;
    let kv_bytes = queue.device().kv_page_bytes(shape) * config.num_layers * pages;
    let options =
        EngineOptions { kv_bytes, max_num_seqs: args.max_num_seqs, share_prefixes: true, ..D::engine() };
    Engine::new(queue.device().clone(), network, WeightVersion::default(), options).or_bad()
}

/// New tokens a second of the engine alone, for requests that are there at once.
fn directly<D: Machine>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    round: u64,
    args: &Args,
    sizes: &Sizes,
) -> anyhow::Result<f64> {
    let vocabulary = engine.network().config().vocab_size as u32;
    let began = Instant::now();
    for number in 0..args.requests {
        let (prompt, new) = sizes.of(number);
        let ids = load::prompt(1000 + round, number as u64, prompt, vocabulary);
        let key = SampleKey { seed: round, step: 0, prompt: number as u64 };
        engine.submit(qurl_rollout::Request { key, ..qurl_rollout::Request::new(ids, new) })?;
    }
    let mut tokens = 0;
    while engine.unfinished() > 0 {
        tokens += engine.step(queue)?.len();
    }
    engine.finished();
    Ok(tokens as f64 / began.elapsed().as_secs_f64())
}
