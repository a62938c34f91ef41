//! The edges of the number range: exponentials from end to end, and how far a NaN may travel.

use crate::naive;
use crate::naive_head::{self, HeadShape};
use crate::ops::{Ops, cpus};
use crate::paged::{Paged, heads};
use crate::support::{Random, ULP, assert_bits, wide};
use qurl_kernels::cpu::quant::codec::{e4m3_code, e4m3_value};
use qurl_kernels::cpu::{attention, elementwise, kv};
use qurl_kernels::ops::{Head, HeadBackward, Linear, Norm, Output, RowDots};
use qurl_kernels::types::{HeadGradient, KvFormat};
use qurl_kernels::{Cpu, Device, Format, Queue};

/// Numbers from -100 to 100 with the special ones among them.
fn range() -> Vec<f32> {
    let mut values: Vec<f32> = (-20_000..=20_000).map(|i| i as f32 * 0.005).collect();
    values.extend([0.0, -0.0, 1e-8, -1e-8, 1e-30, -1e-30, 87.3, -87.3, 88.7, -88.7, 100.0, -100.0]);
    values
}

#[test]
fn sigmoid_over_the_range() {
    let x = range();
    let gate_up: Vec<f32> = x.iter().copied().chain(x.iter().map(|_| 1.0)).collect();
    let want = naive::swiglu(&wide(&gate_up), 1, x.len());
    for cpu in cpus(1) {
        let mut out = vec![f32::NAN; x.len()];
        elementwise::swiglu(cpu.context(), &gate_up, 1, x.len(), &mut out);
        for ((x, got), want) in x.iter().zip(wide(&out)).zip(&want) {
            // Below e^-87 the exponential stands still: what is left is smaller than the smallest normal
            // number.
            let allowed = 8.0 * ULP * want.abs() + 1e-36;
            let what = format!("silu({x}) on {}", cpu.name());
            assert!((got - want).abs() <= allowed, "{what}: got {got:e}, want {want:e}");
        }
    }
}

#[test]
fn softmax_over_the_range() {
    // With the identity as weights, hidden rows are logits, and the gradient of the hidden row is that of the
    // logits: -p, but for the target.
    let d = 600;
    let identity: Vec<f32> = (0..d * d).map(|i| if i / d == i % d { 1.0 } else { 0.0 }).collect();
    let shape = HeadShape { rows: 1, vocabulary: d, d, temperature: 1.0 };
    for spread in [0.0, 1.0, 20.0, 100.0] {
        let hidden: Vec<f32> = (0..d).map(|i| spread * (i as f32 / 299.5 - 1.0)).collect();
        let targets = [5];
        let want = naive_head::head(shape, &wide(&hidden), &wide(&identity), &targets);
        let (want_dhidden, _) = naive_head::head_backward(
            shape,
            &wide(&hidden),
            &wide(&identity),
            &targets,
            &[1.0],
            &[0.0],
            |x| x,
        );
        for cpu in cpus(1) {
            let what = format!("spread {spread} on {}", cpu.name());
            let (head, hidden, targets, temperature) = (&cpu.identity(d), &cpu.up(&hidden), &targets, 1.0);
            let out =
                cpu.queue().head(Head { hidden, head, targets, temperature }).expect("memory for the head");
            assert!(
                (out.logp[0] as f64 - want.logp[0]).abs() <= 8.0 * ULP * (1.0 + want.logp[0].abs()),
                "{what}: logp"
            );
            assert!(
                (out.entropy[0] as f64 - want.entropy[0]).abs() <= 32.0 * ULP * (1.0 + spread as f64),
                "{what}: H"
            );
            assert_eq!(out.argmax[0] as f64, want.argmax[0], "{what}: argmax");
            let mut dhidden = cpu.stale(d);
            cpu.queue().head_backward(HeadBackward {
                hidden,
                head,
                trained: head,
                targets,
                temperature,
                out: &out,
                gradient: HeadGradient { dlogp: &[1.0], dentropy: &[] },
                dhidden: &mut dhidden,
                dweight: None,
            });
            for (i, (got, want)) in cpu.down(&dhidden).iter().zip(&want_dhidden).enumerate() {
                // The argument of the exponential is itself a rounded number of up to twice the spread.
                let allowed = (8.0 + 4.0 * spread as f64) * ULP * want.abs() + 1e-37;
                assert!((got - want).abs() <= allowed, "{what}: p[{i}] got {got:e}, want {want:e}");
            }
        }
    }
}

