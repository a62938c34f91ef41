//! GEMMs: one register-tiled driver for every number format.
//!
//! `C[m,n] = sum_k A[m,k] B[k,n]`. Both operands are packed first: A into strips of `MR` rows, B into panels
//! of two vectors of columns, each as `[k][lane]`, so that the inner loop reads memory straight ahead. A
//! packed word is 32 bits in every format: one f32, a pair of bf16 or four bytes that are neighbours along k.
//! In f32 a word is a number as it lies in memory: many rows of A are then multiplied where they are
//! ([`Lies::Rows`]), a tile reading each of its rows for itself, and so are both operands of weight
//! gradients.
//!
//! **Order of summation.** Every output is one chain over k in ascending order, whatever the number of rows,
//! the blocking or the threads. That is why a row has the same bits alone and in a batch, in prefill and in
//! decode. The chain may start at the value already in C ([`Mode::Chain`]): gradients accumulated over
//! micro-batches are then the same chain as over one large batch.

mod decode;
mod tile;
mod words;

pub(crate) use decode::{Codes, NVFP4_GROUP};
pub(crate) use tile::{Factors, Job, Kind, Lies};

use super::Context;
use super::buf::{Aligned, Borrowed, Parts};
use super::pack::{self, Layout};
use super::quant::QuantB;
use super::source::{Piece, Source};
use crate::types::DeviceError;
use std::cell::RefCell;

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
    /// `C = C + (A B (+ bias))`: the GEMM is summed first.
    Add,
    /// `C = ((C + a_0 b_0) + a_1 b_1) + ...`: the sum continues from C.
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
    /// A buffer for a right operand of `k` by `n`.
    pub fn new(ctx: &Context, precision: Precision, k: usize, n: usize) -> Result<Self, DeviceError> {
        let words = n.div_ceil(ctx.panel()) * ctx.panel() * k.div_ceil(precision.per_word());
        Ok(PackedB { words: ctx.weights.zeros(words)?, precision, k, n })
    }

    /// Fills it from a row-major matrix: `[n, k]` (`transpose`, as linear layers store their weights) or `[k,
    /// n]`.
    pub fn fill(&mut self, ctx: &Context, source: &[f32], transpose: bool) {
        let layout = if transpose { Layout::LanesByK } else { Layout::KByLanes };
        let shape = pack::Shape { lanes: self.n, k: self.k, width: ctx.panel(), pad: true };
        pack::pack(ctx, self.precision, layout, source, shape, &mut self.words);
    }

    /// Number format of the panels.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The numbers of one column of B: a row of a linear layer's weights.
    pub(crate) fn row(&self, ctx: &Context, column: usize, to: &mut [f32]) {
        let (width, per_word) = (ctx.panel(), self.precision.per_word());
        let panel = column / width * self.k.div_ceil(per_word) * width + column % width;
        for (i, to) in to.iter_mut().enumerate() {
            let word = self.words[panel + i / per_word * width];
            *to = match self.precision {
                Precision::F32 => f32::from_bits(word),
                Precision::Bf16 => f32::from_bits(word >> (16 * (i % 2)) << 16),
            };
        }
    }

    /// Bytes of the packed panels.
    pub fn bytes(&self) -> usize {
        self.words.len() * 4
    }
}

/// A right operand in any format.
#[derive(Clone, Copy)]
pub enum Right<'a> {
    /// f32 or bf16.
    Float(&'a PackedB),
    /// Codes with scales.
    Quantized(&'a QuantB),
}

impl<'a> From<&'a PackedB> for Right<'a> {
    fn from(b: &'a PackedB) -> Self {
        Right::Float(b)
    }
}

impl<'a> From<&'a QuantB> for Right<'a> {
    fn from(b: &'a QuantB) -> Self {
        Right::Quantized(b)
    }
}

