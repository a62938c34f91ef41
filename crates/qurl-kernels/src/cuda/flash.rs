//! Attention on tensor cores: which kernel of `cu/flash_{prefill,decode}*.cu` takes which rows. The backward
//! pass is in [`super::flash_backward`].
//!
//! Many rows of a sequence go through a prefill kernel (on Hopper, with keys and values in bf16, one with
//! `wgmma` and the TMA), single rows through the decode kernel, which shares a long context among blocks. All
//! sum in the same order, so a mixed step may use any. A window only leaves tiles and splits out that it
//! hides.

use super::attention::window;
use super::batch::{BatchShape, CudaBatch, SPLIT};
use super::constants::{
    DECODE_HEADS, DECODED_BF16, DECODED_F32, DECODED_FP8, DECODED_INT8, FLASH_TILE, MAX_DECODE_WARPS,
    PREFILL_RING_KIB, PREFILL_ROWS, PREFILL_THREADS,
};
use super::context::{Context, HOPPER};
use super::ffi::DevicePtr;
use super::flash_stream;
use super::kernels::{self, FlashDecode, FlashPrefill, FlashPrefillHopper, Kernel};
use super::kv::CudaKv;
use super::launch::Launch;
use super::linear::Operand;
use super::queue::{ABSMAX_BYTES, COUNTER_BYTES, CudaQueue};
use super::staging::{ListKey, ListKind};
use super::weight::unsupported;
use crate::types::{Format, Heads, KvFormat, Span};
use std::f32::consts::LOG2_E;

/// Positions that the kernels want to lie side by side.
const SMALLEST_PAGE: usize = 16;
/// Most heads that share a key/value head.
const MAX_GROUP: usize = 16;
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
    if flash_stream::streams(&queue.context, heads, kv, &batch.shape) {
        return flash_stream::forward(queue, heads, qkv, kv, batch, Decoded::Numbers(out), lse);
    }
    if decodes(heads, kv, &batch.shape) {
        return decode(queue, heads, qkv, kv, batch, Decoded::Numbers(out), lse, None);
    }
    let group = heads.group();
    // A block for each sequence of one row: no need of a list, which a recorded step could not have.
    let (work, blocks) = match batch.shape.single {
        true => (0, batch.shape.sequences),
        false => {
            let key = ListKey { generation: batch.generation, kind: ListKind::Forward { group } };
            let work = queue.stage_list(key, || work_list(&batch.spans, group));
            (work, batch.spans.iter().map(|s| (s.rows * group).div_ceil(PREFILL_ROWS)).sum())
        }
    };
    let (spans, pages) = (batch.span_words(), batch.pages());
    let rows = Rows { qkv, spans, pages, work, blocks, out, lse };
    match kv.shape.format == KvFormat::Bf16 && queue.context.generation == HOPPER {
        true => on_hopper(queue, heads, kv, &rows),
        false => everywhere(queue, heads, kv, &rows),
    }
}

/// What a prefill kernel gets of the rows at hand.
struct Rows {
    qkv: DevicePtr,
    spans: DevicePtr,
    pages: DevicePtr,
    /// Pairs of span and first row, or 0, and how many.
    work: DevicePtr,
    blocks: usize,
    out: DevicePtr,
    lse: DevicePtr,
}

fn everywhere(queue: &mut CudaQueue, heads: Heads, kv: &CudaKv, rows: &Rows) {
    let Rows { qkv, spans, pages, work, blocks, out, lse } = *rows;
    let (key_scales, value_scales) = kv.scales();
    let hd = heads.head_dim;
    // Two tiles of keys and values with their scales, and what the threads have summed up of two rows: maxima
    // and denominators, and sums, which may wait in `out`.
    let tiles = 4 * FLASH_TILE * hd * 2 + 4 * FLASH_TILE * 4;
    let with = |sums: usize| tiles + PREFILL_THREADS * (sums + 4) * 4;
    let sums_in_out = hd == 128 && with(hd / 2) > queue.context.shared;
    let shared = with(if sums_in_out { 0 } else { hd / 2 });
    let kernel = match (kv.shape.format, hd) {
        (KvFormat::Int8, 64) => kernels::flash_prefill_int8_64,
        (KvFormat::Int8, _) => kernels::flash_prefill_int8_128,
        (KvFormat::Fp8, 64) => kernels::flash_prefill_fp8_64,
        (KvFormat::Fp8, _) => kernels::flash_prefill_fp8_128,
        (KvFormat::Bf16, 64) => kernels::flash_prefill_bf16_64,
        (KvFormat::Bf16, _) => kernels::flash_prefill_bf16_128,
        (KvFormat::F32, _) => unreachable!("not taken"),
    };
    let args = FlashPrefill {
        qkv,
        keys: kv.keys.at(),
        values: kv.values.at(),
        key_scales,
        value_scales,
        spans,
        pages,
        work,
        out,
        lse,
        stride: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        page_shift: kv.shape.page_size.trailing_zeros(),
        scale: heads.scale * LOG2_E,
        window: window(heads),
        sums_in_out: u32::from(sums_in_out),
    };
    queue.launch(kernel, Launch::grid([blocks, heads.kv_heads, 1], PREFILL_THREADS).shared(shared), args);
}

