//! Causal grouped-query attention over paged keys and values: training, prefill and decode are this one
//! kernel.
//!
//! A task takes up to [`ROW_BLOCK`] query rows of one sequence and one key/value head (the query heads of a
//! group count as rows, they share the keys) and walks the keys in tiles of [`TILE`] positions with the
//! running softmax of flash attention. Scores never leave the cache, so memory is linear in the sequence
//! length.
//!
//! **Order of summation.** For one query row: a score is a chain over the head dimension, a tile is reduced
//! lane by lane in a fixed order, tiles follow positions, the weighted sum of values is a chain over
//! positions. None of that depends on the other rows of the task; masked keys add nothing. So decode gives
//! the bits of prefill. Tiles that a sliding window hides are left out; they begin at multiples of [`TILE`]
//! whatever the window.

mod decode;
mod int8;

use super::Context;
use super::buf::{Aligned, Parts};
use super::kv::{KEY_BLOCK, KvPages};
use super::simd::{MAX_LANES, Simd, exp, simd_dispatch};
use crate::types::{Heads, Span};
use std::cell::RefCell;

/// Query rows (queries times heads of a group) of one task.
pub(crate) const ROW_BLOCK: usize = 48;
/// Keys of one softmax tile.
pub(crate) const TILE: usize = 64;
/// How many tiles ahead keys and values are prefetched.
const AHEAD: usize = 2;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = Heads::MAX_DIM;
const BLOCKS: usize = TILE / KEY_BLOCK;

/// `out[rows, heads * head_dim]` from queries in the first columns of `qkv[rows, qkv_width]` and stored keys
/// and values; `lse[rows, heads]` takes the logarithm of the softmax denominators for the backward pass.
pub fn forward(
    ctx: &Context,
    heads: Heads,
    qkv: &[f32],
    kv: &KvPages,
    spans: &[Span],
    pages: &[u32],
    out: &mut [f32],
    lse: Option<&mut [f32]>,
) {
    let group = heads.group();
    let rows_end = spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0);
    assert!(heads.head_dim <= MAX_HEAD_DIM && heads.heads == group * heads.kv_heads, "attention: {heads:?}");
    assert!(qkv.len() >= rows_end * heads.qkv_width(), "attention: queries");
    assert!(out.len() >= rows_end * heads.heads * heads.head_dim, "attention: output");
    for span in spans {
        let last = (span.position + span.rows).div_ceil(kv.page_size());
        let table = &pages[span.pages..span.pages + last];
        assert!(table.iter().all(|&p| (p as usize) < kv.pages()), "attention: page out of range");
    }
    let lse = lse.map(|lse| {
        assert!(lse.len() >= rows_end * heads.heads, "attention: lse");
        Parts::new(lse)
    });
    let mut tasks = Vec::new();
    for (span, s) in spans.iter().enumerate() {
        for head in 0..heads.kv_heads {
            tasks.extend((0..s.rows * group).step_by(ROW_BLOCK).map(|start| (span, head, start)));
        }
    }
    let job = Job { heads, qkv, kv, pages, out: Parts::new(out), lse };
    let decodes = group <= decode::MAX_ROWS && heads.head_dim.is_multiple_of(ctx.panel() / 2);
    let grouped = (tasks.len() / (ctx.pool.threads() * 8)).max(1);
    ctx.pool.for_runs(tasks.len(), grouped, 2, &|range| {
        let tasks = &tasks[range];
        for (t, &(span, head, start)) in tasks.iter().enumerate() {
            let next = tasks.get(t + 1).map(|&(span, head, _)| (&spans[span], head));
            let span = &spans[span];
            WORKSPACE.with_borrow_mut(|workspace| {
                let workspace = workspace.as_mut_ptr().cast();
                // SAFETY: the level was detected; shapes were checked; a task owns its rows and heads of the
                // output, and this thread its workspace.
                unsafe {
                    // Rows whose window hides keys go through the general kernel, which leaves them out one
                    // by one.
                    let whole = heads.first_seen(span.position) == 0;
                    if kv.is_int8() {
                        return int8::rows(ctx.level, &job, span, head, start, next, workspace);
                    }
                    match span.rows == 1 && decodes && whole {
                        true => decode::rows(ctx.level, &job, span, head, next, workspace),
                        false => row_block(ctx.level, &job, span, head, start, next, workspace),
                    }
                }
            });
        }
    });
}

