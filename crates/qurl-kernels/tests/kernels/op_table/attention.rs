//! Attention over scattered pages: whole sequences with their backward, and rows that continue a stored prefix.
//!
//! The first rows of a sequence see few keys and are several times larger than the average, by which the tolerance
//! is measured: hence the factors on it.

use super::{Case, Want, sum_units};
use crate::naive_attention::{self, Store};
use crate::support::{Paged, Random, down, heads, up, wide};
use qurl_kernels::backend::{Backend, Heads, KvFormat, Span};
use std::rc::Rc;

/// Lengths of the sequences, (key/value heads, group, head dimension), page size.
type Shape = (&'static [usize], (usize, usize, usize), usize);

/// Some are for the ways in which the backward pass on a GPU shares out heads: many sequences, or long ones.
const SHAPES: [Shape; 13] = [
    (&[1], (1, 1, 8), 16),
    (&[13, 1, 70], (1, 2, 16), 16),
    (&[65, 130], (1, 7, 64), 32),
    (&[5, 100], (2, 2, 80), 64),
    (&[64], (2, 7, 128), 128),
    (&[33, 17], (2, 1, 256), 16),
    (&[200], (1, 1, 20), 32),
    (&[3, 129, 64, 16], (3, 1, 16), 64),
    (&[150], (1, 2, 64), 128),
    (&[1, 300, 77], (2, 3, 128), 64),
    (&[3; 133], (2, 4, 64), 16),
    (&[2; 133], (4, 2, 64), 16),
    (&[2; 133], (4, 2, 128), 16),
];

struct Inputs {
    heads: Heads,
    paged: Paged,
    lengths: Vec<usize>,
    rows: usize,
    qkv: Vec<f32>,
    dout: Vec<f32>,
}

impl Inputs {
    fn new(lengths: &[usize], heads: Heads, page_size: usize, seed: u64) -> Inputs {
        let mut random = Random::new(seed);
        let rows: usize = lengths.iter().sum();
        Inputs {
            heads,
            paged: Paged::scattered(&mut random, lengths, page_size),
            lengths: lengths.to_vec(),
            rows,
            qkv: random.normals(rows * heads.qkv_width()),
            dout: random.normals(rows * heads.heads * heads.head_dim),
        }
    }

    fn slots(&self) -> Vec<u32> {
        self.lengths.iter().enumerate().flat_map(|(i, &len)| self.paged.slots(i, 0..len)).collect()
    }

    /// The sequences as spans, each without its first `skip(length)` positions.
    fn spans(&self, skip: impl Fn(usize) -> usize) -> Vec<Span> {
        let mut row = 0;
        let span = |(i, &len): (usize, &usize)| {
            let rows = len - skip(len);
            row += rows;
            self.paged.span(i, row - rows, rows, skip(len))
        };
        self.lengths.iter().enumerate().map(span).collect()
    }

    /// The rows that are left when each sequence skips its first positions.
    fn rows_after(&self, skip: impl Fn(usize) -> usize) -> Vec<f32> {
        let width = self.heads.qkv_width();
        let (mut rows, mut start) = (Vec::new(), 0);
        for &len in &self.lengths {
            rows.extend_from_slice(&self.qkv[(start + skip(len)) * width..(start + len) * width]);
            start += len;
        }
        rows
    }
}

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut cases = Vec::new();
    for format in [KvFormat::F32, KvFormat::Bf16] {
        for (seed, (lengths, (kv_heads, group, head_dim), page_size)) in SHAPES.into_iter().enumerate() {
            let inputs = Inputs::new(lengths, heads(kv_heads, group, head_dim), page_size, seed as u64);
            let inputs = Rc::new(inputs);
            cases.push(whole(inputs.clone(), format));
            cases.push(continued(inputs, format));
        }
    }
    cases
}

