//! `qurl bench step`: whole RL steps of the trainer itself, on random weights of a named shape, phase by
//! phase beside the limit of each.
//!
//! The recipe is made of the options (and of `--set`): GRPO with a KL to the reference in the loss, or with
//! `--critic` PPO with that KL in the reward, as in the paper's recipes. Only what random weights cannot do
//! is set from outside: responses have forced lengths, because they would never end, and rewards alternate.
//!
//! Launched as several ranks (mpirun, srun, torchrun) they make the step together; then what each of them
//! has sent stands beside the cost model, and its memory beside its plan ([`shared`]). With `--checkpoint`
//! the state is evaluated, saved and resumed from, too ([`resumed`]).

mod limits;
mod problems;
mod resumed;
mod shared;
mod synced;

use super::machine::Machine;
use super::{Document, median, print_json, shape};
use crate::device::DeviceArg;
use crate::input::{OrBad, bad};
use crate::output::{OutputError, out};
use limits::Rates;
use problems::Digits;
use qurl_kernels::{Collective, Format, KvFormat};
use qurl_model::compute::Recompute;
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{GenerationConfig, ModelConfig, Params, params};
use qurl_rollout::{EngineOptions, EngineStats};
use qurl_train::cost::NetworkWork;
use qurl_train::lengths::ForcedLengths;
use qurl_train::memory::MemoryPlan;
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Recipe, RlPlan};
use qurl_train::rl::{RlTrainer, StepRecord};
use qurl_train::start::{BaseSource, Start, StartAdapters};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(clap::Args)]
pub struct Args {
    /// Model shape: "default" (what `qurl sft` trains), "5m", or a published one such as qwen2.5-0.5b
    #[arg(long, default_value = "qwen2.5-0.5b")]
    shape: String,
    /// So many of its layers, at full width; all if not given
    #[arg(long)]
    layers: Option<usize>,
    /// Prompts of a step
    #[arg(long, default_value_t = 32)]
    prompts: usize,
    /// Responses to each prompt; GRPO needs at least 2
    #[arg(long, default_value_t = 8)]
    n: usize,
    /// Tokens of a response
    #[arg(long, default_value_t = 512)]
    length: usize,
    /// Lognormal lengths with a mean of a quarter of --length, cut there
    #[arg(long)]
    spread: bool,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// PPO with a critic in place of GRPO
    #[arg(long)]
    critic: bool,
    /// Mini-batches of a step, each of which makes one update
    #[arg(long, default_value_t = 4)]
    mini_batches: usize,
    /// Number format of the weights that sample
    #[arg(long, default_value_t = Format::Int8)]
    format: Format,
    /// Number format of keys and values; by the recipe's default if not given
    #[arg(long)]
    kv: Option<KvFormat>,
    /// Responses that are sampled at the same time
    #[arg(long, default_value_t = 256)]
    max_num_seqs: usize,
    /// Memory for keys and values in MiB; if not given, what all sequences that are sampled at the same time
    /// can fill, or what the device has left
    #[arg(long)]
    kv_cache_mb: Option<usize>,
    /// Most tokens that are trained on at once; one longest sequence at least
    #[arg(long, default_value_t = 8192)]
    micro_tokens: usize,
    /// Compute none, mlp or block again in the backward pass (see trainer.recompute); block if it is not said
    #[arg(long, value_name = "WHAT", num_args = 0..=1, default_value_t = Recompute::None,
        default_missing_value = "block")]
    recompute: Recompute,
    /// Set any other key of the recipe
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Timed steps, after one that is not
    #[arg(long, default_value_t = 2)]
    steps: usize,
    /// After the step that is not timed, evaluate and save the state here; after the others, resume from it
    /// and make them again: the weights must be the same
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Measure, too, what bringing the weights from each step to the next takes to a rollout worker
    #[arg(long)]
    sync: bool,
    #[command(flatten)]
    pub device: DeviceArg,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// Deviation of the logarithm of lengths that spread.
const SIGMA: f64 = 1.0;
/// Memory of a device that is left to the driver when the cache takes the rest.
const DRIVER: usize = 3 << 30;