/// Keys and values in bf16. A block for each SM takes one piece of work after the other.
fn on_hopper(queue: &mut CudaQueue, heads: Heads, kv: &CudaKv, rows: &Rows) {
    let Rows { qkv, spans, pages, work, blocks, out, lse } = *rows;
    let (hd, page_size) = (heads.head_dim, kv.shape.page_size);
    // Queries, the ring of tiles, and what the threads have summed up, at an address that the TMA takes.
    let totals = 2 * PREFILL_ROWS * (hd / 8 + 1) * 16;
    let shared = 1024 + PREFILL_ROWS * hd * 2 + PREFILL_RING_KIB * 1024 + totals;
    let height = kv.shape.pages * heads.kv_heads * page_size;
    let mut map = |at: DevicePtr| queue.tensor_map(at, height, hd * 2, page_size.min(FLASH_TILE), 128);
    let args = FlashPrefillHopper {
        keys: map(kv.keys.at()),
        values: map(kv.values.at()),
        qkv,
        spans,
        pages,
        work,
        out,
        lse,
        stride: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        page_shift: page_size.trailing_zeros(),
        blocks: blocks as u32,
        scale: heads.scale * LOG2_E,
        window: window(heads),
    };
    let kernel = match hd {
        64 => kernels::flash_prefill_hopper_64,
        _ => kernels::flash_prefill_hopper_128,
    };
    let grid = (blocks * heads.kv_heads).min(queue.context.sms);
    // Two threads a row, and a warpgroup that loads.
    queue.launch(kernel, Launch::blocks(grid, 2 * PREFILL_ROWS + 128).shared(shared), args);
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

impl Decoded {
    /// What the kernels are told: their `output`, where to write, and where to write scales.
    pub fn parts(self) -> (usize, DevicePtr, DevicePtr) {
        match self {
            Decoded::Numbers(out) => (DECODED_F32, out, 0),
            Decoded::Rounded(out) => (DECODED_BF16, out.data, 0),
            Decoded::Quantized(Format::Int8, out) => (DECODED_INT8, out.data, out.scales),
            Decoded::Quantized(Format::Fp8, out) => (DECODED_FP8, out.data, out.scales),
            Decoded::Quantized(
                format @ (Format::F32 | Format::Bf16 | Format::Fp8Block | Format::Int4 | Format::Nvfp4),
                _,
            ) => unsupported(format),
        }
    }
}

/// The form of a decode step.
struct Plan {
    kernel: Kernel<FlashDecode>,
    threads: usize,
    shared: usize,
    /// Blocks that share what a row sees.
    splits: usize,
    /// Whether all blocks run at the same time, so that they may wait for each other.
    at_once: bool,
}

/// Blocks of the decode kernel that make a row together, if one has all of the context.
pub(super) fn parties(heads: Heads) -> usize {
    heads.kv_heads * heads.group().div_ceil(DECODE_HEADS)
}

/// Stretches of `size` positions, of contexts of up to `longest`, that one row's window may have keys of.
fn stretches(heads: Heads, longest: usize, size: usize) -> usize {
    // Its first key may be the last of a stretch.
    let crossed = |window: usize| (window - 1).div_ceil(size) + 1;
    heads.window.map_or(usize::MAX, crossed).min(longest.div_ceil(size))
}

/// Splits that a row of a step sees keys of, at most. The length is rounded to a power of two of them: a
/// recorded step is good for many lengths.
pub(super) fn splits(heads: Heads, shape: &BatchShape) -> usize {
    stretches(heads, shape.longest, SPLIT).max(1)
}

/// As many teams of warps a block as there are tiles to take, if all blocks run at the same time; else two.
fn plan(context: &Context, heads: Heads, kv: &CudaKv, shape: &BatchShape) -> Plan {
    let hd = heads.head_dim;
    let splits = splits(heads, shape);
    let blocks = splits * parties(heads) * shape.sequences;
    // A team is one warp or two.
    let (kernel, team, row_bytes) = match (kv.shape.format, hd) {
        (KvFormat::Int8, 64) => (kernels::flash_decode_int8_64, 1, hd + 4),
        (KvFormat::Int8, _) => (kernels::flash_decode_int8_128, 2, hd + 4),
        (KvFormat::Fp8, 64) => (kernels::flash_decode_fp8_64, 1, hd + 4),
        (KvFormat::Fp8, _) => (kernels::flash_decode_fp8_128, 2, hd + 4),
        (KvFormat::Bf16, 64) => (kernels::flash_decode_bf16_64, 2, 2 * hd),
        (KvFormat::Bf16, _) => (kernels::flash_decode_bf16_128, 2, 2 * hd),
        (KvFormat::F32, _) => unreachable!("not taken"),
    };
    let tile_bytes = 2 * FLASH_TILE * row_bytes;
    let form = |teams: usize| {
        let (threads, shared) = (32 * team * teams, teams * tile_bytes);
        let at_once = blocks <= context.blocks_at_once(kernel.id, threads, shared as u32, 1);
        Plan { kernel, threads, shared, splits, at_once }
    };
    let tiles = stretches(heads, shape.longest.min(SPLIT), FLASH_TILE);
    let most = tiles.clamp(1, MAX_DECODE_WARPS / team);
    (1..=most).rev().map(form).find(|plan| plan.at_once).unwrap_or_else(|| form(most.min(2)))
}

/// Whether a decode step writes quantized values: the blocks of a row publish their absmax for each other.
/// With many rows the wait is longer than a kernel that rounds them.
pub(super) fn quantizes(queue: &CudaQueue, heads: Heads, kv: &CudaKv, shape: &BatchShape) -> bool {
    publishes(heads, shape) && plan(&queue.context, heads, kv, shape).at_once
}

/// Whether there is memory for what the blocks of rows publish, and it is worth the wait.
pub(super) fn publishes(heads: Heads, shape: &BatchShape) -> bool {
    let parties = parties(heads);
    shape.rows <= MAX_PUBLISHING && shape.rows * parties * parties * 4 <= ABSMAX_BYTES
}

/// One row of each sequence. With tables of cosines and sines the row's queries and keys are rotated and its
/// keys and values stored on the way.
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
    let sequences = batch.shape.sequences;
    let (cos, sin) = rope.unwrap_or((0, 0));
    let (output, out, out_scales) = out.parts();
    let Plan { kernel, threads, shared, splits, .. } = plan(&queue.context, heads, kv, &batch.shape);
    let parties = parties(heads);
    let partials = match splits {
        1 => 0,
        _ => queue.alloc(4 * sequences * parties * splits * DECODE_HEADS * (heads.head_dim + 4)),
    };
    let args = FlashDecode {
        qkv,
        keys: kv.keys.at(),
        values: kv.values.at(),
        key_scales,
        value_scales,
        spans: batch.span_words(),
        pages: batch.pages(),
        out,
        lse,
        partials,
        counters: queue.counters(),
        stride: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        page_shift: kv.shape.page_size.trailing_zeros(),
        splits: splits as u32,
        scale: heads.scale * LOG2_E,
        window: window(heads),
        cos,
        sin,
        output: output as u32,
        out_scales,
        absmax: queue.absmax_words(),
    };
    queue.launch(kernel, Launch::grid([splits, parties, sequences], threads).shared(shared), args);
}

