//! A block's attention: norms of heads, rotation, keys and values into pages, attention, output projection;
//! and all of it backward. The kernels of attention itself are chosen in [`super::flash`] and
//! [`super::flash_backward`]; what those do not take goes through plain ones (`cu/attention_plain.cu`).

use super::adapter;
use super::batch::CudaBatch;
use super::bits4::operand_format;
use super::constants::PLAIN_WARPS;
use super::device::{Cuda, CudaTensor};
use super::ffi::DevicePtr;
use super::flash::{self, Decoded};
use super::flash_backward;
use super::flash_stream;
use super::kernels::{self, AttentionBackward, AttentionDeltas, AttentionForward};
use super::kv::{self, CudaKv};
use super::launch::Launch;
use super::linear::{self, Operand, Source};
use super::linear_backward::{self, Input};
use super::norm::{self, NormRows};
use super::queue::CudaQueue;
use super::weight::{CudaWeight, unsupported};
use crate::ops::{Attend, AttendBackward, KeptAttention, NormBackward, Output, QkNormBackward, Rope};
use crate::types::{Format, Heads, KvFormat, Rows};

/// The query heads, then the key heads, inside of rows `[rows, qkv]`.
fn head_rows(heads: Heads, rows: usize) -> (Rows, Rows) {
    let Heads { heads: per, kv_heads, head_dim: width, .. } = heads;
    let queries = Rows { start: 0, outer: rows, stride: heads.qkv_width(), per, width };
    (queries, Rows { start: heads.q_width(), per: kv_heads, ..queries })
}

/// Keys that a row of a layer without a window sees: more than any sequence has, and so few that kernels can
/// add and subtract positions without wrapping around to them.
const NO_WINDOW: usize = 1 << 30;

/// Keys that a row sees at most, as kernels take it: those that end with its own.
pub(super) fn window(heads: Heads) -> u32 {
    heads.window.map_or(NO_WINDOW, |window| window.min(NO_WINDOW)) as u32
}

/// Panics where heads or rows are not what the kernels take.
fn check(heads: Heads, batch: &CudaBatch) {
    assert!(heads.window != Some(0), "attention: a window without keys");
    assert!(heads.head_dim <= Heads::MAX_DIM, "attention: head dimension");
    assert!(heads.heads == heads.group() * heads.kv_heads, "attention: heads of a group");
    assert!(batch.covers, "attention: rows of no sequence");
}

/// Panics where positions of a batch are not in the tables, here or when the step is replayed.
fn rope_tables(
    queue: &mut CudaQueue,
    rope: &Rope<Cuda>,
    heads: Heads,
    batch: &CudaBatch,
) -> (DevicePtr, DevicePtr) {
    let positions = rope.cos.len.min(rope.sin.len) / (heads.head_dim / 2);
    queue.need(batch, |needs| needs.most.position = needs.most.position.min(positions));
    (rope.cos.at(), rope.sin.at())
}

/// [`crate::Queue::attend`]
pub(super) fn attend(queue: &mut CudaQueue, args: Attend<Cuda>) {
    let Attend { heads, batch, qkv, qk_norm, rope, kv, o, adapter, x, kept } = args;
    let rows = batch.shape.rows;
    check(heads, batch);
    kv.check(queue, heads, batch);
    assert!(rows * heads.qkv_width() <= qkv.len, "attention: queries, keys and values");
    assert!(o.k == heads.q_width() && rows * o.n <= x.len, "attention: output projection");
    let tables = rope_tables(queue, &rope, heads, batch);
    let mut kept = kept;
    if let Some(norms) = qk_norm {
        assert!(norms.q.gain.len == heads.head_dim && norms.k.gain.len == heads.head_dim, "attention: gains");
        if let Some(raw) = kept.as_mut().and_then(|kept| kept.raw.as_mut()) {
            assert!(rows * heads.qkv_width() <= raw.len, "attention: kept queries, keys and values");
            queue.copy_bytes(qkv.at(), raw.at(), 4 * rows * heads.qkv_width());
        }
        let (queries, keys) = head_rows(heads, rows);
        for (rows, norm) in [(queries, norms.q), (keys, norms.k)] {
            let rows = NormRows { x: qkv.at(), gain: norm.gain.at(), rows, eps: norm.eps };
            norm::forward(queue, rows, qkv.at());
        }
    }
    let (left, out) = match kept {
        None if flash::decodes(heads, kv, &batch.shape) => {
            let in_full = adapter.is_some_and(|adapter| adapter.a.format != o.format);
            decode(queue, heads, qkv, kv, batch, tables, o, in_full)
        }
        kept => {
            let (out, lse) = match kept {
                Some(KeptAttention { out, lse, .. }) => {
                    let fits = rows * heads.q_width() <= out.len && rows * heads.heads <= lse.len;
                    assert!(fits, "attention: kept output");
                    (out.at(), lse.at())
                }
                None => (queue.alloc(4 * rows * heads.q_width()), 0),
            };
            kv.rope_write(queue, qkv.at(), heads, batch, tables);
            attention(queue, heads, qkv.at(), kv, batch, out, lse);
            (linear::operand(queue, o.format, Source::Rows(out), rows, o.k), out)
        }
    };
    linear::gemm(queue, left, rows, o, 0, Output::Add, x.at());
    adapter::forward(queue, adapter, (o, left), Source::Rows(out), rows, x.at());
}

