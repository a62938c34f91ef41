//! Requantization: from f32 weights straight into the panels of a product, after every update.
//!
//! It should take little longer than reading the weights once. A task takes as many rows as a vector has lanes (or
//! as many as share a scale), finds their scales while they come from memory, and rounds them while they are still
//! in the second-level cache, asking for the next rows meanwhile. Codes are staged row by row, transposed in small
//! squares and written past the caches. Nothing is allocated. (With nvfp4, whose tensor scale needs all weights
//! first, the weights are read twice.)

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{BLOCK, Granularity, LEAD, QuantB, Scheme, largest_bits, scale_of};
use crate::Rounding;
use crate::backend::BackendError;
use crate::cpu::Context;
use crate::cpu::buf::Parts;
use crate::cpu::gemm::NVFP4_GROUP;
use crate::cpu::quant::codec::{CodeKind, E2M1_MAX, E4M3_MAX, e4m3_code, e4m3_value};
use crate::cpu::simd::{MOST_LANES, Simd, copy_past_caches, simd_dispatch};

/// Quantizes `source[n, k]` into `packed`.
pub(super) fn fill(
    ctx: &Context,
    packed: &mut QuantB,
    source: &[f32],
    rounding: Rounding,
    copy: Option<&mut [f32]>,
) -> Result<(), BackendError> {
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
                            let values = part(row, block, BLOCK);
                            let scale = self.scale_of::<S>(channel, values);
                            *self.scales.at(self.scale_at::<S>(channel, block, self.blocks)) = scale;
                        }
                    }
                    Granularity::Nvfp4 => {
                        *self.scales.at(self.scale_at::<S>(channel, 0, 1)) = self.tensor_scale;
                        let groups = self.k.div_ceil(NVFP4_GROUP);
                        for group in 0..groups {
                            let values = part(row, group, NVFP4_GROUP);
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
                    if let Some(copy) = &self.copy {
                        let from = start * per_word;
                        let values = &self.row(first + lane)[from..(from + l * per_word).min(self.k)];
                        copy_past_caches::<S>(values, copy.at((first + lane) * self.k + from));
                    }
                    self.row_codes::<S>(first + lane, start * per_word, staged.rows[lane].as_mut_ptr().cast());
                }
                let (rows, columns) = (staged.rows.as_ptr().cast(), staged.columns.as_mut_ptr().cast::<u32>());
                S::transpose(rows, MOST_LANES, l, columns, MOST_LANES);
                for word in start..(start + l).min(self.stored_words) {
                    let mut column = S::load_i(columns.add((word - start) * MOST_LANES).cast());
                    if self.scheme.codes == CodeKind::E4m3 {
                        let (ordered, small) = S::order_e4m3(column);
                        column = ordered;
                        *self.small.at((first / width * self.stored_words + word) * 2 + first % width / l) =
                            small.into();
                    } else {
                        sums = S::dot_u8i8(sums, 0x0101_0101, column);
                    }
                    let at = (first / width * self.stored_words + word) * width + first % width;
                    S::stream_i(self.words.at(at).cast(), column);
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
        let row = self.row(channel);
        // SAFETY: there is room for LANES words; reads stay inside the row.
        unsafe {
            match (self.rounding, self.scheme.codes) {
                (Rounding::Nearest, CodeKind::Int8) => {
                    byte_codes::<S, 4, false>(row, from, self.inverse::<S>(channel, from), out);
                }
                (Rounding::Nearest, CodeKind::E4m3) => {
                    byte_codes::<S, 4, true>(row, from, self.inverse::<S>(channel, from), out);
                }
                (Rounding::Nearest, CodeKind::Int4) => {
                    let mut bytes = [0u8; 8 * MOST_LANES];
                    byte_codes::<S, 8, false>(row, from, self.inverse::<S>(channel, from), bytes.as_mut_ptr());
                    for (i, pair) in bytes[..8 * S::LANES].as_chunks::<2>().0.iter().enumerate() {
                        *out.add(i) = (pair[0] & 15) | pair[1] << 4;
                    }
                }
                _ => self.row_codes_one_by_one::<S>(channel, from, out),
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
            // SAFETY: there is room for LANES words; scales of this task's channels.
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

/// `LANES * PER_WORD` codes of a row from column `from` on, a byte each: integers or E4M3, rounded to nearest. Asks
/// for the row `LANES` rows further meanwhile.
///
/// # Safety
/// As for [`Simd`]; `out` has room for the codes.
#[inline(always)]
unsafe fn byte_codes<S: Simd, const PER_WORD: usize, const E4M3: bool>(
    row: &[f32],
    from: usize,
    inverse: f32,
    out: *mut u8,
) {
    let ahead = row.as_ptr().wrapping_add(S::LANES * row.len() + from);
    let whole = from + PER_WORD * S::LANES <= row.len();
    for i in 0..PER_WORD {
        let at = from + i * S::LANES;
        // SAFETY: reads stay inside the row.
        unsafe {
            S::prefetch(ahead.wrapping_add(i * S::LANES).cast());
            let v = if whole {
                S::load(row.as_ptr().add(at))
            } else {
                S::load_n(row.as_ptr().add(at.min(row.len())), S::LANES.min(row.len().saturating_sub(at)))
            };
            let scaled = S::mul(v, S::splat(inverse));
            let to = out.add(i * S::LANES);
            if E4M3 { S::store_e4m3(to, scaled) } else { S::store_i8(to, scaled) }
        }
    }
}

/// The `index`-th piece of `len` values; empty for a padding row.
fn part(row: &[f32], index: usize, len: usize) -> &[f32] {
    row.get(index * len..).map_or(&[], |rest| &rest[..len.min(rest.len())])
}

/// Codes of some rows before and after the transposition.
#[repr(align(64))]
struct Squares {
    rows: [[u32; MOST_LANES]; MOST_LANES],
    columns: [[u32; MOST_LANES]; MOST_LANES],
}
