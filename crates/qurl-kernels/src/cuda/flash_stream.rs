//! Decode attention over long contexts (`cu/flash_stream.cu`): warps that stream whole splits, and a kernel
//! that folds what they found.
//!
//! It takes steps whose splits cannot all be resident. There the fused decode kernel of [`super::flash`]
//! would begin and end thousands of blocks that share little; this one keeps shared memory full of copies in
//! flight from beginning to end. What it does not do itself (rotation, storing the new row) is small beside
//! the context.

use super::attention::window;
use super::batch::{BatchShape, CudaBatch};
use super::constants::{DECODE_HEADS, FLASH_TILE, MAX_STREAM_SEQUENCES};
use super::context::{Context, HOPPER};
use super::ffi::DevicePtr;
use super::flash::{Decoded, parties, publishes, splits, takes};

use super::kernels::{self, FlashStream, FlashStreamFold, Kernel};
use super::kv::CudaKv;
use super::launch::Launch;
use super::queue::CudaQueue;
use crate::types::{Heads, KvFormat};
use std::f32::consts::LOG2_E;

/// Threads of a block that folds: a warp for each of its heads.
const FOLD_THREADS: usize = 32 * DECODE_HEADS;

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
            (KvFormat::Bf16, 64) => (kernels::flash_stream_bf16_64, 12, 2, 2 * hd),
            (KvFormat::Bf16, _) => (kernels::flash_stream_bf16_128, 6, 2, 2 * hd),
            (KvFormat::Int8, 64) => (kernels::flash_stream_int8_64, 8, 4, hd + 4),
            (KvFormat::Int8, _) => (kernels::flash_stream_int8_128, 12, 2, hd + 4),
            (KvFormat::Fp8, 64) => (kernels::flash_stream_fp8_64, 8, 4, hd + 4),
            (KvFormat::Fp8, _) => (kernels::flash_stream_fp8_128, 12, 2, hd + 4),
            (KvFormat::F32, _) => unreachable!("not taken"),
        };
        Form { kernel, warps, stages, row_bytes }
    }

    /// Bytes of shared memory of a block.
    fn shared(&self) -> usize {
        self.warps * self.stages * FLASH_TILE * self.row_bytes
    }
}

/// Whether this is the kernel for a step of one row of each sequence: where its splits, as blocks, could not
/// all be resident.
pub(super) fn streams(context: &Context, heads: Heads, kv: &CudaKv, shape: &BatchShape) -> bool {
    let splits = splits(heads, shape);
    context.generation == HOPPER
        && takes(heads, kv)
        && shape.single
        && shape.sequences <= MAX_STREAM_SEQUENCES
        && splits > 1
        && splits * parties(heads) * shape.sequences > MIN_BLOCKS_PER_SM * context.sms
}

/// From so many blocks of the fused kernel an SM on, streaming is faster:
/// `2026-11-16-h200/long/stream.txt`.
const MIN_BLOCKS_PER_SM: usize = 8;

/// Whether a step may write quantized values: blocks that fold a row publish their absmax for each other.
pub(super) fn quantizes(context: &Context, heads: Heads, shape: &BatchShape) -> bool {
    let blocks = shape.sequences * parties(heads);
    publishes(heads, shape) && blocks <= context.blocks_at_once(fold(heads).id, FOLD_THREADS, 0, 1)
}

fn fold(heads: Heads) -> Kernel<FlashStreamFold> {
    if heads.head_dim == 64 { kernels::flash_stream_fold_64 } else { kernels::flash_stream_fold_128 }
}

/// What the row of each sequence gets; its key and value are in the pages already.
pub(super) fn forward(
    queue: &mut CudaQueue,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    batch: &CudaBatch,
    out: Decoded,
    lse: DevicePtr,
) {
    let (key_scales, value_scales) = kv.scales();
    let sequences = batch.shape.sequences;
    let (output, out, out_scales) = out.parts();
    let form = Form::of(heads, kv);
    let result = 4 * DECODE_HEADS * (heads.head_dim + 4);
    let partials = queue.alloc(sequences * parties(heads) * splits(heads, &batch.shape) * result);
    let args = FlashStream {
        qkv,
        keys: kv.keys.at(),
        values: kv.values.at(),
        key_scales,
        value_scales,
        spans: batch.span_words(),
        pages: batch.pages(),
        partials,
        stride: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        page_shift: kv.shape.page_size.trailing_zeros(),
        scale: heads.scale * LOG2_E,
        window: window(heads),
        sequences: sequences as u32,
    };
    let launch = Launch::blocks(queue.context.sms, 32 * form.warps).shared(form.shared());
    queue.launch(form.kernel, launch, args);
    let args = FlashStreamFold {
        partials,
        spans: batch.span_words(),
        out,
        lse,
        heads: heads.heads as u32,
        kv_heads: heads.kv_heads as u32,
        window: window(heads),
        sequences: sequences as u32,
        output: output as u32,
        out_scales,
        absmax: queue.absmax_words(),
    };
    queue.launch(fold(heads), Launch::grid([parties(heads), sequences, 1], FOLD_THREADS), args);
}
