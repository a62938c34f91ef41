//! Backward of causal grouped-query attention, by recomputing the weights tile by tile from the saved denominators.
//!
//! With `P = e^(S - lse)`, `D = rowsum(dO * O)`:  `dV = P^T dO`, `dS = P * (dO V^T - D)`, `dQ = scale dS K`,
//! `dK = scale dS^T Q`. One task owns one sequence and one key/value head with all query heads of its group, so
//! every gradient is summed by one thread in the order of the rows. Memory beside the outputs is two transposed
//! copies of the head's keys and values: linear in the length.

use super::Context;
use super::attention::{Heads, MAX_HEAD_DIM, ROW_BLOCK, Span, TILE, multiply, pack_strips, strip_rows};
use super::buf::Parts;
use super::simd::{Simd, exp, simd_dispatch};

/// Gradient `dqkv[rows, qkv_width]` (queries, keys and values; overwritten for the rows of the spans) from the
/// gradient `dout` of the output. Every span must be a whole sequence (position 0), with keys and values in `qkv`.
pub fn backward(
    ctx: &Context,
    heads: Heads,
    qkv: &[f32],
    spans: &[Span],
    out: &[f32],
    dout: &[f32],
    lse: &[f32],
    dqkv: &mut [f32],
) {
    let rows_end = spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0);
    let (width, out_width) = (heads.qkv_width(), heads.heads * heads.head_dim);
    assert!(heads.head_dim <= MAX_HEAD_DIM, "attention backward: {heads:?}");
    assert!(spans.iter().all(|s| s.position == 0), "attention backward: spans must be whole sequences");
    assert!(qkv.len() >= rows_end * width && dqkv.len() >= rows_end * width, "attention backward: qkv");
    assert!(out.len() >= rows_end * out_width && dout.len() >= rows_end * out_width, "attention backward: output");
    assert!(lse.len() >= rows_end * heads.heads, "attention backward: lse");
    let job = Job { heads, qkv, out, dout, lse, dqkv: Parts::new(dqkv) };
    ctx.pool.for_each(spans.len() * heads.kv_heads, &|task| {
        let span = &spans[task / heads.kv_heads];
        let tiles = span.rows.div_ceil(TILE);
        let mut transposed = ctx.scratch.take(2 * tiles * heads.head_dim * TILE);
        let room = transposed.as_mut_ptr().cast::<f32>();
        // SAFETY: the level was detected; shapes were checked; a task owns its heads' columns of the span's rows.
        unsafe { head_backward(ctx.level, &job, span, task % heads.kv_heads, room) }
    });
}

struct Job<'a> {
    heads: Heads,
    qkv: &'a [f32],
    out: &'a [f32],
    dout: &'a [f32],
    lse: &'a [f32],
    dqkv: Parts<f32>,
}

simd_dispatch!(fn head_backward(job: &Job, span: &Span, head: usize, transposed: *mut f32) = head_backward_at);

/// Working memory of a task, on its stack.
#[repr(C, align(64))]
struct Room {
    queries: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    query_strips: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    douts: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    dout_strips: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    dqueries: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    weights: [f32; ROW_BLOCK * TILE],
    dscores: [f32; ROW_BLOCK * TILE],
}

