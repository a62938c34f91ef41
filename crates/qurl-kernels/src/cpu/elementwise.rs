//! The small operations between the GEMMs: rotary embedding, SwiGLU, embedding rows, column sums, rounding.

use super::Context;
use super::buf::Parts;
use super::scalar::{bf16_bits, bf16_value};
use super::simd::{Simd, exp, simd_dispatch};

/// Rotates the first `heads` heads of each row of `x[rows, stride]` by the angles of its position; `inverse`
/// turns back, which is the backward pass. Pairs are `(i, i + head_dim/2)`, as in Hugging Face models. `cos`
/// and `sin` are tables `[positions, head_dim / 2]`.
pub fn rope(
    ctx: &Context,
    x: &mut [f32],
    stride: usize,
    heads: usize,
    head_dim: usize,
    positions: &[u32],
    cos: &[f32],
    sin: &[f32],
    inverse: bool,
) {
    let half = head_dim / 2;
    assert!(x.len() >= positions.len() * stride && heads * head_dim <= stride, "rope: shapes");
    assert!(positions.iter().all(|&p| (p as usize + 1) * half <= cos.len()), "rope: table too short");
    let x = Parts::new(x);
    ctx.pool.for_ranges(positions.len(), 4096 / stride.max(1) + 1, &|range| {
        for row in range {
            let angle = positions[row] as usize * half;
            // SAFETY: rows are disjoint between tasks, tables were checked above.
            unsafe {
                let (cos, sin) = (cos.as_ptr().add(angle), sin.as_ptr().add(angle));
                rotate(ctx.level, x.at(row * stride), heads, half, cos, sin, inverse);
            }
        }
    });
}

simd_dispatch!(
    plain pub(super) fn rotate(
        x: *mut f32, heads: usize, half: usize, cos: *const f32, sin: *const f32, inverse: bool
    ) = rotate_at
);

/// Rotates the heads of one row.
#[inline(always)]
unsafe fn rotate_at<S: Simd>(
    x: *mut f32,
    heads: usize,
    half: usize,
    cos: *const f32,
    sin: *const f32,
    inverse: bool,
) {
    // SAFETY: x has 2 * half values for every head, the tables half.
    unsafe {
        for i in (0..half).step_by(S::LANES) {
            let n = S::LANES.min(half - i);
            let c = S::load_n(cos.add(i), n);
            let s = S::load_n(sin.add(i), n);
            let s = if inverse { S::sub(S::splat(0.0), s) } else { s };
            for head in 0..heads {
                let x = x.add(2 * head * half + i);
                let (a, b) = (S::load_n(x, n), S::load_n(x.add(half), n));
                S::store_n(x, S::sub(S::mul(a, c), S::mul(b, s)), n);
                S::store_n(x.add(half), S::add(S::mul(b, c), S::mul(a, s)), n);
            }
        }
    }
}

/// Copies all values, on all threads.
pub fn copy(ctx: &Context, from: &[f32], to: &mut [f32]) {
    assert_eq!(from.len(), to.len(), "copy: lengths");
    let parts = Parts::new(to);
    ctx.pool.for_ranges(from.len(), 1 << 16, &|range| {
        // SAFETY: ranges are disjoint between tasks.
        unsafe { parts.slice(range.start, range.len()) }.copy_from_slice(&from[range]);
    });
}

/// `out[rows, f] = silu(gate) * up` of `gate_up[rows, 2f]` (gate first).
pub fn swiglu(ctx: &Context, gate_up: &[f32], rows: usize, f: usize, out: &mut [f32]) {
    assert!(gate_up.len() >= rows * 2 * f && out.len() >= rows * f, "swiglu: shapes");
    let out = Parts::new(out);
    ctx.pool.for_ranges(rows, 2048 / f.max(1) + 1, &|range| {
        for row in range {
            // SAFETY: rows are disjoint between tasks.
            unsafe { swiglu_row(ctx.level, gate_up.as_ptr().add(row * 2 * f), f, out.at(row * f)) }
        }
    });
}

