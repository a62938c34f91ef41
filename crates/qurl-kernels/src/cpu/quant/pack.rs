//! Requantization: from f32 weights straight into the panels of a GEMM, after every update.
//!
//! It should take little longer than reading the weights once. A task takes as many rows as a vector has
//! lanes (or as many as share a scale), finds their scales while they come from memory, and rounds them while
//! they are still in the L2, prefetching the next rows meanwhile. Codes of a byte are made in small squares
//! that leave the registers as lanes of a panel, past the caches; the others are staged row by row and
//! transposed. Nothing is allocated. (With nvfp4, whose tensor scale needs all weights first, the weights are
//! read twice.)

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{BLOCK, Granularity, LEAD, QuantB, Scheme, largest_bits, scale_of};
use crate::Rounding;
use crate::cpu::Context;
use crate::cpu::buf::Parts;
use crate::cpu::gemm::NVFP4_GROUP;
use crate::cpu::quant::codec::{CodeKind, E2M1_MAX, E4M3_MAX, e4m3_code, e4m3_value};
use crate::cpu::simd::{MAX_LANES, Simd, copy_past_caches, simd_dispatch};
use crate::types::DeviceError;

/// Quantizes `source[n, k]` into `packed`.
pub(super) fn fill(
    ctx: &Context,
    packed: &mut QuantB,
    source: &[f32],
    rounding: Rounding,
    copy: Option<&mut [f32]>,
) -> Result<(), DeviceError> {
    let (n, k, format) = (packed.n, packed.k, packed.format);
    assert!(source.len() >= n * k, "quantize: {} values for {n} by {k}", source.len());
    assert!(copy.as_ref().is_none_or(|copy| copy.len() >= n * k), "quantize: the copy of {n} by {k}");
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
        words: Parts::new(&mut packed.words[LEAD..]),
        scales: Parts::new(&mut packed.scales),
        starts: Parts::new(&mut packed.starts),
        small: Parts::new(&mut packed.small),
        group_scales: Parts::new(&mut packed.group_scales),
        copy: copy.map(Parts::new),
        bad_row: &bad_row,
    };
    let rows = if job.scheme.granularity == Granularity::Square { BLOCK } else { lanes };
    let lanes_padded = n.div_ceil(ctx.panel()) * ctx.panel();
    let groups = |values: usize| values / (rows * k) + 1;
    // Every thread has a contiguous part: what it prefetches, it comes to itself.
    ctx.pool.for_runs(lanes_padded.div_ceil(rows), groups(1 << 17), groups(1 << 16), &|range| {
        // SAFETY: tasks own disjoint rows, and so disjoint lanes of the panels; the level was detected.
        unsafe { quantize_rows(ctx.level, &job, range.start * rows, (range.end * rows).min(lanes_padded)) }
    });
    match bad_row.into_inner() {
        usize::MAX => Ok(()),
        row => {
            let column = source[row * k..(row + 1) * k].iter().position(|x| !x.is_finite()).unwrap_or(0);
            let value = source[row * k + column];
            let reason = format!("row {row}, column {column} is {value}; expected finite numbers");
            Err(DeviceError::Pack { format, reason })
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

/// How far ahead weights are prefetched while the largest of a row is sought: 56 KB, sixteen rows of the
/// smallest models.
const AHEAD: usize = 14_336;

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
    small: Parts<u8>,
    group_scales: Parts<u8>,
    /// Where the weights are copied to meanwhile.
    copy: Option<Parts<f32>>,
    bad_row: &'a AtomicUsize,
}

simd_dispatch!(fn quantize_rows(job: &Weights, first: usize, end: usize) = quantize_rows_at);

#[inline(always)]
unsafe fn quantize_rows_at<S: Simd>(job: &Weights, first: usize, end: usize) {
    // SAFETY: the caller gives rows that no other task has; padding rows beyond n are never read.
    unsafe {
        for first in (first..end).step_by(S::LANES) {
            match job.scheme.granularity {
                Granularity::Channel => job.channel_scales::<S>(first),
                Granularity::Group => job.block_scales::<S>(first),
                Granularity::Square if first.is_multiple_of(BLOCK) => {
                    job.square_scales::<S>(first, (first + BLOCK).min(end));
                }
                Granularity::Square => {}
                Granularity::Nvfp4 => job.nvfp4_scales::<S>(first),
            }
            job.copy_rows::<S>(first);
            match (job.scheme.codes, job.rounding) {
                (CodeKind::Int8, Rounding::Nearest) => job.byte_codes::<S, false>(first),
                (CodeKind::E4m3, Rounding::Nearest) => job.byte_codes::<S, true>(first),
                _ => job.other_codes::<S>(first),
            }
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

    /// The scale, or one where some weights of the row are not finite, which is noted.
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

    /// Copies the `LANES` rows from `first`, where a copy is wanted.
    #[inline(always)]
    unsafe fn copy_rows<S: Simd>(&self, first: usize) {
        if let Some(copy) = &self.copy {
            let rows = first * self.k..(first + S::LANES).min(self.n) * self.k;
            if !rows.is_empty() {
                // SAFETY: the rows belong to this task, and the copy is as large as the source.
                unsafe { copy_past_caches::<S>(&self.source[rows.clone()], copy.at(rows.start)) }
            }
        }
    }

    /// Scales of the `LANES` rows from `first`, one a row.
    #[inline(always)]
    unsafe fn channel_scales<S: Simd>(&self, first: usize) {
        for channel in first..first + S::LANES {
            let row = if channel < self.n { self.row(channel) } else { &[] };
            // SAFETY: the channel belongs to this task.
            unsafe {
                let scale =
                    self.checked(channel, scale_of(self.largest_of::<S>(row), self.scheme.codes.max()));
                *self.scales.at(self.scale_at::<S>(channel, 0, 1)) = scale;
            }
        }
    }

    /// [`largest_bits`] of a row that prefetches what lies [`AHEAD`] after it meanwhile. The row itself comes
    /// from L2, and the memory would have nothing to do until rows are rounded.
    #[inline(always)]
    unsafe fn largest_of<S: Simd>(&self, row: &[f32]) -> i32 {
        let (from, pair) = (row.as_ptr().wrapping_add(AHEAD), 32);
        // SAFETY: whole pairs of lines inside the row; any address may be prefetched.
        unsafe {
            if from.wrapping_add(row.len()) > self.source.as_ptr_range().end {
                return largest_bits::<S>(row);
            }
            let mut largest = S::zero_i();
            let (pairs, rest) = row.as_chunks::<32>();
            for (i, values) in pairs.iter().enumerate() {
                S::prefetch(from.wrapping_add(i * pair).cast());
                for at in (0..pair).step_by(S::LANES) {
                    largest = S::abs_max(largest, S::load(values.as_ptr().add(at)));
                }
            }
            S::largest_i(largest).max(largest_bits::<S>(rest))
        }
    }

    /// Scales of the `LANES` rows from `first`, several a row.
    #[inline(always)]
    unsafe fn block_scales<S: Simd>(&self, first: usize) {
        for channel in first..first + S::LANES {
            let row = if channel < self.n { self.row(channel) } else { &[] };
            // SAFETY: the channel belongs to this task.
            unsafe {
                for block in 0..self.blocks {
                    let bits = largest_bits::<S>(part(row, block, BLOCK));
                    let scale = self.checked(channel, scale_of(bits, self.scheme.codes.max()));
                    *self.scales.at(self.scale_at::<S>(channel, block, self.blocks)) = scale;
                }
            }
        }
    }

    /// The tensor's scale and those of groups for the `LANES` rows from `first`.
    #[inline(always)]
    unsafe fn nvfp4_scales<S: Simd>(&self, first: usize) {
        let groups = self.k.div_ceil(NVFP4_GROUP);
        for channel in first..first + S::LANES {
            let row = if channel < self.n { self.row(channel) } else { &[] };
            // SAFETY: the channel belongs to this task.
            unsafe {
                *self.scales.at(self.scale_at::<S>(channel, 0, 1)) = self.tensor_scale;
                for group in 0..groups {
                    let values = part(row, group, NVFP4_GROUP);
                    let largest = f32::from_bits(largest_bits::<S>(values) as u32);
                    let code = e4m3_code(largest / E2M1_MAX / self.tensor_scale);
                    *self.group_scales.at(self.scale_at::<S>(channel, group, groups)) = code;
                }
            }
        }
    }

    /// Codes of the `LANES` rows from `first`, whose scales are there: bytes, rounded to nearest.
    #[inline(always)]
    unsafe fn byte_codes<S: Simd, const E4M3: bool>(&self, first: usize) {
        let l = S::LANES;
        let real = self.n.saturating_sub(first).min(l);
        let columns = if self.blocks > 1 { BLOCK } else { self.k };
        // SAFETY: the words of these lanes belong to this task; whole squares are read from the rows, others
        // from a copy.
        unsafe {
            let mut sums = S::zero_i();
            for from in (0..self.k).step_by(columns) {
                let end = (from + columns).min(self.k);
                let mut factors = [S::splat(0.0); MAX_LANES];
                for (lane, factor) in factors.iter_mut().enumerate().take(l) {
                    *factor = S::splat(self.inverse::<S>(first + lane, from));
                }
                let whole = if real == l { (end - from) / l } else { 0 };
                let rows = self.source.as_ptr().wrapping_add(first * self.k + from);
                for square in 0..whole {
                    let from = from + square * l;
                    self.ask_for_next::<S>(first, from);
                    let columns = S::byte_columns::<E4M3>(rows.add(square * l), self.k, &factors);
                    for (i, &column) in columns.iter().enumerate().take(l / 4) {
                        sums = self.put::<S>(first, from / 4 + i, column, sums);
                    }
                }
                for from in (from + whole * l..end).step_by(l) {
                    let mut square = [[0.0f32; MAX_LANES]; MAX_LANES];
                    for (lane, square) in square.iter_mut().enumerate().take(real) {
                        let values = part(&self.row(first + lane)[from..], 0, l);
                        square[..values.len()].copy_from_slice(values);
                    }
                    let columns = S::byte_columns::<E4M3>(square.as_ptr().cast(), MAX_LANES, &factors);
                    for (word, &column) in (from / 4..self.stored_words).zip(&columns[..l / 4]) {
                        sums = self.put::<S>(first, word, column, sums);
                    }
                }
            }
            self.put_starts::<S>(first, sums);
        }
    }

    /// The same for all other codes.
    #[inline(always)]
    unsafe fn other_codes<S: Simd>(&self, first: usize) {
        let l = S::LANES;
        let per_word = self.scheme.codes.per_word();
        let real = self.n.saturating_sub(first).min(l);
        let mut staged = Squares { rows: [[0; MAX_LANES]; MAX_LANES], columns: [[0; MAX_LANES]; MAX_LANES] };
        // SAFETY: the words of these lanes belong to this task; the squares hold the lanes of any
        // level.
        unsafe {
            let mut sums = S::zero_i();
            for start in (0..self.stored_words).step_by(l) {
                for from in (start * per_word..(start + l) * per_word).step_by(l) {
                    self.ask_for_next::<S>(first, from);
                }
                for lane in 0..real {
                    self.row_codes::<S>(
                        first + lane,
                        start * per_word,
                        staged.rows[lane].as_mut_ptr().cast(),
                    );
                }
                let (rows, columns) =
                    (staged.rows.as_ptr().cast(), staged.columns.as_mut_ptr().cast::<u32>());
                S::transpose(rows, MAX_LANES, l, columns, MAX_LANES);
                for word in start..(start + l).min(self.stored_words) {
                    let column = S::load_i(columns.add((word - start) * MAX_LANES).cast());
                    sums = self.put::<S>(first, word, column, sums);
                }
            }
            self.put_starts::<S>(first, sums);
        }
    }

    /// Prefetches a part of the `LANES` rows after those from `first` on, as large as the square at column
    /// `from`. Memory gives lines in pairs when one of them is prefetched; prefetching both would take the
    /// places of other requests. After the last row nothing is prefetched: where no memory is mapped a
    /// request takes microseconds until it is given up.
    #[inline(always)]
    unsafe fn ask_for_next<S: Simd>(&self, first: usize, from: usize) {
        let (next, square) = ((first + S::LANES) * self.k + from * S::LANES, S::LANES * S::LANES);
        if next + square <= self.source.len() {
            for at in (0..square).step_by(32) {
                // SAFETY: any address may be prefetched.
                unsafe { S::prefetch(self.source.as_ptr().wrapping_add(next + at).cast()) }
            }
        }
    }

    /// Writes a vector of words of codes to its place in the panels. Returns `sums`, the codes of every lane
    /// so far, with those of these words.
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, first: usize, word: usize, column: S::I, sums: S::I) -> S::I {
        let width = 2 * S::LANES;
        let row = first / width * self.stored_words + word;
        // SAFETY: the words and flags of these lanes belong to this task.
        unsafe {
            let to = self.words.at(row * width + first % width).cast();
            if self.scheme.codes == CodeKind::E4m3 {
                let (ordered, small) = S::order_e4m3(column);
                *self.small.at(row * 2 + first % width / S::LANES) = small.into();
                S::stream_i(to, ordered);
                return sums;
            }
            S::stream_i(to, column);
            S::dot_u8i8(sums, 0x0101_0101, column)
        }
    }

    /// Writes where the sums of products with these lanes begin.
    #[inline(always)]
    unsafe fn put_starts<S: Simd>(&self, first: usize, sums: S::I) {
        if self.scheme.codes == CodeKind::Int8 {
            let mut lanes = [0i32; MAX_LANES];
            // SAFETY: the array has the lanes of any level; the starts of these lanes belong to this task.
            unsafe {
                S::store_i(lanes.as_mut_ptr(), sums);
                for (lane, sum) in lanes.iter().enumerate().take(S::LANES) {
                    *self.starts.at(first + lane) = -128 * sum;
                }
            }
        }
    }

    /// `LANES` words of codes of one row, from column `from` on; zeros after the last column.
    #[inline(always)]
    unsafe fn row_codes<S: Simd>(&self, channel: usize, from: usize, out: *mut u8) {
        let row = self.row(channel);
        // SAFETY: the buffer holds LANES words; reads stay inside the row.
        unsafe {
            if (self.rounding, self.scheme.codes) != (Rounding::Nearest, CodeKind::Int4) {
                return self.row_codes_one_by_one::<S>(channel, from, out);
            }
            let factor = S::splat(self.inverse::<S>(channel, from));
            let mut bytes = [0u8; 8 * MAX_LANES];
            for at in (0..8 * S::LANES).step_by(S::LANES) {
                let values = part(&row[(from + at).min(row.len())..], 0, S::LANES);
                S::store_i8(
                    bytes.as_mut_ptr().add(at),
                    S::mul(S::load_n(values.as_ptr(), values.len()), factor),
                );
            }
            for (i, pair) in bytes[..8 * S::LANES].as_chunks::<2>().0.iter().enumerate() {
                *out.add(i) = (pair[0] & 15) | pair[1] << 4;
            }
        }
    }

    /// The same for the cases that need not be fast: stochastic rounding and E2M1.
    #[inline(always)]
    unsafe fn row_codes_one_by_one<S: Simd>(&self, channel: usize, from: usize, out: *mut u8) {
        let per_word = self.scheme.codes.per_word();
        let row = self.row(channel);
        let mut inverse = 0.0;
        for i in 0..S::LANES * per_word {
            let column = from + i;
            // SAFETY: the buffer holds LANES words; scales of this task's channels.
            unsafe {
                if i.is_multiple_of(NVFP4_GROUP) {
                    inverse = self.inverse::<S>(channel, column);
                }
                let x = row.get(column).map_or(0.0, |x| x * inverse);
                let code = self.scheme.codes.code(x, self.rounding, channel * self.k + column);
                match (per_word, i % 2) {
                    (4, _) => *out.add(i) = code,
                    (_, 0) => *out.add(i / 2) = code,
                    _ => *out.add(i / 2) |= code << 4,
                }
            }
        }
    }

    /// What the weights of a channel are multiplied by, at a column and until their scale ends.
    #[inline(always)]
    unsafe fn inverse<S: Simd>(&self, channel: usize, column: usize) -> f32 {
        // SAFETY: scales of this task's channels.
        unsafe {
            let scale = *self.scales.at(self.scale_at::<S>(channel, self.block_of(column), self.blocks));
            if self.scheme.granularity != Granularity::Nvfp4 {
                return 1.0 / scale;
            }
            let groups = self.k.div_ceil(NVFP4_GROUP);
            let group = (column / NVFP4_GROUP).min(groups - 1);
            let scale = scale * e4m3_value(*self.group_scales.at(self.scale_at::<S>(channel, group, groups)));
            // A group scale may round to zero: such weights are zeros.
            if scale == 0.0 { 0.0 } else { 1.0 / scale }
        }
    }

    /// The f32 scale that a column of the matrix uses, among those of its channel.
    #[inline(always)]
    fn block_of(&self, column: usize) -> usize {
        if self.blocks > 1 { (column / BLOCK).min(self.blocks - 1) } else { 0 }
    }
}

/// The `index`-th piece of `len` values; empty for a padding row.
fn part(row: &[f32], index: usize, len: usize) -> &[f32] {
    row.get(index * len..).map_or(&[], |rest| &rest[..len.min(rest.len())])
}

/// Words of some rows before and after a transposition.
#[repr(align(64))]
struct Squares {
    rows: [[u32; MAX_LANES]; MAX_LANES],
    columns: [[u32; MAX_LANES]; MAX_LANES],
}
