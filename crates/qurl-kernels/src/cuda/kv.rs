//! Keys and values of one layer in pages on the device.

use super::batch::CudaBatch;
use super::constants::{KV_BF16, KV_F32, KV_FP8, KV_INT8};
use super::context::Context;
use super::ffi::DevicePtr;
use super::kernels::{self, RopeWrite};
use super::launch::Launch;
use super::memory::Buffer;
use super::queue::CudaQueue;
use crate::types::{DeviceError, Heads, KvFormat, KvShape};
use std::sync::Arc;

/// Keys and values of one layer: `[page][kv head][slot][head_dim]`, keys and values apart, with scales where
/// the format has them.
pub struct CudaKv {
    pub(super) shape: KvShape,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
    scales: Option<(Buffer, Buffer)>,
}

/// Warps of a block that rotates and stores, a head of a row each.
const WRITING_WARPS: usize = 4;

/// The number that kernels know a format by.
pub(super) fn code(format: KvFormat) -> u32 {
    let code = match format {
        KvFormat::F32 => KV_F32,
        KvFormat::Bf16 => KV_BF16,
        KvFormat::Int8 => KV_INT8,
        KvFormat::Fp8 => KV_FP8,
    };
    code as u32
}

fn number_bytes(format: KvFormat) -> usize {
    match format {
        KvFormat::F32 => 4,
        KvFormat::Bf16 => 2,
        KvFormat::Int8 | KvFormat::Fp8 => 1,
    }
}

/// Bytes of the scale of a token and head.
fn scale_bytes(format: KvFormat) -> usize {
    match format {
        KvFormat::F32 | KvFormat::Bf16 => 0,
        KvFormat::Int8 | KvFormat::Fp8 => 4,
    }
}

impl CudaKv {
    /// Memory for pages.
    pub(super) fn new(context: &Arc<Context>, shape: KvShape) -> Result<CudaKv, DeviceError> {
        let KvShape { format, pages, page_size, kv_heads, head_dim } = shape;
        let places = pages * page_size * kv_heads;
        let buffer = || Buffer::zeros(context, places * head_dim * number_bytes(format), "keys and values");
        let scale = || Buffer::zeros(context, places * scale_bytes(format), "scales of keys and values");
        let scales = if scale_bytes(format) > 0 { Some((scale()?, scale()?)) } else { None };
        Ok(CudaKv { shape, keys: buffer()?, values: buffer()?, scales })
    }

    /// Bytes of a page.
    pub(super) fn page_bytes(shape: KvShape) -> usize {
        let KvShape { format, page_size, kv_heads, head_dim, .. } = shape;
        2 * page_size * kv_heads * (head_dim * number_bytes(format) + scale_bytes(format))
    }

    /// Addresses of the scales of keys and of values; 0 where there are none.
    pub(super) fn scales(&self) -> (DevicePtr, DevicePtr) {
        self.scales.as_ref().map_or((0, 0), |(keys, values)| (keys.at(), values.at()))
    }

    /// Copies a page to another.
    pub(super) fn copy_page(&self, queue: &mut CudaQueue, from: usize, to: usize) {
        let KvShape { format, pages, page_size, kv_heads, head_dim } = self.shape;
        assert!(from < pages && to < pages, "kv copy: page out of range");
        let places = page_size * kv_heads;
        let mut copy = |at: DevicePtr, bytes: usize| {
            queue.copy_bytes(at + (from * bytes) as u64, at + (to * bytes) as u64, bytes);
        };
        let bytes = places * head_dim * number_bytes(format);
        copy(self.keys.at(), bytes);
        copy(self.values.at(), bytes);
        if let Some((keys, values)) = &self.scales {
            copy(keys.at(), 4 * places);
            copy(values.at(), 4 * places);
        }
    }

    /// Panics where these are not the pages of a layer with such heads, or not those of a batch.
    pub(super) fn check(&self, queue: &mut CudaQueue, heads: Heads, batch: &CudaBatch) {
        let KvShape { pages, page_size, kv_heads, head_dim, .. } = self.shape;
        assert!(kv_heads == heads.kv_heads && head_dim == heads.head_dim, "attention: heads of the pages");
        queue.need(batch, |needs| {
            needs.most.page = needs.most.page.min(pages);
            needs.most.slot = needs.most.slot.min(pages * page_size);
            if !needs.page_sizes.contains(&page_size) {
                needs.page_sizes.push(page_size);
            }
        });
    }

    /// Rotates queries and keys of a batch's rows, rounds keys and values and stores them.
    pub(super) fn rope_write(
        &self,
        queue: &mut CudaQueue,
        qkv: DevicePtr,
        heads: Heads,
        batch: &CudaBatch,
        (cos, sin): (DevicePtr, DevicePtr),
    ) {
        let rows = batch.shape.rows;
        let (key_scales, value_scales) = self.scales();
        let args = RopeWrite {
            qkv,
            rows: rows as u32,
            width: heads.qkv_width() as u32,
            heads: heads.heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            positions: batch.positions(),
            cos,
            sin,
            slots: batch.slots(),
            page_size: self.shape.page_size as u32,
            format: code(self.shape.format),
            keys: self.keys.at(),
            values: self.values.at(),
            key_scales,
            value_scales,
        };
        let warps = rows * (heads.heads + 2 * heads.kv_heads);
        queue.launch(
            kernels::rope_write,
            Launch::blocks(warps.div_ceil(WRITING_WARPS), 32 * WRITING_WARPS),
            args,
        );
    }
}
