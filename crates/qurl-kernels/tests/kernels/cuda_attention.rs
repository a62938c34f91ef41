//! Attention on a GPU over every format of keys and values, against the CPU; and by prefill, in chunks and
//! token by token with the same bits, with and without windows.

use crate::cuda::device;
use crate::ops::{Ops, cpus};
use crate::paged::{Attention, Paged, heads};
use crate::support::{Random, ULP, assert_bits, assert_close, units_off};
use qurl_kernels::types::{Heads, KvFormat};
use qurl_kernels::{Cuda, Device};

/// Sequences at once against the CPU, and in other steps and without what a backward pass needs with the same
/// bits.
fn hold(cuda: &Ops<Cuda>, heads: Heads, format: KvFormat, lengths: &[usize], steps: &[Vec<usize>]) {
    let cpu = cpus(2).pop().expect("a level");
    let mut random = Random::new(3);
    let paged = Paged::scattered(&mut random, lengths, 16);
    let qkv = random.normals(lengths.iter().sum::<usize>() * heads.qkv_width());
    let want = in_steps(&cpu, &paged, heads, format, lengths, &qkv, &[0], true);
    let got = in_steps(cuda, &paged, heads, format, lengths, &qkv, &[0], true);
    let what = format!("{format:?} {heads:?}");
    // Tensor cores see queries and weights in bf16.
    let units = if format == KvFormat::F32 { 400.0 } else { 0.03 / ULP };
    println!("attention {what}: off {:.1} units", units_off(&got, &want));
    assert_close(&what, &got, &want, units);
    for starts in steps {
        for kept in [true, false] {
            let stepped = in_steps(cuda, &paged, heads, format, lengths, &qkv, starts, kept);
            assert_bits(&format!("{what}, {} steps, kept: {kept}", starts.len()), &stepped, &got);
        }
    }
}

#[test]
fn stored_keys_and_values_equal_the_cpu() {
    let Some(cuda) = device() else { return };
    let lengths = [70, 1, 131];
    let steps = [1, 7, 64, 131].map(|step| (0..131).step_by(step).collect());
    for (kv_heads, group, head_dim) in [(2, 2, 64), (1, 7, 128), (2, 3, 80)] {
        for (format, window) in KvFormat::ALL.into_iter().flat_map(|f| [None, Some(33)].map(|w| (f, w))) {
            let heads = Heads { window, ..heads(kv_heads, group, head_dim) };
            hold(&cuda, heads, format, &lengths, &steps);
        }
    }
}

/// Windows shorter and longer than tiles of 64 and splits of 512 keys, with single rows on both sides of
/// every edge of a split, where the first one that a row sees changes.
#[test]
fn windows_begin_in_any_tile_and_split() {
    let Some(cuda) = device() else { return };
    let lengths = [1100, 600, 40];
    let near = |position: &usize| position % 512 <= 70 || position % 512 >= 505;
    let steps = [(0..1100).filter(near).collect(), (0..1100).step_by(100).collect()];
    for (kv_heads, group, head_dim) in [(2, 2, 64), (1, 7, 128)] {
        for (format, window) in
            KvFormat::ALL.into_iter().flat_map(|f| [1, 5, 64, 100, 513].map(|window| (f, window)))
        {
            let heads = Heads { window: Some(window), ..heads(kv_heads, group, head_dim) };
            hold(&cuda, heads, format, &lengths, &steps);
        }
    }
}

