//! The log-probability head, forward and backward, at several temperatures, with and without an entropy
//! gradient.

use super::{Case, Want, sum_units};
use crate::naive_head::{self, HeadShape};
use crate::ops::Ops;
use crate::support::{Random, as_operand, plus, rounding, wide};
use qurl_kernels::ops::{Head, HeadBackward};
use qurl_kernels::types::HeadGradient;
use qurl_kernels::{Device, Format, Queue};
use std::rc::Rc;

/// (rows, vocabulary, d, temperature, with an entropy gradient)
const SHAPES: [(usize, usize, usize, f32, bool); 8] = [
    (1, 5, 3, 1.0, true),
    (1, 61, 17, 1.0, false),
    (13, 513, 33, 0.7, true),
    (7, 61, 1101, 1.0, true),
    (5, 2100, 40, 1.3, true),
    (200, 1500, 16, 1.0, false),
    (30, 512, 61, 2.0, true),
    (401, 61, 33, 0.5, true),
];

struct Inputs {
    shape: HeadShape,
    format: Format,
    hidden: Vec<f32>,
    w: Vec<f32>,
    old_dw: Vec<f32>,
    targets: Vec<u32>,
    dlogp: Vec<f32>,
    /// Empty where the loss has no entropy.
    dentropy: Vec<f32>,
}

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for format in [Format::F32, Format::Bf16] {
        for (seed, (rows, vocabulary, d, temperature, entropy)) in SHAPES.into_iter().enumerate() {
            let mut random = Random::new(seed as u64);
            // Logits of variance four: neither flat nor certain.
            let factor = 2.0 / (d as f32).sqrt();
            cases.push(case(Inputs {
                shape: HeadShape { rows, vocabulary, d, temperature: temperature as f64 },
                format,
                hidden: random.normals(rows * d),
                w: random.normals(vocabulary * d).iter().map(|x| factor * x).collect(),
                old_dw: random.normals(vocabulary * d),
                targets: random.ids(rows, vocabulary),
                dlogp: random.normals(rows),
                dentropy: if entropy { random.normals(rows) } else { Vec::new() },
            }));
        }
    }
    cases
}

fn case<D: Device>(inputs: Inputs) -> Case<D> {
    let HeadShape { rows, vocabulary, d, temperature } = inputs.shape;
    let name = format!("head {} {rows}x{vocabulary}x{d} at {temperature}", inputs.format);
    let inputs = Rc::new(inputs);
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let (i, targets) = (&*given, &*given.targets);
        let temperature = temperature as f32;
        let (hidden, head) = (&ops.up(&i.hidden), &ops.trained(&i.w, vocabulary, d, i.format));
        let out = ops.queue().head(Head { hidden, head, targets, temperature }).expect("memory for the head");
        let backward = |dweight: Option<&mut D::Tensor>| {
            let gradient = HeadGradient { dlogp: &i.dlogp, dentropy: &i.dentropy };
            let mut dhidden = ops.stale(rows * d);
            ops.queue().head_backward(HeadBackward {
                hidden,
                head,
                trained: head,
                targets,
                temperature,
                out: &out,
                gradient,
                dhidden: &mut dhidden,
                dweight,
            });
            ops.down(&dhidden)
        };
        let mut dw = ops.up(&i.old_dw);
        let (dhidden, frozen) = (backward(Some(&mut dw)), backward(None));
        let argmax = out.argmax.iter().map(|&id| id as f64).collect();
        vec![wide(&out.logp), wide(&out.entropy), argmax, wide(&out.lse), dhidden, frozen, ops.down(&dw)]
    };
    let want = move || {
        let i = &*inputs;
        let (hidden, w) = (as_operand(i.format, &i.hidden), as_operand(i.format, &i.w));
        let out = naive_head::head(i.shape, &hidden, &w, &i.targets);
        let dentropy = if i.dentropy.is_empty() { vec![0.0; rows] } else { wide(&i.dentropy) };
        let round = rounding(i.format);
        let (dhidden, dw) =
            naive_head::head_backward(i.shape, &hidden, &w, &i.targets, &wide(&i.dlogp), &dentropy, round);
        let dw = plus(dw, &i.old_dw);
        // An error of a logit is a relative one of its probability, and the likely tokens outweigh the rest.
        // In bf16 a logit gradient may fall to the other side of a rounding to eight bits, which a sum of
        // many mostly hides.
        let gradient_units = match i.format {
            Format::Bf16 => (1u64 << 12) as f64,
            _ => 6.0 * sum_units(d.max(rows)),
        };
        vec![
            Want::new("logp", out.logp, sum_units(d)),
            Want::new("entropy", out.entropy, sum_units(d)),
            Want::new("argmax", out.argmax, 0.0),
            Want::new("lse", out.lse, sum_units(d)),
            Want::new("dhidden", dhidden.clone(), gradient_units),
            Want::new("dhidden, head frozen", dhidden, gradient_units),
            Want::new("dw", dw, gradient_units),
        ]
    };
    Case { name, run: Box::new(run), want: Box::new(want) }
}
