//! Requantization: from f32 weights straight into the panels of a product, after every update.
//!
//! It should take little longer than reading the weights once. A task takes as many rows as a vector has lanes (or
//! as many as share a scale), finds their scales while they come from memory, and rounds them while they are still
//! in the second-level cache, asking for the next rows meanwhile. Codes are staged row by row, transposed in small
//! squares and written past the caches. Nothing is allocated. (With nvfp4, whose tensor scale needs all weights
//! first, the weights are read twice.)

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{BLOCK, Granularity, QuantB, Scheme, largest_bits, scale_of};
use crate::Rounding;
use crate::backend::BackendError;
use crate::cpu::Context;
use crate::cpu::buf::Parts;
use crate::cpu::gemm::NVFP4_GROUP;
use crate::cpu::quant::codec::{CodeKind, E2M1_MAX, E4M3_MAX, e4m3_code, e4m3_value};
use crate::cpu::simd::{MOST_LANES, Simd, simd_dispatch};

/// Quantizes `source[n, k]` into `packed`.
pub(super) fn fill(ctx: &Context, packed: &mut QuantB, source: &[f32], rounding: Rounding) -> Result<(), BackendError> {
    let (n, k, format) = (packed.n, packed.k, packed.format);
    assert!(source.len() >= n * k, "quantize: {} values for {n} by {k}", source.len());
    let bad_row = AtomicUsize::new(usize::MAX);
    let lanes = ctx.panel() / 2;
    let tensor_scale = match packed.scheme.granularity {
        Granularity::Nvfp4 => tensor_scale(ctx, &source[..n * k], k, &bad_row),
        _ => 1.0,
    };
    let job = Weights {
        source: &source[..n * k],
        scheme: packed.scheme,
        rounding,
        n,
        k,
        stored_words: k.div_ceil(packed.scheme.codes.per_word()),
        blocks: packed.scheme.blocks(k),
        tensor_scale,
        words: Parts::new(&mut packed.words),
        scales: Parts::new(&mut packed.scales),
        starts: Parts::new(&mut packed.starts),
        group_scales: Parts::new(&mut packed.group_scales),
        bad_row: &bad_row,
    };
    let rows = if job.scheme.granularity == Granularity::Square { BLOCK } else { lanes };
    let lanes_padded = n.div_ceil(ctx.panel()) * ctx.panel();
    ctx.pool.for_ranges(lanes_padded.div_ceil(rows), (1 << 15) / (rows * k) + 1, &|range| {
        for task in range {
            // SAFETY: tasks own disjoint rows, and so disjoint lanes of the panels; the level was detected.
            unsafe { quantize_rows(ctx.level, &job, task * rows, ((task + 1) * rows).min(lanes_padded)) }
        }
    });
    match bad_row.into_inner() {
        usize::MAX => Ok(()),
        row => {
            let column = source[row * k..(row + 1) * k].iter().position(|x| !x.is_finite()).unwrap_or(0);
            let value = source[row * k + column];
            let reason = format!("row {row}, column {column} is {value}; expected finite numbers");
            Err(BackendError::Pack { format, reason })
        }
    }
}

/// The f32 scale of nvfp4: the largest weight becomes the largest code times the largest group scale.
fn tensor_scale(ctx: &Context, source: &[f32], k: usize, bad_row: &AtomicUsize) -> f32 {
    let largest = AtomicUsize::new(0);
    ctx.pool.for_ranges(source.len() / k, (1 << 15) / k + 1, &|range| {
        for row in range {
            // SAFETY: the level was detected.
            let bits = unsafe { row_largest(ctx.level, &source[row * k..(row + 1) * k]) };
            if f32::from_bits(bits as u32).is_finite() {
                largest.fetch_max(bits as usize, Ordering::Relaxed);
            } else {
                bad_row.fetch_min(row, Ordering::Relaxed);
            }
        }
    });
    scale_of(largest.into_inner() as i32, E4M3_MAX * E2M1_MAX)
}

simd_dispatch!(fn row_largest(row: &[f32]) -> i32 = largest_bits);

/// A matrix to quantize and where it goes.
struct Weights<'a> {
    source: &'a [f32],
    scheme: Scheme,
    rounding: Rounding,
    n: usize,
    k: usize,
    /// Words of a panel along k.
    stored_words: usize,
    /// Scales of a channel.
    blocks: usize,
    tensor_scale: f32,
    words: Parts<u32>,
    scales: Parts<f32>,
    starts: Parts<i32>,
    group_scales: Parts<u8>,
    bad_row: &'a AtomicUsize,
}

