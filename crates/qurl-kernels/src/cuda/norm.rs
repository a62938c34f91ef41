//! RMSNorm of rows and of heads inside rows, and its backward pass: in one kernel where rows are dense and
//! fit into the registers of a block, which also gives the rows after the norm, for the gradient of the
//! weights that multiplied them.

use super::constants::NORM_THREADS;
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::kernels::{self, Kernel, NormBackwardRows, NormForward, NormGainPartials, NormScales};
use super::launch::Launch;
use super::linear::Operand;
use super::linear_backward;
use super::queue::CudaQueue;
use super::sums::{self, COLUMN_THREADS, PARTIAL_ROWS};
use super::weight::CudaWeight;
use crate::ops::{NormBackward, RmsNorm, RmsNormBackward};
use crate::types::{Format, Rows};

/// Rows that are normalised, and how.
#[derive(Clone, Copy)]
pub(super) struct NormRows {
    pub x: DevicePtr,
    pub gain: DevicePtr,
    pub rows: Rows,
    pub eps: f32,
}

/// `out = rmsnorm(x) * gain`; `out` has the rows where `x` has them.
pub(super) fn forward(queue: &mut CudaQueue, rows: NormRows, out: DevicePtr) {
    let NormRows { x, gain, rows: Rows { start, outer, stride, per, width }, eps } = rows;
    let launch = Launch::blocks(outer * per, NORM_THREADS);
    let (start, per, stride, width) = (start as u64, per as u32, stride as u32, width as u32);
    queue.launch(kernels::norm_forward, launch, NormForward { x, gain, start, per, stride, width, eps, out });
}

/// Rows that a block of the backward pass has, whose gradients of the gain are one partial sum.
const FUSED_ROWS: usize = 16;

/// The kernel that does all of a backward pass of dense rows, where there is one.
fn fused(rows: Rows) -> Option<Kernel<NormBackwardRows>> {
    let Rows { start, stride, per, width, .. } = rows;
    let is_dense = start == 0 && per == 1 && stride == width && width.is_multiple_of(4);
    is_dense.then(|| width.div_ceil(4 * NORM_THREADS)).and_then(|fours| match fours {
        0 | 1 => Some(kernels::norm_backward_rows_1),
        2 => Some(kernels::norm_backward_rows_2),
        3..=4 => Some(kernels::norm_backward_rows_4),
        5..=8 => Some(kernels::norm_backward_rows_8),
        _ => None,
    })
}

/// Backward of dense rows by a kernel of [`fused`]; `normed` takes the rows after the norm in bf16, or is 0.
fn backward_fused(
    queue: &mut CudaQueue,
    kernel: Kernel<NormBackwardRows>,
    rows: NormRows,
    dy: DevicePtr,
    dx: DevicePtr,
    dgain: Option<DevicePtr>,
    normed: DevicePtr,
) {
    let NormRows { x, gain, rows: Rows { outer, width, .. }, eps } = rows;
    let parts = outer.div_ceil(FUSED_ROWS);
    let partials = dgain.map_or(0, |_| queue.alloc(4 * parts * width));
    let (rows, many) = (outer as u32, FUSED_ROWS as u32);
    let args = NormBackwardRows { x, gain, width: width as u32, eps, dy, dx, rows, many, partials, normed };
    queue.launch(kernel, Launch::blocks(parts, NORM_THREADS), args);
    if let Some(dgain) = dgain {
        sums::add_partials(queue, partials, parts, width, dgain);
    }
}

/// Backward of dense rows, `dx` and `dgain` added to, and the rows after the norm in the format of the
/// weights that multiplied them.
pub(super) fn backward_and_normed(
    queue: &mut CudaQueue,
    rows: NormRows,
    dy: DevicePtr,
    dx: DevicePtr,
    dgain: Option<DevicePtr>,
    w: &CudaWeight,
) -> DevicePtr {
    if let (Some(kernel), Format::Bf16) = (fused(rows.rows), w.format) {
        let normed = Operand::alloc(queue, Format::Bf16, rows.rows.outer, w.k).data;
        backward_fused(queue, kernel, rows, dy, dx, dgain, normed);
        return normed;
    }
    backward(queue, rows, dy, Some(dx), dgain);
    linear_backward::normed(queue, rows.x, rows.gain, rows.eps, rows.rows.outer, w)
}

