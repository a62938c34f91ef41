//! Speed of decode attention over long contexts beside the rate of reading memory, measured in the same run.
//!
//! `cargo run --release -p qurl-kernels --example attention_speed [rounds] [format ...]`
//!
//! The heads are those of a 0.5B model, the batch and the layers so many that the cache comes from memory.
//! Formats are interleaved within a round and the best round counts, so that other work on the machine
//! disturbs all of them alike.

use qurl_kernels::cpu::kv::KvPages;
use qurl_kernels::cpu::{attention, peak};
use qurl_kernels::types::{Heads, KvShape, Span};
use qurl_kernels::{Cpu, Device, KvFormat};
use std::time::Instant;

const HEADS: Heads = Heads { heads: 14, kv_heads: 2, head_dim: 64, scale: 0.125, window: None };
const BATCH: usize = 8;
const CONTEXT: usize = 8192;
const LAYERS: usize = 6;
const PAGE: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let rounds: usize = arguments.next().map_or(Ok(7), |text| text.parse())?;
    let named: Vec<KvFormat> = arguments.map(|name| name.parse()).collect::<Result<_, _>>()?;
    let formats = if named.is_empty() { KvFormat::ALL.to_vec() } else { named };
    let cpu = Cpu::from_env()?;
    println!("{}", cpu.info().description);
    let ctx = cpu.context();
    let Heads { kv_heads, head_dim, .. } = HEADS;
    let pages = BATCH * CONTEXT / PAGE;
    // Any numbers; a token's row has its queries, keys and values.
    let width = HEADS.qkv_width();
    let mut bits = 1u64;
    let mut number = || {
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (bits >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let rows: Vec<f32> = (0..1024 * width).map(|_| number()).collect();
    let layers: Vec<Vec<KvPages>> = formats
        .iter()
        .map(|&format| {
            let shape = KvShape { format, pages, page_size: PAGE, kv_heads, head_dim };
            let layer = |_| {
                let mut kv = KvPages::new(shape);
                for first in (0..pages * PAGE).step_by(1024) {
                    let slots: Vec<u32> = (first as u32..first as u32 + 1024).collect();
                    kv.write(ctx, &rows, width, HEADS.q_width(), &slots);
                }
                kv
            };
            (0..LAYERS).map(layer).collect()
        })
        .collect();
    let numbers: Vec<u32> = (0..pages as u32).collect();
    let spans: Vec<Span> = (0..BATCH)
        .map(|i| Span { row: i, rows: 1, position: CONTEXT - 1, pages: i * CONTEXT / PAGE })
        .collect();
    let mut out = vec![0.0; BATCH * HEADS.q_width()];
    let (mut rates, mut memory) = (vec![0.0f64; formats.len()], 0.0f64);
    for _ in 0..rounds {
        for ((&format, layers), rate) in formats.iter().zip(&layers).zip(&mut rates) {
            memory = memory.max(peak::read_bandwidth(ctx) / 1e9);
            let shape = KvShape { format, pages, page_size: PAGE, kv_heads, head_dim };
            for kv in layers {
                let start = Instant::now();
                attention::forward(ctx, HEADS, &rows, kv, &spans, &numbers, &mut out, None);
                let bytes = pages * KvPages::page_bytes(shape);
                *rate = rate.max(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
            }
        }
    }
    println!("reading memory: {memory:.1} GB/s");
    for (format, rate) in formats.iter().zip(rates) {
        println!("{:5} cache at {rate:5.1} GB/s, {:3.0}%", format.name(), 100.0 * rate / memory);
    }
    Ok(())
}
