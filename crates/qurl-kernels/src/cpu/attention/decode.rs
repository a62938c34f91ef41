//! Attention of one new token: all rows (the query heads of a group) see the same keys.
//!
//! A decode step of a small model spends most of its time here, on some thousand keys a task, so nothing but
//! the sums is left in the loops: the number of rows is a constant, and every number of rows is a function of
//! its own, because one that has them all keeps its addresses on the stack. The steps are those of the
//! general kernel, in the same order: the same bits.

use super::{BLOCKS, Job, RowState, TILE, Workspace, pack_strips, softmax_tile, softmax_whole};
use crate::cpu::kv::{Element, KEY_BLOCK, Pair};
use crate::cpu::level::Level;
use crate::cpu::simd::{Simd, simd_dispatch};
use crate::types::Span;

/// Most rows of a task.
pub(super) const MAX_ROWS: usize = 8;

/// Runs the rows of a span of one token and one key/value head. `next` is what this thread will attend to
/// next.
///
/// # Safety
/// As for the general kernel; the span has one row, the group at most [`MAX_ROWS`], and heads are whole
/// vectors.
pub(super) unsafe fn rows(
    level: Level,
    job: &Job,
    span: &Span,
    head: usize,
    next: Option<(&Span, usize)>,
    workspace: *mut Workspace,
) {
    macro_rules! call {
        ($($rows:literal $float:ident $pair:ident)*) => {
            match (job.heads.group(), job.kv.is_bf16()) {
                $(($rows, false) => $float(level, job, span, head, next, workspace),
                ($rows, true) => $pair(level, job, span, head, next, workspace),)*
                (rows, _) => unreachable!("{rows} rows in a task of one token"),
            }
        };
    }
    // SAFETY: the caller's promise.
    unsafe {
        call!(
            1 f32_1 pair_1 2 f32_2 pair_2 3 f32_3 pair_3 4 f32_4 pair_4
            5 f32_5 pair_5 6 f32_6 pair_6 7 f32_7 pair_7 8 f32_8 pair_8
        )
    }
}

/// A function for a number of rows and a kind of element.
macro_rules! decode {
    ($($name:ident $generic:ident $element:ty, $rows:literal;)*) => {
        $(
            simd_dispatch!(
                plain fn $name(
                    job: &Job, span: &Span, head: usize, next: Option<(&Span, usize)>,
                    workspace: *mut Workspace
                ) = $generic
            );

            #[inline(always)]
            unsafe fn $generic<S: Simd>(
                job: &Job,
                span: &Span,
                head: usize,
                next: Option<(&Span, usize)>,
                workspace: *mut Workspace,
            ) {
                // SAFETY: the caller's promise.
                unsafe { decode_at::<S, $element, $rows>(job, span, head, next, workspace) }
            }
        )*
    };
}

decode! {
    f32_1 f32_1_at f32, 1;
    f32_2 f32_2_at f32, 2;
    f32_3 f32_3_at f32, 3;
    f32_4 f32_4_at f32, 4;
    f32_5 f32_5_at f32, 5;
    f32_6 f32_6_at f32, 6;
    f32_7 f32_7_at f32, 7;
    f32_8 f32_8_at f32, 8;
    pair_1 pair_1_at Pair, 1;
    pair_2 pair_2_at Pair, 2;
    pair_3 pair_3_at Pair, 3;
    pair_4 pair_4_at Pair, 4;
    pair_5 pair_5_at Pair, 5;
    pair_6 pair_6_at Pair, 6;
    pair_7 pair_7_at Pair, 7;
    pair_8 pair_8_at Pair, 8;
}

