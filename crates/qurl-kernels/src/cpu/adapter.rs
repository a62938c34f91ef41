//! Low-rank updates beside linear layers: `y += (x A^T) B^T`, and their backward pass.
//!
//! Two GEMMs of the kind that every linear layer is, so their sums are chains that do not depend on the
//! batch. Layers of several modules (queries, keys and values; gate and up projections) have one A, with the
//! rows of all modules, and a block-diagonal B: its zeros cost some arithmetic and spare strided operands.

use super::Context;
use super::buf::Aligned;
use super::device::Cpu;
use super::gemm::{self, Mode};
use crate::ops::{Adapter, AdapterBackward, Spread};
use crate::types::AdapterBlocks;

/// [`crate::Queue::spread`]
pub(super) fn spread(args: Spread<Cpu>) {
    let Spread { from, blocks, n, to } = args;
    let AdapterBlocks { rank, width, scale, .. } = *blocks;
    assert!(from.len() >= blocks.stacked() && to.len() >= n * width, "spread: lengths");
    to[..n * width].fill(0.0);
    for (stacked, at) in places(blocks) {
        let row = &from[stacked * rank..][..rank];
        to[at..at + rank].iter_mut().zip(row).for_each(|(to, x)| *to = scale * x);
    }
}

/// Rows of the stacked matrix, and where each is in the block-diagonal one.
fn places(blocks: &AdapterBlocks) -> impl Iterator<Item = (usize, usize)> {
    let outputs = blocks.blocks.iter().flat_map(|b| (b.first..b.first + b.outputs).map(|row| (row, b.at)));
    outputs.map(|(row, at)| row * blocks.width + at).enumerate()
}

/// `y[rows, n] += u B^T` with `u = x A^T`, which `project` computes.
pub(super) fn forward(
    ctx: &Context,
    adapter: Option<Adapter<Cpu>>,
    rows: usize,
    project: impl FnOnce(&super::device::CpuWeight, &mut [f32]),
    y: &mut [f32],
) {
    let Some(Adapter { a, b }) = adapter else { return };
    let mut workspace = ctx.scratch.take(rows * a.n);
    let u = workspace.floats();
    project(a, u);
    gemm::matmul(ctx, u, rows, b.right(), None, Mode::Add, y);
}

/// The first half of the backward pass, which needs no x: `du = dy B`, and `dx += du A`.
pub(super) fn input_gradient(
    ctx: &Context,
    adapter: &AdapterBackward<Cpu>,
    dy: &[f32],
    rows: usize,
    du: &mut [f32],
    dx: &mut [f32],
) {
    let AdapterBackward { a, b, .. } = adapter;
    gemm::matmul(ctx, dy, rows, b.transposed(), None, Mode::Store, du);
    gemm::matmul(ctx, du, rows, a.transposed(), None, Mode::Add, dx);
}

/// The second half: `da += du^T x` and `db +=` the blocks of `dy^T (x A^T)`.
pub(super) fn weight_gradients(
    ctx: &Context,
    adapter: AdapterBackward<Cpu>,
    x: &[f32],
    dy: &[f32],
    rows: usize,
    du: &[f32],
) {
    let AdapterBackward { a, b, blocks, da, db } = adapter;
    let precision = a.float().precision();
    gemm::weight_gradient(ctx, precision, x, du, rows, a.n, a.k, da);
    let mut workspace = ctx.scratch.take(rows * a.n);
    let u = workspace.floats();
    gemm::matmul(ctx, x, rows, a.right(), None, Mode::Store, u);
    let mut dense = ctx.scratch.take(b.n * b.k);
    let dense = dense.floats();
    dense.fill(0.0);
    gemm::weight_gradient(ctx, precision, u, dy, rows, b.n, b.k, dense);
    gather_blocks(blocks, dense, db);
}

/// Adds the gradient of the block-diagonal matrix to that of the stacked one.
fn gather_blocks(blocks: &AdapterBlocks, dense: &[f32], db: &mut Aligned<f32>) {
    let AdapterBlocks { rank, scale, .. } = *blocks;
    for (stacked, at) in places(blocks) {
        let to = &mut db[stacked * rank..][..rank];
        to.iter_mut().zip(&dense[at..at + rank]).for_each(|(to, x)| *to += scale * x);
    }
}
