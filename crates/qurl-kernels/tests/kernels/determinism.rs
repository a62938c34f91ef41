//! The same bits on any number of threads, for a row alone and in any batch, and for gradients summed over
//! any split of the tokens.

use crate::op_table::table;
use crate::ops::{Ops, cpus};
use crate::paged::{Paged, heads};
use crate::support::{Random, assert_bits, wide};
use qurl_kernels::cpu::buf::Aligned;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cpu::{CpuWeight, attention, elementwise};
use qurl_kernels::ops::{
    Head, HeadBackward, Index, LinearBackward, NormBackward, Output, RmsNormBackward, RowDots,
    RowDotsBackward, ScatterAdd,
};
use qurl_kernels::types::{HeadGradient, HeadOutput, KvFormat};
use qurl_kernels::{Cpu, Format, Queue, Rounding};

const FORMATS: [Format; 2] = [Format::F32, Format::Bf16];
const EPS: f32 = 1e-5;

#[test]
fn threads_do_not_matter() {
    for level in Level::available() {
        // Two threads are those of all other tests.
        let [one, three] = [1, 3].map(|threads| Ops::new(Cpu::new(level, threads)));
        for case in table() {
            let (want, got) = ((case.run)(&one), (case.run)(&three));
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert_bits(&format!("{} output {i} on {}", case.name, three.name()), got, want);
            }
        }
    }
}

/// Rows of the whole batch: more than a block of strips at every level.
const ROWS: usize = 205;
/// (first row, rows) of smaller batches.
const BATCHES: [(usize, usize); 10] =
    [(0, 1), (204, 1), (17, 1), (7, 2), (100, 5), (30, 12), (31, 13), (3, 48), (10, 193), (5, 200)];

/// Calls `run(first row, rows)` for the whole batch and for smaller ones: each row's outputs must be the same
/// bits.
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
    // Threads share the rows of a small right operand, and the columns of a large one. Of f32, few rows are
    // packed, and many are multiplied where they lie.
    check_linear_rows(70, 1100);
    check_linear_rows(100, 1100);
}

fn check_linear_rows(n: usize, k: usize) {
    let mut random = Random::new(1);
    let (x, w, bias) = (random.normals(ROWS * k), random.normals(n * k), random.normals(n));
    let (dy, old) = (random.normals(ROWS * n), random.normals(ROWS * n));
    for cpu in cpus(2) {
        for format in FORMATS {
            let packed = cpu.trained(&w, n, k, format);
            let bias = cpu.up(&bias);
            same_in_any_batch(&format!("linear {format} on {}", cpu.name()), |first, rows| {
                let x = cpu.up(&x[first * k..][..rows * k]);
                let [mut stored, mut added] = [(); 2].map(|_| cpu.up(&old[first * n..][..rows * n]));
                cpu.linear(&x, rows, &packed, Some(&bias), Output::Store, &mut stored);
                cpu.linear(&x, rows, &packed, Some(&bias), Output::Add, &mut added);
                let dx = input_gradient(&cpu, &dy[first * n..][..rows * n], rows, &packed, k);
                [stored, added, dx].iter().map(|t| cpu.down(t)).collect()
            });
        }
    }
}

/// `dy W` alone.
fn input_gradient(cpu: &Ops<Cpu>, dy: &[f32], rows: usize, w: &CpuWeight, k: usize) -> Aligned<f32> {
    let (unread, dy, mut dx) = (cpu.stale(rows * k), cpu.up(dy), cpu.stale(rows * k));
    let (x, dy, dw, dbias) = (&unread, &dy, None, None);
    cpu.queue().linear_backward(LinearBackward {
        adapter: None,
        x,
        rows,
        norm: None,
        w,
        dy,
        dw,
        dbias,
        dx: Some(&mut dx),
    });
    dx
}

