//! The register tile: some rows of A times two vectors of columns of B, kept in registers along k.
//!
//! One tile serves every format. Words of A and B are multiplied in one of three ways ([`Kind`]); what
//! differs beyond that happens outside of the inner loop: codes of B are decoded into a small buffer that all
//! strips of A then use, and scales are multiplied in when a sum along k is complete, either once or per
//! block of k ([`Factors`]).

use super::decode::{Codes, decode};
use super::words::{Bf16Words, F32Words, Int8Words, Words};
use super::{K_BLOCK, Mode, STRIPS_PER_BLOCK, Span};
use crate::cpu::buf::Parts;
use crate::cpu::simd::{Simd, simd_dispatch};

/// How a word of A is multiplied by a word of B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One product of f32.
    F32,
    /// Two products of bf16, summed in f32.
    Bf16,
    /// Four products of an unsigned by a signed byte, summed in integers.
    Int8,
}

/// What turns sums of codes into numbers; null pointers where there is nothing to do.
#[derive(Clone, Copy)]
pub(crate) struct Factors {
    /// Scales of A: `[row][block]`.
    pub rows: *const f32,
    /// Scales of B: `[panel][block][column]`.
    pub columns: *const f32,
    /// Where the integer sum of a column starts: it takes back that A's bytes are stored 128 too large.
    pub start: *const i32,
    /// Blocks of k with scales of their own.
    pub blocks: usize,
    /// Words along k of such a block.
    pub block_words: usize,
}

impl Factors {
    /// No scales: sums are the result.
    pub const NONE: Factors = Factors {
        rows: std::ptr::null(),
        columns: std::ptr::null(),
        start: std::ptr::null(),
        blocks: 1,
        block_words: usize::MAX,
    };
}

/// How the words of A lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lies {
    /// Packed into strips.
    Strips,
    /// As `[rows of A][k]`, side by side: f32 only.
    Rows,
    /// As `[k][rows of A]`, so far apart: f32 only.
    Columns(usize),
}

/// A GEMM of packed operands.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Words of A along k.
    pub words: usize,
    /// How words are multiplied.
    pub kind: Kind,
    /// A.
    pub a: *const u32,
    /// How it lies.
    pub a_lies: Lies,
    /// Panels of B.
    pub b: *const u32,
    /// Distance of the words along k of a B that lies as rows `[k][columns of B]`, or zero where it is packed
    /// into panels.
    pub b_step: usize,
    /// Stored words along k from one panel to the next; more than the GEMM needs where only a part of k is
    /// summed.
    pub panel_words: usize,
    /// How the stored words of B become words.
    pub codes: Codes,
    /// Scales of both.
    pub factors: Factors,
    /// The result.
    pub c: Parts<f32>,
    /// Distance of the rows of C.
    pub ldc: usize,
    /// A bias per column, or null.
    pub bias: *const f32,
    /// What happens to the old content of C.
    pub mode: Mode,
}

// SAFETY: the pointers are read-only, except `c`, of which tasks own disjoint tiles.
unsafe impl Sync for Job {}

impl Job {
    /// Where the stored words of a panel begin that give the words from `word` on.
    ///
    /// # Safety
    /// The panel and the word lie inside the operand.
    #[inline(always)]
    pub(super) unsafe fn stored(&self, panel: usize, word: usize, width: usize) -> *const u32 {
        let at = match self.b_step {
            0 => (panel * self.panel_words + word / self.codes.per_word()) * width,
            step => panel * width + word * step,
        };
        // SAFETY: the caller's promise.
        unsafe { self.b.add(at) }
    }

    /// Where the words of `rows` rows from `row` (at a strip) begin, from `word` on.
    ///
    /// # Safety
    /// The rows and the word lie inside the operand.
    #[inline(always)]
    unsafe fn left(&self, row: usize, rows: usize, word: usize) -> *const u32 {
        let at = match self.a_lies {
            Lies::Strips => row * self.words + word * rows,
            Lies::Rows => row * self.words + word,
            Lies::Columns(step) => row + word * step,
        };
        // SAFETY: the caller's promise.
        unsafe { self.a.add(at) }
    }

