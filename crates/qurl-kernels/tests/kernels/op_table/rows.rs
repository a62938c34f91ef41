//! The operations on rows and single values: norms, rotary embedding, SwiGLU, embeddings, the critic's dot products,
//! AdamW and the sum of squares.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::support::{Random, down, up, wide};
use qurl_kernels::backend::{AdamW, Backend, Rope, Rows, drawn_id};

/// (rows, width)
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (1, 5), (1, 61), (13, 17), (200, 33), (70, 256), (3, 1101), (401, 16)];
const HEAD_DIMS: [usize; 7] = [8, 16, 20, 64, 80, 128, 256];
const EPS: f32 = 1e-5;

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut cases = Vec::new();
    for (seed, (rows, width)) in SHAPES.into_iter().enumerate() {
        let seed = seed as u64;
        cases.extend([rmsnorm(rows, width, seed), swiglu(rows, width, seed), embedding(rows, width, seed)]);
        cases.push(row_dots(rows, width, seed));
    }
    for (seed, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for rows in [1, 13, 70] {
            cases.extend([head_norm(rows, head_dim, seed as u64), rope(rows, head_dim, seed as u64)]);
        }
    }
    for (seed, len) in [1, 17, 513, 40_003].into_iter().enumerate() {
        cases.extend([
            adamw(len, 1, seed as u64),
            adamw(len, 1000, seed as u64),
            sum_squares(len, seed as u64),
        ]);
    }
    cases
}

fn rmsnorm<B: Backend>(rows: usize, width: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let [x, dy, old_dx] = [(); 3].map(|_| random.normals(rows * width));
    let [gain, old_dgain] = [(); 2].map(|_| random.normals(width));
    let given = (x.clone(), dy.clone(), old_dx.clone(), gain.clone(), old_dgain.clone());
    let run = move |backend: &B| {
        let (x, dy, old_dx, gain, old_dgain) = &given;
        let (x, gain) = (up(backend, x), up(backend, gain));
        let mut out = up(backend, &vec![f32::NAN; rows * width]);
        backend.rmsnorm(&x, &gain, rows, width, EPS, &mut out);
        let (mut dy, mut dx, mut dgain) = (up(backend, dy), up(backend, old_dx), up(backend, old_dgain));
        backend.rmsnorm_backward(&x, &gain, rows, width, EPS, &mut dy, &mut dx, &mut dgain);
        [out, dx, dgain].iter().map(|t| down(backend, t)).collect()
    };
    let want = move || {
        let (x, gain, shape) = (wide(&x), wide(&gain), Rows::dense(rows, width));
        let (dx, dgain) = naive::norm_backward(&x, &gain, shape, EPS as f64, &wide(&dy));
        let plus = |a: Vec<f64>, b: &[f32]| a.iter().zip(b).map(|(a, &b)| a + b as f64).collect();
        vec![
            Want::new("out", naive::norm(&x, &gain, shape, EPS as f64), sum_units(width)),
            Want::new("dx", plus(dx, &old_dx), sum_units(width)),
            Want::new("dgain", plus(dgain, &old_dgain), sum_units(rows.max(width))),
        ]
    };
    Case { name: format!("rmsnorm {rows}x{width}"), run: Box::new(run), want: Box::new(want) }
}

fn head_norm<B: Backend>(outer: usize, width: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    // Two heads after a first one that is left alone, and two more behind them.
    let rows = Rows { start: width, outer, stride: 5 * width, per: 2, width };
    let [x, gradient] = [(); 2].map(|_| random.normals(outer * 5 * width));
    let [gain, old_dgain] = [(); 2].map(|_| random.normals(width));
    let given = (x.clone(), gradient.clone(), gain.clone(), old_dgain.clone());
    let run = move |backend: &B| {
        let (x, gradient, gain, old_dgain) = &given;
        let gain = up(backend, gain);
        let mut out = up(backend, x);
        backend.head_norm(&mut out, &gain, rows, EPS);
        let (mut dx, mut dgain) = (up(backend, gradient), up(backend, old_dgain));
        backend.head_norm_backward(&up(backend, x), &gain, rows, EPS, &mut dx, &mut dgain);
        [out, dx, dgain].iter().map(|t| down(backend, t)).collect()
    };
    let want = move || {
        let (x, gain) = (wide(&x), wide(&gain));
        let (dx, dgain) = naive::norm_backward(&x, &gain, rows, EPS as f64, &wide(&gradient));
        let dgain = dgain.iter().zip(&old_dgain).map(|(a, &b)| a + b as f64).collect();
        vec![
            Want::new("out", naive::norm(&x, &gain, rows, EPS as f64), sum_units(width)),
            Want::new("dx", dx, sum_units(width)),
            Want::new("dgain", dgain, sum_units((2 * outer).max(width))),
        ]
    };
    Case { name: format!("head_norm {outer}x{width}"), run: Box::new(run), want: Box::new(want) }
}

