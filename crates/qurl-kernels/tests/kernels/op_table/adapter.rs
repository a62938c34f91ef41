//! Low-rank adapters beside frozen weights, in their own format or in four bits: linear layers of one and of
//! several modules with and without a norm, and an MLP, forward and backward, against the naive twins.

use super::bits4::stands_for;
use super::{Case, Want, sum_units};
use crate::naive;
use crate::ops::Ops;
use crate::support::{Random, as_operand, plus, rounding, wide};
use qurl_kernels::ops::{
    Adapter, AdapterBackward, Linear, LinearBackward, Mlp, MlpBackward, MlpPass, Norm, NormBackward, Output,
    Spread,
};
use qurl_kernels::types::{AdapterBlock, AdapterBlocks, Rows};
use qurl_kernels::{Device, Format, Queue};
use std::rc::Rc;

/// (rows, k, rank, scale, outputs of each module and whether it has an adapter)
type Shape = (usize, usize, usize, f32, &'static [(usize, bool)]);
const SHAPES: [Shape; 7] = [
    (1, 5, 1, 2.0, &[(7, true)]),
    (13, 33, 3, 0.7, &[(17, true)]),
    (3, 64, 8, 2.0, &[(64, true)]),
    (70, 64, 4, 1.5, &[(24, true), (16, false), (24, true)]),
    (33, 40, 8, 0.25, &[(48, true), (16, true), (16, true)]),
    (300, 128, 16, 2.0, &[(64, true), (64, true)]),
    (201, 24, 2, 2.0, &[(5, false), (9, true)]),
];
const EPS: f32 = 1e-5;

/// The matrices of an adapter and the gradients that theirs are added to.
struct Low {
    blocks: AdapterBlocks,
    n: usize,
    k: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    old_da: Vec<f32>,
    old_db: Vec<f32>,
}

impl Low {
    fn new(random: &mut Random, k: usize, rank: usize, scale: f32, modules: &[(usize, bool)]) -> Low {
        let (mut blocks, mut first, mut at) = (Vec::new(), 0, 0);
        for &(outputs, adapted) in modules {
            if adapted {
                blocks.push(AdapterBlock { first, outputs, at });
                at += rank;
            }
            first += outputs;
        }
        let blocks = AdapterBlocks { blocks, rank, width: at, scale };
        let mut numbers = |len: usize, factor: f32| -> Vec<f32> {
            random.normals(len).into_iter().map(|x| factor * x).collect()
        };
        Low {
            n: first,
            k,
            a: numbers(at * k, 1.0 / (k as f32).sqrt()),
            b: numbers(blocks.stacked(), 1.0),
            old_da: numbers(at * k, 1.0),
            old_db: numbers(blocks.stacked(), 1.0),
            blocks,
        }
    }

    /// Where each number of the stacked matrix is in the block-diagonal one.
    fn places(&self) -> Vec<usize> {
        let mut places = Vec::new();
        for block in &self.blocks.blocks {
            for row in block.first..block.first + block.outputs {
                places.extend((0..self.blocks.rank).map(|i| row * self.blocks.width + block.at + i));
            }
        }
        places
    }

    /// The block-diagonal matrix as a GEMM in this format sees it.
    fn diagonal(&self, format: Format) -> Vec<f64> {
        let mut dense = vec![0.0; self.n * self.blocks.width];
        let scaled: Vec<f32> = self.b.iter().map(|x| self.blocks.scale * x).collect();
        self.places().into_iter().zip(as_operand(format, &scaled)).for_each(|(at, x)| dense[at] = x);
        dense
    }

    fn up<D: Device>(&self, ops: &Ops<D>, format: Format) -> [D::Weight; 2] {
        let width = self.blocks.width;
        let mut dense = ops.stale(self.n * width);
        let (from, blocks) = (&ops.up(&self.b), &self.blocks);
        ops.queue().spread(Spread { from, blocks, n: self.n, to: &mut dense });
        let dense: Vec<f32> = ops.down(&dense).into_iter().map(|x| x as f32).collect();
        [ops.trained(&self.a, width, self.k, format), ops.trained(&dense, self.n, width, format)]
    }

    fn gradients<D: Device>(&self, ops: &Ops<D>) -> [D::Tensor; 2] {
        [ops.up(&self.old_da), ops.up(&self.old_db)]
    }

    /// `x A^T B^T`, with the rounding of a format between the two.
    fn forward(&self, format: Format, x: &[f64], rows: usize) -> Vec<f64> {
        naive::linear(
            &self.projected(format, x, rows),
            &self.diagonal(format),
            None,
            rows,
            self.n,
            self.width(),
        )
    }

    fn width(&self) -> usize {
        self.blocks.width
    }

    fn projected(&self, format: Format, x: &[f64], rows: usize) -> Vec<f64> {
        let u = naive::linear(x, &as_operand(format, &self.a), None, rows, self.width(), self.k);
        u.into_iter().map(rounding(format)).collect()
    }

    /// Gradients of x, a and b, the last two with what was there.
    fn backward(&self, format: Format, x: &[f64], dy: &[f64], rows: usize) -> [Vec<f64>; 3] {
        let (width, a) = (self.width(), as_operand(format, &self.a));
        let du = naive::linear_input_gradient(dy, &self.diagonal(format), rows, self.n, width);
        let du: Vec<f64> = du.into_iter().map(rounding(format)).collect();
        let dx = naive::linear_input_gradient(&du, &a, rows, width, self.k);
        let da = naive::linear_weight_gradient(x, &du, rows, width, self.k);
        let dense = naive::linear_weight_gradient(&self.projected(format, x, rows), dy, rows, self.n, width);
        let scale = f64::from(self.blocks.scale);
        let db = self.places().into_iter().map(|at| scale * dense[at]).collect();
        [dx, plus(da, &self.old_da), plus(db, &self.old_db)]
    }
}

/// The format of the weights, and of the adapters beside them.
#[derive(Clone, Copy)]
struct Formats {
    base: Format,
    adapter: Format,
}

impl Formats {
    const ALL: [Formats; 4] = [
        Formats { base: Format::F32, adapter: Format::F32 },
        Formats { base: Format::Bf16, adapter: Format::Bf16 },
        Formats { base: Format::Int4, adapter: Format::Bf16 },
        Formats { base: Format::Nvfp4, adapter: Format::Bf16 },
    ];

    /// Weights `[.., k]` as the forward pass and as the gradient of the input sees them.
    fn weights(self, w: &[f32], k: usize) -> [Vec<f64>; 2] {
        let forward = match self.base {
            Format::Int4 | Format::Nvfp4 => stands_for(self.base, w, k),
            _ => as_operand(self.base, w),
        };
        let gradient = forward.iter().copied().map(rounding(self.adapter)).collect();
        [forward, gradient]
    }
}

impl std::fmt::Display for Formats {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self.base == self.adapter {
            true => write!(f, "{}", self.base),
            false => write!(f, "beside {}", self.base),
        }
    }
}

