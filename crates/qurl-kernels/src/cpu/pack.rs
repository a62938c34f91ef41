//! Packing of GEMM operands into strips and panels.
//!
//! An operand has `lanes` (rows of A, columns of B) and `k` (the summed dimension). It is cut into groups of
//! `width` lanes, each stored as `[k words][width]`. The last group is narrower (strips) or padded with zeros
//! (panels). For bf16 a word holds two neighbours along k; an odd k is padded with zero.

use super::Context;
use super::buf::Parts;
use super::gemm::Precision;
use super::scalar::bf16_bits;
use super::simd::{MAX_LANES, Simd, simd_dispatch};
use super::source::{Piece, Source};
use std::ops::Range;

/// How the source lies in memory (row-major).
#[derive(Clone, Copy)]
pub(crate) enum Layout {
    /// `[lanes, k]`
    LanesByK,
    /// `[k, lanes]`
    KByLanes,
}

/// Sizes of a packing job.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub lanes: usize,
    pub k: usize,
    pub width: usize,
    pub pad: bool,
}

/// Packs `source` into `words`.
pub(crate) fn pack(
    ctx: &Context,
    precision: Precision,
    layout: Layout,
    source: &[f32],
    shape: Shape,
    words: &mut [u32],
) {
    let Shape { lanes, k, width, pad } = shape;
    let k_words = k.div_ceil(precision.per_word());
    let groups = lanes.div_ceil(width);
    let total = if pad { groups * width } else { lanes } * k_words;
    assert!(source.len() >= lanes * k && words.len() >= total, "pack: shapes");
    let past_caches = pad && 4 * total >= PAST_CACHES && words.as_ptr().addr().is_multiple_of(2 * width);
    let out = Parts::new(words);
    ctx.pool.for_ranges(groups, (1 << 15) / (width * k).max(1) + 1, &|range| {
        // SAFETY: groups own disjoint parts of the words; sizes were checked above; the level was detected.
        unsafe {
            match layout {
                Layout::LanesByK => {
                    for group in range {
                        let first = group * width;
                        let real = width.min(lanes - first);
                        let stride = if pad { width } else { real };
                        let rows = &source[first * k..(first + real) * k];
                        let ahead = Ahead { more: pad && first + 2 * real <= lanes, past_caches };
                        pack_transposed(
                            ctx.level,
                            precision,
                            rows,
                            k,
                            stride,
                            stride,
                            ahead,
                            out.at(first * k_words),
                        );
                    }
                }
                Layout::KByLanes => {
                    for first in range.clone().step_by(TOGETHER) {
                        let groups = first..(first + TOGETHER).min(range.end);
                        pack_copied(ctx.level, precision, source, shape, groups, out);
                    }
                }
            }
        }
        if past_caches {
            // SAFETY: the level was detected.
            unsafe { finish(ctx.level) }
        }
    });
}

/// Neighbouring groups that are copied together: they share cache lines of every row of the source, and rows
/// far apart come from memory in larger pieces. More would fall on the same places of a first-level cache.
const TOGETHER: usize = 4;

/// Bytes of panels from which on they are written past the caches, which could not hold them until they are
/// used.
const PAST_CACHES: usize = 16 << 20;

/// What surrounds rows that are packed.
#[derive(Clone, Copy)]
struct Ahead {
    /// As many rows lie after them in memory and come next.
    more: bool,
    /// Panels go past the caches.
    past_caches: bool,
}

impl Ahead {
    /// Rows on their own.
    const NOTHING: Ahead = Ahead { more: false, past_caches: false };
}

/// Packs rows of `k` into strips.
pub(crate) fn pack_rows(
    ctx: &Context,
    precision: Precision,
    source: &Source,
    rows: usize,
    k: usize,
    words: &mut [u32],
) {
    assert!(words.len() >= rows * k.div_ceil(precision.per_word()), "pack: rows");
    let out = Parts::new(words);
    source.pack(ctx, rows, k, &|piece| pack_piece(ctx, precision, k, out, piece));
}

/// Packs rows of `k` into their columns of a strip.
pub(crate) fn pack_piece(ctx: &Context, precision: Precision, k: usize, strips: Parts<u32>, piece: Piece) {
    let Piece { values, first, strip, height } = piece;
    // SAFETY: the piece's columns of its strip belong to this task; the level was detected.
    unsafe {
        let out = strips.at(strip * k.div_ceil(precision.per_word()) + first - strip);
        pack_transposed(
            ctx.level,
            precision,
            values,
            k,
            values.len() / k.max(1),
            height,
            Ahead::NOTHING,
            out,
        );
    }
}

simd_dispatch!(
    fn pack_transposed(
        precision: Precision, rows: &[f32], k: usize, lanes: usize, stride: usize, ahead: Ahead, out: *mut u32
    ) = pack_transposed_at
);
simd_dispatch!(fn finish() = finish_at);
simd_dispatch!(
    fn pack_copied(
        precision: Precision, source: &[f32], shape: Shape, groups: Range<usize>, out: Parts<u32>
    ) = pack_copied_at
);

