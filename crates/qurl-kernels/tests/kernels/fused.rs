//! Operations that do several things at once give the bits of those things done one after the other.

use crate::support::{Paged, Random, assert_bits, cpus, down, heads, up};
use qurl_kernels::Format;
use qurl_kernels::backend::{Backend, KvFormat, Output, Rope};

const EPS: f32 = 1e-5;
/// One row, less than a strip, and rows that threads share inside a strip.
const ROWS: [usize; 4] = [1, 5, 32, 205];

#[test]
fn normed_and_activated_products() {
    let mut random = Random::new(31);
    for (n, k) in [(70, 1100), (32, 37)] {
        let most = ROWS.into_iter().max().unwrap_or(0);
        let (x, gate_up) = (random.normals(most * k), random.normals(most * 2 * k));
        let (gain, bias, w) = (random.normals(k), random.normals(n), random.normals(n * k));
        for cpu in cpus(2).into_iter().chain(cpus(3)) {
            let (x, gate_up, gain, bias) =
                (up(&cpu, &x), up(&cpu, &gate_up), up(&cpu, &gain), up(&cpu, &bias));
            for format in Format::ALL {
                let w = cpu.pack(&up(&cpu, &w), n, k, format, false).expect("weights pack");
                for rows in ROWS {
                    let what = format!("{format}, {rows} rows of {k} on {}", cpu.describe());
                    let [mut want, mut got] = [(); 2].map(|_| up(&cpu, &vec![0.5; rows * n]));
                    let [mut made, mut room] = [(); 2].map(|_| up(&cpu, &vec![f32::NAN; rows * k]));
                    cpu.rmsnorm(&x, &gain, rows, k, EPS, &mut made);
                    cpu.linear(&made, rows, &w, Some(&bias), Output::Store, &mut want);
                    cpu.norm_linear(&x, &gain, rows, EPS, &w, Some(&bias), &mut room, &mut got);
                    assert_bits(&format!("norm and {what}"), &down(&cpu, &got), &down(&cpu, &want));
                    cpu.swiglu(&gate_up, rows, k, &mut made);
                    cpu.linear(&made, rows, &w, None, Output::Add, &mut want);
                    cpu.swiglu_linear(&gate_up, rows, k, &w, Output::Add, &mut room, &mut got);
                    assert_bits(&format!("swiglu and {what}"), &down(&cpu, &got), &down(&cpu, &want));
                }
            }
        }
    }
}

#[test]
fn gradients_of_an_mlp_and_of_a_normed_product() {
    for cpu in cpus(2) {
        for (rows, d, f) in [(1, 40, 36), (7, 24, 37), (205, 70, 130)] {
            check_backward(&cpu, rows, d, f);
        }
    }
}

