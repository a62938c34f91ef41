//! GEMMs with packed weights: on Hopper's tensor cores (`cu/gemm_hopper.cuh`, in the forms of
//! [`super::gemm_tiles`]), and on others ([`super::gemm_mma`]).
//!
//! Weights lie in swizzled tiles of 64 rows by 128 bytes. For up to 256 tokens the weight stream is cut into
//! ranges, one per SM, that depend on the matrix alone; for more, whole tiles are computed, in floating point
//! with the same cuts. So a row's bits do not depend on how many others there are. Other devices take the
//! same tiles.

use super::bits4::{is_bits4, operand_format, tile_bytes};
use super::constants::{
    BITS4_DEPTH, BULK_CHUNK, CUT_ROWS, GATING_NONE, GATING_SWIGLU, SIDES, TILE_DEPTH, TILE_ROWS,
};
use super::context::{Context, HOPPER};
use super::ffi::DevicePtr;
use super::gemm_mma;
use super::gemm_tiles::{Form, Schedule, Shape, Variant, choose, ranges};
use super::kernels::{self, GemmBulk, GemmHopper, GemmPack, GemmPackBf16};
use super::launch::{Element, Launch};
use super::linear::Operand;
use super::queue::CudaQueue;
use super::weight::{number_bytes, unsupported};
use crate::types::Format;

/// Most tokens of a stream.
const MAX_STREAMED: usize = 256;

/// Bytes of packed weights `[n, k]`; `None` where the kernels do not take them.
pub(super) fn packed_bytes(format: Format, n: usize, k: usize) -> Option<usize> {
    let known = match format {
        Format::Bf16 | Format::Int8 | Format::Fp8 | Format::Int4 | Format::Nvfp4 => true,
        Format::F32 => false,
        Format::Fp8Block => unsupported(format),
    };
    let blocks = blocks(format, k);
    // Kernels count k-blocks of tiles, times ranges, in 32 bits.
    let counted = n.div_ceil(CUT_ROWS) * blocks <= 1 << 22;
    let tile = if is_bits4(format) { tile_bytes(format) } else { TILE_ROWS * TILE_DEPTH };
    let aligned = (k * number_bytes(format)).is_multiple_of(16);
    (known && counted && aligned).then(|| n.div_ceil(TILE_ROWS) * blocks * tile)
}

/// Blocks along k that tiles have one of.
fn blocks(format: Format, k: usize) -> usize {
    if is_bits4(format) { k.div_ceil(BITS4_DEPTH) } else { (k * number_bytes(format)).div_ceil(TILE_DEPTH) }
}

/// Packs rows of numbers.
pub(super) fn pack(
    queue: &mut CudaQueue,
    format: Format,
    rows: DevicePtr,
    n: usize,
    k: usize,
    tiles: DevicePtr,
) {
    let row = k * number_bytes(format);
    let blocks = row.div_ceil(TILE_DEPTH);
    let args = GemmPack { rows, tiles, n: n as u32, row_bytes: row as u32, k_blocks: blocks as u32 };
    queue.launch(kernels::gemm_pack, Launch::elements(chunks(n, blocks)), args);
}

/// Rounds weights `[n, k]` in f32 to bf16 and packs them; `rows` takes them by rows, or is 0.
pub(super) fn pack_bf16(
    queue: &mut CudaQueue,
    weights: DevicePtr,
    n: usize,
    k: usize,
    rows: DevicePtr,
    tiles: DevicePtr,
) {
    let blocks = (k * number_bytes(Format::Bf16)).div_ceil(TILE_DEPTH);
    let args = GemmPackBf16 { weights, rows, tiles, n: n as u32, k: k as u32, k_blocks: blocks as u32 };
    queue.launch(kernels::gemm_pack_bf16, Launch::elements(chunks(n, blocks)), args);
}

/// 16-byte chunks of packed weights; a thread packs one.
fn chunks(n: usize, blocks: usize) -> usize {
    n.div_ceil(TILE_ROWS) * blocks * TILE_ROWS * TILE_DEPTH / 16
}

/// Bytes for partial sums: of two tiles a range, two blocks of eight warps, for all tokens of a tile.
pub(super) fn partial_bytes(context: &Context) -> usize {
    if context.generation == HOPPER { 2 * context.sms * 8 * MAX_STREAMED * 64 } else { 0 }
}

/// What the outputs of a GEMM are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gating {
    /// As they are.
    None,
    /// Gate projections, then as many up projections, brought together: the result is `silu(gate) * up`, half
    /// as wide, and in bf16 if the tokens are.
    Swiglu {
        /// Where the absmax of the rows goes, or 0; not for results in bf16.
        absmax: DevicePtr,
        /// Where gate and up projections go, rounded to bf16, or 0.
        kept: DevicePtr,
    },
}