struct Job<'a> {
    heads: Heads,
    qkv: &'a [f32],
    kv: &'a KvPages,
    pages: &'a [u32],
    out: Parts<f32>,
    lse: Option<Parts<f32>>,
}

impl Job<'_> {
    /// Prefetches the sixteen keys and values from position `at` on, if the span sees them.
    #[inline(always)]
    unsafe fn prefetch<S: Simd>(&self, span: &Span, head: usize, at: usize) {
        if at < span.position + span.rows {
            let (page, slot) = self.place(span, at);
            // SAFETY: the caller has the instructions of S.
            unsafe { self.kv.prefetch::<S>(page, head, slot) }
        }
    }

    /// The tile that is [`AHEAD`] tiles after `tile` of `keys` keys: of what is attended to now or `next`.
    /// Pages are scattered in memory, so no hardware guesses where it lies.
    #[inline(always)]
    fn ahead<'s>(
        &self,
        now: (&'s Span, usize),
        next: Option<(&'s Span, usize)>,
        tile: usize,
        keys: usize,
    ) -> Option<(&'s Span, usize, usize)> {
        let later = tile + AHEAD * TILE;
        if later < keys {
            return Some((now.0, now.1, later));
        }
        let (span, head) = next?;
        let later = later - keys.next_multiple_of(TILE);
        (later < span.position + span.rows).then_some((span, head, later))
    }

    /// Page and slot of a position.
    #[inline(always)]
    fn place(&self, span: &Span, position: usize) -> (usize, usize) {
        let (page, slot) = self.entry(span, position);
        (self.pages[page] as usize, slot)
    }

    /// Place in the table of pages and slot of a position.
    #[inline(always)]
    fn entry(&self, span: &Span, position: usize) -> (usize, usize) {
        // 32 bits are divided faster.
        let (position, page_size) = (position as u32, self.kv.page_size() as u32);
        (span.pages + (position / page_size) as usize, (position % page_size) as usize)
    }
}

/// `acc[r][v] += sum_k a[r * A_ROW + k * a_step] * b[v][k * b_step ..]`, each sum one chain over k.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, const R: usize, const V: usize, const A_ROW: usize>(
    k: usize,
    a: *const f32,
    a_step: usize,
    b: [*const f32; V],
    b_step: usize,
    acc: &mut [[S::V; V]; R],
) {
    // SAFETY: the caller gives operands of the stated shape.
    unsafe {
        for i in 0..k {
            let row = b.map(|b| S::load(b.add(i * b_step)));
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = S::splat(*a.add(r * A_ROW + i * a_step));
                for v in 0..V {
                    acc[v] = S::fma(x, row[v], acc[v]);
                }
            }
        }
    }
}

/// Expands the body for every height of a strip and every number of vectors, as constants. Heights that the
/// level does not use are not compiled.
macro_rules! by_tile {
    ($S:ident, $rows:expr, $vectors:expr, $body:ident ! ($($arg:tt)*)) => {
        match $rows {
            1 => by_tile!(@vectors $S, 1, $vectors, $body!($($arg)*)),
            2 => by_tile!(@vectors $S, 2, $vectors, $body!($($arg)*)),
            3 => by_tile!(@vectors $S, 3, $vectors, $body!($($arg)*)),
            4 => by_tile!(@vectors $S, 4, $vectors, $body!($($arg)*)),
            5 => by_tile!(@vectors $S, 5, $vectors, $body!($($arg)*)),
            6 => by_tile!(@vectors $S, 6, $vectors, $body!($($arg)*)),
            _ => unreachable!(),
        }
    };
    (@vectors $S:ident, $r:literal, $vectors:expr, $body:ident ! ($($arg:tt)*)) => {
        if const { $r <= $S::MR / 2 } {
            match $vectors {
                1 => $body!($r, 1, $($arg)*),
                2 => $body!($r, 2, $($arg)*),
                3 => $body!($r, 3, $($arg)*),
                4 => $body!($r, 4, $($arg)*),
                _ => unreachable!(),
            }
        } else {
            unreachable!()
        }
    };
}
pub(crate) use by_tile;

/// Rows of a register tile with four vectors of columns.
#[inline(always)]
pub(crate) const fn strip_rows<S: Simd>() -> usize {
    S::MR / 2
}

