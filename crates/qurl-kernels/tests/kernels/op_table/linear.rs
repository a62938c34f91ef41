//! Linear layers: forward with and without bias, stored and added, and all gradients, in f32 and bf16; and
//! the same with a norm before them.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::ops::Ops;
use crate::support::{Random, as_operand, plus, rounding, wide};
use qurl_kernels::ops::{Linear, LinearBackward, Norm, NormBackward, Output};
use qurl_kernels::types::Rows;
use qurl_kernels::{Device, Format, Queue};
use std::rc::Rc;

/// (rows, n, k)
const SHAPES: [(usize, usize, usize); 16] = [
    (1, 1, 1),
    (1, 5, 17),
    (1, 61, 33),
    (2, 32, 64),
    (13, 17, 5),
    (13, 33, 61),
    (12, 32, 513),
    (7, 64, 1030),
    (5, 33, 2101),
    (3, 1101, 5),
    (25, 205, 40),
    (193, 16, 32),
    (200, 33, 61),
    (401, 17, 33),
    (1031, 17, 33),
    // Enough work to be shared out by panels too.
    (205, 165, 700),
];
/// Of those with a norm.
const NORMED: [(usize, usize, usize); 7] =
    [(1, 5, 17), (2, 32, 64), (13, 33, 61), (7, 64, 1030), (25, 205, 40), (401, 17, 33), (205, 165, 700)];
const EPS: f32 = 1e-5;

struct Inputs {
    x: Vec<f32>,
    w: Vec<f32>,
    gain: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
    old_out: Vec<f32>,
    old_dw: Vec<f32>,
    old_dbias: Vec<f32>,
    old_dx: Vec<f32>,
    old_dgain: Vec<f32>,
}

impl Inputs {
    fn new(rows: usize, n: usize, k: usize, seed: u64) -> Rc<Inputs> {
        let mut random = Random::new(seed);
        Rc::new(Inputs {
            x: random.normals(rows * k),
            w: random.normals(n * k),
            bias: random.normals(n),
            dy: random.normals(rows * n),
            old_out: random.normals(rows * n),
            old_dw: random.normals(n * k),
            old_dbias: random.normals(n),
            gain: random.normals(k),
            old_dx: random.normals(rows * k),
            old_dgain: random.normals(k),
        })
    }
}

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for format in [Format::F32, Format::Bf16] {
        for (seed, (rows, n, k)) in SHAPES.into_iter().enumerate() {
            cases.push(plain(format, rows, n, k, seed as u64));
        }
        for (seed, (rows, n, k)) in NORMED.into_iter().enumerate() {
            cases.push(normed(format, rows, n, k, 20 + seed as u64));
        }
    }
    cases
}

fn plain<D: Device>(format: Format, rows: usize, n: usize, k: usize, seed: u64) -> Case<D> {
    let inputs = Inputs::new(rows, n, k, seed);
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (x, dy) = (&ops.up(&i.x), &ops.up(&i.dy));
        let w = &ops.trained(&i.w, n, k, format);
        let mut stored = ops.stale(rows * n);
        ops.linear(x, rows, w, Some(&ops.up(&i.bias)), Output::Store, &mut stored);
        let mut added = ops.up(&i.old_out);
        ops.linear(x, rows, w, None, Output::Add, &mut added);
        let (mut dx, mut dw, mut dbias) = (ops.stale(rows * k), ops.up(&i.old_dw), ops.up(&i.old_dbias));
        let all = LinearBackward {
            adapter: None,
            x,
            rows,
            norm: None,
            w,
            dy,
            dw: Some(&mut dw),
            dbias: Some(&mut dbias),
            dx: Some(&mut dx),
        };
        ops.queue().linear_backward(all);
        // The same, each alone: what is frozen asks for less.
        let (mut dx_alone, mut dw_alone) = (ops.stale(rows * k), ops.up(&i.old_dw));
        let part =
            LinearBackward { adapter: None, x, rows, norm: None, w, dy, dw: None, dbias: None, dx: None };
        ops.queue().linear_backward(LinearBackward { dx: Some(&mut dx_alone), ..part });
        let part =
            LinearBackward { adapter: None, x, rows, norm: None, w, dy, dw: None, dbias: None, dx: None };
        ops.queue().linear_backward(LinearBackward { dw: Some(&mut dw_alone), ..part });
        [stored, added, dx, dw, dbias, dx_alone, dw_alone].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let i = &*inputs;
        let (x, w, dy) = (as_operand(format, &i.x), as_operand(format, &i.w), as_operand(format, &i.dy));
        let stored = naive::linear(&x, &w, Some(&wide(&i.bias)), rows, n, k);
        let added = plus(naive::linear(&x, &w, None, rows, n, k), &i.old_out);
        let dx = naive::linear_input_gradient(&dy, &w, rows, n, k);
        let dw = plus(naive::linear_weight_gradient(&x, &dy, rows, n, k), &i.old_dw);
        // The bias is summed outside of the GEMM, without rounding its operands.
        let dbias = plus(naive::column_sums(&wide(&i.dy), rows, n), &i.old_dbias);
        vec![
            Want::new("stored", stored, sum_units(k)),
            Want::new("added", added, sum_units(k)),
            Want::new("dx", dx.clone(), sum_units(n)),
            Want::new("dw", dw.clone(), sum_units(rows)),
            Want::new("dbias", dbias, sum_units(rows)),
            Want::new("dx alone", dx, sum_units(n)),
            Want::new("dw alone", dw, sum_units(rows)),
        ]
    };
    Case { name: format!("linear {format} {rows}x{n}x{k}"), run: Box::new(run), want: Box::new(want) }
}

