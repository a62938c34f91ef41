//! `qurl eval`: how many problems a model solves.
//!
//! Every problem is solved once greedily (Avg@1) and k times by sampling (Avg@k, pass@k, maj@k). The output
//! directory receives `settings.json`, `responses.jsonl` (a line per problem with every response and verdict)
//! and `summary.json`; an evaluation that was interrupted continues with `--resume` and ends with the same
//! figures.

mod output;
mod sets;

use crate::adapter::AdapterArg;
use crate::device::DeviceArg;
use crate::input::{OrBad, bad};
use crate::model::warn;
use crate::output::{err, out};
use crate::packing::Packing;
use crate::progress::Progress;
use crate::ranks::{RanksArg, on_ranks, start_local};
use anyhow::Context;
use output::{Output, Settings};
use qurl_kernels::collective::Collective;
use qurl_kernels::{Device, Queue};
use qurl_model::compute::NetworkOptions;
use qurl_model::hf::OpenModel;
use qurl_rollout::{Engine, EngineOptions, Sampling, WeightVersion};
use qurl_train::evaluate::record::ProblemRecord;
use qurl_train::evaluate::summary::{MeanOverSets, Summary, summarize};
use qurl_train::evaluate::{self, EvalOptions, EvalSet, EvaluateError, encode};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{DatasetSource, Recipe};
use qurl_train::start::Start;
use serde::Serialize;
use sets::Sources;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Options of `qurl eval`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: qurl eval --model DIR --data aime24.jsonl math500.jsonl --preset deepscaler --k \
                  16 --out runs/aime"
)]
pub struct Args {
    /// Hugging Face directory, or an id of the hub whose snapshot is in the local cache
    #[arg(long, value_parser = crate::model::directory)]
    model: PathBuf,
    /// Data sets: .jsonl, .jsonl.gz or .parquet files
    #[arg(long, value_name = "FILE", num_args = 1..)]
    data: Vec<PathBuf>,
    /// Generated problems, as in addition:3 (kind and level)
    #[arg(long, value_name = "KIND:LEVEL", num_args = 1..)]
    task: Vec<String>,
    /// Samples per problem beside the greedy response [default: the preset's, else 32]
    #[arg(long)]
    k: Option<usize>,
    #[command(flatten)]
    adapter: AdapterArg,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    ranks: RanksArg,
    #[command(flatten)]
    device: DeviceArg,
    /// Prompt template, grading policy and sampling: dapo, deepscaler, qwen_math or gsm8k
    #[arg(long)]
    preset: Option<String>,
    /// Prompts and grading of data sets as the [task] of this recipe has them, `prompt` and `extract`
    /// included; without
    /// --data and --task its test files are the data sets
    #[arg(long, value_name = "FILE", conflicts_with_all = ["preset", "policy"])]
    recipe: Option<PathBuf>,
    /// What counts as an answer of a data set and when it is right [default: the preset's, else equivalence]
    #[arg(long)]
    policy: Option<String>,
    /// Temperature of the samples [default: the preset's, else 1]
    #[arg(long)]
    temperature: Option<f32>,
    /// Probability that the samples' nucleus covers [default: the preset's, else 1]
    #[arg(long)]
    top_p: Option<f32>,
    /// Most new tokens of a response [default: the preset's, else 1024]
    #[arg(long)]
    max_new: Option<usize>,
    /// First problems of every data set only; number of generated problems [default: all; 200]
    #[arg(long)]
    limit: Option<usize>,
    /// Seed of the samples and of generated problems
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory for responses and figures [default: the first of runs/eval-1, runs/eval-2, ... that is free]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Resume the evaluation in --out
    #[arg(long)]
    resume: bool,
    /// Most sequences computed at the same time
    #[arg(long, default_value_t = EngineOptions::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Most memory for keys and values, in MiB
    #[arg(long, default_value_t = 1024)]
    kv_mib: usize,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

/// The JSON document.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    settings: &'a Settings,
    sets: &'a [Summary],
    total: &'a Summary,
    mean_over_sets: &'a MeanOverSets,
    responses: String,
    seconds: f64,
    tokens_per_s: f64,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    if let Some(ranks) = args.ranks.to_start()? {
        return start_local(ranks, args.device.get());
    }
    on_ranks!(args.device.get(), (device, ranks) => run_on(device, ranks, args))
}