#[test]
fn other_rows_alone_and_in_batches() {
    let mut random = Random::new(2);
    let (width, head_dim) = (68, 16);
    let x = random.normals(ROWS * width);
    let (gain, positions) = (random.normals(width), random.ids(ROWS, 30));
    let (cos, sin) = (random.normals(30 * head_dim / 2), random.normals(30 * head_dim / 2));
    for cpu in cpus(2) {
        let gain = cpu.up(&gain);
        same_in_any_batch(&format!("row operations on {}", cpu.name()), |first, rows| {
            let x = cpu.up(&x[first * width..][..rows * width]);
            let (mut normed, ctx) = (cpu.stale(rows * width), cpu.context());
            cpu.rmsnorm(&x, rows, &gain, EPS, &mut normed);
            let mut activated = vec![f32::NAN; rows * width / 2];
            elementwise::swiglu(ctx, &x, rows, width / 2, &mut activated);
            let (mut rotated, positions) = (x.clone(), &positions[first..first + rows]);
            elementwise::rope(ctx, &mut rotated, width, 4, head_dim, positions, &cos, &sin, false);
            let (mut dy, mut dx, mut dgain) = (normed.clone(), x.clone(), gain.clone());
            let norm = NormBackward { gain: &gain, eps: EPS, dgain: Some(&mut dgain) };
            cpu.queue().rmsnorm_backward(RmsNormBackward { x: &x, rows, norm, dy: &mut dy, dx: &mut dx });
            let dots = cpu.queue().row_dots(RowDots { hidden: &x, rows, w: &gain }).expect("dot products");
            vec![wide(&normed), wide(&activated), wide(&rotated), wide(&dx), wide(&dots)]
        });
    }
}

/// What the head says, and the gradient of the hidden rows; that of the weights is added.
fn head(
    cpu: &Ops<Cpu>,
    hidden: &Aligned<f32>,
    head: &CpuWeight,
    targets: &[u32],
    temperature: f32,
    gradient: HeadGradient,
    dw: &mut Aligned<f32>,
) -> (HeadOutput, Aligned<f32>) {
    let out = cpu.queue().head(Head { hidden, head, targets, temperature }).expect("memory for the head");
    let mut dhidden = cpu.stale(hidden.len());
    cpu.queue().head_backward(HeadBackward {
        hidden,
        head,
        trained: head,
        targets,
        temperature,
        out: &out,
        gradient,
        dhidden: &mut dhidden,
        dweight: Some(dw),
    });
    (out, dhidden)
}

