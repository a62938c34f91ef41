//! What the machine can do at most, measured: benchmarks print their figures beside it.

use super::Context;
use super::buf::{Aligned, Parts};
use super::simd::{Simd, simd_dispatch};
use std::time::Instant;

/// An arithmetic unit whose peak can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// f32 multiply-add.
    F32,
    /// bf16 dot product.
    Bf16,
    /// 8-bit dot product.
    Int8,
}

/// Multiply-adds in registers: the most operations a second (two per multiply-add) that all threads reach
/// together.
pub fn operations_per_second(ctx: &Context, unit: Unit) -> f64 {
    const ROUNDS: usize = 400_000;
    let lanes = ctx.panel() / 2;
    let per_lane = match unit {
        Unit::F32 => 2,
        Unit::Bf16 => 4,
        Unit::Int8 => 8,
    };
    let operations = (ctx.threads() * ROUNDS * CHAINS * lanes * per_lane) as f64;
    let best = (0..5).map(|_| {
        let start = Instant::now();
        // SAFETY: the level was detected when the context was made.
        ctx.pool.for_each(ctx.threads(), &|_| unsafe { spin(ctx.level, unit, ROUNDS) });
        start.elapsed().as_secs_f64()
    });
    operations / best.fold(f64::INFINITY, f64::min)
}

/// Bytes a second that all threads read together from an array far larger than the caches.
pub fn read_bandwidth(ctx: &Context) -> f64 {
    read_bandwidth_of(ctx, 256 << 20)
}

/// Bytes a second that all threads read together from an array of this many bytes, again and again: what fits
/// into the caches is read from there. No less than 64 KiB, no more than 256 MiB. The median of five times.
pub fn read_bandwidth_of(ctx: &Context, bytes: usize) -> f64 {
    let words = bytes.clamp(1 << 16, 256 << 20) / 4;
    let block = (words / (4 * ctx.threads())).clamp(1 << 12, 1 << 20);
    let mut data = Aligned::<f32>::zeros(words);
    data.fill(1.0); // memory that was never written would be one page of zeros in the caches
    let mut sums = vec![0.0f32; words.div_ceil(block)];
    let parts = Parts::new(&mut sums);
    let passes = (64 << 20) / (4 * words) + 1;
    let mut seconds = [0.0; 5];
    for seconds in &mut seconds {
        let start = Instant::now();
        for _ in 0..passes {
            ctx.pool.for_each(words.div_ceil(block), &|i| {
                // SAFETY: the level was detected; one slot a task.
                unsafe { *parts.at(i) = sum(ctx.level, &data[i * block..((i + 1) * block).min(words)]) }
            });
        }
        *seconds = start.elapsed().as_secs_f64();
    }
    std::hint::black_box(&sums);
    seconds.sort_by(f64::total_cmp);
    (passes * words * 4) as f64 / seconds[2]
}

/// Seconds that all threads together take to read these arrays once, every thread a contiguous part of each:
/// the median of three times. What fits into the caches is read from there.
pub fn read_seconds(ctx: &Context, arrays: &[&[f32]]) -> f64 {
    const BLOCK: usize = 1 << 15;
    let mut seconds = [0.0; 3];
    for seconds in &mut seconds {
        let start = Instant::now();
        for array in arrays {
            ctx.pool.for_runs(array.len().div_ceil(BLOCK), 4, 2, &|blocks| {
                let part = &array[blocks.start * BLOCK..(blocks.end * BLOCK).min(array.len())];
                // SAFETY: the level was detected.
                std::hint::black_box(unsafe { sum(ctx.level, part) });
            });
        }
        *seconds = start.elapsed().as_secs_f64();
    }
    seconds.sort_by(f64::total_cmp);
    seconds[1]
}

/// Independent chains: enough to hide the latency of the unit.
const CHAINS: usize = 12;

simd_dispatch!(fn spin(unit: Unit, rounds: usize) = spin_at);
simd_dispatch!(fn sum(x: &[f32]) -> f32 = sum_at);

#[inline(always)]
unsafe fn spin_at<S: Simd>(unit: Unit, rounds: usize) {
    let words = [0x3c00_3c00u32; 16];
    let b = std::hint::black_box(words.as_ptr());
    let a = std::hint::black_box(0x3c00_3c00u32);
    // SAFETY: sixteen words are at least a vector.
    unsafe {
        match unit {
            Unit::F32 => {
                let (x, y) = (S::splat(f32::from_bits(a)), S::load(b.cast()));
                let mut acc = [S::splat(0.0); CHAINS];
                for _ in 0..rounds {
                    for acc in &mut acc {
                        *acc = S::fma(x, y, *acc);
                    }
                }
                std::hint::black_box(acc);
            }
            Unit::Bf16 => {
                let mut acc = [S::splat(0.0); CHAINS];
                for _ in 0..rounds {
                    for acc in &mut acc {
                        *acc = S::dot_bf16(*acc, a, S::load_i(b.cast()));
                    }
                }
                std::hint::black_box(acc);
            }
            Unit::Int8 => {
                let mut acc = [S::zero_i(); CHAINS];
                for _ in 0..rounds {
                    for acc in &mut acc {
                        *acc = S::dot_u8i8(*acc, a, S::load_i(b.cast()));
                    }
                }
                std::hint::black_box(acc);
            }
        }
    }
}

#[inline(always)]
unsafe fn sum_at<S: Simd>(x: &[f32]) -> f32 {
    // SAFETY: whole vectors inside the slice; a rest is left out.
    unsafe {
        let mut acc = [S::splat(0.0); 8];
        for chunk in x.chunks_exact(8 * S::LANES) {
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = S::add(*acc, S::load(chunk.as_ptr().add(i * S::LANES)));
            }
        }
        acc.into_iter().map(|acc| S::sum(acc)).sum()
    }
}
