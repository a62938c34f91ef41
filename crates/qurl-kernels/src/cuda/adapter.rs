//! Low-rank updates beside linear layers: `y += (x A^T) B^T`, and their backward pass.
//!
//! Both products are GEMMs of the kind that every linear layer is, so that a row's bits do not depend on the
//! batch. What A reads is what the layer's own GEMM reads where that is in the same format, else the rows in
//! full once more. Layers of several modules have one A with the rows of all of them and a block-diagonal B:
//! its zeros cost little beside the launches that a GEMM for each module would take.

use super::bits4::operand_format;
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::kernels::{self, ScaleBlock};
use super::launch::Launch;
use super::linear::{self, Operand, Source, operand};
use super::linear_backward::{converted, input_gradient, weight_gradient};
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::ops::{Adapter, AdapterBackward, Output, Spread};
use crate::types::{AdapterBlock, AdapterBlocks};

/// One block: from the stacked matrix to the block-diagonal one, or back and added.
fn scale_block(
    queue: &mut CudaQueue,
    (from, from_stride): (DevicePtr, usize),
    (to, to_stride): (DevicePtr, usize),
    (rows, columns): (usize, usize),
    factor: f32,
    add: bool,
) {
    let (from_stride, to_stride) = (from_stride as u32, to_stride as u32);
    let (rows, columns) = (rows as u32, columns as u32);
    let args = ScaleBlock { from, from_stride, to, to_stride, rows, columns, factor, add: u32::from(add) };
    queue.launch(kernels::scale_block, Launch::elements(rows as usize * columns as usize), args);
}

/// The blocks with the numbers before each in the stacked and in the block-diagonal matrix.
fn places(blocks: &AdapterBlocks) -> impl Iterator<Item = (AdapterBlock, u64, u64)> {
    let mut before = 0;
    blocks.blocks.iter().map(move |block| {
        let stacked = before;
        before += block.outputs * blocks.rank;
        (*block, 4 * stacked as u64, 4 * (block.first * blocks.width + block.at) as u64)
    })
}

/// [`crate::Queue::spread`]
pub(super) fn spread(queue: &mut CudaQueue, args: Spread<Cuda>) {
    let Spread { from, blocks, n, to } = args;
    let AdapterBlocks { rank, width, scale, .. } = *blocks;
    assert!(from.len >= blocks.stacked() && to.len >= n * width, "spread: lengths");
    queue.fill_bytes(to.at(), 0, 4 * n * width);
    for (block, stacked, diagonal) in places(blocks) {
        let (from, to) = ((from.at() + stacked, rank), (to.at() + diagonal, width));
        scale_block(queue, from, to, (block.outputs, rank), scale, false);
    }
}

/// `y[rows, n] += (x A^T) B^T`. `read` is what the layer's own GEMM has read, and `source` where that came
/// from.
pub(super) fn forward(
    queue: &mut CudaQueue,
    adapter: Option<Adapter<Cuda>>,
    (w, read): (&CudaWeight, Operand),
    source: Source,
    rows: usize,
    y: DevicePtr,
) {
    let Some(Adapter { a, b }) = adapter else { return };
    check(w, a, b);
    let x =
        if operand_format(w.format) == a.format { read } else { operand(queue, a.format, source, rows, a.k) };
    let u = projected(queue, x, rows, a, b);
    linear::gemm(queue, u, rows, b, 0, Output::Add, y);
}

fn check(w: &CudaWeight, a: &CudaWeight, b: &CudaWeight) {
    assert!(a.k == w.k && b.n == w.n && b.k == a.n && a.format == b.format, "adapter: shapes and formats");
}

/// `x A^T`, as the second GEMM reads it.
fn projected(queue: &mut CudaQueue, x: Operand, rows: usize, a: &CudaWeight, b: &CudaWeight) -> Operand {
    let u = queue.alloc(4 * rows * a.n);
    linear::gemm(queue, x, rows, a, 0, Output::Store, u);
    operand(queue, b.format, Source::Rows(u), rows, b.k)
}

/// `dx += dy B A`, where `dy` is in the adapter's format and `dx` in f32. Gives back `dy B`, for
/// [`weight_gradients`].
pub(super) fn add_input_gradient(
    queue: &mut CudaQueue,
    adapter: &AdapterBackward<Cuda>,
    w: &CudaWeight,
    dy: DevicePtr,
    rows: usize,
    dx: DevicePtr,
) -> DevicePtr {
    let AdapterBackward { a, b, .. } = adapter;
    check(w, a, b);
    let du = queue.alloc(4 * rows * b.k);
    input_gradient(queue, dy, rows, b, Output::Store, du);
    let du = converted(queue, b.format, du, rows, b.k);
    input_gradient(queue, du, rows, a, Output::Add, dx);
    du
}

/// `da += du^T x` and `db +=` the blocks of `dy^T (x A^T)`. `x` comes from `source`, or is there in the
/// adapter's format.
pub(super) fn weight_gradients(
    queue: &mut CudaQueue,
    adapter: AdapterBackward<Cuda>,
    x: Result<Operand, Source>,
    dy: DevicePtr,
    du: DevicePtr,
    rows: usize,
) {
    let AdapterBackward { a, b, blocks, da, db } = adapter;
    let AdapterBlocks { rank, width, scale, .. } = *blocks;
    assert!(a.n * a.k <= da.len && blocks.stacked() <= db.len && width == b.k, "adapter: gradients");
    let x = x.unwrap_or_else(|source| operand(queue, a.format, source, rows, a.k));
    weight_gradient(queue, x.data, du, rows, a, da.at());
    let u = projected(queue, x, rows, a, b);
    let dense = queue.alloc(4 * b.n * b.k);
    queue.fill_bytes(dense, 0, 4 * b.n * b.k);
    weight_gradient(queue, u.data, dy, rows, b, dense);
    for (block, stacked, diagonal) in places(blocks) {
        let (from, to) = ((dense + diagonal, width), (db.at() + stacked, rank));
        scale_block(queue, from, to, (block.outputs, rank), scale, true);
    }
}
