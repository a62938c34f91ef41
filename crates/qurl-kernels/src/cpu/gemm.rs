//! Matrix products: one register-tiled driver for f32 and bf16 (f32 accumulation).
//!
//! `C[m,n] = sum_k A[m,k] B[k,n]`. Both operands are packed first: A into strips of `MR` rows, B into panels of two
//! vectors of columns, each as `[k][lane]`, so that the inner loop reads memory straight ahead. A packed word is 32
//! bits in either format: one f32, or a pair of bf16 neighbours along k.
//!
//! **Order of summation.** Every output is one chain over k in ascending order, whatever the number of rows, the
//! blocking or the threads. That is why a row has the same bits alone and in a batch, in prefill and in decode.
//! The chain may start at the value already in C ([`Mode::Chain`]): gradients accumulated over micro-batches are
//! then the same chain as over one large batch.

use super::Context;
use super::buf::{Aligned, Parts};
use super::pack::{self, Layout};
use super::simd::{Simd, simd_dispatch};

/// The number format of packed operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32-bit floats.
    F32,
    /// bf16 operands, products accumulated in f32.
    Bf16,
}

impl Precision {
    /// Values along k that share a packed word.
    pub fn per_word(self) -> usize {
        match self {
            Precision::F32 => 1,
            Precision::Bf16 => 2,
        }
    }
}

/// What happens to the old content of C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// `C = A B (+ bias)`
    Store,
    /// `C = C + (A B (+ bias))`: the product is summed first.
    Add,
    /// `C = ((C + a_0 b_0) + a_1 b_1) + ...`: the sum goes on from C.
    Chain,
}

/// The right operand, packed into panels.
#[derive(Clone, Debug)]
pub struct PackedB {
    pub(crate) words: Aligned<u32>,
    pub(crate) precision: Precision,
    pub(crate) k: usize,
    pub(crate) n: usize,
}

impl PackedB {
    /// Room for a right operand of `k` by `n`.
    pub fn new(ctx: &Context, precision: Precision, k: usize, n: usize) -> Self {
        let words = n.div_ceil(ctx.panel()) * ctx.panel() * k.div_ceil(precision.per_word());
        PackedB { words: Aligned::zeros(words), precision, k, n }
    }

    /// Fills it from a row-major matrix: `[n, k]` (`transpose`, as linear layers store their weights) or `[k, n]`.
    pub fn fill(&mut self, ctx: &Context, source: &[f32], transpose: bool) {
        let layout = if transpose { Layout::LanesByK } else { Layout::KByLanes };
        let shape = pack::Shape { lanes: self.n, k: self.k, width: ctx.panel(), pad: true };
        pack::pack(ctx, self.precision, layout, source, shape, &mut self.words);
    }

    /// Number format of the panels.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Bytes of the packed panels.
    pub fn bytes(&self) -> usize {
        self.words.len() * 4
    }
}

/// `out[rows, n] += x[rows, range] B[range, n]`, the chain going on from `out`: a product in pieces along k. The range
/// must begin and end at whole words.
pub(crate) fn matmul_part(ctx: &Context, x: &[f32], rows: usize, b: &PackedB, range: Span, out: &mut [f32]) {
    let per_word = b.precision.per_word();
    assert!(range.start.is_multiple_of(per_word) && (range.end.is_multiple_of(per_word) || range.end == b.k));
    assert!(x.len() >= rows * range.len() && out.len() >= rows * b.n, "matmul part: shapes");
    let words = range.len().div_ceil(per_word);
    let mut strips = ctx.scratch.take(rows * words);
    let shape = pack::Shape { lanes: rows, k: range.len(), width: ctx.strip(), pad: false };
    pack::pack(ctx, b.precision, Layout::LanesByK, x, shape, &mut strips);
    let job = Job {
        m: rows,
        n: b.n,
        words,
        a: strips.as_ptr(),
        b: b.words[range.start / per_word * ctx.panel()..].as_ptr(),
        panel_words: b.k.div_ceil(per_word),
        c: Parts::new(out),
        ldc: b.n,
        bias: std::ptr::null(),
        mode: Mode::Chain,
    };
    run(ctx, b.precision, &job);
}

/// `out[rows, n] (+)= x[rows, k] B (+ bias)`.
pub fn matmul(ctx: &Context, x: &[f32], rows: usize, b: &PackedB, bias: Option<&[f32]>, mode: Mode, out: &mut [f32]) {
    assert!(x.len() >= rows * b.k && out.len() >= rows * b.n, "matmul: {rows} rows of {} -> {}", b.k, b.n);
    assert!(bias.is_none_or(|bias| bias.len() == b.n), "matmul: bias length");
    let words = b.k.div_ceil(b.precision.per_word());
    let mut strips = ctx.scratch.take(rows * words);
    let shape = pack::Shape { lanes: rows, k: b.k, width: ctx.strip(), pad: false };
    pack::pack(ctx, b.precision, Layout::LanesByK, x, shape, &mut strips);
    let bias = bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
    let (a, b_words) = (strips.as_ptr(), b.words.as_ptr());
    let c = Parts::new(out);
    run(ctx, b.precision, &Job { m: rows, n: b.n, words, a, b: b_words, panel_words: words, c, ldc: b.n, bias, mode });
}

