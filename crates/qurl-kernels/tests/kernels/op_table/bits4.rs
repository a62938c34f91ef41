//! Linear layers of frozen weights in four bits, against what is quantized here in plain code.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::ops::Ops;
use crate::support::{Random, as_operand, plus, rounding, wide};
use qurl_kernels::ops::{LinearBackward, Output};
use qurl_kernels::{Device, Format, Queue};
use std::rc::Rc;

/// (rows, n, k)
const SHAPES: [(usize, usize, usize); 13] = [
    (1, 1, 1),
    (1, 5, 17),
    (2, 32, 64),
    (13, 33, 61),
    (7, 64, 1032),
    (3, 1101, 8),
    (16, 200, 264),
    (20, 72, 2056),
    (25, 205, 40),
    (70, 130, 384),
    (100, 65, 520),
    (193, 16, 32),
    (205, 165, 704),
];

struct Inputs {
    x: Vec<f32>,
    w: Vec<f32>,
    bias: Vec<f32>,
    dy: Vec<f32>,
    old_out: Vec<f32>,
}

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let formats = [Format::Int4, Format::Nvfp4].into_iter();
    formats
        .flat_map(|format| {
            SHAPES.into_iter().enumerate().map(move |(seed, shape)| linear(format, shape, seed as u64))
        })
        .collect()
}

fn linear<D: Device>(format: Format, (rows, n, k): (usize, usize, usize), seed: u64) -> Case<D> {
    let mut random = Random::new(40 + seed);
    let inputs = Rc::new(Inputs {
        x: random.normals(rows * k),
        w: random.normals(n * k),
        bias: random.normals(n),
        dy: random.normals(rows * n),
        old_out: random.normals(rows * n),
    });
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (x, dy, w) = (&ops.up(&i.x), &ops.up(&i.dy), &ops.frozen(&i.w, n, k, format));
        let (mut stored, mut added, mut dx) = (ops.stale(rows * n), ops.up(&i.old_out), ops.stale(rows * k));
        ops.linear(x, rows, w, Some(&ops.up(&i.bias)), Output::Store, &mut stored);
        ops.linear(x, rows, w, None, Output::Add, &mut added);
        ops.queue().linear_backward(LinearBackward {
            adapter: None,
            x,
            rows,
            norm: None,
            w,
            dy,
            dw: None,
            dbias: None,
            dx: Some(&mut dx),
        });
        [stored, added, dx].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let i = &*inputs;
        let (x, dy) = (as_operand(Format::Bf16, &i.x), as_operand(Format::Bf16, &i.dy));
        let w = stands_for(format, &i.w, k);
        let stored = naive::linear(&x, &w, Some(&wide(&i.bias)), rows, n, k);
        let added = plus(naive::linear(&x, &w, None, rows, n, k), &i.old_out);
        let rounded: Vec<f64> = w.into_iter().map(rounding(Format::Bf16)).collect();
        let dx = naive::linear_input_gradient(&dy, &rounded, rows, n, k);
        vec![
            Want::new("stored", stored, sum_units(k)),
            Want::new("added", added, sum_units(k)),
            // Numbers are rounded to bf16 for it, from products that were rounded themselves.
            Want::of_operands(Format::Bf16, "dx", dx, sum_units(n)),
        ]
    };
    Case { name: format!("linear {format} {rows}x{n}x{k}"), run: Box::new(run), want: Box::new(want) }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

/// The magnitude of a small float format that is nearest, of two the one with the even code.
fn nearest(magnitudes: &[f32], x: f32) -> f32 {
    let nearest = magnitudes.iter().enumerate().min_by(|(i, a), (j, b)| {
        (*a - x.abs()).abs().total_cmp(&(*b - x.abs()).abs()).then((i % 2).cmp(&(j % 2)))
    });
    nearest.map_or(0.0, |(_, m)| m.copysign(x))
}

/// The numbers that quantized weights stand for: `docs/formats.md`.
pub(super) fn stands_for(format: Format, w: &[f32], k: usize) -> Vec<f64> {
    let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let e4m3: Vec<f32> = (0..127)
        .map(|code: i32| match code / 8 {
            0 => code as f32 / 512.0,
            exponent => (1.0 + (code % 8) as f32 / 8.0) * 2f32.powi(exponent - 7),
        })
        .collect();
    let whole = largest(w) / (448.0 * 6.0);
    let mut numbers = Vec::new();
    for row in w.chunks(k) {
        for group in row.chunks(if format == Format::Int4 { 128 } else { 16 }) {
            let (scale, codes): (f64, Vec<f32>) = if format == Format::Int4 {
                let scale = largest(group) / 7.0;
                (scale.into(), group.iter().map(|x| (x * (1.0 / scale)).round_ties_even()).collect())
            } else {
                let of_group = nearest(&e4m3, largest(group) / 6.0 / whole);
                let scale = whole * of_group;
                let codes = group.iter().map(|x| nearest(&e2m1, x * (1.0 / scale))).collect();
                (f64::from(whole) * f64::from(of_group), codes)
            };
            numbers.extend(codes.into_iter().map(|code| f64::from(code) * scale));
        }
    }
    numbers
}
