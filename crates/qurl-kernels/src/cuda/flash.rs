//! Attention on tensor cores: which kernel of `cu/flash_{prefill,decode}.cu` takes which rows. The backward pass is in
//! [`super::flash_backward`].
//!
//! Many rows of a sequence go through the prefill kernel, single rows through the decode kernel, which shares a long
//! context among blocks. Both sum in the same order, so a mixed step may use either.

use super::batch::{BatchShape, CudaBatch, SPLIT};
use super::context::Context;
use super::ffi::DevicePtr;
use super::kv::CudaKv;
use super::launch::{Launch, args};
use super::linear::Operand;
use super::queue::{ABSMAX_BYTES, COUNTER_BYTES, CudaQueue};
use super::staging::{ListKey, ListKind};
use super::weight::unsupported;
use crate::types::{Format, Heads, KvFormat, Span};
use std::f32::consts::LOG2_E;

/// The file of the decode kernels.
const DECODE: &str = "flash_decode";
const TILE: usize = 64;
/// Positions that the kernels want to lie side by side.
const SMALLEST_PAGE: usize = 16;
/// Rows (queries times heads of a group) of a block of the prefill kernel.
const ROW_BLOCK: usize = 128;
/// Most heads that share a key/value head.
const MAX_GROUP: usize = 16;
/// Heads of a block of the decode kernel, and its most warps.
const BLOCK_HEADS: usize = 8;
const MAX_WARPS: usize = 8;
/// Most rows of a step whose blocks publish their absmax for each other.
const MAX_PUBLISHING: usize = 64;

/// Whether the kernels take this attention.
pub(super) fn takes(heads: Heads, kv: &CudaKv) -> bool {
    let numbers = match kv.shape.format {
        KvFormat::F32 => false,
        KvFormat::Bf16 | KvFormat::Int8 | KvFormat::Fp8 => true,
    };
    numbers
        && matches!(heads.head_dim, 64 | 128)
        && heads.group() <= MAX_GROUP
        && kv.shape.page_size.is_power_of_two()
        && kv.shape.page_size >= SMALLEST_PAGE
}

/// Whether the decode kernel takes these rows: one of each sequence.
pub(super) fn decodes(heads: Heads, kv: &CudaKv, shape: &BatchShape) -> bool {
    takes(heads, kv) && shape.single && shape.sequences * parties(heads) * 4 <= COUNTER_BYTES
}

/// Causal attention of the rows of all sequences.
pub(super) fn forward(
    queue: &mut CudaQueue,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    batch: &CudaBatch,
    out: DevicePtr,
    lse: DevicePtr,
) {
    if decodes(heads, kv, &batch.shape) {
        return decode(queue, heads, qkv, kv, batch, Decoded::Numbers(out), lse, None);
    }
    let (key_scales, value_scales) = kv.scales();
    let (stride, shift) = (heads.qkv_width() as u32, kv.shape.page_size.trailing_zeros());
    let (count, kv_heads, hd, group) =
        (heads.heads as u32, heads.kv_heads as u32, heads.head_dim, heads.group());
    // A block for each sequence of one row: no need of a list, which a recorded step could not have.
    let (work, blocks) = match batch.shape.single {
        true => (0, batch.shape.sequences),
        false => {
            let key = ListKey { generation: batch.generation, kind: ListKind::Forward { group } };
            let work = queue.stage_list(key, || work_list(&batch.spans, group));
            (work, batch.spans.iter().map(|s| (s.rows * group).div_ceil(ROW_BLOCK)).sum())
        }
    };
    let shared = 4 * TILE * hd * 2 + 4 * TILE * 4 + 8 * (hd / 2 + 4) * 32 * 4;
    let kernel = match (kv.shape.format, hd) {
        (KvFormat::Int8, 64) => "flash_prefill_int8_64",
        (KvFormat::Int8, _) => "flash_prefill_int8_128",
        (KvFormat::Fp8, 64) => "flash_prefill_fp8_64",
        (KvFormat::Fp8, _) => "flash_prefill_fp8_128",
        (KvFormat::Bf16, 64) => "flash_prefill_bf16_64",
        (KvFormat::Bf16, _) => "flash_prefill_bf16_128",
        (KvFormat::F32, _) => unreachable!("not taken"),
    };
    let given = args![
        qkv,
        kv.keys.at(),
        kv.values.at(),
        key_scales,
        value_scales,
        batch.span_words(),
        batch.pages(),
        work,
        out,
        lse,
        stride,
        count,
        kv_heads,
        shift,
        heads.scale * LOG2_E
    ];
    queue.launch("flash_prefill", kernel, [blocks, heads.kv_heads, 1], 256, shared as u32, given);
}