#[test]
fn attention_to_far_away_scores() {
    // Scores of 100, 0 and -100: all weight lies on the first key, wherever it stands, and nothing overflows.
    let heads = heads(1, 1, 8);
    let scores = [0.0f32, -100.0, 100.0, 0.0, -100.0];
    let paged = Paged::scattered(&mut Random::new(1), &[scores.len()], 16);
    let mut qkv = vec![0.0f32; scores.len() * heads.qkv_width()];
    for (i, row) in qkv.chunks_exact_mut(heads.qkv_width()).enumerate() {
        row[0] = 1.0 / heads.scale;
        row[8] = scores[i];
        row[16..].fill(i as f32 - 7.0);
    }
    for cpu in cpus(1) {
        let (mut kv, ctx) = (paged.stale_store(&cpu, heads, KvFormat::F32), cpu.context());
        kv.write(ctx, &qkv, heads.qkv_width(), heads.q_width(), &paged.slots(0, 0..scores.len()));
        let mut out = vec![f32::NAN; scores.len() * 8];
        let span = paged.span(0, 0, scores.len(), 0);
        attention::forward(ctx, heads, &qkv, &kv, &[span], &paged.pages, &mut out, None);
        let got: Vec<f64> = wide(&out).chunks_exact(8).map(|row| row[0]).collect();
        assert_bits(&cpu.name(), &got, &[-7.0, -7.0, -5.0, -5.0, -5.0]);
    }
}

#[test]
fn rounding_to_bf16() {
    // (given, bits of the nearest bf16): ties go to the even neighbour, what is too large becomes infinite,
    // subnormals are kept, and a NaN stays one even where all its marks lie in the bits cut off.
    let cases = [
        (1.0 + 1.0 / 256.0, 0x3f80),
        (1.0 + 3.0 / 256.0, 0x3f82),
        (-1.0 - 3.0 / 256.0, 0xbf82),
        (1.0 + 1.01 / 256.0, 0x3f81),
        (-0.0, 0x8000),
        (f32::MAX, 0x7f80),
        (3.3895e38, 0x7f7f),
        (f32::NEG_INFINITY, 0xff80),
        (f32::from_bits(0x0001_8000), 0x0002),
        (f32::from_bits(0x0001_7fff), 0x0001),
        (f32::from_bits(0x7f80_0001), 0x7fc0),
        (f32::from_bits(0x7fff_ffff), 0x7fc0),
    ];
    let heads = heads(1, 1, 16);
    let paged = Paged::scattered(&mut Random::new(1), &[1], 16);
    for cpu in cpus(1) {
        for (given, bits) in cases {
            let mut qkv = vec![0.0; 48];
            qkv[32..].fill(given);
            let (ctx, mut rounded) = (cpu.context(), qkv.clone());
            kv::round(ctx, &mut rounded, 1, heads, KvFormat::Bf16);
            // A sequence of one token attends to its own value alone.
            let mut pages = paged.stale_store(&cpu, heads, KvFormat::Bf16);
            pages.write(ctx, &qkv, 48, 16, &paged.slots(0, 0..1));
            let (mut stored, span) = ([7.0; 16], paged.span(0, 0, 1, 0));
            attention::forward(ctx, heads, &qkv, &pages, &[span], &paged.pages, &mut stored, None);
            let want = f32::from_bits(bits << 16);
            for (what, got) in [("rounded", &rounded[32..]), ("stored", &stored[..])] {
                let same = |x: &f32| if want.is_nan() { x.is_nan() } else { *x == want };
                let what = format!("{given:e} {what} on {}", cpu.name());
                assert!(got.iter().all(same), "{what}: got {got:?}, want {want:e}");
            }
        }
    }
}

/// `W x` in fp8 at every level, for `rows` rows of `x` and a square `w`, all exact.
fn fp8_gemms(x: &[f32], rows: usize, w: &[f32], width: usize, want: &[f64]) {
    for cpu in cpus(2) {
        let packed = cpu.frozen(w, width, width, Format::Fp8);
        let mut out = cpu.stale(rows * width);
        cpu.linear(&cpu.up(x), rows, &packed, None, Output::Store, &mut out);
        for (i, (got, want)) in cpu.down(&out).iter().zip(want).enumerate() {
            let place = format!("row {}, column {} of {rows} rows on {}", i / width, i % width, cpu.name());
            assert_eq!(got, want, "{place}");
        }
    }
}

