//! Attention on tensor cores: which kernel of `cu/flash_{prefill,decode}.cu` takes which rows. The way back is in
//! [`super::flash_backward`].
//!
//! Many rows of a sequence go through the prefill kernel, single rows through the decode kernel, which shares a long
//! context among blocks. Both sum in the same order, so a mixed step may use either.

use super::ffi::DevicePtr;
use super::gpu::Gpu;
use super::kv::{CudaKv, Seen, see};
use super::launch::{Launch, args};
use super::linear::Left;
use super::memory::{COUNTER_BYTES, MAXIMA_BYTES, Slot};
use crate::Format;
use crate::backend::{Heads, KvFormat, Span};
use std::f32::consts::LOG2_E;

/// The file of the decode kernels.
const DECODE: &str = "flash_decode";
const TILE: usize = 64;
/// Positions that the kernels want to lie side by side.
const SMALLEST_PAGE: usize = 16;
/// Positions that one block of a decode step takes.
const SPLIT: usize = 512;
/// Rows (queries times heads of a group) of a block of the prefill kernel.
const ROW_BLOCK: usize = 128;
/// Most heads that share a key/value head.
const MOST_GROUP: usize = 16;
/// Heads of a block of the decode kernel, and its most warps.
const BLOCK_HEADS: usize = 8;
const MOST_WARPS: usize = 8;
/// Most rows of a step whose blocks tell each other their largest numbers.
const MOST_TELLING: usize = 64;

/// Whether the kernels take this attention.
pub(super) fn takes(heads: Heads, kv: &CudaKv) -> bool {
    kv.format != KvFormat::F32
        && matches!(heads.head_dim, 64 | 128)
        && heads.group() <= MOST_GROUP
        && kv.page_size.is_power_of_two()
        && kv.page_size >= SMALLEST_PAGE
}

/// Whether the decode kernel takes these rows: one of each sequence.
pub(super) fn decodes(heads: Heads, kv: &CudaKv, seen: &Seen) -> bool {
    takes(heads, kv) && seen.single && seen.count * parties(heads) * 4 <= COUNTER_BYTES
}

/// Causal attention of the rows of all spans.
pub(super) fn forward(
    gpu: &Gpu,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    spans: &[Span],
    pages: &[u32],
    out: DevicePtr,
    lse: DevicePtr,
) {
    let seen = see(gpu, kv, spans, pages);
    if decodes(heads, kv, &seen) {
        return decode(gpu, heads, qkv, kv, &seen, Decoded::Numbers(out), lse, None);
    }
    let (key_scales, value_scales) = kv.scales();
    let (keys, values) = (kv.keys.at(), kv.values.at());
    let (stride, shift) = (heads.qkv_width() as u32, kv.page_size.trailing_zeros());
    let scale = heads.scale * LOG2_E;
    let (count, kv_heads, hd) = (heads.heads as u32, heads.kv_heads as u32, heads.head_dim);
    let work = gpu.stage(&work_list(spans, heads.group()));
    let blocks: usize = spans.iter().map(|s| (s.rows * heads.group()).div_ceil(ROW_BLOCK)).sum();
    let shared = 4 * TILE * hd * 2 + 4 * TILE * 4 + 8 * (hd / 2 + 4) * 32 * 4;
    let kernel = match (kv.format, hd) {
        (KvFormat::Int8, 64) => "flash_prefill_int8_64",
        (KvFormat::Int8, _) => "flash_prefill_int8_128",
        (KvFormat::Fp8, 64) => "flash_prefill_fp8_64",
        (KvFormat::Fp8, _) => "flash_prefill_fp8_128",
        (_, 64) => "flash_prefill_bf16_64",
        _ => "flash_prefill_bf16_128",
    };
    let given = args![
        qkv,
        keys,
        values,
        key_scales,
        value_scales,
        seen.spans,
        seen.pages,
        work,
        out,
        lse,
        stride,
        count,
        kv_heads,
        shift,
        scale
    ];
    gpu.launch("flash_prefill", kernel, [blocks, heads.kv_heads, 1], 256, shared as u32, given);
}

/// What a decode step writes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decoded {
    /// Numbers.
    Numbers(DevicePtr),
    /// Numbers in bf16, a product's left operand.
    Rounded(DevicePtr),
    /// Codes and scales, a product's left operand.
    Codes(Format, Left),
}

/// The form of a decode step.
struct Plan {
    kernel: &'static str,
    threads: u32,
    shared: u32,
    /// Blocks that share the context of a row.
    splits: usize,
    /// Whether all blocks run at the same time, so that they may wait for each other.
    at_once: bool,
}

/// Blocks of the decode kernel that make a row together, if one has all of the context.
fn parties(heads: Heads) -> usize {
    heads.kv_heads * heads.group().div_ceil(BLOCK_HEADS)
}