/// Copies rows into strips `[strip][d][rows of strip]`, times a factor; row `i` is read from `row_of(i)`.
/// Strips have at most as many rows as a vector lanes.
#[inline(always)]
pub(crate) unsafe fn pack_strips<S: Simd>(
    rows: usize,
    head_dim: usize,
    factor: f32,
    strip: usize,
    row_of: impl Fn(usize) -> *const f32,
    to: *mut f32,
) {
    let whole = head_dim / S::LANES * S::LANES;
    // SAFETY: the caller gives rows of head_dim values and workspace for all.
    unsafe {
        for first in (0..rows).step_by(strip) {
            let (width, to) = (strip.min(rows - first), to.add(first * head_dim));
            for d in (0..whole).step_by(S::LANES) {
                let mut square = std::mem::MaybeUninit::<[[u32; MAX_LANES]; MAX_LANES]>::uninit();
                let square: *mut u32 = square.as_mut_ptr().cast();
                for row in 0..width {
                    let scaled = S::mul(S::load(row_of(first + row).add(d)), S::splat(factor));
                    S::store(square.add(row * MAX_LANES).cast(), scaled);
                }
                S::transpose(square, MAX_LANES, width, to.add(d * width).cast(), width);
            }
            for row in 0..width {
                let from = row_of(first + row);
                for d in whole..head_dim {
                    *to.add(d * width + row) = *from.add(d) * factor;
                }
            }
        }
    }
}

simd_dispatch!(
    plain fn row_block(
        job: &Job, span: &Span, head: usize, start: usize, next: Option<(&Span, usize)>,
        workspace: *mut Workspace
    ) = row_block_at
);

