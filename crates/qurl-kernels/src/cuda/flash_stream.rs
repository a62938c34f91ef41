//! Decode attention over long contexts (`cu/flash_stream.cu`): warps that stream equal runs of the tiles of a
//! whole step, and a kernel that folds what they found.
//!
//! It takes steps whose splits cannot all be resident. There the fused decode kernel of [`super::flash`] would
//! begin and end thousands of blocks that share little; this one keeps shared memory full of copies in flight
//! from beginning to end. What it does not do itself (rotation, storing the new row) is small beside the
//! context.

use super::attention::window;
use super::batch::{BatchShape, CudaBatch};
use super::constants::{DECODE_HEADS, FLASH_TILE, MAX_STREAM_SEQUENCES, SPLIT_TILES};
use super::context::{Context, HOPPER};
use super::ffi::DevicePtr;
use super::flash::{parties, splits, takes};

use super::kernels::{self, FlashStream, FlashStreamFold, Kernel};
use super::kv::CudaKv;
use super::launch::Launch;
use super::queue::CudaQueue;
use crate::types::{Heads, KvFormat};
use std::f32::consts::LOG2_E;

/// Warps of a block that folds.
const FOLD_WARPS: usize = 4;

/// A kernel with its warps a block and stages a warp, as in its source.
struct Form {
    kernel: Kernel<FlashStream>,
    warps: usize,
    stages: usize,
    row_bytes: usize,
}

impl Form {
    fn of(heads: Heads, kv: &CudaKv) -> Form {
        let hd = heads.head_dim;
        let (kernel, warps, stages, row_bytes) = match (kv.shape.format, hd) {
            (KvFormat::Bf16, 64) => (kernels::flash_stream_bf16_64, 8, 3, 2 * hd),
            (KvFormat::Bf16, _) => (kernels::flash_stream_bf16_128, 4, 3, 2 * hd),
            (KvFormat::Int8, 64) => (kernels::flash_stream_int8_64, 8, 4, hd + 4),
            (KvFormat::Int8, _) => (kernels::flash_stream_int8_128, 8, 3, hd + 4),
            (KvFormat::Fp8, 64) => (kernels::flash_stream_fp8_64, 8, 4, hd + 4),
            (KvFormat::Fp8, _) => (kernels::flash_stream_fp8_128, 8, 3, hd + 4),
            (KvFormat::F32, _) => unreachable!("not taken"),
        };
        Form { kernel, warps, stages, row_bytes }
    }

    /// Bytes of shared memory of a block.
    fn shared(&self) -> usize {
        self.warps * self.stages * FLASH_TILE * self.row_bytes
    }
}

/// Whether this is the kernel for a step of one row of each sequence: where its splits could not all be
/// resident as blocks.
pub(super) fn streams(context: &Context, heads: Heads, kv: &CudaKv, shape: &BatchShape) -> bool {
    let blocks = splits(heads, shape) * parties(heads) * shape.sequences;
    context.generation == HOPPER
        && takes(heads, kv)
        && shape.single
        && shape.sequences <= MAX_STREAM_SEQUENCES
        && blocks > MIN_BLOCKS_PER_SM * context.sms
}

/// From so many blocks of the fused kernel an SM on, streaming is faster (measured on an H200).
const MIN_BLOCKS_PER_SM: usize = 4;

/// What the row of each sequence gets; its key and value are in the pages already. `out` has numbers, or bf16
/// as the kernels' `output` says.
pub(super) fn forward(
    queue: &mut CudaQueue,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    batch: &CudaBatch,
    output: usize,
    out: DevicePtr,
    lse: DevicePtr,
) {
    let (key_scales, value_scales) = kv.scales();
    let (sequences, hd) = (batch.shape.sequences, heads.head_dim);
    let form = Form::of(heads, kv);
    let (blocks, result) = (queue.context.sms, 4 * DECODE_HEADS * (hd + 4));
    let warps = blocks * form.warps;
    let partials = queue.alloc(sequences * parties(heads) * splits(heads, &batch.shape) * result);
    let tile_partials = queue.alloc(warps * (SPLIT_TILES - 1) * result);
    let firsts = queue.alloc(4 * (sequences + 1));
    let args = FlashStream {
        qkv,
        keys: kv.keys.at(),
        values: kv.values.at(),
        key_scales,
        value_scales,
        spans: batch.span_words(),
        pages: batch.pages(),
        partials,
        tile_partials,
        firsts,
        stride: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        page_shift: kv.shape.page_size.trailing_zeros(),
        scale: heads.scale * LOG2_E,
        window: window(heads),
        sequences: sequences as u32,
    };
    let launch = Launch::blocks(blocks, 32 * form.warps).shared(form.shared());
    queue.launch(form.kernel, launch, args);
    let args = FlashStreamFold {
        partials,
        tile_partials,
        firsts,
        spans: batch.span_words(),
        out,
        lse,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        window: window(heads),
        sequences: sequences as u32,
        stream_warps: warps as u32,
        output: output as u32,
    };
    let kernel = if hd == 64 { kernels::flash_stream_fold_64 } else { kernels::flash_stream_fold_128 };
    let tasks = sequences * heads.heads * hd / 32;
    queue.launch(kernel, Launch::blocks(tasks.div_ceil(FOLD_WARPS), 32 * FOLD_WARPS), args);
}
