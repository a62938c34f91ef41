//! Sums over columns and whole tensors: in parts of a fixed size, which are then added in order, so that bits
//! depend on the numbers alone.

use super::constants::{ADDING_WARPS, CHECKSUM_CHAINS, SUM_THREADS};
use super::device::CudaTensor;
use super::ffi::DevicePtr;
use super::kernels::{self, AddPartials, BlockSums, ColumnPartials, SquarePartials, SumDoubles};
use super::launch::Launch;
use super::queue::CudaQueue;
use crate::checksum::{self, BLOCK};
use crate::types::DeviceError;

/// Rows whose column sums are one partial sum.
pub(super) const PARTIAL_ROWS: usize = 64;
/// Values whose squares are one partial sum.
const SQUARES: usize = 1 << 14;
/// Blocks of a checksum that one thread block takes.
const CHECKSUM_BLOCKS: usize = 4;
/// Threads of a block of column sums.
pub(super) const COLUMN_THREADS: usize = 128;

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
    let args = ColumnPartials { x, w, rows: rows as u32, d: d as u32, per: PARTIAL_ROWS as u32, partials };
    let launch = Launch::grid([d.div_ceil(COLUMN_THREADS), parts, 1], COLUMN_THREADS);
    queue.launch(kernels::column_partials, launch, args);
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
        let args = AddPartials { partials, parts: parts as u32, d: d as u32, sums };
        queue.launch(kernels::add_partials, Launch::blocks(d.div_ceil(32), 32 * ADDING_WARPS), args);
    }
}

/// [`crate::Queue::sum_squares`]: partial sums tensor by tensor, then the sums of all in one launch.
pub(super) fn squares(queue: &mut CudaQueue, tensors: &[&CudaTensor]) -> Result<f64, DeviceError> {
    if tensors.is_empty() {
        return Ok(0.0);
    }
    let parts = |tensor: &&CudaTensor| tensor.len.div_ceil(SQUARES);
    let partials = queue.alloc(8 * tensors.iter().map(parts).sum::<usize>());
    // Where the partial sums of each tensor begin and end.
    let mut starts = vec![0u32];
    for tensor in tensors {
        let (start, blocks) = (starts[starts.len() - 1], parts(tensor));
        let (x, count, partials) = (tensor.at(), tensor.len as u64, partials + 8 * u64::from(start));
        let args = SquarePartials { x, count, per: SQUARES as u32, partials };
        queue.launch(kernels::square_partials, Launch::blocks(blocks, SUM_THREADS), args);
        starts.push(start + blocks as u32);
    }
    let mut sums = vec![0.0f64; tensors.len()];
    let (starts, out) = (queue.stage(&starts), queue.alloc(8 * sums.len()));
    let args = SumDoubles { x: partials, starts, out };
    queue.launch(kernels::sum_doubles, Launch::blocks(tensors.len(), SUM_THREADS), args);
    queue.read_values(out, &mut sums)?;
    Ok(sums.iter().sum())
}

/// [`crate::Queue::checksum`]
pub(super) fn checksum(queue: &mut CudaQueue, tensor: &CudaTensor) -> Result<u64, DeviceError> {
    let mut sums = vec![0u64; tensor.len.div_ceil(BLOCK)];
    let found = queue.alloc(8 * sums.len());
    let launch = Launch::blocks(sums.len().div_ceil(CHECKSUM_BLOCKS), CHECKSUM_BLOCKS * CHECKSUM_CHAINS);
    let args = BlockSums { x: tensor.at(), count: tensor.len as u64, sums: found };
    queue.launch(kernels::block_sums, launch, args);
    queue.read_values(found, &mut sums)?;
    Ok(checksum::whole(tensor.len, sums.into_iter()))
}
