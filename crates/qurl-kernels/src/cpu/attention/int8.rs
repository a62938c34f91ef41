//! Attention over int8 keys and values, in integers.
//!
//! The codes are never turned into f32. Queries are rounded to 16 bits with a scale a row, weights to 16 bits
//! with a scale a row and tile, and both are multiplied by the stored bytes in sums of 32 bits: twice the
//! products of an f32 instruction, nothing to convert but a byte to 16 bits, and exact, so that neither the
//! order nor the level matters. Rounding to 16 bits is two hundred times finer than that of the cache. What
//! is between the two products, the softmax, is f32 and that of the general kernel.
//!
//! A value's scale differs from token to token, so it is multiplied into the weight before that is rounded.
//! What a row does not see has a weight of zero, whatever lies there, since a code is always finite; so one
//! kernel serves decode, prefill and training.

use super::{BLOCKS, Job, ROW_BLOCK, RowState, TILE, Workspace, softmax_tile, softmax_whole};
use crate::cpu::kv::{Int8Block, KEY_BLOCK};
use crate::cpu::level::Level;
use crate::cpu::quant::{largest_bits, scale_of};
use crate::cpu::simd::{Simd, simd_dispatch};
use crate::types::Span;

/// Largest code of a query or a weight: no sum of 256 or fewer products with a byte leaves 32 bits.
const LARGEST: f32 = 32_767.0;

/// Runs some query rows of a span and one key/value head, from row `start` on (queries times heads of a
/// group). `next` is what this thread will attend to next.
///
/// # Safety
/// As for the general kernel; keys and values are int8.
pub(super) unsafe fn rows(
    level: Level,
    job: &Job,
    span: &Span,
    head: usize,
    start: usize,
    next: Option<(&Span, usize)>,
    workspace: *mut Workspace,
) {
    let (group, head_dim) = (job.heads.group(), job.heads.head_dim);
    let count = ROW_BLOCK.min(span.rows * group - start);
    let position = |row: usize| span.position + (start + row) / group;
    let first_seen = |row: usize| job.heads.first_seen(position(row));
    let key_dim = head_dim.next_multiple_of(4);
    let mut state = [RowState::NEW; ROW_BLOCK];
    let mut scales = [0.0f32; ROW_BLOCK];
    // SAFETY: `Workspace` holds the rows and all columns; everything is written before it is read.
    unsafe {
        let Parts { queries, scores, weights, sums } = Parts::of(workspace);
        for (row, scale) in scales.iter_mut().enumerate().take(count) {
            let (query, at) = ((start + row) / group, head * group + (start + row) % group);
            let from = (span.row + query) * job.heads.qkv_width() + at * head_dim;
            let codes = queries.add(row * key_dim);
            *scale = round(level, &job.qkv[from..from + head_dim], codes) * job.heads.scale;
        }
        std::ptr::write_bytes(sums, 0, count * head_dim);
        let keys = position(count - 1) + 1;
        let strip = strip_rows(level);
        for tile in (first_seen(0) / TILE * TILE..keys).step_by(TILE) {
            let blocks = Tile::find(job, span, head, tile, keys);
            let ahead = match job.ahead((span, head), next, tile, keys) {
                Some((span, head, tile)) => Tile::find(job, span, head, tile, span.position + span.rows),
                None => blocks,
            };
            for first in (0..count).step_by(strip) {
                let height = strip.min(count - first);
                let seen = |row: usize| (position(row) + 1).saturating_sub(tile).min(TILE);
                let hidden = |row: usize| first_seen(row).saturating_sub(tile).min(TILE);
                if seen(first + height - 1) == 0 || hidden(first) == TILE {
                    continue;
                }
                let mut sees = [(0, 0); MAX_ROWS];
                for (row, sees) in sees.iter_mut().enumerate().take(height) {
                    *sees = (hidden(first + row), seen(first + row));
                }
                let rows = Rows {
                    head_dim,
                    sees,
                    queries: queries.add(first * key_dim).cast(),
                    scales: &raw const scales[first],
                    state: &raw mut state[first],
                    scores: scores.add(first * TILE),
                    weights: weights.add(first * TILE),
                    sums: sums.add(first * head_dim),
                };
                attend(level, height, &rows, &blocks, if first == 0 { &ahead } else { &blocks });
            }
        }
        for (row, state) in state.iter().enumerate().take(count) {
            let (query, at) = ((start + row) / group, head * group + (start + row) % group);
            let to = (span.row + query) * job.heads.heads + at;
            finish(level, sums.add(row * head_dim), head_dim, state.total, job.out.at(to * head_dim));
            if let Some(lse) = &job.lse {
                *lse.at(to) = state.lse();
            }
        }
    }
}