fn run_on<D: Device>(device: Arc<D>, ranks: Arc<Collective>, args: Args) -> anyhow::Result<()> {
    let ranks = Ranks::without_shards(ranks);
    let began = Instant::now();
    let (options, sources) = plan(&args)?;
    if args.resume && args.out.is_none() {
        return Err(bad("--resume needs --out: the directory of the evaluation to resume"));
    }
    let (start, model) = Start::without_weights(&args.model).or_bad()?;
    warn(start.warning.as_deref().filter(|_| ranks.is_first()));
    let sets = sources.sets();
    let mut queue = device.queue()?;
    let mut engine = engine::<D>(&args, &mut queue, (&start, &model), &sets, options)?;
    drop(model);
    evaluate::check(&engine, &start, &sets, options).or_bad()?;
    let settings = Settings::new(&args.model, &engine, options, &sources);
    ranks.collective().agree(&[("the settings of the evaluation", settings.of_any_place()?)]).or_bad()?;
    let opened = match ranks.is_first() {
        true => Some(Output::open(args.out.as_deref(), args.resume, &settings)?),
        false => None,
    };
    let (mut output, done) = opened.map_or((None, Vec::new()), |(output, done)| (Some(output), done));
    let done = evaluate::of_first(&ranks, done)?;

    let problems: usize = sets.iter().map(|s| s.problems.len()).sum();
    let progress = ranks.is_first().then(|| Progress::new(problems as u64, args.json));
    let (mut solved, mut right) = (done.len() as u64, done.iter().filter_map(greedy_correct).sum::<f64>());
    if solved > 0 && ranks.is_first() {
        err!("{solved} of {problems} problems are done already");
    }
    let (solving, mut tokens) = (Instant::now(), 0);
    let save = |record: &ProblemRecord| {
        output.as_mut().map_or(Ok(()), |output| output.append(record))?;
        solved += 1;
        right += greedy_correct(record).unwrap_or(0.0);
        tokens += record.greedy.iter().chain(&record.samples).map(|r| r.tokens).sum::<usize>();
        let (share, speed) = (100.0 * right / solved as f64, tokens as f64 / solving.elapsed().as_secs_f64());
        if let Some(progress) = &progress {
            progress.step(solved, &format!("Avg@1 {share:.1}%  {speed:.0} tokens/s"));
        }
        Ok(())
    };
    let records = evaluate::evaluate(&mut queue, &mut engine, &start, &sets, options, done, &ranks, save);
    let records = match records {
        Err(e @ EvaluateError::Stray { .. }) => return Err(bad(e)),
        result => result.with_context(|| format!("evaluating {}", args.model.display()))?,
    };
    progress.iter().for_each(Progress::finish);
    let Some(output) = output else { return Ok(()) };

    let of_set =
        |set: &EvalSet| summarize(&set.name, records.iter().filter(|r| r.set == set.name), options.k);
    let summaries: Vec<Summary> = sets.iter().map(of_set).collect();
    let total = summarize("total", &records, options.k);
    let mean_over_sets = MeanOverSets::of(&summaries);
    let document = Document {
        settings: &settings,
        sets: &summaries,
        total: &total,
        mean_over_sets: &mean_over_sets,
        responses: output.responses().display().to_string(),
        seconds: began.elapsed().as_secs_f64(),
        tokens_per_s: tokens as f64 / solving.elapsed().as_secs_f64(),
    };
    let responses = document.responses.clone();
    output.finish(&records, &document)?;
    if args.json {
        out!("{}", serde_json::to_string(&document)?)?;
    } else {
        let table = output::table(&summaries, &total, &mean_over_sets, options.k);
        out!("{table}\nresponses and verdicts in {responses}")?;
    }
    Ok(())
}

fn greedy_correct(record: &ProblemRecord) -> Option<f64> {
    record.greedy.as_ref().map(|g| g.correct)
}

