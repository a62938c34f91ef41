//! `qurl bench serve`: a server under load, as its clients see it.
//!
//! Requests arrive at random moments (a Poisson process with a fixed seed) at each of some rates, the last of
//! which may be `inf`: all at once. Every client reads its answer as a stream and takes note of when it
//! asked, when the first token came and when each further one did. The server is the real one, in this
//! process on a loopback address and with random weights of a named shape, or another one that `--url` names.
//!
//! With a server of its own as many requests of the same lengths are also given to its engine directly, all
//! at once: what HTTP costs is the difference to that. Beside all tokens a second stands the time that a
//! request takes for each token after the first, in the median over requests, which is a decode step of a
//! full batch and knows little of how requests come and go. It is not the median gap: where tokens reach a
//! client several at a time, most gaps are nothing.

mod load;
mod plot;

use super::machine::Machine;
use super::{Document, median, print_json, shape};
use crate::device::{DeviceArg, on_device};
use crate::input::{OrBad, bad};
use crate::output::out;
use crate::packing::Extent;
use load::{Figures, Load, Rate, Sizes, Spread};
use qurl_kernels::types::KvShape;
use qurl_kernels::{Format, Queue};
use qurl_model::ModelConfig;
use qurl_model::compute::{Network, NetworkOptions};
use qurl_rollout::{Engine, EngineOptions, RequestId, SampleKey, WeightVersion};
use qurl_serve::api::{ModelFacts, Texts};
use qurl_serve::http::Listener;
use qurl_serve::{ServerError, ServerOptions, serve};
use serde::Serialize;
use std::collections::BTreeMap;
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
    /// Seconds of arrivals: a rate that is too low for all requests gets fewer of them
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
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
    /// Where all arrive at once at a server of our own: the same without HTTP.
    #[serde(flatten)]
    beside: Option<Beside>,
}

/// What the engine alone does, and how clients fare beside that.
#[derive(Clone, Copy, Serialize)]
struct Beside {
    engine_tokens_per_s: f64,
    /// For each token of a request after the first, the median over requests.
    engine_per_token_s: f64,
    /// Share of its tokens a second that clients get.
    engine_share: f64,
    /// What clients wait longer for it, as a share; nothing where requests have one token, or come in one
    /// piece.
    overhead_per_token: Option<f64>,
}

/// The engine alone, medians over some rounds.
#[derive(Clone, Copy)]
struct Alone {
    tokens_per_s: f64,
    per_token_s: f64,
}