fn rope<B: Backend>(rows: usize, head_dim: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let (heads, stride, half, table) = (3, 4 * head_dim + 3, head_dim / 2, 50);
    let x = random.normals(rows * stride);
    let positions = random.ids(rows, table);
    let angle = move |position: usize, i: usize| position as f64 * 10_000f64.powf(-(i as f64) / half as f64);
    let values = |f: fn(f64) -> f64| -> Vec<f32> {
        (0..table * half).map(|i| f(angle(i / half, i % half)) as f32).collect()
    };
    let (cos, sin) = (values(f64::cos), values(f64::sin));
    let given = (x.clone(), positions.clone(), cos.clone(), sin.clone());
    let run = move |backend: &B| {
        let (x, positions, cos, sin) = &given;
        let (cos, sin) = (up(backend, cos), up(backend, sin));
        [false, true]
            .map(|inverse| {
                let mut x = up(backend, x);
                let tables = Rope { cos: &cos, sin: &sin };
                backend.rope(&mut x, stride, heads, head_dim, positions, tables, inverse);
                down(backend, &x)
            })
            .to_vec()
    };
    let want = move || {
        let at =
            |position: usize, i: usize| (cos[position * half + i] as f64, sin[position * half + i] as f64);
        let turned = |inverse| naive::rope(&wide(&x), stride, heads, head_dim, &positions, at, inverse);
        vec![Want::new("turned", turned(false), 4.0), Want::new("turned back", turned(true), 4.0)]
    };
    Case { name: format!("rope {rows}x{head_dim}"), run: Box::new(run), want: Box::new(want) }
}

fn swiglu<B: Backend>(rows: usize, f: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let gate_up: Vec<f32> = random.normals(rows * 2 * f).iter().map(|x| 3.0 * x).collect();
    let dout = random.normals(rows * f);
    let given = (gate_up.clone(), dout.clone());
    let run = move |backend: &B| {
        let mut gate_up = up(backend, &given.0);
        let mut out = up(backend, &vec![f32::NAN; rows * f]);
        backend.swiglu(&gate_up, rows, f, &mut out);
        // The gradient of the output goes in, the output comes out.
        let mut swapped = up(backend, &given.1);
        backend.swiglu_backward(&mut gate_up, &mut swapped, rows, f);
        vec![down(backend, &out), down(backend, &swapped), down(backend, &gate_up)]
    };
    let want = move || {
        let (gate_up, dout) = (wide(&gate_up), wide(&dout));
        vec![
            Want::new("out", naive::swiglu(&gate_up, rows, f), 12.0),
            Want::new("out, again", naive::swiglu(&gate_up, rows, f), 12.0),
            Want::new("gradient", naive::swiglu_backward(&gate_up, &dout, rows, f), 24.0),
        ]
    };
    Case { name: format!("swiglu {rows}x{f}"), run: Box::new(run), want: Box::new(want) }
}

