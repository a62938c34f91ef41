//! RMSNorm over rows, and over the query and key heads inside rows (QK-norm), forward and backward.
//!
//! `y = x / sqrt(mean(x^2) + eps) * gain`. The reciprocal root is recomputed in the backward pass: the row is
//! read there anyway, and nothing needs to be kept. A row whose squares overflow is NaN: its reciprocal root
//! would be 0, and finite numbers would silently become zeros.

use super::Context;
use super::buf::Parts;
use super::simd::{Simd, simd_dispatch};
use crate::types::Rows;

/// `out = norm(x) * gain` for the rows; the rest of `out` is not touched.
pub fn forward(ctx: &Context, x: &[f32], gain: &[f32], rows: Rows, eps: f32, out: &mut [f32]) {
    assert!(rows.fits(x.len()) && rows.fits(out.len()) && gain.len() == rows.width, "rmsnorm: shapes");
    let out = Parts::new(out);
    ctx.pool.for_ranges(rows.outer, 8192 / (rows.per * rows.width).max(1) + 1, &|range| {
        for run in range {
            for row in 0..rows.per {
                let at = rows.start + run * rows.stride + row * rows.width;
                // SAFETY: the rows lie inside x and out, and each task has its own.
                unsafe { forward_row(ctx.level, x.as_ptr().add(at), gain, eps, out.at(at)) }
            }
        }
    });
}

/// [`forward`] onto itself.
pub fn forward_in_place(ctx: &Context, x: &mut [f32], gain: &[f32], rows: Rows, eps: f32) {
    assert!(rows.fits(x.len()) && gain.len() == rows.width, "rmsnorm: shapes");
    let x = Parts::new(x);
    ctx.pool.for_ranges(rows.outer, 8192 / (rows.per * rows.width).max(1) + 1, &|range| {
        for run in range {
            for row in 0..rows.per {
                // SAFETY: the rows lie inside x, and each task has its own; a row is read before it is
                // written.
                unsafe {
                    let at = x.at(rows.start + run * rows.stride + row * rows.width);
                    forward_row(ctx.level, at, gain, eps, at);
                }
            }
        }
    });
}

/// Where the gradient of the input goes.
pub enum InputGradient<'a> {
    /// `dx += ...`
    Add(&'a mut [f32]),
    /// The gradient of the output is replaced by that of the input.
    InPlace,
}

/// Backward of [`forward`]: `dgain += ...`, and the input's gradient as told.
pub fn backward(
    ctx: &Context,
    x: &[f32],
    gain: &[f32],
    rows: Rows,
    eps: f32,
    dy: &mut [f32],
    dx: InputGradient,
    dgain: Option<&mut [f32]>,
) {
    assert!(rows.fits(x.len()) && rows.fits(dy.len()), "rmsnorm backward: shapes");
    assert!(
        gain.len() == rows.width && dgain.as_ref().is_none_or(|d| d.len() == rows.width),
        "rmsnorm backward: gain"
    );
    let mut scales = ctx.scratch.take(rows.outer * rows.per);
    let scale_parts = Parts::new(&mut scales);
    let dy_parts = Parts::new(dy);
    let (dx, add) = match dx {
        InputGradient::Add(dx) => {
            assert!(rows.fits(dx.len()), "rmsnorm backward: dx");
            (Parts::new(dx), true)
        }
        InputGradient::InPlace => (dy_parts, false),
    };
    let at = |run: usize, row: usize| rows.start + run * rows.stride + row * rows.width;
    ctx.pool.for_ranges(rows.outer, 8192 / (rows.per * rows.width).max(1) + 1, &|range| {
        for run in range {
            for row in 0..rows.per {
                // SAFETY: the slot belongs to this row.
                unsafe {
                    let scale = inverse_rms(ctx.level, &x[at(run, row)..][..rows.width], eps);
                    *scale_parts.at(run * rows.per + row) = scale.to_bits();
                }
            }
        }
    });
    // The gain's gradient needs the output gradients of all rows: columns are shared out, each a chain over
    // the rows.
    if let Some(dgain) = dgain {
        let dgain = Parts::new(dgain);
        ctx.pool.for_ranges(rows.width.div_ceil(16), 1, &|range| {
            let columns = range.start * 16..(range.end * 16).min(rows.width);
            for run in 0..rows.outer {
                for row in 0..rows.per {
                    // SAFETY: columns are disjoint between tasks; nobody writes dy in this pass.
                    unsafe {
                        let scale = f32::from_bits(*scale_parts.at(run * rows.per + row));
                        let from = at(run, row) + columns.start;
                        let dgain = dgain.slice(columns.start, columns.len());
                        let dy = dy_parts.slice(from, columns.len());
                        for ((dg, &dy), &x) in dgain.iter_mut().zip(&*dy).zip(&x[from..]) {
                            *dg += dy * (x * scale);
                        }
                    }
                }
            }
        });
    }
    ctx.pool.for_ranges(rows.outer, 8192 / (rows.per * rows.width).max(1) + 1, &|range| {
        for run in range {
            for row in 0..rows.per {
                // SAFETY: rows lie inside the arrays, and each task has its own.
                unsafe {
                    let scale = f32::from_bits(*scale_parts.at(run * rows.per + row));
                    let i = at(run, row);
                    backward_row(ctx.level, x.as_ptr().add(i), gain, scale, dy_parts.at(i), dx.at(i), add);
                }
            }
        }
    });
}

