//! The packed kernels against the plain reference: every format, every instruction set of this machine.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::cpu::quant::{QuantB, codec};
use qurl_kernels::cpu::{Context, CpuWeight};
use qurl_kernels::ops::{Head, Linear, Output, Pack};
use qurl_kernels::types::{HeadOutput, WeightShape};
use qurl_kernels::{Cpu, Device, DeviceError, Format, Queue, Rounding};
use qurl_quant::reference;
use std::sync::Arc;

const QUANTIZED: [Format; 5] = [Format::Int8, Format::Fp8, Format::Fp8Block, Format::Int4, Format::Nvfp4];
/// (rows of activations, outputs, inputs): odd sizes, one block, many panels, several passes along the
/// inputs.
const SHAPES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (3, 5, 7), (2, 33, 128), (13, 130, 129), (30, 65, 260), (5, 40, 2500), (70, 20, 31)];

/// Numbers from -1 to 1 with a few large ones.
fn random(len: usize, seed: u64) -> Vec<f32> {
    (0..len as u64)
        .map(|i| {
            let x = codec::random_bits(seed, i) as f32 / 2_147_483_648.0 - 1.0;
            if i % 97 == 5 { x * 20.0 } else { x }
        })
        .collect()
}

#[test]
fn packed_codes_and_scales() {
    for level in Level::available() {
        let cpu = Ops::new(level, 2);
        let ctx = cpu.context();
        for (case, (_, n, k)) in SHAPES.into_iter().enumerate() {
            let mut weights = random(n * k, case as u64);
            weights[..k].fill(0.0);
            for format in QUANTIZED {
                let expected = reference::quantize(format, "w", &weights, n, k).expect("finite");
                let mut packed = QuantB::new(ctx, format, n, k).expect("fits");
                packed.fill(ctx, &weights, Rounding::Nearest).expect("finite");
                for row in 0..n {
                    for column in 0..k {
                        let at = (packed.code(ctx, row, column), packed.scale(ctx, row, column));
                        let wanted = (expected.codes[row * k + column], expected.scale_at(row, column));
                        assert_eq!(at, wanted, "{format} {level} {n} x {k}: row {row}, column {column}");
                    }
                }
            }
        }
    }
}

#[test]
fn gemms() {
    for level in Level::available() {
        let cpu = Ops::new(level, 2);
        for (case, (rows, n, k)) in SHAPES.into_iter().enumerate() {
            let (weights, x, bias) =
                (random(n * k, 100), random(rows * k, 200 + case as u64), random(n, 300));
            for format in QUANTIZED {
                let quantized = reference::quantize(format, "w", &weights, n, k).expect("finite");
                let expected = reference::linear(&quantized, &x);
                let old: Vec<f32> = (0..rows * n).map(|i| i as f32).collect();
                let w = cpu.pack(&tensor(&cpu, &weights), n, k, format, false).expect("packs");
                let bias_tensor = tensor(&cpu, &bias);
                let mut out = tensor(&cpu, &old);
                cpu.linear(&tensor(&cpu, &x), rows, &w, None, Output::Store, &mut out);
                let size = x.iter().fold(0.0f32, |m, v| m.max(v.abs())) * (k as f32).sqrt() * 20.0;
                for (i, (&got, &wanted)) in out.iter().zip(&expected).enumerate() {
                    let close = if format == Format::Int8 {
                        got == wanted
                    } else {
                        (got - wanted).abs() <= 1e-6 * size
                    };
                    assert!(close, "{format} {level} {rows} x {n} x {k} at {i}: {got} against {wanted}");
                }
                let gemm = out.clone();
                out.copy_from_slice(&old);
                cpu.linear(&tensor(&cpu, &x), rows, &w, Some(&bias_tensor), Output::Add, &mut out);
                for (i, &got) in out.iter().enumerate() {
                    assert_eq!(got, old[i] + (gemm[i] + bias[i % n]), "{format} {level}: bias and sum");
                }
            }
        }
    }
}

