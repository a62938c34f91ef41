//! Sequences over scattered pages, the batches that go through them, and attention without what is around it.

use crate::ops::{Ops, Tables};
use crate::support::Random;
use qurl_kernels::ops::{Attend, AttendBackward, KeptAttention};
use qurl_kernels::types::{Batch, Heads, KvFormat, KvShape, SampleRow, Span, Token};
use qurl_kernels::{Device, Format, Queue};
use std::ops::Range;

/// Heads with the usual scale that see everything before them.
pub fn heads(kv_heads: usize, group: usize, head_dim: usize) -> Heads {
    let scale = 1.0 / (head_dim as f32).sqrt();
    Heads { heads: kv_heads * group, kv_heads, head_dim, scale, window: None }
}

/// Sequences whose pages are scattered over a store with a few spare pages.
pub struct Paged {
    pub page_size: usize,
    pub store_pages: usize,
    /// The page list of all sequences.
    pub pages: Vec<u32>,
    starts: Vec<usize>,
}

impl Paged {
    pub fn scattered(random: &mut Random, lengths: &[usize], page_size: usize) -> Paged {
        let counts = lengths.iter().map(|len| len.div_ceil(page_size));
        let mut starts = vec![0];
        for count in counts {
            starts.push(starts[starts.len() - 1] + count);
        }
        let used = starts[lengths.len()];
        let mut pages = random.shuffled(used + 3);
        pages.truncate(used);
        Paged { page_size, store_pages: used + 3, pages, starts }
    }

    /// Slots of some positions of a sequence.
    pub fn slots(&self, sequence: usize, positions: Range<usize>) -> Vec<u32> {
        let table = &self.pages[self.starts[sequence]..self.starts[sequence + 1]];
        positions
            .map(|p| table[p / self.page_size] * self.page_size as u32 + (p % self.page_size) as u32)
            .collect()
    }

    /// Rows `row..` of the batch, `rows` of them, are the positions from `position` of a sequence.
    pub fn span(&self, sequence: usize, row: usize, rows: usize, position: usize) -> Span {
        Span { row, rows, position, pages: self.starts[sequence] }
    }

    /// A page that no sequence has.
    pub fn spare_page(&self) -> u32 {
        (0..self.store_pages as u32).find(|page| !self.pages.contains(page)).expect("a spare page")
    }

    /// Puts another page in the place of the `index`-th of a sequence.
    pub fn replace_page(&mut self, sequence: usize, index: usize, page: u32) -> u32 {
        std::mem::replace(&mut self.pages[self.starts[sequence] + index], page)
    }

    /// A batch with the rows of these positions of sequences, side by side; tokens are zeros.
    pub fn batch(&self, runs: impl IntoIterator<Item = (usize, Range<usize>)>) -> Batch {
        let mut batch = Batch { pages: self.pages.clone(), ..Batch::default() };
        for (sequence, positions) in runs {
            if positions.is_empty() {
                continue;
            }
            batch.spans.push(self.span(sequence, batch.rows(), positions.len(), positions.start));
            batch.tokens.extend(positions.clone().map(|_| Token::Id(0)));
            batch.slots.extend(self.slots(sequence, positions.clone()));
            batch.positions.extend(positions.map(|p| p as u32));
        }
        batch
    }

    pub fn kv_shape(&self, heads: Heads, format: KvFormat) -> KvShape {
        let (kv_heads, head_dim) = (heads.kv_heads, heads.head_dim);
        KvShape { format, pages: self.store_pages, page_size: self.page_size, kv_heads, head_dim }
    }

