//! Backward pass of attention on tensor cores: what the kernels of `cu/flash_backward*.cu` get.
//!
//! A first kernel rounds operands to bf16. Then one kernel owns keys and another owns queries; on Hopper both have their own
//! form, with `wgmma` and the copy engine. Which rows a block owns, and in which order sums are made, depends on the lengths
//! of the sequences and the device alone.

use super::ffi::DevicePtr;
use super::gpu::{Gpu, HOPPER};
use super::kv::stage_spans;
use super::launch::args;
use super::memory::Slot;
use crate::backend::{Heads, Span};

/// Rows of a tile, and those that a block owns: on Hopper a tile for each of two warpgroups.
const TILE: usize = 64;
const PASSING: usize = 32;
const HOPPER_OWNED: usize = 2 * TILE;
/// Bytes of what is known of a row and head.
const FACT_BYTES: usize = 16;
/// Blocks of a multiprocessor, one after the other, that are enough to share the work evenly.
const ENOUGH_BLOCKS: usize = 4;

/// Whether the kernels take the backward pass.
pub(super) fn takes(heads: Heads) -> bool {
    matches!(heads.head_dim, 64 | 128)
}

/// The operands, in scratch memory.
struct Operands {
    /// `[rows, qkv width]` and `[rows, heads * head_dim]` in bf16.
    qkv: DevicePtr,
    dout: DevicePtr,
    /// `[rows, heads]`: logarithms and deltas.
    facts: DevicePtr,
    /// What lies behind them.
    rest: DevicePtr,
    rows: usize,
}

/// Backward of [`super::flash::forward`] for whole sequences.
pub(super) fn backward(
    gpu: &Gpu,
    heads: Heads,
    qkv: DevicePtr,
    spans: &[Span],
    out: DevicePtr,
    dout: DevicePtr,
    lse: DevicePtr,
    dqkv: DevicePtr,
) {
    let rows = spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0);
    let (stride, width) = (heads.qkv_width(), heads.heads * heads.head_dim);
    let hopper = gpu.generation() == HOPPER;
    let owned = if hopper { HOPPER_OWNED } else { TILE };
    let work = Work::new(spans, owned);
    if work.blocks == 0 {
        return;
    }
    // Rows of no sequence would get what scratch memory holds.
    assert_eq!(
        spans.iter().map(|s| s.rows).sum::<usize>(),
        rows,
        "attention backward: sequences side by side"
    );
    let share = share(heads, work.blocks, gpu.multiprocessors() as usize);
    let parts = if hopper && share < heads.group() { 2 * rows * width / share * 4 } else { 0 };
    let sizes = [2 * rows * stride, 2 * rows * width, FACT_BYTES * rows * heads.heads];
    let room = gpu.scratch(Slot::Attention, sizes.iter().sum::<usize>() + parts);
    let [copied, copied_dout, facts] = sizes.map(|bytes| bytes as u64);
    let (dout_at, facts_at) = (room + copied, room + copied + copied_dout);
    let operands = Operands { qkv: room, dout: dout_at, facts: facts_at, rest: facts_at + facts, rows };
    let sizes = [stride, heads.heads, heads.head_dim].map(|x| x as u32);
    let given = args![qkv, out, dout, lse, room, dout_at, facts_at, sizes[0], sizes[1], sizes[2]];
    gpu.launch("flash_backward", "flash_backward_prepare", [rows, 1, 1], 128, 0, given);
    let spans = stage_spans(gpu, spans);
    match hopper {
        true => on_hopper(gpu, heads, &operands, spans, &work, share, dqkv),
        false => everywhere(gpu, heads, &operands, spans, &work, dqkv),
    }
}

fn everywhere(gpu: &Gpu, heads: Heads, operands: &Operands, spans: DevicePtr, work: &Work, dqkv: DevicePtr) {
    let hd = heads.head_dim;
    let shared = (2 * TILE * hd * 2 + 4 * PASSING * hd * 2 + 2 * PASSING * FACT_BYTES) as u32;
    let (keys, queries) = match hd {
        64 => ("flash_backward_keys_64", "flash_backward_queries_64"),
        _ => ("flash_backward_keys_128", "flash_backward_queries_128"),
    };
    let launch = |kernel: &'static str, work: &[u32], columns: usize| {
        let given = args![
            operands.qkv,
            operands.dout,
            operands.facts,
            spans,
            gpu.stage(work),
            dqkv,
            heads.qkv_width() as u32,
            heads.heads as u32,
            heads.kv_heads as u32,
            heads.scale,
        ];
        gpu.launch("flash_backward", kernel, [work.len() / 2, columns, 1], 128, shared, given);
    };
    launch(keys, &work.by_keys, heads.kv_heads);
    launch(queries, &work.by_queries, heads.heads);
}

