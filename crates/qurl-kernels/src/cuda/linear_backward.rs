//! Backward of linear layers, with the norm before them.
//!
//! A gradient that several GEMMs read is brought into their format once, and what only GEMMs read is made in
//! it at once: in bf16 a training step would otherwise spend a tenth of its time on conversions. Values are
//! rounded as they would be by themselves, so the bits are those of the parts
//! (`tests/kernels/cuda_fused.rs`).

use super::adapter;
use super::constants::NORM_THREADS;
use super::device::{Cuda, CudaTensor};
use super::ffi::DevicePtr;
use super::kernels::{self, NormForwardBf16, RowsBf16};
use super::launch::Launch;
use super::linear::{Operand, PlainGemm, Source, conversion_threads, operand};
use super::lt::{Lt, Number};
use super::norm::{self, NormRows};
use super::queue::CudaQueue;
use super::sums;
use super::weight::CudaWeight;
use crate::ops::{AdapterBackward, LinearBackward, NormBackward, Output};
use crate::types::{Format, Rows};

/// Where a gradient is that is wanted.
pub(super) fn address(tensor: Option<&mut CudaTensor>) -> Option<DevicePtr> {
    tensor.map(|tensor| tensor.at())
}

/// The format in which gradients go into the GEMMs of weights in a format: those of quantized ones are
/// unpacked to bf16.
pub(super) fn gradient_format(format: Format) -> Format {
    if format == Format::F32 { Format::F32 } else { Format::Bf16 }
}

/// `dx[rows, k] (+)= dy[rows, n] W`; `dy` is in the weights' [`gradient_format`].
pub(super) fn input_gradient(
    queue: &mut CudaQueue,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    output: Output,
    dx: DevicePtr,
) {
    let (n, k, mark) = (w.n, w.k, queue.mark());
    let weights = w.gradient_rows(queue);
    let number = Number::F32;
    if gradient_format(w.format) == Format::Bf16
        && Lt::takes(n, k)
        && queue.with_lt(|lt, queue| lt.input_gradient(queue, dy, weights, rows, n, k, dx, output, number))
    {
        return queue.rewind(mark);
    }
    let gemm = PlainGemm {
        a: (dy, n, 1),
        b: (weights, 1, k),
        sizes: (rows, k, n),
        scales: (0, 0),
        bias: 0,
        add: output == Output::Add,
        out: dx,
    };
    gemm.run(queue, gradient_format(w.format));
    queue.rewind(mark);
}

/// [`input_gradient`] of weights whose gradients are in bf16 as an operand in bf16, rounded once.
pub(super) fn input_gradient_bf16(
    queue: &mut CudaQueue,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
) -> DevicePtr {
    assert!(gradient_format(w.format) == Format::Bf16, "gradients of these weights are not in bf16");
    let (n, k) = (w.n, w.k);
    let dx = Operand::alloc(queue, Format::Bf16, rows, k).data;
    let mark = queue.mark();
    let weights = w.gradient_rows(queue);
    let (output, number) = (Output::Store, Number::Bf16);
    if Lt::takes(n, k)
        && queue.with_lt(|lt, queue| lt.input_gradient(queue, dy, weights, rows, n, k, dx, output, number))
    {
        queue.rewind(mark);
        return dx;
    }
    queue.rewind(mark);
    let full = queue.alloc(4 * rows * k);
    input_gradient(queue, dy, rows, w, Output::Store, full);
    round_rows(queue, full, rows, k, dx);
    dx
}

/// The same with that of the adapter beside the weights; gives `dy B` of the adapter, too.
pub(super) fn adapted_input_gradient_bf16(
    queue: &mut CudaQueue,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    adapter: &AdapterBackward<Cuda>,
) -> (DevicePtr, DevicePtr) {
    let full = queue.alloc(4 * rows * w.k);
    input_gradient(queue, dy, rows, w, Output::Store, full);
    let du = adapter::add_input_gradient(queue, adapter, w, dy, rows, full);
    (converted(queue, Format::Bf16, full, rows, w.k), du)
}

/// `dw[n, k] += dy^T x`; both are in the weights' format.
pub(super) fn weight_gradient(
    queue: &mut CudaQueue,
    x: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dw: DevicePtr,
) {
    let (n, k) = (w.n, w.k);
    if w.format == Format::Bf16
        && Lt::takes(n, k)
        && queue.with_lt(|lt, queue| lt.weight_gradient(queue, x, dy, rows, n, k, dw))
    {
        return;
    }
    let gemm = PlainGemm {
        a: (dy, 1, n),
        b: (x, 1, k),
        sizes: (n, k, rows),
        scales: (0, 0),
        bias: 0,
        add: true,
        out: dw,
    };
    gemm.run(queue, w.format);
}

/// Numbers in the format of trained weights.
pub(super) fn converted(
    queue: &mut CudaQueue,
    format: Format,
    x: DevicePtr,
    rows: usize,
    width: usize,
) -> DevicePtr {
    if format == Format::F32 {
        return x;
    }
    let to = Operand::alloc(queue, Format::Bf16, rows, width).data;
    round_rows(queue, x, rows, width, to);
    to
}

/// Rows rounded to bf16.
fn round_rows(queue: &mut CudaQueue, x: DevicePtr, rows: usize, width: usize, out: DevicePtr) {
    let launch = Launch::blocks(rows, conversion_threads(width));
    queue.launch(kernels::rows_bf16, launch, RowsBf16 { x, k: width as u32, out });
}

