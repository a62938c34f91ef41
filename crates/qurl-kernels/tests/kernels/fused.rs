//! Operations that do several things at once give the bits of those things done one after the other.

use crate::ops::{Ops, cpus};
use crate::paged::{Paged, heads};
use crate::support::{Random, assert_bits, wide};
use qurl_kernels::cpu::{attention, elementwise, kv};
use qurl_kernels::ops::{
    Linear, LinearBackward, Mlp, MlpBackward, MlpPass, Norm, NormBackward, Output, RmsNormBackward,
};
use qurl_kernels::types::KvFormat;
use qurl_kernels::{Cpu, Device, Format, Queue};

const EPS: f32 = 1e-5;
/// One row, less than a strip, and rows that threads share inside a strip.
const ROWS: [usize; 4] = [1, 5, 32, 205];

#[test]
fn normed_and_activated_rows_of_a_gemm() {
    let mut random = Random::new(31);
    for (n, k) in [(70, 1100), (32, 37)] {
        let most = ROWS.into_iter().max().unwrap_or(0);
        let (x, bias) = (random.normals(most * k), random.normals(n));
        let [gain, narrow_gain] = [k, n].map(|len| random.normals(len));
        let (w, gate_up, stream) =
            (random.normals(n * k), random.normals(2 * k * n), random.normals(most * n));
        for cpu in cpus(2).into_iter().chain(cpus(3)) {
            let [x, bias, gain, narrow_gain] = [&x, &bias, &gain, &narrow_gain].map(|values| cpu.up(values));
            for format in Format::ALL {
                let w = &cpu.frozen(&w, n, k, format);
                let gate_up = &cpu.frozen(&gate_up, 2 * k, n, format);
                for rows in ROWS {
                    let what = format!("{format}, {rows} rows of {k} on {}", cpu.name());
                    let norm = |gain| Norm { gain, eps: EPS };
                    let normed = |x: &_, gain, w, bias, out: &mut _| {
                        let (norm, output) = (Some(norm(gain)), Output::Store);
                        cpu.queue().linear(Linear { adapter: None, x, rows, norm, w, bias, output, out });
                    };
                    let [mut want, mut got] = [(); 2].map(|_| cpu.stale(rows * n));
                    let mut made = cpu.stale(rows * k);
                    cpu.rmsnorm(&x, rows, &gain, EPS, &mut made);
                    cpu.linear(&made, rows, w, Some(&bias), Output::Store, &mut want);
                    normed(&x, &gain, w, Some(&bias), &mut got);
                    assert_bits(&format!("norm and {what}"), &cpu.down(&got), &cpu.down(&want));

                    // The same weights as the down projection of an MLP.
                    let [mut want, mut kept, mut nothing_kept] = [(); 3].map(|_| cpu.up(&stream[..rows * n]));
                    let mut unread = cpu.up(&stream[..rows * n]);
                    let [mut projected, mut left, mut again] = [(); 3].map(|_| cpu.stale(rows * 2 * k));
                    normed(&want, &narrow_gain, gate_up, None, &mut projected);
                    elementwise::swiglu(cpu.context(), &projected, rows, k, &mut made);
                    cpu.linear(&made, rows, w, None, Output::Add, &mut want);
                    let passes = [
                        (&mut kept, MlpPass::Keep(&mut left)),
                        (&mut nothing_kept, MlpPass::Forward),
                        (&mut unread, MlpPass::KeepOnly(&mut again)),
                    ];
                    for (x, pass) in passes {
                        let norm = norm(&narrow_gain);
                        cpu.queue().mlp(Mlp {
                            gate_up_adapter: None,
                            down_adapter: None,
                            x,
                            rows,
                            norm,
                            gate_up,
                            down: w,
                            pass,
                        });
                    }
                    assert_bits(&format!("mlp, {what}"), &cpu.down(&kept), &cpu.down(&want));
                    assert_bits(&format!("mlp alone, {what}"), &cpu.down(&nothing_kept), &cpu.down(&want));
                    assert_bits(&format!("kept, {what}"), &cpu.down(&left), &cpu.down(&projected));
                    assert_bits(&format!("kept alone, {what}"), &cpu.down(&again), &cpu.down(&projected));
                    assert_bits(&format!("stream, {what}"), &cpu.down(&unread), &wide(&stream[..rows * n]));
                }
            }
        }
    }
}

