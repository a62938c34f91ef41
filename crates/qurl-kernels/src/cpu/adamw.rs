//! AdamW with decoupled weight decay, and the sum of squares for clipping by the global norm.

use super::Context;
use super::buf::Parts;
use super::simd::{Simd, simd_dispatch};
use crate::types::{AdamW, SQUARES_BLOCK};

/// Updates weights and moments in place.
pub fn update(ctx: &Context, a: &AdamW, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    assert!(w.len() == g.len() && w.len() == m.len() && w.len() == v.len(), "adamw: shapes");
    let (w_parts, m, v) = (Parts::new(w), Parts::new(m), Parts::new(v));
    ctx.pool.for_ranges(g.len(), 1 << 14, &|range| {
        // SAFETY: ranges are disjoint between tasks and inside all four arrays.
        unsafe {
            let at = range.start;
            update_range(ctx.level, a, w_parts.at(at), &g[range], m.at(at), v.at(at));
        }
    });
}

simd_dispatch!(
    plain fn update_range(a: &AdamW, w: *mut f32, g: &[f32], m: *mut f32, v: *mut f32) = update_range_at
);

#[inline(always)]
unsafe fn update_range_at<S: Simd>(a: &AdamW, w: *mut f32, g: &[f32], m: *mut f32, v: *mut f32) {
    let step = i32::try_from(a.step).unwrap_or(i32::MAX);
    let correction1 = 1.0 - (a.beta1 as f64).powi(step);
    let correction2 = 1.0 - (a.beta2 as f64).powi(step);
    let step_size = (-(a.lr as f64) / correction1) as f32;
    let root_correction = (1.0 / correction2.sqrt()) as f32;
    // SAFETY: all arrays have the length of g.
    unsafe {
        let (beta1, beta2) = (S::splat(a.beta1), S::splat(a.beta2));
        let (rest1, rest2) = (S::splat(1.0 - a.beta1), S::splat(1.0 - a.beta2));
        let keep = S::splat(1.0 - a.lr * a.weight_decay);
        for i in (0..g.len()).step_by(S::LANES) {
            let n = S::LANES.min(g.len() - i);
            let grad = S::mul(S::load_n(g.as_ptr().add(i), n), S::splat(a.grad_scale));
            let m1 = S::fma(beta1, S::load_n(m.add(i), n), S::mul(rest1, grad));
            let v1 = S::fma(beta2, S::load_n(v.add(i), n), S::mul(rest2, S::mul(grad, grad)));
            let root = S::fma(S::sqrt(v1), S::splat(root_correction), S::splat(a.eps));
            let decayed = S::mul(S::load_n(w.add(i), n), keep);
            let w1 = S::fma(S::splat(step_size), S::div(m1, root), decayed);
            S::store_n(m.add(i), m1, n);
            S::store_n(v.add(i), v1, n);
            S::store_n(w.add(i), w1, n);
        }
    }
}

/// Sums of the squares of fixed blocks, in f64; all of them added up in order are the sum of the squares.
pub fn block_squares(ctx: &Context, x: &[f32]) -> Vec<f64> {
    let blocks = x.len().div_ceil(SQUARES_BLOCK);
    let mut sums = vec![0.0f64; blocks];
    let parts = Parts::new(&mut sums);
    ctx.pool.for_each(blocks, &|i| {
        let block = &x[i * SQUARES_BLOCK..((i + 1) * SQUARES_BLOCK).min(x.len())];
        let (chunks, rest) = block.as_chunks::<8>();
        let mut lanes = [0.0f64; 8];
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += x as f64 * x as f64;
            }
        }
        let tail: f64 = rest.iter().map(|&x| x as f64 * x as f64).sum();
        // SAFETY: one slot a task.
        unsafe { *parts.at(i) = lanes.iter().sum::<f64>() + tail }
    });
    sums
}