impl Right<'_> {
    /// Columns.
    pub fn n(&self) -> usize {
        match self {
            Right::Float(b) => b.n,
            Right::Quantized(b) => b.n(),
        }
    }

    /// The summed dimension.
    pub fn k(&self) -> usize {
        match self {
            Right::Float(b) => b.k,
            Right::Quantized(b) => b.k(),
        }
    }

    /// Bytes that a GEMM reads.
    fn bytes(&self) -> usize {
        match self {
            Right::Float(b) => b.bytes(),
            Right::Quantized(b) => b.bytes(),
        }
    }

    /// Words of a row of the left operand, packed as this right operand needs it, and its scales.
    fn left_words(&self) -> (usize, usize) {
        match self {
            Right::Float(b) => (b.k.div_ceil(b.precision.per_word()), 0),
            Right::Quantized(b) => b.left_words(),
        }
    }

    /// Packs some rows of a left operand.
    fn pack_piece(&self, ctx: &Context, left: &LeftParts, piece: Piece) {
        match self {
            Right::Float(b) => pack::pack_piece(ctx, b.precision, b.k, left.strips, piece),
            Right::Quantized(b) => b.pack_left(ctx, left, piece),
        }
    }

    /// Whether `rows` rows of a left operand are multiplied where they lie: a word of f32 is a number, and a
    /// tile can read each of its rows for itself. A few strips are packed: one alone prefetches B that way.
    fn left_lies(&self, ctx: &Context, rows: usize) -> bool {
        let float = matches!(self, Right::Float(b) if b.precision == Precision::F32);
        float && rows > 4 * ctx.strip()
    }

    /// Packs the left operand `x[rows, k]` as this right operand needs it.
    pub(crate) fn pack_left<'c>(&self, ctx: &'c Context, x: &Source<'c>, rows: usize) -> Left<'c> {
        let (words, scales) = self.left_words();
        if self.left_lies(ctx, rows) {
            if !matches!(x, Source::Ready(_)) {
                x.pack(ctx, rows, self.k(), &|_| {});
            }
            return Left { _memory: None, parts: LeftParts::lying(x.made(), rows, words) };
        }
        let mut memory = ctx.scratch.take(rows * (words + scales));
        let parts = LeftParts::new(&mut memory, rows, words);
        x.pack(ctx, rows, self.k(), &|piece| self.pack_piece(ctx, &parts, piece));
        Left { _memory: Some(memory), parts }
    }

    /// The GEMM with a packed left operand.
    pub(crate) fn job(&self, left: &LeftParts, bias: Option<&[f32]>, mode: Mode, out: &mut [f32]) -> Job {
        let (b, panel_words, kind, codes, factors) = match self {
            Right::Float(b) => {
                (b.words.as_ptr(), left.words, b.precision.into(), Codes::Words, Factors::NONE)
            }
            Right::Quantized(b) => b.parts(left),
        };
        Job {
            m: left.rows,
            n: self.n(),
            words: left.words,
            kind,
            a: left.strips.first(),
            a_lies: left.lies,
            b,
            b_step: 0,
            panel_words,
            codes,
            factors,
            c: Parts::new(out),
            ldc: self.n(),
            bias: bias.map_or(std::ptr::null(), <[f32]>::as_ptr),
            mode,
        }
    }
}

/// A left operand, packed into strips.
pub(crate) struct Left<'a> {
    /// Keeps what `parts` points to, unless that lies in the source.
    _memory: Option<Borrowed<'a>>,
    pub parts: LeftParts,
}

/// Where a left operand lies; every row belongs to one thread while it is packed.
pub(crate) struct LeftParts {
    /// Strips, or the rows as they are.
    pub strips: Parts<u32>,
    pub lies: Lies,
    /// Scales `[rows][blocks of k]` as bits of f32, where rows are quantized.
    pub scales: Parts<u32>,
    pub rows: usize,
    /// Words along k.
    pub words: usize,
}

impl LeftParts {
    /// `rows` rows of `words` words, and scales in what is left of the memory.
    fn new(memory: &mut [u32], rows: usize, words: usize) -> LeftParts {
        let (strips, scales) = memory.split_at_mut(rows * words);
        LeftParts { strips: Parts::new(strips), lies: Lies::Strips, scales: Parts::new(scales), rows, words }
    }

    /// f32 rows as they are; they are only read.
    fn lying(from: *const f32, rows: usize, words: usize) -> LeftParts {
        LeftParts {
            strips: Parts::reading(from.cast()),
            lies: Lies::Rows,
            scales: Parts::new(&mut []),
            rows,
            words,
        }
    }
}

impl From<Precision> for Kind {
    fn from(precision: Precision) -> Kind {
        match precision {
            Precision::F32 => Kind::F32,
            Precision::Bf16 => Kind::Bf16,
        }
    }
}