    /// The GEMM of `rows` rows from `first_row` (at a strip) and `columns` columns from `first_column` (at a
    /// panel) with a C of its own.
    ///
    /// # Safety
    /// The window lies inside the job, whose operands are packed, and `width` is the panel width of its
    /// level.
    pub unsafe fn window(
        &self,
        first_row: usize,
        rows: usize,
        first_column: usize,
        columns: usize,
        width: usize,
    ) -> Job {
        let packed = self.b_step == 0 && !matches!(self.a_lies, Lies::Columns(_));
        debug_assert!(packed, "a window of operands that are not packed");
        let mut job = *self;
        let panel = first_column / width;
        (job.m, job.n) = (rows, columns);
        // SAFETY: the caller's promise.
        unsafe {
            job.a = self.a.add(first_row * self.words);
            job.b = self.b.add(panel * self.panel_words * width);
            job.codes = self.codes.seen_from(panel, width);
            let Factors { rows, columns, start, blocks, .. } = self.factors;
            let offset = |p: *const f32, by: usize| if p.is_null() { p } else { p.add(by) };
            job.factors.rows = offset(rows, first_row * blocks);
            job.factors.columns = offset(columns, panel * blocks * width);
            job.factors.start = if start.is_null() { start } else { start.add(first_column) };
            job.bias = offset(self.bias, first_column);
        }
        job
    }
}

simd_dispatch!(pub(super) fn block_f32(job: &Job, strips: Span, panels: Span) = block_f32_at);
simd_dispatch!(pub(super) fn block_bf16(job: &Job, strips: Span, panels: Span) = block_bf16_at);
simd_dispatch!(pub(super) fn block_int8(job: &Job, strips: Span, panels: Span) = block_int8_at);

#[inline(always)]
unsafe fn block_f32_at<S: Simd>(job: &Job, strips: Span, panels: Span) {
    // SAFETY: the caller's promise.
    unsafe { block::<S, F32Words>(job, strips, panels) }
}

#[inline(always)]
unsafe fn block_bf16_at<S: Simd>(job: &Job, strips: Span, panels: Span) {
    // SAFETY: the caller's promise.
    unsafe { block::<S, Bf16Words>(job, strips, panels) }
}

#[inline(always)]
unsafe fn block_int8_at<S: Simd>(job: &Job, strips: Span, panels: Span) {
    // SAFETY: the caller's promise.
    unsafe { block::<S, Int8Words>(job, strips, panels) }
}

/// Largest strip block in rows times panel width, for the partial sums between passes along k.
const PARTIAL: usize = 12 * STRIPS_PER_BLOCK * 32;
const CACHE_LINE: usize = 64;

/// An array that begins at a cache line: a vector that straddles two lines costs twice.
#[repr(align(64))]
struct AtLine<T>(T);

/// How far ahead in the same stream of weights a strip without others prefetches, in bytes, every line of it.
/// It reads nothing twice, so it is held up by memory and not by products. A single row reads fastest so
/// close; more rows take longer for a line than memory does, and on Zen 5 want what lies further ahead.
const fn far(rows: usize) -> usize {
    match rows {
        1 => 512,
        2..=8 => 8 << 10,
        _ => 16 << 10,
    }
}
/// Rows of codes that are brought from the L2 to the first before they are decoded.
const CLOSE: usize = 15;
/// Words along k that are decoded at a time before the tiles use them; tiles that decode themselves do whole
/// passes.
const DECODED: usize = 128;

