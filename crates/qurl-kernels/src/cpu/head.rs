//! The log-probability head: from hidden rows to `log p(target)`, entropy and the argmax token, and back.
//!
//! Logits exist only as tiles of some rows by [`CHUNK`] tokens of the vocabulary. Forward, each tile is
//! reduced to four numbers a row; the chunks of a row are combined in the order of the vocabulary, so a row's
//! result does not depend on the batch. Backward, tiles are recomputed and turned into `dlogits = g (1[y] -
//! p) / T` (plus the entropy's part), from which the gradients of weights and hidden rows follow chunk by
//! chunk.

use super::Context;
use super::buf::Parts;
use super::gemm::{self, Left, Mode, PackedB, Precision, Right, STRIPS_PER_BLOCK};
use super::simd::{Simd, exp, simd_dispatch};
use super::source::Source;
use crate::types::{HeadGradient, HeadOutput};

/// Columns of the vocabulary that are reduced at a time, at every level.
pub(super) const CHUNK: usize = 512;
/// Chunks whose logit gradients are held at the same time in the backward pass.
const BACKWARD_CHUNKS: usize = 4;

/// Sums over one chunk of a row's scaled logits.
#[derive(Clone, Copy, Default)]
pub(super) struct Partial {
    pub(super) largest: f32,
    pub(super) argmax: u32,
    /// Sum of `e^(x - largest)`.
    pub(super) total: f32,
    /// Sum of `e^(x - largest) (x - largest)`.
    pub(super) weighted: f32,
}

/// A row's whole distribution, from the partial sums of its chunks.
#[derive(Clone, Copy)]
pub(super) struct Distribution {
    /// Largest scaled logit.
    pub(super) largest: f64,
    /// Where it is (the first of equals).
    pub(super) argmax: u32,
    /// Sum of `e^(x - largest)`.
    pub(super) total: f64,
    log_total: f64,
    /// Sum of `e^(x - largest) (x - largest)`.
    weighted: f64,
}

impl Distribution {
    /// Joins the chunks in the order of the vocabulary.
    pub(super) fn join(partials: &[Partial]) -> Distribution {
        let mut best = partials[0];
        for p in partials {
            // A NaN wins, so that it is seen.
            if p.largest > best.largest || p.largest.is_nan() {
                best = *p;
            }
        }
        let largest = best.largest as f64;
        let (mut total, mut weighted) = (0.0f64, 0.0f64);
        for p in partials {
            let shift = p.largest as f64 - largest;
            let factor = shift.exp();
            total += factor * p.total as f64;
            weighted += factor * (p.weighted as f64 + shift * p.total as f64);
        }
        Distribution { largest, argmax: best.argmax, total, log_total: total.ln(), weighted }
    }

    /// Log-probability of a token with this scaled logit.
    pub(super) fn logp(&self, scaled_logit: f32) -> f32 {
        (scaled_logit as f64 - self.largest - self.log_total) as f32
    }

    pub(super) fn entropy(&self) -> f32 {
        (self.log_total - self.weighted / self.total) as f32
    }

    fn lse(&self) -> f32 {
        (self.largest + self.log_total) as f32
    }
}

/// Scores `targets[row]` under `softmax(hidden[row] W^T / temperature)`; `head` is packed for the forward
/// GEMM.
pub fn forward<'a>(
    ctx: &Context,
    hidden: &[f32],
    head: impl Into<Right<'a>>,
    targets: &[u32],
    temperature: f32,
) -> HeadOutput {
    let head = head.into();
    let (rows, vocabulary) = (targets.len(), head.n());
    assert!(hidden.len() >= rows * head.k(), "head: hidden rows");
    assert!(targets.iter().all(|&t| (t as usize) < vocabulary), "head: target outside of the vocabulary");
    let tiles = Tiles::new(ctx, hidden, rows, head);
    let chunks = vocabulary.div_ceil(CHUNK);
    let mut partials = vec![Partial::default(); rows * chunks];
    let mut target_logits = vec![0.0f32; rows];
    let (partial_parts, target_parts) = (Parts::new(&mut partials), Parts::new(&mut target_logits));
    let blocks = rows.div_ceil(tiles.block_rows());
    ctx.pool.for_each(blocks * chunks, &|task| {
        let (block, chunk) = (task / chunks, task % chunks);
        tiles.logits(block, chunk, |first_row, first_column, logits, columns| {
            for (i, logits) in logits.chunks_exact_mut(CHUNK).enumerate() {
                let row = first_row + i;
                let logits = &mut logits[..columns];
                // SAFETY: the level was detected; this row and chunk belong to this task.
                unsafe {
                    let partial = reduce(ctx.level, logits, 1.0 / temperature);
                    let argmax = first_column as u32 + partial.argmax;
                    *partial_parts.at(row * chunks + chunk) = Partial { argmax, ..partial };
                    if let Some(&x) =
                        (targets[row] as usize).checked_sub(first_column).and_then(|c| logits.get(c))
                    {
                        *target_parts.at(row) = x;
                    }
                }
            }
        });
    });

    let mut out = HeadOutput::default();
    for row in 0..rows {
        let distribution = Distribution::join(&partials[row * chunks..(row + 1) * chunks]);
        out.logp.push(distribution.logp(target_logits[row]));
        out.entropy.push(distribution.entropy());
        out.argmax.push(distribution.argmax);
        out.lse.push(distribution.lse());
    }
    out
}