/// Replaces `gate_up` by its gradient, and `out`, on entry the gradient of the output, by the output itself.
pub fn swiglu_backward(ctx: &Context, gate_up: &mut [f32], out: &mut [f32], rows: usize, f: usize) {
    assert!(gate_up.len() >= rows * 2 * f && out.len() >= rows * f, "swiglu backward: shapes");
    let (gate_up, out) = (Parts::new(gate_up), Parts::new(out));
    ctx.pool.for_ranges(rows, 2048 / f.max(1) + 1, &|range| {
        for row in range {
            // SAFETY: rows are disjoint between tasks.
            unsafe { swiglu_backward_row(ctx.level, gate_up.at(row * 2 * f), f, out.at(row * f)) }
        }
    });
}

simd_dispatch!(plain pub(super) fn swiglu_row(gate_up: *const f32, f: usize, out: *mut f32) = swiglu_row_at);
simd_dispatch!(
    plain fn swiglu_backward_row(gate_up: *mut f32, f: usize, out: *mut f32) = swiglu_backward_row_at
);

#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: S::V) -> S::V {
    // SAFETY: register operations.
    unsafe { S::div(S::splat(1.0), S::add(S::splat(1.0), exp::<S>(S::sub(S::splat(0.0), x)))) }
}

#[inline(always)]
unsafe fn swiglu_row_at<S: Simd>(gate_up: *const f32, f: usize, out: *mut f32) {
    // SAFETY: 2f values in, f out.
    unsafe {
        for i in (0..f).step_by(S::LANES) {
            let n = S::LANES.min(f - i);
            let (g, u) = (S::load_n(gate_up.add(i), n), S::load_n(gate_up.add(f + i), n));
            S::store_n(out.add(i), S::mul(S::mul(g, sigmoid::<S>(g)), u), n);
        }
    }
}

#[inline(always)]
unsafe fn swiglu_backward_row_at<S: Simd>(gate_up: *mut f32, f: usize, out: *mut f32) {
    // SAFETY: 2f values and f gradients, both in place.
    unsafe {
        for i in (0..f).step_by(S::LANES) {
            let n = S::LANES.min(f - i);
            let (g, u) = (S::load_n(gate_up.add(i), n), S::load_n(gate_up.add(f + i), n));
            let d = S::load_n(out.add(i), n);
            let s = sigmoid::<S>(g);
            let silu = S::mul(g, s);
            // d silu = s + g s (1 - s)
            let slope = S::fma(silu, S::sub(S::splat(1.0), s), s);
            S::store_n(gate_up.add(i), S::mul(S::mul(d, u), slope), n);
            S::store_n(gate_up.add(f + i), S::mul(d, silu), n);
            S::store_n(out.add(i), S::mul(silu, u), n);
        }
    }
}

/// `out[i] = table[ids[i]]`, rows of `d`.
pub fn gather(ctx: &Context, table: &[f32], ids: &[u32], d: usize, out: &mut [f32]) {
    assert!(
        out.len() >= ids.len() * d && ids.iter().all(|&id| (id as usize + 1) * d <= table.len()),
        "gather: shapes"
    );
    let out = Parts::new(out);
    ctx.pool.for_ranges(ids.len(), 8192 / d.max(1) + 1, &|range| {
        for i in range {
            // SAFETY: rows are disjoint between tasks.
            unsafe { out.slice(i * d, d).copy_from_slice(&table[ids[i] as usize * d..][..d]) }
        }
    });
}

/// `table[ids[i]] += rows[i]` in the order of i.
pub fn scatter_add(ctx: &Context, rows: &[f32], ids: &[u32], d: usize, table: &mut [f32]) {
    assert!(
        rows.len() >= ids.len() * d && ids.iter().all(|&id| (id as usize + 1) * d <= table.len()),
        "scatter: shapes"
    );
    let table = Parts::new(table);
    ctx.pool.for_ranges(d.div_ceil(16), 1, &|range| {
        let columns = range.start * 16..(range.end * 16).min(d);
        for (i, &id) in ids.iter().enumerate() {
            // SAFETY: columns are disjoint between tasks.
            let target = unsafe { table.slice(id as usize * d + columns.start, columns.len()) };
            for (t, r) in target.iter_mut().zip(&rows[i * d + columns.start..]) {
                *t += r;
            }
        }
    });
}

