//! The same bits on any number of threads, for a row alone and in any batch, and for gradients summed over any split
//! of the tokens.

use crate::op_table::table;
use crate::support::{Paged, Random, assert_bits, cpus, down, heads, up, wide};
use qurl_kernels::backend::{Backend, HeadGradient, KvFormat, Output, Rope};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Format, Rounding};

const FORMATS: [Format; 2] = [Format::F32, Format::Bf16];
const EPS: f32 = 1e-5;

#[test]
fn threads_do_not_matter() {
    for level in Level::available() {
        let [one, two, three] = [1, 2, 3].map(|threads| Cpu::new(level, threads));
        for case in table() {
            let want = (case.run)(&one);
            for cpu in [&two, &three] {
                let got = (case.run)(cpu);
                for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert_bits(&format!("{} output {i} on {}", case.name, cpu.describe()), got, want);
                }
            }
        }
    }
}

/// Rows of the whole batch: more than a block of strips at every level.
const ROWS: usize = 205;
/// (first row, rows) of smaller batches.
const BATCHES: [(usize, usize); 10] =
    [(0, 1), (204, 1), (17, 1), (7, 2), (100, 5), (30, 12), (31, 13), (3, 48), (10, 193), (5, 200)];

/// Calls `run(first row, rows)` for the whole batch and for smaller ones: each row's outputs must be the same bits.
fn same_in_any_batch(what: &str, run: impl Fn(usize, usize) -> Vec<Vec<f64>>) {
    let whole = run(0, ROWS);
    for (first, rows) in BATCHES {
        for (i, (got, whole)) in run(first, rows).iter().zip(&whole).enumerate() {
            let width = whole.len() / ROWS;
            let want = &whole[first * width..(first + rows) * width];
            assert_bits(&format!("{what} output {i}, {rows} rows from {first}"), got, want);
        }
    }
}

#[test]
fn linear_rows_alone_and_in_batches() {
    let mut random = Random::new(1);
    let (n, k) = (70, 1100);
    let (x, w, bias) = (random.normals(ROWS * k), random.normals(n * k), random.normals(n));
    let (dy, old) = (random.normals(ROWS * n), random.normals(ROWS * n));
    for cpu in cpus(2) {
        for format in FORMATS {
            let packed = cpu.pack(&up(&cpu, &w), n, k, format, true).expect("weights pack");
            let bias = up(&cpu, &bias);
            same_in_any_batch(&format!("linear {format} on {}", cpu.describe()), |first, rows| {
                let x = up(&cpu, &x[first * k..][..rows * k]);
                let [mut stored, mut added] = [(); 2].map(|_| up(&cpu, &old[first * n..][..rows * n]));
                cpu.linear(&x, rows, &packed, Some(&bias), Output::Store, &mut stored);
                cpu.linear(&x, rows, &packed, Some(&bias), Output::Add, &mut added);
                let mut dx = up(&cpu, &vec![0.0; rows * k]);
                cpu.linear_input_gradient(&up(&cpu, &dy[first * n..][..rows * n]), rows, &packed, &mut dx);
                [stored, added, dx].iter().map(|t| down(&cpu, t)).collect()
            });
        }
    }
}