simd_dispatch!(fn quantize_rows(job: &Weights, first: usize, end: usize) = quantize_rows_at);

#[inline(always)]
unsafe fn quantize_rows_at<S: Simd>(job: &Weights, first: usize, end: usize) {
    // SAFETY: the caller gives rows that no other task has; padding rows beyond n are never read.
    unsafe {
        if job.scheme.granularity == Granularity::Square {
            job.square_scales::<S>(first, end);
        }
        for first in (first..end).step_by(S::LANES) {
            if job.scheme.granularity != Granularity::Square {
                job.row_scales::<S>(first);
            }
            job.codes::<S>(first);
        }
        S::fence();
    }
}

impl Weights<'_> {
    fn row(&self, row: usize) -> &[f32] {
        &self.source[row * self.k..(row + 1) * self.k]
    }

    /// Place of the scale of a channel and a block of k (or of the group scale, with `per_column` groups).
    fn scale_at<S: Simd>(&self, channel: usize, block: usize, per_column: usize) -> usize {
        let width = 2 * S::LANES;
        (channel / width * per_column + block) * width + channel % width
    }

    /// The scale of some weights, noting the row where they are not finite.
    #[inline(always)]
    unsafe fn scale_of<S: Simd>(&self, row: usize, values: &[f32]) -> f32 {
        // SAFETY: the caller has the instructions of S.
        let bits = unsafe { largest_bits::<S>(values) };
        self.checked(row, scale_of(bits, self.scheme.codes.max()))
    }

    #[inline(always)]
    fn checked(&self, row: usize, scale: f32) -> f32 {
        if scale.is_nan() {
            self.bad_row.fetch_min(row, Ordering::Relaxed);
            return 1.0;
        }
        scale
    }

    /// Scales of the blocks of [`BLOCK`] by [`BLOCK`] in the rows `first..end`.
    #[inline(always)]
    unsafe fn square_scales<S: Simd>(&self, first: usize, end: usize) {
        for block in 0..self.blocks {
            let columns = block * BLOCK..((block + 1) * BLOCK).min(self.k);
            let mut largest = 0;
            for row in first..end.min(self.n) {
                // SAFETY: the caller has the instructions of S.
                let bits = unsafe { largest_bits::<S>(&self.row(row)[columns.clone()]) };
                self.checked(row, scale_of(bits, 1.0));
                largest = largest.max(bits);
            }
            let scale = scale_of(largest, self.scheme.codes.max());
            for channel in first..end {
                // SAFETY: the channel belongs to this task.
                unsafe { *self.scales.at(self.scale_at::<S>(channel, block, self.blocks)) = scale }
            }
        }
    }

    /// Scales of the `LANES` rows from `first`.
    #[inline(always)]
    unsafe fn row_scales<S: Simd>(&self, first: usize) {
        for channel in first..first + S::LANES {
            let row = if channel < self.n { self.row(channel) } else { &[] };
            // SAFETY: the channel belongs to this task.
            unsafe {
                match self.scheme.granularity {
                    Granularity::Channel => {
                        *self.scales.at(self.scale_at::<S>(channel, 0, 1)) = self.scale_of::<S>(channel, row);
                    }
                    Granularity::Group | Granularity::Square => {
                        for block in 0..self.blocks {
                            let values = row.chunks(BLOCK).nth(block).unwrap_or(&[]);
                            let scale = self.scale_of::<S>(channel, values);
                            *self.scales.at(self.scale_at::<S>(channel, block, self.blocks)) = scale;
                        }
                    }
                    Granularity::Nvfp4 => {
                        *self.scales.at(self.scale_at::<S>(channel, 0, 1)) = self.tensor_scale;
                        let groups = self.k.div_ceil(NVFP4_GROUP);
                        for group in 0..groups {
                            let values = row.chunks(NVFP4_GROUP).nth(group).unwrap_or(&[]);
                            let largest = f32::from_bits(largest_bits::<S>(values) as u32);
                            let code = e4m3_code(largest / E2M1_MAX / self.tensor_scale);
                            *self.group_scales.at(self.scale_at::<S>(channel, group, groups)) = code;
                        }
                    }
                }
            }
        }
    }

    /// Codes of the `LANES` rows from `first`, whose scales are there.
    #[inline(always)]
    unsafe fn codes<S: Simd>(&self, first: usize) {
        let (l, width) = (S::LANES, 2 * S::LANES);
        let per_word = self.scheme.codes.per_word();
        let real = self.n.saturating_sub(first).min(l);
        let mut staged = Squares { rows: [[0; MOST_LANES]; MOST_LANES], columns: [[0; MOST_LANES]; MOST_LANES] };
        // SAFETY: the words of these lanes belong to this task; the squares have room for the lanes of any level.
        unsafe {
            let mut sums = S::zero_i();
            for start in (0..self.stored_words).step_by(l) {
                for lane in 0..real {
                    self.row_codes::<S>(first + lane, start * per_word, staged.rows[lane].as_mut_ptr().cast());
                }
                let (rows, columns) = (staged.rows.as_ptr().cast(), staged.columns.as_mut_ptr().cast::<u32>());
                S::transpose(rows, MOST_LANES, l, columns, MOST_LANES);
                for word in start..(start + l).min(self.stored_words) {
                    let column = columns.add((word - start) * MOST_LANES);
                    sums = S::dot_u8i8(sums, 0x0101_0101, column);
                    let at = (first / width * self.stored_words + word) * width + first % width;
                    S::stream_i(self.words.at(at).cast(), S::load_i(column.cast()));
                }
            }
            if self.scheme.codes == CodeKind::Int8 {
                let mut lanes = [0i32; MOST_LANES];
                S::store_i(lanes.as_mut_ptr(), sums);
                for (lane, sum) in lanes.iter().enumerate().take(l) {
                    *self.starts.at(first + lane) = -128 * sum;
                }
            }
        }
    }

    /// `LANES` words of codes of one row, from column `from` on; zeros behind the last column.
    #[inline(always)]
    unsafe fn row_codes<S: Simd>(&self, channel: usize, from: usize, out: *mut u8) {
        let count = S::LANES * self.scheme.codes.per_word();
        let row = self.row(channel);
        // SAFETY: `out` has room for LANES words; reads stay inside the row.
        unsafe {
            let fast = self.rounding == Rounding::Nearest && self.scheme.codes.per_word() == 4;
            if fast {
                let ahead = self.source.as_ptr().wrapping_add((channel + S::LANES) * self.k + from);
                for at in (from..from + count).step_by(S::LANES) {
                    S::prefetch(ahead.wrapping_add(at - from).cast());
                    let scale = *self.scales.at(self.scale_at::<S>(channel, self.block_of(at), self.blocks));
                    let v = S::load_n(row.as_ptr().add(at.min(self.k)), S::LANES.min(self.k.saturating_sub(at)));
                    let scaled = S::mul(v, S::splat(1.0 / scale));
                    match self.scheme.codes {
                        CodeKind::Int8 => S::store_i8(out.add(at - from), scaled),
                        _ => S::store_e4m3(out.add(at - from), scaled),
                    }
                }
                return;
            }
            for i in 0..count {
                let column = from + i;
                let code = match row.get(column) {
                    Some(&x) => self.one_code::<S>(channel, column, x),
                    None => 0,
                };
                match (self.scheme.codes.per_word(), i % 2) {
                    (4, _) => *out.add(i) = code,
                    (_, 0) => *out.add(i / 2) = code,
                    _ => *out.add(i / 2) |= code << 4,
                }
            }
        }
    }

    /// The code of one weight, as the reference has it.
    #[inline(always)]
    unsafe fn one_code<S: Simd>(&self, channel: usize, column: usize, x: f32) -> u8 {
        // SAFETY: scales of this task's channels.
        let scale = unsafe {
            let scale = *self.scales.at(self.scale_at::<S>(channel, self.block_of(column), self.blocks));
            if self.scheme.granularity == Granularity::Nvfp4 {
                let groups = self.k.div_ceil(NVFP4_GROUP);
                let code = *self.group_scales.at(self.scale_at::<S>(channel, column / NVFP4_GROUP, groups));
                scale * e4m3_value(code)
            } else {
                scale
            }
        };
        // A group scale may round to zero: such weights are zeros.
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        self.scheme.codes.code(x * inverse, self.rounding, channel * self.k + column)
    }

    /// The f32 scale that a column of the matrix uses, among those of its channel.
    #[inline(always)]
    fn block_of(&self, column: usize) -> usize {
        if self.blocks > 1 { (column / BLOCK).min(self.blocks - 1) } else { 0 }
    }
}

/// Codes of some rows before and after the transposition.
#[repr(align(64))]
struct Squares {
    rows: [[u32; MOST_LANES]; MOST_LANES],
    columns: [[u32; MOST_LANES]; MOST_LANES],
}
