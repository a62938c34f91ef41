//! A block's MLP: forward with and without what is kept, and backward from what was kept.

use super::{Case, Want, sum_units};
use crate::naive;
use crate::ops::Ops;
use crate::support::{Random, as_operand, plus, rounding, wide};
use qurl_kernels::ops::{Mlp, MlpBackward, MlpPass, Norm, NormBackward};
use qurl_kernels::types::Rows;
use qurl_kernels::{Device, Format, Queue};
use std::rc::Rc;

/// (rows, d, f)
const SHAPES: [(usize, usize, usize); 8] = [
    (1, 1, 1),
    (1, 5, 5),
    (1, 17, 61),
    (13, 33, 17),
    (200, 16, 33),
    (70, 64, 256),
    (3, 40, 1101),
    (401, 33, 16),
];
const EPS: f32 = 1e-5;

struct Inputs {
    x: Vec<f32>,
    gain: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
    dy: Vec<f32>,
    old_dgain: Vec<f32>,
    old_dgate_up: Vec<f32>,
    old_ddown: Vec<f32>,
}

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for format in [Format::F32, Format::Bf16] {
        for (seed, (rows, d, f)) in SHAPES.into_iter().enumerate() {
            let mut random = Random::new(seed as u64);
            let mut numbers = |len: usize, factor: f32| -> Vec<f32> {
                random.normals(len).into_iter().map(|x| factor * x).collect()
            };
            let inputs = Inputs {
                x: numbers(rows * d, 1.0),
                gain: numbers(d, 1.0),
                // Far gates too, where the slope of SwiGLU is next to nothing.
                gate_up: numbers(2 * f * d, 3.0 / (d as f32).sqrt()),
                down: numbers(d * f, 1.0 / (f as f32).sqrt()),
                dy: numbers(rows * d, 1.0),
                old_dgain: numbers(d, 1.0),
                old_dgate_up: numbers(2 * f * d, 1.0),
                old_ddown: numbers(d * f, 1.0),
            };
            let inputs = Rc::new(inputs);
            cases.extend([forward(inputs.clone(), format, rows, d, f), backward(inputs, format, rows, d, f)]);
        }
    }
    cases
}

fn forward<D: Device>(inputs: Rc<Inputs>, format: Format, rows: usize, d: usize, f: usize) -> Case<D> {
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (gain, mut kept) = (ops.up(&i.gain), ops.kept_mlp(rows, f, format));
        let gate_up = &ops.trained(&i.gate_up, 2 * f, d, format);
        let down = &ops.trained(&i.down, d, f, format);
        let [mut x, mut y] = [(); 2].map(|_| ops.up(&i.x));
        let norm = || Norm { gain: &gain, eps: EPS };
        ops.queue().mlp(Mlp {
            gate_up_adapter: None,
            down_adapter: None,
            x: &mut x,
            rows,
            norm: norm(),
            gate_up,
            down,
            pass: MlpPass::Keep(&mut kept),
        });
        ops.queue().mlp(Mlp {
            gate_up_adapter: None,
            down_adapter: None,
            x: &mut y,
            rows,
            norm: norm(),
            gate_up,
            down,
            pass: MlpPass::Forward,
        });
        [x, y].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let i = &*inputs;
        let (x, round) = (wide(&i.x), rounding(format));
        let rounded = |values: Vec<f64>| -> Vec<f64> { values.into_iter().map(round).collect() };
        let normed = rounded(naive::norm(&x, &wide(&i.gain), Rows::dense(rows, d), EPS as f64));
        let kept = naive::linear(&normed, &as_operand(format, &i.gate_up), None, rows, 2 * f, d);
        let activated = rounded(naive::swiglu(&kept, rows, f));
        let out = naive::linear(&activated, &as_operand(format, &i.down), None, rows, d, f);
        let out = plus(out, &i.x);
        // A norm and a GEMM; then SwiGLU, whose slopes carry the errors of both projections, and another
        // GEMM.
        let projected = 2.0 * sum_units(d);
        let units = 4.0 * projected + sum_units(f);
        let want = |name, values, units| Want::of_operands(format, name, values, units);
        vec![want("x", out.clone(), units), want("x, nothing kept", out, units)]
    };
    Case { name: format!("mlp {format} {rows}x{d}x{f}"), run: Box::new(run), want: Box::new(want) }
}