#[test]
fn other_rows_alone_and_in_batches() {
    let mut random = Random::new(2);
    let (width, head_dim) = (68, 16);
    let x = random.normals(ROWS * width);
    let (gain, positions) = (random.normals(width), random.ids(ROWS, 30));
    let (cos, sin) = (random.normals(30 * head_dim / 2), random.normals(30 * head_dim / 2));
    for cpu in cpus(2) {
        let gain = up(&cpu, &gain);
        let (cos, sin) = (up(&cpu, &cos), up(&cpu, &sin));
        same_in_any_batch(&format!("row operations on {}", cpu.describe()), |first, rows| {
            let x = up(&cpu, &x[first * width..][..rows * width]);
            let mut normed = up(&cpu, &vec![0.0; rows * width]);
            cpu.rmsnorm(&x, &gain, rows, width, EPS, &mut normed);
            let mut activated = up(&cpu, &vec![0.0; rows * width / 2]);
            cpu.swiglu(&x, rows, width / 2, &mut activated);
            let mut turned = x.clone();
            let tables = Rope { cos: &cos, sin: &sin };
            cpu.rope(&mut turned, width, 4, head_dim, &positions[first..first + rows], tables, false);
            let (mut dy, mut dx, mut dgain) = (normed.clone(), x.clone(), gain.clone());
            cpu.rmsnorm_backward(&x, &gain, rows, width, EPS, &mut dy, &mut dx, &mut dgain);
            let dots = wide(&cpu.row_dots(&x, rows, &gain).expect("dot products"));
            vec![down(&cpu, &normed), down(&cpu, &activated), down(&cpu, &turned), down(&cpu, &dx), dots]
        });
    }
}

#[test]
fn head_rows_alone_and_in_batches() {
    let mut random = Random::new(3);
    let (vocabulary, d) = (1100, 40);
    let (hidden, w) = (random.normals(ROWS * d), random.normals(vocabulary * d));
    let (targets, gradient) = (random.ids(ROWS, vocabulary), random.normals(ROWS));
    for cpu in cpus(2) {
        for format in FORMATS {
            let packed = cpu.pack(&up(&cpu, &w), vocabulary, d, format, true).expect("weights pack");
            same_in_any_batch(&format!("head {format} on {}", cpu.describe()), |first, rows| {
                let hidden = up(&cpu, &hidden[first * d..][..rows * d]);
                let targets = &targets[first..first + rows];
                let out = cpu.head(&hidden, &packed, targets, 0.9).expect("memory for the head");
                let (mut dhidden, mut dw) = (up(&cpu, &vec![0.0; rows * d]), up(&cpu, &w));
                let g = &gradient[first..first + rows];
                let gradient = HeadGradient { dlogp: g, dentropy: g };
                cpu.head_backward(&hidden, &packed, targets, 0.9, &out, gradient, &mut dhidden, &mut dw);
                let argmax = out.argmax.iter().map(|&id| id as f64).collect();
                vec![wide(&out.logp), wide(&out.entropy), argmax, wide(&out.lse), down(&cpu, &dhidden)]
            });
        }
    }
}

#[test]
fn decoding_sequences_alone_and_together() {
    let lengths = [1, 17, 64, 65, 130, 33, 128];
    for (kv_heads, group, head_dim) in [(2, 1, 16), (1, 2, 80), (1, 7, 64)] {
        let heads = heads(kv_heads, group, head_dim);
        let mut random = Random::new(4);
        let paged = Paged::scattered(&mut random, &lengths, 32);
        for cpu in cpus(2) {
            let mut kv = paged.stale_store(&cpu, heads, KvFormat::F32);
            for (i, &len) in lengths.iter().enumerate() {
                let qkv = up(&cpu, &random.normals(len * heads.qkv_width()));
                cpu.kv_write(&qkv, heads, &paged.slots(i, 0..len), &mut kv);
            }
            let queries = random.normals(lengths.len() * heads.qkv_width());
            let decode = |sequences: &[usize]| {
                let width = heads.qkv_width();
                let rows: Vec<f32> =
                    sequences.iter().flat_map(|&i| &queries[i * width..][..width]).copied().collect();
                let spans: Vec<_> = sequences
                    .iter()
                    .enumerate()
                    .map(|(row, &i)| paged.span(i, row, 1, lengths[i] - 1))
                    .collect();
                let mut out = up(&cpu, &vec![f32::NAN; sequences.len() * heads.heads * head_dim]);
                cpu.attention(heads, &up(&cpu, &rows), &kv, &spans, &paged.pages, &mut out, None);
                down(&cpu, &out)
            };
            let alone: Vec<Vec<f64>> = (0..lengths.len()).map(|i| decode(&[i])).collect();
            for batch in [vec![0, 1, 2, 3, 4, 5, 6], vec![6, 2, 0], vec![4, 5], vec![3, 1, 6, 4]] {
                let want: Vec<f64> = batch.iter().flat_map(|&i| &alone[i]).copied().collect();
                assert_bits(&format!("decode of {batch:?} on {}", cpu.describe()), &decode(&batch), &want);
            }
        }
    }
}

