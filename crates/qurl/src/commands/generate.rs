//! `qurl generate`: samples of one prompt.
//!
//! With one sample the text appears while it is made. `--json` gives ids and log-probs as well, printed as the shortest
//! decimals that read back as the same f32, so that `qurl score` can be held against them.

use crate::device::{DeviceArg, on_device};
use crate::input::{OrBad, bad};
use crate::model;
use crate::output::{self, err, out};
use crate::packing::Packing;
use qurl_kernels::Backend;
use qurl_model::chat::{ChatTemplate, Message};
use qurl_model::compute::{Network, NetworkOptions};
use qurl_model::hf::LoadedModel;
use qurl_model::tokenizer::{StreamDecoder, Tokenizer, TokenizerError};
use qurl_rollout::{Engine, EngineOptions, Group, Request, SampleKey, Sampling, WeightVersion};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Memory for keys and values is what the samples need, but no more than this unless a single one needs it.
const KV_BYTES: usize = 2 << 30;

/// Options of `qurl generate`.
#[derive(clap::Args)]
#[command(after_help = r#"Example: qurl generate --model DIR --format int8 --n 4 --max-new 256 "What is 17 + 25?""#)]
pub struct Args {
    /// Hugging Face directory, or an id of the hub whose snapshot is in the local cache
    #[arg(long, value_parser = crate::model::directory)]
    model: PathBuf,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    device: DeviceArg,
    /// Number of samples
    #[arg(long, default_value_t = 1)]
    n: usize,
    /// Most new tokens of a sample
    #[arg(long, default_value_t = 256)]
    max_new: usize,
    /// Softmax temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    /// Keep the smallest set of tokens with at least this probability
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Keep this many likeliest tokens; 0 keeps all
    #[arg(long, default_value_t = 0)]
    top_k: u32,
    /// Keep tokens with at least this share of the likeliest one's probability
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Text that ends a sample; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Put the prompt into the model's chat template, as a user's message
    #[arg(long)]
    chat: bool,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Tokens of the prompt in place of its text; needs no tokenizer
    #[arg(long, value_delimiter = ',', value_name = "IDS", conflicts_with_all = ["prompt", "chat"])]
    prompt_ids: Option<Vec<u32>>,
    /// Text of the prompt
    #[arg(required_unless_present = "prompt_ids")]
    prompt: Option<String>,
}

#[derive(Serialize)]
struct Document<'a> {
    samples: Vec<Sampled<'a>>,
}

#[derive(Serialize)]
struct Sampled<'a> {
    prompt_ids: &'a [u32],
    ids: &'a [u32],
    logprobs: &'a [f32],
    /// `null` where the directory has no tokenizer.
    text: Option<String>,
    finish: &'static str,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    on_device!(args.device.get(), backend => run_on(backend, args))
}

fn run_on<B: Backend>(backend: Arc<B>, args: Args) -> anyhow::Result<()> {
    let model = model::load(&args.model)?;
    let tokenizer = load_tokenizer(&args, &model)?;
    let prompt = encode(&args, tokenizer.as_deref())?;
    let request = Request {
        n: args.n,
        sampling: Sampling { temperature: args.temperature, top_p: args.top_p, top_k: args.top_k, min_p: args.min_p },
        key: SampleKey { seed: args.seed, ..SampleKey::default() },
        stop_ids: stop_ids(&model, tokenizer.as_deref()),
        stop_strings: args.stop.clone(),
        ..Request::new(prompt, args.max_new)
    };
    let mut engine = engine(backend, &args, model, &request)?;
    if let Some(tokenizer) = &tokenizer {
        let tokenizer = tokenizer.clone();
        // A decoder fails on ids without a token only, and the engine's are the model's own.
        engine.set_text_decoder(Arc::new(move |ids| tokenizer.decode(ids, true).unwrap_or_default()));
    }
    engine.check(&request).or_bad()?;

    let began = Instant::now();
    let group = match (args.n, args.json, &tokenizer) {
        (1, false, Some(tokenizer)) => stream(&mut engine, request, tokenizer)?,
        _ => engine.generate(&[request])?.pop(),
    };
    let Some(group) = group else { anyhow::bail!("the engine returned no samples") };
    let (tokens, seconds) =
        (group.samples.iter().map(|s| s.tokens.len()).sum::<usize>(), began.elapsed().as_secs_f64());
    if args.json {
        out!("{}", serde_json::to_string(&document(&group, tokenizer.as_deref())?)?)?;
    } else if args.n > 1 || tokenizer.is_none() {
        print_all(&group, tokenizer.as_deref())?;
    }
    if !args.json {
        err!("{tokens} tokens in {seconds:.2} s, {:.1} tokens/s", tokens as f64 / seconds);
    }
    Ok(())
}

