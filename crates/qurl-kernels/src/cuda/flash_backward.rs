//! Backward pass of attention on tensor cores: what the kernels of `cu/flash_backward*.cu` get.
//!
//! A first kernel rounds operands to bf16. Then one kernel owns keys and another owns queries; on Hopper both
//! have their own form, with `wgmma` and the TMA. Which rows a block owns, and in which order sums are made,
//! depends on the lengths of the sequences and the device alone.

use super::attention::{Gradients, window};
use super::batch::CudaBatch;
use super::constants::{BACKWARD_GROUPS, BACKWARD_PASSING, BACKWARD_THREADS, BACKWARD_TILE};
use super::context::HOPPER;
use super::ffi::DevicePtr;
use super::kernels::{self, FlashBackward, FlashBackwardHopperKeys, FlashBackwardHopperQueries};
use super::kernels::{FlashBackwardJoin, FlashBackwardPrepare};
use super::launch::Launch;
use super::queue::CudaQueue;
use super::staging::{ListKey, ListKind};
use crate::types::{Heads, Span};

/// Rows that a block owns on Hopper: a tile for each of its warpgroups. Others own one tile.
const HOPPER_OWNED: usize = BACKWARD_GROUPS * BACKWARD_TILE;
/// Threads of a block there: those warpgroups and one that loads.
const HOPPER_THREADS: usize = 128 * (BACKWARD_GROUPS + 1);
/// Bytes of what is known of a row and head.
const FACT_BYTES: usize = 16;
/// Blocks of an SM, one after the other, that are enough to share the work evenly.
const ENOUGH_BLOCKS: usize = 4;

/// Whether the kernels take the backward pass.
pub(super) fn takes(heads: Heads) -> bool {
    matches!(heads.head_dim, 64 | 128)
}

/// The operands, in the workspace.
struct Operands {
    /// `[rows, qkv width]` and `[rows, heads * head_dim]` in bf16.
    qkv: DevicePtr,
    dout: DevicePtr,
    /// `[rows, heads]`: logarithms and deltas.
    facts: DevicePtr,
    /// `[rows, heads / share * head_dim]` twice: gradients of keys and of values by parts of a group; 0 for
    /// none.
    parts: DevicePtr,
    rows: usize,
}

/// What the blocks own, on the device: pairs of span and first row.
struct Work {
    by_keys: DevicePtr,
    by_queries: DevicePtr,
    blocks: usize,
}

/// Backward of [`super::flash::forward`] for whole sequences side by side.
pub(super) fn backward(queue: &mut CudaQueue, heads: Heads, batch: &CudaBatch, gradients: &Gradients) {
    let rows = batch.shape.rows;
    let (stride, width) = (heads.qkv_width(), heads.q_width());
    let hopper = queue.context.generation == HOPPER;
    let owned = if hopper { HOPPER_OWNED } else { BACKWARD_TILE };
    let blocks = batch.spans.iter().map(|span| span.rows.div_ceil(owned)).sum();
    if blocks == 0 {
        return;
    }
    let key = ListKey { generation: batch.generation, kind: ListKind::Backward { owned } };
    let by_keys = queue.stage_list(key, || work_lists(&batch.spans, owned));
    let work = Work { by_keys, by_queries: by_keys + (8 * blocks) as u64, blocks };
    let share = share(heads, blocks, queue.context.sms);
    let apart = hopper && share < heads.group();
    let operands = Operands {
        qkv: queue.alloc(2 * rows * stride),
        dout: queue.alloc(2 * rows * width),
        facts: queue.alloc(FACT_BYTES * rows * heads.heads),
        parts: if apart { queue.alloc(2 * rows * width / share * 4) } else { 0 },
        rows,
    };
    let Gradients { qkv, out, dout, lse, dqkv } = *gradients;
    let args = FlashBackwardPrepare {
        qkv,
        out,
        dout,
        lse,
        qkv_to: operands.qkv,
        dout_to: operands.dout,
        facts: operands.facts,
        stride: stride as u32,
        heads: heads.heads as u32,
        head_dim: heads.head_dim as u32,
    };
    queue.launch(kernels::flash_backward_prepare, Launch::blocks(rows, BACKWARD_THREADS), args);
    let spans = batch.span_words();
    match hopper {
        true => on_hopper(queue, heads, &operands, spans, &work, share, dqkv),
        false => everywhere(queue, heads, &operands, spans, &work, dqkv),
    }
}

fn everywhere(
    queue: &mut CudaQueue,
    heads: Heads,
    operands: &Operands,
    spans: DevicePtr,
    work: &Work,
    dqkv: DevicePtr,
) {
    let hd = heads.head_dim;
    let shared =
        2 * BACKWARD_TILE * hd * 2 + 4 * BACKWARD_PASSING * hd * 2 + 2 * BACKWARD_PASSING * FACT_BYTES;
    let (keys, queries) = match hd {
        64 => (kernels::flash_backward_keys_64, kernels::flash_backward_queries_64),
        _ => (kernels::flash_backward_keys_128, kernels::flash_backward_queries_128),
    };
    let lists = [(keys, work.by_keys, heads.kv_heads), (queries, work.by_queries, heads.heads)];
    for (kernel, work_list, columns) in lists {
        let args = FlashBackward {
            qkv: operands.qkv,
            dout: operands.dout,
            facts: operands.facts,
            spans,
            work: work_list,
            dqkv,
            stride: heads.qkv_width() as u32,
            heads: heads.heads as u32,
            kv_heads: heads.kv_heads as u32,
            window: window(heads),
            scale: heads.scale,
        };
        let launch = Launch::grid([work.blocks, columns, 1], BACKWARD_THREADS).shared(shared);
        queue.launch(kernel, launch, args);
    }
}

