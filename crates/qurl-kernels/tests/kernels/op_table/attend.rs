//! All of a block's attention: norms of heads, rotation, rounding, attention and the output projection, with
//! its backward; with and without norms, at every head dimension.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::naive_attention::{self, Store};
use crate::ops::{Ops, Tables};
use crate::paged::{Paged, heads};
use crate::support::{Random, as_operand, plus, rounding, wide};
use qurl_kernels::ops::{Attend, AttendBackward, KeptAttention, Norm, NormBackward, QkNorm, QkNormBackward};
use qurl_kernels::types::{Batch, Heads, KvFormat, Rows};
use qurl_kernels::{Device, Format, Queue};
use std::rc::Rc;

const HEAD_DIMS: [usize; 7] = [8, 16, 20, 64, 80, 128, 256];
const LENGTHS: [&[usize]; 3] = [&[1], &[13], &[33, 1, 36]];
const EPS: f32 = 1e-5;

struct Inputs {
    heads: Heads,
    format: Format,
    kv_format: KvFormat,
    paged: Paged,
    rows: Batch,
    /// Width of the residual stream.
    d: usize,
    /// Gains of query and key norms, where there are such.
    gains: Option<[Vec<f32>; 2]>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    qkv: Vec<f32>,
    o: Vec<f32>,
    x: Vec<f32>,
    dx: Vec<f32>,
    old_d_o: Vec<f32>,
    old_dgain: Vec<f32>,
}

impl Inputs {
    fn new(
        head_dim: usize,
        lengths: &[usize],
        format: Format,
        kv_format: KvFormat,
        normed: bool,
        seed: u64,
    ) -> Self {
        let mut random = Random::new(seed);
        // Three query heads share each of two key heads; the stream is narrower than the queries.
        let (heads, d) = (heads(2, 3, head_dim), 37);
        let paged = Paged::scattered(&mut random, lengths, 16);
        let rows = paged.batch(lengths.iter().copied().enumerate().map(|(i, len)| (i, 0..len)));
        let (count, half) = (rows.rows(), head_dim / 2);
        let angle = |i: usize| (i / half) as f64 * 10_000f64.powf(-((i % half) as f64) / half as f64);
        let table = |f: fn(f64) -> f64| -> Vec<f32> { (0..50 * half).map(|i| f(angle(i)) as f32).collect() };
        Inputs {
            heads,
            format,
            kv_format,
            paged,
            d,
            gains: normed.then(|| [(); 2].map(|_| random.normals(head_dim))),
            cos: table(f64::cos),
            sin: table(f64::sin),
            qkv: random.normals(count * heads.qkv_width()),
            o: random.normals(d * heads.q_width()).iter().map(|x| x / (d as f32).sqrt()).collect(),
            x: random.normals(count * d),
            dx: random.normals(count * d),
            old_d_o: random.normals(d * heads.q_width()),
            old_dgain: random.normals(head_dim),
            rows,
        }
    }

    /// The query heads, then the key heads.
    fn head_rows(&self) -> [Rows; 2] {
        let Heads { heads, kv_heads, head_dim: width, .. } = self.heads;
        let (outer, stride) = (self.rows.rows(), self.heads.qkv_width());
        [(0, heads), (self.heads.q_width(), kv_heads)].map(|(start, per)| Rows {
            start,
            outer,
            stride,
            per,
            width,
        })
    }

    fn rotated(&self, x: &[f64], inverse: bool) -> Vec<f64> {
        let Heads { heads, kv_heads, head_dim, .. } = self.heads;
        let half = head_dim / 2;
        let at = |position: usize, i: usize| {
            (f64::from(self.cos[position * half + i]), f64::from(self.sin[position * half + i]))
        };
        let (stride, rotated) = (self.heads.qkv_width(), heads + kv_heads);
        naive::rope(x, stride, rotated, head_dim, &self.rows.positions, at, inverse)
    }
}

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for (format, kv_format) in [(Format::F32, KvFormat::F32), (Format::Bf16, KvFormat::Bf16)] {
        for (seed, head_dim) in HEAD_DIMS.into_iter().enumerate() {
            for (lengths, normed) in LENGTHS.into_iter().flat_map(|l| [(l, false), (l, true)]) {
                let inputs = Inputs::new(head_dim, lengths, format, kv_format, normed, seed as u64);
                cases.push(case(Rc::new(inputs)));
            }
        }
    }
    cases
}