#[test]
fn gradients_of_an_mlp_and_of_a_normed_linear() {
    for cpu in cpus(2) {
        for (rows, d, f) in [(1, 40, 36), (7, 24, 37), (205, 70, 130)] {
            check_linear_backward(&cpu, rows, d, 2 * f);
            check_mlp_backward(&cpu, rows, d, f);
        }
    }
}

/// Backward of linear layers with and without a norm, in one and in its parts, in the formats that are
/// trained.
pub(crate) fn check_linear_backward<D: Device>(ops: &Ops<D>, rows: usize, d: usize, n: usize) {
    let mut random = Random::new(33);
    let (x, gain, weights) = (random.normals(rows * d), random.normals(d), random.normals(n * d));
    let (dy, old_dw) = (random.normals(rows * n), random.normals(n * d));
    let (old_dbias, old_dgain, old_dx) = (random.normals(n), random.normals(d), random.normals(rows * d));
    let [x, gain, dy] = [x, gain, dy].map(|values| ops.up(&values));
    for format in [Format::F32, Format::Bf16] {
        let w = &ops.trained(&weights, n, d, format);
        let what = format!("linear backward {format}, {rows} rows of {d} to {n} on {}", ops.name());
        // dw, dbias, dx of rows without a norm: all at once, or each alone.
        let plain = |x: &D::Tensor, together: bool| {
            let (mut dw, mut dbias, mut dx) = (ops.up(&old_dw), ops.up(&old_dbias), ops.stale(rows * d));
            let call = |dw, dbias, dx| {
                ops.queue().linear_backward(LinearBackward {
                    adapter: None,
                    x,
                    rows,
                    norm: None,
                    w,
                    dy: &dy,
                    dw,
                    dbias,
                    dx,
                });
            };
            if together {
                call(Some(&mut dw), Some(&mut dbias), Some(&mut dx));
            } else {
                call(None, Some(&mut dbias), None);
                call(Some(&mut dw), None, None);
                call(None, None, Some(&mut dx));
            }
            [dw, dbias, dx]
        };
        for (got, want) in plain(&x, true).iter().zip(&plain(&x, false)) {
            assert_bits(&what, &ops.down(got), &ops.down(want));
        }

        let normed = |together: bool, trained: bool| {
            let (mut dgain, mut dx) = (ops.up(&old_dgain), ops.up(&old_dx));
            let (mut dw, mut dbias) = (ops.up(&old_dw), ops.up(&old_dbias));
            if together {
                let norm = NormBackward { gain: &gain, eps: EPS, dgain: trained.then_some(&mut dgain) };
                ops.queue().linear_backward(LinearBackward {
                    adapter: None,
                    x: &x,
                    rows,
                    norm: Some(norm),
                    w,
                    dy: &dy,
                    dw: trained.then_some(&mut dw),
                    dbias: trained.then_some(&mut dbias),
                    dx: Some(&mut dx),
                });
            } else {
                let mut rows_normed = ops.stale(rows * d);
                ops.rmsnorm(&x, rows, &gain, EPS, &mut rows_normed);
                let [apart_dw, apart_dbias, mut dnormed] = plain(&rows_normed, false);
                (dw, dbias) = (apart_dw, apart_dbias);
                let norm = NormBackward { gain: &gain, eps: EPS, dgain: Some(&mut dgain) };
                let (x, dy, dx) = (&x, &mut dnormed, &mut dx);
                ops.queue().rmsnorm_backward(RmsNormBackward { x, rows, norm, dy, dx });
            }
            [dx, dgain, dw, dbias].map(|t| ops.down(&t))
        };
        let want = normed(false, true);
        for (name, (got, want)) in
            ["dx", "dgain", "dw", "dbias"].iter().zip(normed(true, true).iter().zip(&want))
        {
            assert_bits(&format!("{name} of normed {what}"), got, want);
        }
        assert_bits(&format!("dx of frozen {what}"), &normed(true, false)[0], &want[0]);
    }
}