#[inline(always)]
unsafe fn block<S: Simd, W: Words>(job: &Job, strips: Span, panels: Span) {
    let width = 2 * S::LANES;
    let mut partial = std::mem::MaybeUninit::<AtLine<[f32; PARTIAL]>>::uninit();
    let partial: *mut f32 = partial.as_mut_ptr().cast();
    // One more, because decoding runs a row ahead.
    let mut decoded = std::mem::MaybeUninit::<AtLine<[u32; (K_BLOCK + 1) * 32]>>::uninit();
    let decoded: *mut u32 = decoded.as_mut_ptr().cast();
    let coded = W::CODED && !matches!(job.codes, Codes::Words);
    let fused = W::CODED && matches!(job.codes, Codes::E4m3 { .. });
    let last_panel = job.n.div_ceil(width) - 1;
    let pass = if coded && !fused { DECODED } else { K_BLOCK }.min(job.factors.block_words);
    // SAFETY: strips and panels lie inside the operands; `partial` is written in the first pass before it is
    // read.
    unsafe {
        for panel in panels.clone() {
            let columns = width.min(job.n - panel * width);
            let mut k0 = 0;
            loop {
                let k1 = (k0 + pass).min(job.words);
                let stored = job.stored(panel, k0, width);
                // Where the flags of a fused panel's stored words begin.
                let small = match job.codes {
                    Codes::E4m3 { small, words } if W::CODED => small.add((panel * words + k0 / 2) * 2),
                    _ => std::ptr::null(),
                };
                let b = if coded { decoded.cast_const() } else { stored };
                if coded && !fused {
                    decode::<S>(job, panel, k0..k1, decoded);
                }
                // What comes next is prefetched while the tiles multiply: a cache line per word and strip.
                let next = if k1 < job.words {
                    job.stored(panel, k1, width)
                } else {
                    job.stored((panel + 1).min(last_panel), 0, width)
                };
                if k0 == 0 && panel < last_panel {
                    ask_for_extras::<S>(job, panel + 1);
                }
                let scale_block = if job.factors.blocks > 1 { k0 / job.factors.block_words } else { 0 };
                // The last strip, often the lowest, comes first: it decodes, and with fewer sums has
                // registers to spare.
                for strip in strips.clone().rev() {
                    let row = strip * S::MR;
                    let rows = S::MR.min(job.m - row);
                    let before = strips.end - 1 - strip;
                    let lines = before * (k1 - k0);
                    let (ahead, ahead_step) = if job.b_step != 0 {
                        // A word's lines are neighbours, its words are not.
                        let from = if before * CACHE_LINE < width * 4 { next } else { b };
                        (from.cast::<u8>().wrapping_add(before * CACHE_LINE % (width * 4)), job.b_step * 4)
                    } else if lines * CACHE_LINE < (k1 - k0) * width * 4 / job.codes.per_word() {
                        (next.cast::<u8>().wrapping_add(lines * CACHE_LINE), CACHE_LINE)
                    } else if coded {
                        (job.a.cast(), 0)
                    } else {
                        (b.cast(), CACHE_LINE)
                    };
                    let tile = Tile {
                        codes: if fused && strip + 1 == strips.end { stored } else { std::ptr::null() },
                        small,
                        ahead,
                        ahead_step,
                        decodes_for_others: strips.len() > 1,
                        alone: job.b_step == 0
                            && job.a_lies == Lies::Strips
                            && (rows == 1 || (strips.len() == 1 && !coded)),
                        a: job.left(row, rows, k0),
                        b,
                        steps: [
                            match job.a_lies {
                                Lies::Strips => rows,
                                Lies::Rows => 1,
                                Lies::Columns(step) => step,
                            },
                            if job.b_step == 0 { width } else { job.b_step },
                        ],
                        words: k1 - k0,
                        c: job.c.at(row * job.ldc + panel * width),
                        columns,
                        panel,
                        row,
                        scale_block,
                        partial: partial.add((strip - strips.start) * S::MR * width),
                        first: k0 == 0,
                        last: k1 == job.words,
                    };
                    macro_rules! by_rows {
                        ($($r:literal)*) => { match rows {
                            // Heights that the level does not use are not compiled.
                            $($r => if const { $r <= S::MR } {
                                tile.compute::<S, W, $r>(job)
                            } else {
                                unreachable!()
                            },)*
                            _ => unreachable!()
                        } };
                    }
                    by_rows!(1 2 3 4 5 6 7 8 9 10 11 12);
                }
                k0 = k1;
                if k0 == job.words {
                    break;
                }
            }
        }
    }
}

/// Prefetches what a panel has beside its words: scales, bias, flags. Each is a few lines of an array of its
/// own that nothing else would prefetch.
#[inline(always)]
unsafe fn ask_for_extras<S: Simd>(job: &Job, panel: usize) {
    let width = 2 * S::LANES;
    let Factors { columns, start, blocks, .. } = job.factors;
    // SAFETY: any address may be prefetched.
    unsafe {
        if !columns.is_null() {
            ask_for::<S>(columns.wrapping_add(panel * blocks * width).cast(), blocks * width * 4);
        }
        if !start.is_null() {
            ask_for::<S>(start.wrapping_add(panel * width).cast(), width * 4);
        }
        if !job.bias.is_null() {
            ask_for::<S>(job.bias.wrapping_add(panel * width).cast(), width * 4);
        }
        if let Codes::E4m3 { small, words } = job.codes {
            ask_for::<S>(small.wrapping_add(panel * words * 2), words * 2);
        }
    }
}

