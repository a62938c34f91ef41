//! GEMMs with packed weights on the tensor cores of every supported device: `cu/gemm_mma.cu`.
//!
//! Hopper has its own (`gemm.rs`). For few tokens the weights are cut along k (split-K), so that all SMs have work; how
//! often depends on the matrix and the device alone, and so do a row's bits.

use super::ffi::DevicePtr;
use super::gemm::{Packed, TILE_BYTES, TILE_ROWS};
use super::launch::args;
use super::linear::Operand;
use super::queue::CudaQueue;
use super::weight::unsupported;
use crate::types::Format;

/// One size of the kernel.
struct Size {
    /// Bf16, int8, fp8.
    kernels: [&'static str; 3],
    /// Results of a block.
    rows: usize,
    tokens: usize,
    threads: u32,
    stages: usize,
    /// Whether cuts are blocks of their own.
    cuts: bool,
}

const FEW: Size = Size {
    kernels: ["gemm_mma_bf16_few", "gemm_mma_int8_few", "gemm_mma_fp8_few"],
    rows: 64,
    tokens: 16,
    threads: 128,
    stages: 6,
    cuts: true,
};
const SOME: Size = Size {
    kernels: ["gemm_mma_bf16_some", "gemm_mma_int8_some", "gemm_mma_fp8_some"],
    rows: 64,
    tokens: 64,
    threads: 128,
    stages: 4,
    cuts: true,
};
const MANY: Size = Size {
    kernels: ["gemm_mma_bf16_many", "gemm_mma_int8_many", "gemm_mma_fp8_many"],
    rows: 128,
    tokens: 64,
    threads: 256,
    stages: 3,
    cuts: false,
};
const FINISH: [&str; 3] = ["gemm_mma_bf16_finish", "gemm_mma_int8_finish", "gemm_mma_fp8_finish"];
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
        Format::F32 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(w.format),
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
    let shared = (size.stages * (size.rows + size.tokens) * TILE_BYTES) as u32;
    let (tokens, n, cuts, add) = (tokens as u32, n as u32, cuts as u32, u32::from(add));
    let row = w.row_bytes() as u32;
    let (scales, left) = (w.scales, x.scales);
    let given =
        args![w.tiles, x.data, scales, left, bias, out, partials, tokens, n, row, blocks as u32, cuts, add];
    queue.launch("gemm_mma", size.kernels[format], grid, size.threads, shared, given);
    if apart {
        let results = [(tokens as usize * w.n).div_ceil(256), 1, 1];
        let given = args![scales, left, bias, out, partials, tokens, n, cuts, add];
        queue.launch("gemm_mma", FINISH[format], results, 256, 0, given);
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
