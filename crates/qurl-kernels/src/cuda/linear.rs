//! Linear layers and MLPs: activations on their way into a GEMM, and the choice of the kernel.
//!
//! Activations are converted to the GEMM's number format right before it, in the workspace; RMSNorm and SwiGLU are fused
//! into that conversion. Forward GEMMs of a network that is trained run in the kernels of inference, so that its
//! log-probabilities have the engine's bits; the GEMMs of its backward pass ([`super::linear_backward`]) are cuBLASLt's,
//! which reads weights by rows.

use super::device::{Cuda, CudaTensor};
use super::ffi::DevicePtr;
use super::gemm::{self, Gating, Packed};
use super::launch::args;
use super::queue::CudaQueue;
use super::weight::{CudaWeight, number_bytes, unsupported};
use crate::ops::{Linear, Mlp, Norm, Output};
use crate::types::Format;

/// Rows that operands in the workspace are padded to: kernels may read (never use) rows of a last tile.
const ROW_TILE: usize = 256;

/// Threads that convert a row: few for narrow rows, whose sums over a block cost more than their numbers.
pub(super) fn conversion_threads(width: usize) -> u32 {
    width.div_ceil(16).next_power_of_two().clamp(128, 1024) as u32
}

/// Where the rows of an operand come from.
#[derive(Clone, Copy)]
pub(super) enum Source {
    /// As they are.
    Rows(DevicePtr),
    /// RMSNorm of rows. A place for the absmax of the GEMM's rows is made ready on the way (or 0).
    Normed { x: DevicePtr, gain: DevicePtr, eps: f32, absmax: DevicePtr },
    /// SwiGLU of rows of gate and up projections.
    Swiglu(DevicePtr),
}

/// The left operand of a GEMM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    pub data: DevicePtr,
    /// One per row, for quantized values.
    pub scales: DevicePtr,
    /// Rows that may be read, those of the batch and what lies after them.
    pub readable: usize,
}

impl Operand {
    /// Memory for rows in a format, and for their scales.
    pub fn alloc(queue: &mut CudaQueue, format: Format, rows: usize, k: usize) -> Operand {
        let readable = rows.next_multiple_of(ROW_TILE);
        let data = queue.alloc(readable * k * number_bytes(format));
        let scales = if format.is_quantized() { queue.alloc(readable * 4) } else { 0 };
        Operand { data, scales, readable }
    }
}

/// Brings rows into the number format of a GEMM.
pub(super) fn operand(
    queue: &mut CudaQueue,
    format: Format,
    source: Source,
    rows: usize,
    k: usize,
) -> Operand {
    if let (Format::F32, Source::Rows(data)) = (format, source) {
        return Operand { data, scales: 0, readable: rows };
    }
    let operand = Operand::alloc(queue, format, rows, k);
    let Operand { data, scales, .. } = operand;
    let (grid, threads, k32) = ([rows, 1, 1], conversion_threads(k), k as u32);
    match (format, source) {
        (Format::F32, Source::Rows(_)) => unreachable!("given back above"),
        (Format::F32, Source::Normed { x, gain, eps, .. }) => {
            let given = args![x, gain, 0u64, 1u32, k32, k32, eps, data];
            queue.launch_next("norm", "norm_forward", grid, 256, 0, given);
        }
        (Format::F32, Source::Swiglu(x)) => {
            let elements = rows * k;
            let given = args![x, k32, elements, data];
            queue.launch("elementwise", "swiglu", [elements.div_ceil(256), 1, 1], 256, 0, given);
        }
        (Format::Bf16, Source::Rows(x)) => {
            queue.launch_next("quantize", "rows_bf16", grid, threads, 0, args![x, k32, data]);
        }
        (Format::Bf16, Source::Normed { x, gain, eps, .. }) => {
            queue.launch_next("quantize", "norm_bf16", grid, threads, 0, args![x, gain, k32, eps, data]);
        }
        (Format::Bf16, Source::Swiglu(x)) => {
            queue.launch_next("quantize", "swiglu_bf16", grid, threads, 0, args![x, k32, data]);
        }
        (Format::Int8 | Format::Fp8, Source::Rows(x)) => {
            let kernel = if format == Format::Fp8 { "rows_e4m3" } else { "rows_i8" };
            queue.launch_next("quantize", kernel, grid, threads, 0, args![x, k32, data, scales]);
        }
        (Format::Int8 | Format::Fp8, Source::Normed { x, gain, eps, absmax }) => {
            let kernel = if format == Format::Fp8 { "norm_e4m3" } else { "norm_i8" };
            let given = args![x, gain, k32, eps, data, scales, absmax];
            queue.launch_next("quantize", kernel, grid, threads, 0, given);
        }
        (Format::Int8 | Format::Fp8, Source::Swiglu(x)) => {
            let kernel = if format == Format::Fp8 { "swiglu_e4m3" } else { "swiglu_i8" };
            queue.launch_next("quantize", kernel, grid, threads, 0, args![x, k32, data, scales]);
        }
        (Format::Fp8Block | Format::Int4 | Format::Nvfp4, _) => unsupported(format),
    }
    operand
}

/// `out[rows, n] (+)= x W^T (+ bias)`
pub(super) fn gemm(
    queue: &mut CudaQueue,
    x: Operand,
    rows: usize,
    w: &CudaWeight,
    bias: DevicePtr,
    output: Output,
    out: DevicePtr,
) {
    let add = output == Output::Add;
    if let Some(weights) = w.tiles() {
        return gemm::linear(queue, x, rows, weights, bias, add, out);
    }
    let gemm = PlainGemm {
        a: (x.data, w.k, 1),
        b: (w.rows(), w.k, 1),
        sizes: (rows, w.n, w.k),
        scales: (x.scales, w.scales()),
        bias,
        add,
        out,
    };
    gemm.run(queue, w.format);
}