#[inline(always)]
unsafe fn head_backward_at<S: Simd>(job: &Job, span: &Span, head: usize, transposed: *mut f32) {
    let Heads { heads, kv_heads, head_dim, scale } = job.heads;
    let group = job.heads.group();
    let width = job.heads.qkv_width();
    let key_column = (heads + head) * head_dim;
    let value_column = (heads + kv_heads + head) * head_dim;
    let tiles = span.rows.div_ceil(TILE);
    let mut room = std::mem::MaybeUninit::<Room>::uninit();
    let room = room.as_mut_ptr();
    // SAFETY: all offsets stay inside the span's rows and the head's columns, and inside Room; everything is written
    // before it is read.
    unsafe {
        let queries: *mut f32 = (&raw mut (*room).queries).cast();
        let query_strips: *mut f32 = (&raw mut (*room).query_strips).cast();
        let douts: *mut f32 = (&raw mut (*room).douts).cast();
        let dout_strips: *mut f32 = (&raw mut (*room).dout_strips).cast();
        let dqueries: *mut f32 = (&raw mut (*room).dqueries).cast();
        let weights: *mut f32 = (&raw mut (*room).weights).cast();
        let dscores: *mut f32 = (&raw mut (*room).dscores).cast();
        let row_of = |position: usize| (span.row + position) * width;

        // Keys and values as [tile][head_dim][TILE]; rows past the end are zero.
        let (keys_t, values_t) = (transposed, transposed.add(tiles * head_dim * TILE));
        for position in 0..tiles * TILE {
            let (tile, slot) = (position / TILE, position % TILE);
            let at = tile * head_dim * TILE + slot;
            for d in 0..head_dim {
                let real = position < span.rows;
                let row = row_of(if real { position } else { 0 });
                *keys_t.add(at + d * TILE) = if real { job.qkv[row + key_column + d] } else { 0.0 };
                *values_t.add(at + d * TILE) = if real { job.qkv[row + value_column + d] } else { 0.0 };
            }
            if position < span.rows {
                job.dqkv.slice(row_of(position) + key_column, head_dim).fill(0.0);
                job.dqkv.slice(row_of(position) + value_column, head_dim).fill(0.0);
            }
        }

        for start in (0..span.rows * group).step_by(ROW_BLOCK) {
            let rows = ROW_BLOCK.min(span.rows * group - start);
            let position = |row: usize| (start + row) / group;
            let head_of = |row: usize| head * group + (start + row) % group;
            let out_at = |row: usize| ((span.row + position(row)) * heads + head_of(row)) * head_dim;
            let query_at = |row: usize| row_of(position(row)) + head_of(row) * head_dim;
            let mut stats = [(0.0f32, 0.0f32); ROW_BLOCK]; // (lse, D)
            for (row, stat) in stats.iter_mut().enumerate().take(rows) {
                let at = out_at(row);
                let mut dot = S::splat(0.0);
                for d in (0..head_dim).step_by(S::LANES) {
                    let n = S::LANES.min(head_dim - d);
                    let dout = S::load_n(job.dout.as_ptr().add(at + d), n);
                    dot = S::fma(dout, S::load_n(job.out.as_ptr().add(at + d), n), dot);
                    S::store_n(douts.add(row * head_dim + d), dout, n);
                    let query = S::load_n(job.qkv.as_ptr().add(query_at(row) + d), n);
                    S::store_n(queries.add(row * head_dim + d), S::mul(query, S::splat(scale)), n);
                }
                *stat = (job.lse[(span.row + position(row)) * heads + head_of(row)], S::sum(dot));
            }
            pack_strips::<S>(rows, head_dim, 1.0, |row| queries.add(row * head_dim), query_strips);
            pack_strips::<S>(rows, head_dim, 1.0, |row| douts.add(row * head_dim), dout_strips);
            std::ptr::write_bytes(dqueries, 0, rows * head_dim);

            for tile in 0..=position(rows - 1) / TILE {
                let keys = TILE.min(span.rows - tile * TILE);
                let tile_at = tile * head_dim * TILE;
                let strips = Operand { data: query_strips, strips: true };
                let into = Target { data: weights, stride: TILE, add: false };
                product::<S>(rows, TILE, head_dim, strips, keys_t.add(tile_at), TILE, into);
                let strips = Operand { data: dout_strips, strips: true };
                let into = Target { data: dscores, stride: TILE, add: false };
                product::<S>(rows, TILE, head_dim, strips, values_t.add(tile_at), TILE, into);
                for (row, &(lse, d)) in stats.iter().enumerate().take(rows) {
                    let seen = (position(row) + 1).saturating_sub(tile * TILE).min(TILE);
                    for i in (0..TILE).step_by(S::LANES) {
                        let n = seen.saturating_sub(i).min(S::LANES);
                        let score = S::load(weights.add(row * TILE + i));
                        let weight = S::keep_n(exp::<S>(S::sub(score, S::splat(lse))), n, 0.0);
                        let dscore = S::mul(weight, S::sub(S::load(dscores.add(row * TILE + i)), S::splat(d)));
                        S::store(weights.add(row * TILE + i), weight);
                        S::store(dscores.add(row * TILE + i), dscore);
                    }
                }
                let first_row = row_of(tile * TILE);
                let columns = Operand { data: weights, strips: false };
                let into = Target { data: job.dqkv.at(first_row + value_column), stride: width, add: true };
                product_transposed::<S>(keys, head_dim, rows, columns, douts, head_dim, into);
                let columns = Operand { data: dscores, strips: false };
                let into = Target { data: job.dqkv.at(first_row + key_column), stride: width, add: true };
                product_transposed::<S>(keys, head_dim, rows, columns, queries, head_dim, into);
                let plain = Operand { data: dscores, strips: false };
                let into = Target { data: dqueries, stride: head_dim, add: true };
                let key_rows = job.qkv.as_ptr().add(first_row + key_column);
                product::<S>(rows, head_dim, keys, plain, key_rows, width, into);
            }

            for row in 0..rows {
                let to = job.dqkv.at(query_at(row));
                for d in (0..head_dim).step_by(S::LANES) {
                    let n = S::LANES.min(head_dim - d);
                    S::store_n(to.add(d), S::mul(S::load_n(dqueries.add(row * head_dim + d), n), S::splat(scale)), n);
                }
            }
        }
    }
}

