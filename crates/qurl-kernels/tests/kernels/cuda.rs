//! CUDA: that all kernels compile for the architectures it supports, without spills (needs NVRTC, no GPU),
//! and on a machine with a GPU the op table against the naive twins, the 8-bit formats against the CPU, and
//! recorded steps.
//!
//! Where something is missing the tests say so and pass.

use crate::op_table::{table, updated};
use crate::ops::Ops;
use crate::paged::sampling;
use crate::replay::{check_owners, check_replay};
use crate::sampling::{check_fetched_tokens, check_top_tokens, mixed_rows};
use crate::support::{Random, assert_bits, assert_close, distance, units_off, wide};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cuda::compile::{Architecture, SOURCES, Source, compile, missing_kernel, on_all_cores};
use qurl_kernels::cuda::ffi::{self, Nvrtc};
use qurl_kernels::ops::{LinearBackward, Output};
use qurl_kernels::types::{Batch, KvFormat, MomentFormat, MomentShape, Sampled, WeightShape};
use qurl_kernels::{Cpu, Cuda, Device, DeviceError, Format, Queue, Rounding};
use std::process::Command;

/// NVRTC, from the system or from the Python package that carries it.
fn nvrtc() -> Option<Nvrtc> {
    const PROBE: &str = "import glob, importlib.util as u\n\
        for place in u.find_spec('nvidia').submodule_search_locations:\n  \
        for path in glob.glob(place + '/**/libnvrtc.so*', recursive=True): print(path)";
    if let Ok(nvrtc) = ffi::nvrtc() {
        return Some(nvrtc);
    }
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_string());
    let output = Command::new(python).args(["-c", PROBE]).output().ok()?;
    let paths = String::from_utf8(output.stdout).ok()?;
    paths.lines().find_map(|path| ffi::nvrtc_at(path).ok())
}

#[test]
fn every_kernel_compiles_without_spills_and_serialized_gemms() {
    let Some(nvrtc) = nvrtc() else {
        eprintln!(
            "skipped: NVRTC was not found (QURL_NVRTC may name its library, or install nvidia-cuda-nvrtc)"
        );
        return;
    };
    let on_each = |source| [80, 89, 90].map(|architecture| (source, Architecture(architecture)));
    let jobs: Vec<(&Source, Architecture)> = SOURCES.iter().flat_map(on_each).collect();
    on_all_cores(&jobs, |&(source, architecture)| {
        let target = architecture.target(source);
        let compiled = compile(&nvrtc, source, architecture, true).unwrap_or_else(|log| panic!("{log}"));
        for line in compiled.log.lines().filter(|line| line.contains("spill")) {
            let clean = line.contains(" 0 bytes spill stores, 0 bytes spill loads");
            assert!(clean, "{}.cu for {target}: {line}\n{}", source.name, compiled.log);
        }
        // What a launch asks for comes on top, within what the smallest devices have.
        for line in compiled.log.lines().filter(|_| target != "sm_90a") {
            let Some((before, _)) = line.split_once(" bytes smem") else { continue };
            let declared = before.rsplit(' ').next().and_then(|bytes| bytes.parse::<usize>().ok());
            let fits = declared.is_some_and(|bytes| bytes <= crate::cuda_counted::DECLARED);
            assert!(fits, "{}.cu for {target}: {line}\n{}", source.name, compiled.log);
        }
        // The assembler says so where tensor-core instructions wait for each other.
        let slow = compiled.log.contains("Potential Performance Loss");
        assert!(!slow, "{}.cu for {target}: {}", source.name, compiled.log);
        assert_eq!(
            missing_kernel(source, architecture, &compiled.cubin),
            None,
            "{}.cu for {target}",
            source.name
        );
    });
}

/// The device, or a word about why there is none.
pub(crate) fn device() -> Option<Ops<Cuda>> {
    let cuda = Cuda::open(0).map_err(|reason| eprintln!("skipped: {reason}")).ok()?;
    cuda.compile_kernels(|_| ()).expect("kernels");
    Some(Ops::new(cuda))
}