/// Checks the settings and reads the problems, before anything that takes time.
fn plan(args: &Args) -> anyhow::Result<(EvalOptions, Sources)> {
    let rules = match &args.recipe {
        Some(file) => dataset_of(file)?,
        None => DatasetSource {
            preset: args.preset.clone(),
            policy: args.policy.clone(),
            ..DatasetSource::default()
        },
    };
    let preset = rules.preset().or_bad()?;
    let at_least_one = |flag: &str, value: Option<usize>| match value {
        Some(0) => Err(bad(format!("{flag} is 0, expected at least 1"))),
        _ => Ok(()),
    };
    at_least_one("--k", args.k)?;
    at_least_one("--max-new", args.max_new)?;
    at_least_one("--limit", args.limit)?;
    at_least_one("--max-num-seqs", Some(args.max_num_seqs))?;
    at_least_one("--kv-mib", Some(args.kv_mib))?;
    let sampling = Sampling {
        temperature: args.temperature.or(preset.map(|p| p.temperature as f32)).unwrap_or(1.0),
        top_p: args.top_p.or(preset.map(|p| p.top_p as f32)).unwrap_or(1.0),
        ..Sampling::default()
    };
    sampling.check(usize::MAX).or_bad()?;
    let options = EvalOptions {
        k: args.k.or(preset.map(|p| p.samples as usize)).unwrap_or(32),
        sampling,
        max_new: args.max_new.or(preset.map(|p| p.max_new_tokens as usize)).unwrap_or(1024),
        seed: args.seed,
    };
    let files = match args.data.is_empty() && args.task.is_empty() {
        true => &rules.test_files,
        false => &args.data,
    };
    let sources = Sources::open(files, &args.task, &rules, args.limit, args.seed)?;
    Ok((options, sources))
}

/// The data set that a recipe's `[task]` reads.
pub fn dataset_of(recipe: &Path) -> anyhow::Result<DatasetSource> {
    let read = Recipe::read(recipe, &[]).or_bad()?;
    match read.task().or_bad()?.dataset() {
        Some((_, source)) => Ok(source.clone()),
        None => Err(bad(format!(
            "--recipe {}: expected a [task] of the type dataset; generated problems are \
             `qurl eval --task KIND:LEVEL`",
            recipe.display()
        ))),
    }
}

/// An engine with no more pages than the longest problem and the number of sequences can use.
fn engine<D: Device>(
    args: &Args,
    queue: &mut D::Queue,
    (start, model): (&Start, &OpenModel),
    sets: &[EvalSet],
    options: EvalOptions,
) -> anyhow::Result<Engine<D>> {
    let mut longest = 0;
    let mut chats = false;
    for set in sets {
        for problem in &set.problems {
            let prompt = encode(start, &problem.prompt);
            let prompt = prompt.map_err(|e| bad(format!("{}, problem {}: {e}", set.name, problem.id)))?;
            longest = longest.max(prompt.len());
            chats |= matches!(problem.prompt, qurl_tasks::Prompt::Chat(_));
        }
    }
    if chats && start.template.is_none() {
        err!("the tokenizer has no chat template: prompts are given as plain text");
    }
    let context = start.config.max_position_embeddings;
    let positions = longest.saturating_add(options.max_new).min(context);
    let network = NetworkOptions { positions, ..args.packing.options(&start.config) };
    let (network, checksum) = args.adapter.network::<D>(queue, &args.model, model, network)?;

    let engine = EngineOptions { max_num_seqs: args.max_num_seqs, ..EngineOptions::default() };
    let c = &start.config;
    let device = queue.device().clone();
    let layer = device.kv_page_bytes(network.kv_shape(1, engine.page_size));
    let pages = positions.div_ceil(engine.page_size).saturating_add(1).saturating_mul(args.max_num_seqs);
    let useful = layer.saturating_mul(c.num_layers).saturating_mul(pages);
    let kv_bytes = args.kv_mib.saturating_mul(1 << 20).min(useful);
    let weights = WeightVersion { version: 0, checksum };
    Engine::new(device, network, weights, EngineOptions { kv_bytes, ..engine }).or_bad()
}