/// `out[rows, n] += x[rows, range] B[range, n]`, the chain continuing from `out`: a GEMM in pieces along k.
/// The range must begin and end at whole words.
pub(crate) fn matmul_part(ctx: &Context, x: &[f32], rows: usize, b: &PackedB, range: Span, out: &mut [f32]) {
    let per_word = b.precision.per_word();
    assert!(range.start.is_multiple_of(per_word) && (range.end.is_multiple_of(per_word) || range.end == b.k));
    assert!(x.len() >= rows * range.len() && out.len() >= rows * b.n, "matmul part: shapes");
    let words = range.len().div_ceil(per_word);
    let lies = Right::Float(b).left_lies(ctx, rows);
    let mut strips = ctx.scratch.take(if lies { 0 } else { rows * words });
    if !lies {
        pack::pack_rows(ctx, b.precision, &Source::Ready(x), rows, range.len(), &mut strips);
    }
    let job = Job {
        m: rows,
        n: b.n,
        words,
        kind: b.precision.into(),
        a: if lies { x.as_ptr().cast() } else { strips.as_ptr() },
        a_lies: if lies { Lies::Rows } else { Lies::Strips },
        b: b.words[range.start / per_word * ctx.panel()..].as_ptr(),
        b_step: 0,
        panel_words: b.k.div_ceil(per_word),
        codes: Codes::Words,
        factors: Factors::NONE,
        c: Parts::new(out),
        ldc: b.n,
        bias: std::ptr::null(),
        mode: Mode::Chain,
    };
    run(ctx, &job);
}

/// `out[rows, n] += x[rows, k] b[k, n]`, the chain continuing from `out`: a GEMM with an operand that is not
/// packed before.
pub(crate) fn accumulate(
    ctx: &Context,
    precision: Precision,
    x: &[f32],
    rows: usize,
    b: &[f32],
    k: usize,
    n: usize,
    out: &mut [f32],
) {
    assert!(x.len() >= rows * k && b.len() >= k * n && out.len() >= rows * n, "accumulate: shapes");
    let words = k.div_ceil(precision.per_word());
    let mut strips = ctx.scratch.take(rows * words);
    pack::pack_rows(ctx, precision, &Source::Ready(x), rows, k, &mut strips);
    let mut panels = ctx.scratch.take(n.div_ceil(ctx.panel()) * ctx.panel() * words);
    let shape = pack::Shape { lanes: n, k, width: ctx.panel(), pad: true };
    pack::pack(ctx, precision, Layout::KByLanes, b, shape, &mut panels);
    let job = Job {
        m: rows,
        n,
        words,
        kind: precision.into(),
        a: strips.as_ptr(),
        a_lies: Lies::Strips,
        b: panels.as_ptr(),
        b_step: 0,
        panel_words: words,
        codes: Codes::Words,
        factors: Factors::NONE,
        c: Parts::new(out),
        ldc: n,
        bias: std::ptr::null(),
        mode: Mode::Chain,
    };
    run(ctx, &job);
}

/// `out[rows, n] (+)= x[rows, k] B (+ bias)`; [`Mode::Chain`] is for floats only.
pub fn matmul<'a>(
    ctx: &Context,
    x: &[f32],
    rows: usize,
    b: impl Into<Right<'a>>,
    bias: Option<&[f32]>,
    mode: Mode,
    out: &mut [f32],
) {
    let b = b.into();
    assert!(x.len() >= rows * b.k(), "matmul: {rows} rows of {}", b.k());
    multiply(ctx, &Source::Ready(x), rows, b, bias, mode, out);
}

/// `out (+)= rmsnorm(x) B (+ bias)`
pub fn norm_matmul<'a>(
    ctx: &Context,
    x: &[f32],
    gain: &[f32],
    eps: f32,
    rows: usize,
    b: impl Into<Right<'a>>,
    bias: Option<&[f32]>,
    mode: Mode,
    out: &mut [f32],
) {
    let b = b.into();
    let len = rows * b.k();
    assert!(gain.len() == b.k() && x.len() >= len, "matmul of normed rows: shapes");
    let mut normed = ctx.scratch.take(len);
    let source = Source::Normed { x, gain, eps, into: Parts::new(normed.floats()) };
    multiply(ctx, &source, rows, b, bias, mode, out);
}

/// `out (+)= swiglu(gate_up) B`
pub fn swiglu_matmul<'a>(
    ctx: &Context,
    gate_up: &[f32],
    rows: usize,
    b: impl Into<Right<'a>>,
    mode: Mode,
    out: &mut [f32],
) {
    let b = b.into();
    let len = rows * b.k();
    assert!(gate_up.len() >= 2 * len, "matmul of activated rows: shapes");
    let mut activated = ctx.scratch.take(len);
    let source = Source::Activated { gate_up, into: Parts::new(activated.floats()) };
    multiply(ctx, &source, rows, b, None, mode, out);
}