#[test]
fn rounding_of_activations_to_e4m3() {
    // A row with 448 in it has a scale of one, and weights of 448 on the diagonal show its numbers one by
    // one.
    const WIDTH: usize = 250;
    let weights: Vec<f32> =
        (0..WIDTH * WIDTH).map(|i| if i / WIDTH == i % WIDTH { 448.0 } else { 0.0 }).collect();
    let mut random = Random::new(5);
    // Every bf16 up to 448, its neighbours in f32, and random numbers of every size.
    let mut values = Vec::new();
    for bits in 0..=448f32.to_bits() >> 16 {
        let bits = bits << 16;
        values.extend(
            [bits, bits + 1, bits.saturating_sub(1), bits | random.below(1 << 16) as u32].map(f32::from_bits),
        );
    }
    values.retain(|x| *x <= 448.0);
    let mut x = Vec::new();
    for (i, chunk) in values.chunks(WIDTH - 1).enumerate() {
        let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
        x.push(448.0);
        x.extend(chunk.iter().map(|x| sign * x));
        x.resize((i + 1) * WIDTH, 0.0);
    }
    let want: Vec<f64> = x.iter().map(|&x| f64::from(e4m3_value(e4m3_code(x))) * 448.0).collect();
    fp8_gemms(&x, x.len() / WIDTH, &weights, WIDTH, &want);
}

#[test]
fn every_code_of_an_e4m3_weight() {
    // Each row of activations shows one column of the weights, which hold every code, zeros and subnormals
    // among others and alone; 1100 inputs are three passes along k.
    const WIDTH: usize = 1100;
    let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
    let mut random = Random::new(9);
    let mut weights: Vec<f32> = (0..WIDTH * WIDTH)
        .map(|i| if (i % WIDTH).is_multiple_of(7) { codes[random.below(codes.len())] } else { 0x38 })
        .map(e4m3_value)
        .collect();
    for row in weights.chunks_exact_mut(WIDTH) {
        row[0] = 448.0;
    }
    for rows in [1, 5, 8, 12, 13, 32, 37] {
        let columns: Vec<usize> = (0..rows).map(|row| row * 7 % WIDTH).collect();
        let mut x = vec![0.0; rows * WIDTH];
        for (row, column) in columns.iter().enumerate() {
            x[row * WIDTH + column] = 448.0;
        }
        let want: Vec<f64> = columns
            .iter()
            .flat_map(|column| {
                (0..WIDTH).map(|n| f64::from(weights[n * WIDTH + column]) * 448.0).collect::<Vec<_>>()
            })
            .collect();
        fp8_gemms(&x, rows, &weights, WIDTH, &want);
    }
}

const ROWS: usize = 60;

/// Runs rows with and without a NaN at one place of row `bad`: that row's outputs must hold one, and all
/// other rows must keep their bits.
fn stays_in_its_row(what: &str, width: usize, run: impl Fn(&[f32]) -> Vec<Vec<f64>>) {
    let clean = Random::new(9).normals(ROWS * width);
    let want = run(&clean);
    for (bad, place) in [(0, 0), (13, width - 1), (59, width / 2), (30, 1)] {
        let mut x = clean.clone();
        x[bad * width + place] = f32::NAN;
        for (i, (got, want)) in run(&x).iter().zip(&want).enumerate() {
            let width = want.len() / ROWS;
            let what = format!("{what} output {i}, row {bad}");
            assert!(got[bad * width..(bad + 1) * width].iter().any(|x| x.is_nan()), "{what}: lost the NaN");
            assert_bits(&what, &got[..bad * width], &want[..bad * width]);
            assert_bits(&what, &got[(bad + 1) * width..], &want[(bad + 1) * width..]);
        }
    }
}

fn row_operations(cpu: &Ops<Cpu>, x: &[f32], width: usize) -> Vec<Vec<f64>> {
    let (mut random, ctx) = (Random::new(10), cpu.context());
    let gain = cpu.up(&random.normals(width));
    let (cos, sin) = (random.normals(width / 2), random.normals(width / 2));
    let x = cpu.up(x);
    let mut normed = cpu.up(&vec![0.0; ROWS * width]);
    cpu.rmsnorm(&x, ROWS, &gain, 1e-5, &mut normed);
    let mut activated = vec![0.0; ROWS * width / 2];
    elementwise::swiglu(ctx, &x, ROWS, width / 2, &mut activated);
    let mut rotated = x.clone();
    elementwise::rope(ctx, &mut rotated, width, 1, width, &[0; ROWS], &cos, &sin, false);
    let dots = cpu.queue().row_dots(RowDots { hidden: &x, rows: ROWS, w: &gain }).expect("dot products");
    [&normed[..], &activated, &rotated, &dots].map(wide).into()
}