#[derive(Serialize)]
struct Row {
    case: &'static str,
    shape: String,
    format: String,
    kv_format: &'static str,
    critic: bool,
    prompts: usize,
    n: usize,
    length: usize,
    spread: bool,
    response_tokens: usize,
    kv_cache_mb: usize,
    seconds: f64,
    phases: BTreeMap<String, Phase>,
    rollout: RolloutRates,
    /// Of the weights that sampled, from a step to the next.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sync: Vec<synced::Synced>,
    ranks: shared::Shared,
    resumed: Option<resumed::Resumed>,
}

/// A phase, the median of the timed steps; `limit_s` is what the machine cannot beat.
#[derive(Serialize)]
struct Phase {
    seconds: f64,
    limit_s: Option<f64>,
    share: Option<f64>,
}

/// New tokens a second, over the last rollout and in its steps where every place decoded.
#[derive(Serialize)]
struct RolloutRates {
    tokens_per_s: f64,
    full_batch_tokens_per_s: Option<f64>,
    share: Option<f64>,
    steps: u64,
    preemptions: u64,
    /// Tokens that were prefilled, of which those beyond all prompts were computed before.
    prefill_tokens: u64,
}

pub fn run<D: Machine>(device: Arc<D>, ranks: Arc<Collective>, args: Args) -> anyhow::Result<()> {
    let counts = [args.prompts, args.n, args.length, args.mini_batches, args.max_num_seqs, args.steps];
    if counts.contains(&0) || args.prompt < 8 {
        return Err(bad(
            "--prompts, --n, --length, --mini-batches, --max-num-seqs and --steps must be at least 1, \
             --prompt 8",
        ));
    }
    if !args.prompts.is_multiple_of(args.mini_batches) {
        let (found, prompts) = (args.mini_batches, args.prompts);
        return Err(bad(format!("--mini-batches is {found}, expected a divisor of --prompts = {prompts}")));
    }
    let mut config = shape::config(&args.shape)?;
    if let Some(layers) = args.layers {
        let all = config.num_layers;
        if !(1..=all).contains(&layers) {
            return Err(bad(format!("--layers is {layers}, expected 1 to {all}, as {} has", args.shape)));
        }
        config.num_layers = layers;
    }
    let kv_cache_mb = match args.kv_cache_mb {
        Some(megabytes) => megabytes,
        None => cache_size(&*device, &config, &ranks, &args)?,
    };
    let recipe = recipe(&args, kv_cache_mb)?;
    let plan = recipe.rl(FILE).or_bad()?;
    let ranks = Ranks::new(ranks, &recipe).or_bad()?;
    let memory = MemoryPlan::of_rl(&*device, &recipe, &plan, &config, &ranks)?;
    if ranks.size() == 1 {
        memory.check_rl(&*device, &recipe, &plan, &config, &ranks).or_bad()?;
    }
    // Before the run has taken its memory.
    let rates = {
        let (actor, sampler) =
            (NetworkWork::actor(&recipe, &plan, &config), NetworkWork::sampler(&recipe, &plan, &config));
        let formats = [actor.formats(), sampler.formats()].concat();
        Rates::measure::<D>(&mut device.queue()?, &formats)?
    };
    let trainer_of = |weights| trainer(&device, &recipe, &config, &ranks, &args, weights);
    let mut trainer = trainer_of(shape::weights)?;
    trainer.step()?;
    let saved =
        args.checkpoint.as_deref().map(|dir| resumed::save(&mut trainer, &recipe, dir)).transpose()?;
    let (mut records, mut limits) = (Vec::new(), Vec::new());
    let mut before = trainer.engine().stats();
    let sent = shared::Sent::by(&trainer);
    let (mut old, mut synced) = (None, Vec::new());
    let sync = args.sync && ranks.is_first();
    if sync {
        synced::measure(&trainer, &mut device.queue()?, &mut old, &mut synced)?;
    }
    for _ in 0..args.steps {
        before = trainer.engine().stats();
        records.push(trainer.step()?);
        limits.push(limits::of_last_step(&trainer, &recipe, &rates, args.prompt));
        if sync {
            synced::measure(&trainer, &mut device.queue()?, &mut old, &mut synced)?;
        }
    }
    let rollout = rollout_rates(before, trainer.engine().stats(), &records[args.steps - 1]);
    let kv_format = trainer.engine().network().options().kv_format;
    let shared = sent.shared(&mut trainer, &recipe, memory.needed(&*device), args.steps)?;
    drop(trainer);
    let resumed = match saved {
        // From other weights than it began with, which are to be read.
        Some(saved) => Some(saved.resume(trainer_of(zeros)?, args.steps, &shared)?),
        None => None,
    };
    if !ranks.is_first() {
        return Ok(());
    }
    let row = row(&args, kv_format, &plan, &records, &limits, rollout, shared, resumed);
    let row = Row { sync: synced, ..row };
    if args.json {
        return print_json(&Document { machine: device.info().description, results: vec![row] });
    }
    out!("{}", device.info().description)?;
    Ok(print(&row)?)
}