fn multiply(
    ctx: &Context,
    x: &Source,
    rows: usize,
    b: Right<'_>,
    bias: Option<&[f32]>,
    mode: Mode,
    out: &mut [f32],
) {
    assert!(out.len() >= rows * b.n(), "GEMM: {rows} rows of {}", b.n());
    assert!(bias.is_none_or(|bias| bias.len() == b.n()), "GEMM: bias length");
    assert!(mode != Mode::Chain || matches!(b, Right::Float(_)), "quantized GEMMs cannot accumulate into C");
    if ctx.threads() > 1 && rows >= ROWS_APART * ctx.threads() && b.bytes() <= BYTES_APART {
        return multiply_rows_apart(ctx, x, rows, b, bias, mode, out);
    }
    let left = b.pack_left(ctx, x, rows);
    run(ctx, &b.job(&left.parts, bias, mode, out));
}

/// Rows of a thread from which on threads share out the rows of a GEMM instead of its columns,
const ROWS_APART: usize = 8;
/// as long as the right operand is not larger than this: every thread reads all of it, from its own L2.
const BYTES_APART: usize = 384 << 10;

/// A GEMM whose threads have rows of their own. They need not wait for each other between packing and
/// multiplying, and as long as all GEMMs of a model do so, a row stays in the caches of one thread.
fn multiply_rows_apart(
    ctx: &Context,
    x: &Source,
    rows: usize,
    b: Right<'_>,
    bias: Option<&[f32]>,
    mode: Mode,
    out: &mut [f32],
) {
    let (n, (words, scales)) = (b.n(), b.left_words());
    let lies = b.left_lies(ctx, rows);
    let out = Parts::new(out);
    let strip = ctx.strip();
    let parts = ctx.threads() * rows.div_ceil(ctx.threads() * 8 * strip);
    // Few rows are shared out evenly, of many only whole strips: the lower ones take longer a row.
    let unit = if rows >= 4 * strip * parts { strip } else { 1 };
    let begin = |part: usize| (rows * part / parts).next_multiple_of(unit).min(rows);
    ctx.pool.for_runs(parts, 1, 2, &|range| {
        for part in range {
            let part = begin(part)..begin(part + 1);
            OWN_LEFT.with_borrow_mut(|memory| {
                let len = if lies { 0 } else { part.len() * (words + scales) };
                if memory.len() < len {
                    *memory = Aligned::zeros(len);
                }
                let left = match lies {
                    // SAFETY: the part is among the rows of the source.
                    true => LeftParts::lying(unsafe { x.made().add(part.start * words) }, part.len(), words),
                    false => LeftParts::new(&mut memory[..len], part.len(), words),
                };
                // SAFETY: the part's rows belong to this task, and the memory of its left operand to this
                // thread.
                unsafe {
                    x.pack_part(ctx, part.clone(), part.clone(), b.k(), &|piece| {
                        if lies {
                            return;
                        }
                        let (first, strip) = (piece.first - part.start, piece.strip - part.start);
                        b.pack_piece(ctx, &left, Piece { first, strip, ..piece });
                    });
                    let job = b.job(&left, bias, mode, out.slice(part.start * n, part.len() * n));
                    run_block(ctx, &job, 0..part.len().div_ceil(ctx.strip()), 0..n.div_ceil(ctx.panel()));
                }
            });
        }
    });
}

thread_local! {
    /// Rows on their way into a GEMM that a thread packs for itself. Memory that another thread has written
    /// before would have to be fetched from its caches.
    static OWN_LEFT: RefCell<Aligned<u32>> = RefCell::new(Aligned::zeros(0));
}

/// Tokens that are multiplied at a time for a weight gradient.
const TOKEN_BLOCK: usize = 512;

/// Rows of a weight gradient up to which f32 activations are multiplied where they lie: every strip of so
/// many rows reads them again, and of more it would be worth to pack them.
const FEW_ROWS: usize = 1024;
/// Bytes of a row of such activations: as long as a page, each would need an address translation of its own.
const SHORT_ROW: usize = 4096;