fn case<D: Device>(inputs: Rc<Inputs>) -> Case<D> {
    let norms = if inputs.gains.is_some() { "with" } else { "without" };
    let (rows, head_dim) = (inputs.rows.rows(), inputs.heads.head_dim);
    let name = format!("attend {} {rows} rows of {head_dim} {norms} norms", inputs.format);
    let given = inputs.clone();
    Case { name, run: Box::new(move |ops| run(&given, ops)), want: Box::new(move || want(&inputs)) }
}

fn run<D: Device>(i: &Inputs, ops: &Ops<D>) -> Vec<Vec<f64>> {
    let (heads, count, width) = (i.heads, i.rows.rows(), i.heads.qkv_width());
    let tables = Tables::new(ops, &i.cos, &i.sin);
    let o = &ops.trained(&i.o, i.d, heads.q_width(), i.format);
    let batch = &ops.load(&i.rows);
    let gains = i.gains.as_ref().map(|gains| [0, 1].map(|part: usize| ops.up(&gains[part])));
    let norm = |gain| Norm { gain, eps: EPS };
    let qk_norm = || gains.as_ref().map(|[q, k]| QkNorm { q: norm(q), k: norm(k) });

    let (mut qkv, mut x) = (ops.up(&i.qkv), ops.up(&i.x));
    let (mut raw, mut out, mut lse) =
        (ops.stale(count * width), ops.stale(count * heads.q_width()), ops.stale(count * heads.heads));
    let kept = KeptAttention { raw: gains.as_ref().map(|_| &mut raw), out: &mut out, lse: &mut lse };
    let mut kv = i.paged.stale_store(ops, heads, i.kv_format);
    ops.queue().attend(Attend {
        adapter: None,
        heads,
        batch,
        qkv: &mut qkv,
        qk_norm: qk_norm(),
        rope: tables.rope(),
        kv: &mut kv,
        o,
        x: &mut x,
        kept: Some(kept),
    });

    let (mut used, mut x_alone) = (ops.up(&i.qkv), ops.up(&i.x));
    let mut kv = i.paged.stale_store(ops, heads, i.kv_format);
    ops.queue().attend(Attend {
        adapter: None,
        heads,
        batch,
        qkv: &mut used,
        qk_norm: qk_norm(),
        rope: tables.rope(),
        kv: &mut kv,
        o,
        x: &mut x_alone,
        kept: None,
    });

    let dx = ops.up(&i.dx);
    let backward = |frozen: bool| {
        let (mut dqkv, mut d_o) = (ops.stale(count * width), ops.up(&i.old_d_o));
        let [mut dq, mut dk] = [(); 2].map(|_| ops.up(&i.old_dgain));
        let trained = |gradient| if frozen { None } else { Some(gradient) };
        ops.queue().attend_backward(AttendBackward {
            adapter: None,
            heads,
            batch,
            kv_format: i.kv_format,
            qkv: &qkv,
            qk_norm: gains.as_ref().map(|[q, k]| QkNormBackward {
                raw: &raw,
                q: NormBackward { gain: q, eps: EPS, dgain: trained(&mut dq) },
                k: NormBackward { gain: k, eps: EPS, dgain: trained(&mut dk) },
            }),
            rope: tables.rope(),
            out: &out,
            lse: &lse,
            o,
            dx: &dx,
            d_o: trained(&mut d_o),
            dqkv: &mut dqkv,
        });
        [dqkv, d_o, dq, dk].map(|t| ops.down(&t))
    };
    let ([dqkv, d_o, dq, dk], [frozen, ..]) = (backward(false), backward(true));
    let mut outputs: Vec<Vec<f64>> = [&qkv, &out, &lse, &x, &x_alone].map(|t| ops.down(t)).into();
    outputs.extend([dqkv, frozen, d_o]);
    if gains.is_some() {
        outputs.extend([ops.down(&raw), dq, dk]);
    }
    outputs
}

