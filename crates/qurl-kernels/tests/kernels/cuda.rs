//! The CUDA backend: that all kernels compile for the architectures it supports, without spills (needs NVRTC, no GPU),
//! and on a machine with a GPU the op table against the naive twins and the 8-bit formats against the CPU.
//!
//! Where something is missing the tests say so and pass.

use crate::op_table::table;
use crate::support::{Paged, Random, ULP, assert_bits, assert_close, down, heads, units_off, up, wide};
use qurl_kernels::backend::{Backend, DRAWN_WORDS, Extent, Heads, KvFormat, Output, SampleRow};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::cuda::compile::{Architecture, SOURCES, Source, compile, on_all_cores};
use qurl_kernels::cuda::ffi::{self, Nvrtc};
use qurl_kernels::{BackendError, Cpu, Cuda, Format, Rounding};
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
fn every_kernel_compiles_without_spills_and_serialized_products() {
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
        // The assembler says so where tensor-core products wait for each other.
        let slow = compiled.log.contains("Potential Performance Loss");
        assert!(!slow, "{}.cu for {target}: {}", source.name, compiled.log);
    });
}

/// The device, or a word about why there is none.
pub(crate) fn device() -> Option<Cuda> {
    let cuda = Cuda::open().map_err(|reason| eprintln!("skipped: {reason}")).ok()?;
    cuda.gpu().compile_kernels(|_| ()).expect("kernels");
    Some(cuda)
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

/// More than any device has: an error that names the size, and the device goes on.
#[test]
fn memory_that_is_not_there() {
    let Some(cuda) = device() else { return };
    match cuda.zeros(1 << 44) {
        Err(BackendError::OutOfMemory { need, .. }) => assert_eq!(need, 4 << 44),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("64 TiB were given"),
    }
    let values = Random::new(1).normals(1000);
    assert_eq!(cuda.checksum(&up(&cuda, &values)), Ok(qurl_kernels::checksum::values(&values)));
}

#[test]
fn checksums_are_those_of_the_host() {
    let Some(cuda) = device() else { return };
    for len in [1, 7, 8, 1000, 65_536, 65_537, 1_000_003] {
        let values = Random::new(len as u64).normals(len);
        assert_eq!(
            cuda.checksum(&up(&cuda, &values)),
            Ok(qurl_kernels::checksum::values(&values)),
            "{len} values"
        );
    }
}

/// The device as it is, and as one of the oldest architecture.
fn generations() -> Vec<(Cuda, &'static str)> {
    let Some(newest) = device() else { return Vec::new() };
    let oldest = Cuda::open_as(80).expect("the same device");
    vec![(newest, "as it is"), (oldest, "as of 8.0")]
}

#[test]
fn op_table() {
    for (cuda, generation) in generations() {
        println!("the device {generation}:");
        hold_op_table(&cuda);
    }
}

/// Goes on after failures: the whole table is worth more than its first gap.
fn hold_op_table(cuda: &Cuda) {
    let (mut failures, mut outputs) = (Vec::new(), 0);
    for case in table::<Cuda>() {
        let got = (case.run)(cuda);
        let wants = (case.want)();
        assert_eq!(got.len(), wants.len(), "{}: outputs", case.name);
        for (got, want) in got.iter().zip(&wants) {
            let off = units_off(got, &want.values);
            // Attention over bf16 pages runs on tensor cores where the head dimension allows, with bf16 operands.
            let on_tensor_cores = case.name.contains("attention Bf16") && !want.name.contains("rounded");
            let (off, units) = match on_tensor_cores && off > want.units {
                true => (distance(got, &want.values) / ULP, 1e-2 / ULP),
                false => (off, want.units),
            };
            outputs += 1;
            println!("{:60} {:12} off {off:10.2} of {units:10.2} units", case.name, want.name);
            if off.is_nan() || off > units {
                failures.push(format!("{} {}: {off} of {units} units", case.name, want.name));
            }
        }
    }
    println!("{} of {outputs} outputs within their tolerance", outputs - failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// `|got - want| / |want|` over all values together.
pub(crate) fn distance(got: &[f64], want: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
}

fn scalar() -> Cpu {
    Cpu::new(Level::available()[0], 2)
}

/// Weights and rows go through the same codes: int8 gives the CPU's bits, fp8 differs by the rounding of its sums.
#[test]
fn eight_bit_products_equal_the_cpu() {
    for (cuda, generation) in generations() {
        hold_eight_bit_products(&cuda, generation);
    }
}

fn hold_eight_bit_products(cuda: &Cuda, generation: &str) {
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
                let want = product(&cpu, format, rounding, (rows, n, k), &x, &w, &bias);
                let got = product(cuda, format, rounding, (rows, n, k), &x, &w, &bias);
                match format {
                    Format::Int8 => assert_bits(&what, &got, &want),
                    // Tensor cores keep fewer bits than f32 while they sum fp8 products.
                    _ => assert!(distance(&got, &want) < 1e-3, "{what}: {:.1e} off", distance(&got, &want)),
                }
            }
        }
    }
}

