//! `qurl serve`: a model over HTTP.

use crate::adapter::{self, AdapterArg};
use crate::device::{DeviceArg, on_device};
use crate::input::{OrBad, bad};
use crate::model;
use crate::output::{err, even_if_closed, out};
use crate::packing::Packing;
use crate::stop::Stop;
use qurl_kernels::{Device, Queue};
use qurl_model::compute::NetworkOptions;
use qurl_model::hf::OpenModel;
use qurl_model::tokenizer::{Tokenizer, TokenizerError};
use qurl_rollout::{Engine, EngineOptions, WeightVersion};
use qurl_serve::api::{ModelFacts, Parsers, ReasoningParser, Texts, ToolParser, WeightSource};
use qurl_serve::http::{Limits, Listener};
use qurl_serve::{ServerOptions, serve};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Memory for keys and values on a CPU, where nothing is said.
const CPU_KV_BYTES: usize = 2 << 30;
/// The variable that may hold the key: a command line is visible to everyone on the machine.
const KEY_VARIABLE: &str = "QURL_API_KEY";

/// Options of `qurl serve`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl serve --model DIR --format int8 --port 8000")]
pub struct Args {
    /// Hugging Face directory, or an id of the hub whose snapshot is in the local cache
    #[arg(long)]
    model: String,
    #[command(flatten)]
    adapter: AdapterArg,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    device: DeviceArg,
    /// Address to listen on; anything but a loopback address lets others on the network ask
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// What requests must show as `Authorization: Bearer KEY`; QURL_API_KEY may hold it, too
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Names of the model in requests and answers; --model as given if none
    #[arg(long, value_name = "NAME")]
    served_model_name: Vec<String>,
    /// Longest sequence, prompt and new tokens; the model's context if not given
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Most sequences that are computed at the same time
    #[arg(long, default_value_t = 256)]
    max_num_seqs: usize,
    /// Most tokens of a step; 8192 on a GPU and 1024 on a CPU if not given
    #[arg(long)]
    max_num_batched_tokens: Option<usize>,
    /// Most sequences that wait; requests beyond get 429
    #[arg(long, default_value_t = 1024)]
    max_queue: usize,
    /// Memory for keys and values; most of what is free on a GPU and 2048 on a CPU if not given
    #[arg(long, value_name = "MB")]
    kv_cache_mb: Option<usize>,
    /// Do not share the pages of prompts that begin alike
    #[arg(long)]
    no_prefix_sharing: bool,
    /// Longest time of an answer in seconds
    #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
    timeout: u64,
    /// Longest body of a request
    #[arg(long, default_value_t = 8, value_name = "MB")]
    max_body_mb: usize,
    /// Connections at the same time
    #[arg(long, default_value_t = 2048)]
    max_connections: usize,
    /// Take new weights only from directories inside of this one; without a key and on other than loopback
    /// addresses none are taken unless this is given
    #[arg(long, value_name = "DIR")]
    weights_from: Option<PathBuf>,
    /// How the model writes calls of tools, which chats with tools then tell as `tool_calls`: hermes
    #[arg(long, value_name = "NAME", value_parser = ToolParser::named)]
    tool_call_parser: Option<ToolParser>,
    /// How the model writes what it thinks, which chats then tell as `reasoning_content`: think, qwen3 or
    /// deepseek_r1
    #[arg(long, value_name = "NAME", value_parser = ReasoningParser::named)]
    reasoning_parser: Option<ReasoningParser>,
    /// Seed of requests that name none; another one at every start if not given
    #[arg(long)]
    seed: Option<u64>,
    /// Print the address as one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the command until Ctrl-C.
pub fn run(args: Args) -> anyhow::Result<()> {
    on_device!(args.device.get(), device => run_on(device, &args))
}

fn run_on<D: Device>(device: Arc<D>, args: &Args) -> anyhow::Result<()> {
    let key = match &args.api_key {
        Some(key) if key.is_empty() => return Err(bad("--api-key: an empty key would let everyone in")),
        Some(key) => Some(key.clone()),
        None => std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty()),
    };
    let weight_source = match &args.weights_from {
        Some(dir) if dir.is_dir() => WeightSource::Inside(dir.clone()),
        Some(dir) => return Err(bad(format!("--weights-from {}: is no directory", dir.display()))),
        None if key.is_some() || args.host.is_loopback() => WeightSource::Anywhere,
        None => WeightSource::Nowhere,
    };
    for (option, value) in [("--max-num-seqs", args.max_num_seqs), ("--max-body-mb", args.max_body_mb)] {
        if value == 0 {
            return Err(bad(format!("{option} must be at least 1")));
        }
    }
    // Before the model is loaded: a port that is taken is told at once.
    let listener = Listener::bind(args.host, args.port)
        .map_err(|e| bad(format!("--host {} --port {}: cannot be listened on: {e}", args.host, args.port)))?;