/// Packed weights as a GEMM takes them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    pub format: Format,
    /// Outputs and inputs.
    pub n: usize,
    pub k: usize,
    pub tiles: DevicePtr,
    /// One per output, for values of eight bits; one for all, for nvfp4.
    pub scales: DevicePtr,
    pub gating: Gating,
}

impl Packed {
    /// Bytes of a token.
    pub fn row_bytes(&self) -> usize {
        self.k * number_bytes(self.format)
    }

    /// Blocks along k.
    pub fn blocks(&self) -> usize {
        blocks(self.format, self.k)
    }

    /// Whether gate and up projections can be brought together.
    pub fn takes_gating(&self, context: &Context) -> bool {
        context.generation == HOPPER && self.n.is_multiple_of(2 * TILE_ROWS)
    }
}

/// `out[tokens, n] (+)= x W^T (+ bias)`, or what [`Packed::gating`] says.
pub(super) fn linear(
    queue: &mut CudaQueue,
    x: Operand,
    tokens: usize,
    w: Packed,
    bias: DevicePtr,
    add: bool,
    out: DevicePtr,
) {
    let context = queue.context.clone();
    if context.generation != HOPPER {
        return gemm_mma::linear(queue, x, tokens, w, bias, add, out);
    }
    let (n, blocks, sms) = (w.n, w.blocks(), context.sms);
    let shape = Shape { format: w.format, tokens, n, blocks, gating: w.gating, sms };
    let v = choose(shape, |v: &Variant| {
        context.blocks_at_once(v.kernel.id(), v.threads(), v.shared(w.format, usize::MAX) as u32, v.cluster)
    });
    let ranges = ranges(sms, n, blocks);
    let tiles = n.div_ceil(v.rows * v.alike()) * tokens.div_ceil(v.tokens);
    // Blocks, and k-blocks that each has at most.
    let (grid, each) = match v.schedule {
        Schedule::Stream => (ranges * SIDES, (n.div_ceil(CUT_ROWS) * blocks).div_ceil(ranges)),
        // Each of its clusters takes one tile.
        Schedule::Split => (tiles * v.cluster, blocks.div_ceil(v.cluster)),
        Schedule::Tiles | Schedule::Gated | Schedule::Bulk => {
            let clusters = (sms / v.cluster).min(tiles);
            (clusters * v.cluster, tiles.div_ceil(clusters) * blocks)
        }
    };
    // Whole tiles where they can be read: the TMA is slow at the edge of a matrix.
    let height = tokens.next_multiple_of(v.tokens).min(x.readable);
    let map = queue.tensor_map(x.data, height, w.row_bytes(), v.tokens / v.alike(), TILE_DEPTH);
    let (gating, absmax, kept) = match w.gating {
        Gating::None => (GATING_NONE, 0, 0),
        Gating::Swiglu { absmax, kept } => (GATING_SWIGLU, absmax, kept),
    };
    assert!(operand_format(w.format) != Format::Bf16 || absmax == 0, "gating: what the format has");
    let launch = Launch::blocks(grid, v.threads()).shared(v.shared(w.format, each));
    let (k_blocks, ranges, add, gating) = (blocks as u32, ranges as u32, u32::from(add), gating as u32);
    match v.kernel {
        Form::Direct(kernel) => {
            let args = GemmHopper {
                map,
                weights: w.tiles,
                w_scales: w.scales,
                x_scales: x.scales,
                bias,
                out,
                partials: queue.partial_words(),
                tokens: tokens as u32,
                n: n as u32,
                k_blocks,
                ranges,
                add,
                gating,
                absmax,
                kept,
            };
            queue.launch(kernel, launch, args);
        }
        Form::Bulk(kernel) => {
            // What is stored at a time: a chunk of tokens by 128 bytes, half of one of gated results.
            let out_map = match w.gating {
                Gating::None => queue.tensor_map_of(Element::F32, out, tokens, n * 4, BULK_CHUNK, 128),
                Gating::Swiglu { .. } => {
                    queue.tensor_map_of(Element::Bf16, out, tokens, n, BULK_CHUNK / 2, 128)
                }
            };
            let kept_map = match kept {
                0 => out_map,
                kept => queue.tensor_map_of(Element::Bf16, kept, tokens, n * 2, BULK_CHUNK, 128),
            };
            let args = GemmBulk {
                map,
                out_map,
                kept_map,
                weights: w.tiles,
                bias,
                tokens: tokens as u32,
                n: n as u32,
                k_blocks,
                ranges,
                add,
                gating,
                kept,
            };
            queue.launch(kernel, launch, args);
        }
    }
}