/// One row of each sequence, in one kernel from the projections to what the output projection reads, where it
/// can; and its address in f32, where it is there or wanted `in_full`, or 0.
fn decode(
    queue: &mut CudaQueue,
    heads: Heads,
    qkv: &CudaTensor,
    kv: &CudaKv,
    batch: &CudaBatch,
    tables: (DevicePtr, DevicePtr),
    o: &CudaWeight,
    in_full: bool,
) -> (Operand, DevicePtr) {
    let rows = batch.shape.rows;
    let streams = flash_stream::streams(&queue.context, heads, kv, &batch.shape);
    let quantizes = match streams {
        true => flash_stream::quantizes(&queue.context, heads, &batch.shape),
        false => flash::quantizes(queue, heads, kv, &batch.shape),
    };
    let decoded = match operand_format(o.format) {
        Format::F32 => Decoded::Numbers(queue.alloc(4 * rows * o.k)),
        Format::Bf16 => Decoded::Rounded(Operand::alloc(queue, Format::Bf16, rows, o.k)),
        Format::Int8 | Format::Fp8 => match quantizes && !in_full {
            true => Decoded::Quantized(o.format, Operand::alloc(queue, o.format, rows, o.k)),
            false => Decoded::Numbers(queue.alloc(4 * rows * o.k)),
        },
        Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(o.format),
    };
    if streams {
        kv.rope_write(queue, qkv.at(), heads, batch, tables);
        flash_stream::forward(queue, heads, qkv.at(), kv, batch, decoded, 0);
    } else {
        flash::decode(queue, heads, qkv.at(), kv, batch, decoded, 0, Some(tables));
    }
    match decoded {
        Decoded::Numbers(out) => (linear::operand(queue, o.format, Source::Rows(out), rows, o.k), out),
        Decoded::Rounded(left) | Decoded::Quantized(_, left) => (left, 0),
    }
}

/// Causal attention of the rows of all sequences, whose keys and values are in the pages.
fn attention(
    queue: &mut CudaQueue,
    heads: Heads,
    qkv: DevicePtr,
    kv: &CudaKv,
    batch: &CudaBatch,
    out: DevicePtr,
    lse: DevicePtr,
) {
    if flash::takes(heads, kv) {
        return flash::forward(queue, heads, qkv, kv, batch, out, lse);
    }
    let rows = batch.shape.rows;
    let (key_scales, value_scales) = kv.scales();
    let args = AttentionForward {
        qkv,
        width: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        group: heads.group() as u32,
        head_dim: heads.head_dim as u32,
        scale: heads.scale,
        spans: batch.span_words(),
        span_count: batch.shape.sequences as u32,
        pages: batch.pages(),
        page_size: kv.shape.page_size as u32,
        format: kv::code(kv.shape.format),
        keys: kv.keys.at(),
        values: kv.values.at(),
        key_scales,
        value_scales,
        rows: rows as u32,
        window: window(heads),
        out,
        lse,
    };
    queue.launch(kernels::attention_forward, warps(rows * heads.heads), args);
}

/// A warp for each task of the plain kernels.
fn warps(tasks: usize) -> Launch {
    Launch::blocks(tasks.div_ceil(PLAIN_WARPS), 32 * PLAIN_WARPS)
}

