//! `qurl plan`: what a recipe needs of several GPUs, before there are any. Memory of a rank by the run's own
//! constructors, bytes that ranks send, and the time of a step by the cost model (`docs/scale.md`).

use crate::device::gpu;
use crate::input::{OrBad, bad};
use crate::output::{self, out};
use anyhow::Context;
use qurl_kernels::collective::Collective;
use qurl_kernels::cuda::counting::GpuProfile;
use qurl_kernels::{Cuda, Device};
use qurl_model::ModelConfig;
use qurl_train::cost::{self, Cluster, Sharing, StepTime, Work};
use qurl_train::memory::{DRIVER_RESERVE, MemoryPlan};
use qurl_train::ranks::Ranks;
use qurl_train::recipe::{Recipe, RlPlan, TaskSource};
use qurl_train::start::Start;
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

const GIB: f64 = (1u64 << 30) as f64;

/// Options of `qurl plan`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl plan recipes/aime-dapo.toml --shape qwen2.5-7b --gpus 8 --gpu h100")]
pub struct Args {
    /// Recipe file
    recipe: PathBuf,
    /// Overrides a key of the recipe, as in --set trainer.micro_tokens=8192
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// GPUs, one rank each: a power of two
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus: u16,
    /// Kind of the GPUs, whose kernels and memory are planned with: h200, h100, a100-80, a100-40, l40s, l4,
    /// a10, rtx3090, rtx4090 or rtx5090
    #[arg(long, value_name = "KIND", default_value = "h200", value_parser = gpu)]
    gpu: GpuProfile,
    /// Memory of a GPU in GB (1e9 bytes), in place of what its kind has
    #[arg(long, value_name = "GB")]
    gpu_memory: Option<f64>,
    /// A published shape in place of the recipe's model, as qwen2.5-1.5b: no files are needed
    #[arg(long)]
    shape: Option<String>,
    /// Mean tokens of a response (default: half of data.max_response_length)
    #[arg(long, value_name = "TOKENS")]
    length: Option<usize>,
    /// Sustained bf16 arithmetic of a GPU in training, TFLOP/s
    #[arg(long, value_name = "TFLOPS", default_value_t = 400.0)]
    tflops: f64,
    /// Sustained reading from a GPU's memory, GB/s
    #[arg(long, value_name = "GBPS", default_value_t = 4000.0)]
    memory_bandwidth: f64,
    /// What a GPU sends to others of its machine, GB/s
    #[arg(long, value_name = "GBPS", default_value_t = 350.0)]
    nvlink: f64,
    /// What a GPU sends to other machines, GB/s
    #[arg(long, value_name = "GBPS", default_value_t = 45.0)]
    network: f64,
    /// GPUs of a machine
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus_per_machine: u16,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// What several GPUs would do.
#[derive(Serialize)]
struct Report {
    recipe: String,
    model: String,
    parameters: u64,
    gpus: usize,
    shards: usize,
    responses: usize,
    mean_response: usize,
    /// Of a rank, in GiB.
    memory_gib: Vec<(String, f64)>,
    /// What each phase of a step takes beside the parts that are always there, where memory is given back
    /// between the phases.
    phases_gib: Vec<(String, f64)>,
    total_gib: f64,
    /// Page-locked memory of a rank's host.
    on_host_gib: f64,
    gpu: String,
    gpu_gib: f64,
    fits: bool,
    /// For 1, 2, 4, ... GPUs.
    rows: Vec<Row>,
}

/// A step on so many GPUs.
#[derive(Serialize)]
struct Row {
    gpus: usize,
    memory_gib: f64,
    fits: bool,
    /// Bytes that rank 0 sends in a step.
    all_to_all: u64,
    all_gather: u64,
    host: u64,
    rollout_s: f64,
    scoring_s: f64,
    training_s: f64,
    exchange_s: f64,
    step_s: f64,
    /// The time of one GPU over this time times the GPUs.
    efficiency: f64,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let report = plan(&args)?;
    match args.json {
        true => Ok(out!("{}", serde_json::to_string(&report)?)?),
        false => Ok(output::text(&text(&report))?),
    }
}

fn plan(args: &Args) -> anyhow::Result<Report> {
    let gpus = usize::from(args.gpus);
    if !gpus.is_power_of_two() {
        return Err(bad(format!("--gpus {gpus}: expected a power of two, as trainer.shards is one")));
    }
    let cluster = cluster(args)?;
    let mut recipe = Recipe::read(&args.recipe, &args.overrides).or_bad()?;
    let file = recipe.file().to_string();
    let rl = recipe.rl(&file).or_bad()?;
    let (model, config) = config(args, &recipe)?;
    // As many shards as all rows of the table need: a run of the plan says so in its recipe.
    recipe.trainer.shards = recipe.trainer.shards.max(gpus);
    let mut work = Work::of(&rl);
    work.response = args.length.unwrap_or(work.response);
    if work.response > work.longest {
        let (given, limit) = (work.response, work.longest);
        return Err(bad(format!("--length {given}: expected at most data.max_response_length = {limit}")));
    }
    let given = args.gpu_memory.map_or(args.gpu.memory, |gb| (gb * 1e9) as usize);
    let profile = GpuProfile { memory: given, ..args.gpu.clone() };
    let gpu = Cuda::counting_as(&profile);
    let mut rows: Vec<Row> = Vec::new();
    let mut memory = MemoryPlan::default();
    let mut alone = 0.0;
    for ranks in std::iter::successors(Some(1), |ranks| Some(2 * ranks)).take_while(|&ranks| ranks <= gpus) {
        memory = memory_of(&gpu, &recipe, &rl, &config, ranks)?;
        let time = cost::step_time(&rl, &config, &recipe, &work, ranks, &cluster);
        if ranks == 1 {
            alone = time.total();
        }
        let sharing = Sharing::of(&recipe, ranks);
        let passes = cost::passes(&rl, &recipe.trainer, &work, &sharing);
        let sent = cost::step_bytes(&rl, &config, &work, passes, 0, &sharing);
        let StepTime { rollout, scoring, training, exchange } = time;
        rows.push(Row {
            gpus: ranks,
            memory_gib: memory.total() as f64 / GIB,
            fits: fits(&gpu, &memory, ranks),
            all_to_all: sent.all_to_all,
            all_gather: sent.all_gather,
            host: sent.host,
            rollout_s: rollout,
            scoring_s: scoring,
            training_s: training,
            exchange_s: exchange,
            step_s: time.total(),
            efficiency: alone / (ranks as f64 * time.total()),
        });
    }
    Ok(Report {
        recipe: file,
        model,
        parameters: config.param_count(),
        gpus,
        shards: recipe.trainer.shards,
        responses: work.responses,
        mean_response: work.response,
        memory_gib: gib(memory.parts()),
        phases_gib: gib(memory.phases()),
        total_gib: memory.total() as f64 / GIB,
        on_host_gib: memory.on_host() as f64 / GIB,
        gpu: profile.name,
        gpu_gib: profile.memory as f64 / GIB,
        fits: fits(&gpu, &memory, gpus),
        rows,
    })
}

fn gib(parts: &[(String, usize)]) -> Vec<(String, f64)> {
    parts.iter().map(|(part, bytes)| (part.clone(), *bytes as f64 / GIB)).collect()
}

/// The rates that were given, each more than nothing.
fn cluster(args: &Args) -> anyhow::Result<Cluster> {
    let rates = [
        ("--gpu-memory", args.gpu_memory.unwrap_or(1.0)),
        ("--tflops", args.tflops),
        ("--memory-bandwidth", args.memory_bandwidth),
        ("--nvlink", args.nvlink),
        ("--network", args.network),
    ];
    if let Some((name, value)) = rates.into_iter().find(|(_, value)| !(value.is_finite() && *value > 0.0)) {
        return Err(bad(format!("{name} {value}: expected more than 0")));
    }
    Ok(Cluster {
        flops: args.tflops * 1e12,
        memory: args.memory_bandwidth * 1e9,
        local: args.nvlink * 1e9,
        network: args.network * 1e9,
        per_machine: usize::from(args.gpus_per_machine),
        ..Cluster::default()
    })
}

/// The model that is planned for, and what to call it. Weights are not read.
fn config(args: &Args, recipe: &Recipe) -> anyhow::Result<(String, ModelConfig)> {
    let context = recipe.model.max_position_embeddings;
    let (name, mut config) = match (&args.shape, &recipe.model.path) {
        (Some(shape), _) => (shape.clone(), ModelConfig::named(shape).or_bad()?),
        (None, Some(path)) => {
            let config = ModelConfig::read(&path.join("config.json"));
            (path.display().to_string(), config.or_bad().context("--shape plans without a model's files")?)
        }
        (None, None) => {
            let task = recipe.task.as_ref().map(TaskSource::problems).transpose().or_bad()?;
            ("a new model".to_string(), Start::of_sft(recipe, task.as_deref()).or_bad()?.config)
        }
    };
    config.max_position_embeddings = context.unwrap_or(config.max_position_embeddings);
    Ok((name, config))
}

fn memory_of(
    gpu: &Cuda,
    recipe: &Recipe,
    plan: &RlPlan,
    config: &ModelConfig,
    ranks: usize,
) -> anyhow::Result<MemoryPlan> {
    let ranks = Ranks::new(Arc::new(Collective::counted(0, ranks)), recipe).or_bad()?;
    Ok(MemoryPlan::of_rl(gpu, recipe, plan, config, &ranks)?)
}

/// Whether a rank's memory is there, with what the driver and the exchange take.
fn fits(gpu: &Cuda, memory: &MemoryPlan, ranks: usize) -> bool {
    let exchange = if ranks > 1 { Collective::device_bytes() } else { 0 };
    gpu.memory().is_some_and(|there| memory.total() + exchange + DRIVER_RESERVE <= there.total)
}

fn text(report: &Report) -> String {
    let Report { gpus, parameters, responses, mean_response, shards, .. } = report;
    let mut text = format!(
        "{}: {}, {:.2} B parameters, {responses} responses of {mean_response} tokens a step, trainer.shards \
         = {shards}\n",
        report.recipe,
        report.model,
        *parameters as f64 / 1e9
    );
    let does = if report.fits { "fits" } else { "does not fit" };
    let _ = writeln!(
        text,
        "memory of a rank of {gpus}: {:.1} GiB, {does} in {:.1} GiB (planned for {}, with {:.1} GiB for the \
         driver)",
        report.total_gib,
        report.gpu_gib,
        report.gpu,
        DRIVER_RESERVE as f64 / GIB
    );
    for (part, gib) in report.memory_gib.iter().filter(|(_, gib)| *gib >= 0.05) {
        let _ = writeln!(text, "  {part:<32} {gib:>8.1} GiB");
    }
    if report.on_host_gib > 0.0 {
        let _ = writeln!(text, "  {:<32} {:>8.1} GiB", "on the host, page-locked", report.on_host_gib);
    }
    if !report.phases_gib.is_empty() {
        let phases = report.phases_gib.iter().map(|(phase, gib)| format!("{phase} {gib:.1}"));
        let _ = writeln!(text, "  phases, GiB: {}", phases.collect::<Vec<_>>().join(", "));
    }
    text.push_str("\nGPUs  memory GiB      sent GB: gradients  weights  facts    seconds: ");
    text.push_str("rollout  scoring  training  exchange    step  efficiency\n");
    for row in &report.rows {
        let mark = if row.fits { ' ' } else { '!' };
        let _ = writeln!(
            text,
            "{:>4}  {:>10.1}{mark} {:>23.2} {:>8.2} {:>6.2} {:>19.1} {:>8.1} {:>9.1} {:>9.2} {:>7.1} {:>10.1}%",
            row.gpus,
            row.memory_gib,
            row.all_to_all as f64 / 1e9,
            row.all_gather as f64 / 1e9,
            row.host as f64 / 1e9,
            row.rollout_s,
            row.scoring_s,
            row.training_s,
            row.exchange_s,
            row.step_s,
            100.0 * row.efficiency
        );
    }
    if report.rows.iter().any(|row| !row.fits) {
        text.push_str("!: more than a GPU has\n");
    }
    text
}