#[test]
fn head_rows_alone_and_in_batches() {
    let mut random = Random::new(3);
    let (vocabulary, d) = (1100, 40);
    let (hidden, w) = (random.normals(ROWS * d), random.normals(vocabulary * d));
    let (targets, gradient) = (random.ids(ROWS, vocabulary), random.normals(ROWS));
    for cpu in cpus(2) {
        for format in FORMATS {
            let packed = cpu.trained(&w, vocabulary, d, format);
            same_in_any_batch(&format!("head {format} on {}", cpu.name()), |first, rows| {
                let hidden = cpu.up(&hidden[first * d..][..rows * d]);
                let targets = &targets[first..first + rows];
                let g = &gradient[first..first + rows];
                let gradient = HeadGradient { dlogp: g, dentropy: g };
                let (out, dhidden) = head(&cpu, &hidden, &packed, targets, 0.9, gradient, &mut cpu.up(&w));
                let argmax = out.argmax.iter().map(|&id| id as f64).collect();
                vec![wide(&out.logp), wide(&out.entropy), argmax, wide(&out.lse), wide(&dhidden)]
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
                let qkv = random.normals(len * heads.qkv_width());
                kv.write(cpu.context(), &qkv, heads.qkv_width(), heads.q_width(), &paged.slots(i, 0..len));
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
                let (mut out, pages) = (vec![f32::NAN; sequences.len() * heads.q_width()], &paged.pages);
                attention::forward(cpu.context(), heads, &rows, &kv, &spans, pages, &mut out, None);
                wide(&out)
            };
            let alone: Vec<Vec<f64>> = (0..lengths.len()).map(|i| decode(&[i])).collect();
            for batch in [vec![0, 1, 2, 3, 4, 5, 6], vec![6, 2, 0], vec![4, 5], vec![3, 1, 6, 4]] {
                let want: Vec<f64> = batch.iter().flat_map(|&i| &alone[i]).copied().collect();
                assert_bits(&format!("decode of {batch:?} on {}", cpu.name()), &decode(&batch), &want);
            }
        }
    }
}

/// Calls `add(first row, rows, gradients)` once for all tokens and in pieces: the gradients must be the same
/// bits.
fn same_in_pieces(
    cpu: &Ops<Cpu>,
    what: &str,
    tokens: usize,
    splits: &[&[usize]],
    start: impl Fn() -> Vec<Aligned<f32>>,
    add: impl Fn(usize, usize, &mut [Aligned<f32>]),
) {
    let mut whole = start();
    add(0, tokens, &mut whole);
    for &split in splits {
        let mut gradients = start();
        let edges = [&[0], split, &[tokens]].concat();
        for piece in edges.windows(2) {
            add(piece[0], piece[1] - piece[0], &mut gradients);
        }
        for (i, (got, want)) in gradients.iter().zip(&whole).enumerate() {
            let what = format!("{what} gradient {i} split at {split:?} on {}", cpu.name());
            assert_bits(&what, &wide(got), &wide(want));
        }
    }
}

/// More than one block of tokens.
const TOKENS: usize = 700;
const ANYWHERE: [&[usize]; 5] = [&[1], &[699], &[13, 50, 51], &[511, 513], &[100, 200, 333, 512, 600]];
const EVEN: [&[usize]; 4] = [&[2], &[14, 50, 698], &[510, 514], &[100, 200, 334, 512, 600]];

/// A bf16 GEMM takes tokens in pairs.
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
            let packed = cpu.trained(&w, n, k, format);
            let start = || vec![cpu.up(&w), cpu.up(&bias)];
            let what = format!("linear {format}");
            same_in_pieces(&cpu, &what, TOKENS, splits(format), start, |first, rows, gradients| {
                let (x, dy) = (cpu.up(&x[first * k..][..rows * k]), cpu.up(&dy[first * n..][..rows * n]));
                if let [dw, dbias] = gradients {
                    let (x, dy, w, norm, dx) = (&x, &dy, &packed, None, None);
                    let (dw, dbias) = (Some(dw), Some(dbias));
                    cpu.queue().linear_backward(LinearBackward {
                        adapter: None,
                        x,
                        rows,
                        norm,
                        w,
                        dy,
                        dw,
                        dbias,
                        dx,
                    });
                }
            });
        }
    }
}

/// Whether f32 operands are packed or multiplied where they lie depends on the shape: rows or columns more on
/// either side of a limit leave the others' bits as they are.
#[test]
fn weight_gradients_of_more_rows_and_columns() {
    let tokens = 131;
    let (widest, longest) = (1060, 1040);
    let mut random = Random::new(15);
    let (x, dy) = (random.normals(tokens * longest), random.normals(tokens * widest));
    let part = |rows: &[f32], width: usize, columns: usize| -> Vec<f32> {
        rows.chunks(width).flat_map(|row| &row[..columns]).copied().collect()
    };
    for cpu in cpus(2) {
        for format in FORMATS {
            let gradient = |n: usize, k: usize| {
                let (x, dy) = (cpu.up(&part(&x, longest, k)), cpu.up(&part(&dy, widest, n)));
                let (w, start) = (cpu.trained(&vec![0.5; n * k], n, k, format), vec![0.25; n * k]);
                let mut dw = cpu.up(&start);
                cpu.queue().linear_backward(LinearBackward {
                    adapter: None,
                    x: &x,
                    rows: tokens,
                    norm: None,
                    w: &w,
                    dy: &dy,
                    dw: Some(&mut dw),
                    dbias: None,
                    dx: None,
                });
                wide(&dw)
            };
            for [(n, k), (more, longer)] in [
                [(40, 64), (40, 65)],
                [(1, 32), (13, 97)],
                [(5, 992), (5, 1024)],
                [(1024, 32), (1025, 32)],
                [(1040, 33), (1060, 64)],
            ] {
                let (want, got) = (gradient(n, k), gradient(more, longer));
                let got: Vec<f64> = got.chunks(longer).take(n).flat_map(|row| &row[..k]).copied().collect();
                assert_bits(&format!("{n} x {k} of {more} x {longer}, {format}"), &got, &want);
            }
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
            let x = cpu.up(&x);
            let mut repacked = cpu.trained(&old, n, k, format);
            cpu.pack(&cpu.up(&new), Rounding::Nearest, None, &mut repacked);
            let fresh = cpu.trained(&new, n, k, format);
            let [got, want] = [repacked, fresh].map(|w| {
                let mut out = cpu.stale(rows * n);
                cpu.linear(&x, rows, &w, None, Output::Store, &mut out);
                [wide(&out), wide(&input_gradient(&cpu, &out, rows, &w, k))].concat()
            });
            assert_bits(&format!("repacked {format} on {}", cpu.name()), &got, &want);
        }
    }
}