impl Alone {
    fn beside(self, figures: &Figures) -> Beside {
        Beside {
            engine_tokens_per_s: self.tokens_per_s,
            engine_per_token_s: self.per_token_s,
            engine_share: figures.tokens_per_s / self.tokens_per_s,
            overhead_per_token: (self.per_token_s > 0.0 && figures.per_token_s.p50 > 0.0)
                .then(|| figures.per_token_s.p50 / self.per_token_s - 1.0),
        }
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    let counts =
        [args.requests, args.prompt, args.new, args.max_num_seqs, args.rates.len(), args.formats.len()];
    if counts.contains(&0) {
        let options = "--requests, --prompt, --new, --max-num-seqs, --rates and --formats";
        return Err(bad(format!("{options} must be at least 1")));
    }
    if let Some(plot) = &args.plot {
        crate::target::check_file(plot)?; // a wrong name is told before the work
    }
    let sizes = Sizes::read(args.lengths.as_deref(), args.prompt, args.new)?;
    let (machine, rows) = match &args.url {
        Some(url) => (url.clone(), of_other(url, &args, &sizes)?),
        None => on_device!(args.device.get(), device => of_own(device, &args, &sizes))?,
    };
    if let Some(plot) = &args.plot {
        let lines: Vec<(String, &Figures)> =
            rows.iter().map(|row| (row.format.clone().unwrap_or_default(), &row.figures)).collect();
        crate::target::write(plot, &plot::page(&args.shape, &lines))?;
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
        beside: None,
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
        let alone = alone(&mut queue, &mut engine, args, sizes)?;
        let kv_format = engine.network().options().kv_format.name();
        let facts = ModelFacts {
            names: vec![args.shape.clone()],
            dir: None,
            max_model_len: positions,
            config: config.clone(),
            format: format.to_string(),
            lora: None,
        };
        let listener = Listener::bind(IpAddr::from([127, 0, 0, 1]), 0)?;
        let (address, vocabulary) = (listener.address(), config.vocab_size as u32);
        let options = ServerOptions { max_waiting: args.requests, ..ServerOptions::default() };
        let stop = AtomicBool::new(false);
        let measured = std::thread::scope(|scope| {
            let stopped = &stop;
            let serving = scope.spawn(move || {
                let stop = || stopped.load(Ordering::Relaxed);
                serve(listener, queue, engine, (Texts::none(), facts), options, stop)
            });
            let measured = measure(address, None, vocabulary, args, sizes, |figures| {
                let alone = alone.filter(|_| figures.rate.is_none());
                Row {
                    case: "serve",
                    shape: Some(args.shape.clone()),
                    format: Some(format.to_string()),
                    kv_format: Some(kv_format),
                    max_num_seqs: Some(args.max_num_seqs),
                    beside: alone.map(|alone| alone.beside(&figures)),
                    figures,
                }
            });
            stop.store(true, Ordering::Relaxed);
            let served: Result<(), ServerError> = serving
                .join()
                .unwrap_or_else(|_| Err(ServerError::Engine("the server panicked".to_string())));
            served?;
            measured
        })?;
        if !args.json {
            print_saturated(&measured)?;
        }
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
        let requests = rate.requests(args.requests, args.seconds);
        let load = Load { rate, requests, round: round as u64, vocabulary };
        let figures = load::run(address, key, load, sizes)?;
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
        match row.figures.failed {
            0 => String::new(),
            failed => format!("  {failed} of {} failed", row.figures.requests),
        }
    )?;
    Ok(())
}

/// What came of the measurements in which all requests arrived at once, if there are such: medians over them.
fn print_saturated(rows: &[Row]) -> anyhow::Result<()> {
    let all: Vec<(&Row, Beside)> = rows.iter().filter_map(|row| Some((row, row.beside?))).collect();
    let Some((first, alone)) = all.first() else { return Ok(()) };
    let of = |figure: fn(&(&Row, Beside)) -> f64| median(all.iter().map(figure).collect());
    let overheads: Vec<f64> = all.iter().filter_map(|(_, beside)| beside.overhead_per_token).collect();
    let overhead = match overheads.is_empty() {
        true => "answers came in one piece".to_string(),
        false => format!("{:+.1}%", 100.0 * median(overheads)),
    };
    out!(
        "{:9} saturated: {:.1} tokens/s, engine alone {:.1}: {:.1}%  a token {:.3} ms, engine alone {:.3}: \
         {overhead}  ({} places, {} requests, medians of {})",
        first.format.as_deref().unwrap_or("server"),
        of(|(row, _)| row.figures.tokens_per_s),
        alone.engine_tokens_per_s,
        100.0 * of(|(_, beside)| beside.engine_share),
        1e3 * of(|(row, _)| row.figures.per_token_s.p50),
        1e3 * alone.engine_per_token_s,
        first.max_num_seqs.unwrap_or_default(),
        first.figures.requests,
        all.len()
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
    let size = EngineOptions::of_device(&**queue.device());
    let page_size = size.page_size;
    let (kv_heads, head_dim) = (config.num_kv_heads, config.head_dim);
    let shape = KvShape { format: options.kv_format, pages: 1, page_size, kv_heads, head_dim };
    // Some pages more than the places fill, as the scheduler keeps a few free.
    let pages = args.max_num_seqs * positions.div_ceil(page_size) * 11 / 10 + 2;
    let kv_bytes = queue.device().kv_page_bytes(shape) * config.num_layers * pages;
    let options = EngineOptions { kv_bytes, max_num_seqs: args.max_num_seqs, share_prefixes: true, ..size };
    Engine::new(queue.device().clone(), network, WeightVersion::default(), options).or_bad()
}

/// The engine alone, for requests that are there at once: as many rounds as there are measurements of that
/// kind, after one that also records the steps.
fn alone<D: Machine>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    args: &Args,
    sizes: &Sizes,
) -> anyhow::Result<Option<Alone>> {
    let rounds = args.rates.iter().filter(|rate| rate.is_all()).count() as u64;
    if rounds == 0 {
        return Ok(None);
    }
    directly(queue, engine, 0, args, sizes)?;
    let (mut rates, mut times) = (Vec::new(), Vec::new());
    for round in 1..=rounds {
        let Alone { tokens_per_s, per_token_s } = directly(queue, engine, round, args, sizes)?;
        rates.push(tokens_per_s);
        times.push(per_token_s);
    }
    Ok(Some(Alone { tokens_per_s: median(rates), per_token_s: median(times) }))
}

/// One round of it.
fn directly<D: Machine>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    round: u64,
    args: &Args,
    sizes: &Sizes,
) -> anyhow::Result<Alone> {
    let vocabulary = engine.network().config().vocab_size as u32;
    let began = Instant::now();
    for number in 0..args.requests {
        let (prompt, new) = sizes.of(number);
        let ids = load::prompt(1000 + round, number as u64, prompt, vocabulary);
        let key = SampleKey { seed: round, step: 0, prompt: number as u64 };
        engine.submit(qurl_rollout::Request { key, ..qurl_rollout::Request::new(ids, new) })?;
    }
    let mut tokens = 0;
    // When the first and the last token of each request came, and how many there are.
    let mut seen: BTreeMap<RequestId, (f64, f64, usize)> = BTreeMap::new();
    while engine.unfinished() > 0 {
        let emitted = engine.step(queue)?;
        let now = began.elapsed().as_secs_f64();
        tokens += emitted.len();
        for token in emitted {
            let (_, last, count) = seen.entry(token.request).or_insert((now, now, 0));
            (*last, *count) = (now, *count + 1);
        }
    }
    engine.finished();
    let tokens_per_s = tokens as f64 / began.elapsed().as_secs_f64();
    let times = seen.values().filter_map(|&(first, last, count)| load::per_token(first, last, count));
    Ok(Alone { tokens_per_s, per_token_s: Spread::of(times.collect()).p50 })
}