/// Zero and subnormals take a path of their own, so every code is seen in every place of a word and of a
/// vector.
#[test]
fn every_e4m3_code_is_exact_in_a_product() {
    let (n, k) = (70, 256);
    let code = |row: usize, column: usize| match (row * 37 + column * 5 + column / 16) % 256 {
        0x7f | 0xff => 0,
        code => code as u8,
    };
    // The largest number in every block makes all scales one.
    let value =
        |row, column: usize| if column % 128 == 7 { 448.0 } else { codec::e4m3_value(code(row, column)) };
    let weights: Vec<f32> = (0..n * k).map(|i| value(i / k, i % k)).collect();
    let one_hot: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 448.0 } else { 0.0 }).collect();
    for level in Level::available() {
        let cpu = Ops::new(level, 2);
        for format in [Format::Fp8, Format::Fp8Block] {
            let w = cpu.pack(&tensor(&cpu, &weights), n, k, format, false).expect("packs");
            for rows in [1, k] {
                let mut out = cpu.zeros(rows * n).expect("memory");
                cpu.linear(&tensor(&cpu, &one_hot), rows, &w, None, Output::Store, &mut out);
                for (i, &got) in out.iter().enumerate() {
                    let wanted = 448.0 * value(i % n, i / n);
                    assert_eq!(got, wanted, "{format} {level}: weight ({}, {})", i % n, i / n);
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_with_any_threads() {
    let (rows, n, k) = (37, 70, 300);
    for level in Level::available() {
        let one = Ops::new(level, 1);
        let many = Ops::new(level, 5);
        let (weights, x) = (random(n * k, 1), random(rows * k, 2));
        for format in QUANTIZED {
            let pack = |cpu: &Ops| cpu.pack(&tensor(cpu, &weights), n, k, format, false).expect("packs");
            let (w_one, w_many) = (pack(&one), pack(&many));
            let run = |cpu: &Ops, w: &CpuWeight, x: &[f32]| {
                let mut out = cpu.zeros(x.len() / k * n).expect("memory");
                cpu.linear(&tensor(cpu, x), x.len() / k, w, None, Output::Store, &mut out);
                out.to_vec()
            };
            let together = run(&many, &w_many, &x);
            assert_eq!(run(&one, &w_one, &x), together, "{format} {level}: threads");
            for row in 0..rows {
                let alone = run(&one, &w_one, &x[row * k..(row + 1) * k]);
                assert_eq!(alone, together[row * n..(row + 1) * n], "{format} {level}: row {row}");
            }
        }
    }
}

#[test]
fn a_quantized_head() {
    let (rows, vocabulary, d) = (29, 1100, 64);
    for level in Level::available() {
        let cpu = Ops::new(level, 2);
        let (weights, hidden) = (random(vocabulary * d, 5), random(rows * d, 6));
        let targets: Vec<u32> = (0..rows as u32).map(|i| i * 37 % vocabulary as u32).collect();
        for format in QUANTIZED {
            let w = cpu.pack(&tensor(&cpu, &weights), vocabulary, d, format, false).expect("packs");
            let got = cpu.head(&tensor(&cpu, &hidden), &w, &targets, 0.7).expect("no memory needed");
            let quantized = reference::quantize(format, "head", &weights, vocabulary, d).expect("finite");
            let logits = reference::linear(&quantized, &hidden);
            for (row, logits) in logits.chunks(vocabulary).enumerate() {
                let scaled = logits.iter().map(|&x| f64::from(x) / 0.7);
                let largest = scaled.clone().fold(f64::MIN, f64::max);
                let lse = largest + scaled.map(|x| (x - largest).exp()).sum::<f64>().ln();
                let wanted = f64::from(logits[targets[row] as usize]) / 0.7 - lse;
                assert!(
                    (f64::from(got.logp[row]) - wanted).abs() < 2e-3,
                    "{format} {level}: {} {wanted}",
                    got.logp[row]
                );
            }
            let alone =
                cpu.head(&tensor(&cpu, &hidden[3 * d..4 * d]), &w, &targets[3..4], 0.7).expect("one row");
            assert_eq!(alone.logp[0], got.logp[3], "{format} {level}: batch invariance");
        }
    }
}

#[test]
fn stochastic_rounding_is_reproducible_and_stays_between_neighbours() {
    let (n, k) = (20, 150);
    let weights = random(n * k, 9);
    for level in Level::available() {
        for format in QUANTIZED {
            let fill = |threads: usize, seed: u64| {
                let cpu = Ops::new(level, threads);
                let mut packed = QuantB::new(cpu.context(), format, n, k).expect("fits");
                packed.fill(cpu.context(), &weights, Rounding::Stochastic { seed }).expect("finite");
                let at = |i: usize| packed.code(cpu.context(), i / k, i % k);
                (0..n * k).map(at).collect::<Vec<u8>>()
            };
            let codes = fill(1, 3);
            assert_eq!(codes, fill(4, 3), "{format} {level}: threads");
            assert_ne!(codes, fill(1, 4), "{format} {level}: seeds");
            let nearest = reference::quantize(format, "w", &weights, n, k).expect("finite");
            let stochastic = reference::Quantized { codes, ..nearest.clone() };
            let (down, up) = (nearest.dequantize(), stochastic.dequantize());
            let moved = down.iter().zip(&up).filter(|(a, b)| a != b).count();
            assert!(moved > n * k / 20 && moved < n * k / 2, "{format} {level}: {moved} of {}", n * k);
            for ((&w, &near), &rounded) in weights.iter().zip(&down).zip(&up) {
                // The rounded number is the nearest or the one on the other side of the weight.
                assert!(
                    near == rounded || (near - w) * (rounded - w) <= 0.0,
                    "{format}: {w} {near} {rounded}"
                );
            }
        }
    }
}

#[test]
fn bad_weights_are_refused_by_row() {
    let cpu = Ops::new(Level::best(), 2);
    for format in QUANTIZED {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut weights = random(40 * 200, 1);
            weights[23 * 200 + 171] = bad;
            let error = cpu.pack(&tensor(&cpu, &weights), 40, 200, format, false).err().expect("refused");
            let DeviceError::Pack { format: named, reason } = &error else { panic!("{error}") };
            assert_eq!(*named, format);
            assert!(reason.contains("row 23") && reason.contains("column 171"), "{reason}");
        }
        let weights = tensor(&cpu, &random(40 * 200, 1));
        assert!(
            matches!(cpu.pack(&weights, 40, 200, format, true), Err(DeviceError::Pack { .. })),
            "trained {format}"
        );
        assert!(
            matches!(cpu.pack(&weights, 0, 200, format, false), Err(DeviceError::Pack { .. })),
            "empty {format}"
        );
    }
    let long = cpu.zeros(70_000).expect("memory");
    assert!(matches!(cpu.pack(&long, 1, 70_000, Format::Int8, false), Err(DeviceError::Pack { .. })));
}

#[test]
fn zeros_stay_zeros_and_bad_activations_show() {
    for level in Level::available() {
        let cpu = Ops::new(level, 1);
        for format in QUANTIZED {
            let mut weights = random(34 * 130, 1);
            weights[130..260].fill(0.0);
            weights[260..390].fill(1e-38);
            let w = cpu.pack(&tensor(&cpu, &weights), 34, 130, format, false).expect("packs");
            let mut x = random(3 * 130, 2);
            x[..130].fill(0.0);
            x[260 + 7] = f32::NAN;
            let mut out = cpu.zeros(3 * 34).expect("memory");
            cpu.linear(&tensor(&cpu, &x), 3, &w, None, Output::Store, &mut out);
            assert!(out[..34].iter().all(|&y| y == 0.0), "{format} {level}: a row of zeros");
            assert!(out[34 + 1] == 0.0 && out[34 + 2] == 0.0, "{format} {level}: channels of zeros");
            assert!(out[34] != 0.0 && out[35..68].iter().all(|y| y.is_finite()), "{format} {level}");
            assert!(out[68..].iter().all(|y| y.is_nan()), "{format} {level}: a row with a NaN");
        }
    }
}

type Tensor = <Cpu as Device>::Tensor;

/// The operations that are looked at.
struct Ops(Arc<Cpu>);

impl Ops {
    fn new(level: Level, threads: usize) -> Ops {
        Ops(Arc::new(Cpu::new(level, threads)))
    }

    fn context(&self) -> &Context {
        self.0.context()
    }

    fn queue(&self) -> <Cpu as Device>::Queue {
        self.0.queue().expect("a queue")
    }

    fn zeros(&self, len: usize) -> Result<Tensor, DeviceError> {
        self.0.zeros(len)
    }

    fn pack(
        &self,
        from: &Tensor,
        n: usize,
        k: usize,
        format: Format,
        trained: bool,
    ) -> Result<CpuWeight, DeviceError> {
        let mut to = self.0.weight(WeightShape { n, k, format, trained })?;
        self.queue().pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: &mut to })?;
        Ok(to)
    }

    fn linear(
        &self,
        x: &Tensor,
        rows: usize,
        w: &CpuWeight,
        bias: Option<&Tensor>,
        output: Output,
        out: &mut Tensor,
    ) {
        self.queue().linear(Linear { adapter: None, x, rows, norm: None, w, bias, output, out });
    }

    fn head(
        &self,
        hidden: &Tensor,
        head: &CpuWeight,
        targets: &[u32],
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.queue().head(Head { hidden, head, targets, temperature })
    }
}

fn tensor(cpu: &Ops, values: &[f32]) -> Tensor {
    cpu.queue().upload(values).expect("memory")
}
