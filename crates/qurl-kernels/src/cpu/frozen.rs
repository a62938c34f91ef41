//! The input gradient of weights that are not trained: `dx = dy W` from the one packed copy that the forward
//! pass reads.
//!
//! Weights that are trained are packed a second time for it. Frozen ones are unpacked on the way, some rows
//! at a time (quantized ones to the numbers that they stand for, rounded to bf16), so that a base beside
//! which adapters are trained is held once. The sums are the same chains over the rows of W, so weights that
//! are not quantized give the bits of trained ones.

use super::Context;
use super::buf::Parts;
use super::device::{CpuWeight, Forward};
use super::gemm::{self, Mode, Precision};

/// Rows of W that are unpacked at a time: a multiple of the values of a word.
const ROWS: usize = 256;

/// `dx[rows, k] = dy[rows, n] W`
pub(super) fn input_gradient(ctx: &Context, dy: &[f32], rows: usize, w: &CpuWeight, dx: &mut [f32]) {
    if let Some(transposed) = &w.backward {
        return gemm::matmul(ctx, dy, rows, transposed, None, Mode::Store, dx);
    }
    let (n, k) = (w.n, w.k);
    assert!(dy.len() >= rows * n && dx.len() >= rows * k, "input gradient: shapes");
    let precision = match &w.forward {
        Forward::Float(forward) => forward.precision(),
        Forward::Quantized(_) => Precision::Bf16,
    };
    let mut weights = ctx.scratch.take(ROWS.min(n) * k);
    let mut gradients = ctx.scratch.take(rows * ROWS.min(n));
    let dx = &mut dx[..rows * k];
    dx.fill(0.0);
    for first in (0..n).step_by(ROWS) {
        let count = ROWS.min(n - first);
        let weights = &mut weights.floats()[..count * k];
        unpack(ctx, &w.forward, first, k, weights);
        let gradients = &mut gradients.floats()[..rows * count];
        for (to, from) in gradients.chunks_exact_mut(count).zip(dy.chunks_exact(n)) {
            to.copy_from_slice(&from[first..first + count]);
        }
        gemm::accumulate(ctx, precision, gradients, rows, weights, count, k, dx);
    }
}

/// The numbers of the rows from `first` on.
fn unpack(ctx: &Context, weights: &Forward, first: usize, k: usize, to: &mut [f32]) {
    let rows = to.len() / k;
    let to = Parts::new(to);
    ctx.pool.for_ranges(rows, (1 << 14) / k + 1, &|range| {
        for row in range {
            // SAFETY: rows are disjoint between tasks.
            let to = unsafe { to.slice(row * k, k) };
            match weights {
                Forward::Float(forward) => forward.row(ctx, first + row, to),
                Forward::Quantized(forward) => forward.row(ctx, first + row, to),
            }
        }
    });
}
