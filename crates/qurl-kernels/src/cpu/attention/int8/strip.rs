//! Some rows and a tile of int8 keys and values: what is done in registers.
//!
//! Products keep the units that multiply busy and nothing else, a softmax is a long chain of everything else.
//! So where a strip sees whole tiles, the exponentials of one tile are computed between the products of the
//! next one's scores: after as many words of keys as a row has vectors of scores, a row of weights is done.

use super::{LARGEST, Rows, Tile};
use crate::cpu::attention::{TILE, add_totals, raise_whole, softmax_tile};
use crate::cpu::kv::KEY_BLOCK;
use crate::cpu::level::Level;
use crate::cpu::quant::scale_of;
use crate::cpu::simd::{Simd, exp, simd_dispatch};

/// The tiles that a step has to do with.
pub(super) struct Tiles<'a> {
    /// The tile that is added.
    pub now: &'a Tile,
    /// Whether its scores are there.
    pub scored: bool,
    /// The next tile, if its scores are to be computed meanwhile: both are seen by all rows.
    pub after: Option<&'a Tile>,
    /// What is prefetched.
    pub ahead: &'a Tile,
}

/// A function for every number of rows: one that has them all keeps its addresses on the stack.
macro_rules! by_rows {
    ($($rows:literal $name:ident $generic:ident;)*) => {
        /// Adds a tile to a strip of `height` rows.
        ///
        /// # Safety
        /// The machine has the instructions of the level; the pointers are valid for the rows and the tiles.
        #[inline(always)]
        pub(super) unsafe fn attend(level: Level, height: usize, rows: &Rows, tiles: &Tiles) {
            // SAFETY: the caller's promise.
            unsafe {
                match height {
                    $($rows => $name(level, rows, tiles),)*
                    _ => unreachable!("{height} rows in a strip"),
                }
            }
        }

        $(
            simd_dispatch!(fn $name(rows: &Rows, tiles: &Tiles) = $generic);

            #[inline(always)]
            unsafe fn $generic<S: Simd>(rows: &Rows, tiles: &Tiles) {
                // SAFETY: the caller's promise. Heights that the level does not use are not compiled.
                unsafe {
                    if const { $rows <= S::MR } {
                        attend_at::<S, $rows>(rows, tiles);
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

/// Most rows whose weights are computed between products: the sums of more take all registers.
const MAX_MIXED: usize = 8;

#[inline(always)]
unsafe fn attend_at<S: Simd, const R: usize>(rows: &Rows, tiles: &Tiles) {
    let &Tiles { now, scored, after, ahead } = tiles;
    let widest = rows.sees[R - 1].1;
    // Rows follow positions: the first one sees the fewest keys, the last one's window hides the most.
    let whole = rows.sees[0].1 == TILE && rows.sees[R - 1].0 == 0;
    // SAFETY: the caller gives rows and tiles; of the last vector of columns only those of the head are
    // stored.
    unsafe {
        for block in &ahead.0 {
            S::prefetch_close(block.key_scales.cast());
            S::prefetch_close(block.value_scales.cast());
        }
        let mut weights = Weights {
            tile: now,
            done: 0,
            totals: [S::splat(0.0); R],
            largest: [S::zero_i(); R],
            factors: [0.0; R],
            rescales: [0.0; R],
        };
        if !scored {
            let ahead = if after.is_some() { now } else { ahead };
            for key in (0..widest).step_by(2 * S::LANES) {
                score::<S, R, false>(rows, rows.scores, now, ahead, key, &mut weights);
            }
            if whole {
                raise_whole::<S, R>(rows.scores, rows.state);
            }
        }
        if whole {
            if let Some(after) = after {
                for key in (0..TILE).step_by(2 * S::LANES) {
                    score::<S, R, true>(rows, rows.scores_after, after, ahead, key, &mut weights);
                }
            }
            while weights.done < R {
                let mut row = Row::<S>::begin(rows, weights.done);
                for key in (0..TILE).step_by(S::LANES) {
                    row.weigh(now, key);
                }
                weights.keep(row);
            }
            weights.finish(rows);
            if after.is_some() {
                raise_whole::<S, R>(rows.scores_after, rows.state);
            }
        } else {
            for row in 0..R {
                weights.factors[row] = masked_weights::<S>(rows, row, now, widest);
                weights.rescales[row] = (*rows.state.add(row)).rescale;
            }
        }
        for column in (0..rows.head_dim).step_by(2 * S::LANES) {
            weigh::<S, R>(rows, &weights, ahead, widest, column);
        }
    }
}

/// Scores of two vectors of keys from `key` on. What is loaded here is prefetched at the same place ahead,
/// line by line: all lines of a tile at once would hold up the multiplications.
#[inline(always)]
unsafe fn score<S: Simd, const R: usize, const MIXED: bool>(
    rows: &Rows,
    scores: *mut f32,
    tile: &Tile,
    ahead: &Tile,
    key: usize,
    weights: &mut Weights<S, R>,
) {
    let words = rows.head_dim.div_ceil(4);
    // SAFETY: the caller gives rows and a tile whose keys are blocks of sixteen.
    unsafe {
        let next = key + S::LANES;
        let blocks = [&tile.0[key / KEY_BLOCK], &tile.0[next / KEY_BLOCK]];
        let places = [key % KEY_BLOCK, next % KEY_BLOCK];
        let keys = [blocks[0].keys.add(places[0]), blocks[1].keys.add(places[1])];
        let ahead = [ahead.0[key / KEY_BLOCK].keys, ahead.0[next / KEY_BLOCK].keys];
        let mut acc = [[S::zero_i(); 2]; R];
        let mut word = 0;
        if const { MIXED && R <= MAX_MIXED && S::LANES == 16 } {
            while weights.done < R && word + TILE / S::LANES <= words {
                let mut row = Row::<S>::begin(rows, weights.done);
                for at in (0..TILE).step_by(S::LANES) {
                    multiply::<S, R>(rows.queries, words, keys, ahead, word, &mut acc);
                    row.weigh(weights.tile, at);
                    word += 1;
                }
                weights.keep(row);
            }
        }
        for word in word..words {
            multiply::<S, R>(rows.queries, words, keys, ahead, word, &mut acc);
        }
        for v in 0..2 {
            let scales = S::load(blocks[v].key_scales.add(places[v]));
            for (r, acc) in acc.iter().enumerate() {
                let scale = S::mul(S::splat(*rows.scales.add(r)), scales);
                let score = S::mul(S::to_f32(acc[v]), scale);
                S::store(scores.add(r * TILE + key + v * S::LANES), score);
            }
        }
    }
}

/// Adds the products of a word of two vectors of keys.
#[inline(always)]
unsafe fn multiply<S: Simd, const R: usize>(
    queries: *const u32,
    words: usize,
    keys: [*const i32; 2],
    ahead: [*const i32; 2],
    word: usize,
    acc: &mut [[S::I; 2]; R],
) {
    // SAFETY: the caller gives rows of queries, and keys of as many words.
    unsafe {
        S::prefetch_close(ahead[0].wrapping_add(word * KEY_BLOCK).cast());
        S::prefetch_close(ahead[1].wrapping_add(word * KEY_BLOCK).cast());
        let first = S::widen_i8(S::load_i(keys[0].add(word * KEY_BLOCK)));
        let second = S::widen_i8(S::load_i(keys[1].add(word * KEY_BLOCK)));
        for half in 0..2 {
            for (r, acc) in acc.iter_mut().enumerate() {
                let query = *queries.add(r * 2 * words + 2 * word + half);
                acc[0] = S::dot_i16(acc[0], query, first[half]);
                acc[1] = S::dot_i16(acc[1], query, second[half]);
            }
        }
    }
}

/// What becomes of the weights of a tile.
struct Weights<'a, S: Simd, const R: usize> {
    tile: &'a Tile,
    /// Rows whose weights are there.
    done: usize,
    /// The sum of a row's weights, lane by lane.
    totals: [S::V; R],
    /// The largest of a row's weights times scales, as bits, lane by lane.
    largest: [S::I; R],
    /// What a rounded weight stands for.
    factors: [f32; R],
    /// What the sums so far are multiplied with.
    rescales: [f32; R],
}

/// A row of weights at work, which sees the whole tile: the steps of `softmax_tile` and [`round_weights`],
/// with the same bits.
struct Row<S: Simd> {
    scores: *mut f32,
    largest: S::V,
    total: S::V,
    /// The largest weight times scale, as bits.
    largest_bits: S::I,
}

impl<S: Simd> Row<S> {
    /// # Safety
    /// The row is one of the strip; the machine has the instructions of S.
    #[inline(always)]
    unsafe fn begin(rows: &Rows, row: usize) -> Row<S> {
        // SAFETY: the caller's promise.
        unsafe {
            Row {
                scores: rows.scores.add(row * TILE),
                largest: S::splat((*rows.state.add(row)).largest),
                total: S::splat(0.0),
                largest_bits: S::zero_i(),
            }
        }
    }

    /// A vector of scores from `key` on becomes weights times the scales of their values.
    #[inline(always)]
    unsafe fn weigh(&mut self, tile: &Tile, key: usize) {
        // SAFETY: a row of TILE scores, and a tile.
        unsafe {
            let weight = exp::<S>(S::sub(S::load(self.scores.add(key)), self.largest));
            self.total = S::add(self.total, weight);
            let scales = S::load(tile.0[key / KEY_BLOCK].value_scales.add(key % KEY_BLOCK));
            let v = S::mul(weight, scales);
            S::store(self.scores.add(key), v);
            self.largest_bits = S::abs_max(self.largest_bits, v);
        }
    }
}

impl<S: Simd, const R: usize> Weights<'_, S, R> {
    /// A row's weights are there.
    #[inline(always)]
    fn keep(&mut self, row: Row<S>) {
        self.totals[self.done] = row.total;
        self.largest[self.done] = row.largest_bits;
        self.done += 1;
    }

    /// Adds the weights of all rows to their denominators and rounds them: every step for all rows, so that a
    /// row does not wait for its own reductions.
    #[inline(always)]
    unsafe fn finish(&mut self, rows: &Rows) {
        // SAFETY: R rows of TILE scores and of TILE weights, and R states.
        unsafe {
            add_totals::<S, R>(&self.totals, rows.state);
            for row in 0..R {
                self.rescales[row] = (*rows.state.add(row)).rescale;
                self.factors[row] = scale_of(S::largest_i(self.largest[row]), LARGEST);
            }
            for (row, &factor) in self.factors.iter().enumerate() {
                let inverse = S::splat(1.0 / factor);
                for i in (row * TILE..(row + 1) * TILE).step_by(S::LANES) {
                    S::store_i16(rows.weights.add(i), S::mul(S::load(rows.scores.add(i)), inverse));
                }
            }
        }
    }
}

/// Weights of a row that does not see the whole tile, rounded; returns their scale.
#[inline(always)]
unsafe fn masked_weights<S: Simd>(rows: &Rows, row: usize, tile: &Tile, widest: usize) -> f32 {
    let (hidden, seen) = rows.sees[row];
    // SAFETY: a row of TILE scores, one of TILE weights, and a state.
    unsafe {
        let (scores, weights) = (rows.scores.add(row * TILE), rows.weights.add(row * TILE));
        if hidden >= seen {
            // It sees nothing of this tile.
            std::ptr::write_bytes(weights, 0, TILE);
            return 0.0;
        }
        (0..hidden).for_each(|key| *scores.add(key) = f32::NEG_INFINITY);
        softmax_tile::<S>(scores, seen, widest, &mut *rows.state.add(row));
        round_weights::<S>(scores, (hidden, seen), widest, tile, weights)
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

/// Adds the weighted values of the first `widest` keys to two vectors of columns of the sums.
#[inline(always)]
unsafe fn weigh<S: Simd, const R: usize>(
    rows: &Rows,
    of: &Weights<S, R>,
    ahead: &Tile,
    widest: usize,
    column: usize,
) {
    let head_dim = rows.head_dim;
    // SAFETY: the caller gives rows and a tile, whose last values are followed by a vector.
    unsafe {
        let weights = rows.weights.cast::<u32>().cast_const();
        let second = column + S::LANES < head_dim;
        let mut acc = [[S::zero_i(); 2]; R];
        for (block, values) in of.tile.0.iter().enumerate().take(widest.div_ceil(KEY_BLOCK)) {
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
        // Two whole vectors are what almost every head ends with.
        let full = column + 2 * S::LANES <= head_dim;
        for (r, acc) in acc.iter().enumerate() {
            let (hidden, seen) = rows.sees[r];
            if hidden >= seen {
                continue;
            }
            let (rescale, factor) = (S::splat(of.rescales[r]), S::splat(of.factors[r]));
            let sums = rows.sums.add(r * head_dim + column);
            if full {
                for (v, &acc) in acc.iter().enumerate() {
                    let sums = sums.add(v * S::LANES);
                    S::store(sums, S::fma(S::to_f32(acc), factor, S::mul(S::load(sums), rescale)));
                }
                continue;
            }
            for (v, &acc) in acc.iter().enumerate().take(1 + usize::from(second)) {
                let (at, sums) = (column + v * S::LANES, sums.add(v * S::LANES));
                let n = S::LANES.min(head_dim - at);
                let before = S::mul(S::load_n(sums, n), rescale);
                S::store_n(sums, S::fma(S::to_f32(acc), factor, before), n);
            }
        }
    }
}
