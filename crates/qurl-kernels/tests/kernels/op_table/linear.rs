//! Linear layers: forward with and without bias, stored and added, and both gradients, in f32 and bf16.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::support::{Random, as_operand, down, up, wide};
use qurl_kernels::Format;
use qurl_kernels::backend::{Backend, Output};
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

struct Inputs {
    x: Vec<f32>,
    w: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
    old_out: Vec<f32>,
    old_dw: Vec<f32>,
    old_dbias: Vec<f32>,
}

pub fn cases<B: Backend>() -> Vec<Case<B>> {
    let mut cases = Vec::new();
    for format in [Format::F32, Format::Bf16] {
        for (seed, (rows, n, k)) in SHAPES.into_iter().enumerate() {
            cases.push(case(format, rows, n, k, seed as u64));
        }
    }
    cases
}

fn case<B: Backend>(format: Format, rows: usize, n: usize, k: usize, seed: u64) -> Case<B> {
    let mut random = Random::new(seed);
    let inputs = Rc::new(Inputs {
        x: random.normals(rows * k),
        w: random.normals(n * k),
        bias: random.normals(n),
        dy: random.normals(rows * n),
        old_out: random.normals(rows * n),
        old_dw: random.normals(n * k),
        old_dbias: random.normals(n),
    });
    let given = inputs.clone();
    let run = move |backend: &B| {
        let i = &*given;
        let (x, dy) = (up(backend, &i.x), up(backend, &i.dy));
        let w = backend.pack(&up(backend, &i.w), n, k, format, true).expect("weights pack");
        let mut stored = up(backend, &vec![f32::NAN; rows * n]);
        backend.linear(&x, rows, &w, Some(&up(backend, &i.bias)), Output::Store, &mut stored);
        let mut added = up(backend, &i.old_out);
        backend.linear(&x, rows, &w, None, Output::Add, &mut added);
        let mut dx = up(backend, &vec![f32::NAN; rows * k]);
        backend.linear_input_gradient(&dy, rows, &w, &mut dx);
        let (mut dw, mut dbias) = (up(backend, &i.old_dw), up(backend, &i.old_dbias));
        backend.linear_weight_gradient(&x, &dy, rows, &w, &mut dw, Some(&mut dbias));
        [stored, added, dx, dw, dbias].iter().map(|t| down(backend, t)).collect()
    };
    let want = move || {
        let i = &*inputs;
        let (x, w, dy) = (as_operand(format, &i.x), as_operand(format, &i.w), as_operand(format, &i.dy));
        let plus = |a: Vec<f64>, b: &[f32]| a.iter().zip(b).map(|(a, &b)| a + b as f64).collect();
        let stored = naive::linear(&x, &w, Some(&wide(&i.bias)), rows, n, k);
        let added = plus(naive::linear(&x, &w, None, rows, n, k), &i.old_out);
        let dx = naive::linear_input_gradient(&dy, &w, rows, n, k);
        let dw = plus(naive::linear_weight_gradient(&x, &dy, rows, n, k), &i.old_dw);
        // The bias is summed outside of the product, without rounding its operands.
        let dbias = plus(naive::column_sums(&wide(&i.dy), rows, n), &i.old_dbias);
        vec![
            Want::new("stored", stored, sum_units(k)),
            Want::new("added", added, sum_units(k)),
            Want::new("dx", dx, sum_units(n)),
            Want::new("dw", dw, sum_units(rows)),
            Want::new("dbias", dbias, sum_units(rows)),
        ]
    };
    Case { name: format!("linear {format} {rows}x{n}x{k}"), run: Box::new(run), want: Box::new(want) }
}