/// Calls `add(first row, rows, gradients)` once for all tokens and in pieces: the gradients must be the same bits.
fn same_in_pieces<T>(
    cpu: &Cpu,
    what: &str,
    tokens: usize,
    splits: &[&[usize]],
    start: impl Fn() -> Vec<T>,
    add: impl Fn(usize, usize, &mut [T]),
) where
    T: std::ops::Deref<Target = [f32]>,
{
    let mut whole = start();
    add(0, tokens, &mut whole);
    for &split in splits {
        let mut gradients = start();
        let edges = [&[0], split, &[tokens]].concat();
        for piece in edges.windows(2) {
            add(piece[0], piece[1] - piece[0], &mut gradients);
        }
        for (i, (got, want)) in gradients.iter().zip(&whole).enumerate() {
            let what = format!("{what} gradient {i} split at {split:?} on {}", cpu.describe());
            assert_bits(&what, &wide(got), &wide(want));
        }
    }
}

/// More than one block of tokens.
const TOKENS: usize = 700;
const ANYWHERE: [&[usize]; 5] = [&[1], &[699], &[13, 50, 51], &[511, 513], &[100, 200, 333, 512, 600]];
const EVEN: [&[usize]; 4] = [&[2], &[14, 50, 698], &[510, 514], &[100, 200, 334, 512, 600]];

/// A bf16 product takes tokens in pairs.
fn splits(format: Format) -> &'static [&'static [usize]] {
    match format {
        Format::F32 => &ANYWHERE,
        _ => &EVEN,
    }
}

#[test]
fn linear_weight_gradients_in_pieces() {
    let mut random = Random::new(5);
    let (n, k) = (37, 70);
    let (x, dy) = (random.normals(TOKENS * k), random.normals(TOKENS * n));
    let (w, bias) = (random.normals(n * k), random.normals(n));
    for cpu in cpus(2) {
        for format in FORMATS {
            let packed = cpu.pack(&up(&cpu, &w), n, k, format, true).expect("weights pack");
            let start = || vec![up(&cpu, &w), up(&cpu, &bias)];
            let what = format!("linear {format}");
            same_in_pieces(&cpu, &what, TOKENS, splits(format), start, |first, rows, gradients| {
                let (x, dy) = (up(&cpu, &x[first * k..][..rows * k]), up(&cpu, &dy[first * n..][..rows * n]));
                if let [dw, dbias] = gradients {
                    cpu.linear_weight_gradient(&x, &dy, rows, &packed, dw, Some(dbias));
                }
            });
        }
    }
}

#[test]
fn repacked_weights_equal_fresh_ones() {
    let mut random = Random::new(8);
    let (rows, n, k) = (5, 37, 71);
    let (old, new, x) = (random.normals(n * k), random.normals(n * k), random.normals(rows * k));
    for cpu in cpus(2) {
        for format in FORMATS {
            let (new, x) = (up(&cpu, &new), up(&cpu, &x));
            let mut repacked = cpu.pack(&up(&cpu, &old), n, k, format, true).expect("weights pack");
            cpu.repack(&new, &mut repacked).expect("weights pack");
            let fresh = cpu.pack(&new, n, k, format, true).expect("weights pack");
            let [got, want] = [repacked, fresh].map(|w| {
                let (mut out, mut back) = (up(&cpu, &vec![0.0; rows * n]), up(&cpu, &vec![0.0; rows * k]));
                cpu.linear(&x, rows, &w, None, Output::Store, &mut out);
                cpu.linear_input_gradient(&out, rows, &w, &mut back);
                [down(&cpu, &out), down(&cpu, &back)].concat()
            });
            assert_bits(&format!("repacked {format} on {}", cpu.describe()), &got, &want);
        }
    }
}