fn on_hopper(
    queue: &mut CudaQueue,
    heads: Heads,
    operands: &Operands,
    spans: DevicePtr,
    work: &Work,
    share: usize,
    dqkv: DevicePtr,
) {
    let (hd, rows, stride) = (heads.head_dim, operands.rows, heads.qkv_width());
    let (count, kv_heads, scale) = (heads.heads as u32, heads.kv_heads as u32, heads.scale);
    let window = window(heads);
    let tile = BACKWARD_TILE * hd * 2;
    let stages = if hd == 64 { 4 } else { 3 };
    let shared = 1024 + 2 * BACKWARD_GROUPS * tile + stages * 2 * tile;
    let mut map =
        |at: DevicePtr, width: usize, bytes: usize| queue.tensor_map(at, rows, width, BACKWARD_TILE, bytes);
    let qkv = map(operands.qkv, 2 * stride, 128);
    let dout = map(operands.dout, 2 * heads.heads * hd, 128);
    let facts_map = map(operands.facts, FACT_BYTES * heads.heads, FACT_BYTES);
    let (keys, queries) = match hd {
        64 => (kernels::flash_backward_hopper_keys_64, kernels::flash_backward_hopper_queries_64),
        _ => (kernels::flash_backward_hopper_keys_128, kernels::flash_backward_hopper_queries_128),
    };
    // Sums over all heads of a group are the result; others are parts of it.
    let columns = heads.heads / share;
    let key_columns = dqkv + (4 * heads.heads * hd) as u64;
    let (dkeys, dvalues, width) = match share == heads.group() {
        true => (key_columns, key_columns + (4 * heads.kv_heads * hd) as u64, stride),
        false => (operands.parts, operands.parts + (4 * rows * columns * hd) as u64, columns * hd),
    };
    let launch = |columns: usize| Launch::blocks(columns * work.blocks, HOPPER_THREADS).shared(shared);
    let args = FlashBackwardHopperKeys {
        qkv,
        dout,
        facts_map,
        spans,
        work: work.by_keys,
        dkeys,
        dvalues,
        stride: width as u64,
        heads: count,
        kv_heads,
        share: share as u32,
        window,
        scale,
    };
    queue.launch(keys, launch(columns), args);
    let stride = stride as u64;
    if share < heads.group() {
        let parts = (heads.group() / share) as u32;
        let (to, head_dim) = (key_columns, hd as u32);
        let args = FlashBackwardJoin { dkeys, dvalues, to, stride, parts, kv_heads, head_dim };
        queue.launch(kernels::flash_backward_join, Launch::blocks(rows, 128), args);
    }
    let args = FlashBackwardHopperQueries {
        qkv,
        dout,
        facts: operands.facts,
        spans,
        work: work.by_queries,
        dqueries: dqkv,
        stride,
        heads: count,
        kv_heads,
        window,
        scale,
    };
    queue.launch(queries, launch(heads.heads), args);
}

/// Query heads of a group that a block of keys takes: as many as leave enough blocks to share the work
/// evenly.
fn share(heads: Heads, blocks: usize, sms: usize) -> usize {
    let group = heads.group();
    let even =
        |share: &usize| group.is_multiple_of(*share) && blocks * heads.heads / share >= ENOUGH_BLOCKS * sms;
    (1..=group).rev().find(even).unwrap_or(1)
}

/// Pairs of span and first row, in steps of the rows that a block owns, those with most to do first: by keys,
/// each seen by what comes after it, then by queries, each of which sees what comes before it. Spans are
/// sorted by row.
fn work_lists(spans: &[Span], owned: usize) -> Vec<u32> {
    let mut work: Vec<(u32, usize, usize)> = Vec::new();
    for (i, span) in spans.iter().enumerate() {
        work.extend((0..span.rows).step_by(owned).map(|first| (i as u32, first, span.rows - first)));
    }
    let mut lists = Vec::with_capacity(4 * work.len());
    work.sort_by_key(|&(.., later)| std::cmp::Reverse(later));
    lists.extend(work.iter().flat_map(|&(i, first, _)| [i, first as u32]));
    work.sort_by_key(|&(_, first, _)| std::cmp::Reverse(first));
    lists.extend(work.iter().flat_map(|&(i, first, _)| [i, first as u32]));
    lists
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_orders_cover_every_row_once() {
        let spans =
            [(0, 300), (300, 1), (301, 40)].map(|(row, rows)| Span { row, rows, position: 0, pages: 0 });
        let lists = work_lists(&spans, HOPPER_OWNED);
        let (by_keys, by_queries) = lists.split_at(lists.len() / 2);
        for order in [by_keys, by_queries] {
            let mut covered = spans.map(|span| vec![0; span.rows]);
            for pair in order.chunks_exact(2) {
                let rows = &mut covered[pair[0] as usize];
                let first = pair[1] as usize;
                let end = (first + HOPPER_OWNED).min(rows.len());
                rows[first..end].iter_mut().for_each(|times| *times += 1);
            }
            assert!(covered.iter().flatten().all(|&times| times == 1) && order.len() == 2 * 5);
        }
        assert_eq!(by_keys[..2], [0, 0]);
        assert_eq!(by_queries[..2], [0, 256]);
    }

    #[test]
    fn blocks_take_more_heads_where_there_are_enough_of_them() {
        let heads = Heads { heads: 12, kv_heads: 2, head_dim: 128, scale: 1.0, window: None };
        assert_eq!([1, 64, 100, 150, 300, 5000].map(|blocks| share(heads, blocks, 132)), [1, 1, 2, 3, 6, 6]);
    }
}