fn embedding<B: Backend>(rows: usize, d: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let vocabulary = 37;
    let table = random.normals(vocabulary * d);
    let gradients = random.normals(rows * d);
    let ids = random.ids(rows, vocabulary);
    let given = (table.clone(), gradients.clone(), ids.clone());
    let run = move |backend: &B| {
        let (table, gradients, ids) = &given;
        let mut table = up(backend, table);
        let mut out = up(backend, &vec![f32::NAN; rows * d]);
        backend.gather(&table, ids, d, &mut out);
        // Every second token is named by the row of a draw that gave it.
        let words = ids.iter().flat_map(|&id| [f32::from_bits(id), -1.0, f32::NAN]);
        let drawn = up(backend, &words.collect::<Vec<f32>>());
        let named = ids.iter().zip(0..).map(|(&id, row)| if row % 2 == 0 { drawn_id(row) } else { id });
        let mut named_out = up(backend, &vec![f32::NAN; rows * d]);
        backend.gather_tokens(&table, &named.collect::<Vec<u32>>(), &drawn, d, &mut named_out);
        let mut plain_out = up(backend, &vec![f32::NAN; rows * d]);
        backend.gather_tokens(&table, ids, &drawn, d, &mut plain_out);
        backend.scatter_add(&up(backend, gradients), ids, d, &mut table);
        [out, named_out, plain_out, table].iter().map(|tensor| down(backend, tensor)).collect()
    };
    let want = move || {
        let mut table = wide(&table);
        let out = naive::gather(&table, &ids, d);
        naive::scatter_add(&wide(&gradients), &ids, d, &mut table);
        vec![
            Want::new("gathered", out.clone(), 0.0),
            Want::new("gathered from draws", out.clone(), 0.0),
            Want::new("gathered tokens", out, 0.0),
            Want::new("scattered", table, sum_units(rows / vocabulary)),
        ]
    };
    Case { name: format!("embedding {rows}x{d}"), run: Box::new(run), want: Box::new(want) }
}

fn row_dots<B: Backend>(rows: usize, d: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let (hidden, w, gradient, old_dw) =
        (random.normals(rows * d), random.normals(d), random.normals(rows), random.normals(d));
    let given = (hidden.clone(), w.clone(), gradient.clone(), old_dw.clone());
    let run = move |backend: &B| {
        let (hidden, w, gradient, old_dw) = &given;
        let (hidden, w) = (up(backend, hidden), up(backend, w));
        let out = backend.row_dots(&hidden, rows, &w).expect("dot products");
        let (mut dhidden, mut dw) = (up(backend, &vec![f32::NAN; rows * d]), up(backend, old_dw));
        backend.row_dots_backward(&hidden, rows, &w, gradient, &mut dhidden, &mut dw);
        vec![wide(&out), down(backend, &dhidden), down(backend, &dw)]
    };
    let want = move || {
        let (hidden, w) = (wide(&hidden), wide(&w));
        let (dhidden, dw) = naive::row_dots_backward(&hidden, rows, &w, &wide(&gradient));
        let dw = dw.iter().zip(&old_dw).map(|(a, &b)| a + b as f64).collect();
        vec![
            Want::new("out", naive::row_dots(&hidden, rows, &w), sum_units(d)),
            Want::new("dhidden", dhidden, 2.0),
            Want::new("dw", dw, sum_units(rows)),
        ]
    };
    Case { name: format!("row_dots {rows}x{d}"), run: Box::new(run), want: Box::new(want) }
}

fn adamw<B: Backend>(len: usize, step: u64, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let [w, g, m] = [(); 3].map(|_| random.normals(len));
    let v: Vec<f32> = random.normals(len).iter().map(|x| x * x).collect();
    let constants =
        AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1, step, grad_scale: 0.5 };
    let given = (w.clone(), g.clone(), m.clone(), v.clone());
    let run = move |backend: &B| {
        let (w, g, m, v) = &given;
        let (mut w, mut m, mut v) = (up(backend, w), up(backend, m), up(backend, v));
        backend.adamw(&constants, &mut w, &up(backend, g), &mut m, &mut v);
        [w, m, v].iter().map(|t| down(backend, t)).collect()
    };
    let want = move || {
        let one = |i: usize| naive::adamw(&constants, w[i] as f64, g[i] as f64, m[i] as f64, v[i] as f64);
        let all: Vec<_> = (0..len).map(one).collect();
        vec![
            Want::new("w", all.iter().map(|x| x.0).collect(), 8.0),
            Want::new("m", all.iter().map(|x| x.1).collect(), 4.0),
            Want::new("v", all.iter().map(|x| x.2).collect(), 8.0),
        ]
    };
    Case { name: format!("adamw {len} step {step}"), run: Box::new(run), want: Box::new(want) }
}

fn sum_squares<B: Backend>(len: usize, seed: u64) -> Case<B> {
    let x = Random::new(seed).normals(len);
    let given = x.clone();
    let run = move |backend: &B| vec![vec![backend.sum_squares(&[&up(backend, &given)]).expect("a sum")]];
    // Summed in f64: far better than a rounding of f32.
    let want = move || vec![Want::new("sum", vec![wide(&x).iter().map(|x| x * x).sum()], 1e-5)];
    Case { name: format!("sum_squares {len}"), run: Box::new(run), want: Box::new(want) }
}