/// Tokens that are packed and multiplied at a time for a weight gradient.
const TOKEN_BLOCK: usize = 512;

/// `dw[n, k] += sum_t dy[t, n] x[t, k]`, one chain over the tokens that goes on from `dw`.
pub fn weight_gradient(
    ctx: &Context,
    precision: Precision,
    x: &[f32],
    dy: &[f32],
    tokens: usize,
    n: usize,
    k: usize,
    dw: &mut [f32],
) {
    assert!(x.len() >= tokens * k && dy.len() >= tokens * n && dw.len() >= n * k, "weight_gradient: shapes");
    let block_words = TOKEN_BLOCK.min(tokens).div_ceil(precision.per_word());
    let mut strips = ctx.scratch.take(n * block_words);
    let mut panels = ctx.scratch.take(k.div_ceil(ctx.panel()) * ctx.panel() * block_words);
    for start in (0..tokens).step_by(TOKEN_BLOCK) {
        let block = TOKEN_BLOCK.min(tokens - start);
        let words = block.div_ceil(precision.per_word());
        let shape = pack::Shape { lanes: n, k: block, width: ctx.strip(), pad: false };
        pack::pack(ctx, precision, Layout::KByLanes, &dy[start * n..], shape, &mut strips);
        let shape = pack::Shape { lanes: k, k: block, width: ctx.panel(), pad: true };
        pack::pack(ctx, precision, Layout::KByLanes, &x[start * k..], shape, &mut panels);
        let (a, b, c) = (strips.as_ptr(), panels.as_ptr(), Parts::new(dw));
        let bias = std::ptr::null();
        run(ctx, precision, &Job { m: n, n: k, words, a, b, panel_words: words, c, ldc: k, bias, mode: Mode::Chain });
    }
}

/// Strips that one task walks through for each panel: its part of A stays in the second-level cache.
pub(crate) const STRIPS_PER_BLOCK: usize = 16;
/// Words along k in one pass: the strip stays in the first-level cache and the panel in the second.
const K_BLOCK: usize = 512;

/// Runs a product on all threads.
fn run(ctx: &Context, precision: Precision, job: &Job) {
    let strip_count = job.m.div_ceil(ctx.strip());
    let strip_blocks = strip_count.div_ceil(STRIPS_PER_BLOCK);
    let panel_count = job.n.div_ceil(ctx.panel());
    // A few tasks a thread, each a run of panels for one block of strips.
    let wanted = (4 * ctx.pool.threads()).div_ceil(strip_blocks.max(1));
    let work_per_panel = job.m.min(ctx.strip() * STRIPS_PER_BLOCK) * job.words * ctx.panel();
    let least = (1 << 18) / work_per_panel.max(1) + 1; // below about ten microseconds a task does not pay
    let run_length = panel_count.div_ceil(wanted).max(least).min(panel_count).max(1);
    let runs = panel_count.div_ceil(run_length);
    ctx.pool.for_each(strip_blocks * runs, &|task| {
        let (block, run) = (task / runs, task % runs);
        let strips = block * STRIPS_PER_BLOCK..((block + 1) * STRIPS_PER_BLOCK).min(strip_count);
        let panels = run * run_length..((run + 1) * run_length).min(panel_count);
        // SAFETY: the ranges lie inside the packed operands, and tasks own disjoint tiles of C.
        unsafe { run_block(ctx, precision, job, strips, panels) }
    });
}

/// Runs a part of a product on this thread; at most [`STRIPS_PER_BLOCK`] strips.
///
/// # Safety
/// The job's pointers are valid for its shape, and no other thread writes this part of C.
pub(crate) unsafe fn run_block(ctx: &Context, precision: Precision, job: &Job, strips: Span, panels: Span) {
    // SAFETY: the level was detected when the context was made; the rest is the caller's promise.
    unsafe {
        match precision {
            Precision::F32 => block_f32(ctx.level, job, strips, panels),
            Precision::Bf16 => block_bf16(ctx.level, job, strips, panels),
        }
    }
}

