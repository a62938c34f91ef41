//! Kernels of the CPU that are parts of operations, each alone against its naive twin and on several threads:
//! norms of heads inside of rows, rotary embedding and SwiGLU. In operations they are seen through what comes
//! after them.

use crate::naive;
use crate::ops::{Ops, cpus};
use crate::support::{Random, assert_bits, assert_close, plus, wide};
use qurl_kernels::Cpu;
use qurl_kernels::cpu::norm::InputGradient;
use qurl_kernels::cpu::{elementwise, norm};
use qurl_kernels::types::Rows;

const HEAD_DIMS: [usize; 7] = [8, 16, 20, 64, 80, 128, 256];
const EPS: f32 = 1e-5;

/// Roundings to allow for a sum of `k` products, as in the op table.
fn sum_units(k: usize) -> f64 {
    4.0 + 3.0 * (k as f64).sqrt()
}

/// Outputs at every level within `units` of what is wanted, with the same bits on one thread and on three.
fn check(what: &str, run: impl Fn(&Ops<Cpu>) -> Vec<Vec<f32>>, want: &[(&str, Vec<f64>, f64)]) {
    for ((two, one), three) in cpus(2).iter().zip(&cpus(1)).zip(&cpus(3)) {
        let outputs = run(two);
        assert_eq!(outputs.len(), want.len(), "{what}: outputs");
        for (output, (name, values, units)) in outputs.iter().zip(want) {
            assert_close(&format!("{what} {name} on {}", two.name()), &wide(output), values, *units);
        }
        for cpu in [one, three] {
            for (got, want) in run(cpu).iter().zip(&outputs) {
                assert_bits(&format!("{what} on {}", cpu.name()), &wide(got), &wide(want));
            }
        }
    }
}

#[test]
fn norms_of_heads() {
    for (seed, width) in HEAD_DIMS.into_iter().enumerate() {
        for outer in [1, 13, 70] {
            let mut random = Random::new(seed as u64);
            // Two heads after a first one that is left alone, and two more after them.
            let rows = Rows { start: width, outer, stride: 5 * width, per: 2, width };
            let [x, gradient] = [(); 2].map(|_| random.normals(outer * 5 * width));
            let [gain, old_dgain] = [(); 2].map(|_| random.normals(width));
            let run = |cpu: &Ops<Cpu>| {
                let (ctx, mut out) = (cpu.context(), x.clone());
                norm::forward_in_place(ctx, &mut out, &gain, rows, EPS);
                let (mut dx, mut dgain) = (gradient.clone(), old_dgain.clone());
                let in_place = InputGradient::InPlace;
                norm::backward(ctx, &x, &gain, rows, EPS, &mut dx, in_place, Some(&mut dgain));
                vec![out, dx, dgain]
            };
            let (x, gain, eps) = (wide(&x), wide(&gain), EPS as f64);
            let (dx, dgain) = naive::norm_backward(&x, &gain, rows, eps, &wide(&gradient));
            let wants = [
                ("out", naive::norm(&x, &gain, rows, eps), sum_units(width)),
                ("dx", dx, sum_units(width)),
                ("dgain", plus(dgain, &old_dgain), sum_units((2 * outer).max(width))),
            ];
            check(&format!("norm of heads {outer}x{width}"), run, &wants);
        }
    }
}

#[test]
fn rotary_embedding() {
    for (seed, head_dim) in HEAD_DIMS.into_iter().enumerate() {
        for rows in [1, 13, 70] {
            let mut random = Random::new(seed as u64);
            let (heads, stride, half, table) = (3, 4 * head_dim + 3, head_dim / 2, 50);
            let (x, positions) = (random.normals(rows * stride), random.ids(rows, table));
            let angle = |i: usize| (i / half) as f64 * 10_000f64.powf(-((i % half) as f64) / half as f64);
            let values =
                |f: fn(f64) -> f64| -> Vec<f32> { (0..table * half).map(|i| f(angle(i)) as f32).collect() };
            let (cos, sin) = (values(f64::cos), values(f64::sin));
            let run = |cpu: &Ops<Cpu>| {
                let rotate = |inverse| {
                    let mut x = x.clone();
                    let ctx = cpu.context();
                    elementwise::rope(ctx, &mut x, stride, heads, head_dim, &positions, &cos, &sin, inverse);
                    x
                };
                vec![rotate(false), rotate(true)]
            };
            let at = |position: usize, i: usize| {
                (f64::from(cos[position * half + i]), f64::from(sin[position * half + i]))
            };
            let want = |inverse| naive::rope(&wide(&x), stride, heads, head_dim, &positions, at, inverse);
            let wants = [("rotated", want(false), 4.0), ("rotated back", want(true), 4.0)];
            check(&format!("rope {rows}x{head_dim}"), run, &wants);
        }
    }
}

#[test]
fn swiglu() {
    let shapes = [(1, 1), (1, 5), (1, 61), (13, 17), (200, 33), (70, 256), (3, 1101), (401, 16)];
    for (seed, (rows, f)) in shapes.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let gate_up: Vec<f32> = random.normals(rows * 2 * f).iter().map(|x| 3.0 * x).collect();
        let dout = random.normals(rows * f);
        let run = |cpu: &Ops<Cpu>| {
            let (ctx, mut gate_up) = (cpu.context(), gate_up.clone());
            let mut out = vec![f32::NAN; rows * f];
            elementwise::swiglu(ctx, &gate_up, rows, f, &mut out);
            // The gradient of the output goes in, the output comes out.
            let mut swapped = dout.clone();
            elementwise::swiglu_backward(ctx, &mut gate_up, &mut swapped, rows, f);
            vec![out, swapped, gate_up]
        };
        let (gate_up, dout) = (wide(&gate_up), wide(&dout));
        let wants = [
            ("out", naive::swiglu(&gate_up, rows, f), 12.0),
            ("out, again", naive::swiglu(&gate_up, rows, f), 12.0),
            ("gradient", naive::swiglu_backward(&gate_up, &dout, rows, f), 24.0),
        ];
        check(&format!("swiglu {rows}x{f}"), run, &wants);
    }
}