/// [`crate::Queue::attend_backward`]
pub(super) fn attend_backward(queue: &mut CudaQueue, args: AttendBackward<Cuda>) {
    let AttendBackward { heads, batch, kv_format, qkv, qk_norm, rope, out, lse, o, dx, d_o, dqkv, .. } = args;
    let (rows, width) = (batch.shape.rows, heads.q_width());
    check(heads, batch);
    assert!(batch.spans.iter().all(|span| span.position == 0), "attention backward: whole sequences");
    assert!(
        rows * heads.qkv_width() <= qkv.len.min(dqkv.len),
        "attention backward: queries, keys and values"
    );
    assert!(rows * width <= out.len && rows * heads.heads <= lse.len, "attention backward: kept output");
    assert!(o.k == width && rows * o.n <= dx.len, "attention backward: output projection");
    assert!(d_o.as_ref().is_none_or(|d_o| o.n * o.k <= d_o.len), "attention backward: weights");
    let (cos, sin) = rope_tables(queue, &rope, heads, batch);
    let dout = queue.alloc(4 * rows * width);
    let mark = queue.mark();
    let input = Input { x: out.at(), norm: None };
    let d_o = d_o.map(|d_o| d_o.at());
    linear_backward::gradients(queue, input, dx.at(), rows, o, d_o, None, Some(dout));
    linear_backward::adapted(queue, args.adapter, Source::Rows(out.at()), dx.at(), rows, o, Some(dout));
    queue.rewind(mark);

    let gradients = Gradients { qkv: qkv.at(), out: out.at(), dout, lse: lse.at(), dqkv: dqkv.at() };
    match kv_format {
        KvFormat::Bf16 | KvFormat::Int8 | KvFormat::Fp8 if flash_backward::takes(heads) => {
            flash_backward::backward(queue, heads, batch, &gradients);
        }
        KvFormat::F32 | KvFormat::Bf16 | KvFormat::Int8 | KvFormat::Fp8 => {
            plain_backward(queue, heads, batch, &gradients);
        }
    }
    queue.rewind(mark);

    let args = kernels::Rope {
        x: dqkv.at(),
        stride: heads.qkv_width() as u32,
        heads: (heads.heads + heads.kv_heads) as u32,
        half: (heads.head_dim / 2) as u32,
        positions: batch.positions(),
        cos,
        sin,
        inverse: 1,
    };
    queue.launch(kernels::rope, Launch::blocks(rows, 256), args);
    if let Some(QkNormBackward { raw, q, k }) = qk_norm {
        assert!(rows * heads.qkv_width() <= raw.len, "attention backward: before the norms");
        let (queries, keys) = head_rows(heads, rows);
        for (rows, NormBackward { gain, eps, dgain }) in [(queries, q), (keys, k)] {
            let fits = |gain: &CudaTensor| gain.len == heads.head_dim;
            assert!(fits(gain) && dgain.as_deref().is_none_or(fits), "attention backward: gains");
            let rows = NormRows { x: raw.at(), gain: gain.at(), rows, eps };
            norm::backward(queue, rows, dqkv.at(), Some(dqkv.at()), dgain.map(|dgain| dgain.at()));
        }
    }
}

/// What the backward pass of attention itself reads and writes.
pub(super) struct Gradients {
    pub qkv: DevicePtr,
    pub out: DevicePtr,
    pub dout: DevicePtr,
    pub lse: DevicePtr,
    /// Overwritten.
    pub dqkv: DevicePtr,
}

fn plain_backward(queue: &mut CudaQueue, heads: Heads, batch: &CudaBatch, gradients: &Gradients) {
    let Gradients { qkv, out, dout, lse, dqkv } = *gradients;
    let rows = batch.shape.rows;
    let count = rows * heads.heads;
    let deltas = queue.alloc(4 * count);
    let args = AttentionDeltas { out, dout, count: count as u32, head_dim: heads.head_dim as u32, deltas };
    queue.launch(kernels::attention_deltas, warps(count), args);
    let args = AttentionBackward {
        qkv,
        width: heads.qkv_width() as u32,
        heads: heads.heads as u32,
        group: heads.group() as u32,
        head_dim: heads.head_dim as u32,
        scale: heads.scale,
        spans: batch.span_words(),
        span_count: batch.shape.sequences as u32,
        rows: rows as u32,
        window: window(heads),
        dout,
        lse,
        deltas,
        dqkv,
    };
    queue.launch(kernels::attention_backward_queries, warps(count), args);
    queue.launch(kernels::attention_backward_keys, warps(rows * heads.kv_heads), args);
}
