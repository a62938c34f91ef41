//! Sums over columns and whole tensors: in parts of a fixed size, which are then added in order, so that bits depend on the
//! numbers alone.

use super::device::CudaTensor;
use super::ffi::DevicePtr;
use super::launch::args;
use super::queue::CudaQueue;
use crate::checksum::{self, BLOCK, CHAINS};
use crate::types::DeviceError;

/// Rows whose column sums are one partial sum.
pub(super) const PARTIAL_ROWS: usize = 64;
/// Values whose squares are one partial sum.
const SQUARES: usize = 1 << 14;
/// Blocks of a checksum that one thread block takes.
const CHECKSUM_BLOCKS: usize = 4;

/// `sums[column] += sum over rows of x (times w[row])`
pub(super) fn of_columns(
    queue: &mut CudaQueue,
    x: DevicePtr,
    w: DevicePtr,
    rows: usize,
    d: usize,
    sums: DevicePtr,
) {
    let parts = rows.div_ceil(PARTIAL_ROWS);
    let partials = queue.alloc(4 * parts * d);
    let given = args![x, w, rows as u32, d as u32, PARTIAL_ROWS as u32, partials];
    queue.launch("elementwise", "column_partials", [d.div_ceil(128), parts, 1], 128, 0, given);
    add_partials(queue, partials, parts, d, sums);
}

/// `sums[column] += sum over parts of partials`
pub(super) fn add_partials(
    queue: &mut CudaQueue,
    partials: DevicePtr,
    parts: usize,
    d: usize,
    sums: DevicePtr,
) {
    if parts > 0 {
        let given = args![partials, parts as u32, d as u32, sums];
        queue.launch("elementwise", "add_partials", [d.div_ceil(128), 1, 1], 128, 0, given);
    }
}

/// [`crate::Queue::sum_squares`]: all are issued before the first is waited for.
pub(super) fn squares(queue: &mut CudaQueue, tensors: &[&CudaTensor]) -> Result<f64, DeviceError> {
    let mut sums = vec![0.0f64; tensors.len()];
    let totals = queue.alloc(8 * sums.len());
    let mark = queue.mark();
    for (tensor, total) in tensors.iter().zip((totals..).step_by(8)) {
        queue.rewind(mark);
        let parts = tensor.len.div_ceil(SQUARES);
        let partials = queue.alloc(8 * parts);
        let given = args![tensor.at(), tensor.len, SQUARES as u32, partials];
        queue.launch("optim", "square_partials", [parts, 1, 1], 256, 0, given);
        queue.launch("optim", "sum_doubles", [1, 1, 1], 256, 0, args![partials, parts as u32, total]);
    }
    queue.read_values(totals, &mut sums)?;
    Ok(sums.iter().sum())
}

/// [`crate::Queue::checksum`]
pub(super) fn checksum(queue: &mut CudaQueue, tensor: &CudaTensor) -> Result<u64, DeviceError> {
    let mut sums = vec![0u64; tensor.len.div_ceil(BLOCK)];
    let found = queue.alloc(8 * sums.len());
    let grid = [sums.len().div_ceil(CHECKSUM_BLOCKS), 1, 1];
    let threads = (CHECKSUM_BLOCKS * CHAINS) as u32;
    queue.launch("checksum", "block_sums", grid, threads, 0, args![tensor.at(), tensor.len, found]);
    queue.read_values(found, &mut sums)?;
    Ok(checksum::whole(tensor.len, sums.into_iter()))
}