    let dir = model::directory(&args.model).map_err(bad)?;
    let opened = model::open(&dir)?;
    opened.generation.check_end_tokens(&opened.config, &dir).or_bad()?;
    let tokenizer = match Tokenizer::load(&dir) {
        Err(TokenizerError::NotFound { .. }) => {
            err!("warning: {} has no tokenizer: prompts and answers are ids", dir.display());
            None
        }
        Err(error) => return Err(bad(error)),
        Ok(tokenizer) => {
            tokenizer.check_fits(&opened.config).map_err(|e| bad(format!("{}: {e}", dir.display())))?;
            Some(tokenizer)
        }
    };
    let renderer = super::chat_renderer::command()?;
    let texts = Texts::new(&opened.config, &opened.generation, tokenizer, renderer).or_bad()?;
    let mut queue = device.queue()?;
    let (engine, max_model_len) = engine::<D>(&mut queue, &dir, &opened, args)?;
    let config = opened.config.clone();
    drop(opened); // unmaps its files

    let mut names = args.served_model_name.clone();
    if names.is_empty() {
        names.push(args.model.clone());
        let last = dir.file_name().map(|name| name.to_string_lossy().into_owned());
        names.extend(last.filter(|name| *name != args.model));
    }
    let format = engine.network().options().format.to_string();
    let lora = engine.network().options().lora;
    let facts = ModelFacts { names, dir: Some(dir), max_model_len, config, format, lora };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    let options = ServerOptions {
        max_waiting: args.max_queue,
        body_bytes: args.max_body_mb << 20,
        time: Some(Duration::from_secs(args.timeout.max(1))),
        weight_source,
        parsers: Parsers { tools: args.tool_call_parser, reasoning: args.reasoning_parser },
        seed: args.seed.unwrap_or(now),
        limits: Limits { connections: connections(args.max_connections), ..Limits::default() },
        threads: std::thread::available_parallelism().map_or(1, |n| n.get() / 4).clamp(1, 4),
        key,
        ..ServerOptions::default()
    };
    tell(args, &listener, &facts, options.key.is_some())?;
    let stop = Stop::watch()?;
    serve(listener, queue, engine, (texts, facts), options, || stop.requested())?;
    Ok(())
}

fn tell(args: &Args, listener: &Listener, facts: &ModelFacts, has_key: bool) -> anyhow::Result<()> {
    let url = format!("http://{}", listener.address());
    let (name, len) = (&facts.names[0], facts.max_model_len);
    even_if_closed(match args.json {
        true => out!("{}", json!({"url": url, "model": name, "max_model_len": len, "format": facts.format})),
        false => out!("{name} in {} is served at {url}/v1, {len} tokens; Ctrl-C stops", facts.format),
    })?;
    if !args.host.is_loopback() && !has_key {
        err!("warning: {} is no loopback address and there is no key: whoever reaches it can ask", args.host);
    }
    Ok(())
}

/// Raises the limit of open files as far as this many connections need, and says how many there can be.
fn connections(wanted: usize) -> usize {
    const OTHERS: u64 = 64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let need = wanted as u64 + OTHERS;
    let most = maximum.map_or(need, |maximum| need.min(maximum));
    let now = current.unwrap_or(u64::MAX);
    if now < need && setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum }).is_err() {
        return now.saturating_sub(OTHERS).max(1) as usize;
    }
    wanted.min(most.max(now.min(need)).saturating_sub(OTHERS).max(1) as usize)
}

/// The engine and the longest sequence that it takes.
fn engine<D: Device>(
    queue: &mut D::Queue,
    dir: &Path,
    model: &OpenModel,
    args: &Args,
) -> anyhow::Result<(Engine<D>, usize)> {
    let config = &model.config;
    let device = queue.device().clone();
    let context = config.max_position_embeddings;
    let positions = args.max_model_len.unwrap_or(context);
    if positions > context || positions < 2 {
        return Err(bad(format!(
            "--max-model-len {positions}: expected 2 to the model's context of {context}"
        )));
    }
    let options = NetworkOptions { positions, ..args.packing.options(config) };
    let adapter = args.adapter.load(config)?;
    let (network, of_base) = adapter::network::<D>(queue, dir, model, adapter.as_ref(), options)?;
    // Of what new weights replace.
    let checksum = adapter.as_ref().map_or(of_base, |a| qurl_quant::checksum::host_params(&a.params));
    queue.synchronize()?;
    let defaults = EngineOptions::of_device(&*device);
    let max_num_batched_tokens = args.max_num_batched_tokens.unwrap_or(defaults.max_num_batched_tokens);
    let kv_bytes = match (args.kv_cache_mb, device.memory()) {
        (Some(megabytes), _) => megabytes << 20,
        // A part stays for workspace: logits, and what attention needs.
        (None, Some(memory)) => memory.free / 5 * 4,
        (None, None) => CPU_KV_BYTES,
    };
    let options = EngineOptions {
        kv_bytes,
        max_num_seqs: args.max_num_seqs,
        max_num_batched_tokens,
        share_prefixes: !args.no_prefix_sharing,
        ..defaults
    };
    let weights = WeightVersion { version: 0, checksum };
    let engine = Engine::new(device, network, weights, options).or_bad()?;
    // The last token is never computed.
    let fits = engine.pages().total() * options.page_size + 1;
    if fits < positions {
        let need = positions.div_ceil(options.page_size) * engine.page_bytes();
        err!(
            "warning: sequences have {fits} tokens at most: a whole context needs --kv-cache-mb {}",
            (need >> 20) + 1
        );
    }
    Ok((engine, positions.min(fits)))
}