/// Backward of [`forward`] with the same rows: `dhidden` is overwritten, `dweight[V, d] +=`. Gradients pass
/// through weights in this precision, packed for the GEMM with logit gradients (`[V, d]`, summed over V).
pub fn backward<'a>(
    ctx: &Context,
    hidden: &[f32],
    head: impl Into<Right<'a>>,
    (precision, transposed): (Precision, &PackedB),
    targets: &[u32],
    temperature: f32,
    out: &HeadOutput,
    gradient: HeadGradient,
    dhidden: &mut [f32],
    mut dweight: Option<&mut [f32]>,
) {
    let head = head.into();
    let (rows, vocabulary, d) = (targets.len(), head.n(), head.k());
    assert!(hidden.len() >= rows * d && dhidden.len() >= rows * d, "head backward: hidden rows");
    assert!(out.lse.len() == rows && gradient.dlogp.len() == rows, "head backward: rows");
    assert!(
        gradient.dentropy.is_empty() || gradient.dentropy.len() == rows,
        "head backward: entropy gradient"
    );
    let whole = dweight.as_ref().is_none_or(|dweight| dweight.len() == vocabulary * d);
    assert!(whole, "head backward: weight gradient");
    let tiles = Tiles::new(ctx, hidden, rows, head);
    let blocks = rows.div_ceil(tiles.block_rows());

    dhidden[..rows * d].fill(0.0);
    let width = (CHUNK * BACKWARD_CHUNKS).min(vocabulary);
    let mut dlogits = ctx.scratch.take(rows * width);
    for first in (0..vocabulary).step_by(CHUNK * BACKWARD_CHUNKS) {
        let last = (first + CHUNK * BACKWARD_CHUNKS).min(vocabulary);
        let width = last - first;
        let parts = Parts::new(&mut dlogits);
        let chunks = width.div_ceil(CHUNK);
        ctx.pool.for_each(blocks * chunks, &|task| {
            let (block, chunk) = (task / chunks, first / CHUNK + task % chunks);
            tiles.logits(block, chunk, |first_row, first_column, logits, columns| {
                for (i, logits) in logits.chunks_exact(CHUNK).enumerate() {
                    let row = first_row + i;
                    let entropy_gradient = gradient.dentropy.get(row).copied().unwrap_or(0.0);
                    let terms = RowTerms {
                        inverse_temperature: 1.0 / temperature,
                        lse: out.lse[row],
                        dlogp: gradient.dlogp[row],
                        dentropy: entropy_gradient,
                        entropy: out.entropy[row],
                    };
                    let at = row * width + first_column - first;
                    // SAFETY: the level was detected; this row's columns of the chunk belong to this task.
                    unsafe {
                        let to = parts.at(at).cast::<f32>();
                        logit_gradients(ctx.level, &logits[..columns], &terms, to);
                        let target =
                            (targets[row] as usize).checked_sub(first_column).filter(|&c| c < columns);
                        if let Some(column) = target {
                            *to.add(column) += terms.dlogp * terms.inverse_temperature;
                        }
                    }
                }
            });
        });
        // SAFETY: f32 and u32 have the same size and any bits are a value.
        let dlogits = unsafe { std::slice::from_raw_parts(dlogits.as_ptr().cast::<f32>(), rows * width) };
        if let Some(dweight) = &mut dweight {
            let dweight = &mut dweight[first * d..last * d];
            gemm::weight_gradient(ctx, precision, hidden, dlogits, rows, width, d, dweight);
        }
        gemm::matmul_part(ctx, dlogits, rows, transposed, first..last, dhidden);
    }
}

/// Logits of the given rows, in full: for sampling, where the rows are few.
pub fn logits<'a>(ctx: &Context, hidden: &[f32], rows: usize, head: impl Into<Right<'a>>, out: &mut [f32]) {
    gemm::matmul(ctx, hidden, rows, head, None, Mode::Store, out);
}

/// Tiles of logits, made on demand.
pub(super) struct Tiles<'a> {
    ctx: &'a Context,
    head: Right<'a>,
    left: Left<'a>,
    rows: usize,
}

impl<'a> Tiles<'a> {
    /// Packs the hidden rows for the GEMM.
    pub(super) fn new(ctx: &'a Context, hidden: &'a [f32], rows: usize, head: impl Into<Right<'a>>) -> Self {
        let head = head.into();
        Tiles { ctx, head, left: head.pack_left(ctx, &Source::Ready(hidden), rows), rows }
    }