/// The backward operations of a block, together and in their parts, in the formats that are trained.
pub(crate) fn check_backward<B: Backend>(backend: &B, rows: usize, d: usize, f: usize) {
    let mut random = Random::new(33);
    let (x, dy, gain) = (random.normals(rows * d), random.normals(rows * d), random.normals(d));
    let (first, second) = (random.normals(2 * f * d), random.normals(d * f));
    // Far gates too, where the slope of SwiGLU is next to nothing.
    let gates: Vec<f32> = random.normals(rows * 2 * f).iter().map(|v| 4.0 * v).collect();
    let (old_first, old_second, old_bias) =
        (random.normals(2 * f * d), random.normals(d * f), random.normals(2 * f));
    let [x, dy, gain, first, second] = [x, dy, gain, first, second].map(|values| up(backend, &values));
    for format in [Format::F32, Format::Bf16] {
        let gate_up = &backend.pack(&first, 2 * f, d, format, true).expect("weights pack");
        let last = &backend.pack(&second, d, f, format, true).expect("weights pack");
        let room = |width: usize| up(backend, &vec![f32::NAN; rows * width]);

        let mlp = |together: bool| {
            let (mut projected, mut dfirst, mut dsecond) =
                (up(backend, &gates), up(backend, &old_first), up(backend, &old_second));
            let (mut normed, mut activated, mut dnormed) = (room(d), room(f), room(d));
            if together {
                let (normed, projected, activated) = (&mut normed, &mut projected, &mut activated);
                let (dfirst, dsecond, dnormed) = (&mut dfirst, &mut dsecond, &mut dnormed);
                backend.mlp_backward(
                    &x, &gain, rows, f, EPS, gate_up, last, &dy, normed, projected, activated, dfirst,
                    dsecond, dnormed,
                );
            } else {
                backend.linear_input_gradient(&dy, rows, last, &mut activated);
                backend.swiglu_backward(&mut projected, &mut activated, rows, f);
                backend.linear_weight_gradient(&activated, &dy, rows, last, &mut dsecond, None);
                backend.rmsnorm(&x, &gain, rows, d, EPS, &mut normed);
                backend.linear_weight_gradient(&normed, &projected, rows, gate_up, &mut dfirst, None);
                backend.linear_input_gradient(&projected, rows, gate_up, &mut dnormed);
            }
            [dfirst, dsecond, dnormed].map(|t| down(backend, &t))
        };
        let (got, want) = (mlp(true), mlp(false));
        for (name, (got, want)) in ["gate_up", "down", "normed rows"].iter().zip(got.iter().zip(&want)) {
            let what = format!("gradient of {name}, mlp {format}, {rows} rows of {d} and {f}");
            assert_bits(&format!("{what} on {}", backend.describe()), got, want);
        }

        let dy = up(backend, &gates);
        let linear = |together: bool| {
            let (mut dw, mut dbias, mut dx) = (up(backend, &old_first), up(backend, &old_bias), room(d));
            if together {
                backend.linear_backward(&x, &dy, rows, gate_up, &mut dw, Some(&mut dbias), &mut dx);
            } else {
                backend.linear_weight_gradient(&x, &dy, rows, gate_up, &mut dw, Some(&mut dbias));
                backend.linear_input_gradient(&dy, rows, gate_up, &mut dx);
            }
            [dw, dbias, dx].map(|t| down(backend, &t))
        };
        for (got, want) in linear(true).iter().zip(&linear(false)) {
            let what = format!("linear backward {format}, {rows} rows of {d} to {}", 2 * f);
            assert_bits(&format!("{what} on {}", backend.describe()), got, want);
        }
        let product = |together: bool, bias: bool| {
            let (mut dw, mut dbias) = (up(backend, &old_first), up(backend, &old_bias));
            let (mut normed, mut dnormed) = (room(d), room(d));
            let given = bias.then_some(&mut dbias);
            if together {
                let (normed, dw, dnormed) = (&mut normed, &mut dw, &mut dnormed);
                backend.norm_linear_backward(&x, &gain, rows, EPS, gate_up, &dy, normed, dw, given, dnormed);
            } else {
                backend.rmsnorm(&x, &gain, rows, d, EPS, &mut normed);
                backend.linear_weight_gradient(&normed, &dy, rows, gate_up, &mut dw, given);
                backend.linear_input_gradient(&dy, rows, gate_up, &mut dnormed);
            }
            [dw, dbias, dnormed].map(|t| down(backend, &t))
        };
        for bias in [false, true] {
            let (got, want) = (product(true, bias), product(false, bias));
            for (name, (got, want)) in ["weights", "bias", "normed rows"].iter().zip(got.iter().zip(&want)) {
                let what =
                    format!("gradient of {name}, norm and linear {format}, {rows} rows of {d} to {}", 2 * f);
                assert_bits(&format!("{what} on {}", backend.describe()), got, want);
            }
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
    let positions: Vec<u32> = (0..rows as u32).collect();
    for cpu in cpus(2) {
        let (cos, sin) = (up(&cpu, &cos), up(&cpu, &sin));
        for format in KvFormat::ALL {
            let attend = |together: bool| {
                let (mut qkv, mut kv) = (up(&cpu, &qkv), paged.stale_store(&cpu, heads, format));
                let (rope, slots) = (Rope { cos: &cos, sin: &sin }, paged.slots(0, 0..rows));
                if together {
                    cpu.rope_store(&mut qkv, heads, &positions, rope, &slots, &mut kv, format);
                } else {
                    let rotated = heads.heads + heads.kv_heads;
                    cpu.rope(&mut qkv, heads.qkv_width(), rotated, heads.head_dim, &positions, rope, false);
                    cpu.round_kv(&mut qkv, rows, heads, format);
                    cpu.kv_write(&qkv, heads, &slots, &mut kv);
                }
                let mut out = up(&cpu, &vec![f32::NAN; rows * heads.heads * heads.head_dim]);
                cpu.attention(heads, &qkv, &kv, &[paged.span(0, 0, rows, 0)], &paged.pages, &mut out, None);
                [down(&cpu, &qkv), down(&cpu, &out)].concat()
            };
            assert_bits(
                &format!("{} keys on {}", format.name(), cpu.describe()),
                &attend(true),
                &attend(false),
            );
        }
    }
}
