//! Activations on their way into a quantized GEMM: rows are scaled, rounded and packed into strips.
//!
//! A row depends on nothing but itself: its absmaxes give its scales (one per block of k), its codes follow.
//! The conversion runs straight along the row; a transposition of small squares then interleaves the rows of
//! a strip.

use super::{BLOCK, LeftKind, scale_of};
use crate::cpu::Context;
use crate::cpu::gemm::LeftParts;
use crate::cpu::quant::codec::{CodeKind, E4M3_MAX, E4M3_SHIFT};
use crate::cpu::simd::{MAX_LANES, Simd, simd_dispatch};
use crate::cpu::source::Piece;

/// Quantizes rows of `k` into their columns of a strip, with `blocks` scales a row.
pub(super) fn pack(ctx: &Context, kind: LeftKind, k: usize, blocks: usize, left: &LeftParts, piece: Piece) {
    let Piece { values, first, strip, height } = piece;
    // SAFETY: rows own their scales and their columns of a strip; the level was detected.
    unsafe {
        let count = if kind == LeftKind::Bf16 { 0 } else { values.len() / k * blocks };
        let scales = left.scales.slice(first * blocks, count);
        let out = left.strips.at(strip * left.words + first - strip);
        pack_piece(ctx.level, kind, values, k, blocks, scales, left.words, height, out);
    }
}

simd_dispatch!(
    fn pack_piece(
        kind: LeftKind, rows: &[f32], k: usize, blocks: usize, scales: &mut [u32], words: usize,
        stride: usize, out: *mut u32
    ) = pack_piece_at
);

/// Words of a row that are converted before the rows are interleaved; they never belong to two scales.
const CHUNK: usize = 64;

/// Scales and codes of rows of one strip; packed words along k lie `stride` apart.
#[inline(always)]
unsafe fn pack_piece_at<S: Simd>(
    kind: LeftKind,
    rows: &[f32],
    k: usize,
    blocks: usize,
    scales: &mut [u32],
    words: usize,
    stride: usize,
    out: *mut u32,
) {
    let count = rows.len() / k;
    let block = if blocks > 1 { BLOCK } else { k };
    let max = if kind == LeftKind::Int8 { CodeKind::Int8.max() } else { E4M3_MAX };
    let per_word = if kind == LeftKind::Int8 { 4 } else { 2 };
    let mut staged = std::mem::MaybeUninit::<[[u32; CHUNK]; MAX_LANES]>::uninit();
    let staged: *mut u32 = staged.as_mut_ptr().cast();
    // SAFETY: `staged` has a row of CHUNK words for every row of a strip; what is read of it is written
    // before; reads and writes stay inside the slices, and the columns of `out` belong to the caller.
    unsafe {
        // Only the rows that a transposition reads beside those that are there: clearing all takes as long as
        // filling them.
        staged.add(count * CHUNK).write_bytes(0, (MAX_LANES - count) * CHUNK);
        if kind != LeftKind::Bf16 {
            for (row, scales) in rows.chunks_exact(k).zip(scales.chunks_exact_mut(blocks)) {
                for (values, scale) in row.chunks(block).zip(scales) {
                    *scale = scale_of(largest_bits::<S>(values), max).to_bits();
                }
            }
        }
        for start in (0..words).step_by(CHUNK) {
            let chunk = CHUNK.min(words - start);
            let from = (start * per_word).min(k);
            let place = (start * per_word / block).min(blocks - 1);
            for (r, row) in rows.chunks_exact(k).enumerate() {
                let values = &row[from..(from + chunk * per_word).min(k)];
                let staged = staged.add(r * CHUNK);
                match kind {
                    LeftKind::Int8 => {
                        let inverse = 1.0 / f32::from_bits(scales[r]);
                        for at in (0..4 * chunk).step_by(4 * S::LANES) {
                            let words = staged.add(at / 4);
                            let left = values.get(at..).unwrap_or(&[]);
                            if left.len() >= 4 * S::LANES {
                                S::store_offset_i8(words, left.as_ptr(), inverse);
                            } else {
                                let mut padded = [0.0f32; 4 * MAX_LANES];
                                padded[..left.len()].copy_from_slice(left);
                                S::store_offset_i8(words, padded.as_ptr(), inverse);
                            }
                        }
                    }
                    LeftKind::E4m3 => {
                        let inverse = 1.0 / f32::from_bits(scales[r * blocks + place]);
                        match values.as_array() {
                            Some(whole) => e4m3_pairs::<S>(whole, inverse, staged),
                            None => {
                                let mut padded = [0.0f32; 2 * CHUNK];
                                padded[..values.len()].copy_from_slice(values);
                                e4m3_pairs::<S>(&padded, inverse, staged);
                            }
                        }
                    }
                    LeftKind::Bf16 => match values.as_array() {
                        Some(whole) => pairs::<S>(whole, staged),
                        None => {
                            let mut padded = [0.0f32; 2 * CHUNK];
                            padded[..values.len()].copy_from_slice(values);
                            pairs::<S>(&padded, staged);
                        }
                    },
                }
            }
            if stride == 1 {
                std::ptr::copy_nonoverlapping(staged, out.add(start), chunk);
                continue;
            }
            for word in (0..chunk).step_by(S::LANES) {
                let out = out.add((start + word) * stride);
                if word + S::LANES <= chunk {
                    S::transpose(staged.add(word), CHUNK, count, out, stride);
                } else {
                    for i in 0..chunk - word {
                        for r in 0..count {
                            *out.add(i * stride + r) = *staged.add(r * CHUNK + word + i);
                        }
                    }
                }
            }
        }
    }
}

/// [`CHUNK`] words of two E4M3 numbers, as bf16 that are [`E4M3_SHIFT`] too large, from neighbours times
/// `factor`.
#[inline(always)]
unsafe fn e4m3_pairs<S: Simd>(values: &[f32; 2 * CHUNK], factor: f32, words: *mut u32) {
    // SAFETY: the caller gives a buffer of CHUNK words, a whole number of vectors.
    unsafe {
        let (factor, shift) = (S::splat(factor), S::splat(E4M3_SHIFT));
        for at in (0..values.len()).step_by(2 * S::LANES) {
            let values = values.as_ptr().add(at);
            let first = S::round_e4m3(S::mul(S::load(values), factor));
            let second = S::round_e4m3(S::mul(S::load(values.add(S::LANES)), factor));
            S::store_neighbours(words.add(at / 2), S::mul(first, shift), S::mul(second, shift));
        }
    }
}

/// [`CHUNK`] words of two bf16 from neighbours.
#[inline(always)]
unsafe fn pairs<S: Simd>(values: &[f32; 2 * CHUNK], words: *mut u32) {
    for at in (0..values.len()).step_by(2 * S::LANES) {
        // SAFETY: the caller gives a buffer of CHUNK words, a whole number of vectors.
        unsafe {
            let values = values.as_ptr().add(at);
            S::store_neighbours(words.add(at / 2), S::load(values), S::load(values.add(S::LANES)));
        }
    }
}

/// Bits of the absmax; infinities and NaNs are larger than all numbers.
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
