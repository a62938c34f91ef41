//! Activations on their way into a quantized product: rows are scaled, rounded and packed into strips.
//!
//! A row depends on nothing but itself: its largest magnitudes give its scales (one per block of k), its codes follow.
//! The conversion runs straight along the row; a transposition of small squares then interleaves the rows of a strip.

use super::{BLOCK, LeftKind, scale_of};
use crate::cpu::Context;
use crate::cpu::buf::Parts;
use crate::cpu::gemm::Left;
use crate::cpu::quant::codec::{CodeKind, E4M3_MAX, E4M3_SHIFT};
use crate::cpu::simd::{MOST_LANES, Simd, simd_dispatch};

/// Quantizes `x[rows, k]` into strips of `words` words a row, with `blocks` scales a row.
pub(super) fn pack<'c>(
    ctx: &'c Context,
    kind: LeftKind,
    x: &[f32],
    rows: usize,
    k: usize,
    words: usize,
    blocks: usize,
) -> Left<'c> {
    assert!(x.len() >= rows * k, "quantized rows: shapes");
    let mut strips = ctx.scratch.take(rows * words);
    let scale_count = if kind == LeftKind::Bf16 { 0 } else { rows * blocks };
    let mut scales = ctx.scratch.take(scale_count);
    let (strip_parts, scale_parts) = (Parts::new(&mut strips), Parts::new(&mut scales));
    let height = ctx.strip();
    ctx.pool.for_ranges(rows.div_ceil(height), (1 << 14) / (height * k).max(1) + 1, &|range| {
        for strip in range {
            let first = strip * height;
            let real = height.min(rows - first);
            // SAFETY: strips own disjoint parts of words and scales; the level was detected.
            unsafe {
                let scales = if scale_count == 0 { &mut [] } else { scale_parts.slice(first * blocks, real * blocks) };
                let out = strip_parts.slice(first * words, real * words);
                pack_strip(ctx.level, kind, &x[first * k..(first + real) * k], k, blocks, scales, out);
            }
        }
    });
    Left { strips, scales: (scale_count > 0).then_some(scales), rows, words }
}

simd_dispatch!(fn pack_strip(kind: LeftKind, rows: &[f32], k: usize, blocks: usize, scales: &mut [u32], out: &mut [u32]) = pack_strip_at);

/// Words of a row that are converted before the rows are interleaved.
const CHUNK: usize = 64;

#[inline(always)]
unsafe fn pack_strip_at<S: Simd>(
    kind: LeftKind,
    rows: &[f32],
    k: usize,
    blocks: usize,
    scales: &mut [u32],
    out: &mut [u32],
) {
    let count = rows.len() / k;
    let words = out.len() / count;
    let block = if blocks > 1 { BLOCK } else { k };
    let max = if kind == LeftKind::Int8 { CodeKind::Int8.max() } else { E4M3_MAX };
    let per_word = if kind == LeftKind::Int8 { 4 } else { 2 };
    let mut staged = [[0u32; CHUNK]; MOST_LANES];
    let mut values = [0.0f32; 2 * CHUNK];
    let mut inverse = [0.0f32; MOST_LANES];
    // SAFETY: `staged` has a row of CHUNK words for every row of a strip; reads and writes stay inside the slices.
    unsafe {
        if kind != LeftKind::Bf16 {
            for (row, scales) in rows.chunks_exact(k).zip(scales.chunks_exact_mut(blocks)) {
                for (values, scale) in row.chunks(block).zip(scales) {
                    *scale = scale_of(largest_bits::<S>(values), max).to_bits();
                }
            }
        }
        for start in (0..words).step_by(CHUNK) {
            let chunk = CHUNK.min(words - start);
            for (r, row) in rows.chunks_exact(k).enumerate() {
                let staged = staged[r].as_mut_ptr();
                for word in (0..chunk).step_by(S::LANES / per_word) {
                    let at = (start + word) * per_word;
                    let v = S::load_n(row.as_ptr().add(at.min(k)), S::LANES.min(k.saturating_sub(at)));
                    // A scale block is a whole number of vectors.
                    if kind != LeftKind::Bf16 && (at.is_multiple_of(block) || word == 0) && at < k {
                        inverse[r] = 1.0 / f32::from_bits(scales[r * blocks + at / block]);
                    }
                    let scaled = S::mul(v, S::splat(inverse[r]));
                    match kind {
                        LeftKind::Int8 => S::store_i8(staged.add(word).cast(), scaled),
                        LeftKind::E4m3 => {
                            let shifted = S::mul(S::round_e4m3(scaled), S::splat(E4M3_SHIFT));
                            S::store(values.as_mut_ptr().add(2 * word), shifted);
                        }
                        LeftKind::Bf16 => S::store(values.as_mut_ptr().add(2 * word), v),
                    }
                }
                if kind != LeftKind::Int8 {
                    for word in (0..chunk).step_by(S::LANES) {
                        S::store_neighbours(staged.add(word), values.as_ptr().add(2 * word));
                    }
                }
                if kind == LeftKind::Int8 {
                    for word in 0..chunk {
                        *staged.add(word) ^= 0x8080_8080;
                    }
                }
            }
            for word in (0..chunk).step_by(S::LANES) {
                let out = out.as_mut_ptr().add((start + word) * count);
                if word + S::LANES <= chunk {
                    S::transpose(staged.as_ptr().cast::<u32>().add(word), CHUNK, count, out, count);
                } else {
                    for i in 0..chunk - word {
                        for (r, staged) in staged.iter().enumerate().take(count) {
                            *out.add(i * count + r) = staged[word + i];
                        }
                    }
                }
            }
        }
    }
}

/// Bits of the largest magnitude; infinities and not-a-numbers are larger than all numbers.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(crate) unsafe fn largest_bits<S: Simd>(values: &[f32]) -> i32 {
    // SAFETY: the last vector reads only what is left.
    unsafe {
        let mut largest = S::zero_i();
        let whole = values.len() / S::LANES * S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            largest = S::abs_max(largest, S::load(values.as_ptr().add(i)));
        }
        largest = S::abs_max(largest, S::load_n(values.as_ptr().add(whole), values.len() - whole));
        S::largest_i(largest)
    }
}