/// `next` is what this thread will attend to next: its first keys are prefetched while the last ones here are
/// at work.
#[inline(always)]
unsafe fn row_block_at<S: Simd>(
    job: &Job,
    span: &Span,
    head: usize,
    start: usize,
    next: Option<(&Span, usize)>,
    workspace: *mut Workspace,
) {
    let Heads { head_dim, .. } = job.heads;
    let group = job.heads.group();
    let rows = ROW_BLOCK.min(span.rows * group - start);
    let strip = strip_rows::<S>();
    let position = |row: usize| span.position + (start + row) / group;
    // Column block of the query head of a row, and its row in the batch.
    let head_of = |row: usize| head * group + (start + row) % group;
    let batch_row = |row: usize| span.row + (start + row) / group;

    // SAFETY: `Workspace` holds ROW_BLOCK rows and MAX_HEAD_DIM columns; everything is written before it is
    // read.
    unsafe {
        let queries: *mut f32 = (&raw mut (*workspace).queries).cast();
        let scores: *mut f32 = (&raw mut (*workspace).scores).cast();
        let sums: *mut f32 = (&raw mut (*workspace).sums).cast();
        let blocks: *mut f32 = (&raw mut (*workspace).blocks).cast();
        let mut state = [RowState::NEW; ROW_BLOCK];
        let width = job.heads.qkv_width();
        let query = |row: usize| job.qkv.as_ptr().add(batch_row(row) * width + head_of(row) * head_dim);
        pack_strips::<S>(rows, head_dim, job.heads.scale, strip, query, queries);
        std::ptr::write_bytes(sums, 0, rows * head_dim);

        let keys = position(rows - 1) + 1;
        let first_seen = |row: usize| job.heads.first_seen(position(row));
        for tile in (first_seen(0) / TILE * TILE..keys).step_by(TILE) {
            let count = TILE.min(keys - tile);
            // Pages are scattered in memory, so no hardware guesses where the next tile lies.
            let ahead = match next {
                _ if tile + TILE < keys => Some((span, head, tile + TILE)),
                Some((span, head)) => Some((span, head, 0)),
                None => None,
            };
            let mut key_blocks = [std::ptr::null::<f32>(); BLOCKS];
            let mut value_blocks = [std::ptr::null::<f32>(); BLOCKS];
            for block in 0..BLOCKS {
                if block * KEY_BLOCK >= count {
                    // Past the last key the first block stands in; its scores are masked.
                    (key_blocks[block], value_blocks[block]) = (key_blocks[0], value_blocks[0]);
                    continue;
                }
                if let Some((span, head, tile)) = ahead {
                    job.prefetch::<S>(span, head, tile + block * KEY_BLOCK);
                }
                let (page, slot) = job.place(span, tile + block * KEY_BLOCK);
                let into = blocks.add(block * 2 * KEY_BLOCK * head_dim);
                (key_blocks[block], value_blocks[block]) = job.kv.block::<S>(page, head, slot, into);
            }
            let key_vector = |v: usize| key_blocks[v * S::LANES / KEY_BLOCK].add(v * S::LANES % KEY_BLOCK);
            for first in (0..rows).step_by(strip) {
                let height = strip.min(rows - first);
                // Keys that some row of the strip sees; the rest of the tile is not touched.
                let seen = |row: usize| (position(row) + 1).saturating_sub(tile).min(TILE);
                let widest = seen(first + height - 1);
                // Keys at the beginning of the tile that have left a row's window, which moves on from row to
                // row.
                let hidden = |row: usize| first_seen(row).saturating_sub(tile).min(TILE);
                if widest == 0 || hidden(first) == TILE {
                    continue;
                }
                let (query, score) = (queries.add(first * head_dim), scores.add(first * TILE));
                for v in (0..widest.div_ceil(S::LANES)).step_by(4) {
                    let vectors = (widest.div_ceil(S::LANES) - v).min(4);
                    macro_rules! score_keys {
                        ($r:literal, $v:literal,) => {{
                            let mut acc = [[S::splat(0.0); $v]; $r];
                            let b: [*const f32; $v] = std::array::from_fn(|i| key_vector(v + i));
                            multiply::<S, $r, $v, 1>(head_dim, query, $r, b, KEY_BLOCK, &mut acc);
                            for (r, acc) in acc.iter().enumerate() {
                                for (i, &acc) in acc.iter().enumerate() {
                                    S::store(score.add(r * TILE + (v + i) * S::LANES), acc);
                                }
                            }
                        }};
                    }
                    by_tile!(S, height, vectors, score_keys!());
                }
                for (row, state) in state.iter_mut().enumerate().skip(first).take(height) {
                    let hidden = hidden(row);
                    if hidden >= seen(row) {
                        state.rescale = 1.0; // it sees nothing of this tile
                        continue;
                    }
                    (0..hidden).for_each(|key| *scores.add(row * TILE + key) = f32::NEG_INFINITY);
                    softmax_tile::<S>(scores.add(row * TILE), seen(row), widest, state);
                }
                // First the keys that all rows of the strip see, then the few that only the later rows see: a
                // masked value is not even multiplied with zero, because one that is not finite must not
                // reach earlier rows.
                let whole = hidden(first + height - 1) == 0;
                let (sum, common) = (sums.add(first * head_dim), if whole { seen(first) } else { 0 });
                for column in (0..head_dim).step_by(4 * S::LANES) {
                    let vectors = (head_dim - column).div_ceil(S::LANES).min(4);
                    macro_rules! weigh {
                        ($r:literal, $v:literal,) => {{
                            let rescale: [f32; $r] = std::array::from_fn(|r| state[first + r].rescale);
                            weigh_values::<S, $r, $v>(
                                score,
                                value_blocks,
                                common,
                                head_dim,
                                column,
                                rescale,
                                sum,
                            )
                        }};
                    }
                    by_tile!(S, height, vectors, weigh!());
                }
                for row in first..first + height {
                    let (weights, sums) = (scores.add(row * TILE), sums.add(row * head_dim));
                    add_values::<S>(
                        weights,
                        value_blocks,
                        common.max(hidden(row))..seen(row),
                        head_dim,
                        sums,
                    );
                }
            }
        }

        for (row, state) in state.iter().enumerate().take(rows) {
            let out = job.out.at(batch_row(row) * job.heads.heads * head_dim + head_of(row) * head_dim);
            let inverse = S::splat(1.0 / state.total);
            for d in (0..head_dim).step_by(S::LANES) {
                let n = S::LANES.min(head_dim - d);
                S::store_n(out.add(d), S::mul(S::load_n(sums.add(row * head_dim + d), n), inverse), n);
            }
            if let Some(lse) = &job.lse {
                *lse.at(batch_row(row) * job.heads.heads + head_of(row)) = state.lse();
            }
        }
    }
}