/// The parts of the working memory.
struct Parts {
    /// `[rows][key_dim]`
    queries: *mut i16,
    /// `[rows][TILE]`
    scores: *mut f32,
    /// `[rows][TILE]`
    weights: *mut i16,
    /// `[rows][head_dim]`
    sums: *mut f32,
}

impl Parts {
    /// # Safety
    /// The workspace is the caller's.
    unsafe fn of(workspace: *mut Workspace) -> Parts {
        // SAFETY: the caller's promise; codes take half of what f32 would.
        unsafe {
            Parts {
                queries: (&raw mut (*workspace).queries).cast(),
                scores: (&raw mut (*workspace).scores).cast(),
                weights: (&raw mut (*workspace).blocks).cast(),
                sums: (&raw mut (*workspace).sums).cast(),
            }
        }
    }
}

/// A tile of keys and values; past the last key the first block stands in.
#[derive(Clone, Copy)]
struct Tile([Int8Block; BLOCKS]);

impl Tile {
    #[inline(always)]
    fn find(job: &Job, span: &Span, head: usize, tile: usize, keys: usize) -> Tile {
        let block = |block: usize| {
            let at = tile + block * KEY_BLOCK;
            let (page, slot) = job.place(span, if at < keys { at } else { tile });
            job.kv.int8_block(page, head, slot)
        };
        Tile([block(0), block(1), block(2), block(3)])
    }
}

/// Most rows of a strip.
const MAX_ROWS: usize = 12;

/// Rows of a strip: those of the register tile.
fn strip_rows(level: Level) -> usize {
    match level {
        Level::Scalar => 4,
        Level::Avx2 => 6,
        Level::Avx512 | Level::Avx512Bf16 => 12,
    }
}

/// A strip of rows.
struct Rows {
    head_dim: usize,
    /// Keys at the beginning of the tile that a row's window hides, and where those that it sees end.
    sees: [(usize, usize); MAX_ROWS],
    /// `[rows][key_dim / 2]`: words of two codes.
    queries: *const u32,
    /// What a query's codes stand for, times the factor on scores.
    scales: *const f32,
    state: *mut RowState,
    scores: *mut f32,
    weights: *mut i16,
    sums: *mut f32,
}

simd_dispatch!(
    plain fn round(values: &[f32], codes: *mut i16) -> f32 = round_at
);
simd_dispatch!(
    plain fn finish(sums: *const f32, len: usize, total: f32, out: *mut f32) = finish_at
);

/// Rounds numbers to 16 bits, pads them with zeros to whole words of four, and returns their scale.
#[inline(always)]
unsafe fn round_at<S: Simd>(values: &[f32], codes: *mut i16) -> f32 {
    // SAFETY: the buffer holds the numbers of the largest head; those of the last vector that are too many
    // are zeros, or belong to the next row, which is written later.
    unsafe {
        let scale = scale_of(largest_bits::<S>(values), LARGEST);
        let inverse = S::splat(1.0 / scale);
        for i in (0..values.len()).step_by(S::LANES) {
            let v = S::load_n(values.as_ptr().add(i), S::LANES.min(values.len() - i));
            S::store_i16(codes.add(i), S::mul(v, inverse));
        }
        scale
    }
}

/// `out = sums / total`
#[inline(always)]
unsafe fn finish_at<S: Simd>(sums: *const f32, len: usize, total: f32, out: *mut f32) {
    // SAFETY: the caller gives `len` numbers of each.
    unsafe {
        let inverse = S::splat(1.0 / total);
        for i in (0..len).step_by(S::LANES) {
            let n = S::LANES.min(len - i);
            S::store_n(out.add(i), S::mul(S::load_n(sums.add(i), n), inverse), n);
        }
    }
}

/// A function for every number of rows: one that has them all keeps its addresses on the stack.
macro_rules! by_rows {
    ($($rows:literal $name:ident $generic:ident;)*) => {
        /// Adds a tile to a strip of `height` rows and prefetches the one `ahead` meanwhile.
        ///
        /// # Safety
        /// The machine has the instructions of the level; the pointers are valid for the rows and the tile.
        #[inline(always)]
        unsafe fn attend(level: Level, height: usize, rows: &Rows, tile: &Tile, ahead: &Tile) {
            // SAFETY: the caller's promise.
            unsafe {
                match height {
                    $($rows => $name(level, rows, tile, ahead),)*
                    _ => unreachable!("{height} rows in a strip"),
                }
            }
        }

        $(
            simd_dispatch!(fn $name(rows: &Rows, tile: &Tile, ahead: &Tile) = $generic);

            #[inline(always)]
            unsafe fn $generic<S: Simd>(rows: &Rows, tile: &Tile, ahead: &Tile) {
                // SAFETY: the caller's promise. Heights that the level does not use are not compiled.
                unsafe {
                    if const { $rows <= S::MR } {
                        attend_at::<S, $rows>(rows, tile, ahead);
                    }
                }
            }
        )*
    };
}

