//! Keys and values of one layer in pages on the device, and attention over them.

use super::ffi::DevicePtr;
use super::gpu::{Gpu, Mode};
use super::launch::args;
use super::memory::{Buffer, Slot};
use super::{flash, flash_backward};
use crate::DeviceError;
use crate::backend::{Heads, KvFormat, Span};
use std::sync::Arc;

/// Keys and values of one layer: `[page][kv head][slot][head_dim]`, keys and values apart, with scales where the format
/// has them.
pub struct CudaKv {
    pub(super) format: KvFormat,
    pub(super) pages: usize,
    pub(super) page_size: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
    scales: Option<(Buffer, Buffer)>,
}

/// The number that kernels know a format by.
pub(super) fn code(format: KvFormat) -> u32 {
    match format {
        KvFormat::F32 => 0,
        KvFormat::Bf16 => 1,
        KvFormat::Int8 => 2,
        KvFormat::Fp8 => 3,
    }
}

fn number_bytes(format: KvFormat) -> usize {
    match format {
        KvFormat::F32 => 4,
        KvFormat::Bf16 => 2,
        KvFormat::Int8 | KvFormat::Fp8 => 1,
    }
}

impl CudaKv {
    /// Room for `pages` pages.
    pub fn new(
        gpu: &Arc<Gpu>,
        format: KvFormat,
        pages: usize,
        page_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<CudaKv, DeviceError> {
        let places = pages * page_size * kv_heads;
        let bytes = places * head_dim * number_bytes(format);
        let buffer = || Buffer::zeros(gpu, bytes, "keys and values");
        let scale = || Buffer::zeros(gpu, 4 * places, "scales of keys and values");
        let scaled = matches!(format, KvFormat::Int8 | KvFormat::Fp8);
        let scales = if scaled { Some((scale()?, scale()?)) } else { None };
        Ok(CudaKv {
            format,
            pages,
            page_size,
            kv_heads,
            head_dim,
            keys: buffer()?,
            values: buffer()?,
            scales,
        })
    }

    /// Bytes of a page.
    pub fn page_bytes(format: KvFormat, page_size: usize, kv_heads: usize, head_dim: usize) -> usize {
        let scale = if matches!(format, KvFormat::Int8 | KvFormat::Fp8) { 4 } else { 0 };
        2 * page_size * kv_heads * (head_dim * number_bytes(format) + scale)
    }

    /// Addresses of the scales of keys and of values; 0 where there are none.
    pub(super) fn scales(&self) -> (DevicePtr, DevicePtr) {
        self.scales.as_ref().map_or((0, 0), |(keys, values)| (keys.at(), values.at()))
    }

    /// Copies a page to another.
    pub(super) fn copy_page(&self, gpu: &Gpu, from: usize, to: usize) {
        assert!(from < self.pages && to < self.pages, "kv copy: page out of range");
        let places = self.page_size * self.kv_heads;
        let copy = |at: DevicePtr, bytes: usize| {
            gpu.copy(at + (from * bytes) as u64, at + (to * bytes) as u64, bytes);
        };
        let bytes = places * self.head_dim * number_bytes(self.format);
        copy(self.keys.at(), bytes);
        copy(self.values.at(), bytes);
        if let Some((keys, values)) = &self.scales {
            copy(keys.at(), 4 * places);
            copy(values.at(), 4 * places);
        }
    }

    /// Stores the keys and values of rows.
    pub(super) fn write(&self, gpu: &Gpu, qkv: DevicePtr, heads: Heads, slots: &[u32]) {
        let in_range = slots.iter().all(|&s| (s as usize) < self.pages * self.page_size);
        assert!(in_range, "kv write: slot out of range");
        let (rows, slots) = (slots.len(), gpu.stage(slots));
        let (key_scales, value_scales) = self.scales();
        let given = args![
            qkv,
            rows as u32,
            heads.qkv_width() as u32,
            (heads.heads * heads.head_dim) as u32,
            self.kv_heads as u32,
            self.head_dim as u32,
            slots,
            self.page_size as u32,
            code(self.format),
            self.keys.at(),
            self.values.at(),
            key_scales,
            value_scales,
        ];
        gpu.launch("kv", "kv_write", [(rows * 2 * self.kv_heads).div_ceil(4), 1, 1], 128, 0, given);
    }

    /// Rotates queries and keys, rounds keys and values and stores them.
    pub(super) fn rope_write(
        &self,
        gpu: &Gpu,
        qkv: DevicePtr,
        heads: Heads,
        positions: &[u32],
        (cos, sin): (DevicePtr, DevicePtr),
        slots: &[u32],
    ) {
        let in_range = slots.iter().all(|&s| (s as usize) < self.pages * self.page_size);
        assert!(in_range && slots.len() == positions.len(), "kv write: slot out of range");
        let (rows, slots, positions) = (slots.len(), gpu.stage(slots), gpu.stage(positions));
        let (key_scales, value_scales) = self.scales();
        let given = args![
            qkv,
            rows as u32,
            heads.qkv_width() as u32,
            heads.heads as u32,
            self.kv_heads as u32,
            self.head_dim as u32,
            positions,
            cos,
            sin,
            slots,
            self.page_size as u32,
            code(self.format),
            self.keys.at(),
            self.values.at(),
            key_scales,
            value_scales,
        ];
        let warps = rows * (heads.heads + 2 * heads.kv_heads);
        gpu.launch_next("kv", "rope_write", [warps.div_ceil(4), 1, 1], 128, 0, given);
    }
}

/// Spans as the kernels read them, sorted by row.
pub(super) fn stage_spans(gpu: &Gpu, spans: &[Span]) -> DevicePtr {
    let words = |s: &Span| [s.row, s.rows, s.position, s.pages].map(|x| x as u32);
    // Usually they are sorted.
    if spans.is_sorted_by_key(|span| span.row) {
        return gpu.stage(&spans.iter().map(words).collect::<Vec<_>>());
    }
    let mut sorted = spans.to_vec();
    sorted.sort_by_key(|span| span.row);
    gpu.stage(&sorted.iter().map(words).collect::<Vec<_>>())
}

/// Panics where a span's pages are not all there.
fn check_pages(kv: &CudaKv, spans: &[Span], pages: &[u32]) {
    let last = |span: &Span| span.pages + (span.position + span.rows).div_ceil(kv.page_size);
    let inside = spans.iter().all(|span| last(span) <= pages.len());
    assert!(
        inside && pages.iter().copied().max().is_none_or(|p| (p as usize) < kv.pages),
        "attention: pages"
    );
}

/// The sequences of a step as every layer asks for them: on the device, and what the choice of kernels depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub spans: DevicePtr,
    pub pages: DevicePtr,
    /// Sequences.
    pub count: usize,
    /// Positions of the longest one, new rows included.
    pub longest: usize,
    /// Rows of the batch.
    pub rows: usize,
    /// Whether each has one new row.
    pub single: bool,
}