fn backward<D: Device>(inputs: Rc<Inputs>, format: Format, rows: usize, d: usize, f: usize) -> Case<D> {
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (x, gain) = (&ops.up(&i.x), &ops.up(&i.gain));
        let gate_up = &ops.trained(&i.gate_up, 2 * f, d, format);
        let down = &ops.trained(&i.down, d, f, format);
        let run = |frozen: bool, only: bool| {
            let (mut stream, mut kept) = (ops.up(&i.x), ops.kept_mlp(rows, f, format));
            let norm = Norm { gain, eps: EPS };
            let pass = if only { MlpPass::KeepOnly(&mut kept) } else { MlpPass::Keep(&mut kept) };
            ops.queue().mlp(Mlp {
                gate_up_adapter: None,
                down_adapter: None,
                x: &mut stream,
                rows,
                norm,
                gate_up,
                down,
                pass,
            });
            let (mut dgate_up, mut ddown) = (ops.up(&i.old_dgate_up), ops.up(&i.old_ddown));
            let (mut dgain, mut dx) = (ops.up(&i.old_dgain), ops.up(&i.dy));
            let trained = |gradient| if frozen { None } else { Some(gradient) };
            ops.queue().mlp_backward(MlpBackward {
                gate_up_adapter: None,
                down_adapter: None,
                x,
                rows,
                norm: NormBackward { gain, eps: EPS, dgain: trained(&mut dgain) },
                gate_up,
                down,
                kept: &mut kept,
                dgate_up: trained(&mut dgate_up),
                ddown: trained(&mut ddown),
                dx: &mut dx,
            });
            [dx, dgain, dgate_up, ddown, stream].map(|t| ops.down(&t))
        };
        let [all, frozen, again] = [run(false, false), run(true, false), run(false, true)];
        // A pass that only keeps does so for the same gradients, and leaves the stream as it is.
        let bits = |of: &[Vec<f64>]| of.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
        let same = bits(&all[..4]) == bits(&again[..4]);
        assert!(same, "mlp {format} {rows}x{d}x{f}: gradients of what was kept alone");
        let [dx, dgain, dgate_up, ddown, _] = all;
        let [.., unread] = again;
        vec![dx, dgain, dgate_up, ddown, frozen.into_iter().next().unwrap_or_default(), unread]
    };
    let want = move || {
        let i = &*inputs;
        let (x, gain, dense) = (wide(&i.x), wide(&i.gain), Rows::dense(rows, d));
        let round = rounding(format);
        let rounded = |values: &[f64]| -> Vec<f64> { values.iter().map(|&x| round(x)).collect() };
        let (gate_up, down) = (as_operand(format, &i.gate_up), as_operand(format, &i.down));
        let dy = as_operand(format, &i.dy);
        let normed = rounded(&naive::norm(&x, &gain, dense, EPS as f64));
        let kept = naive::linear(&normed, &gate_up, None, rows, 2 * f, d);
        let dactivated = naive::linear_input_gradient(&dy, &down, rows, d, f);
        let dkept = rounded(&naive::swiglu_backward(&kept, &dactivated, rows, f));
        let activated = rounded(&naive::swiglu(&kept, rows, f));
        let ddown = plus(naive::linear_weight_gradient(&activated, &dy, rows, d, f), &i.old_ddown);
        let dgate_up = naive::linear_weight_gradient(&normed, &dkept, rows, 2 * f, d);
        let dnormed = naive::linear_input_gradient(&dkept, &gate_up, rows, 2 * f, d);
        let (dx, dgain) = naive::norm_backward(&x, &gain, dense, EPS as f64, &dnormed);
        let dx = plus(dx, &i.dy);
        // Slopes carry the errors of the projections, as in the forward pass.
        let kept_units = 8.0 * sum_units(d);
        let dkept_units = kept_units + sum_units(d) + 24.0;
        // In bf16 a device may keep projections, and compute the gradient of SwiGLU's output, in bf16.
        let want = |name, values, units| Want::of_operands(format, name, values, units).on_tensor_cores(1e-2);
        let units = |exact: f64| 2.0 * dkept_units + exact;
        vec![
            want("dx", dx.clone(), units(sum_units(2 * f) + sum_units(d))),
            want("dgain", plus(dgain, &i.old_dgain), units(sum_units(2 * f) + sum_units(rows.max(d)))),
            want("dgate_up", plus(dgate_up, &i.old_dgate_up), units(sum_units(rows) + sum_units(d))),
            Want::of_operands(format, "ddown", ddown, kept_units + 12.0 + sum_units(rows)),
            want("dx, all frozen", dx, units(sum_units(2 * f) + sum_units(d))),
            Want::new("x, only kept", x, 0.0),
        ]
    };
    Case { name: format!("mlp backward {format} {rows}x{d}x{f}"), run: Box::new(run), want: Box::new(want) }
}