/// What a decode step writes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decoded {
    /// Numbers.
    Numbers(DevicePtr),
    /// Numbers in bf16, a GEMM's left operand.
    Rounded(Operand),
    /// Quantized values and scales, a GEMM's left operand.
    Quantized(Format, Operand),
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
fn plan(context: &Context, heads: Heads, kv: &CudaKv, shape: &BatchShape) -> Plan {
    let hd = heads.head_dim;
    // A power of two, as the length is: a recorded step is good for many lengths.
    let splits = shape.longest.div_ceil(SPLIT).next_power_of_two();
    let blocks = splits * parties(heads) * shape.sequences;
    // A team is one warp or two.
    let (kernel, team, row_bytes) = match (kv.shape.format, hd) {
        (KvFormat::Int8, 64) => ("flash_decode_int8_64", 1, hd + 4),
        (KvFormat::Int8, _) => ("flash_decode_int8_128", 2, hd + 4),
        (KvFormat::Fp8, 64) => ("flash_decode_fp8_64", 1, hd + 4),
        (KvFormat::Fp8, _) => ("flash_decode_fp8_128", 2, hd + 4),
        (KvFormat::Bf16, 64) => ("flash_decode_bf16_64", 2, 2 * hd),
        (KvFormat::Bf16, _) => ("flash_decode_bf16_128", 2, 2 * hd),
        (KvFormat::F32, _) => unreachable!("not taken"),
    };
    let tile_bytes = 2 * TILE * row_bytes;
    let form = |teams: usize| {
        let (threads, shared) = ((32 * team * teams) as u32, (teams * tile_bytes) as u32);
        let at_once = blocks <= context.blocks_at_once(DECODE, kernel, threads, shared, 1);
        Plan { kernel, threads, shared, splits, at_once }
    };
    let tiles = shape.longest.min(SPLIT).div_ceil(TILE);
    let most = tiles.clamp(1, MAX_WARPS / team);
    (1..=most).rev().map(form).find(|plan| plan.at_once).unwrap_or_else(|| form(most.min(2)))
}

/// Whether a decode step writes quantized values: the blocks of a row publish their absmax for each other. With many rows
/// the wait is longer than a kernel that rounds them.
pub(super) fn quantizes(queue: &CudaQueue, heads: Heads, kv: &CudaKv, shape: &BatchShape) -> bool {
    let parties = parties(heads);
    shape.rows <= MAX_PUBLISHING
        && shape.rows * parties * parties * 4 <= ABSMAX_BYTES
        && plan(&queue.context, heads, kv, shape).at_once
}

/// One row of each sequence. With tables of cosines and sines the row's queries and keys are rotated and its keys and
/// values stored on the way.
pub(super) fn decode(
    queue: &mut CudaQueue,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    batch: &CudaBatch,
    out: Decoded,
    lse: DevicePtr,
    rope: Option<(DevicePtr, DevicePtr)>,
) {
    let (key_scales, value_scales) = kv.scales();
    let (stride, shift) = (heads.qkv_width() as u32, kv.shape.page_size.trailing_zeros());
    let (count, kv_heads, sequences) = (heads.heads as u32, heads.kv_heads as u32, batch.shape.sequences);
    let (cos, sin) = rope.unwrap_or((0, 0));
    let (output, out, out_scales) = match out {
        Decoded::Numbers(out) => (0u32, out, 0),
        Decoded::Rounded(out) => (1, out.data, 0),
        Decoded::Quantized(Format::Int8, out) => (2, out.data, out.scales),
        Decoded::Quantized(Format::Fp8, out) => (3, out.data, out.scales),
        Decoded::Quantized(
            format @ (Format::F32 | Format::Bf16 | Format::Fp8Block | Format::Int4 | Format::Nvfp4),
            _,
        ) => unsupported(format),
    };
    let Plan { kernel, threads, shared, splits, .. } = plan(&queue.context, heads, kv, &batch.shape);
    let parties = parties(heads);
    let partials = match splits {
        1 => 0,
        _ => queue.alloc(4 * sequences * parties * splits * BLOCK_HEADS * (heads.head_dim + 4)),
    };
    let given = args![
        qkv,
        kv.keys.at(),
        kv.values.at(),
        key_scales,
        value_scales,
        batch.span_words(),
        batch.pages(),
        out,
        lse,
        partials,
        queue.counters(),
        stride,
        count,
        kv_heads,
        shift,
        splits as u32,
        heads.scale * LOG2_E,
        cos,
        sin,
        output,
        out_scales,
        queue.absmax_words(),
    ];
    let grid = [splits, parties, sequences];
    queue.launch_as(DECODE, kernel, Launch { grid, block: threads, shared, overlap: true }, given);
}

/// Pairs of span and first row for the prefill kernel, those that see most keys first. Spans are sorted by row.
fn work_list(spans: &[Span], group: usize) -> Vec<u32> {
    let mut work: Vec<(usize, [u32; 2])> = Vec::new();
    for (i, span) in spans.iter().enumerate() {
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
