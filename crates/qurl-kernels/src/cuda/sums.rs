//! Sums over columns and whole tensors: in parts of a fixed size, which are then added in order, so that bits
//! depend on the numbers alone.

use super::constants::{ADDING_WARPS, CHECKSUM_CHAINS, SUM_THREADS};
use super::device::{Cuda, CudaTensor};
use super::ffi::DevicePtr;
use super::kernels::{self, AddPartials, AddPieces, BlockSums, ColumnPartials, SquarePartials, SumDoubles};
use super::launch::Launch;
use super::queue::CudaQueue;
use crate::checksum::{self, BLOCK};
use crate::ops::{Output, Slice};
use crate::types::{DeviceError, SQUARES_BLOCK};

/// Rows whose column sums are one partial sum.
pub(super) const PARTIAL_ROWS: usize = 64;
/// Most pieces that are added in one launch: ranks of a run.
const MAX_PIECES: usize = 1 << 12;
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

/// [`crate::Queue::add`] and [`crate::Queue::add_pieces`]: a binary tree over `count` pieces of `len` values.
pub(super) fn pieces(
    queue: &mut CudaQueue,
    pieces: DevicePtr,
    count: usize,
    len: usize,
    output: Output,
    to: DevicePtr,
) {
    assert!(count.is_power_of_two() && count <= MAX_PIECES, "add_pieces: {count} pieces");
    if len > 0 {
        let add = u32::from(output == Output::Add);
        let args = AddPieces { pieces, count: count as u32, len: len as u64, add, to };
        queue.launch(kernels::add_pieces, Launch::elements(len.min(1 << 22)), args);
    }
}

/// Partial sums of the squares of places and lengths, and where those of each begin and end.
fn square_partials(queue: &mut CudaQueue, places: &[(DevicePtr, usize)]) -> (DevicePtr, Vec<u32>) {
    let parts = |len: usize| len.div_ceil(SQUARES_BLOCK);
    let partials = queue.alloc(8 * places.iter().map(|&(_, len)| parts(len)).sum::<usize>());
    let mut starts = vec![0u32];
    for &(x, len) in places {
        let (start, blocks) = (starts[starts.len() - 1], parts(len));
        let (count, partials) = (len as u64, partials + 8 * u64::from(start));
        let args = SquarePartials { x, count, per: SQUARES_BLOCK as u32, partials };
        if blocks > 0 {
            queue.launch(kernels::square_partials, Launch::blocks(blocks, SUM_THREADS), args);
        }
        starts.push(start + blocks as u32);
    }
    (partials, starts)
}

/// The sum of the partial sums of each tensor, and of these.
fn sum_partials(queue: &mut CudaQueue, partials: DevicePtr, starts: &[u32]) -> Result<f64, DeviceError> {
    let mut sums = vec![0.0f64; starts.len() - 1];
    let (staged, out) = (queue.stage(starts), queue.alloc(8 * sums.len()));
    let args = SumDoubles { x: partials, starts: staged, out };
    queue.launch(kernels::sum_doubles, Launch::blocks(sums.len(), SUM_THREADS), args);
    queue.read_values(out, &mut sums)?;
    Ok(sums.iter().sum())
}

/// [`crate::Queue::sum_squares`]: partial sums tensor by tensor, then the sums of all in one launch.
pub(super) fn squares(queue: &mut CudaQueue, tensors: &[&CudaTensor]) -> Result<f64, DeviceError> {
    if tensors.is_empty() {
        return Ok(0.0);
    }
    let places: Vec<_> = tensors.iter().map(|tensor| (tensor.at(), tensor.len)).collect();
    let (partials, starts) = square_partials(queue, &places);
    sum_partials(queue, partials, &starts)
}

/// [`crate::Queue::block_squares`]
pub(super) fn block_squares(
    queue: &mut CudaQueue,
    slices: &[Slice<Cuda>],
) -> Result<Vec<Vec<f64>>, DeviceError> {
    let place = |slice: &Slice<Cuda>| {
        assert!(slice.at + slice.len <= slice.tensor.len, "block_squares: length");
        (slice.tensor.at() + 4 * slice.at as u64, slice.len)
    };
    let places: Vec<_> = slices.iter().map(place).collect();
    let (partials, starts) = square_partials(queue, &places);
    let mut all = vec![0.0f64; starts.last().map_or(0, |&end| end as usize)];
    queue.read_values(partials, &mut all)?;
    Ok(starts.windows(2).map(|ends| all[ends[0] as usize..ends[1] as usize].to_vec()).collect())
}

/// [`crate::Queue::add_block_squares`]: the last step of [`squares`] on partial sums from elsewhere.
pub(super) fn add_block_squares(queue: &mut CudaQueue, blocks: &[Vec<f64>]) -> Result<f64, DeviceError> {
    if blocks.is_empty() {
        return Ok(0.0);
    }
    let all: Vec<f64> = blocks.concat();
    let mut starts = vec![0u32];
    starts.extend(blocks.iter().scan(0, |end, blocks| {
        *end += blocks.len() as u32;
        Some(*end)
    }));
    let partials = queue.alloc(8 * all.len());
    queue.write_values(partials, &all);
    sum_partials(queue, partials, &starts)
}

/// [`crate::Queue::checksum`]
pub(super) fn checksum(queue: &mut CudaQueue, tensor: &CudaTensor) -> Result<u64, DeviceError> {
    let mut sums = vec![0u64; tensor.len.div_ceil(BLOCK)];
    if sums.is_empty() {
        return Ok(checksum::whole(0, std::iter::empty())); // a rank may have no piece of a small tensor
    }
    let found = queue.alloc(8 * sums.len());
    let launch = Launch::blocks(sums.len().div_ceil(CHECKSUM_BLOCKS), CHECKSUM_BLOCKS * CHECKSUM_CHAINS);
    let args = BlockSums { x: tensor.at(), count: tensor.len as u64, sums: found };
    queue.launch(kernels::block_sums, launch, args);
    queue.read_values(found, &mut sums)?;
    Ok(checksum::whole(tensor.len, sums.into_iter()))
}