/// The running softmax of one row.
#[derive(Clone, Copy)]
struct RowState {
    largest: f32,
    total: f32,
    /// What the weighted values summed so far must be multiplied with for the new largest score.
    rescale: f32,
}

impl RowState {
    const NEW: RowState = RowState { largest: f32::NEG_INFINITY, total: 0.0, rescale: 1.0 };

    /// Takes the largest score of a tile into account.
    #[inline(always)]
    unsafe fn raise<S: Simd>(&mut self, of_tile: f32) {
        // Not `f32::max`, which would drop a NaN.
        let largest = if of_tile < self.largest { self.largest } else { of_tile };
        let difference = self.largest - largest;
        // Before the first tile there is nothing to rescale.
        let keeps = difference == 0.0 || self.largest == f32::NEG_INFINITY;
        // SAFETY: the caller has the instructions of S.
        self.rescale = if keeps { 1.0 } else { unsafe { exp_one::<S>(difference) } };
        self.largest = largest;
    }

    /// Logarithm of the denominator.
    fn lse(&self) -> f32 {
        self.largest + self.total.ln()
    }
}

/// Turns the first `seen` of `widest` scores into weights `e^(score - largest)`, the others into zeros.
#[inline(always)]
unsafe fn softmax_tile<S: Simd>(scores: *mut f32, seen: usize, widest: usize, state: &mut RowState) {
    let whole = seen / S::LANES * S::LANES;
    // SAFETY: a row of TILE scores.
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for i in (0..whole).step_by(S::LANES) {
            largest = S::max(largest, S::load(scores.add(i)));
        }
        for i in (whole..widest).step_by(S::LANES) {
            let n = seen.saturating_sub(i).min(S::LANES);
            largest = S::max(largest, S::keep_n(S::load(scores.add(i)), n, f32::NEG_INFINITY));
        }
        state.raise::<S>(S::largest(largest));
        let largest = state.largest;
        let mut total = S::splat(0.0);
        for i in (0..whole).step_by(S::LANES) {
            let v = exp::<S>(S::sub(S::load(scores.add(i)), S::splat(largest)));
            S::store(scores.add(i), v);
            total = S::add(total, v);
        }
        for i in (whole..widest).step_by(S::LANES) {
            let n = seen.saturating_sub(i).min(S::LANES);
            let v = S::keep_n(exp::<S>(S::sub(S::load(scores.add(i)), S::splat(largest))), n, 0.0);
            S::store(scores.add(i), v);
            total = S::add(total, v);
        }
        state.total = state.total * state.rescale + S::sum(total);
    }
}

/// [`softmax_tile`] of `R` rows that see the whole tile, with the same bits: every step is done for all rows
/// before the next one, so that a row does not wait for its own reductions.
#[inline(always)]
unsafe fn softmax_whole<S: Simd, const R: usize>(scores: *mut f32, state: *mut RowState) {
    // SAFETY: the caller gives R rows of TILE scores and R states.
    unsafe {
        raise_whole::<S, R>(scores, state);
        let mut totals = [S::splat(0.0); R];
        for (row, total) in totals.iter_mut().enumerate() {
            let (scores, largest) = (scores.add(row * TILE), S::splat((*state.add(row)).largest));
            for i in (0..TILE).step_by(S::LANES) {
                let v = exp::<S>(S::sub(S::load(scores.add(i)), largest));
                S::store(scores.add(i), v);
                *total = S::add(*total, v);
            }
        }
        add_totals::<S, R>(&totals, state);
    }
}

/// Takes the largest scores of a whole tile into account.
#[inline(always)]
unsafe fn raise_whole<S: Simd, const R: usize>(scores: *const f32, state: *mut RowState) {
    // SAFETY: the caller gives R rows of TILE scores and R states.
    unsafe {
        let mut largest = [S::splat(f32::NEG_INFINITY); R];
        for (row, largest) in largest.iter_mut().enumerate() {
            for i in (0..TILE).step_by(S::LANES) {
                *largest = S::max(*largest, S::load(scores.add(row * TILE + i)));
            }
        }
        for (row, &largest) in largest.iter().enumerate() {
            let state = &mut *state.add(row);
            state.raise::<S>(S::largest(largest));
        }
    }
}