/// `sums[j] += x[row, j]` over the rows in order.
pub fn column_sums(ctx: &Context, x: &[f32], rows: usize, d: usize, sums: &mut [f32]) {
    assert!(x.len() >= rows * d && sums.len() == d, "column sums: shapes");
    let sums = Parts::new(sums);
    ctx.pool.for_ranges(d.div_ceil(16), 1, &|range| {
        let columns = range.start * 16..(range.end * 16).min(d);
        // SAFETY: columns are disjoint between tasks.
        let sums = unsafe { sums.slice(columns.start, columns.len()) };
        for row in 0..rows {
            for (s, v) in sums.iter_mut().zip(&x[row * d + columns.start..]) {
                *s += v;
            }
        }
    });
}

/// `y += x`
pub fn add(ctx: &Context, x: &[f32], y: &mut [f32]) {
    assert!(x.len() <= y.len(), "add: shapes");
    let y = Parts::new(y);
    ctx.pool.for_ranges(x.len(), 1 << 14, &|range| {
        // SAFETY: ranges are disjoint between tasks.
        let y = unsafe { y.slice(range.start, range.len()) };
        for (y, x) in y.iter_mut().zip(&x[range]) {
            *y += x;
        }
    });
}

/// `y += x`, and zeros in `x`: one pass over memory in place of [`add`] and [`clear`].
pub fn drain(ctx: &Context, x: &mut [f32], y: &mut [f32]) {
    assert!(x.len() <= y.len(), "drain: shapes");
    let len = x.len();
    let (x, y) = (Parts::new(x), Parts::new(y));
    ctx.pool.for_ranges(len, 1 << 14, &|range| {
        // SAFETY: ranges are disjoint between tasks.
        let (x, y) = unsafe { (x.slice(range.start, range.len()), y.slice(range.start, range.len())) };
        for (y, x) in y.iter_mut().zip(x) {
            *y += std::mem::take(x);
        }
    });
}

/// Zeros.
pub fn clear(ctx: &Context, x: &mut [f32]) {
    let len = x.len();
    let x = Parts::new(x);
    ctx.pool.for_ranges(len, 1 << 15, &|range| {
        // SAFETY: ranges are disjoint between tasks.
        unsafe { x.slice(range.start, range.len()) }.fill(0.0);
    });
}

/// `y = sum of pieces[count, len]` in a binary tree; `count` is a power of two.
pub fn add_pieces(ctx: &Context, pieces: &[f32], count: usize, y: &mut [f32]) {
    let len = y.len();
    assert!(count.is_power_of_two() && pieces.len() == count * len, "add_pieces: shapes");
    let y = Parts::new(y);
    ctx.pool.for_ranges(len, 1 << 12, &|range| {
        // Sums of 2^k neighbours each, the widest first: a binary counter of pieces.
        let mut sums: Vec<Vec<f32>> = Vec::new();
        for piece in 0..count {
            let mut sum = pieces[piece * len..][range.clone()].to_vec();
            for _ in 0..(piece + 1).trailing_zeros() {
                let Some(mut left) = sums.pop() else { break };
                left.iter_mut().zip(&sum).for_each(|(left, right)| *left += right);
                sum = left;
            }
            sums.push(sum);
        }
        // SAFETY: ranges are disjoint between tasks.
        let y = unsafe { y.slice(range.start, range.len()) };
        y.copy_from_slice(&sums[0]);
    });
}

/// Two neighbours of `x` in bf16 in each word, the first in its low half.
pub fn narrow(ctx: &Context, x: &[f32], words: &mut [f32]) {
    assert!(words.len() == x.len().div_ceil(2), "narrow: shapes");
    let count = words.len();
    let words = Parts::new(words);
    ctx.pool.for_ranges(count, 1 << 13, &|range| {
        // SAFETY: ranges are disjoint between tasks.
        let words = unsafe { words.slice(range.start, range.len()) };
        let pairs = x[2 * range.start..(2 * range.end).min(x.len())].chunks(2);
        for (word, pair) in words.iter_mut().zip(pairs) {
            let bits = |x: &f32| u32::from(bf16_bits(*x));
            *word = f32::from_bits(bits(&pair[0]) | pair.get(1).map_or(0, bits) << 16);
        }
    });
}

/// `y` = the values of [`narrow`].
pub fn widen(ctx: &Context, words: &[f32], y: &mut [f32]) {
    assert!(words.len() == y.len().div_ceil(2), "widen: shapes");
    let len = y.len();
    let y = Parts::new(y);
    ctx.pool.for_ranges(words.len(), 1 << 13, &|range| {
        let (first, end) = (2 * range.start, (2 * range.end).min(len));
        // SAFETY: ranges are disjoint between tasks.
        let y = unsafe { y.slice(first, end - first) };
        for (pair, word) in y.chunks_mut(2).zip(&words[range]) {
            let bits = word.to_bits();
            let halves = [bf16_value(bits as u16), bf16_value((bits >> 16) as u16)];
            pair.copy_from_slice(&halves[..pair.len()]);
        }
    });
}