fn name(kind: &str, i: &Inputs, format: KvFormat) -> String {
    let (h, page) = (i.heads, i.paged.page_size);
    let lengths = match i.lengths.len() {
        0..8 => format!("{:?}", i.lengths),
        many => format!("{many} of {}", i.lengths[0]),
    };
    format!("{kind} {format:?} {lengths} heads {}/{}x{} pages of {page}", h.heads, h.kv_heads, h.head_dim)
}

fn whole<B: Backend>(inputs: Rc<Inputs>, format: KvFormat) -> Case<B> {
    let name = name("attention", &inputs, format);
    let given = inputs.clone();
    let run = move |backend: &B| {
        let Inputs { heads, rows, .. } = *given;
        let (spans, pages) = (given.spans(|_| 0), &given.paged.pages);
        let mut qkv = up(backend, &given.qkv);
        backend.round_kv(&mut qkv, rows, heads, format);
        let mut kv = given.paged.stale_store(backend, heads, format);
        backend.kv_write(&qkv, heads, &given.slots(), &mut kv);
        let mut out = up(backend, &vec![f32::NAN; given.dout.len()]);
        let mut lse = up(backend, &vec![f32::NAN; rows * heads.heads]);
        backend.attention(heads, &qkv, &kv, &spans, pages, &mut out, Some(&mut lse));
        let mut dqkv = up(backend, &vec![f32::NAN; given.qkv.len()]);
        let dout = up(backend, &given.dout);
        backend.attention_backward(heads, format, &qkv, &spans, &out, &dout, &lse, &mut dqkv);
        [qkv, out, lse, dqkv].iter().map(|t| down(backend, t)).collect()
    };
    let want = move || {
        let Inputs { heads, rows, .. } = *inputs;
        let spans = inputs.spans(|_| 0);
        let qkv = naive_attention::round_kv(&wide(&inputs.qkv), heads, format);
        let mut kv = Store::new(inputs.paged.store_pages, inputs.paged.page_size, heads);
        kv.write(&qkv, heads, &inputs.slots());
        let (out, lse) = naive_attention::attention(heads, &qkv, &kv, &spans, &inputs.paged.pages, rows);
        let dqkv = naive_attention::attention_backward(heads, &qkv, &spans, &wide(&inputs.dout));
        let units = sum_units(heads.head_dim);
        vec![
            Want::new("rounded", qkv, 0.0),
            Want::new("out", out, 4.0 * units),
            Want::new("lse", lse, units),
            Want::new("dqkv", dqkv, 8.0 * units),
        ]
    };
    Case { name, run: Box::new(run), want: Box::new(want) }
}

fn continued<B: Backend>(inputs: Rc<Inputs>, format: KvFormat) -> Case<B> {
    let skip = |len: usize| len * 2 / 3;
    let name = name("continued attention", &inputs, format);
    let given = inputs.clone();
    let run = move |backend: &B| {
        let heads = given.heads;
        let mut kv = given.paged.stale_store(backend, heads, format);
        backend.kv_write(&up(backend, &given.qkv), heads, &given.slots(), &mut kv);
        let (spans, rows) = (given.spans(skip), given.rows_after(skip));
        let mut out =
            up(backend, &vec![f32::NAN; rows.len() / heads.qkv_width() * heads.heads * heads.head_dim]);
        backend.attention(heads, &up(backend, &rows), &kv, &spans, &given.paged.pages, &mut out, None);
        vec![down(backend, &out)]
    };
    let want = move || {
        let heads = inputs.heads;
        let mut kv = Store::new(inputs.paged.store_pages, inputs.paged.page_size, heads);
        kv.write(&naive_attention::round_kv(&wide(&inputs.qkv), heads, format), heads, &inputs.slots());
        let (spans, rows) = (inputs.spans(skip), wide(&inputs.rows_after(skip)));
        let count = rows.len() / heads.qkv_width();
        let (out, _) = naive_attention::attention(heads, &rows, &kv, &spans, &inputs.paged.pages, count);
        vec![Want::new("out", out, 4.0 * sum_units(heads.head_dim))]
    };
    Case { name, run: Box::new(run), want: Box::new(want) }
}