/// Adds the weights of a tile, summed lane by lane, to the denominators.
#[inline(always)]
unsafe fn add_totals<S: Simd, const R: usize>(totals: &[S::V; R], state: *mut RowState) {
    for (row, &total) in totals.iter().enumerate() {
        // SAFETY: the caller gives R states.
        unsafe {
            let state = &mut *state.add(row);
            state.total = state.total * state.rescale + S::sum(total);
        }
    }
}

#[inline(always)]
unsafe fn exp_one<S: Simd>(x: f32) -> f32 {
    // SAFETY: register operations and one lane on the stack.
    unsafe {
        let mut y = 0.0f32;
        S::store_n(&raw mut y, exp::<S>(S::splat(x)), 1);
        y
    }
}

/// `sums[r][column..] = sums * rescale + sum over keys of weight[r][key] * value[key]`, V vectors of columns.
#[inline(always)]
unsafe fn weigh_values<S: Simd, const R: usize, const V: usize>(
    weights: *const f32,
    values: [*const f32; BLOCKS],
    count: usize,
    head_dim: usize,
    column: usize,
    rescale: [f32; R],
    sums: *mut f32,
) {
    // SAFETY: the caller gives R rows of weights and sums, and value blocks of 16 rows of head_dim.
    unsafe {
        // Only the last vector may be partly filled.
        let last = (head_dim - column).min(V * S::LANES) - (V - 1) * S::LANES;
        let lanes: [usize; V] = std::array::from_fn(|v| if v == V - 1 { last } else { S::LANES });
        let mut acc = [[S::splat(0.0); V]; R];
        for (r, acc) in acc.iter_mut().enumerate() {
            for v in 0..V {
                let from = sums.add(r * head_dim + column + v * S::LANES);
                acc[v] = S::mul(S::load_n(from, lanes[v]), S::splat(rescale[r]));
            }
        }
        for (block, &rows) in values.iter().enumerate().take(count.div_ceil(KEY_BLOCK)) {
            let n = (count - block * KEY_BLOCK).min(KEY_BLOCK);
            let weights = weights.add(block * KEY_BLOCK);
            if last == S::LANES {
                let b: [*const f32; V] = std::array::from_fn(|v| rows.add(column + v * S::LANES));
                multiply::<S, R, V, TILE>(n, weights, 1, b, head_dim, &mut acc);
            } else {
                for key in 0..n {
                    for v in 0..V {
                        let value = S::load_n(rows.add(key * head_dim + column + v * S::LANES), lanes[v]);
                        for (r, acc) in acc.iter_mut().enumerate() {
                            acc[v] = S::fma(S::splat(*weights.add(r * TILE + key)), value, acc[v]);
                        }
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for v in 0..V {
                S::store_n(sums.add(r * head_dim + column + v * S::LANES), acc[v], lanes[v]);
            }
        }
    }
}

/// `sums += sum over keys of weight[key] * value[key]` for one row.
#[inline(always)]
unsafe fn add_values<S: Simd>(
    weights: *const f32,
    values: [*const f32; BLOCKS],
    keys: std::ops::Range<usize>,
    head_dim: usize,
    sums: *mut f32,
) {
    for key in keys {
        // SAFETY: the caller gives a row of weights, one of sums, and value blocks of 16 rows of head_dim.
        unsafe {
            let weight = S::splat(*weights.add(key));
            let value = values[key / KEY_BLOCK].add(key % KEY_BLOCK * head_dim);
            for d in (0..head_dim).step_by(S::LANES) {
                let n = S::LANES.min(head_dim - d);
                S::store_n(
                    sums.add(d),
                    S::fma(weight, S::load_n(value.add(d), n), S::load_n(sums.add(d), n)),
                    n,
                );
            }
        }
    }
}

/// Working memory of a task.
#[repr(C, align(64))]
struct Workspace {
    queries: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    scores: [f32; ROW_BLOCK * TILE],
    sums: [f32; ROW_BLOCK * MAX_HEAD_DIM],
    blocks: [f32; BLOCKS * 2 * KEY_BLOCK * MAX_HEAD_DIM],
}

thread_local! {
    /// This thread's [`Workspace`], kept: so large a frame on the stack would be probed page by page in every
    /// call.
    static WORKSPACE: RefCell<Aligned<f32>> =
        RefCell::new(Aligned::zeros(size_of::<Workspace>() / size_of::<f32>()));
}