    /// A store in which every slot holds NaN: what was never written must never matter.
    pub fn stale_store<D: Device>(&self, ops: &Ops<D>, heads: Heads, format: KvFormat) -> D::Kv {
        let mut kv = ops.device().kv_pages(self.kv_shape(heads, format)).expect("memory for a test");
        // Every page is a sequence of its own.
        let one_each = Paged {
            page_size: self.page_size,
            store_pages: self.store_pages,
            pages: (0..self.store_pages as u32).collect(),
            starts: (0..=self.store_pages).collect(),
        };
        let rows = one_each.batch((0..self.store_pages).map(|page| (page, 0..self.page_size)));
        let tables = Tables::still(ops, self.page_size, heads.head_dim);
        let (batch, d) = (ops.load(&rows), 16);
        let o = ops.frozen(&vec![0.0; d * heads.q_width()], d, heads.q_width(), Format::F32);
        let (mut qkv, mut x) = (ops.stale(rows.rows() * heads.qkv_width()), ops.stale(rows.rows() * d));
        ops.queue().attend(Attend {
            adapter: None,
            heads,
            batch: &batch,
            qkv: &mut qkv,
            qk_norm: None,
            rope: tables.rope(),
            kv: &mut kv,
            o: &o,
            x: &mut x,
            kept: None,
        });
        kv
    }
}

/// A batch of one sequence, every row of which is sampled as said.
pub fn sampling(samples: Vec<SampleRow>) -> Batch {
    let rows = samples.len();
    let batch = Paged::scattered(&mut Random::new(1), &[rows], 16).batch([(0, 0..rows)]);
    Batch { sampled_rows: (0..rows as u32).collect(), samples, ..batch }
}

/// Attention alone: no norms of heads, no rotation, and the identity in f32 as output projection, which is
/// exact.
pub struct Attention<D: Device> {
    heads: Heads,
    tables: Tables<D>,
    o: D::Weight,
}

impl<D: Device> Attention<D> {
    /// For sequences of at most so many positions.
    pub fn new(ops: &Ops<D>, heads: Heads, positions: usize) -> Attention<D> {
        let tables = Tables::still(ops, positions, heads.head_dim);
        Attention { heads, tables, o: ops.identity(heads.q_width()) }
    }

    /// Stores the rows and attends: output and logarithms of the softmax denominators, as kept for a backward
    /// pass. `qkv` holds the rounded rows afterwards.
    pub fn kept(&self, ops: &Ops<D>, rows: &Batch, qkv: &mut D::Tensor, kv: &mut D::Kv) -> [D::Tensor; 2] {
        let count = rows.rows();
        let (mut out, mut lse) =
            (ops.stale(count * self.heads.q_width()), ops.stale(count * self.heads.heads));
        let kept = KeptAttention { raw: None, out: &mut out, lse: &mut lse };
        self.attend(ops, rows, qkv, kv, Some(kept));
        [out, lse]
    }

    /// Stores the rows and attends, keeping nothing: the output. `qkv` is used up.
    pub fn output(&self, ops: &Ops<D>, rows: &Batch, qkv: &mut D::Tensor, kv: &mut D::Kv) -> D::Tensor {
        self.attend(ops, rows, qkv, kv, None)
    }

    fn attend(
        &self,
        ops: &Ops<D>,
        rows: &Batch,
        qkv: &mut D::Tensor,
        kv: &mut D::Kv,
        kept: Option<KeptAttention<D>>,
    ) -> D::Tensor {
        let (heads, o, rope) = (self.heads, &self.o, self.tables.rope());
        let batch = &ops.load(rows);
        let mut x = ops.up(&vec![0.0; rows.rows() * heads.q_width()]);
        ops.queue().attend(Attend {
            adapter: None,
            heads,
            batch,
            qkv,
            qk_norm: None,
            rope,
            kv,
            o,
            x: &mut x,
            kept,
        });
        x
    }

    /// Gradient of the rows that went in, for whole sequences.
    pub fn backward(
        &self,
        ops: &Ops<D>,
        rows: &Batch,
        kv_format: KvFormat,
        qkv: &D::Tensor,
        [out, lse]: &[D::Tensor; 2],
        dout: &D::Tensor,
    ) -> D::Tensor {
        let (heads, o, rope) = (self.heads, &self.o, self.tables.rope());
        let batch = &ops.load(rows);
        let mut dqkv = ops.stale(rows.rows() * heads.qkv_width());
        ops.queue().attend_backward(AttendBackward {
            adapter: None,
            heads,
            batch,
            kv_format,
            qkv,
            qk_norm: None,
            rope,
            out,
            lse,
            o,
            dx: dout,
            d_o: None,
            dqkv: &mut dqkv,
        });
        dqkv
    }
}