#[test]
fn packing_with_a_copy_is_packing_and_copying() {
    let mut random = Random::new(9);
    let rows = 5;
    for (n, k) in [(37, 71), (64, 256)] {
        let (old, new, x) = (random.normals(n * k), random.normals(n * k), random.normals(rows * k));
        for cpu in cpus(2) {
            for format in Format::ALL {
                let x = cpu.up(&x);
                let (mut both, mut copy) = (cpu.frozen(&old, n, k, format), cpu.up(&old));
                cpu.pack(&cpu.up(&new), Rounding::Nearest, Some(&mut copy), &mut both);
                assert_bits(&format!("copy beside {format}"), &wide(&copy), &wide(&new));
                let fresh = cpu.frozen(&new, n, k, format);
                let [got, want] = [both, fresh].map(|w| {
                    let mut out = cpu.up(&vec![0.0; rows * n]);
                    cpu.linear(&x, rows, &w, None, Output::Store, &mut out);
                    cpu.down(&out)
                });
                assert_bits(&format!("repacked {format} on {}", cpu.name()), &got, &want);
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
            let packed = cpu.trained(&w, vocabulary, d, format);
            let start = || vec![cpu.up(&w)];
            let what = format!("head {format}");
            same_in_pieces(&cpu, &what, TOKENS, splits(format), start, |first, rows, gradients| {
                let hidden = cpu.up(&hidden[first * d..][..rows * d]);
                let targets = &targets[first..first + rows];
                let gradient = HeadGradient { dlogp: &gradient[first..first + rows], dentropy: &[] };
                head(&cpu, &hidden, &packed, targets, 1.1, gradient, &mut gradients[0]);
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
        let start = || vec![cpu.up(&gain), cpu.up(&gain), cpu.up(&table)];
        same_in_pieces(&cpu, "norm, dots, embedding", TOKENS, &ANYWHERE, start, |first, rows, gradients| {
            let (x, mut dy) = (cpu.up(&x[first * d..][..rows * d]), cpu.up(&dy[first * d..][..rows * d]));
            let (w, mut dx) = (cpu.up(&gain), cpu.up(&vec![0.0; rows * d]));
            if let [dgain, dw, dtable] = gradients {
                let (index, gradient) = (Index::Rows(&ids[first..first + rows]), &g[first..first + rows]);
                let mut queue = cpu.queue();
                queue.scatter_add(ScatterAdd { rows: &dy, index, width: d, table: dtable });
                let (hidden, dhidden) = (&x, &mut dx);
                queue.row_dots_backward(RowDotsBackward { hidden, w: &w, gradient, dhidden, dw });
                let norm = NormBackward { gain: &w, eps: EPS, dgain: Some(dgain) };
                queue.rmsnorm_backward(RmsNormBackward { x: &x, rows, norm, dy: &mut dy, dx: &mut dx });
            }
        });
    }
}