/// Pairs of span and first row for the prefill kernel, those that see most keys first. Spans are sorted by
/// row.
fn work_list(spans: &[Span], group: usize) -> Vec<u32> {
    let mut work: Vec<(usize, [u32; 2])> = Vec::new();
    for (i, span) in spans.iter().enumerate() {
        let firsts = (0..span.rows * group).step_by(PREFILL_ROWS);
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
            let end = (first + PREFILL_ROWS).min(rows.len());
            rows[first..end].iter_mut().for_each(|times| *times += 1);
        }
        assert!(covered.iter().flatten().all(|&times| times == 1));
    }

    /// A decode step has a block for every split that a row sees, wherever its window lies; and as many as
    /// the context has splits, where it sees all.
    #[test]
    fn every_split_in_a_window_has_a_block() {
        let heads = |window| Heads { heads: 1, kv_heads: 1, head_dim: 64, scale: 1.0, window };
        for size in [FLASH_TILE, SPLIT] {
            assert_eq!(
                [1, size, size + 1, 9 * size].map(|longest| stretches(heads(None), longest, size)),
                [1, 1, 2, 9]
            );
            for window in [1, 2, 5, size - 1, size, size + 1, size + 2, 3 * size, 3 * size + 1] {
                let heads = heads(Some(window));
                let seen = |position: usize| position / size - heads.first_seen(position) / size + 1;
                let most = (0..8 * size).map(seen).max();
                assert_eq!(most, Some(stretches(heads, 8 * size, size)), "{window} of {size}");
            }
        }
    }
}