/// Words converted at a time before they are spread over the lanes.
const CHUNK: usize = 64;
/// No strip or panel is wider.
const WIDEST: usize = 32;

/// Two f32 as a word of two bf16, the first in the low half.
#[inline(always)]
fn pair(low: f32, high: f32) -> u32 {
    bf16_bits(low) as u32 | (bf16_bits(high) as u32) << 16
}

/// Orders what was written past the caches before everything that follows.
#[inline(always)]
unsafe fn finish_at<S: Simd>() {
    // SAFETY: the caller has the instructions of S.
    unsafe { S::fence() }
}

/// A staging buffer for one square of words, written with stores that bypass the caches.
#[repr(align(64))]
struct Square(#[expect(dead_code, reason = "used through a pointer")] [[u32; MAX_LANES]; MAX_LANES]);

/// Rows of `k` become lanes of packed rows that lie `stride` words apart; lanes without a row are zero.
#[inline(always)]
unsafe fn pack_transposed_at<S: Simd>(
    precision: Precision,
    rows: &[f32],
    k: usize,
    lanes: usize,
    stride: usize,
    ahead: Ahead,
    out: *mut u32,
) {
    let real = rows.len() / k.max(1);
    let words = k.div_ceil(precision.per_word());
    // f32 are taken from where they are, unless lanes without a row stand beside them.
    let direct = precision == Precision::F32 && real == lanes;
    // Lanes without a row are zero; the others are not cleared: that would take longer than filling them.
    let mut staged = std::mem::MaybeUninit::<[[u32; CHUNK]; WIDEST]>::uninit();
    // SAFETY: any bits are a word, and those that are read are written before; lanes are at most WIDEST.
    let staged = unsafe {
        let first: *mut [u32; CHUNK] = staged.as_mut_ptr().cast();
        first.add(real).write_bytes(0, lanes.next_multiple_of(S::LANES).min(WIDEST) - real);
        &mut *staged.as_mut_ptr()
    };
    let mut square = std::mem::MaybeUninit::<Square>::uninit();
    let square: *mut u32 = square.as_mut_ptr().cast();
    for start in (0..words).step_by(CHUNK) {
        let count = CHUNK.min(words - start);
        for lane in 0..real {
            let row = &rows[lane * k..(lane + 1) * k];
            let staged = &mut staged[lane];
            if ahead.more {
                // Panels are made of weights, which come from memory: prefetch those of the next panel, but
                // never for what is not mapped, since that takes microseconds a line.
                let ahead = row.as_ptr().wrapping_add(real * k + start * precision.per_word());
                for line in (0..count * precision.per_word()).step_by(16) {
                    // SAFETY: any address may be prefetched.
                    unsafe { S::prefetch(ahead.wrapping_add(line).cast()) }
                }
            }
            match precision {
                Precision::F32 if direct => {}
                Precision::F32 => {
                    for (word, x) in staged.iter_mut().zip(&row[start..start + count]) {
                        *word = x.to_bits();
                    }
                }
                Precision::Bf16 => {
                    let row = &row[2 * start..(2 * (start + count)).min(k)];
                    let vectors = row.chunks_exact(2 * S::LANES);
                    let (rest, done) = (vectors.remainder(), row.len() / (2 * S::LANES) * S::LANES);
                    for (words, x) in staged.chunks_exact_mut(S::LANES).zip(vectors) {
                        // SAFETY: LANES words and twice as many values.
                        unsafe {
                            let (first, second) = (S::load(x.as_ptr()), S::load(x.as_ptr().add(S::LANES)));
                            S::store_neighbours(words.as_mut_ptr(), first, second);
                        }
                    }
                    for (word, p) in staged[done..].iter_mut().zip(rest.chunks(2)) {
                        *word = pair(p[0], p.get(1).copied().unwrap_or(0.0));
                    }
                }
            }
        }
        let squares = count / S::LANES * S::LANES;
        // SAFETY: a vector of staged rows from every such lane on, or the rows themselves, and as many packed
        // rows; lanes beyond the last are not written.
        unsafe {
            let (from, apart) = match direct {
                true => (rows.as_ptr().cast::<u32>().add(start), k),
                false => (staged.as_ptr().cast::<u32>(), CHUNK),
            };
            let out = out.add(start * stride);
            if stride == 1 {
                std::ptr::copy_nonoverlapping(from, out, count);
                continue;
            }
            for word in (0..squares).step_by(S::LANES) {
                for lane in (0..lanes).step_by(S::LANES) {
                    let (from, to) = (from.add(lane * apart + word), out.add(word * stride + lane));
                    if ahead.past_caches {
                        S::transpose(from, apart, S::LANES, square, MAX_LANES);
                        for row in 0..S::LANES {
                            S::stream_i(
                                to.add(row * stride).cast(),
                                S::load_i(square.add(row * MAX_LANES).cast()),
                            );
                        }
                        continue;
                    }
                    S::transpose(from, apart, S::LANES.min(lanes - lane), to, stride);
                }
            }
            for i in squares..count {
                for lane in 0..lanes {
                    *out.add(i * stride + lane) = *from.add(lane * apart + i);
                }
            }
        }
    }
}

/// Copies rows of `[k, lanes]` into neighbouring groups of lanes.
#[inline(always)]
unsafe fn pack_copied_at<S: Simd>(
    precision: Precision,
    source: &[f32],
    shape: Shape,
    groups: Range<usize>,
    out: Parts<u32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match precision {
            Precision::F32 => copy_groups::<S, false>(source, shape, groups, out),
            Precision::Bf16 => copy_groups::<S, true>(source, shape, groups, out),
        }
    }
}

