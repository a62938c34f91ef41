//! Backward of causal grouped-query attention, by recomputing the weights tile by tile from the saved
//! denominators.
//!
//! With `P = e^(S - lse)`, `D = rowsum(dO * O)`: `dV = P^T dO`, `dS = P * (dO V^T - D)`, `dQ = scale dS K`,
//! `dK = scale dS^T Q`. One task owns one sequence and one key/value head with all query heads of its group,
//! so every gradient is summed by one thread in the order of the rows. Memory beside the outputs are copies
//! of the head's keys and values, transposed, and of its keys as rows side by side (in the source rows are so
//! far apart that they displace each other from a cache): linear in the length.

use super::Context;
use super::attention::{MAX_HEAD_DIM, ROW_BLOCK, TILE, by_tile, multiply, pack_strips, strip_rows};
use super::buf::Parts;
use super::simd::{Simd, exp, simd_dispatch};
use crate::types::{Heads, Span};

/// Gradient `dqkv[rows, qkv_width]` (queries, keys and values; overwritten for the rows of the spans) from
/// the gradient `dout` of the output. Every span must be a whole sequence (position 0), with keys and values
/// in `qkv`.
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
    assert!(
        out.len() >= rows_end * out_width && dout.len() >= rows_end * out_width,
        "attention backward: output"
    );
    assert!(lse.len() >= rows_end * heads.heads, "attention backward: lse");
    let job = Job { heads, qkv, out, dout, lse, dqkv: Parts::new(dqkv) };
    ctx.pool.for_each(spans.len() * heads.kv_heads, &|task| {
        let span = &spans[task / heads.kv_heads];
        let tiles = span.rows.div_ceil(TILE);
        let mut copies = ctx.scratch.take(3 * tiles * heads.head_dim * TILE);
        let workspace = copies.as_mut_ptr().cast::<f32>();
        // SAFETY: the level was detected; shapes were checked; a task owns its heads' columns of the span's
        // rows.
        unsafe { head_backward(ctx.level, &job, span, task % heads.kv_heads, workspace) }
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

simd_dispatch!(
    plain fn head_backward(job: &Job, span: &Span, head: usize, copies: *mut f32) = head_backward_at
);

/// Working memory of a task, on its stack.
#[repr(C, align(64))]
struct Workspace {
    queries: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    query_strips: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    douts: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    dout_strips: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    dqueries: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    weights: [f32; ROW_BLOCK * TILE],
    dscores: [f32; ROW_BLOCK * TILE],
}

#[inline(always)]
unsafe fn head_backward_at<S: Simd>(job: &Job, span: &Span, head: usize, copies: *mut f32) {
    let Heads { heads, kv_heads, head_dim, scale, .. } = job.heads;
    let group = job.heads.group();
    let width = job.heads.qkv_width();
    let key_column = (heads + head) * head_dim;
    let value_column = (heads + kv_heads + head) * head_dim;
    let tiles = span.rows.div_ceil(TILE);
    let mut workspace = std::mem::MaybeUninit::<Workspace>::uninit();
    let workspace = workspace.as_mut_ptr();
    // SAFETY: all offsets stay inside the span's rows and the head's columns, and inside Workspace;
    // everything is written before it is read.
    unsafe {
        let queries: *mut f32 = (&raw mut (*workspace).queries).cast();
        let query_strips: *mut f32 = (&raw mut (*workspace).query_strips).cast();
        let douts: *mut f32 = (&raw mut (*workspace).douts).cast();
        let dout_strips: *mut f32 = (&raw mut (*workspace).dout_strips).cast();
        let dqueries: *mut f32 = (&raw mut (*workspace).dqueries).cast();
        let weights: *mut f32 = (&raw mut (*workspace).weights).cast();
        let dscores: *mut f32 = (&raw mut (*workspace).dscores).cast();
        let row_of = |position: usize| (span.row + position) * width;

        // Keys and values as [tile][head_dim][TILE], and keys as rows.
        let copy = tiles * head_dim * TILE;
        let (keys_t, values_t, key_rows) = (copies, copies.add(copy), copies.add(2 * copy));
        let (keys, values) = (row_of(0) + key_column, row_of(0) + value_column);
        transpose_tiles::<S>(job.qkv.as_ptr().add(keys), width, span.rows, head_dim, keys_t);
        transpose_tiles::<S>(job.qkv.as_ptr().add(values), width, span.rows, head_dim, values_t);
        for position in 0..span.rows {
            let key = job.qkv.as_ptr().add(row_of(position) + key_column);
            std::ptr::copy_nonoverlapping(key, key_rows.add(position * head_dim), head_dim);
            job.dqkv.slice(row_of(position) + key_column, head_dim).fill(0.0);
            job.dqkv.slice(row_of(position) + value_column, head_dim).fill(0.0);
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
            pack_strips::<S>(
                rows,
                head_dim,
                1.0,
                strip_rows::<S>(),
                |row| queries.add(row * head_dim),
                query_strips,
            );
            let dout = |row: usize| douts.add(row * head_dim).cast_const();
            pack_strips::<S>(rows, head_dim, 1.0, strip_rows::<S>(), dout, dout_strips);
            std::ptr::write_bytes(dqueries, 0, rows * head_dim);

            let strip = strip_rows::<S>();
            let first_seen = |row: usize| job.heads.first_seen(position(row));
            for tile in first_seen(0) / TILE..=position(rows - 1) / TILE {
                let tile_at = tile * head_dim * TILE;
                let seen = |row: usize| (position(row) + 1).saturating_sub(tile * TILE).min(TILE);
                for first in (0..rows).step_by(strip) {
                    // Keys that some row of the strip sees; the rest of the tile is not touched.
                    let height = strip.min(rows - first);
                    let widest = seen(first + height - 1);
                    if widest == 0 {
                        continue; // and so for all tiles of keys to come
                    }
                    let (weight, dscore) = (weights.add(first * TILE), dscores.add(first * TILE));
                    let columns = widest.next_multiple_of(S::LANES);
                    let into = Target { data: weight, stride: TILE, add: false };
                    let a = Operand::strip(query_strips.add(first * head_dim), height);
                    gemm::<S>(height, columns, head_dim, a, keys_t.add(tile_at), TILE, into);
                    let into = Target { data: dscore, stride: TILE, add: false };
                    let a = Operand::strip(dout_strips.add(first * head_dim), height);
                    gemm::<S>(height, columns, head_dim, a, values_t.add(tile_at), TILE, into);
                    for row in 0..height {
                        let (lse, d) = stats[first + row];
                        for i in (columns..TILE).step_by(S::LANES) {
                            S::store(weight.add(row * TILE + i), S::splat(0.0));
                            S::store(dscore.add(row * TILE + i), S::splat(0.0));
                        }
                        for i in (0..columns).step_by(S::LANES) {
                            let n = seen(first + row).saturating_sub(i).min(S::LANES);
                            let at = row * TILE + i;
                            let p =
                                S::keep_n(exp::<S>(S::sub(S::load(weight.add(at)), S::splat(lse))), n, 0.0);
                            S::store(weight.add(at), p);
                            let ds = S::mul(p, S::sub(S::load(dscore.add(at)), S::splat(d)));
                            S::store(dscore.add(at), ds);
                        }
                        // What has left the row's window.
                        for key in 0..first_seen(first + row).saturating_sub(tile * TILE).min(columns) {
                            *weight.add(row * TILE + key) = 0.0;
                            *dscore.add(row * TILE + key) = 0.0;
                        }
                    }
                    let into = Target { data: dqueries.add(first * head_dim), stride: head_dim, add: true };
                    let keys = key_rows.add(tile_at);
                    gemm::<S>(height, head_dim, widest, Operand::rows(dscore), keys, head_dim, into);
                }
                for first in (0..seen(rows - 1)).step_by(strip) {
                    // Earlier strips of rows see none of these keys.
                    let height = strip.min(seen(rows - 1) - first);
                    let sees = |&row: &usize| seen((row + strip).min(rows) - 1) > first;
                    let from = (0..rows).step_by(strip).find(sees).unwrap_or(0);
                    let (left, count) = (from * TILE + first, rows - from);
                    let key_row = row_of(tile * TILE + first);
                    let into = Target { data: job.dqkv.at(key_row + value_column), stride: width, add: true };
                    let a = Operand::columns(weights.add(left));
                    gemm::<S>(height, head_dim, count, a, douts.add(from * head_dim), head_dim, into);
                    let into = Target { data: job.dqkv.at(key_row + key_column), stride: width, add: true };
                    let a = Operand::columns(dscores.add(left));
                    gemm::<S>(height, head_dim, count, a, queries.add(from * head_dim), head_dim, into);
                }
            }

            for row in 0..rows {
                let to = job.dqkv.at(query_at(row));
                for d in (0..head_dim).step_by(S::LANES) {
                    let n = S::LANES.min(head_dim - d);
                    S::store_n(
                        to.add(d),
                        S::mul(S::load_n(dqueries.add(row * head_dim + d), n), S::splat(scale)),
                        n,
                    );
                }
            }
        }
    }
}

/// Rows of `head_dim` values, `stride` apart, as `[tile][head_dim][TILE]`; rows past the end are zero.
#[inline(always)]
unsafe fn transpose_tiles<S: Simd>(
    from: *const f32,
    stride: usize,
    rows: usize,
    head_dim: usize,
    to: *mut f32,
) {
    let whole = head_dim / S::LANES * S::LANES;
    // SAFETY: the caller gives the rows and workspace for whole tiles.
    unsafe {
        let full = rows / TILE * TILE;
        if rows > full {
            to.add(full * head_dim).write_bytes(0, head_dim * TILE);
        }
        for first in (0..rows).step_by(S::LANES) {
            let n = S::LANES.min(rows - first);
            let from = from.add(first * stride);
            let to = to.add(first / TILE * TILE * head_dim + first % TILE);
            for d in (0..whole).step_by(S::LANES) {
                S::transpose(from.add(d).cast(), stride, n, to.add(d * TILE).cast(), TILE);
            }
            for d in whole..head_dim {
                for row in 0..n {
                    *to.add(d * TILE + row) = *from.add(row * stride + d);
                }
            }
        }
    }
}

/// The left operand of a GEMM: at most a strip high.
#[derive(Clone, Copy)]
struct Operand {
    data: *const f32,
    /// Whether the rows are neighbours (else they are TILE apart).
    packed: bool,
    /// Distance along the summed dimension.
    step: usize,
}

impl Operand {
    /// A strip `[k][rows]`.
    fn strip(data: *const f32, rows: usize) -> Operand {
        Operand { data, packed: true, step: rows }
    }

    /// Rows of a tile, summed along the row.
    fn rows(data: *const f32) -> Operand {
        Operand { data, packed: false, step: 1 }
    }

    /// Columns of a tile, summed down the rows: a transposed operand.
    fn columns(data: *const f32) -> Operand {
        Operand { data, packed: true, step: TILE }
    }
}

/// Where a GEMM goes.
#[derive(Clone, Copy)]
struct Target {
    data: *mut f32,
    stride: usize,
    add: bool,
}

/// `C[m, n] (+)= A[m, k] B[k, n]`, B with rows `ldb` apart.
#[inline(always)]
unsafe fn gemm<S: Simd>(m: usize, n: usize, k: usize, a: Operand, b: *const f32, ldb: usize, c: Target) {
    for column in (0..n).step_by(4 * S::LANES) {
        let vectors = (n - column).div_ceil(S::LANES).min(4);
        macro_rules! one_tile {
            ($r:literal, $v:literal,) => {
                if a.packed {
                    tile_gemm::<S, $r, $v, 1>(n, column, k, a, b, ldb, c)
                } else {
                    tile_gemm::<S, $r, $v, TILE>(n, column, k, a, b, ldb, c)
                }
            };
        }
        // SAFETY: the caller gives operands of the stated shape.
        unsafe { by_tile!(S, m, vectors, one_tile!()) }
    }
}

#[inline(always)]
unsafe fn tile_gemm<S: Simd, const R: usize, const V: usize, const A_ROW: usize>(
    n: usize,
    column: usize,
    k: usize,
    a: Operand,
    b: *const f32,
    ldb: usize,
    c: Target,
) {
    let l = S::LANES;
    // SAFETY: the caller gives operands of the stated shape; a partly filled last vector is masked.
    unsafe {
        let last = (n - column).min(V * l) - (V - 1) * l;
        let lanes: [usize; V] = std::array::from_fn(|v| if v == V - 1 { last } else { l });
        let (b, c_data) = (b.add(column), c.data.add(column));
        let mut acc = [[S::splat(0.0); V]; R];
        if c.add {
            for (r, acc) in acc.iter_mut().enumerate() {
                for v in 0..V {
                    acc[v] = S::load_n(c_data.add(r * c.stride + v * l), lanes[v]);
                }
            }
        }
        if last == l {
            multiply::<S, R, V, A_ROW>(
                k,
                a.data,
                a.step,
                std::array::from_fn(|v| b.add(v * l)),
                ldb,
                &mut acc,
            );
        } else {
            for i in 0..k {
                for v in 0..V {
                    let row = S::load_n(b.add(i * ldb + v * l), lanes[v]);
                    for (r, acc) in acc.iter_mut().enumerate() {
                        acc[v] = S::fma(S::splat(*a.data.add(r * A_ROW + i * a.step)), row, acc[v]);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for v in 0..V {
                S::store_n(c_data.add(r * c.stride + v * l), acc[v], lanes[v]);
            }
        }
    }
}