/// As many teams of warps a block as there are tiles to take, if all blocks run at the same time; else two.
fn plan(gpu: &Gpu, heads: Heads, kv: &CudaKv, seen: &Seen) -> Plan {
    let hd = heads.head_dim;
    // A power of two: a recorded step is good for many lengths.
    let splits = seen.longest.div_ceil(SPLIT).next_power_of_two();
    let blocks = splits * parties(heads) * seen.count;
    let codes = kv.format != KvFormat::Bf16;
    // A team is one warp or two.
    let (kernel, team) = match (kv.format, hd) {
        (KvFormat::Int8, 64) => ("flash_decode_int8_64", 1),
        (KvFormat::Int8, _) => ("flash_decode_int8_128", 2),
        (KvFormat::Fp8, 64) => ("flash_decode_fp8_64", 1),
        (KvFormat::Fp8, _) => ("flash_decode_fp8_128", 2),
        (_, 64) => ("flash_decode_bf16_64", 2),
        _ => ("flash_decode_bf16_128", 2),
    };
    let tile_bytes = 2 * TILE * if codes { hd + 4 } else { 2 * hd };
    let form = |teams: usize| {
        let (threads, shared) = ((32 * team * teams) as u32, (teams * tile_bytes) as u32);
        let at_once = blocks <= gpu.blocks_at_once(DECODE, kernel, threads, shared, 1);
        Plan { kernel, threads, shared, splits, at_once }
    };
    let tiles = seen.longest.min(SPLIT).div_ceil(TILE);
    let most = tiles.clamp(1, MOST_WARPS / team);
    (1..=most).rev().map(form).find(|plan| plan.at_once).unwrap_or_else(|| form(most.min(2)))
}

/// Whether a decode step writes codes: the blocks of a row tell each other their largest number. With many rows the wait is
/// longer than a kernel that rounds them.
pub(super) fn writes_codes(gpu: &Gpu, heads: Heads, kv: &CudaKv, seen: &Seen) -> bool {
    let parties = parties(heads);
    seen.rows <= MOST_TELLING
        && seen.rows * parties * parties * 4 <= MAXIMA_BYTES
        && plan(gpu, heads, kv, seen).at_once
}

/// One row of each sequence. With tables of cosines and sines the row's queries and keys are rotated and its keys and
/// values stored on the way.
pub(super) fn decode(
    gpu: &Gpu,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    seen: &Seen,
    out: Decoded,
    lse: DevicePtr,
    rope: Option<(DevicePtr, DevicePtr)>,
) {
    let (key_scales, value_scales) = kv.scales();
    let (keys, values) = (kv.keys.at(), kv.values.at());
    let (stride, shift) = (heads.qkv_width() as u32, kv.page_size.trailing_zeros());
    let scale = heads.scale * LOG2_E;
    let (count, kv_heads, hd) = (heads.heads as u32, heads.kv_heads as u32, heads.head_dim);
    let (cos, sin) = rope.unwrap_or((0, 0));
    let (output, out, out_scales) = match out {
        Decoded::Numbers(out) => (0u32, out, 0),
        Decoded::Rounded(out) => (1, out, 0),
        Decoded::Codes(Format::Fp8, out) => (3, out.data, out.scales),
        Decoded::Codes(_, out) => (2, out.data, out.scales),
    };
    let Plan { kernel, threads, shared, splits, .. } = plan(gpu, heads, kv, seen);
    let parties = parties(heads);
    let room = if splits > 1 { 4 * seen.count * parties * splits * BLOCK_HEADS * (hd + 4) } else { 4 };
    let partials = gpu.scratch(Slot::Attention, room);
    let given = args![
        qkv,
        keys,
        values,
        key_scales,
        value_scales,
        seen.spans,
        seen.pages,
        out,
        lse,
        partials,
        gpu.counters(),
        stride,
        count,
        kv_heads,
        shift,
        splits as u32,
        scale,
        cos,
        sin,
        output,
        out_scales,
        gpu.words(),
    ];
    let grid = [splits, parties, seen.count];
    gpu.launch_as(DECODE, kernel, Launch { grid, block: threads, shared, overlap: true }, given);
}

/// Pairs of span and first row for the prefill kernel, those that see most keys first. Spans count in the order of rows.
fn work_list(spans: &[Span], group: usize) -> Vec<u32> {
    let mut sorted: Vec<&Span> = spans.iter().collect();
    sorted.sort_by_key(|span| span.row);
    let mut work: Vec<(usize, [u32; 2])> = Vec::new();
    for (i, span) in sorted.iter().enumerate() {
        let firsts = (0..span.rows * group).step_by(ROW_BLOCK);
        work.extend(firsts.map(|first| (span.position + first / group, [i as u32, first as u32])));
    }
    work.sort_by_key(|&(seen, _)| std::cmp::Reverse(seen));
    work.into_iter().flat_map(|(_, pair)| pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_covers_every_row_once() {
        let spans = [(0, 300, 0), (300, 1, 1000), (301, 40, 7)];
        let spans = spans.map(|(row, rows, position)| Span { row, rows, position, pages: 0 });
        let work = work_list(&spans, 7);
        let mut covered = spans.map(|s| vec![0; s.rows * 7]);
        for pair in work.chunks_exact(2) {
            let rows = &mut covered[pair[0] as usize];
            let first = pair[1] as usize;
            let end = (first + ROW_BLOCK).min(rows.len());
            rows[first..end].iter_mut().for_each(|times| *times += 1);
        }
        assert!(covered.iter().flatten().all(|&times| times == 1));
    }
}
