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
            let (x, gate_up, gain, bias) = (up(&cpu, &x), up(&cpu, &gate_up), up(&cpu, &gain), up(&cpu, &bias));
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
            assert_bits(&format!("{} keys on {}", format.name(), cpu.describe()), &attend(true), &attend(false));
        }
    }
}