/// What [`Seen`] was made from.
type SeenKey = [usize; 6];

/// The last sequences of the step at hand. Inside of a step the same slices come with every layer and do not change, so
/// they are looked at once.
#[derive(Default)]
pub(super) struct LastSeen(Option<(SeenKey, Seen)>);

/// Checks sequences and brings them to the device.
pub(super) fn see(gpu: &Gpu, kv: &CudaKv, spans: &[Span], pages: &[u32]) -> Seen {
    let key =
        [spans.as_ptr() as usize, spans.len(), pages.as_ptr() as usize, pages.len(), kv.pages, kv.page_size];
    if let Some((_, seen)) = gpu.last_seen().0.filter(|(known, _)| *known == key) {
        return seen;
    }
    check_pages(kv, spans, pages);
    let seen = Seen {
        spans: stage_spans(gpu, spans),
        pages: gpu.stage(pages),
        count: spans.len(),
        longest: spans.iter().map(|s| s.position + s.rows).max().unwrap_or(0),
        rows: spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0),
        single: spans.iter().all(|s| s.rows == 1),
    };
    if gpu.lock_state().mode != Mode::Direct {
        gpu.last_seen().0 = Some((key, seen));
    }
    seen
}

/// Causal attention of the rows of all spans.
pub(super) fn attention(
    gpu: &Gpu,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    spans: &[Span],
    pages: &[u32],
    out: DevicePtr,
    lse: DevicePtr,
) {
    if flash::takes(heads, kv) {
        return flash::forward(gpu, heads, qkv, kv, spans, pages, out, lse);
    }
    let Seen { spans, pages, count, rows, .. } = see(gpu, kv, spans, pages);
    let (key_scales, value_scales) = kv.scales();
    let given = args![
        qkv,
        heads.qkv_width() as u32,
        heads.heads as u32,
        heads.group() as u32,
        heads.head_dim as u32,
        heads.scale,
        spans,
        count as u32,
        pages,
        kv.page_size as u32,
        code(kv.format),
        kv.keys.at(),
        kv.values.at(),
        key_scales,
        value_scales,
        rows as u32,
        out,
        lse,
    ];
    gpu.launch(
        "attention_plain",
        "attention_forward",
        [(rows * heads.heads).div_ceil(4), 1, 1],
        128,
        0,
        given,
    );
}

/// Backward of [`attention`] for whole sequences.
pub(super) fn attention_backward(
    gpu: &Gpu,
    heads: Heads,
    format: KvFormat,
    qkv: DevicePtr,
    spans: &[Span],
    out: DevicePtr,
    dout: DevicePtr,
    lse: DevicePtr,
    dqkv: DevicePtr,
) {
    if format != KvFormat::F32 && flash_backward::takes(heads) {
        return flash_backward::backward(gpu, heads, qkv, spans, out, dout, lse, dqkv);
    }
    let rows = spans.iter().map(|s| s.row + s.rows).max().unwrap_or(0);
    let deltas = gpu.scratch(Slot::Attention, 4 * rows * heads.heads);
    let count = rows * heads.heads;
    let given = args![out, dout, count as u32, heads.head_dim as u32, deltas];
    gpu.launch("attention_plain", "attention_deltas", [count.div_ceil(4), 1, 1], 128, 0, given);
    let given = args![
        qkv,
        heads.qkv_width() as u32,
        heads.heads as u32,
        heads.group() as u32,
        heads.head_dim as u32,
        heads.scale,
        stage_spans(gpu, spans),
        spans.len() as u32,
        rows as u32,
        dout,
        lse,
        deltas,
        dqkv,
    ];
    let grid = |tasks: usize| [tasks.div_ceil(4), 1, 1];
    gpu.launch("attention_plain", "attention_backward_queries", grid(count), 128, 0, given);
    gpu.launch("attention_plain", "attention_backward_keys", grid(rows * heads.kv_heads), 128, 0, given);
}
