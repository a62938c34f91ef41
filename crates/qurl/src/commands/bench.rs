//! `qurl bench`: speed beside the measured limits of the machine.

mod gemm;
pub mod machine;
mod repack;
mod rollout;
mod score;
mod serve;
mod shape;
mod step;
mod sync;
mod train;

use crate::device::on_device;
use crate::input::OrBad;
use crate::output::out;
use crate::ranks::on_ranks;
use clap::Subcommand;
use qurl_kernels::Cpu;
use serde::Serialize;

/// Options of `qurl bench`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl bench rollout --shape qwen2.5-0.5b --formats bf16,int8 --batch 32")]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Training speed of a small model from random weights
    #[command(after_help = "Example: qurl bench train --formats f32,bf16 --steps 20")]
    Train(train::Args),
    /// Speed of the rollout engine with random weights of a named shape
    #[command(
        after_help = "Example: qurl bench rollout --shape qwen2.5-0.5b --formats bf16,int8 --batch 1,32 \
                      --quantize-head"
    )]
    Rollout(rollout::Args),
    /// A server under load: throughput and latencies at rising rates of arrival
    #[command(
        after_help = "Example: qurl bench serve --shape qwen2.5-7b --formats bf16,int8 --rates 4,16,inf"
    )]
    Serve(serve::Args),
    /// Whole steps of reinforcement learning with random weights of a named shape, phase by phase
    #[command(
        after_help = "Example: qurl bench step --shape qwen2.5-1.5b --prompts 32 --n 8 --length 4096 --spread"
    )]
    Step(step::Args),
    /// Speed of scoring whole sequences with random weights of a named shape, as a step of reinforcement
    /// learning scores its rollouts: in bf16, or with trainer.forward = "rollout" in the rollout's format
    #[command(
        after_help = "Example: qurl bench score --shape qwen2.5-7b --formats bf16,int8 --batch 32 --length 1024"
    )]
    Score(score::Args),
    /// Bytes and time of bringing a rollout worker to the next version of the weights
    #[command(
        after_help = "Example: qurl bench sync --shape qwen2.5-0.5b --formats int8,bf16 --lr 1e-6,1e-5"
    )]
    Sync(sync::Args),
    /// Speed of single linear layers
    #[command(after_help = "Example: qurl bench gemm --shape qwen2.5-0.5b --formats f32,bf16 --batch 1,32")]
    Gemm(gemm::Args),
}

/// Runs the benchmark.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.what {
        What::Train(args) => on_device!(args.device.get(), device => train::run(device, args)),
        What::Rollout(args) => on_device!(args.device.get(), device => rollout::run(device, args)),
        What::Step(args) => {
            on_ranks!(args.device.get(), (device, ranks) => step::run(device, ranks, args))
        }
        What::Serve(args) => serve::run(args),
        What::Score(args) => on_device!(args.device.get(), device => score::run(device, args)),
        What::Sync(args) => on_device!(args.device.get(), device => sync::run(device, args)),
        What::Gemm(args) => gemm::run(Cpu::from_env().or_bad()?, args),
    }
}

/// The one JSON document of a benchmark.
#[derive(Serialize)]
struct Document<T> {
    machine: String,
    results: Vec<T>,
}

/// The middle of some values; NaN for none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn print_json<T: Serialize>(document: &Document<T>) -> anyhow::Result<()> {
    out!("{}", serde_json::to_string(document)?)?;
    Ok(())
}