/// A product of packed operands.
pub(crate) struct Job {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Words along k.
    pub words: usize,
    /// Strips of A.
    pub a: *const u32,
    /// Panels of B.
    pub b: *const u32,
    /// Words along k from one panel to the next; more than `words` where only a part of k is summed.
    pub panel_words: usize,
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

pub(crate) type Span = std::ops::Range<usize>;

simd_dispatch!(fn block_f32(job: &Job, strips: Span, panels: Span) = block_f32_at);
simd_dispatch!(fn block_bf16(job: &Job, strips: Span, panels: Span) = block_bf16_at);

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

/// How a packed word of A meets a vector of packed words of B.
trait Words {
    unsafe fn multiply_add<S: Simd>(acc: S::V, a: u32, b: *const u32) -> S::V;
}

struct F32Words;
struct Bf16Words;

impl Words for F32Words {
    #[inline(always)]
    unsafe fn multiply_add<S: Simd>(acc: S::V, a: u32, b: *const u32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::fma(S::splat(f32::from_bits(a)), S::load(b.cast()), acc) }
    }
}

impl Words for Bf16Words {
    #[inline(always)]
    unsafe fn multiply_add<S: Simd>(acc: S::V, a: u32, b: *const u32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { S::dot_bf16(acc, a, b) }
    }
}

/// Largest strip block in rows times panel width, for the partial sums between passes along k.
const PARTIAL: usize = 12 * STRIPS_PER_BLOCK * 32;

#[inline(always)]
unsafe fn block<S: Simd, W: Words>(job: &Job, strips: Span, panels: Span) {
    let width = 2 * S::LANES;
    let mut partial = std::mem::MaybeUninit::<[f32; PARTIAL]>::uninit();
    let partial: *mut f32 = partial.as_mut_ptr().cast();
    // SAFETY: strips and panels lie inside the operands; `partial` is written in the first pass before it is read.
    unsafe {
        for panel in panels {
            let columns = width.min(job.n - panel * width);
            let mut k0 = 0;
            loop {
                let k1 = (k0 + K_BLOCK).min(job.words);
                for strip in strips.clone() {
                    let rows = S::MR.min(job.m - strip * S::MR);
                    let tile = Tile {
                        a: job.a.add(strip * S::MR * job.words + k0 * rows),
                        b: job.b.add((panel * job.panel_words + k0) * width),
                        words: k1 - k0,
                        c: job.c.at(strip * S::MR * job.ldc + panel * width),
                        columns,
                        bias: if job.bias.is_null() { job.bias } else { job.bias.add(panel * width) },
                        partial: partial.add((strip - strips.start) * S::MR * width),
                        first: k0 == 0,
                        last: k1 == job.words,
                    };
                    macro_rules! by_rows {
                        ($($r:literal)*) => { match rows { $($r => tile.compute::<S, W, $r>(job.ldc, job.mode),)* _ => unreachable!() } };
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

struct Tile {
    a: *const u32,
    b: *const u32,
    words: usize,
    c: *mut f32,
    columns: usize,
    bias: *const f32,
    partial: *mut f32,
    first: bool,
    last: bool,
}

impl Tile {
    #[inline(always)]
    unsafe fn compute<S: Simd, W: Words, const R: usize>(&self, ldc: usize, mode: Mode) {
        let l = S::LANES;
        // SAFETY: the caller gives a tile that lies inside the operands, C and the partial sums.
        unsafe {
            let mut acc = [[S::splat(0.0); 2]; R];
            let low = self.columns.min(l);
            let high = self.columns - low;
            if !self.first {
                for (r, acc) in acc.iter_mut().enumerate() {
                    acc[0] = S::load(self.partial.add(r * 2 * l));
                    acc[1] = S::load(self.partial.add(r * 2 * l + l));
                }
            } else if mode == Mode::Chain {
                for (r, acc) in acc.iter_mut().enumerate() {
                    acc[0] = S::load_n(self.c.add(r * ldc), low);
                    acc[1] = S::load_n(self.c.add(r * ldc + low), high);
                }
            }
            let (mut a, mut b) = (self.a, self.b);
            for _ in 0..self.words {
                for (r, acc) in acc.iter_mut().enumerate() {
                    let word = *a.add(r);
                    acc[0] = W::multiply_add::<S>(acc[0], word, b);
                    acc[1] = W::multiply_add::<S>(acc[1], word, b.add(l));
                }
                a = a.add(R);
                b = b.add(2 * l);
            }
            if !self.last {
                for (r, acc) in acc.iter().enumerate() {
                    S::store(self.partial.add(r * 2 * l), acc[0]);
                    S::store(self.partial.add(r * 2 * l + l), acc[1]);
                }
                return;
            }
            if !self.bias.is_null() {
                let bias = [S::load_n(self.bias, low), S::load_n(self.bias.add(low), high)];
                for acc in acc.iter_mut() {
                    *acc = [S::add(acc[0], bias[0]), S::add(acc[1], bias[1])];
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                let c = self.c.add(r * ldc);
                let mut sums = *acc;
                if mode == Mode::Add {
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
}
