//! `qurl score`: per-token log-probs of given ids at temperature 1.
//!
//! Input lines are `{"ids":[..]}`, output lines `{"logprobs":[null,..]}`. Numbers are printed as the shortest decimals
//! that read back as the same f32, so the bits survive.

use crate::device::{DeviceArg, on_device};
use crate::input::{OrBad, bad};
use crate::packing::Packing;
use anyhow::Context;
use qurl_kernels::Backend;
use qurl_model::compute::{Network, NetworkOptions, score};
use qurl_model::{ModelConfig, hf};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::PathBuf;

/// Options of `qurl score`.
#[derive(clap::Args)]
#[command(after_help = r#"Example: echo '{"ids":[1,403,407]}' | qurl score --model DIR"#)]
pub struct Args {
    /// Hugging Face directory
    #[arg(long)]
    model: PathBuf,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    device: DeviceArg,
    /// Most tokens computed at a time
    #[arg(long, default_value_t = 1024)]
    chunk: usize,
    /// Sequences scored together
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
    on_device!(args.device.get(), backend => run_on(&*backend, args))
}

fn run_on<B: Backend>(backend: &B, args: Args) -> anyhow::Result<()> {
    if args.chunk == 0 || args.batch == 0 {
        return Err(bad("--chunk and --batch must be at least 1"));
    }
    let model = hf::load(&args.model).or_bad()?;
    let mut sequences = Vec::new();
    for (i, line) in std::io::stdin().lock().lines().enumerate() {
        let line = line.context("reading standard input")?;
        if line.trim().is_empty() {
            continue;
        }
        let Line { ids } = serde_json::from_str(&line)
            .map_err(|e| bad(format!("standard input, line {}: {e}; expected {{\"ids\":[..]}}", i + 1)))?;
        check(&ids, &model.config, i + 1)?;
        sequences.push(ids);
    }
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let options = NetworkOptions { positions: longest, ..args.packing.options(&model.config) };
    let params = model.params.try_map(|p| backend.upload(&p))?;
    let net = Network::new(backend, &model.config, &params, options).or_bad()?;
    drop(params);
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for group in sequences.chunks(args.batch) {
        for scored in score(backend, &net, group, 1.0, args.chunk)? {
            let logprobs = std::iter::once(None).chain(scored.logp.into_iter().map(Some)).collect();
            writeln!(out, "{}", serde_json::to_string(&Scores { logprobs })?)?;
        }
    }
    out.flush()?;
    Ok(())
}

fn check(ids: &[u32], config: &ModelConfig, line: usize) -> anyhow::Result<()> {
    if ids.is_empty() {
        return Err(bad(format!("standard input, line {line}: key `ids` is empty, expected at least one token")));
    }
    if ids.len() > config.max_position_embeddings {
        let (len, max) = (ids.len(), config.max_position_embeddings);
        return Err(bad(format!("standard input, line {line}: {len} tokens, the model's context is {max}")));
    }
    match ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        Some(id) => Err(bad(format!(
            "standard input, line {line}: token {id} is outside of the vocabulary of {}",
            config.vocab_size
        ))),
        None => Ok(()),
    }
}