/// Prefetches every cache line of some bytes.
#[inline(always)]
unsafe fn ask_for<S: Simd>(from: *const u8, bytes: usize) {
    for at in (0..bytes + CACHE_LINE - 1).step_by(CACHE_LINE) {
        // SAFETY: any address may be prefetched.
        unsafe { S::prefetch(from.wrapping_add(at)) }
    }
}

/// One pass along k of one tile.
struct Tile {
    /// Memory to prefetch meanwhile, and how much further for every word. Where nothing is left, something
    /// that is there: words that a GEMM reads anyway, but of what was decoded always the same line, since two
    /// strips of three would prefetch it.
    ahead: *const u8,
    ahead_step: usize,
    /// E4M3 codes that this tile decodes into `b` while it multiplies, or null where `b` is ready.
    codes: *const u32,
    /// Whether other tiles use what this one decodes.
    decodes_for_others: bool,
    /// Whether it prefetches its own words further along instead: a single row, or a single strip.
    alone: bool,
    /// Two flags for every row of codes: whether its halves have zeros or subnormals.
    small: *const u8,
    a: *const u32,
    b: *const u32,
    /// Distances of their words along k.
    steps: [usize; 2],
    words: usize,
    c: *mut f32,
    columns: usize,
    panel: usize,
    row: usize,
    scale_block: usize,
    partial: *mut f32,
    first: bool,
    last: bool,
}

impl Tile {
    #[inline(always)]
    unsafe fn compute<S: Simd, W: Words, const R: usize>(&self, job: &Job) {
        let l = S::LANES;
        let Factors { start, blocks, .. } = job.factors;
        // SAFETY: the caller gives a tile that lies inside the operands, C and the partial sums.
        unsafe {
            let mut acc = [[W::zero::<S>(); 2]; R];
            let low = self.columns.min(l);
            let high = self.columns - low;
            if self.first {
                let start = if start.is_null() { start } else { start.add(self.panel * 2 * l) };
                for (r, acc) in acc.iter_mut().enumerate() {
                    let c = self.c.add(r * job.ldc);
                    acc[0] = W::begin::<S>(job.mode, c, low, start);
                    acc[1] = W::begin::<S>(job.mode, c.add(low), high, start.wrapping_add(l));
                }
            } else if blocks == 1 {
                for (r, acc) in acc.iter_mut().enumerate() {
                    acc[0] = W::load::<S>(self.partial.add(r * 2 * l));
                    acc[1] = W::load::<S>(self.partial.add(r * 2 * l + l));
                }
            }
            if self.last {
                // C is prefetched while the tile multiplies: its stores would hold up those of decoded words.
                for r in 0..R {
                    let c = self.c.wrapping_add(r * job.ldc);
                    S::prefetch_for_writing(c.cast());
                    S::prefetch_for_writing(c.wrapping_add(l).cast());
                }
            }
            if W::CODED && !self.codes.is_null() {
                if self.decodes_for_others {
                    self.decode_and_multiply::<S, W, R, true>(&mut acc);
                } else {
                    self.decode_and_multiply::<S, W, R, false>(&mut acc);
                }
            } else if self.alone {
                self.multiply::<S, W, R, true, false>(job, &mut acc);
            } else if W::LIE_AS_ROWS && job.a_lies == Lies::Rows {
                self.multiply::<S, W, R, false, true>(job, &mut acc);
            } else {
                self.multiply::<S, W, R, false, false>(job, &mut acc);
            }
            if blocks == 1 && !self.last {
                for (r, acc) in acc.iter().enumerate() {
                    W::store::<S>(self.partial.add(r * 2 * l), acc[0]);
                    W::store::<S>(self.partial.add(r * 2 * l + l), acc[1]);
                }
                return;
            }
            let mut sums = [[S::splat(0.0); 2]; R];
            for (sums, acc) in sums.iter_mut().zip(&acc) {
                *sums = [W::value::<S>(acc[0]), W::value::<S>(acc[1])];
            }
            if !job.factors.columns.is_null() {
                self.scale::<S, R>(job, &mut sums);
                if blocks > 1 && !self.last {
                    for (r, sums) in sums.iter().enumerate() {
                        S::store(self.partial.add(r * 2 * l), sums[0]);
                        S::store(self.partial.add(r * 2 * l + l), sums[1]);
                    }
                    return;
                }
            }
            if !job.bias.is_null() {
                let bias = job.bias.add(self.panel * 2 * l);
                let bias = [S::load_n(bias, low), S::load_n(bias.add(low), high)];
                for sums in sums.iter_mut() {
                    *sums = [S::add(sums[0], bias[0]), S::add(sums[1], bias[1])];
                }
            }
            for (r, &sums) in sums.iter().enumerate() {
                let c = self.c.add(r * job.ldc);
                let mut sums = sums;
                if job.mode == Mode::Add {
                    sums[0] = S::add(S::load_n(c, low), sums[0]);
                    sums[1] = S::add(S::load_n(c.add(low), high), sums[1]);
                }
                if self.columns == 2 * l {
                    S::store(c, sums[0]);
                    S::store(c.add(l), sums[1]);
                } else {
                    S::store_n(c, sums[0], low);
                    S::store_n(c.add(low), sums[1], high);
                }
            }
        }
    }

