//! Sums over rows, columns and whole tensors: in parts of a fixed size, which are then added in order, so that bits depend on
//! the numbers alone.

use super::ffi::DevicePtr;
use super::gpu::Gpu;
use super::launch::args;
use super::memory::Slot;
use crate::DeviceError;
use crate::backend::Rows;
use crate::checksum::{self, BLOCK, CHAINS};

/// Rows whose column sums are one partial sum.
const PARTIAL_ROWS: usize = 64;
/// Values whose squares are one partial sum.
const SQUARES: usize = 1 << 14;
/// Blocks of a checksum that one thread block takes.
const CHECKSUM_BLOCKS: usize = 4;

/// `sums[column] += sum over rows of x (times w[row])`
pub(super) fn of_columns(gpu: &Gpu, x: DevicePtr, w: DevicePtr, rows: usize, d: usize, sums: DevicePtr) {
    let parts = rows.div_ceil(PARTIAL_ROWS);
    let partials = gpu.scratch(Slot::Partials, 4 * parts * d);
    let given = args![x, w, rows as u32, d as u32, PARTIAL_ROWS as u32, partials];
    gpu.launch("elementwise", "column_partials", [d.div_ceil(128), parts, 1], 128, 0, given);
    add_partials(gpu, partials, parts, d, sums);
}

fn add_partials(gpu: &Gpu, partials: DevicePtr, parts: usize, d: usize, sums: DevicePtr) {
    if parts > 0 {
        let given = args![partials, parts as u32, d as u32, sums];
        gpu.launch("elementwise", "add_partials", [d.div_ceil(128), 1, 1], 128, 0, given);
    }
}

/// Backward of RMSNorm over rows or heads: `dx` is added to, or replaced where it is `dy` itself.
pub(super) fn norm_backward(
    gpu: &Gpu,
    x: DevicePtr,
    gain: DevicePtr,
    rows: Rows,
    eps: f32,
    dy: DevicePtr,
    dx: DevicePtr,
    dgain: DevicePtr,
) {
    let Rows { start, outer, stride, per, width } = rows;
    let count = outer * per;
    let shape = (start as u64, per as u32, stride as u32, width as u32);
    let scales = gpu.scratch(Slot::LeftScales, 4 * count);
    let inputs = || {
        let add = u32::from(dx != dy);
        let given = args![x, gain, scales, shape.0, shape.1, shape.2, shape.3, eps, dy, dx, add];
        gpu.launch("norm", "norm_backward", [count, 1, 1], 256, 0, given);
    };
    let gains = || {
        let parts = count.div_ceil(PARTIAL_ROWS);
        let partials = gpu.scratch(Slot::Partials, 4 * parts * width);
        let many = PARTIAL_ROWS as u32;
        let given = args![x, dy, scales, shape.0, shape.1, shape.2, shape.3, count as u32, many, partials];
        gpu.launch("norm", "norm_gain_partials", [parts, width.div_ceil(128), 1], 128, 0, given);
        add_partials(gpu, partials, parts, width, dgain);
    };
    // The gain's gradient needs the rows' scales, which the other one finds on its way, and dy, which it may replace.
    if dx == dy {
        let given = args![x, shape.0, shape.1, shape.2, shape.3, eps, scales];
        gpu.launch("norm", "norm_scales", [count, 1, 1], 256, 0, given);
        gains();
        inputs();
    } else {
        inputs();
        gains();
    }
}

/// Sum of the squares of tensors, given by address and length. All are asked for before the first is waited for.
pub(super) fn squares(
    gpu: &Gpu,
    tensors: impl ExactSizeIterator<Item = (DevicePtr, usize)>,
) -> Result<f64, DeviceError> {
    let mut sums = vec![0.0f64; tensors.len()];
    if sums.is_empty() {
        return Ok(0.0);
    }
    let totals = gpu.scratch(Slot::Results, 8 * sums.len());
    for ((x, len), total) in tensors.zip((totals..).step_by(8)) {
        let parts = len.div_ceil(SQUARES);
        let partials = gpu.scratch(Slot::Partials, 8 * parts);
        let given = args![x, len, SQUARES as u32, partials];
        gpu.launch("optim", "square_partials", [parts, 1, 1], 256, 0, given);
        gpu.launch("optim", "sum_doubles", [1, 1, 1], 256, 0, args![partials, parts as u32, total]);
    }
    gpu.read(totals, &mut sums)?;
    Ok(sums.iter().sum())
}

/// [`checksum::values`] of `len` values.
pub(super) fn checksum(gpu: &Gpu, x: DevicePtr, len: usize) -> Result<u64, DeviceError> {
    let mut sums = vec![0u64; len.div_ceil(BLOCK)];
    if !sums.is_empty() {
        let found = gpu.scratch(Slot::Partials, 8 * sums.len());
        let grid = [sums.len().div_ceil(CHECKSUM_BLOCKS), 1, 1];
        let threads = (CHECKSUM_BLOCKS * CHAINS) as u32;
        gpu.launch("checksum", "block_sums", grid, threads, 0, args![x, len, found]);
        gpu.read(found, &mut sums)?;
    }
    Ok(checksum::whole(len, sums.into_iter()))
}