/// The tokenizer, which may be missing where nothing asks for text.
fn load_tokenizer(args: &Args, model: &LoadedModel) -> anyhow::Result<Option<Arc<Tokenizer>>> {
    match Tokenizer::load(&args.model) {
        Err(TokenizerError::NotFound { .. }) if args.prompt_ids.is_some() && args.stop.is_empty() => Ok(None),
        Err(error) => Err(bad(error)),
        Ok(tokenizer) => {
            tokenizer.check_fits(&model.config).map_err(|e| bad(format!("{}: {e}", args.model.display())))?;
            Ok(Some(Arc::new(tokenizer)))
        }
    }
}

/// Tokens of the prompt.
fn encode(args: &Args, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Vec<u32>> {
    let (text, tokenizer) = match (&args.prompt_ids, &args.prompt, tokenizer) {
        (Some(ids), _, _) => return Ok(ids.clone()),
        (None, Some(text), Some(tokenizer)) if !text.is_empty() => (text, tokenizer),
        _ => return Err(bad("the prompt is empty: expected some text")),
    };
    if !args.chat {
        return tokenizer.encode(text, true).or_bad();
    }
    let template = ChatTemplate::of(tokenizer).or_bad()?;
    let template = template.ok_or_else(|| bad(missing_template(&args.model)))?;
    let chat = template.render(&[Message::new("user", text)], true).or_bad()?;
    tokenizer.encode(&chat, false).or_bad()
}

fn missing_template(dir: &Path) -> String {
    format!("--chat: {} has no chat template; leave --chat out to continue the text as it is", dir.display())
}

/// Tokens that end a sample.
fn stop_ids(model: &LoadedModel, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
    let mut ids = model.generation.eos_token_ids.clone();
    ids.extend(&model.config.eos_token_ids);
    ids.extend(tokenizer.and_then(Tokenizer::eos));
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// An engine for this request.
fn engine<B: Backend>(
    backend: Arc<B>,
    args: &Args,
    model: LoadedModel,
    request: &Request,
) -> anyhow::Result<Engine<B>> {
    let LoadedModel { config, params, .. } = model;
    let positions = request.prompt.len().saturating_add(args.max_new.max(1)).min(config.max_position_embeddings);
    let options = NetworkOptions { positions, ..args.packing.options(&config) };
    let params = params.try_map(|p| backend.upload(&p))?;
    let network = Network::new(&*backend, &config, &params, options).or_bad()?;
    drop(params);
    let defaults = EngineOptions::default();
    let layer_page = backend.kv_page_bytes(options.kv_format, defaults.page_size, config.num_kv_heads, config.head_dim);
    let sample = layer_page * config.num_layers * (positions.div_ceil(defaults.page_size) + 1);
    let kv_bytes = sample.saturating_mul(args.n.max(1)).min(sample.max(KV_BYTES));
    let max_num_seqs = args.n.clamp(1, defaults.max_num_seqs);
    let options = EngineOptions { kv_bytes, max_num_seqs, ..defaults };
    Engine::new(backend, network, WeightVersion::default(), options).or_bad()
}

/// Writes the only sample as it is made.
fn stream<B: Backend>(
    engine: &mut Engine<B>,
    request: Request,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Option<Group>> {
    let mut decoder = StreamDecoder::new(true);
    engine.submit(request)?;
    while engine.unfinished() > 0 {
        for emitted in engine.step()? {
            output::text(&decoder.push(tokenizer, emitted.token)?)?;
        }
    }
    out!("{}", decoder.finish(tokenizer)?)?;
    Ok(engine.finished().pop())
}

fn document<'a>(group: &'a Group, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Document<'a>> {
    let sampled = |sample: &'a qurl_rollout::Sample| {
        Ok(Sampled {
            prompt_ids: &group.prompt,
            ids: &sample.tokens,
            logprobs: &sample.logprobs,
            text: tokenizer.map(|t| t.decode(&sample.tokens, true)).transpose()?,
            finish: sample.finish.name(),
        })
    };
    Ok(Document { samples: group.samples.iter().map(sampled).collect::<anyhow::Result<_>>()? })
}

fn print_all(group: &Group, tokenizer: Option<&Tokenizer>) -> anyhow::Result<()> {
    for (i, sample) in group.samples.iter().enumerate() {
        let text = match tokenizer {
            Some(tokenizer) => tokenizer.decode(&sample.tokens, true)?,
            None => sample.tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        };
        if group.samples.len() > 1 {
            out!("== sample {} ({} tokens, {})", i + 1, sample.tokens.len(), sample.finish.name())?;
        }
        out!("{text}")?;
    }
    Ok(())
}