    /// Multiplies by the words of the pass; `ALONE` if no other strip does so, `ROWS` if A lies as rows.
    #[inline(always)]
    unsafe fn multiply<S: Simd, W: Words, const R: usize, const ALONE: bool, const ROWS: bool>(
        &self,
        job: &Job,
        acc: &mut [[W::Acc<S>; 2]; R],
    ) {
        let (mut a, mut b, steps) = (self.a, self.b.cast::<i32>(), self.steps);
        let apart = if ROWS { job.words } else { 1 };
        // SAFETY: the caller gives a tile that lies inside the operands.
        unsafe {
            for word in 0..self.words {
                if ALONE {
                    let ahead = b.cast::<u8>().wrapping_add(far(R));
                    S::prefetch(ahead);
                    S::prefetch(ahead.wrapping_add(CACHE_LINE));
                } else {
                    S::prefetch(self.ahead.wrapping_add(word * self.ahead_step));
                }
                let columns = [S::load_i(b), S::load_i(b.add(S::LANES))];
                for (r, acc) in acc.iter_mut().enumerate() {
                    let word = *a.add(r * apart);
                    acc[0] = W::multiply_add::<S>(acc[0], word, columns[0]);
                    acc[1] = W::multiply_add::<S>(acc[1], word, columns[1]);
                }
                a = a.add(if ROWS { 1 } else { steps[0] });
                b = b.add(steps[1]);
            }
        }
    }

    /// Decodes the codes of the pass and multiplies by them: what comes next is decoded while the products
    /// before it are under way. `KEEP` stores the decoded words for the tiles that follow.
    #[inline(always)]
    unsafe fn decode_and_multiply<S: Simd, W: Words, const R: usize, const KEEP: bool>(
        &self,
        acc: &mut [[W::Acc<S>; 2]; R],
    ) {
        let row = 2 * S::LANES;
        // SAFETY: the caller gives codes and a row after them, flags, and a buffer for two words each and a
        // row.
        unsafe {
            let small = self.small.cast::<[u8; 2]>();
            let (mut a, mut codes, mut b) = (self.a, self.codes, self.b.cast::<i32>().cast_mut());
            let mut first = decode_row::<S, false>(codes);
            keep_row::<S, KEEP>(first, b);
            for word in 0..self.words / 2 {
                S::prefetch(self.ahead.wrapping_add(2 * word * CACHE_LINE));
                S::prefetch(self.ahead.wrapping_add((2 * word + 1) * CACHE_LINE));
                let next = codes.add(row);
                S::prefetch_close(next.wrapping_add(CLOSE * row).cast());
                S::prefetch_close(next.wrapping_add(CLOSE * row + S::LANES).cast());
                let has_small = small.add(word).read() != [0, 0];
                if has_small {
                    std::hint::cold_path();
                    first = [S::mend_e4m3(first[0]), S::mend_e4m3(first[1])];
                    keep_row::<S, KEEP>(first, b);
                }
                let mut second = multiply_and_decode::<S, W, R, KEEP, true>(acc, a, first, codes, b.add(row));
                if has_small {
                    std::hint::cold_path();
                    second = [S::mend_e4m3(second[0]), S::mend_e4m3(second[1])];
                    keep_row::<S, KEEP>(second, b.add(row));
                }
                first =
                    multiply_and_decode::<S, W, R, KEEP, false>(acc, a.add(R), second, next, b.add(2 * row));
                (a, codes, b) = (a.add(2 * R), next, b.add(2 * row));
            }
        }
    }