#[test]
fn repacking_with_a_copy_is_repacking_and_copying() {
    let mut random = Random::new(9);
    let rows = 5;
    for (n, k) in [(37, 71), (64, 256)] {
        let (old, new, x) = (random.normals(n * k), random.normals(n * k), random.normals(rows * k));
        for cpu in cpus(2) {
            for format in Format::ALL {
                let (new, x) = (up(&cpu, &new), up(&cpu, &x));
                let mut both = cpu.pack(&up(&cpu, &old), n, k, format, false).expect("weights pack");
                let mut copy = up(&cpu, &old);
                cpu.repack_and_copy(&new, &mut both, Rounding::Nearest, &mut copy).expect("weights pack");
                assert_bits(&format!("copy beside {format}"), &down(&cpu, &copy), &down(&cpu, &new));
                let fresh = cpu.pack(&new, n, k, format, false).expect("weights pack");
                let [got, want] = [both, fresh].map(|w| {
                    let mut out = up(&cpu, &vec![0.0; rows * n]);
                    cpu.linear(&x, rows, &w, None, Output::Store, &mut out);
                    down(&cpu, &out)
                });
                assert_bits(&format!("repacked {format} on {}", cpu.describe()), &got, &want);
            }
        }
    }
}

#[test]
fn head_weight_gradients_in_pieces() {
    let mut random = Random::new(6);
    let (vocabulary, d) = (600, 24);
    let (hidden, w) = (random.normals(TOKENS * d), random.normals(vocabulary * d));
    let (targets, gradient) = (random.ids(TOKENS, vocabulary), random.normals(TOKENS));
    for cpu in cpus(2) {
        for format in FORMATS {
            let packed = cpu.pack(&up(&cpu, &w), vocabulary, d, format, true).expect("weights pack");
            let start = || vec![up(&cpu, &w)];
            let what = format!("head {format}");
            same_in_pieces(&cpu, &what, TOKENS, splits(format), start, |first, rows, gradients| {
                let hidden = up(&cpu, &hidden[first * d..][..rows * d]);
                let targets = &targets[first..first + rows];
                let out = cpu.head(&hidden, &packed, targets, 1.1).expect("memory for the head");
                let gradient = HeadGradient { dlogp: &gradient[first..first + rows], dentropy: &[] };
                let mut dhidden = up(&cpu, &vec![0.0; rows * d]);
                cpu.head_backward(
                    &hidden,
                    &packed,
                    targets,
                    1.1,
                    &out,
                    gradient,
                    &mut dhidden,
                    &mut gradients[0],
                );
            });
        }
    }
}

#[test]
fn other_gradients_in_pieces() {
    let mut random = Random::new(7);
    let (d, vocabulary) = (37, 50);
    let (x, dy) = (random.normals(TOKENS * d), random.normals(TOKENS * d));
    let (gain, table) = (random.normals(d), random.normals(vocabulary * d));
    let (ids, g) = (random.ids(TOKENS, vocabulary), random.normals(TOKENS));
    for cpu in cpus(2) {
        let start = || vec![up(&cpu, &gain), up(&cpu, &gain), up(&cpu, &table)];
        same_in_pieces(&cpu, "norm, dots, embedding", TOKENS, &ANYWHERE, start, |first, rows, gradients| {
            let (x, mut dy) = (up(&cpu, &x[first * d..][..rows * d]), up(&cpu, &dy[first * d..][..rows * d]));
            let (w, mut dx) = (up(&cpu, &gain), up(&cpu, &vec![0.0; rows * d]));
            if let [dgain, dw, dtable] = gradients {
                cpu.scatter_add(&dy, &ids[first..first + rows], d, dtable);
                cpu.row_dots_backward(&x, rows, &w, &g[first..first + rows], &mut dx, dw);
                cpu.rmsnorm_backward(&x, &w, rows, d, EPS, &mut dy, &mut dx, dgain);
            }
        });
    }
}