fn add(a: Vec<f64>, b: &[f64]) -> Vec<f64> {
    a.into_iter().zip(b).map(|(a, b)| a + b).collect()
}

struct Inputs {
    low: Low,
    x: Vec<f32>,
    gain: Vec<f32>,
    w: Vec<f32>,
    dy: Vec<f32>,
    old_out: Vec<f32>,
    old_dx: Vec<f32>,
}

pub fn cases<D: Device>() -> Vec<Case<D>> {
    let mut cases = Vec::new();
    for formats in Formats::ALL {
        for (seed, (rows, k, rank, scale, modules)) in SHAPES.into_iter().enumerate() {
            let mut random = Random::new(70 + seed as u64);
            let low = Low::new(&mut random, k, rank, scale, modules);
            let n = low.n;
            let inputs = Rc::new(Inputs {
                low,
                x: random.normals(rows * k),
                gain: random.normals(k),
                w: random.normals(n * k),
                dy: random.normals(rows * n),
                old_out: random.normals(rows * n),
                old_dx: random.normals(rows * k),
            });
            cases.extend([false, true].map(|normed| linear(inputs.clone(), formats, rows, normed)));
        }
        cases.extend([(13, 33, 17, 3), (70, 64, 96, 8)].map(|shape| mlp(formats, shape)));
    }
    cases
}