/// RMSNorm of rows in the format of the weights that multiply them.
pub(super) fn normed(
    queue: &mut CudaQueue,
    x: DevicePtr,
    gain: DevicePtr,
    eps: f32,
    rows: usize,
    w: &CudaWeight,
) -> DevicePtr {
    match w.format {
        Format::Bf16 => {
            let to = Operand::alloc(queue, Format::Bf16, rows, w.k).data;
            let args = NormForwardBf16 { x, gain, width: w.k as u32, eps, out: to };
            queue.launch(kernels::norm_forward_bf16, Launch::blocks(rows, NORM_THREADS), args);
            to
        }
        Format::F32 => {
            let source = Source::Normed { x, gain, eps, absmax: 0 };
            operand(queue, w.format, source, rows, w.k).data
        }
        Format::Int8 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => untrained(w.format),
    }
}

/// Formats that are never trained.
pub(super) fn untrained(format: Format) -> ! {
    unreachable!("weights in {format} have no gradients")
}

/// What goes into a GEMM of a backward pass.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub x: DevicePtr,
    /// Gain and eps of the norm before the GEMM.
    pub norm: Option<(DevicePtr, f32)>,
}

/// `dw += dy^T x`, `dbias += sum dy` and `dx = dy W`, where they are wanted; `x` and `dy` are in f32.
pub(super) fn gradients(
    queue: &mut CudaQueue,
    input: Input,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dw: Option<DevicePtr>,
    dbias: Option<DevicePtr>,
    dx: Option<DevicePtr>,
) {
    let x = dw.map(|_| match input.norm {
        Some((gain, eps)) => normed(queue, input.x, gain, eps, rows, w),
        None => converted(queue, w.format, input.x, rows, w.k),
    });
    if let Some(dbias) = dbias {
        sums::of_columns(queue, dy, 0, rows, w.n, dbias);
    }
    if dw.is_none() && dx.is_none() {
        return;
    }
    let dy = converted(queue, w.format, dy, rows, w.n);
    if let (Some(dw), Some(x)) = (dw, x) {
        weight_gradient(queue, x, dy, rows, w, dw);
    }
    if let Some(dx) = dx {
        input_gradient(queue, dy, rows, w, Output::Store, dx);
    }
}

/// The gradients of the adapter beside weights, `dx` added to; `source` is what the weights' GEMM reads and
/// `dy` in f32.
pub(super) fn adapted(
    queue: &mut CudaQueue,
    adapter: Option<AdapterBackward<Cuda>>,
    source: Source,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dx: Option<DevicePtr>,
) {
    let Some(adapter) = adapter else { return };
    let Some(dx) = dx else { panic!("an adapter gives the gradient of its input") };
    let dy = converted(queue, adapter.b.format, dy, rows, w.n);
    let du = adapter::add_input_gradient(queue, &adapter, w, dy, rows, dx);
    adapter::weight_gradients(queue, adapter, Err(source), dy, du, rows);
}

/// [`crate::Queue::linear_backward`]
pub(super) fn linear_backward(queue: &mut CudaQueue, args: LinearBackward<Cuda>) {
    let LinearBackward { x, rows, norm, w, adapter, dy, dw, dbias, dx } = args;
    assert!(rows * w.k <= x.len && rows * w.n <= dy.len, "linear backward: rows");
    assert!(dw.as_ref().is_none_or(|dw| w.n * w.k <= dw.len), "linear backward: weights");
    assert!(dbias.as_ref().is_none_or(|dbias| w.n <= dbias.len), "linear backward: bias");
    assert!(dx.as_ref().is_none_or(|dx| rows * w.k <= dx.len), "linear backward: input");
    let (dw, dbias, dx) = (address(dw), address(dbias), address(dx));
    let Some(NormBackward { gain, eps, dgain }) = norm else {
        gradients(queue, Input { x: x.at(), norm: None }, dy.at(), rows, w, dw, dbias, dx);
        return adapted(queue, adapter, Source::Rows(x.at()), dy.at(), rows, w, dx);
    };
    let fits = gain.len == w.k && dgain.as_ref().is_none_or(|dgain| dgain.len == w.k);
    assert!(fits, "linear backward: gain");
    let dgain = address(dgain);
    let before = NormRows { x: x.at(), gain: gain.at(), rows: Rows::dense(rows, w.k), eps };
    if let (Some(dw), Some(dx)) = (dw, dx) {
        if let Some(dbias) = dbias {
            sums::of_columns(queue, dy.at(), 0, rows, w.n, dbias);
        }
        let (dy, dnormed) = (converted(queue, w.format, dy.at(), rows, w.n), queue.alloc(4 * rows * w.k));
        input_gradient(queue, dy, rows, w, Output::Store, dnormed);
        assert!(adapter.is_none(), "linear backward: weights beside an adapter are frozen");
        let x = norm::backward_and_normed(queue, before, dnormed, dx, dgain, w);
        return weight_gradient(queue, x, dy, rows, w, dw);
    }
    let dnormed = (dx.is_some() || dgain.is_some()).then(|| queue.alloc(4 * rows * w.k));
    let mark = queue.mark();
    let input = Input { x: x.at(), norm: Some((gain.at(), eps)) };
    gradients(queue, input, dy.at(), rows, w, dw, dbias, dnormed);
    let source = Source::Normed { x: x.at(), gain: gain.at(), eps, absmax: 0 };
    adapted(queue, adapter, source, dy.at(), rows, w, dnormed);
    queue.rewind(mark);
    if let Some(dy) = dnormed {
        norm::backward(queue, before, dy, dx, dgain);
    }
}