fn on_hopper(
    gpu: &Gpu,
    heads: Heads,
    operands: &Operands,
    spans: DevicePtr,
    work: &Work,
    share: usize,
    dqkv: DevicePtr,
) {
    const FILE: &str = "flash_backward_hopper";
    const THREADS: u32 = 384;
    let (hd, rows, stride) = (heads.head_dim, operands.rows, heads.qkv_width());
    let (count, kv_heads) = (heads.heads as u32, heads.kv_heads as u32);
    let tile = TILE * hd * 2;
    let stages = if hd == 64 { 4 } else { 3 };
    let shared = (1024 + 2 * HOPPER_OWNED * hd * 2 + stages * 2 * tile) as u32;
    let map = |at: DevicePtr, width: usize, bytes: u32| gpu.tensor_map(at, rows, width, TILE as u32, bytes);
    let qkv = map(operands.qkv, 2 * stride, 128);
    let dout = map(operands.dout, 2 * heads.heads * hd, 128);
    let facts = map(operands.facts, FACT_BYTES * heads.heads, FACT_BYTES as u32);
    let (keys, queries) = match hd {
        64 => ("flash_backward_hopper_keys_64", "flash_backward_hopper_queries_64"),
        _ => ("flash_backward_hopper_keys_128", "flash_backward_hopper_queries_128"),
    };
    // Sums over all heads of a group are the result; others are parts of it.
    let columns = heads.heads / share;
    let key_columns = dqkv + (4 * heads.heads * hd) as u64;
    let (dkeys, dvalues, width) = match share == heads.group() {
        true => (key_columns, key_columns + (4 * heads.kv_heads * hd) as u64, stride),
        false => (operands.rest, operands.rest + (4 * rows * columns * hd) as u64, columns * hd),
    };
    let by_keys = gpu.stage(&work.by_keys);
    let given = args![
        &qkv,
        &dout,
        &facts,
        spans,
        by_keys,
        dkeys,
        dvalues,
        width,
        count,
        kv_heads,
        share as u32,
        heads.scale
    ];
    gpu.launch(FILE, keys, [columns * work.blocks, 1, 1], THREADS, shared, given);
    if share < heads.group() {
        let parts = (heads.group() / share) as u32;
        let given = args![dkeys, dvalues, key_columns, stride, parts, kv_heads, hd as u32];
        gpu.launch(FILE, "flash_backward_join", [rows, 1, 1], 128, 0, given);
    }
    let by_queries = gpu.stage(&work.by_queries);
    let given =
        args![&qkv, &dout, operands.facts, spans, by_queries, dqkv, stride, count, kv_heads, heads.scale];
    gpu.launch(FILE, queries, [heads.heads * work.blocks, 1, 1], THREADS, shared, given);
}

/// Query heads of a group that a block of keys takes: as many as leave enough blocks to share the work evenly.
fn share(heads: Heads, blocks: usize, multiprocessors: usize) -> usize {
    let group = heads.group();
    let even = |share: &usize| {
        group.is_multiple_of(*share) && blocks * heads.heads / share >= ENOUGH_BLOCKS * multiprocessors
    };
    (1..=group).rev().find(even).unwrap_or(1)
}

/// Pairs of span and first row, in steps of the rows that a block owns, those with most to do first. Spans count in the order
/// of rows.
struct Work {
    /// A key is seen by what comes after it.
    by_keys: Vec<u32>,
    /// A query sees what comes before it.
    by_queries: Vec<u32>,
    blocks: usize,
}

impl Work {
    fn new(spans: &[Span], owned: usize) -> Work {
        let mut sorted: Vec<&Span> = spans.iter().collect();
        sorted.sort_by_key(|span| span.row);
        let mut work: Vec<(u32, usize, usize)> = Vec::new();
        for (i, span) in sorted.iter().enumerate() {
            work.extend((0..span.rows).step_by(owned).map(|first| (i as u32, first, span.rows - first)));
        }
        let pairs = |work: &[(u32, usize, usize)]| {
            work.iter().flat_map(|&(i, first, _)| [i, first as u32]).collect::<Vec<_>>()
        };
        work.sort_by_key(|&(.., later)| std::cmp::Reverse(later));
        let by_keys = pairs(&work);
        work.sort_by_key(|&(_, first, _)| std::cmp::Reverse(first));
        Work { by_keys, by_queries: pairs(&work), blocks: work.len() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_orders_cover_every_row_once() {
        let spans =
            [(301, 40), (0, 300), (300, 1)].map(|(row, rows)| Span { row, rows, position: 0, pages: 0 });
        let lengths = [300, 1, 40];
        let work = Work::new(&spans, HOPPER_OWNED);
        for order in [&work.by_keys, &work.by_queries] {
            let mut covered = lengths.map(|rows| vec![0; rows]);
            for pair in order.chunks_exact(2) {
                let rows = &mut covered[pair[0] as usize];
                let first = pair[1] as usize;
                let end = (first + HOPPER_OWNED).min(rows.len());
                rows[first..end].iter_mut().for_each(|times| *times += 1);
            }
            assert!(covered.iter().flatten().all(|&times| times == 1) && order.len() == 2 * work.blocks);
        }
        assert_eq!(work.by_keys[..2], [0, 0]);
        assert_eq!(work.by_queries[..2], [0, 256]);
    }

    #[test]
    fn blocks_take_more_heads_where_there_are_enough_of_them() {
        let heads = Heads { heads: 12, kv_heads: 2, head_dim: 128, scale: 1.0 };
        assert_eq!([1, 64, 100, 150, 300, 5000].map(|blocks| share(heads, blocks, 132)), [1, 1, 2, 3, 6, 6]);
    }
}