/// A trainer of a model with such weights, or of adapters beside a random base.
fn trainer<D: Machine>(
    device: &Arc<D>,
    recipe: &Recipe,
    config: &ModelConfig,
    ranks: &Ranks,
    args: &Args,
    weights: fn(&ModelConfig) -> Params<Vec<f32>>,
) -> anyhow::Result<RlTrainer<D>> {
    let tokenizer = Tokenizer::characters(Digits::ALPHABET, &CharacterSpecials::default())?;
    tokenizer.check_fits(config).or_bad()?;
    let around = tokenizer.encode("", true)?.len();
    let task = Box::new(Digits { characters: args.prompt - around });
    let adapters = recipe.lora.as_ref().map(|lora| StartAdapters {
        lora: lora.lora(),
        weights: lora.lora().init(config, 1),
        base: BaseSource::Random(1),
        dir: "random weights".into(),
    });
    let start = Start {
        weights: match adapters {
            Some(_) => params::shapes(config, false).map(|_| Vec::new()),
            None => weights(config),
        },
        adapters,
        config: config.clone(),
        tokenizer,
        template: None,
        generation: GenerationConfig::default(),
        warning: None,
    };
    let mut trainer = RlTrainer::on_ranks(device, recipe, FILE, start, task, ranks.clone()).or_bad()?;
    trainer.force_lengths(match args.spread {
        true => ForcedLengths::Lognormal { mean: args.length as f64 / 4.0, sigma: SIGMA },
        false => ForcedLengths::Full,
    });
    Ok(trainer)
}

/// Weights that are all zero.
fn zeros(config: &ModelConfig) -> Params<Vec<f32>> {
    params::shapes(config, false).map(|info| vec![0.0; info.len()])
}

/// Where messages say a value of the recipe stands.
const FILE: &str = "bench step";

/// The recipe that the options describe.
fn recipe(args: &Args, kv_cache_mb: usize) -> anyhow::Result<Recipe> {
    let Args { prompts, n, length, prompt, format, max_num_seqs, micro_tokens, recompute, .. } = args;
    let mini = prompts / args.mini_batches;
    let kv = args.kv.map_or(String::new(), |kv| format!("kv_cache = \"{}\"\n", kv.name()));
    let algorithm = match args.critic {
        true => format!(
            "adv_estimator = {{ type = \"gae\" }}\n\
             kl_in_reward = {{ kl_ctrl = {{ type = \"fixed\", kl_coef = 0.001 }} }}\n\
             [critic]\nlr = 1e-7\nppo_mini_batch_size = {mini}\ncliprange_value = 0.5\n"
        ),
        false => "adv_estimator = { type = \"grpo\" }\nkl_loss_coef = 0.001\n".to_string(),
    };
    let text = format!(
        "[model]\npath = \"random weights\"\n\
         [data]\ntrain_batch_size = {prompts}\nmax_prompt_length = {prompt}\nmax_response_length = {length}\n\
         [rollout]\nn = {n}\nformat = \"{format}\"\n{kv}kv_cache_mb = {kv_cache_mb}\n\
         max_num_seqs = {max_num_seqs}\n\
         [actor]\nlr = 1e-7\nppo_mini_batch_size = {mini}\n\
         [run]\ntotal_steps = {}\nupdate_metrics_freq = 0\n\
         [trainer]\nmicro_tokens = {micro_tokens}\nrecompute = \"{recompute}\"\n\
         [algorithm]\nobjective = {{ type = \"acr\", c = 2.0 }}\n{algorithm}",
        args.steps + 1
    );
    Recipe::parse(&text, FILE, &args.set).or_bad()
}