/// Backward of [`forward`]: `dx` is added to, or replaced where it is `dy` itself; `dgain` is added to.
pub(super) fn backward(
    queue: &mut CudaQueue,
    rows: NormRows,
    dy: DevicePtr,
    dx: Option<DevicePtr>,
    dgain: Option<DevicePtr>,
) {
    if let (Some(kernel), Some(dx)) = (fused(rows.rows), dx.filter(|&dx| dx != dy)) {
        return backward_fused(queue, kernel, rows, dy, dx, dgain, 0);
    }
    let NormRows { x, gain, rows: Rows { start, outer, stride, per, width }, eps } = rows;
    let count = outer * per;
    let parts = count.div_ceil(PARTIAL_ROWS);
    let columns = Launch::grid([parts, width.div_ceil(COLUMN_THREADS), 1], COLUMN_THREADS);
    let rows = Launch::blocks(count, NORM_THREADS);
    let (scales, partial_bytes) = (queue.alloc(4 * count), 4 * parts * width);
    let (start, per, stride, width) = (start as u64, per as u32, stride as u32, width as u32);
    let inputs = |queue: &mut CudaQueue, dx: DevicePtr| {
        let add = u32::from(dx != dy);
        let args = kernels::NormBackward { x, gain, scales, start, per, stride, width, eps, dy, dx, add };
        queue.launch(kernels::norm_backward, rows, args);
    };
    // The gain's gradient needs the rows' scales, which the other one computes, and dy, which it may
    // replace.
    let first = dx.filter(|&dx| dx != dy);
    if let Some(dx) = first {
        inputs(queue, dx);
    }
    if let Some(dgain) = dgain {
        if first.is_none() {
            queue.launch(
                kernels::norm_scales,
                rows,
                NormScales { x, start, per, stride, width, eps, scales },
            );
        }
        let partials = queue.alloc(partial_bytes);
        let (rows, many) = (count as u32, PARTIAL_ROWS as u32);
        let args = NormGainPartials { x, dy, scales, start, per, stride, width, rows, many, partials };
        queue.launch(kernels::norm_gain_partials, columns, args);
        sums::add_partials(queue, partials, parts, width as usize, dgain);
    }
    if let Some(dx) = dx.filter(|&dx| dx == dy) {
        inputs(queue, dx);
    }
}

/// [`crate::Queue::rmsnorm`]
pub(super) fn rmsnorm(queue: &mut CudaQueue, args: RmsNorm<Cuda>) {
    let RmsNorm { x, rows, norm, out } = args;
    let width = norm.gain.len;
    assert!(rows * width <= x.len.min(out.len), "rmsnorm: rows");
    let rows = NormRows { x: x.at(), gain: norm.gain.at(), rows: Rows::dense(rows, width), eps: norm.eps };
    forward(queue, rows, out.at());
}

/// [`crate::Queue::rmsnorm_backward`]
pub(super) fn rmsnorm_backward(queue: &mut CudaQueue, args: RmsNormBackward<Cuda>) {
    let RmsNormBackward { x, rows, norm: NormBackward { gain, eps, dgain }, dy, dx } = args;
    let width = gain.len;
    assert!(rows * width <= x.len.min(dy.len).min(dx.len), "rmsnorm backward: rows");
    assert!(dgain.as_ref().is_none_or(|dgain| dgain.len == width), "rmsnorm backward: gain");
    let rows = NormRows { x: x.at(), gain: gain.at(), rows: Rows::dense(rows, width), eps };
    backward(queue, rows, dy.at(), Some(dx.at()), dgain.map(|dgain| dgain.at()));
}
