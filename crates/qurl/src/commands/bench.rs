//! `qurl bench`: speed beside the measured limits of the machine.

mod gemm;
mod rollout;
mod shape;
mod train;

use crate::input::OrBad;
use clap::Subcommand;
use qurl_kernels::Cpu;
use qurl_kernels::Format;
use qurl_kernels::cpu::peak::{self, Unit};
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
        after_help = "Example: qurl bench rollout --shape qwen2.5-0.5b --formats bf16,int8 --batch 1,32 --quantize-head"
    )]
    Rollout(rollout::Args),
    /// Speed of single linear layers
    #[command(after_help = "Example: qurl bench gemm --shape qwen2.5-0.5b --formats f32,bf16 --batch 1,32")]
    Gemm(gemm::Args),
}

/// Runs the benchmark.
pub fn run(args: Args) -> anyhow::Result<()> {
    let cpu = Cpu::from_env().or_bad()?;
    match args.what {
        What::Train(args) => train::run(cpu, args),
        What::Rollout(args) => rollout::run(cpu, args),
        What::Gemm(args) => gemm::run(cpu, args),
    }
}

/// The unit that bounds products in a format, and its name.
fn unit(format: Format) -> Unit {
    match format {
        Format::F32 => Unit::F32,
        Format::Int8 => Unit::Int8,
        // The other formats are decoded to bf16 on the way into the product.
        Format::Bf16 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => Unit::Bf16,
    }
}

/// Peak of the unit of a format in GFLOP/s (GOP/s).
fn peak_gflops(cpu: &Cpu, format: Format) -> f64 {
    peak::operations_per_second(cpu.context(), unit(format)) / 1e9
}

/// The one JSON document of a benchmark.
#[derive(Serialize)]
struct Document<T> {
    machine: String,
    results: Vec<T>,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn print_json<T: Serialize>(document: &Document<T>) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(document)?);
    Ok(())
}