/// MiB for the keys and values of all sequences that are sampled at the same time, or what is left of the
/// device's memory beside everything else.
fn cache_size<D: Machine>(
    device: &D,
    config: &ModelConfig,
    ranks: &Arc<Collective>,
    args: &Args,
) -> anyhow::Result<usize> {
    let longest = args.prompt + args.length;
    let token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim; // at most, in f32
    let sequences = args.max_num_seqs.min(args.prompts * args.n) + 1;
    let page_size = EngineOptions::of_device(device).page_size;
    let wanted = (token * longest.next_multiple_of(page_size) * sequences).div_ceil(1 << 20);
    let Some(memory) = device.memory() else { return Ok(wanted) };
    let one = (token * (longest + page_size)).div_ceil(1 << 20);
    let recipe = recipe(args, one)?;
    let ranks = Ranks::new(ranks.clone(), &recipe).or_bad()?;
    let rest = MemoryPlan::of_rl(device, &recipe, &recipe.rl(FILE).or_bad()?, config, &ranks)?.total();
    let left = memory.free.saturating_sub(rest + DRIVER) >> 20;
    Ok(wanted.min(one + left))
}

fn rollout_rates(before: EngineStats, after: EngineStats, record: &StepRecord) -> RolloutRates {
    let tokens_per_s = record.rollout_tokens_per_s();
    let full = after.full.tokens_per_s_since(before.full);
    RolloutRates {
        tokens_per_s,
        full_batch_tokens_per_s: full,
        share: full.map(|full| tokens_per_s / full),
        steps: after.steps - before.steps,
        preemptions: after.preemptions - before.preemptions,
        prefill_tokens: after.prefill_tokens - before.prefill_tokens,
    }
}

fn row(
    args: &Args,
    kv_format: KvFormat,
    plan: &RlPlan,
    records: &[StepRecord],
    limits: &[BTreeMap<&'static str, f64>],
    rollout: RolloutRates,
    ranks: shared::Shared,
    resumed: Option<resumed::Resumed>,
) -> Row {
    let seconds = |phase: &str| median(records.iter().filter_map(|r| r.timing.get(phase).copied()).collect());
    let phase = |name: &str| {
        let of = limits.iter().filter_map(|limits| limits.get(name).copied());
        let (seconds, limit) = (seconds(name), median(of.collect()));
        let limit_s = limit.is_finite().then_some(limit);
        Phase { seconds, limit_s, share: limit_s.map(|limit| limit / seconds) }
    };
    let names = ["quantize", "rollout", "verify", "score", "update"];
    Row {
        case: "step",
        shape: args.shape.clone(),
        format: plan.rollout.format.to_string(),
        kv_format: kv_format.name(),
        critic: plan.critic.is_some(),
        prompts: plan.data.train_batch_size,
        n: plan.rollout.n,
        length: plan.data.max_response_length,
        spread: args.spread,
        response_tokens: records[records.len() - 1].response_tokens,
        kv_cache_mb: plan.rollout.kv_cache_mb,
        seconds: seconds("total"),
        phases: names.into_iter().map(|name| (name.to_string(), phase(name))).collect(),
        rollout,
        sync: Vec::new(),
        ranks,
        resumed,
    }
}

fn print(row: &Row) -> Result<(), OutputError> {
    let algorithm = if row.critic { "PPO" } else { "GRPO" };
    out!(
        "{} {algorithm}: {} x {} responses, {} tokens, {} weights, {} cache of {} MiB: {:.3} s a step",
        row.shape,
        row.prompts,
        row.n,
        row.response_tokens,
        row.format,
        row.kv_format,
        row.kv_cache_mb,
        row.seconds
    )?;
    for (name, phase) in &row.phases {
        match phase.limit_s.zip(phase.share) {
            Some((limit, share)) => {
                out!("{name:9} {:9.3} s of {limit:9.3} s at least ({:3.0}%)", phase.seconds, 100.0 * share)?
            }
            None => out!("{name:9} {:9.3} s", phase.seconds)?,
        }
    }
    let r = &row.rollout;
    let full = r.full_batch_tokens_per_s.zip(r.share);
    let full = full.map_or("no full batches".to_string(), |(full, share)| {
        format!("{full:.1} in full batches ({:.0}%)", 100.0 * share)
    });
    out!(
        "rollout   {:9.1} tokens/s, {full}; {} steps, {} preemptions, {} tokens prefilled",
        r.tokens_per_s,
        r.steps,
        r.preemptions,
        r.prefill_tokens
    )?;
    row.sync.iter().try_for_each(synced::Synced::print)?;
    row.ranks.print()?;
    row.resumed.as_ref().map_or(Ok(()), resumed::Resumed::print)
}