/// Single rows of so many sequences that their splits cannot all be resident are streamed: the same bits as
/// all at once, where sequences end in any tile and warps begin in any.
#[test]
fn long_contexts_of_many_sequences_are_streamed() {
    let Some(cuda) = device() else { return };
    let lengths: Vec<usize> = (0..72).map(|i| [540, 577, 514, 530][i % 4]).collect();
    let steps = [0, 513, 514, 529, 530, 539, 540, 576];
    let mut random = Random::new(5);
    let paged = Paged::scattered(&mut random, &lengths, 32);
    for (kv_heads, group, head_dim) in [(8, 3, 64), (8, 1, 128)] {
        let formats = [KvFormat::Bf16, KvFormat::Int8, KvFormat::Fp8];
        for (format, window) in formats.into_iter().flat_map(|f| [None, Some(520)].map(|w| (f, w))) {
            let heads = Heads { window, ..heads(kv_heads, group, head_dim) };
            let qkv = random.normals(lengths.iter().sum::<usize>() * heads.qkv_width());
            let want = in_steps(&cuda, &paged, heads, format, &lengths, &qkv, &[0], false);
            let got = in_steps(&cuda, &paged, heads, format, &lengths, &qkv, &steps, false);
            assert_bits(&format!("{format:?} {heads:?}, streamed"), &got, &want);
        }
    }
}

/// More single rows than the decode kernel has counters for go through the prefill kernel, without a list of
/// work.
#[test]
fn more_single_rows_than_counters() {
    let Some(cuda) = device() else { return };
    let (heads, lengths) = (heads(8, 1, 64), [2; 2049]);
    hold(&cuda, heads, KvFormat::Bf16, &lengths, &[vec![0, 1]]);
}

/// Where a block may have little shared memory (99 KB on compute capability 8.9), what prefill has summed up
/// waits in its output: the same bits as on 8.0, over several splits, with rows that are nobody's.
#[test]
fn prefill_with_little_shared_memory_gives_the_same_bits() {
    let Some(_) = device() else { return };
    let [large, small] = [80, 89].map(|newest| Ops::new(Cuda::open_as(0, newest).expect("the same device")));
    let lengths = [1100, 530, 40];
    let mut random = Random::new(8);
    let paged = Paged::scattered(&mut random, &lengths, 16);
    for (format, window) in [(KvFormat::Bf16, None), (KvFormat::Int8, Some(600)), (KvFormat::Fp8, None)] {
        let heads = Heads { window, ..heads(1, 3, 128) };
        let qkv = random.normals(lengths.iter().sum::<usize>() * heads.qkv_width());
        let starts = [0, 1000];
        let want = in_steps(&large, &paged, heads, format, &lengths, &qkv, &starts, true);
        let got = in_steps(&small, &paged, heads, format, &lengths, &qkv, &starts, true);
        assert_bits(&format!("{format:?} {heads:?}"), &got, &want);
    }
}

/// Output rows of sequences side by side, each computed in steps that begin at these positions.
fn in_steps<D: Device>(
    ops: &Ops<D>,
    paged: &Paged,
    heads: Heads,
    format: KvFormat,
    lengths: &[usize],
    qkv: &[f32],
    starts: &[usize],
    kept: bool,
) -> Vec<f64> {
    let (width, row_width) = (heads.qkv_width(), heads.q_width());
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let attention = Attention::new(ops, heads, longest);
    let mut kv = paged.stale_store(ops, heads, format);
    let mut all = vec![f64::NAN; qkv.len() / width * row_width];
    for (i, &from) in starts.iter().enumerate() {
        let to = starts.get(i + 1).copied().unwrap_or(longest);
        let (mut rows, mut runs, mut places, mut start) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for (sequence, &len) in lengths.iter().enumerate() {
            let range = from.min(len)..to.min(len);
            rows.extend_from_slice(&qkv[(start + range.start) * width..(start + range.end) * width]);
            places.extend(range.clone().map(|i| start + i));
            runs.push((sequence, range));
            start += len;
        }
        let (batch, mut rows) = (paged.batch(runs), ops.up(&rows));
        let out = match kept {
            true => ops.down(&attention.kept(ops, &batch, &mut rows, &mut kv)[0]),
            false => ops.down(&attention.output(ops, &batch, &mut rows, &mut kv)),
        };
        for (place, row) in places.into_iter().zip(out.chunks_exact(row_width)) {
            all[place * row_width..(place + 1) * row_width].copy_from_slice(row);
        }
    }
    all
}
