//! RMSNorm of rows and of heads inside rows, and its backward pass.

use super::constants::NORM_THREADS;
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::kernels::{self, NormForward, NormGainPartials, NormScales};
use super::launch::Launch;
use super::queue::CudaQueue;
use super::sums::{self, COLUMN_THREADS, PARTIAL_ROWS};
use crate::ops::{NormBackward, RmsNorm, RmsNormBackward};
use crate::types::Rows;

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

/// Backward of [`forward`]: `dx` is added to, or replaced where it is `dy` itself; `dgain` is added to.
pub(super) fn backward(
    queue: &mut CudaQueue,
    rows: NormRows,
    dy: DevicePtr,
    dx: Option<DevicePtr>,
    dgain: Option<DevicePtr>,
) {
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
