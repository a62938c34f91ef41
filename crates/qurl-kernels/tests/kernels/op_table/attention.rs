//! Attention alone over scattered pages: whole sequences with their backward, and rows that continue a stored
//! prefix. What is around it in [`Queue::attend`](qurl_kernels::Queue::attend) does nothing here: see
//! [`Attention`].
//!
//! The first rows of a sequence see few keys and are several times larger than the average, by which the
//! tolerance is measured: hence the factors on it.

use super::{Case, Want, sum_units};
use crate::naive_attention::{self, Store};
use crate::ops::Ops;
use crate::paged::{Attention, Paged, heads};
use crate::support::{Random, wide};
use qurl_kernels::Device;
use qurl_kernels::types::{Batch, Heads, KvFormat};
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
            qkv: random.normals(rows * heads.qkv_width()),
            dout: random.normals(rows * heads.q_width()),
        }
    }

    /// All rows of all sequences.
    fn whole(&self) -> Batch {
        self.paged.batch(self.lengths.iter().copied().enumerate().map(|(i, len)| (i, 0..len)))
    }

    /// The first two thirds of every sequence, or the rest: the batch and its rows.
    fn part(&self, rest: bool) -> (Batch, Vec<f32>) {
        let (width, mut rows, mut runs, mut start) = (self.heads.qkv_width(), Vec::new(), Vec::new(), 0);
        for (i, &len) in self.lengths.iter().enumerate() {
            let edge = len * 2 / 3;
            let positions = if rest { edge..len } else { 0..edge };
            rows.extend_from_slice(
                &self.qkv[(start + positions.start) * width..(start + positions.end) * width],
            );
            runs.push((i, positions));
            start += len;
        }
        (self.paged.batch(runs), rows)
    }

    fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }
}

/// Windows smaller than a block of keys, across its edges, of a tile and one more, and longer than any
/// sequence; then sequences of several tiles and splits on a GPU, and windows that begin inside of them.
const WINDOWS: [(usize, Shape); 15] = [
    (1, (&[13, 1, 70], (1, 2, 16), 16)),
    (5, (&[65, 130], (1, 7, 64), 32)),
    (16, (&[5, 100], (2, 2, 80), 64)),
    (17, (&[200], (1, 1, 20), 32)),
    (64, (&[150], (1, 2, 64), 128)),
    (65, (&[1, 300, 77], (2, 3, 128), 64)),
    (100, (&[3, 129, 64, 16], (3, 1, 16), 64)),
    (400, (&[33, 17], (2, 1, 256), 16)),
    (1, (&[130, 3], (2, 2, 64), 16)),
    (5, (&[3, 260], (1, 3, 128), 32)),
    (33, (&[2; 133], (2, 4, 64), 16)),
    (64, (&[600], (1, 2, 128), 16)),
    (100, (&[40, 330], (1, 2, 64), 32)),
    (130, (&[330, 5], (1, 2, 128), 16)),
    (513, (&[1060, 70], (1, 1, 64), 64)),
];

/// Everything that rows see: all before them, or windows of it.
pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    let everything = SHAPES.map(|shape| (None, shape));
    let windows = WINDOWS.map(|(window, shape)| (Some(window), shape));
    for format in [KvFormat::F32, KvFormat::Bf16] {
        for (seed, (window, shape)) in (0..).zip(everything).chain((50..).zip(windows)) {
            let (lengths, (kv_heads, group, head_dim), page_size) = shape;
            let heads = Heads { window, ..heads(kv_heads, group, head_dim) };
            let inputs = Rc::new(Inputs::new(lengths, heads, page_size, seed));
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
    let window = h.window.map_or(String::new(), |window| format!(" window {window}"));
    let heads = format!("{}/{}x{}{window}", h.heads, h.kv_heads, h.head_dim);
    format!("{kind} {format:?} {lengths} heads {heads} pages of {page}")
}

/// Tensor cores may be in it where pages are bf16.
fn want(format: KvFormat, name: &'static str, values: Vec<f64>, units: f64) -> Want {
    let want = Want::new(name, values, units);
    if format == KvFormat::Bf16 { want.on_tensor_cores(1e-2) } else { want }
}

fn whole<D: Device>(inputs: Rc<Inputs>, format: KvFormat) -> Case<D> {
    let name = name("attention", &inputs, format);
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let (i, rows) = (&*given, given.whole());
        let attention = Attention::new(ops, i.heads, i.longest());
        let (mut qkv, mut kv) = (ops.up(&i.qkv), i.paged.stale_store(ops, i.heads, format));
        let kept = attention.kept(ops, &rows, &mut qkv, &mut kv);
        let dqkv = attention.backward(ops, &rows, format, &qkv, &kept, &ops.up(&i.dout));
        let [out, lse] = kept;
        [qkv, out, lse, dqkv].iter().map(|t| ops.down(t)).collect()
    };
    let wanted = move || {
        let (heads, rows) = (inputs.heads, inputs.whole());
        let qkv = naive_attention::round_kv(&wide(&inputs.qkv), heads, format);
        let mut kv = Store::new(inputs.paged.store_pages, inputs.paged.page_size, heads);
        kv.write(&qkv, heads, &rows.slots);
        let (out, lse) = naive_attention::attention(heads, &qkv, &kv, &rows.spans, &rows.pages, rows.rows());
        let dqkv = naive_attention::attention_backward(heads, &qkv, &rows.spans, &wide(&inputs.dout));
        let units = sum_units(heads.head_dim);
        vec![
            Want::new("rounded", qkv, 0.0),
            want(format, "out", out, 4.0 * units),
            want(format, "lse", lse, units),
            want(format, "dqkv", dqkv, 8.0 * units),
        ]
    };
    Case { name, run: Box::new(run), want: Box::new(wanted) }
}

fn continued<D: Device>(inputs: Rc<Inputs>, format: KvFormat) -> Case<D> {
    let name = name("continued attention", &inputs, format);
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let attention = Attention::new(ops, i.heads, i.longest());
        let mut kv = i.paged.stale_store(ops, i.heads, format);
        let (before, rows) = i.part(false);
        if before.rows() > 0 {
            attention.output(ops, &before, &mut ops.up(&rows), &mut kv);
        }
        let (after, rows) = i.part(true);
        vec![ops.down(&attention.output(ops, &after, &mut ops.up(&rows), &mut kv))]
    };
    let wanted = move || {
        let heads = inputs.heads;
        let mut kv = Store::new(inputs.paged.store_pages, inputs.paged.page_size, heads);
        let rounded = naive_attention::round_kv(&wide(&inputs.qkv), heads, format);
        kv.write(&rounded, heads, &inputs.whole().slots);
        let (after, rows) = inputs.part(true);
        let (spans, pages) = (&after.spans, &after.pages);
        let (out, _) = naive_attention::attention(heads, &wide(&rows), &kv, spans, pages, after.rows());
        vec![want(format, "out", out, 4.0 * sum_units(heads.head_dim))]
    };
    Case { name, run: Box::new(run), want: Box::new(wanted) }
}
