//! Backward of linear layers, with the norm before them.
//!
//! A gradient that several GEMMs read is brought into their format once, and what only GEMMs read is made in
//! it at once: in bf16 a training step would otherwise spend a tenth of its time on conversions. Values are
//! rounded as they would be by themselves, so the bits are those of the parts
//! (`tests/kernels/cuda_fused.rs`).

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
use crate::ops::{LinearBackward, NormBackward};
use crate::types::{Format, Rows};

/// Where a gradient is that is wanted.
pub(super) fn address(tensor: Option<&mut CudaTensor>) -> Option<DevicePtr> {
    tensor.map(|tensor| tensor.at())
}

/// `dx[rows, k] = dy[rows, n] W`; `dy` is in the weights' format.
pub(super) fn input_gradient(
    queue: &mut CudaQueue,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dx: DevicePtr,
) {
    assert!(w.trained, "weights packed for inference have no input gradient");
    let (n, k, weights) = (w.n, w.k, w.rows());
    if w.format == Format::Bf16
        && Lt::takes(n, k)
        && queue.with_lt(|lt, queue| lt.input_gradient(queue, dy, weights, rows, n, k, dx, Number::F32))
    {
        return;
    }
    let gemm = PlainGemm {
        a: (dy, n, 1),
        b: (weights, 1, k),
        sizes: (rows, k, n),
        scales: (0, 0),
        bias: 0,
        add: false,
        out: dx,
    };
    gemm.run(queue, w.format);
}

/// [`input_gradient`] of bf16 weights as an operand in bf16, rounded once.
pub(super) fn input_gradient_bf16(
    queue: &mut CudaQueue,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
) -> DevicePtr {
    assert!(w.trained && w.format == Format::Bf16, "a gradient in bf16 is that of trained bf16 weights");
    let (n, k, weights) = (w.n, w.k, w.rows());
    let dx = Operand::alloc(queue, Format::Bf16, rows, k).data;
    if Lt::takes(n, k)
        && queue.with_lt(|lt, queue| lt.input_gradient(queue, dy, weights, rows, n, k, dx, Number::Bf16))
    {
        return dx;
    }
    let full = queue.alloc(4 * rows * k);
    input_gradient(queue, dy, rows, w, full);
    round_rows(queue, full, rows, k, dx);
    dx
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
        input_gradient(queue, dy, rows, w, dx);
    }
}

/// [`crate::Queue::linear_backward`]
pub(super) fn linear_backward(queue: &mut CudaQueue, args: LinearBackward<Cuda>) {
    let LinearBackward { x, rows, norm, w, dy, dw, dbias, dx } = args;
    assert!(rows * w.k <= x.len && rows * w.n <= dy.len, "linear backward: rows");
    assert!(dw.as_ref().is_none_or(|dw| w.n * w.k <= dw.len), "linear backward: weights");
    assert!(dbias.as_ref().is_none_or(|dbias| w.n <= dbias.len), "linear backward: bias");
    assert!(dx.as_ref().is_none_or(|dx| rows * w.k <= dx.len), "linear backward: input");
    let (dw, dbias, dx) = (address(dw), address(dbias), address(dx));
    let Some(NormBackward { gain, eps, dgain }) = norm else {
        return gradients(queue, Input { x: x.at(), norm: None }, dy.at(), rows, w, dw, dbias, dx);
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
        input_gradient(queue, dy, rows, w, dnormed);
        let x = norm::backward_and_normed(queue, before, dnormed, dx, dgain, w);
        return weight_gradient(queue, x, dy, rows, w, dw);
    }
    let dnormed = (dx.is_some() || dgain.is_some()).then(|| queue.alloc(4 * rows * w.k));
    let mark = queue.mark();
    let input = Input { x: x.at(), norm: Some((gain.at(), eps)) };
    gradients(queue, input, dy.at(), rows, w, dw, dbias, dnormed);
    queue.rewind(mark);
    if let Some(dy) = dnormed {
        norm::backward(queue, before, dy, dx, dgain);
    }
}
