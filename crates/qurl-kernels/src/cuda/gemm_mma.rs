//! GEMMs with packed weights on the tensor cores of every supported device: `cu/gemm_mma.cu`.
//!
//! Hopper has its own (`gemm.rs`). For few tokens the weights are cut along k (split-K), so that all SMs have
//! work; how often depends on the matrix and the device alone, and so do a row's bits.

use super::bits4::{is_bits4, tile_bytes};
use super::constants::{BITS4_DEPTH, TILE_DEPTH, TILE_ROWS};
use super::ffi::DevicePtr;
use super::gemm::Packed;
use super::kernels::{self, GemmMma, GemmMmaBits4, GemmMmaBits4Finish, GemmMmaFinish, Kernel};
use super::launch::Launch;
use super::linear::Operand;
use super::queue::CudaQueue;
use super::weight::unsupported;
use crate::types::Format;

/// One size of the kernel, as its instances in `cu/gemm_mma.cu` have it.
struct Size {
    /// Bf16, int8, fp8.
    kernels: [Kernel<GemmMma>; 3],
    /// Int4, nvfp4.
    bits4: [Kernel<GemmMmaBits4>; 2],
    /// Results of a block.
    rows: usize,
    tokens: usize,
    threads: usize,
    stages: usize,
    /// Whether cuts are blocks of their own.
    cuts: bool,
}

/// Up to 16 tokens.
const FEW: Size = Size {
    kernels: [kernels::gemm_mma_bf16_few, kernels::gemm_mma_int8_few, kernels::gemm_mma_fp8_few],
    bits4: [kernels::gemm_mma_bits4_int4_few, kernels::gemm_mma_bits4_nvfp4_few],
    rows: 64,
    tokens: 16,
    threads: 128,
    stages: 6,
    cuts: true,
};
/// Up to 64.
const SOME: Size = Size {
    kernels: [kernels::gemm_mma_bf16_some, kernels::gemm_mma_int8_some, kernels::gemm_mma_fp8_some],
    bits4: [kernels::gemm_mma_bits4_int4_some, kernels::gemm_mma_bits4_nvfp4_some],
    rows: 64,
    tokens: 64,
    threads: 128,
    stages: 4,
    cuts: true,
};
/// More. None of the three was tuned: there was no such device.
const MANY: Size = Size {
    kernels: [kernels::gemm_mma_bf16_many, kernels::gemm_mma_int8_many, kernels::gemm_mma_fp8_many],
    bits4: [kernels::gemm_mma_bits4_int4_many, kernels::gemm_mma_bits4_nvfp4_many],
    rows: 128,
    tokens: 64,
    threads: 256,
    stages: 3,
    cuts: false,
};
const FINISH_BITS4: [Kernel<GemmMmaBits4Finish>; 2] =
    [kernels::gemm_mma_bits4_int4_finish, kernels::gemm_mma_bits4_nvfp4_finish];
const FINISH: [Kernel<GemmMmaFinish>; 3] =
    [kernels::gemm_mma_bf16_finish, kernels::gemm_mma_int8_finish, kernels::gemm_mma_fp8_finish];
/// Most cuts along k, and the fewest blocks of 128 bytes in one.
const MAX_CUTS: usize = 8;
const MIN_BLOCKS: usize = 4;

/// How often the weights are cut along k: until there are two blocks for every SM.
fn cuts(sms: usize, n: usize, blocks: usize) -> usize {
    let wanted = 2 * sms / n.div_ceil(TILE_ROWS);
    wanted.min(MAX_CUTS).min(blocks / MIN_BLOCKS).max(1)
}

/// `out[tokens, n] (+)= x W^T (+ bias)`.
pub(super) fn linear(
    queue: &mut CudaQueue,
    x: Operand,
    tokens: usize,
    w: Packed,
    bias: DevicePtr,
    add: bool,
    out: DevicePtr,
) {
    let format = match w.format {
        Format::Bf16 => 0,
        Format::Int8 => 1,
        Format::Fp8 => 2,
        Format::Int4 => 0,
        Format::Nvfp4 => 1,
        Format::F32 | Format::Fp8Block => unsupported(w.format),
    };
    let size = match tokens {
        0..=16 => FEW,
        17..=64 => SOME,
        _ => MANY,
    };
    let (n, blocks) = (w.n, w.blocks());
    let cuts = cuts(queue.context.sms, n, blocks);
    let apart = size.cuts && cuts > 1;
    let partials = if apart { queue.alloc(4 * cuts * tokens * n) } else { 0 };
    let grid = [n.div_ceil(size.rows), tokens.div_ceil(size.tokens), if apart { cuts } else { 1 }];
    let four_bits = is_bits4(w.format);
    // Of weights in four bits half a tile with all of its scales.
    let weights = match four_bits {
        true => size.rows / TILE_ROWS * (tile_bytes(w.format) - TILE_ROWS * BITS4_DEPTH / 4),
        false => size.rows * TILE_DEPTH,
    };
    let shared = size.stages * (weights + size.tokens * TILE_DEPTH);
    let results = Launch::elements(tokens * n);
    let (tokens, n, splits, add) = (tokens as u32, n as u32, cuts as u32, u32::from(add));
    let (w_scales, x_scales, k_blocks) = (w.scales, x.scales, blocks as u32);
    if four_bits {
        let (weights, x, w_scale, k) = (w.tiles, x.data, w.scales, w.k as u32);
        let args =
            GemmMmaBits4 { weights, x, w_scale, bias, out, partials, tokens, n, k, k_blocks, splits, add };
        queue.launch(size.bits4[format], Launch::grid(grid, size.threads).shared(shared), args);
        if apart {
            let args = GemmMmaBits4Finish { w_scale, bias, out, partials, tokens, n, splits, add };
            queue.launch(FINISH_BITS4[format], results, args);
        }
        return;
    }
    let args = GemmMma {
        weights: w.tiles,
        x: x.data,
        w_scales,
        x_scales,
        bias,
        out,
        partials,
        tokens,
        n,
        row_bytes: w.row_bytes() as u32,
        k_blocks,
        splits,
        add,
    };
    queue.launch(size.kernels[format], Launch::grid(grid, size.threads).shared(shared), args);
    if apart {
        let args = GemmMmaFinish { w_scales, x_scales, bias, out, partials, tokens, n, splits, add };
        queue.launch(FINISH[format], results, args);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_never_empty() {
        for (n, blocks) in [(1, 1), (64, 7), (896, 14), (4608, 56), (37_888, 28), (152_064, 56), (3584, 296)]
        {
            let cuts = cuts(108, n, blocks);
            assert!((1..=MAX_CUTS).contains(&cuts) && cuts <= blocks, "{n} {blocks}: {cuts}");
        }
    }
}