fn linear<D: Device>(inputs: Rc<Inputs>, formats: Formats, rows: usize, normed: bool) -> Case<D> {
    let (n, k, Formats { base, adapter: format }) = (inputs.low.n, inputs.low.k, formats);
    let norms = if normed { "with" } else { "without" };
    let name = format!("adapter {formats} {rows}x{n}x{k} {norms} a norm");
    let given = inputs.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (x, dy, gain) = (&ops.up(&i.x), &ops.up(&i.dy), &ops.up(&i.gain));
        let w = &ops.frozen(&i.w, n, k, base);
        let [a, b] = &i.low.up(ops, format);
        let norm = || normed.then_some(Norm { gain, eps: EPS });
        let (mut stored, mut added) = (ops.stale(rows * n), ops.up(&i.old_out));
        let adapter = Some(Adapter { a, b });
        for (output, out) in [(Output::Store, &mut stored), (Output::Add, &mut added)] {
            ops.queue().linear(Linear { x, rows, norm: norm(), w, bias: None, adapter, output, out });
        }
        let [mut da, mut db] = i.low.gradients(ops);
        let mut dx = if normed { ops.up(&i.old_dx) } else { ops.stale(rows * k) };
        ops.queue().linear_backward(LinearBackward {
            x,
            rows,
            norm: normed.then_some(NormBackward { gain, eps: EPS, dgain: None }),
            w,
            adapter: Some(AdapterBackward { a, b, blocks: &i.low.blocks, da: &mut da, db: &mut db }),
            dy,
            dw: None,
            dbias: None,
            dx: Some(&mut dx),
        });
        [stored, added, dx, da, db].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let i = &*inputs;
        let ([w, w_back], dy) = (formats.weights(&i.w, k), as_operand(format, &i.dy));
        let (dense, eps) = (Rows::dense(rows, k), f64::from(EPS));
        let x = if normed { naive::norm(&wide(&i.x), &wide(&i.gain), dense, eps) } else { wide(&i.x) };
        let x: Vec<f64> = x.into_iter().map(rounding(format)).collect();
        let out = naive::linear(&x, &w, None, rows, n, k);
        let out = add(out, &i.low.forward(format, &x, rows));
        let [dlow, da, db] = i.low.backward(format, &x, &dy, rows);
        let dx = add(naive::linear_input_gradient(&dy, &w_back, rows, n, k), &dlow);
        let dx = match normed {
            true => plus(naive::norm_backward(&wide(&i.x), &wide(&i.gain), dense, eps, &dx).0, &i.old_dx),
            false => dx,
        };
        // Two GEMMs one after the other, and a norm.
        let units = |sums: f64| 4.0 * (sums + sum_units(k) + sum_units(i.low.width()));
        let want = |name, values, units| Want::of_operands(format, name, values, units);
        vec![
            want("stored", out.clone(), units(0.0)),
            want("added", plus(out, &i.old_out), units(0.0)),
            want("dx", dx, units(sum_units(n))),
            want("da", da, units(sum_units(n) + sum_units(rows))),
            want("db", db, units(sum_units(rows))),
        ]
    };
    Case { name, run: Box::new(run), want: Box::new(want) }
}

