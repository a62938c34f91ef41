//! `qurl bench gemm`: the linear layers of a model shape, one by one.

use super::machine::Machine;
use super::{Document, median, print_json};
use crate::input::bad;
use crate::output::out;
use qurl_kernels::cpu::peak;
use qurl_kernels::ops::{Linear, Output, Pack};
use qurl_kernels::types::WeightShape;
use qurl_kernels::{Cpu, Device, Format, Queue, Rounding};
use qurl_model::rng::CounterRng;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

#[derive(clap::Args)]
pub struct Args {
    /// Model shape: "5m", "default", or a published one such as qwen2.5-0.5b
    #[arg(long, default_value = "qwen2.5-0.5b")]
    shape: String,
    /// Number formats of the weights
    #[arg(long, value_delimiter = ',', default_values_t = Format::ALL)]
    formats: Vec<Format>,
    /// Rows of the input
    #[arg(long, value_delimiter = ',', default_values_t = [1, 32, 64, 256])]
    batch: Vec<usize>,
    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    case: String,
    format: String,
    batch: usize,
    microseconds: f64,
    gflops: f64,
    peak_gflops: f64,
    gb_per_s: f64,
    peak_gb_per_s: f64,
    /// Share of the limit that binds: arithmetic or reading the weights.
    share: f64,
}

pub fn run(cpu: Cpu, args: Args) -> anyhow::Result<()> {
    if args.batch.contains(&0) {
        return Err(bad("--batch: rows must be at least 1"));
    }
    let c = super::shape::config(&args.shape)?;
    let layers = [
        ("qkv", c.qkv_dim(), c.hidden_size),
        ("o", c.hidden_size, c.q_dim()),
        ("gate_up", 2 * c.intermediate_size, c.hidden_size),
        ("down", c.hidden_size, c.intermediate_size),
    ];
    let cpu = Arc::new(cpu);
    let mut queue = cpu.queue()?;
    let description = cpu.info().description;
    let bandwidth = peak::read_bandwidth(cpu.context());
    if !args.json {
        out!("{}; reads {:.1} GB/s", description, bandwidth / 1e9)?;
        out!(
            "layer    format     rows  microseconds  GFLOP/s of peak       GB/s of weights  share of limit"
        )?;
    }
    let mut rows = Vec::new();
    for &format in &args.formats {
        let peak = Cpu::peak_gflops(&mut queue, format)?;
        for (name, n, k) in layers {
            let mut weights = vec![0.0f32; n * k];
            CounterRng::new(&[1, n as u64, k as u64]).fill_normal(&mut weights, 0.02);
            let mut packed = cpu.weight(WeightShape { n, k, format, trained: false })?;
            let from = &queue.upload(&weights)?;
            queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: &mut packed })?;
            let bytes = Cpu::weight_bytes(&packed) as f64;
            for &batch in &args.batch {
                let mut input = vec![0.0f32; batch * k];
                CounterRng::new(&[2]).fill_normal(&mut input, 1.0);
                let (x, mut y) = (queue.upload(&input)?, cpu.zeros(batch * n)?);
                let operations = 2.0 * (batch * n * k) as f64;
                let repeats = (2e8 / operations).clamp(5.0, 200.0) as usize;
                let mut times = Vec::new();
                for _ in 0..repeats + 2 {
                    let start = Instant::now();
                    queue.linear(Linear {
                        adapter: None,
                        x: &x,
                        rows: batch,
                        norm: None,
                        w: &packed,
                        bias: None,
                        output: Output::Store,
                        out: &mut y,
                    });
                    times.push(start.elapsed().as_secs_f64());
                }
                let seconds = median(times.split_off(2));
                let limit = (operations / 1e9 / peak).max(bytes / bandwidth);
                let row = Row {
                    case: name.to_string(),
                    format: format.to_string(),
                    batch,
                    microseconds: seconds * 1e6,
                    gflops: operations / seconds / 1e9,
                    peak_gflops: peak,
                    gb_per_s: bytes / seconds / 1e9,
                    peak_gb_per_s: bandwidth / 1e9,
                    share: limit / seconds,
                };
                if !args.json {
                    out!(
                        "{:8} {:9} {:5}  {:12.1}  {:7.1} of {:7.1}  {:8.1} of {:5.1}  {:13.0}%",
                        row.case,
                        row.format,
                        batch,
                        row.microseconds,
                        row.gflops,
                        peak,
                        row.gb_per_s,
                        row.peak_gb_per_s,
                        100.0 * row.share
                    )?;
                }
                rows.push(row);
            }
        }
    }
    if args.json {
        print_json(&Document { machine: description, results: rows })?;
    }
    Ok(())
}