fn normed<D: Device>(format: Format, rows: usize, n: usize, k: usize, seed: u64) -> Case<D> {
    let inputs = Inputs::new(rows, n, k, seed);
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (x, dy, gain) = (&ops.up(&i.x), &ops.up(&i.dy), &ops.up(&i.gain));
        let w = &ops.trained(&i.w, n, k, format);
        let (bias, mut out) = (ops.up(&i.bias), ops.stale(rows * n));
        ops.queue().linear(Linear {
            adapter: None,
            x,
            rows,
            norm: Some(Norm { gain, eps: EPS }),
            w,
            bias: Some(&bias),
            output: Output::Store,
            out: &mut out,
        });
        let (mut dx, mut dgain) = (ops.up(&i.old_dx), ops.up(&i.old_dgain));
        let (mut dw, mut dbias) = (ops.up(&i.old_dw), ops.up(&i.old_dbias));
        ops.queue().linear_backward(LinearBackward {
            adapter: None,
            x,
            rows,
            norm: Some(NormBackward { gain, eps: EPS, dgain: Some(&mut dgain) }),
            w,
            dy,
            dw: Some(&mut dw),
            dbias: Some(&mut dbias),
            dx: Some(&mut dx),
        });
        let mut dx_alone = ops.up(&i.old_dx);
        ops.queue().linear_backward(LinearBackward {
            adapter: None,
            x,
            rows,
            norm: Some(NormBackward { gain, eps: EPS, dgain: None }),
            w,
            dy,
            dw: None,
            dbias: None,
            dx: Some(&mut dx_alone),
        });
        [out, dx, dgain, dw, dbias, dx_alone].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let i = &*inputs;
        let (x, gain, shape, eps) = (wide(&i.x), wide(&i.gain), Rows::dense(rows, k), EPS as f64);
        let round = rounding(format);
        let normed: Vec<f64> = naive::norm(&x, &gain, shape, eps).into_iter().map(round).collect();
        let (w, dy) = (as_operand(format, &i.w), as_operand(format, &i.dy));
        let out = naive::linear(&normed, &w, Some(&wide(&i.bias)), rows, n, k);
        let dnormed = naive::linear_input_gradient(&dy, &w, rows, n, k);
        let (dx, dgain) = naive::norm_backward(&x, &gain, shape, eps, &dnormed);
        let dw = plus(naive::linear_weight_gradient(&normed, &dy, rows, n, k), &i.old_dw);
        let dbias = plus(naive::column_sums(&wide(&i.dy), rows, n), &i.old_dbias);
        let dx = plus(dx, &i.old_dx);
        // A norm and a GEMM, one after the other.
        let (forward, backward) = (2.0 * sum_units(k), sum_units(n) + sum_units(k));
        vec![
            Want::of_operands(format, "out", out, forward),
            Want::new("dx", dx.clone(), backward),
            Want::new("dgain", plus(dgain, &i.old_dgain), sum_units(n) + sum_units(rows.max(k))),
            Want::of_operands(format, "dw", dw, sum_units(k) + sum_units(rows)),
            Want::new("dbias", dbias, sum_units(rows)),
            Want::new("dx alone", dx, backward),
        ]
    };
    Case { name: format!("normed linear {format} {rows}x{n}x{k}"), run: Box::new(run), want: Box::new(want) }
}
