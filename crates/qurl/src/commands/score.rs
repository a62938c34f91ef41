//! `qurl score`: per-token log-probs of given ids at temperature 1.
//!
//! Input lines are `{"ids":[..]}`, output lines `{"logprobs":[null,..]}`. Numbers are printed as the shortest
//! decimals that read back as the same f32, so the bits survive; what is not finite is an error, since JSON
//! has no number for it. Lines are answered as they come; those that have arrived together are scored
//! together, which changes no bit.

use crate::adapter::AdapterArg;
use crate::device::{DeviceArg, on_device};
use crate::input::bad;
use crate::lines::answer_stdin_together;
use crate::model;
use crate::packing::Packing;
use qurl_kernels::Device;
use qurl_model::ModelConfig;
use qurl_model::compute::score;
use qurl_tasks::data::in_one_line;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// Options of `qurl score`.
#[derive(clap::Args)]
#[command(after_help = r#"Example: echo '{"ids":[1,403,407]}' | qurl score --model DIR"#)]
pub struct Args {
    /// Hugging Face directory, or an id of the hub whose snapshot is in the local cache
    #[arg(long, value_parser = crate::model::directory)]
    model: PathBuf,
    #[command(flatten)]
    adapter: AdapterArg,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    device: DeviceArg,
    /// Most tokens computed at a time
    #[arg(long, default_value_t = 1024)]
    chunk: usize,
    /// Most sequences scored together
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Accepted for uniformity: the output is JSON lines always
    #[arg(long)]
    json: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    ids: Vec<u32>,
}

#[derive(Serialize)]
struct Scores {
    logprobs: Vec<Option<f32>>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    on_device!(args.device.get(), device => run_on(device, args))
}

fn run_on<D: Device>(device: Arc<D>, args: Args) -> anyhow::Result<()> {
    if args.chunk == 0 || args.batch == 0 {
        return Err(bad("--chunk and --batch must be at least 1"));
    }
    let model = model::open(&args.model)?;
    let options = args.packing.options(&model.config);
    let mut queue = device.queue()?;
    let (net, _) = args.adapter.network::<D>(&mut queue, &args.model, &model, options)?;
    let config = model.config.clone();
    drop(model); // unmaps its files
    let read = |number: usize, text: &str| {
        let in_line = |what: String| format!("line {number}: {what}");
        let wrong = |e| in_line(format!("{}; expected {{\"ids\":[..]}}", in_one_line(&e)));
        let line = serde_json::from_str(text).map_err(wrong);
        line.and_then(|Line { ids }| check(&ids, &config).map(|()| (number, ids)).map_err(in_line))
    };
    answer_stdin_together(args.batch, read, |lines| {
        let (numbers, sequences): (Vec<usize>, Vec<Vec<u32>>) = lines.into_iter().unzip();
        let scored = score(&mut queue, &net, &sequences, 1.0, args.chunk)?;
        for ((number, ids), scored) in numbers.iter().zip(&sequences).zip(&scored) {
            if let Some(at) = scored.logp.iter().position(|logp| !logp.is_finite()) {
                let (id, value, model) = (ids[at + 1], scored.logp[at], args.model.display());
                let what = format!("the log-prob of token {id} (number {at} from 0) is {value}", at = at + 1);
                anyhow::bail!("standard input, line {number}: {what}; {model} overflows on this text");
            }
        }
        let logprobs = |logp: Vec<f32>| std::iter::once(None).chain(logp.into_iter().map(Some)).collect();
        Ok(scored.into_iter().map(|scored| Scores { logprobs: logprobs(scored.logp) }).collect())
    })
}

fn check(ids: &[u32], config: &ModelConfig) -> Result<(), String> {
    if ids.is_empty() {
        return Err("key `ids` is empty, expected at least one token".to_string());
    }
    if ids.len() > config.max_position_embeddings {
        let (len, max) = (ids.len(), config.max_position_embeddings);
        return Err(format!("{len} tokens, the model's context is {max}"));
    }
    match ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        Some(id) => Err(format!("token {id} is outside of the vocabulary of {}", config.vocab_size)),
        None => Ok(()),
    }
}