    /// `sums * (row scale * column scale)`, and where k has several blocks, plus what the blocks before gave.
    #[inline(always)]
    unsafe fn scale<S: Simd, const R: usize>(&self, job: &Job, sums: &mut [[S::V; 2]; R]) {
        let l = S::LANES;
        let Factors { rows, columns, blocks, .. } = job.factors;
        // SAFETY: scales cover every row, panel and block of the job.
        unsafe {
            let columns = columns.add((self.panel * blocks + self.scale_block) * 2 * l);
            let columns = [S::load(columns), S::load(columns.add(l))];
            // Without scales of rows the same one serves all of them.
            let (rows, stride) = if rows.is_null() {
                (&raw const ONE, 0)
            } else {
                (rows.add(self.row * blocks + self.scale_block), blocks)
            };
            if blocks > 1 && !self.first {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let (row, before) = (S::splat(*rows.add(r * stride)), self.partial.add(r * 2 * l));
                    sums[0] = S::fma(sums[0], S::mul(row, columns[0]), S::load(before));
                    sums[1] = S::fma(sums[1], S::mul(row, columns[1]), S::load(before.add(l)));
                }
            } else {
                for (r, sums) in sums.iter_mut().enumerate() {
                    let row = S::splat(*rows.add(r * stride));
                    *sums =
                        [S::mul(sums[0], S::mul(row, columns[0])), S::mul(sums[1], S::mul(row, columns[1]))];
                }
            }
        }
    }
}

/// The scale of rows that have none.
static ONE: f32 = 1.0;

/// Multiplies by `columns` and decodes the next ones meanwhile. Each vector is shifted, put in its places and
/// stored in one go, and words of A are operands in memory: then decoding takes no time from the products.
/// The highest tile has no registers left for that; its shifts, logic and stores stand where they take the
/// fewest places from products.
#[inline(always)]
unsafe fn multiply_and_decode<S: Simd, W: Words, const R: usize, const KEEP: bool, const LAST: bool>(
    acc: &mut [[W::Acc<S>; 2]; R],
    a: *const u32,
    columns: [S::I; 2],
    codes: *const u32,
    to: *mut i32,
) -> [S::I; 2] {
    // SAFETY: the caller gives R words of A, a row of codes and a buffer for a row of words.
    unsafe {
        let mut next = columns;
        let shift = |v: usize| S::shift_e4m3::<LAST>(codes.add(v * S::LANES));
        for (r, acc) in acc.iter_mut().enumerate() {
            if const { R < S::MR } {
                for (v, at) in [1, 4].into_iter().enumerate() {
                    if r == at.min(R - 1) {
                        next[v] = S::place_e4m3(shift(v));
                        keep::<S, KEEP>(next[v], to.add(v * S::LANES));
                    }
                }
                acc[0] = W::multiply_add_at::<S>(acc[0], a.add(r), columns[0]);
                acc[1] = W::multiply_add_at::<S>(acc[1], a.add(r), columns[1]);
            } else {
                if r == 1 {
                    next = [shift(0), shift(1)];
                }
                if r == 3 {
                    next = [S::place_e4m3(next[0]), S::place_e4m3(next[1])];
                    keep_row::<S, KEEP>(next, to);
                }
                let word = *a.add(r);
                acc[0] = W::multiply_add::<S>(acc[0], word, columns[0]);
                acc[1] = W::multiply_add::<S>(acc[1], word, columns[1]);
            }
        }
        next
    }
}

/// A row of codes as the words of its first pairs, or the `LAST`, as long as none is zero or subnormal.
#[inline(always)]
unsafe fn decode_row<S: Simd, const LAST: bool>(codes: *const u32) -> [S::I; 2] {
    // SAFETY: the caller gives a row of codes.
    unsafe {
        let low = S::place_e4m3(S::shift_e4m3::<LAST>(codes));
        [low, S::place_e4m3(S::shift_e4m3::<LAST>(codes.add(S::LANES)))]
    }
}

/// Stores decoded columns where other tiles need them.
#[inline(always)]
unsafe fn keep<S: Simd, const KEEP: bool>(columns: S::I, to: *mut i32) {
    if KEEP {
        // SAFETY: the caller gives a buffer for a vector.
        unsafe { S::store_i(to, columns) }
    }
}

/// The same for both vectors of a row.
#[inline(always)]
unsafe fn keep_row<S: Simd, const KEEP: bool>(columns: [S::I; 2], to: *mut i32) {
    // SAFETY: the caller gives a buffer for two vectors.
    unsafe {
        keep::<S, KEEP>(columns[0], to);
        keep::<S, KEEP>(columns[1], to.add(S::LANES));
    }
}