/// A GEMM with plain arithmetic, operands given as (address, stride of rows, stride along k).
pub(super) struct PlainGemm {
    pub a: (DevicePtr, usize, usize),
    pub b: (DevicePtr, usize, usize),
    /// Rows and columns of the result, length of the sums.
    pub sizes: (usize, usize, usize),
    pub scales: (DevicePtr, DevicePtr),
    pub bias: DevicePtr,
    pub add: bool,
    pub out: DevicePtr,
}

impl PlainGemm {
    pub fn run(&self, queue: &mut CudaQueue, format: Format) {
        let kernel = match format {
            Format::F32 => "product_f32",
            Format::Bf16 => "product_bf16",
            Format::Int8 => "product_i8",
            Format::Fp8 => "product_e4m3",
            Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
        };
        let PlainGemm { a, b, sizes: (m, n, k), scales, bias, add, out } = *self;
        let sizes = [m, n, k].map(|x| x as u32);
        let given = args![
            a.0,
            a.1,
            a.2,
            b.0,
            b.1,
            b.2,
            sizes[0],
            sizes[1],
            sizes[2],
            scales.0,
            scales.1,
            bias,
            u32::from(add),
            out
        ];
        queue.launch("gemm_plain", kernel, [n.div_ceil(64), m.div_ceil(64), 1], 256, 0, given);
    }
}

/// [`crate::Queue::linear`]
pub(super) fn linear(queue: &mut CudaQueue, args: Linear<Cuda>) {
    let Linear { x, rows, norm, w, bias, output, out } = args;
    assert!(rows * w.k <= x.len && rows * w.n <= out.len, "linear: rows");
    assert!(bias.is_none_or(|bias| bias.len >= w.n), "linear: bias");
    let source = match norm {
        Some(norm) => normed(x, &norm, w.k),
        None => Source::Rows(x.at()),
    };
    let x = operand(queue, w.format, source, rows, w.k);
    gemm(queue, x, rows, w, bias.map_or(0, CudaTensor::at), output, out.at());
}

fn normed(x: &CudaTensor, norm: &Norm<Cuda>, width: usize) -> Source {
    assert!(norm.gain.len == width, "rmsnorm: gain");
    Source::Normed { x: x.at(), gain: norm.gain.at(), eps: norm.eps, absmax: 0 }
}

/// [`crate::Queue::mlp`]
pub(super) fn mlp(queue: &mut CudaQueue, args: Mlp<Cuda>) {
    let Mlp { x, rows, norm, gate_up, down, kept } = args;
    assert!(rows * gate_up.k <= x.len && down.n == gate_up.k && gate_up.n == 2 * down.k, "mlp: widths");
    assert!(kept.as_ref().is_none_or(|kept| rows * gate_up.n <= kept.len), "mlp: kept projections");
    let source = normed(x, &norm, gate_up.k);
    let together = |w: &Packed| w.format == down.format && w.takes_gating(&queue.context);
    let packed = gate_up.tiles().filter(together);
    let projected = match (packed, kept) {
        (Some(packed), None) => return gated_mlp(queue, source, rows, packed, down, x.at()),
        (_, Some(kept)) => kept.at(),
        (None, None) => queue.alloc(4 * rows * gate_up.n),
    };
    let first = operand(queue, gate_up.format, source, rows, gate_up.k);
    match packed {
        // The bits that they have inside of `gated_mlp`.
        Some(packed) => {
            let packed = Packed { gating: Gating::Paired, ..packed };
            gemm::linear(queue, first, rows, packed, 0, false, projected);
        }
        None => gemm(queue, first, rows, gate_up, 0, Output::Store, projected),
    }
    let second = operand(queue, down.format, Source::Swiglu(projected), rows, down.k);
    gemm(queue, second, rows, down, 0, Output::Add, x.at());
}

/// Words from the absmax of a row to that of the next: those of common.cuh.
const ABSMAX_STRIDE: usize = 32;
/// Numbers of a row that one block quantizes.
const QUANTIZED_SHARE: usize = 4 * 4 * 256;

/// An MLP whose gate and up projections are brought together inside of the first GEMM, which finds the absmax of each
/// row of the result, too: `x += (silu(gate) * up) down^T`.
fn gated_mlp(
    queue: &mut CudaQueue,
    source: Source,
    rows: usize,
    gate_up: Packed,
    down: &CudaWeight,
    x: DevicePtr,
) {
    let (format, f) = (gate_up.format, down.k);
    let quantized = format.is_quantized();
    let absmax = if quantized { queue.alloc(4 * ABSMAX_STRIDE * rows) } else { 0 };
    let source = match source {
        Source::Normed { x, gain, eps, .. } => Source::Normed { x, gain, eps, absmax },
        other => other,
    };
    let first = operand(queue, format, source, rows, gate_up.k);
    // In bf16 the result is what the second GEMM reads.
    let second = Operand::alloc(queue, format, rows, f);
    let activated = if quantized { queue.alloc(4 * rows * f) } else { second.data };
    let gated = Packed { gating: Gating::Swiglu, absmax, ..gate_up };
    gemm::linear(queue, first, rows, gated, 0, false, activated);
    if quantized {
        let kernel = if format == Format::Fp8 { "known_e4m3" } else { "known_i8" };
        let given = args![activated, f as u32, absmax, second.data, second.scales];
        queue.launch_next("quantize", kernel, [rows, f.div_ceil(QUANTIZED_SHARE), 1], 256, 0, given);
    }
    gemm(queue, second, rows, down, 0, Output::Add, x);
}