/// `1 / sqrt(mean)`; NaN where the mean is infinite.
#[inline(always)]
fn reciprocal_root(mean: f32) -> f32 {
    if mean == f32::INFINITY { f32::NAN } else { 1.0 / mean.sqrt() }
}

simd_dispatch!(
    plain pub(super) fn forward_row(x: *const f32, gain: &[f32], eps: f32, out: *mut f32) = forward_row_at
);
simd_dispatch!(plain fn inverse_rms(x: &[f32], eps: f32) -> f32 = inverse_rms_at);
simd_dispatch!(
    plain fn backward_row(
        x: *const f32, gain: &[f32], scale: f32, dy: *const f32, dx: *mut f32, add: bool
    ) = backward_row_at
);

#[inline(always)]
unsafe fn inverse_rms_at<S: Simd>(x: &[f32], eps: f32) -> f32 {
    // SAFETY: loads stay inside the slice.
    unsafe {
        let mut sum = S::splat(0.0);
        for i in (0..x.len()).step_by(S::LANES) {
            let v = S::load_n(x.as_ptr().add(i), S::LANES.min(x.len() - i));
            sum = S::fma(v, v, sum);
        }
        reciprocal_root(S::sum(sum) / x.len() as f32 + eps)
    }
}

#[inline(always)]
unsafe fn forward_row_at<S: Simd>(x: *const f32, gain: &[f32], eps: f32, out: *mut f32) {
    let width = gain.len();
    // SAFETY: x and out have the width of the gain.
    unsafe {
        let scale = S::splat(inverse_rms_at::<S>(std::slice::from_raw_parts(x, width), eps));
        for i in (0..width).step_by(S::LANES) {
            let n = S::LANES.min(width - i);
            let v = S::mul(S::load_n(x.add(i), n), scale);
            S::store_n(out.add(i), S::mul(v, S::load_n(gain.as_ptr().add(i), n)), n);
        }
    }
}

#[inline(always)]
unsafe fn backward_row_at<S: Simd>(
    x: *const f32,
    gain: &[f32],
    scale: f32,
    dy: *const f32,
    dx: *mut f32,
    add: bool,
) {
    let width = gain.len();
    let gain = gain.as_ptr();
    // SAFETY: all rows have the width of the gain.
    unsafe {
        let mut dot = S::splat(0.0);
        for i in (0..width).step_by(S::LANES) {
            let n = S::LANES.min(width - i);
            let weighted = S::mul(S::load_n(dy.add(i), n), S::load_n(gain.add(i), n));
            dot = S::fma(weighted, S::load_n(x.add(i), n), dot);
        }
        // dx = scale * (dy * gain - x * scale^2 * mean(dy * gain * x))
        let shared = S::splat(-(scale * scale) * S::sum(dot) / width as f32);
        for i in (0..width).step_by(S::LANES) {
            let n = S::LANES.min(width - i);
            let weighted = S::mul(S::load_n(dy.add(i), n), S::load_n(gain.add(i), n));
            let v = S::mul(S::fma(S::load_n(x.add(i), n), shared, weighted), S::splat(scale));
            let v = if add { S::add(S::load_n(dx.add(i), n), v) } else { v };
            S::store_n(dx.add(i), v, n);
        }
    }
}