#[test]
fn nan_stays_in_its_row() {
    let (n, k) = (37, 34);
    for cpu in cpus(2) {
        stays_in_its_row(&format!("row operations on {}", cpu.name()), k, |x| row_operations(&cpu, x, k));
        for format in [Format::F32, Format::Bf16] {
            let mut random = Random::new(11);
            let head = &cpu.frozen(&random.normals(n * k), n, k, format);
            let targets = random.ids(ROWS, n);
            stays_in_its_row(&format!("linear {format} on {}", cpu.name()), k, |x| {
                let (hidden, mut out) = (&cpu.up(x), cpu.up(&vec![0.0; ROWS * n]));
                cpu.linear(hidden, ROWS, head, None, Output::Store, &mut out);
                let (targets, temperature) = (&targets, 1.0);
                let head = cpu.queue().head(Head { hidden, head, targets, temperature });
                let head = head.expect("memory for the head");
                vec![wide(&out), wide(&head.logp), wide(&head.entropy), wide(&head.lse)]
            });
        }
    }
}

/// A row whose squares overflow is NaN after its norm, alone and inside of a GEMM: zeros would pass for
/// numbers. Rows whose squares do not overflow are numbers.
pub fn check_overflowing_norms<D: Device>(ops: &Ops<D>) {
    let (n, width, mut random) = (128, 256, Random::new(14));
    let (row, weights) = (random.normals(width), random.normals(n * width));
    let rows = [1.0, 1e30, 1e17, 1.0].map(|by| row.iter().map(|x| x * by).collect::<Vec<f32>>());
    let (x, gain) = (ops.up(&rows.concat()), ops.up(&vec![1.0; width]));
    let hold = |what: &str, out: Vec<f64>| {
        for (i, row) in out.chunks(out.len() / rows.len()).enumerate() {
            let lost = row.iter().filter(|x| x.is_nan() != (i == 1)).count();
            assert_eq!(lost, 0, "{what} on {}: row {i} is {row:?}", ops.name());
        }
    };
    let mut out = ops.up(&vec![0.0; rows.len() * width]);
    ops.rmsnorm(&x, rows.len(), &gain, 1e-6, &mut out);
    hold("rmsnorm", ops.down(&out));
    for format in [Format::F32, Format::Bf16, Format::Int8] {
        let (w, mut out) = (ops.frozen(&weights, n, width, format), ops.up(&vec![0.0; rows.len() * n]));
        let norm = Some(Norm { gain: &gain, eps: 1e-6 });
        let (x, w, rows) = (&x, &w, rows.len());
        let (adapter, bias, output) = (None, None, Output::Store);
        ops.queue().linear(Linear { adapter, x, rows, norm, w, bias, output, out: &mut out });
        hold(&format!("norm and linear {format}"), ops.down(&out));
    }
}

#[test]
fn overflowing_norms_are_nan() {
    cpus(2).iter().for_each(check_overflowing_norms);
}

#[test]
fn nan_in_attention() {
    let heads = heads(1, 2, 16);
    let (lengths, width, out_width) = ([70, 70], heads.qkv_width(), heads.q_width());
    let paged = Paged::scattered(&mut Random::new(12), &lengths, 32);
    let clean = Random::new(13).normals(140 * width);
    let (bad, key_column, value_column) = (20, 2 * 16, 3 * 16);
    for cpu in cpus(2) {
        let attend = |qkv: &[f32]| {
            let (mut kv, ctx) = (paged.stale_store(&cpu, heads, KvFormat::F32), cpu.context());
            let rows = paged.batch([(0, 0..70), (1, 0..70)]);
            kv.write(ctx, qkv, width, heads.q_width(), &rows.slots);
            let mut out = vec![0.0; 140 * out_width];
            attention::forward(ctx, heads, qkv, &kv, &rows.spans, &rows.pages, &mut out, None);
            wide(&out)
        };
        let want = attend(&clean);
        // A query's reaches its own row, a key's or value's its own and the later rows of its sequence.
        for (column, reached) in [(3, bad..bad + 1), (key_column + 5, bad..70), (value_column + 5, bad..70)] {
            let mut qkv = clean.clone();
            qkv[bad * width + column] = f32::NAN;
            let got = attend(&qkv);
            let what = format!("NaN in column {column} on {}", cpu.name());
            for row in reached.clone() {
                assert!(
                    got[row * out_width..][..out_width].iter().any(|x| x.is_nan()),
                    "{what}: row {row} lost it"
                );
            }
            let rows = |range: std::ops::Range<usize>| range.start * out_width..range.end * out_width;
            assert_bits(&what, &got[rows(0..bad)], &want[rows(0..bad)]);
            assert_bits(&what, &got[rows(reached.end..140)], &want[rows(reached.end..140)]);
        }
    }
}