simd_dispatch!(
    plain
    /// Rounds `n` values to bf16.
    pub(super) fn round_row(x: *mut f32, n: usize) = round_row_at
);

#[inline(always)]
unsafe fn round_row_at<S: Simd>(x: *mut f32, n: usize) {
    // SAFETY: n values.
    unsafe {
        for i in (0..n).step_by(S::LANES) {
            let m = S::LANES.min(n - i);
            S::store_n(x.add(i), S::round_bf16(S::load_n(x.add(i), m)), m);
        }
    }
}

/// Roughly normal numbers (sums of four uniform ones) times a factor, each a function of seed and place.
pub fn fill_random(ctx: &Context, out: &mut [f32], seed: u64, factor: f32) {
    let len = out.len();
    let out = Parts::new(out);
    // In the parts in which weights are packed: what is still in a cache is in that of the thread that comes
    // for it.
    ctx.pool.for_runs(len, 1 << 16, 1 << 15, &|range| {
        // SAFETY: ranges are disjoint between tasks.
        let part = unsafe { out.slice(range.start, range.len()) };
        for (i, x) in range.zip(part) {
            let mut bits = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bits ^= bits >> 31;
            let sum: i32 = (0..4).map(|j| (bits >> (16 * j) & 0xffff) as i32).sum();
            *x = (sum - 131_070) as f32 * (1.732_050_8 / 65_536.0) * factor;
        }
    });
}

/// `out[row] = x[row] . w`, the scalar head of a critic.
pub fn row_dots(ctx: &Context, x: &[f32], rows: usize, w: &[f32], out: &mut [f32]) {
    let d = w.len();
    assert!(x.len() >= rows * d && out.len() >= rows, "row dots: shapes");
    let out = Parts::new(out);
    ctx.pool.for_ranges(rows, 8192 / d.max(1) + 1, &|range| {
        for row in range {
            // SAFETY: rows are disjoint between tasks.
            unsafe { *out.at(row) = dot(ctx.level, x.as_ptr().add(row * d), w) }
        }
    });
}

/// Backward of [`row_dots`]: `dx[row] = g[row] w`, `dw += g[row] x[row]` over the rows in order.
pub fn row_dots_backward(
    ctx: &Context,
    x: &[f32],
    rows: usize,
    w: &[f32],
    g: &[f32],
    dx: &mut [f32],
    dw: &mut [f32],
) {
    let d = w.len();
    assert!(
        x.len() >= rows * d && dx.len() >= rows * d && g.len() >= rows && dw.len() == d,
        "row dots backward: shapes"
    );
    let (dx, dw) = (Parts::new(dx), Parts::new(dw));
    ctx.pool.for_ranges(d.div_ceil(16), 1, &|range| {
        let columns = range.start * 16..(range.end * 16).min(d);
        // SAFETY: columns are disjoint between tasks.
        let dw = unsafe { dw.slice(columns.start, columns.len()) };
        for (row, &g) in g.iter().enumerate().take(rows) {
            let from = row * d + columns.start;
            // SAFETY: as above.
            let dx = unsafe { dx.slice(from, columns.len()) };
            for (j, (dx, dw)) in dx.iter_mut().zip(dw.iter_mut()).enumerate() {
                *dx = g * w[columns.start + j];
                *dw += g * x[from + j];
            }
        }
    });
}

simd_dispatch!(plain fn dot(x: *const f32, w: &[f32]) -> f32 = dot_at);

#[inline(always)]
unsafe fn dot_at<S: Simd>(x: *const f32, w: &[f32]) -> f32 {
    // SAFETY: x has the length of w.
    unsafe {
        let mut sum = S::splat(0.0);
        for i in (0..w.len()).step_by(S::LANES) {
            let n = S::LANES.min(w.len() - i);
            sum = S::fma(S::load_n(x.add(i), n), S::load_n(w.as_ptr().add(i), n), sum);
        }
        S::sum(sum)
    }
}