#[test]
fn jobs_on_all_cores_keep_their_order() {
    for count in [0, 1, 2, 100] {
        let jobs: Vec<usize> = (0..count).collect();
        assert_eq!(
            on_all_cores(&jobs, |job| job * job),
            jobs.iter().map(|job| job * job).collect::<Vec<_>>()
        );
    }
}

/// More than any device has: an error that names the size, and the device works as before.
#[test]
fn memory_that_is_not_there() {
    let Some(cuda) = device() else { return };
    match cuda.device().zeros(1 << 44) {
        Err(DeviceError::OutOfMemory { need, .. }) => assert_eq!(need, 4 << 44),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("64 TiB were given"),
    }
    check_checksum(&cuda, 1000);
}

#[test]
fn overflowing_norms_are_nan() {
    device().iter().for_each(crate::numbers::check_overflowing_norms);
}

#[test]
fn checksums_are_those_of_the_host() {
    let Some(cuda) = device() else { return };
    for len in [1, 7, 8, 1000, 65_536, 65_537, 1_000_003] {
        check_checksum(&cuda, len);
    }
}

fn check_checksum(cuda: &Ops<Cuda>, len: usize) {
    let values = Random::new(len as u64).normals(len);
    let tensor = cuda.up(&values);
    assert_eq!(cuda.queue().checksum(&tensor), Ok(qurl_kernels::checksum::values(&values)), "{len} values");
}

/// The device as it is, and as one of the oldest architecture; `QURL_GENERATION` may name one of the two.
fn generations() -> Vec<(Ops<Cuda>, &'static str)> {
    let Some(newest) = device() else { return Vec::new() };
    let oldest = Ops::new(Cuda::open_as(0, 80).expect("the same device"));
    let wanted = std::env::var("QURL_GENERATION").unwrap_or_default();
    let both = [(newest, "as it is"), (oldest, "as of 8.0")];
    both.into_iter().filter(|(_, generation)| generation.contains(&wanted)).collect()
}

#[test]
fn op_table() {
    for (cuda, generation) in generations() {
        println!("the device {generation}:");
        hold_op_table(&cuda);
    }
}