/// `dw[n, k] += sum_t dy[t, n] x[t, k]`, one chain over the tokens that continues from `dw`.
///
/// f32 operands need not be packed: a word is a number, and its neighbours along a row are those of a strip
/// or a panel. Gradients `dy` are always read where they lie, since a strip reads a line for twelve numbers.
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
    let dy_lies = precision == Precision::F32;
    // A panel that is wider than what is left of a row would read beyond the last one.
    let x_lies = dy_lies && n <= FEW_ROWS && 4 * k < SHORT_ROW && k.is_multiple_of(ctx.panel());
    let mut strips = ctx.scratch.take(if dy_lies { 0 } else { n * block_words });
    let lanes = k.next_multiple_of(ctx.panel());
    let mut panels = ctx.scratch.take(if x_lies { 0 } else { lanes * block_words });
    for start in (0..tokens).step_by(TOKEN_BLOCK) {
        let block = TOKEN_BLOCK.min(tokens - start);
        let words = block.div_ceil(precision.per_word());
        let (dy, x) = (&dy[start * n..(start + block) * n], &x[start * k..(start + block) * k]);
        if !dy_lies {
            let shape = pack::Shape { lanes: n, k: block, width: ctx.strip(), pad: false };
            pack::pack(ctx, precision, Layout::KByLanes, dy, shape, &mut strips);
        }
        if !x_lies {
            let shape = pack::Shape { lanes: k, k: block, width: ctx.panel(), pad: true };
            pack::pack(ctx, precision, Layout::KByLanes, x, shape, &mut panels);
        }
        run(
            ctx,
            &Job {
                m: n,
                n: k,
                words,
                kind: precision.into(),
                a: if dy_lies { dy.as_ptr().cast() } else { strips.as_ptr() },
                a_lies: if dy_lies { Lies::Columns(n) } else { Lies::Strips },
                b: if x_lies { x.as_ptr().cast() } else { panels.as_ptr() },
                b_step: if x_lies { k } else { 0 },
                panel_words: words,
                codes: Codes::Words,
                factors: Factors::NONE,
                c: Parts::new(dw),
                ldc: k,
                bias: std::ptr::null(),
                mode: Mode::Chain,
            },
        );
    }
}

/// Strips that one task walks through for each panel: its part of A stays in the L2.
pub(crate) const STRIPS_PER_BLOCK: usize = 16;
/// Words along k in one pass: the strip stays in the first-level cache and the panel in the second.
const K_BLOCK: usize = 512;

/// Words of A times columns of B, about one microsecond's: so much a thread takes at a time.
const RUN_WORK: usize = 1 << 14;

/// Runs a GEMM on all threads: each streams a contiguous part of the panels, a block of strips at a time.
fn run(ctx: &Context, job: &Job) {
    let strip_count = job.m.div_ceil(ctx.strip());
    let strip_blocks = strip_count.div_ceil(STRIPS_PER_BLOCK);
    let panel_count = job.n.div_ceil(ctx.panel());
    let panel_work = job.m.min(ctx.strip() * STRIPS_PER_BLOCK) * job.words * ctx.panel();
    let most = RUN_WORK / panel_work.max(1) + 1;
    ctx.pool.for_runs(strip_blocks * panel_count, most, 2 * most, &|mut part| {
        while !part.is_empty() {
            let (block, first) = (part.start / panel_count, part.start % panel_count);
            let panels = first..(first + part.len()).min(panel_count);
            let strips = block * STRIPS_PER_BLOCK..((block + 1) * STRIPS_PER_BLOCK).min(strip_count);
            part.start += panels.len();
            // SAFETY: the ranges lie inside the packed operands, and parts own disjoint tiles of C.
            unsafe { run_block(ctx, job, strips, panels) }
        }
    });
}

/// Runs a part of a GEMM on this thread; at most [`STRIPS_PER_BLOCK`] strips.
///
/// # Safety
/// The job's pointers are valid for its shape, and no other thread writes this part of C.
pub(crate) unsafe fn run_block(ctx: &Context, job: &Job, strips: Span, panels: Span) {
    // SAFETY: the level was detected when the context was made; the rest is the caller's promise.
    unsafe {
        match job.kind {
            Kind::F32 => tile::block_f32(ctx.level, job, strips, panels),
            Kind::Bf16 => tile::block_bf16(ctx.level, job, strips, panels),
            Kind::Int8 => tile::block_int8(ctx.level, job, strips, panels),
        }
    }
}

pub(crate) type Span = std::ops::Range<usize>;