/// Backward of an MLP, in one and in its parts.
fn check_mlp_backward(cpu: &Ops<Cpu>, rows: usize, d: usize, f: usize) {
    let mut random = Random::new(34);
    let (x, dy, gain) = (random.normals(rows * d), random.normals(rows * d), random.normals(d));
    let (first, second) = (random.normals(2 * f * d), random.normals(d * f));
    // Far gates too, where the slope of SwiGLU is next to nothing.
    let gates: Vec<f32> = random.normals(rows * 2 * f).iter().map(|v| 4.0 * v).collect();
    let (old_first, old_second, old_dgain) =
        (random.normals(2 * f * d), random.normals(d * f), random.normals(d));
    let (x, gain) = (&cpu.up(&x), &cpu.up(&gain));
    for format in [Format::F32, Format::Bf16] {
        let (gate_up, down) = (&cpu.trained(&first, 2 * f, d, format), &cpu.trained(&second, d, f, format));
        let run = |together: bool| {
            let (mut kept, mut dx) = (cpu.up(&gates), cpu.up(&dy));
            let (mut dfirst, mut dsecond) = (cpu.up(&old_first), cpu.up(&old_second));
            let mut dgain = cpu.up(&old_dgain);
            let norm = NormBackward { gain, eps: EPS, dgain: Some(&mut dgain) };
            if together {
                cpu.queue().mlp_backward(MlpBackward {
                    gate_up_adapter: None,
                    down_adapter: None,
                    x,
                    rows,
                    norm,
                    gate_up,
                    down,
                    kept: &mut kept,
                    dgate_up: Some(&mut dfirst),
                    ddown: Some(&mut dsecond),
                    dx: &mut dx,
                });
            } else {
                let [mut activated, unread] = [(); 2].map(|_| cpu.stale(rows * f));
                let part = LinearBackward {
                    adapter: None,
                    x: &unread,
                    rows,
                    norm: None,
                    w: down,
                    dy: &dx,
                    dw: None,
                    dbias: None,
                    dx: Some(&mut activated),
                };
                cpu.queue().linear_backward(part);
                elementwise::swiglu_backward(cpu.context(), &mut kept, &mut activated, rows, f);
                let part = LinearBackward {
                    adapter: None,
                    x: &activated,
                    rows,
                    norm: None,
                    w: down,
                    dy: &dx,
                    dw: Some(&mut dsecond),
                    dbias: None,
                    dx: None,
                };
                cpu.queue().linear_backward(part);
                cpu.queue().linear_backward(LinearBackward {
                    adapter: None,
                    x,
                    rows,
                    norm: Some(norm),
                    w: gate_up,
                    dy: &kept,
                    dw: Some(&mut dfirst),
                    dbias: None,
                    dx: Some(&mut dx),
                });
            }
            [dx, dgain, dfirst, dsecond].map(|t| cpu.down(&t))
        };
        let (got, want) = (run(true), run(false));
        for (name, (got, want)) in ["dx", "dgain", "dgate_up", "ddown"].iter().zip(got.iter().zip(&want)) {
            let what = format!("{name} of an mlp {format}, {rows} rows of {d} and {f}");
            assert_bits(&format!("{what} on {}", cpu.name()), got, want);
        }
    }
}

#[test]
fn keys_rotated_rounded_and_stored() {
    let mut random = Random::new(32);
    let (heads, rows) = (heads(2, 3, 48), 37);
    let (cos, sin) = (random.normals(64 * 24), random.normals(64 * 24));
    let qkv = random.normals(rows * heads.qkv_width());
    let paged = Paged::scattered(&mut random, &[rows], 16);
    let batch = paged.batch([(0, 0..rows)]);
    let (positions, slots) = (&batch.positions, &batch.slots);
    for cpu in cpus(2) {
        let ctx = cpu.context();
        for format in KvFormat::ALL {
            let attend = |together: bool| {
                let (mut qkv, mut pages) = (qkv.clone(), paged.stale_store(&cpu, heads, format));
                let width = heads.qkv_width();
                if together {
                    pages.rope_store(ctx, &mut qkv, heads, positions, &cos, &sin, slots);
                } else {
                    let rotated = heads.heads + heads.kv_heads;
                    let head_dim = heads.head_dim;
                    elementwise::rope(ctx, &mut qkv, width, rotated, head_dim, positions, &cos, &sin, false);
                    kv::round(ctx, &mut qkv, rows, heads, format);
                    pages.write(ctx, &qkv, width, heads.q_width(), slots);
                }
                let mut out = vec![f32::NAN; rows * heads.q_width()];
                attention::forward(ctx, heads, &qkv, &pages, &batch.spans, &batch.pages, &mut out, None);
                [wide(&qkv), wide(&out)].concat()
            };
            let what = format!("{} keys on {}", format.name(), cpu.name());
            assert_bits(&what, &attend(true), &attend(false));
        }
    }
}