by_rows! {
    1 attend_1 attend_1_at;
    2 attend_2 attend_2_at;
    3 attend_3 attend_3_at;
    4 attend_4 attend_4_at;
    5 attend_5 attend_5_at;
    6 attend_6 attend_6_at;
    7 attend_7 attend_7_at;
    8 attend_8 attend_8_at;
    9 attend_9 attend_9_at;
    10 attend_10 attend_10_at;
    11 attend_11 attend_11_at;
    12 attend_12 attend_12_at;
}

#[inline(always)]
unsafe fn attend_at<S: Simd, const R: usize>(rows: &Rows, tile: &Tile, ahead: &Tile) {
    let head_dim = rows.head_dim;
    let widest = rows.sees[R - 1].1;
    // SAFETY: the caller gives rows and a tile; of the last vector of columns only those of the head are
    // stored.
    unsafe {
        for block in &ahead.0 {
            S::prefetch_close(block.key_scales.cast());
            S::prefetch_close(block.value_scales.cast());
        }
        for key in (0..widest).step_by(2 * S::LANES) {
            score::<S, R>(rows, tile, ahead, key);
        }
        let mut factors = [0.0f32; R];
        // Rows follow positions: the first one sees the fewest keys, the last one's window hides the most.
        let whole = rows.sees[0].1 == TILE && rows.sees[R - 1].0 == 0;
        if whole {
            softmax_whole::<S, R>(rows.scores, rows.state);
            round_whole::<S, R>(rows, tile, &mut factors);
        }
        for (row, factor) in factors.iter_mut().enumerate().take(if whole { 0 } else { R }) {
            let (hidden, seen) = rows.sees[row];
            let (scores, state) = (rows.scores.add(row * TILE), &mut *rows.state.add(row));
            let weights = rows.weights.add(row * TILE);
            if hidden >= seen {
                // It sees nothing of this tile.
                std::ptr::write_bytes(weights, 0, TILE);
                continue;
            }
            (0..hidden).for_each(|key| *scores.add(key) = f32::NEG_INFINITY);
            softmax_tile::<S>(scores, seen, widest, state);
            *factor = round_weights::<S>(scores, (hidden, seen), widest, tile, weights);
        }
        let columns = head_dim.div_ceil(2 * S::LANES);
        for column in 0..columns {
            weigh::<S, R>(rows, tile, ahead, widest, column * 2 * S::LANES, &factors);
        }
    }
}

/// Scores of two vectors of keys from `key` on. What is loaded here is prefetched at the same place ahead,
/// line by line: all lines of a tile at once would hold up the multiplications.
#[inline(always)]
unsafe fn score<S: Simd, const R: usize>(rows: &Rows, tile: &Tile, ahead: &Tile, key: usize) {
    let words = rows.head_dim.div_ceil(4);
    // SAFETY: the caller gives rows and a tile whose keys are blocks of sixteen.
    unsafe {
        let next = key + S::LANES;
        let blocks = [&tile.0[key / KEY_BLOCK], &tile.0[next / KEY_BLOCK]];
        let places = [key % KEY_BLOCK, next % KEY_BLOCK];
        let (first, second) = (blocks[0].keys.add(places[0]), blocks[1].keys.add(places[1]));
        let ahead = [ahead.0[key / KEY_BLOCK].keys, ahead.0[next / KEY_BLOCK].keys];
        let mut acc = [[S::zero_i(); 2]; R];
        for word in 0..words {
            S::prefetch_close(ahead[0].wrapping_add(word * KEY_BLOCK).cast());
            S::prefetch_close(ahead[1].wrapping_add(word * KEY_BLOCK).cast());
            let first = S::widen_i8(S::load_i(first.add(word * KEY_BLOCK)));
            let second = S::widen_i8(S::load_i(second.add(word * KEY_BLOCK)));
            for half in 0..2 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let query = *rows.queries.add(r * 2 * words + 2 * word + half);
                    acc[0] = S::dot_i16(acc[0], query, first[half]);
                    acc[1] = S::dot_i16(acc[1], query, second[half]);
                }
            }
        }
        for v in 0..2 {
            let scales = S::load(blocks[v].key_scales.add(places[v]));
            for (r, acc) in acc.iter().enumerate() {
                let scale = S::mul(S::splat(*rows.scales.add(r)), scales);
                let score = S::mul(S::to_f32(acc[v]), scale);
                S::store(rows.scores.add(r * TILE + key + v * S::LANES), score);
            }
        }
    }
}

