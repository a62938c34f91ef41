//! AdamW with decoupled weight decay, and the sum of squares for clipping by the global norm.

use super::Context;
use super::buf::Parts;
use super::moments::{CpuMoments, Moment, Stored, bf16, decode_block, dither, encode_block};
use super::simd::{Simd, simd_dispatch};
use crate::types::{AdamW, MOMENT_BLOCK, SQUARES_BLOCK};
use std::ops::Range;

/// Updates weights and moments in place; they belong to `g[at..]`.
pub fn update(ctx: &Context, a: &AdamW, w: &mut [f32], g: &[f32], at: usize, moments: &mut CpuMoments) {
    let (len, c) = (w.len(), Constants::new(a));
    // Of the whole tensor, or of the piece alone.
    let g = if g.len() == len { g } else { &g[at..at + len] };
    let w = Parts::new(w);
    match (&mut moments.first, &mut moments.second) {
        (Stored::F32(m), Stored::F32(v)) => {
            assert!(m.len() == len && v.len() == len, "adamw: shapes");
            let (m, v) = (Parts::new(m), Parts::new(v));
            ctx.pool.for_ranges(len, 1 << 14, &|range| {
                // SAFETY: ranges are disjoint between tasks and inside all four arrays.
                unsafe {
                    let at = range.start;
                    update_range(ctx.level, &c, w.at(at), &g[range], m.at(at), v.at(at));
                }
            });
        }
        (Stored::Bf16(m), Stored::Bf16(v)) => {
            assert!(m.len() == len && v.len() == len, "adamw: shapes");
            let (m, v) = (Parts::new(m), Parts::new(v));
            for_blocks(ctx, len, &|_, range| {
                let (mut m32, mut v32) = ([0.0; MOMENT_BLOCK], [0.0; MOMENT_BLOCK]);
                let (begin, n) = (range.start, range.len());
                // SAFETY: blocks are disjoint between tasks and inside all arrays.
                unsafe {
                    let (m, v) = (m.slice(begin, n), v.slice(begin, n));
                    m32.iter_mut().zip(&*m).for_each(|(to, &x)| *to = f32::from_bits(u32::from(x) << 16));
                    v32.iter_mut().zip(&*v).for_each(|(to, &x)| *to = f32::from_bits(u32::from(x) << 16));
                    let (m_at, v_at) = (m32.as_mut_ptr(), v32.as_mut_ptr());
                    update_range(ctx.level, &c, w.at(begin), &g[range], m_at, v_at);
                    for i in 0..n {
                        m[i] = bf16(m32[i], dither(Moment::First, at + begin + i, a.step));
                        v[i] = bf16(v32[i], dither(Moment::Second, at + begin + i, a.step));
                    }
                }
            });
        }
        (Stored::EightBit(m, m_exponents), Stored::EightBit(v, v_exponents)) => {
            assert!(m.len() == len && v.len() == len, "adamw: shapes");
            let (m, v) = (Parts::new(m), Parts::new(v));
            let (m_exponents, v_exponents) = (Parts::new(m_exponents), Parts::new(v_exponents));
            for_blocks(ctx, len, &|block, range| {
                let (mut m32, mut v32) = ([0.0; MOMENT_BLOCK], [0.0; MOMENT_BLOCK]);
                let (begin, n) = (range.start, range.len());
                // SAFETY: blocks are disjoint between tasks and inside all arrays, whose exponents are one a
                // block.
                unsafe {
                    let (m, v) = (m.slice(begin, n), v.slice(begin, n));
                    let (m_exponent, v_exponent) = (m_exponents.at(block), v_exponents.at(block));
                    decode_block(Moment::First, m, *m_exponent, &mut m32[..n]);
                    decode_block(Moment::Second, v, *v_exponent, &mut v32[..n]);
                    let (m_at, v_at) = (m32.as_mut_ptr(), v32.as_mut_ptr());
                    update_range(ctx.level, &c, w.at(begin), &g[range], m_at, v_at);
                    *m_exponent = encode_block(Moment::First, &m32[..n], at + begin, a.step, m);
                    *v_exponent = encode_block(Moment::Second, &v32[..n], at + begin, a.step, v);
                }
            });
        }
        _ => panic!("adamw: moments of two formats"),
    }
}

/// Calls `f` with every block of [`MOMENT_BLOCK`] of `len` numbers and its number, on all threads.
fn for_blocks(ctx: &Context, len: usize, f: &(impl Fn(usize, Range<usize>) + Sync)) {
    ctx.pool.for_ranges(len.div_ceil(MOMENT_BLOCK), 256, &|blocks| {
        for block in blocks {
            f(block, block * MOMENT_BLOCK..((block + 1) * MOMENT_BLOCK).min(len));
        }
    });
}

/// What an update multiplies with.
struct Constants {
    grad_scale: f32,
    beta1: f32,
    beta2: f32,
    /// What the decay leaves of a weight.
    keep: f32,
    step_size: f32,
    root_correction: f32,
    eps: f32,
}

impl Constants {
    fn new(a: &AdamW) -> Self {
        let step = i32::try_from(a.step).unwrap_or(i32::MAX);
        let correction1 = 1.0 - (a.beta1 as f64).powi(step);
        let correction2 = 1.0 - (a.beta2 as f64).powi(step);
        Constants {
            grad_scale: a.grad_scale,
            beta1: a.beta1,
            beta2: a.beta2,
            keep: 1.0 - a.lr * a.weight_decay,
            step_size: (-(a.lr as f64) / correction1) as f32,
            root_correction: (1.0 / correction2.sqrt()) as f32,
            eps: a.eps,
        }
    }
}

simd_dispatch!(
    plain fn update_range(c: &Constants, w: *mut f32, g: &[f32], m: *mut f32, v: *mut f32) = update_range_at
);

#[inline(always)]
unsafe fn update_range_at<S: Simd>(c: &Constants, w: *mut f32, g: &[f32], m: *mut f32, v: *mut f32) {
    // SAFETY: all arrays have the length of g.
    unsafe {
        let (beta1, beta2) = (S::splat(c.beta1), S::splat(c.beta2));
        let (rest1, rest2) = (S::splat(1.0 - c.beta1), S::splat(1.0 - c.beta2));
        let keep = S::splat(c.keep);
        for i in (0..g.len()).step_by(S::LANES) {
            let n = S::LANES.min(g.len() - i);
            let grad = S::mul(S::load_n(g.as_ptr().add(i), n), S::splat(c.grad_scale));
            let m1 = S::fma(beta1, S::load_n(m.add(i), n), S::mul(rest1, grad));
            let v1 = S::fma(beta2, S::load_n(v.add(i), n), S::mul(rest2, S::mul(grad, grad)));
            let root = S::fma(S::sqrt(v1), S::splat(c.root_correction), S::splat(c.eps));
            let decayed = S::mul(S::load_n(w.add(i), n), keep);
            let w1 = S::fma(S::splat(c.step_size), S::div(m1, root), decayed);
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
