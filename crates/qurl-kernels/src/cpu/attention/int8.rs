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

mod strip;

use super::{AHEAD, BLOCKS, Job, ROW_BLOCK, RowState, TILE, Workspace};
use crate::cpu::kv::{Int8Block, Int8Store, KEY_BLOCK};
use crate::cpu::level::Level;
use crate::cpu::quant::{largest_bits, scale_of};
use crate::cpu::simd::{Simd, simd_dispatch};
use crate::types::Span;
use strip::{Tiles, attend};

/// All of a tile, for every row.
static WHOLE: [(usize, usize); MAX_ROWS] = [(0, TILE); MAX_ROWS];

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
        let store = job.kv.int8_store();
        let first_tile = first_seen(0) / TILE * TILE;
        // Rows follow positions: the first one sees the fewest keys, the last one's window hides the most.
        let all_see = first_seen(count - 1)..position(0) + 1;
        // Tiles are looked up when they are prefetched; those from here on wait in a ring.
        let mut ring = [Tile::NONE; AHEAD + 1];
        for (i, place) in ring.iter_mut().enumerate().take(AHEAD) {
            let tile = first_tile + i * TILE;
            if tile < keys {
                place.find(job, &store, span, head, tile, keys);
            }
        }
        let (mut now, mut scored) = (0, false);
        for tile in (first_tile..keys).step_by(TILE) {
            let last = (now + AHEAD) % ring.len();
            let prefetched = job.ahead((span, head), next, tile, keys);
            if let Some((span, head, tile)) = prefetched {
                ring[last].find(job, &store, span, head, tile, span.position + span.rows);
            }
            let blocks = &ring[now];
            let ahead = if prefetched.is_some() { &ring[last] } else { blocks };
            now = (now + 1) % ring.len();
            let is_whole = |tile: usize| all_see.start <= tile && tile + TILE <= all_see.end;
            let whole = is_whole(tile);
            let one = count <= strip;
            let after = (one && whole && is_whole(tile + TILE)).then_some(&ring[now]);
            for first in (0..count).step_by(strip) {
                let height = strip.min(count - first);
                let mut some = [(0, 0); MAX_ROWS];
                let sees = if whole {
                    &WHOLE
                } else {
                    let seen = |row: usize| (position(row) + 1).saturating_sub(tile).min(TILE);
                    let hidden = |row: usize| first_seen(row).saturating_sub(tile).min(TILE);
                    if seen(first + height - 1) == 0 || hidden(first) == TILE {
                        continue;
                    }
                    for (row, sees) in some.iter_mut().enumerate().take(height) {
                        *sees = (hidden(first + row), seen(first + row));
                    }
                    &some
                };
                // The scores of this tile and the next of a single strip take turns in two places.
                let second = if one { MAX_ROWS } else { 0 };
                let place = |tile: usize| scores.add((first + tile / TILE % 2 * second) * TILE);
                let rows = Rows {
                    head_dim,
                    sees,
                    queries: queries.add(first * key_dim).cast(),
                    scales: &raw const scales[first],
                    state: &raw mut state[first],
                    scores: place(tile),
                    scores_after: place(tile + TILE),
                    weights: weights.add(first * TILE),
                    sums: sums.add(first * head_dim),
                };
                let ahead = if first == 0 { ahead } else { blocks };
                attend(level, height, &rows, &Tiles { now: blocks, scored, after, ahead });
            }
            scored = after.is_some();
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
struct Tile([Int8Block; BLOCKS]);

impl Tile {
    const NONE: Tile = Tile([Int8Block::NONE; BLOCKS]);

    #[inline(always)]
    fn find(&mut self, job: &Job, store: &Int8Store, span: &Span, head: usize, tile: usize, keys: usize) {
        let (mut page, mut slot) = job.entry(span, tile);
        for (i, block) in self.0.iter_mut().enumerate() {
            if i > 0 && tile + i * KEY_BLOCK >= keys {
                (page, slot) = job.entry(span, tile);
            }
            *block = store.block(job.pages[page] as usize, head, slot);
            slot += KEY_BLOCK;
            if slot == job.kv.page_size() {
                (page, slot) = (page + 1, 0);
            }
        }
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
struct Rows<'a> {
    head_dim: usize,
    /// Keys at the beginning of the tile that a row's window hides, and where those that it sees end.
    sees: &'a [(usize, usize); MAX_ROWS],
    /// `[rows][key_dim / 2]`: words of two codes.
    queries: *const u32,
    /// What a query's codes stand for, times the factor on scores.
    scales: *const f32,
    state: *mut RowState,
    scores: *mut f32,
    /// Where the scores of the next tile go.
    scores_after: *mut f32,
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