/// Continues after failures: the whole table is worth more than its first gap. `QURL_CASES` may name a part
/// of it, by what the names of its cases begin with.
fn hold_op_table(cuda: &Ops<Cuda>) {
    let (mut failures, mut outputs) = (Vec::new(), 0);
    let wanted = std::env::var("QURL_CASES").unwrap_or_default();
    for case in table::<Cuda>().into_iter().filter(|case| case.name.starts_with(&wanted)) {
        let got = (case.run)(cuda);
        let wants = (case.want)();
        assert_eq!(got.len(), wants.len(), "{}: outputs", case.name);
        for (got, want) in got.iter().zip(&wants) {
            let (off, all) = (units_off(got, &want.values), distance(got, &want.values));
            println!("{:60} {:20} {off:10.2} of {:10.2} units, {all:.1e}", case.name, want.name, want.units);
            outputs += 1;
            failures.extend(want.complaint(got, true).map(|complaint| format!("{} {complaint}", case.name)));
        }
    }
    println!("{} of {outputs} outputs within their tolerance", outputs - failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn scalar() -> Ops<Cpu> {
    Ops::new(Cpu::new(Level::available()[0], 2))
}

/// Weights and rows become the same quantized values: int8 gives the CPU's bits, fp8 differs by the rounding
/// of its sums.
#[test]
fn eight_bit_gemms_equal_the_cpu() {
    for (cuda, generation) in generations() {
        hold_eight_bit_gemms(&cuda, generation);
    }
}

fn hold_eight_bit_gemms(cuda: &Ops<Cuda>, generation: &str) {
    let cpu = scalar();
    let roundings = [Rounding::Nearest, Rounding::Stochastic { seed: 9 }];
    for (rows, n, k) in
        [(1, 64, 64), (3, 48, 96), (17, 130, 257), (64, 896, 896), (200, 512, 1024), (300, 80, 4864)]
    {
        let mut random = Random::new((rows + n + k) as u64);
        let (x, w, bias) = (random.normals(rows * k), random.normals(n * k), random.normals(n));
        for format in [Format::Int8, Format::Fp8] {
            for rounding in roundings {
                let what = format!("{format} {rows}x{n}x{k} {rounding:?} {generation}");
                let shape = WeightShape { n, k, format, trained: false };
                let want = stored_and_added(&cpu, shape, rounding, rows, &x, &w, &bias);
                let got = stored_and_added(cuda, shape, rounding, rows, &x, &w, &bias);
                match format {
                    Format::Int8 => assert_bits(&what, &got, &want),
                    // Tensor cores keep fewer bits than f32 while they sum products of fp8.
                    _ => assert!(distance(&got, &want) < 1e-3, "{what}: {:.1e} off", distance(&got, &want)),
                }
            }
        }
    }
}

/// Multiplications that an emulated device takes a second or two for (`benches/gpu/emulate`), and others do
/// not.
const FEW: usize = 40_000_000;

/// Whether a GEMM is not too large for the device at hand.
pub(crate) fn fits(rows: usize, n: usize, k: usize) -> bool {
    let emulated = std::env::var("QURL_CUDA").is_ok_and(|path| path.contains("emulate"));
    !emulated || rows * n * k <= FEW
}

/// Weights in four bits have the CPU's codes and scales, whether quantized here or taken over as bytes, and
/// their GEMMs and the gradient of their input differ by the rounding of sums.
#[test]
fn four_bit_gemms_equal_the_cpu() {
    for (cuda, generation) in generations() {
        hold_four_bit_gemms(&cuda, generation);
    }
}

fn hold_four_bit_gemms(cuda: &Ops<Cuda>, generation: &str) {
    let (cpu, formats) = (scalar(), [Format::Int4, Format::Nvfp4]);
    // The third and the fourth do not go into tiles.
    for (rows, n, k) in [
        (1, 64, 64),
        (3, 48, 96),
        (2, 5, 17),
        (17, 130, 257),
        (64, 896, 896),
        (40, 200, 648),
        (130, 200, 648),
        (200, 512, 1024),
        (300, 80, 4864),
    ]
    .into_iter()
    .filter(|&(rows, n, k)| fits(rows, n, k))
    {
        let mut random = Random::new((rows + n + k) as u64);
        let (x, mut w, bias) = (random.normals(rows * k), random.normals(n * k), random.normals(n));
        // Groups whose scales are small, and one of zeros.
        w.iter_mut().step_by(19).for_each(|x| *x *= 30.0);
        w.iter_mut().skip(n * k / 2).take(40).for_each(|x| *x *= 1e-4);
        w.iter_mut().take(17).for_each(|x| *x = 0.0);
        for (format, rounding) in formats
            .into_iter()
            .flat_map(|format| [Rounding::Nearest, Rounding::Stochastic { seed: 9 }].map(|r| (format, r)))
        {
            let what = format!("{format} {rows}x{n}x{k} {rounding:?} {generation}");
            let shape = WeightShape { n, k, format, trained: false };
            let bytes = exported(&cpu, &w, shape, rounding);
            assert!(exported(cuda, &w, shape, rounding) == bytes, "{what}: other codes or scales");
            let mut taken = cuda.device().weight(shape).expect("memory for a test");
            cuda.queue().import(&bytes, &mut taken).expect("imported");
            let mut again = Vec::new();
            cuda.queue().export(&taken, &mut again).expect("exported");
            assert!(again == bytes, "{what}: other bytes after taking them over");
            let want = stored_and_added(&cpu, shape, rounding, rows, &x, &w, &bias);
            let got = stored_and_added(cuda, shape, rounding, rows, &x, &w, &bias);
            // Tensor cores cut sums off where the CPU rounds them: 1.2e-6 was seen of bf16.
            let off = distance(&got, &want);
            assert!(off < 1e-5, "{what}: {off:.1e} off");
            let want = input_gradient(&cpu, shape, rounding, rows, &w, &x);
            let got = input_gradient(cuda, shape, rounding, rows, &w, &x);
            let off = distance(&got, &want);
            assert!(off < 1e-5, "{what}: dx {off:.1e} off");
        }
    }
}

fn exported<D: Device>(ops: &Ops<D>, w: &[f32], shape: WeightShape, rounding: Rounding) -> Vec<u8> {
    let (packed, mut bytes) = (ops.packed(w, shape, rounding), Vec::new());
    ops.queue().export(&packed, &mut bytes).expect("exported");
    bytes
}

/// The gradient of the input of frozen weights, from a gradient that begins with numbers of `x`.
fn input_gradient<D: Device>(
    ops: &Ops<D>,
    shape: WeightShape,
    rounding: Rounding,
    rows: usize,
    w: &[f32],
    x: &[f32],
) -> Vec<f64> {
    let WeightShape { n, k, .. } = shape;
    let dy: Vec<f32> = x.iter().copied().cycle().take(rows * n).collect();
    let (x, w, dy, mut dx) = (&ops.up(x), &ops.packed(w, shape, rounding), &ops.up(&dy), ops.stale(rows * k));
    ops.queue().linear_backward(LinearBackward {
        adapter: None,
        x,
        rows,
        norm: None,
        w,
        dy,
        dw: None,
        dbias: None,
        dx: Some(&mut dx),
    });
    ops.down(&dx)
}

/// A linear layer with its bias, and added to that once more without.
fn stored_and_added<D: Device>(
    ops: &Ops<D>,
    shape: WeightShape,
    rounding: Rounding,
    rows: usize,
    x: &[f32],
    w: &[f32],
    bias: &[f32],
) -> Vec<f64> {
    let (x, packed) = (ops.up(x), ops.packed(w, shape, rounding));
    let mut out = ops.stale(rows * shape.n);
    ops.linear(&x, rows, &packed, Some(&ops.up(bias)), Output::Store, &mut out);
    ops.linear(&x, rows, &packed, None, Output::Add, &mut out);
    ops.down(&out)
}

/// Weights and moments after some updates have the CPU's bits, in every format of moments.
#[test]
fn updates_equal_the_cpu() {
    let Some(cuda) = device() else { return };
    let (cpu, mut random) = (Ops::new(Cpu::new(Level::best(), 1)), Random::new(11));
    for len in [1, 63, 64, 65, 1000, 40_000] {
        let [w, g] = [(); 2].map(|_| random.normals(len));
        for format in MomentFormat::ALL {
            let shape = MomentShape { len, format, on_host: false };
            let on_gpu = updated(&cuda, &w, &cuda.up(&g), shape);
            let on_cpu = updated(&cpu, &w, &cpu.up(&g), shape);
            assert_eq!(on_gpu, on_cpu, "{len} numbers, {format:?}");
        }
    }
}

/// A row's bits do not depend on the rows beside it, in every format and for any shape of tile.
#[test]
fn gemms_do_not_depend_on_the_batch() {
    let rows = 300;
    for ((cuda, generation), (n, k)) in generations().iter().flat_map(|device| {
        let shapes = [
            (130, 136),
            (768, 168),
            (520, 72),
            (64, 2056),
            (384, 1024),
            (200, 4864),
            (4608, 3584),
            (3584, 8192),
            (7168, 2048),
        ];
        shapes.into_iter().filter(|&(n, k)| fits(rows, n, k)).map(move |shape| (device, shape))
    }) {
        let mut random = Random::new(8);
        let (x, w) = (random.normals(rows * k), random.normals(n * k));
        for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8, Format::Int4, Format::Nvfp4] {
            let packed = cuda.frozen(&w, n, k, format);
            let run = |first: usize, count: usize| {
                let (x, mut out) = (cuda.up(&x[first * k..][..count * k]), cuda.stale(count * n));
                cuda.linear(&x, count, &packed, None, Output::Store, &mut out);
                cuda.down(&out)
            };
            let all = run(0, rows);
            for (first, count) in
                [(0, 1), (299, 1), (7, 5), (30, 16), (100, 33), (3, 64), (2, 200), (50, 250)]
            {
                let got = run(first, count);
                let same = got.iter().zip(&all[first * n..]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{format} {n}x{k} {generation}: {count} rows from {first} have other bits");
            }
        }
    }
}

/// Samples with every kind of truncation are the CPU's, but for one that falls on the border between two
/// tokens.
#[test]
fn samples_equal_the_cpu() {
    let Some(cuda) = device() else { return };
    let (rows, k, vocabulary) = (96, 64, 5003);
    let mut random = Random::new(4);
    let hidden = random.normals(rows * k);
    let w: Vec<f32> = random.normals(vocabulary * k).iter().map(|x| 0.4 * x).collect();
    let batch = sampling(mixed_rows(rows, 0.37));
    let want = sampled(&scalar(), &hidden, &w, vocabulary, k, &batch);
    let got = sampled(&cuda, &hidden, &w, vocabulary, k, &batch);
    let different = got.iter().zip(&want).filter(|(a, b)| a.token != b.token).count();
    println!("{different} of {rows} sampled tokens differ");
    assert!(different <= 2, "{different} of {rows} sampled tokens differ");
    for (i, (got, want)) in got.iter().zip(&want).enumerate().filter(|(_, (a, b))| a.token == b.token) {
        let numbers = |sampled: &Sampled| wide(&[sampled.logp, sampled.entropy]);
        assert_close(&format!("row {i}"), &numbers(got), &numbers(want), 200.0);
    }
}

fn sampled<D: Device>(
    ops: &Ops<D>,
    hidden: &[f32],
    w: &[f32],
    vocabulary: usize,
    k: usize,
    batch: &Batch,
) -> Vec<Sampled> {
    let head = ops.frozen(w, vocabulary, k, Format::F32);
    let sampled = ops.sample(&ops.up(hidden), &head, batch);
    for (row, sampled) in batch.samples.iter().zip(&sampled) {
        assert!(sampled.logp <= 0.0 && (sampled.token as usize) < vocabulary, "{row:?}: {sampled:?}");
    }
    sampled
}

#[test]
fn the_most_probable_tokens_have_the_heads_own_log_probs() {
    if let Some(cuda) = device() {
        for format in [Format::F32, Format::Bf16] {
            check_top_tokens(&cuda, format, "cuda");
        }
    }
}

#[test]
fn fetched_tokens_outlive_the_next_sample() {
    if let Some(cuda) = device() {
        check_fetched_tokens(&cuda);
    }
}

#[test]
fn recorded_steps_give_the_same_bits() {
    for (cuda, generation) in generations() {
        println!("the device {generation}:");
        for (format, kv_format) in [
            (Format::F32, KvFormat::F32),
            (Format::Bf16, KvFormat::Bf16),
            (Format::Int8, KvFormat::Int8),
            (Format::Fp8, KvFormat::Fp8),
            (Format::Int4, KvFormat::Bf16),
            (Format::Nvfp4, KvFormat::Int8),
        ] {
            let before = cuda.queue().recorded_steps();
            check_replay(&cuda, format, kv_format);
            assert!(cuda.queue().recorded_steps() > before, "{format}: nothing was recorded");
        }
    }
}

/// One graph for each owner, though their batches have the same shape.
#[test]
fn owners_have_steps_of_their_own() {
    let Some(cuda) = device() else { return };
    check_owners(&cuda);
    assert_eq!(cuda.queue().recorded_steps(), 3);
}