/// The left operand: strips `[k][rows of strip]`, or rows of TILE values.
#[derive(Clone, Copy)]
struct Operand {
    data: *const f32,
    strips: bool,
}

/// Where a product goes.
#[derive(Clone, Copy)]
struct Target {
    data: *mut f32,
    stride: usize,
    add: bool,
}

/// `C[m, n] (+)= A[m, k] B[k, n]`, B with rows `ldb` apart.
#[inline(always)]
unsafe fn product<S: Simd>(m: usize, n: usize, k: usize, a: Operand, b: *const f32, ldb: usize, c: Target) {
    let strip = strip_rows::<S>();
    for first in (0..m).step_by(strip) {
        let rows = strip.min(m - first);
        macro_rules! by_rows {
            ($($r:literal)*) => { match rows { $($r => {
                // SAFETY: the strip lies inside A and C.
                unsafe {
                    let c = Target { data: c.data.add(first * c.stride), ..c };
                    if a.strips {
                        strip_product::<S, $r, 1>(n, k, a.data.add(first * k), $r, b, ldb, c)
                    } else {
                        strip_product::<S, $r, TILE>(n, k, a.data.add(first * TILE), 1, b, ldb, c)
                    }
                }
            })* _ => unreachable!() } };
        }
        by_rows!(1 2 3 4 5 6);
    }
}

/// `C[m, n] (+)= A[k, m]^T B[k, n]` with rows of A being TILE values.
#[inline(always)]
unsafe fn product_transposed<S: Simd>(m: usize, n: usize, k: usize, a: Operand, b: *const f32, ldb: usize, c: Target) {
    let strip = strip_rows::<S>();
    for first in (0..m).step_by(strip) {
        let rows = strip.min(m - first);
        macro_rules! by_rows {
            ($($r:literal)*) => { match rows { $($r => {
                // SAFETY: the strip lies inside A and C.
                unsafe {
                    let c = Target { data: c.data.add(first * c.stride), ..c };
                    strip_product::<S, $r, 1>(n, k, a.data.add(first), TILE, b, ldb, c)
                }
            })* _ => unreachable!() } };
        }
        by_rows!(1 2 3 4 5 6);
    }
}

#[inline(always)]
unsafe fn strip_product<S: Simd, const R: usize, const A_ROW: usize>(
    n: usize,
    k: usize,
    a: *const f32,
    a_step: usize,
    b: *const f32,
    ldb: usize,
    c: Target,
) {
    let l = S::LANES;
    // SAFETY: the caller gives operands of the stated shape; a partial last group of columns is masked.
    unsafe {
        for column in (0..n).step_by(4 * l) {
            let lanes: [usize; 4] = std::array::from_fn(|v| (n - column).saturating_sub(v * l).min(l));
            let offset: [usize; 4] = std::array::from_fn(|v| if lanes[v] == 0 { column } else { column + v * l });
            let mut acc = [[S::splat(0.0); 4]; R];
            if c.add {
                for (r, acc) in acc.iter_mut().enumerate() {
                    for v in 0..4 {
                        acc[v] = S::load_n(c.data.add(r * c.stride + offset[v]), lanes[v]);
                    }
                }
            }
            if lanes[3] == l {
                let b = b.add(column);
                multiply::<S, R, A_ROW>(k, a, a_step, [b, b.add(l), b.add(2 * l), b.add(3 * l)], ldb, &mut acc);
            } else {
                for i in 0..k {
                    for v in 0..4 {
                        let row = S::load_n(b.add(i * ldb + offset[v]), lanes[v]);
                        for (r, acc) in acc.iter_mut().enumerate() {
                            acc[v] = S::fma(S::splat(*a.add(r * A_ROW + i * a_step)), row, acc[v]);
                        }
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for v in 0..4 {
                    if lanes[v] > 0 {
                        S::store_n(c.data.add(r * c.stride + offset[v]), acc[v], lanes[v]);
                    }
                }
            }
        }
    }
}