/// Multiplies the first `widest` weights of a row by the scales of their values, rounds them to 16 bits and
/// returns their scale; what the row does not see becomes zero.
#[inline(always)]
unsafe fn round_weights<S: Simd>(
    scores: *mut f32,
    (hidden, seen): (usize, usize),
    widest: usize,
    tile: &Tile,
    weights: *mut i16,
) -> f32 {
    // SAFETY: a row of TILE scores and one of TILE weights.
    unsafe {
        let mut largest = S::zero_i();
        for i in (0..widest).step_by(S::LANES) {
            let scales = S::load(tile.0[i / KEY_BLOCK].value_scales.add(i % KEY_BLOCK));
            let n = seen.saturating_sub(i).min(S::LANES);
            let mut v = S::keep_n(S::mul(S::load(scores.add(i)), scales), n, 0.0);
            if hidden > i {
                S::store(scores.add(i), v);
                (i..hidden.min(i + S::LANES)).for_each(|key| *scores.add(key) = 0.0);
                v = S::load(scores.add(i));
            }
            S::store(scores.add(i), v);
            largest = S::abs_max(largest, v);
        }
        let scale = scale_of(S::largest_i(largest), LARGEST);
        let inverse = S::splat(1.0 / scale);
        for i in (0..widest).step_by(S::LANES) {
            S::store_i16(weights.add(i), S::mul(S::load(scores.add(i)), inverse));
        }
        scale
    }
}

/// [`round_weights`] of rows that see the whole tile, with the same bits, every step for all rows.
#[inline(always)]
unsafe fn round_whole<S: Simd, const R: usize>(rows: &Rows, tile: &Tile, factors: &mut [f32; R]) {
    // SAFETY: R rows of TILE scores and of TILE weights.
    unsafe {
        let mut largest = [S::zero_i(); R];
        for i in (0..TILE).step_by(S::LANES) {
            let scales = S::load(tile.0[i / KEY_BLOCK].value_scales.add(i % KEY_BLOCK));
            for (row, largest) in largest.iter_mut().enumerate() {
                let at = rows.scores.add(row * TILE + i);
                let v = S::mul(S::load(at), scales);
                S::store(at, v);
                *largest = S::abs_max(*largest, v);
            }
        }
        for (factor, &largest) in factors.iter_mut().zip(&largest) {
            *factor = scale_of(S::largest_i(largest), LARGEST);
        }
        for (row, &factor) in factors.iter().enumerate() {
            let inverse = S::splat(1.0 / factor);
            for i in (row * TILE..(row + 1) * TILE).step_by(S::LANES) {
                S::store_i16(rows.weights.add(i), S::mul(S::load(rows.scores.add(i)), inverse));
            }
        }
    }
}

/// Adds the weighted values of the first `widest` keys to two vectors of columns of the sums.
#[inline(always)]
unsafe fn weigh<S: Simd, const R: usize>(
    rows: &Rows,
    tile: &Tile,
    ahead: &Tile,
    widest: usize,
    column: usize,
    factors: &[f32; R],
) {
    let head_dim = rows.head_dim;
    // SAFETY: the caller gives rows and a tile, whose last values are followed by a vector.
    unsafe {
        let weights = rows.weights.cast::<u32>().cast_const();
        let second = column + S::LANES < head_dim;
        let mut acc = [[S::zero_i(); 2]; R];
        for (block, values) in tile.0.iter().enumerate().take(widest.div_ceil(KEY_BLOCK)) {
            let (values, ahead) = (values.values.add(column), ahead.0[block].values.wrapping_add(column));
            let words = (widest - block * KEY_BLOCK).min(KEY_BLOCK).div_ceil(4);
            for word in 0..words {
                let values = values.add(word * head_dim);
                let next = if second { values.add(S::LANES) } else { values };
                S::prefetch_close(ahead.wrapping_add(word * head_dim).cast());
                S::prefetch_close(ahead.wrapping_add(word * head_dim + S::LANES).cast());
                let [first, second] = [S::widen_i8(S::load_i(values)), S::widen_i8(S::load_i(next))];
                for half in 0..2 {
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let at = r * TILE / 2 + block * KEY_BLOCK / 2 + 2 * word + half;
                        let weight = *weights.add(at);
                        acc[0] = S::dot_i16(acc[0], weight, first[half]);
                        acc[1] = S::dot_i16(acc[1], weight, second[half]);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            let (hidden, seen) = rows.sees[r];
            if hidden >= seen {
                continue;
            }
            let (rescale, factor) = (S::splat((*rows.state.add(r)).rescale), S::splat(factors[r]));
            for (v, &acc) in acc.iter().enumerate().take(1 + usize::from(second)) {
                let at = column + v * S::LANES;
                let (sums, n) = (rows.sums.add(r * head_dim + at), S::LANES.min(head_dim - at));
                let before = S::mul(S::load_n(sums, n), rescale);
                S::store_n(sums, S::fma(S::to_f32(acc), factor, before), n);
            }
        }
    }
}