fn mlp<D: Device>(formats: Formats, (rows, d, f, rank): (usize, usize, usize, usize)) -> Case<D> {
    let Formats { base, adapter: format } = formats;
    struct Numbers {
        low: [Low; 2],
        x: Vec<f32>,
        gain: Vec<f32>,
        gate_up: Vec<f32>,
        down: Vec<f32>,
        dy: Vec<f32>,
    }
    let mut random = Random::new(99);
    let numbers = Rc::new(Numbers {
        low: [
            Low::new(&mut random, d, rank, 0.5, &[(f, true), (f, true)]),
            Low::new(&mut random, f, rank, 0.5, &[(d, true)]),
        ],
        x: random.normals(rows * d),
        gain: random.normals(d),
        gate_up: random.normals(2 * f * d).iter().map(|x| x / (d as f32).sqrt()).collect(),
        down: random.normals(d * f).iter().map(|x| x / (f as f32).sqrt()).collect(),
        dy: random.normals(rows * d),
    });
    let given = numbers.clone();
    let run = move |ops: &Ops<D>| {
        let i = &*given;
        let (x, gain) = (&ops.up(&i.x), &ops.up(&i.gain));
        let gate_up = &ops.frozen(&i.gate_up, 2 * f, d, base);
        let down = &ops.frozen(&i.down, d, f, base);
        let [first, second] = &i.low;
        let ([a, b], [c, e]) = (&first.up(ops, format), &second.up(ops, format));
        let ([mut da, mut db], [mut dc, mut de]) = (first.gradients(ops), second.gradients(ops));
        let (mut kept, [mut y, mut alone]) = (ops.kept_mlp(rows, f, format), [(); 2].map(|_| ops.up(&i.x)));
        for (x, pass) in [(&mut y, MlpPass::Keep(&mut kept)), (&mut alone, MlpPass::Forward)] {
            let norm = Norm { gain, eps: EPS };
            let (gate_up_adapter, down_adapter) = (Some(Adapter { a, b }), Some(Adapter { a: c, b: e }));
            ops.queue().mlp(Mlp { x, rows, norm, gate_up, down, gate_up_adapter, down_adapter, pass });
        }
        let mut dx = ops.up(&i.dy);
        let (da_to, db_to, dc_to, de_to) = (&mut da, &mut db, &mut dc, &mut de);
        ops.queue().mlp_backward(MlpBackward {
            x,
            rows,
            norm: NormBackward { gain, eps: EPS, dgain: None },
            gate_up,
            down,
            gate_up_adapter: Some(AdapterBackward { a, b, blocks: &first.blocks, da: da_to, db: db_to }),
            down_adapter: Some(AdapterBackward { a: c, b: e, blocks: &second.blocks, da: dc_to, db: de_to }),
            kept: &mut kept,
            dgate_up: None,
            ddown: None,
            dx: &mut dx,
        });
        [y, alone, dx, da, db, dc, de].iter().map(|t| ops.down(t)).collect()
    };
    let want = move || {
        let i = &*numbers;
        let ([first, second], round) = (&i.low, rounding(format));
        let rounded = |values: &[f64]| -> Vec<f64> { values.iter().map(|&x| round(x)).collect() };
        let (x, gain, dense, eps) = (wide(&i.x), wide(&i.gain), Rows::dense(rows, d), f64::from(EPS));
        let [gate_up, gate_up_back] = formats.weights(&i.gate_up, d);
        let [down, down_back] = formats.weights(&i.down, f);
        let normed = rounded(&naive::norm(&x, &gain, dense, eps));
        let kept = naive::linear(&normed, &gate_up, None, rows, 2 * f, d);
        let kept = add(kept, &first.forward(format, &normed, rows));
        let activated = rounded(&naive::swiglu(&kept, rows, f));
        let out = naive::linear(&activated, &down, None, rows, d, f);
        let out = add(plus(out, &i.x), &second.forward(format, &activated, rows));

        let dy = as_operand(format, &i.dy);
        let [dlow, dc, de] = second.backward(format, &activated, &dy, rows);
        let dactivated = add(naive::linear_input_gradient(&dy, &down_back, rows, d, f), &dlow);
        let dkept = rounded(&naive::swiglu_backward(&kept, &dactivated, rows, f));
        let [dlow, da, db] = first.backward(format, &normed, &dkept, rows);
        let dnormed = add(naive::linear_input_gradient(&dkept, &gate_up_back, rows, 2 * f, d), &dlow);
        let dx = plus(naive::norm_backward(&x, &gain, dense, eps, &dnormed).0, &i.dy);
        let units = 64.0 * (sum_units(2 * f) + sum_units(d) + sum_units(rows) + sum_units(rank));
        // In bf16 a device may keep projections, and compute the gradient of SwiGLU's output, in bf16.
        let want = |name, values| Want::of_operands(format, name, values, units).on_tensor_cores(1e-2);
        vec![
            want("x", out.clone()),
            want("x, nothing kept", out),
            want("dx", dx),
            want("da of gate and up", da),
            want("db of gate and up", db),
            want("da of down", dc),
            want("db of down", de),
        ]
    };
    let name = format!("mlp with adapters {formats} {rows}x{d}x{f}");
    Case { name, run: Box::new(run), want: Box::new(want) }
}