fn product<B: Backend>(
    backend: &B,
    format: Format,
    rounding: Rounding,
    (rows, n, k): (usize, usize, usize),
    x: &[f32],
    w: &[f32],
    bias: &[f32],
) -> Vec<f64> {
    let w = up(backend, w);
    let mut packed = backend.pack(&w, n, k, format, false).expect("weights pack");
    backend.repack_rounded(&w, &mut packed, rounding).expect("weights pack");
    let mut out = up(backend, &vec![f32::NAN; rows * n]);
    backend.linear(&up(backend, x), rows, &packed, Some(&up(backend, bias)), Output::Store, &mut out);
    backend.linear(&up(backend, x), rows, &packed, None, Output::Add, &mut out);
    down(backend, &out)
}

/// A row's bits do not depend on the rows beside it, in every format and for any shape of tile.
#[test]
fn products_do_not_depend_on_the_batch() {
    let rows = 300;
    for ((cuda, generation), (n, k)) in generations().iter().flat_map(|device| {
        [(384, 1024), (200, 4864), (4608, 3584), (3584, 8192), (7168, 2048)].map(|shape| (device, shape))
    }) {
        let mut random = Random::new(8);
        let (x, w) = (random.normals(rows * k), random.normals(n * k));
        for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8] {
            let packed = cuda.pack(&up(cuda, &w), n, k, format, false).expect("weights pack");
            let run = |first: usize, count: usize| {
                let mut out = up(cuda, &vec![f32::NAN; count * n]);
                cuda.linear(
                    &up(cuda, &x[first * k..][..count * k]),
                    count,
                    &packed,
                    None,
                    Output::Store,
                    &mut out,
                );
                down(cuda, &out)
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

/// Attention over every format of keys and values: whole, and a token at a time with the same bits.
#[test]
fn stored_keys_and_values_equal_the_cpu() {
    let Some(cuda) = device() else { return };
    let cpu = scalar();
    for (shape, format) in
        [(2, 2, 64), (1, 7, 128), (2, 3, 80)].into_iter().flat_map(|s| KvFormat::ALL.map(|f| (s, f)))
    {
        let heads = heads(shape.0, shape.1, shape.2);
        let lengths = [70, 1, 131];
        let mut random = Random::new(3);
        let paged = Paged::scattered(&mut random, &lengths, 16);
        let qkv = random.normals(lengths.iter().sum::<usize>() * heads.qkv_width());
        let want = attend(&cpu, &paged, heads, format, &lengths, &qkv, usize::MAX);
        let got = attend(&cuda, &paged, heads, format, &lengths, &qkv, usize::MAX);
        let what = format!("{format:?} {shape:?}");
        // Tensor cores see queries and weights in bf16.
        let units = if format == KvFormat::F32 { 400.0 } else { 0.02 / ULP };
        println!("attention {what}: off {:.1} units", units_off(&got, &want));
        assert_close(&what, &got, &want, units);
        for steps in [1, 7, 64] {
            let stepped = attend(&cuda, &paged, heads, format, &lengths, &qkv, steps);
            assert_bits(&format!("{what}, {steps} tokens at a time"), &stepped, &got);
        }
    }
}

/// Output rows of sequences side by side, each computed `steps` tokens at a time.
fn attend<B: Backend>(
    backend: &B,
    paged: &Paged,
    heads: Heads,
    format: KvFormat,
    lengths: &[usize],
    qkv: &[f32],
    steps: usize,
) -> Vec<f64> {
    let (width, row_width) = (heads.qkv_width(), heads.heads * heads.head_dim);
    let mut kv = paged.stale_store(backend, heads, format);
    let mut all = vec![f64::NAN; qkv.len() / width * row_width];
    let longest = lengths.iter().copied().max().unwrap_or(0);
    for from in (0..longest).step_by(steps.min(longest)) {
        let (mut rows, mut slots, mut spans, mut places) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut start = 0;
        for (sequence, &len) in lengths.iter().enumerate() {
            let range = from.min(len)..from.saturating_add(steps).min(len);
            if !range.is_empty() {
                spans.push(paged.span(sequence, places.len(), range.len(), range.start));
                rows.extend_from_slice(&qkv[(start + range.start) * width..(start + range.end) * width]);
                slots.extend(paged.slots(sequence, range.clone()));
                places.extend(range.map(|i| start + i));
            }
            start += len;
        }
        let mut part = up(backend, &rows);
        backend.round_kv(&mut part, places.len(), heads, format);
        backend.kv_write(&part, heads, &slots, &mut kv);
        let mut out = up(backend, &vec![f32::NAN; places.len() * row_width]);
        backend.attention(heads, &part, &kv, &spans, &paged.pages, &mut out, None);
        let out = down(backend, &out);
        for (i, place) in places.into_iter().enumerate() {
            all[place * row_width..(place + 1) * row_width]
                .copy_from_slice(&out[i * row_width..(i + 1) * row_width]);
        }
    }
    all
}

/// Draws with every kind of truncation are the CPU's, but for a draw that falls on the border between two tokens.
#[test]
fn draws_equal_the_cpu() {
    let Some(cuda) = device() else { return };
    let cpu = scalar();
    let (rows, k, vocabulary) = (96, 64, 5003);
    let mut random = Random::new(4);
    let hidden = random.normals(rows * k);
    let w: Vec<f32> = random.normals(vocabulary * k).iter().map(|x| 0.4 * x).collect();
    let draws: Vec<SampleRow> = (0..rows)
        .map(|i| SampleRow {
            temperature: [0.0, 0.6, 1.0, 1.7][i % 4],
            top_p: if i % 5 == 0 { 0.7 } else { 1.0 },
            top_k: if i % 7 == 0 { 40 } else { 0 },
            min_p: if i % 11 == 0 { 0.02 } else { 0.0 },
            uniform: (i as f64 + 0.37) / rows as f64,
        })
        .collect();
    let want = sampled(&cpu, &hidden, &w, vocabulary, k, &draws);
    let got = sampled(&cuda, &hidden, &w, vocabulary, k, &draws);
    let different = got.iter().zip(&want).filter(|(a, b)| a.0 != b.0).count();
    println!("{different} of {rows} drawn tokens differ");
    assert!(different <= 2, "{different} of {rows} drawn tokens differ");
    for (i, (got, want)) in got.iter().zip(&want).enumerate().filter(|(_, (a, b))| a.0 == b.0) {
        assert_close(&format!("row {i}"), &wide(&got.1), &wide(&want.1), 200.0);
    }
}

fn sampled<B: Backend>(
    backend: &B,
    hidden: &[f32],
    w: &[f32],
    vocabulary: usize,
    k: usize,
    draws: &[SampleRow],
) -> Vec<(u32, [f32; 2])> {
    let head = backend.pack(&up(backend, w), vocabulary, k, Format::F32, false).expect("weights pack");
    let sampled = backend.sample(&up(backend, hidden), &head, draws).expect("draws");
    for (draw, drawn) in draws.iter().zip(&sampled) {
        assert!(drawn.logp <= 0.0 && (drawn.token as usize) < vocabulary, "{draw:?}: {drawn:?}");
    }
    sampled.iter().map(|s| (s.token, [s.logp, s.entropy])).collect()
}

/// Tokens that were asked for are those of the draw before, whatever is drawn before they are read, and if nobody reads them.
#[test]
fn asked_tokens_outlive_the_next_draw() {
    asked_tokens(&scalar());
    if let Some(cuda) = device() {
        asked_tokens(&cuda);
    }
}

fn asked_tokens<B: Backend>(backend: &B) {
    let (k, vocabulary) = (64, 1003);
    let mut random = Random::new(6);
    let hidden = up(backend, &random.normals(2000 * k));
    let head = backend.pack(&up(backend, &random.normals(vocabulary * k)), vocabulary, k, Format::F32, false);
    let head = head.expect("weights pack");
    let mut drawn = backend.zeros(2000 * DRAWN_WORDS).expect("memory");
    let mut waiting = None;
    for (turn, rows) in [3, 5, 700, 2000, 1, 300, 2000].into_iter().enumerate() {
        let row = |i| SampleRow {
            temperature: 1.0,
            uniform: (i as f64 + 0.1) / rows as f64,
            ..SampleRow::greedy()
        };
        let draws: Vec<SampleRow> = (0..rows).map(row).collect();
        let want = backend.sample(&hidden, &head, &draws).expect("draws");
        backend.draw(&hidden, &head, &draws, &mut drawn);
        let asked = backend.ask_drawn(&drawn, rows).expect("asked");
        if let Some((asked, want)) = waiting.replace((asked, want))
            && turn != 3
        {
            assert_eq!(backend.drawn(asked).expect("drawn"), want, "turn {turn}");
        }
    }
}

/// A step gives the same bits run directly, recorded and replayed, with inputs that change from step to step: for owners whose
/// steps differ only in a later layer, and where a later layer has inputs of its own.
#[test]
fn recorded_steps_give_the_same_bits() {
    let Some(cuda) = device() else { return };
    let (rows, n, k) = (8, 64, 64);
    let mut random = Random::new(5);
    let table = up(&cuda, &random.normals(50 * k));
    let weights = (0..3).map(|_| {
        cuda.pack(&up(&cuda, &random.normals(n * k)), n, k, Format::Int8, false).expect("weights pack")
    });
    let weights: Vec<_> = weights.collect();
    let mut x = cuda.zeros(rows * k).expect("memory");
    let mut middle = cuda.zeros(rows * k).expect("memory");
    let mut out = cuda.zeros(rows * n).expect("memory");
    for step in 0..12 {
        let (ids, picked) = (random.ids(rows, 50), random.ids(rows, rows));
        // Owners 0 and 1 have other second layers, owner 2 a second layer with inputs.
        let owner = step % 3;
        let mut run = |extent: Extent, out: &mut <Cuda as Backend>::Tensor| {
            cuda.gather(&table, &ids, k, &mut x);
            cuda.linear(&x, rows, &weights[0], None, Output::Store, &mut middle);
            if extent == Extent::Whole {
                match owner {
                    2 => cuda.gather(&middle, &picked, k, &mut x),
                    _ => cuda.copy(&middle, &mut x, rows * k),
                }
                cuda.linear(&x, rows, &weights[1 + owner % 2], None, Output::Store, out);
            }
        };
        cuda.step(owner as u64, &mut |extent| run(extent, &mut out));
        let stepped = down(&cuda, &out);
        run(Extent::Whole, &mut out);
        assert_bits(&format!("step {step}"), &stepped, &down(&cuda, &out));
    }
    assert_eq!(cuda.gpu().recorded_steps(), 3);
}