    pub(super) fn block_rows(&self) -> usize {
        self.ctx.strip() * STRIPS_PER_BLOCK
    }

    /// Calls `f(first row, first column, logits [rows of block, CHUNK], columns in use)`.
    pub(super) fn logits(&self, block: usize, chunk: usize, f: impl FnOnce(usize, usize, &mut [f32], usize)) {
        let first_row = block * self.block_rows();
        let rows = self.block_rows().min(self.rows - first_row);
        let first_column = chunk * CHUNK;
        let columns = CHUNK.min(self.head.n() - first_column);
        let mut tile = self.ctx.scratch.take(rows * CHUNK);
        // SAFETY: f32 and u32 have the same size and any bits are a value.
        let tile = unsafe { std::slice::from_raw_parts_mut(tile.as_mut_ptr().cast::<f32>(), rows * CHUNK) };
        let whole = self.head.job(&self.left.parts, None, Mode::Store, tile);
        let strips = 0..rows.div_ceil(self.ctx.strip());
        let panels = 0..columns.div_ceil(self.ctx.panel());
        // SAFETY: the block's strips and the chunk's panels lie inside the operands; the tile is ours alone.
        unsafe {
            let mut job = whole.window(first_row, rows, first_column, columns, self.ctx.panel());
            job.ldc = CHUNK;
            gemm::run_block(self.ctx, &job, strips, panels);
        }
        f(first_row, first_column, tile, columns);
    }
}

simd_dispatch!(
    plain pub(super) fn reduce(logits: &mut [f32], inverse_temperature: f32) -> Partial = reduce_at
);

/// Scales the logits in place and sums them up.
#[inline(always)]
unsafe fn reduce_at<S: Simd>(logits: &mut [f32], inverse_temperature: f32) -> Partial {
    let whole = logits.len() / S::LANES * S::LANES;
    let rest = logits.len() - whole;
    let x = logits.as_mut_ptr();
    // SAFETY: whole vectors, then a masked one.
    unsafe {
        let factor = S::splat(inverse_temperature);
        let last = S::mul(S::load_n(x.add(whole), rest), factor);
        S::store_n(x.add(whole), last, rest);
        let mut largest = S::keep_n(last, rest, f32::NEG_INFINITY);
        for i in (0..whole).step_by(S::LANES) {
            let v = S::mul(S::load(x.add(i)), factor);
            S::store(x.add(i), v);
            largest = S::max(largest, v);
        }
        let largest = S::largest(largest);
        let (mut total, mut weighted) = (S::splat(0.0), S::splat(0.0));
        for i in (0..whole).step_by(S::LANES) {
            let shifted = S::sub(S::load(x.add(i)), S::splat(largest));
            let e = exp::<S>(shifted);
            total = S::add(total, e);
            weighted = S::fma(e, shifted, weighted);
        }
        if rest > 0 {
            let shifted = S::sub(S::load_n(x.add(whole), rest), S::splat(largest));
            let e = S::keep_n(exp::<S>(shifted), rest, 0.0);
            total = S::add(total, e);
            weighted = S::fma(e, shifted, weighted);
        }
        let argmax = first_place(logits, largest).unwrap_or(0) as u32;
        Partial { largest, argmax, total: S::sum(total), weighted: S::sum(weighted) }
    }
}

/// Where `x` is found first. Looks at sixteen at a time, which compilers turn into vectors.
#[inline(always)]
fn first_place(values: &[f32], x: f32) -> Option<usize> {
    let has = |part: &[f32]| part.iter().fold(false, |found, &v| found | (v == x));
    let part = values.chunks(16).position(has)?;
    Some(16 * part + values[16 * part..].iter().position(|&v| v == x)?)
}

struct RowTerms {
    inverse_temperature: f32,
    lse: f32,
    dlogp: f32,
    dentropy: f32,
    entropy: f32,
}

simd_dispatch!(
    plain fn logit_gradients(logits: &[f32], terms: &RowTerms, out: *mut f32) = logit_gradients_at
);

/// `-p (g + e (log p + H)) / T` for every column; the target's `+ g / T` is added by the caller.
#[inline(always)]
unsafe fn logit_gradients_at<S: Simd>(logits: &[f32], terms: &RowTerms, out: *mut f32) {
    // SAFETY: `out` holds a value per logit; partial vectors are masked.
    unsafe {
        for i in (0..logits.len()).step_by(S::LANES) {
            let n = S::LANES.min(logits.len() - i);
            let x = S::mul(S::load_n(logits.as_ptr().add(i), n), S::splat(terms.inverse_temperature));
            let log_p = S::sub(x, S::splat(terms.lse));
            let slope = S::fma(
                S::add(log_p, S::splat(terms.entropy)),
                S::splat(terms.dentropy),
                S::splat(terms.dlogp),
            );
            let gradient = S::mul(S::mul(exp::<S>(log_p), slope), S::splat(-terms.inverse_temperature));
            S::store_n(out.add(i), gradient, n);
        }
    }
}