/// Rows of the source that are prefetched ahead: they are too far apart for the hardware to guess.
const ROWS_AHEAD: usize = 8;

#[inline(always)]
unsafe fn copy_groups<S: Simd, const BF16: bool>(
    source: &[f32],
    shape: Shape,
    groups: Range<usize>,
    out: Parts<u32>,
) {
    let Shape { lanes, k, width, pad } = shape;
    let per_word = if BF16 { 2 } else { 1 };
    let words = k.div_ceil(per_word);
    let (first, end) = (groups.start * width, (groups.end * width).min(lanes));
    for word in 0..words {
        // SAFETY: the caller owns the groups; lanes of the source that are not theirs are masked, and where
        // there is no second row zeros stand in. Any address may be prefetched.
        unsafe {
            let low = source.as_ptr().add(word * per_word * lanes);
            let high = if word * per_word + 1 < k { low.add(lanes) } else { std::ptr::null() };
            for row in 0..per_word {
                let ahead = low.wrapping_add((ROWS_AHEAD * per_word + row) * lanes);
                for at in (first..end).step_by(16) {
                    S::prefetch_close(ahead.wrapping_add(at).cast());
                }
            }
            for at in (first..end).step_by(width) {
                let real = width.min(end - at);
                let stride = if pad { width } else { real };
                let to = out.at(at * words + word * stride);
                let mut lane = 0;
                while lane + S::LANES <= real {
                    let low = S::load(low.add(at + lane));
                    if BF16 {
                        let high = if high.is_null() { S::splat(0.0) } else { S::load(high.add(at + lane)) };
                        S::store_pairs(to.add(lane), low, high);
                    } else {
                        S::store(to.add(lane).cast(), low);
                    }
                    lane += S::LANES;
                }
                if lane < real {
                    let n = real - lane;
                    let low = S::load_n(low.add(at + lane), n);
                    if BF16 {
                        let high =
                            if high.is_null() { S::splat(0.0) } else { S::load_n(high.add(at + lane), n) };
                        // What a whole vector writes beyond the lanes, the next row of the group writes again.
                        if word + 1 < words && S::LANES - n <= stride {
                            S::store_pairs(to.add(lane), low, high);
                        } else {
                            let mut last = [0u32; MAX_LANES];
                            S::store_pairs(last.as_mut_ptr(), low, high);
                            std::ptr::copy_nonoverlapping(last.as_ptr(), to.add(lane), n);
                        }
                    } else {
                        S::store_n(to.add(lane).cast(), low, n);
                    }
                }
                if stride > real {
                    to.add(real).write_bytes(0, stride - real);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::buf::Aligned;
    use crate::cpu::level::Level;

    #[test]
    fn panels_that_go_past_the_caches_hold_the_same_words() {
        // Columns that fill no panel, a k that is odd, and lengths that are no multiple of a vector or of a
        // chunk.
        let (lanes, k) = (4203_usize, 2051_usize);
        let source: Vec<f32> = (0..lanes * k).map(|i| (i % 8191) as f32 - 4000.5).collect();
        for level in Level::available() {
            let ctx = Context::new(level, 2);
            for precision in [Precision::F32, Precision::Bf16] {
                let (width, words) = (ctx.panel(), k.div_ceil(precision.per_word()));
                let mut packed = Aligned::<u32>::zeros(lanes.next_multiple_of(width) * words);
                assert!(4 * packed.len() >= PAST_CACHES);
                packed.fill(7);
                let shape = Shape { lanes, k, width, pad: true };
                pack(&ctx, precision, Layout::LanesByK, &source, shape, &mut packed);
                for (i, &word) in packed.iter().enumerate() {
                    let (row, lane) = (i / width % words, i / width / words * width + i % width);
                    let at = |column: usize| -> f32 {
                        if lane < lanes && column < k { source[lane * k + column] } else { 0.0 }
                    };
                    let expected = match precision {
                        Precision::F32 => at(row).to_bits(),
                        Precision::Bf16 => pair(at(2 * row), at(2 * row + 1)),
                    };
                    assert_eq!(word, expected, "{level:?} {precision:?}: lane {lane}, word {row}");
                }
            }
        }
    }
}