fn want(i: &Inputs) -> Vec<Want> {
    let (heads, count, eps) = (i.heads, i.rows.rows(), EPS as f64);
    let (head_rows, width) = (i.head_rows(), heads.q_width());
    let raw = wide(&i.qkv);
    let gains = i.gains.as_ref().map(|gains| [0, 1].map(|part: usize| wide(&gains[part])));
    let normed = gains
        .iter()
        .flatten()
        .zip(head_rows)
        .fold(raw.clone(), |x, (gain, rows)| naive::norm(&x, gain, rows, eps));
    let qkv = naive_attention::round_kv(&i.rotated(&normed, false), heads, i.kv_format);
    let mut kv = Store::new(i.paged.store_pages, i.paged.page_size, heads);
    kv.write(&qkv, heads, &i.rows.slots);
    let (out, lse) = naive_attention::attention(heads, &qkv, &kv, &i.rows.spans, &i.rows.pages, count);
    let operand: Vec<f64> = out.iter().copied().map(rounding(i.format)).collect();
    let (o, dx) = (as_operand(i.format, &i.o), as_operand(i.format, &i.dx));
    let x = plus(naive::linear(&operand, &o, None, count, i.d, width), &i.x);

    let d_o = plus(naive::linear_weight_gradient(&operand, &dx, count, i.d, width), &i.old_d_o);
    let dout = naive::linear_input_gradient(&dx, &o, count, i.d, width);
    let dqkv = naive_attention::attention_backward(heads, &qkv, &i.rows.spans, &dout);
    let (mut dqkv, mut dgains) = (i.rotated(&dqkv, true), Vec::new());
    for (gain, rows) in gains.iter().flatten().zip(head_rows) {
        let (dx, dgain) = naive::norm_backward(&raw, gain, rows, eps, &dqkv);
        dqkv = dx;
        dgains.push(plus(dgain, &i.old_dgain));
    }

    // A norm, a rotation, and what attention alone is allowed.
    let units = sum_units(heads.head_dim);
    let rotated = if i.gains.is_some() { units + 4.0 } else { 4.0 };
    // Keys and values that fall to the other side of a rounding to bf16 are off by one of its steps.
    let step = if i.kv_format == KvFormat::Bf16 { (1u64 << 16) as f64 } else { rotated };
    let attention = 4.0 * (units + rotated);
    let want = |name, values, units| {
        let want = Want::of_operands(i.format, name, values, units);
        if i.kv_format == KvFormat::Bf16 { want.on_tensor_cores(1e-2) } else { want }
    };
    let (through_o, back) = (attention + sum_units(width), 2.0 * attention + sum_units(i.d));
    let mut wants = vec![
        Want::new("qkv", qkv, step),
        want("out", out, attention),
        want("lse", lse, units + rotated),
        want("x", x.clone(), through_o),
        want("x, nothing kept", x, through_o),
        want("dqkv", dqkv.clone(), back),
        want("dqkv, all frozen", dqkv, back),
        want("d_o", d_o, attention + sum_units(count)),
    ];
    if i.gains.is_some() {
        wants.push(Want::new("raw", raw, 0.0));
        let names = ["dgain of queries", "dgain of keys"];
        let sums = sum_units(count * heads.heads);
        for (name, dgain) in names.into_iter().zip(dgains) {
            let mut want = want(name, dgain, back + sums);
            // Of a single row's queries and keys there is no gradient: what is left of it are its roundings.
            want.tensor_cores *= 5.0;
            wants.push(want);
        }
    }
    wants
}