#[inline(always)]
unsafe fn decode_at<S: Simd, E: Element, const R: usize>(
    job: &Job,
    span: &Span,
    head: usize,
    next: Option<(&Span, usize)>,
    workspace: *mut Workspace,
) {
    let (head_dim, keys) = (job.heads.head_dim, span.position + 1);
    // SAFETY: `Workspace` holds the rows and all columns; everything is written before it is read.
    unsafe {
        let queries: *mut f32 = (&raw mut (*workspace).queries).cast();
        let scores: *mut f32 = (&raw mut (*workspace).scores).cast();
        let sums: *mut f32 = (&raw mut (*workspace).sums).cast();
        let blocks: *mut f32 = (&raw mut (*workspace).blocks).cast();
        let from = job.qkv.as_ptr().add(span.row * job.heads.qkv_width() + head * R * head_dim);
        pack_strips::<S>(R, head_dim, job.heads.scale, R, |row| from.add(row * head_dim), queries);
        let mut state = [RowState::NEW; R];
        for tile in (0..keys).step_by(TILE) {
            let count = TILE.min(keys - tile);
            let used = count.div_ceil(KEY_BLOCK);
            let ahead = job.ahead((span, head), next, tile, keys);
            let (mut key_blocks, mut value_blocks) = ([Block::NONE; BLOCKS], [Block::NONE; BLOCKS]);
            for block in 0..used {
                let (page, slot) = job.place(span, tile + block * KEY_BLOCK);
                let into = blocks.add(block * 2 * KEY_BLOCK * head_dim);
                let (key, value) = E::block::<S>(job.kv, page, head, slot, into);
                let (mut key_ahead, mut value_ahead) = (key, value);
                if let Some((span, head, tile)) = ahead {
                    let at = (tile + block * KEY_BLOCK).min(span.position);
                    let (page, slot) = job.place(span, at);
                    match E::in_store(job.kv, page, head, slot) {
                        Some(stored) => (key_ahead, value_ahead) = stored,
                        None => job.kv.prefetch::<S>(page, head, slot),
                    }
                }
                key_blocks[block] = Block { here: key, ahead: key_ahead };
                value_blocks[block] = Block { here: value, ahead: value_ahead };
            }
            let vectors = count.div_ceil(S::LANES);
            let mut first = 0;
            while first < vectors {
                // Few rows leave registers for four vectors of keys at a time.
                let done = match vectors - first {
                    4.. if const { R <= 6 } => {
                        score::<S, E, R, 4>(head_dim, queries, &key_blocks, first, scores)
                    }
                    2.. => score::<S, E, R, 2>(head_dim, queries, &key_blocks, first, scores),
                    _ => score::<S, E, R, 1>(head_dim, queries, &key_blocks, first, scores),
                };
                first += done;
            }
            if count == TILE {
                softmax_whole::<S, R>(scores, state.as_mut_ptr());
            } else {
                for (row, state) in state.iter_mut().enumerate() {
                    softmax_tile::<S>(scores.add(row * TILE), count, count, state);
                }
            }
            let mut column = 0;
            while column < head_dim {
                let begin = tile == 0;
                let done = match (head_dim - column) / S::LANES {
                    4.. if const { R <= 6 } => weigh::<S, E, R, 4>(
                        scores,
                        &value_blocks,
                        count,
                        head_dim,
                        column,
                        &state,
                        begin,
                        sums,
                    ),
                    2.. => weigh::<S, E, R, 2>(
                        scores,
                        &value_blocks,
                        count,
                        head_dim,
                        column,
                        &state,
                        begin,
                        sums,
                    ),
                    _ => weigh::<S, E, R, 1>(
                        scores,
                        &value_blocks,
                        count,
                        head_dim,
                        column,
                        &state,
                        begin,
                        sums,
                    ),
                };
                column += done * S::LANES;
            }
        }
        let first = span.row * job.heads.heads + head * R;
        for (row, state) in state.iter().enumerate() {
            let inverse = S::splat(1.0 / state.total);
            for d in (0..head_dim).step_by(S::LANES) {
                let sum = S::load(sums.add(row * head_dim + d));
                S::store(job.out.at((first + row) * head_dim + d), S::mul(sum, inverse));
            }
            if let Some(lse) = &job.lse {
                *lse.at(first + row) = state.lse();
            }
        }
    }
}

/// Sixteen keys or values, and those that are prefetched meanwhile.
#[derive(Clone, Copy)]
struct Block<E> {
    here: *const E,
    ahead: *const E,
}

impl<E> Block<E> {
    const NONE: Block<E> = Block { here: std::ptr::null(), ahead: std::ptr::null() };
}

/// Scores of `V` vectors of keys from vector `first` on.
#[inline(always)]
unsafe fn score<S: Simd, E: Element, const R: usize, const V: usize>(
    head_dim: usize,
    queries: *const f32,
    blocks: &[Block<E>; BLOCKS],
    first: usize,
    scores: *mut f32,
) -> usize {
    // SAFETY: the caller gives packed queries, blocks of keys for all vectors, and rows of TILE scores.
    unsafe {
        let mut acc = [[S::splat(0.0); V]; R];
        let mut keys = [std::ptr::null::<E>(); V];
        let mut ahead = keys;
        for v in 0..V {
            let key = (first + v) * S::LANES;
            let block = &blocks[key / KEY_BLOCK];
            keys[v] = block.here.add(key % KEY_BLOCK);
            ahead[v] = block.ahead;
        }
        E::multiply::<S, R, V, 1>(head_dim, queries, R, keys, ahead, KEY_BLOCK, &mut acc);
        for (r, acc) in acc.iter().enumerate() {
            for (v, &acc) in acc.iter().enumerate() {
                S::store(scores.add(r * TILE + (first + v) * S::LANES), acc);
            }
        }
        V
    }
}

/// Adds the weighted values of a tile to `V` vectors of columns of the sums, or begins them.
#[inline(always)]
unsafe fn weigh<S: Simd, E: Element, const R: usize, const V: usize>(
    weights: *const f32,
    blocks: &[Block<E>; BLOCKS],
    count: usize,
    head_dim: usize,
    column: usize,
    state: &[RowState; R],
    begin: bool,
    sums: *mut f32,
) -> usize {
    // SAFETY: the caller gives rows of TILE weights, blocks of values for all keys, and rows of sums.
    unsafe {
        let mut acc = [[S::splat(0.0); V]; R];
        let sums = sums.add(column);
        if !begin {
            for (r, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = S::mul(S::load(sums.add(r * head_dim + v * S::LANES)), S::splat(state[r].rescale));
                }
            }
        }
        for (block, rows) in blocks.iter().enumerate().take(count.div_ceil(KEY_BLOCK)) {
            let n = (count - block * KEY_BLOCK).min(KEY_BLOCK);
            let mut values = [std::ptr::null::<E>(); V];
            let mut ahead = values;
            for v in 0..V {
                values[v] = rows.here.add(column + v * S::LANES);
                ahead[v] = rows.ahead.wrapping_add(column + v * S::LANES);
            }
            let weights = weights.add(block * KEY_BLOCK);
            E::multiply::<S, R, V, TILE>(n, weights, 1, values, ahead, head_dim, &mut acc);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (v, &acc) in acc.iter().enumerate() {
                S::store(sums.add(r * head_dim + v * S::LANES), acc);
            }
        }
        V
    }
}
