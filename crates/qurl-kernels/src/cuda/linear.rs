//! Linear layers: activations on their way into a GEMM, and the choice of the kernel.
//!
//! Activations are converted to the GEMM's number format right before it, in the workspace; RMSNorm and
//! SwiGLU are fused into that conversion. Forward GEMMs of a network that is trained run in the kernels of
//! inference, so that its log-probabilities have the engine's bits; the GEMMs of its backward pass
//! ([`super::linear_backward`]) are cuBLASLt's, which reads weights by rows.

use super::adapter;
use super::bits4::{is_bits4, operand_format};
use super::constants::{NORM_THREADS, PLAIN_TILE};
use super::device::{Cuda, CudaTensor};
use super::ffi::DevicePtr;
use super::gemm;
use super::kernels::{self, GemmPlain, Kernel, NormForward, NormRowsBf16};
use super::kernels::{QuantizeNorm, QuantizeRows, QuantizeSwiglu, RowsBf16, SwigluRowsBf16};
use super::launch::Launch;
use super::queue::CudaQueue;
use super::weight::{CudaWeight, number_bytes, unsupported};
use crate::ops::{Linear, Norm, Output};
use crate::types::Format;

/// Rows that operands are padded to: kernels may read (never use) rows of a last tile.
const ROW_TILE: usize = 256;

/// Rows that an operand of so many has memory for.
pub(super) fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(ROW_TILE)
}

/// Threads that convert a row: few for narrow rows, whose sums over a block cost more than their numbers.
pub(super) fn conversion_threads(width: usize) -> usize {
    width.div_ceil(16).next_power_of_two().clamp(128, 1024)
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
        let readable = padded_rows(rows);
        let data = queue.alloc(readable * k * number_bytes(format));
        let scales = if operand_format(format).is_quantized() { queue.alloc(readable * 4) } else { 0 };
        Operand { data, scales, readable }
    }
}

/// Brings rows into the number format in which a GEMM with weights in a format takes them.
pub(super) fn operand(
    queue: &mut CudaQueue,
    format: Format,
    source: Source,
    rows: usize,
    k: usize,
) -> Operand {
    let format = operand_format(format);
    if let (Format::F32, Source::Rows(data)) = (format, source) {
        return Operand { data, scales: 0, readable: rows };
    }
    let operand = Operand::alloc(queue, format, rows, k);
    let Operand { data: out, scales, .. } = operand;
    let (launch, k) = (Launch::blocks(rows, conversion_threads(k)), k as u32);
    match (format, source) {
        (Format::F32, Source::Rows(_)) => unreachable!("given back above"),
        (Format::F32, Source::Normed { x, gain, eps, .. }) => {
            let launch = Launch::blocks(rows, NORM_THREADS);
            let args = NormForward { x, gain, start: 0, per: 1, stride: k, width: k, eps, out };
            queue.launch(kernels::norm_forward, launch, args);
        }
        (Format::F32, Source::Swiglu(gate_up)) => {
            let count = rows * k as usize;
            let args = kernels::Swiglu { gate_up, f: k, count: count as u64, out };
            queue.launch(kernels::swiglu, Launch::elements(count), args);
        }
        (Format::Bf16, Source::Rows(x)) => queue.launch(kernels::rows_bf16, launch, RowsBf16 { x, k, out }),
        (Format::Bf16, Source::Normed { x, gain, eps, .. }) => {
            queue.launch(kernels::norm_bf16, launch, NormRowsBf16 { x, gain, k, eps, out });
        }
        (Format::Bf16, Source::Swiglu(gate_up)) => {
            queue.launch(kernels::swiglu_bf16, launch, SwigluRowsBf16 { gate_up, f: k, kept: 0, out });
        }
        (Format::Int8 | Format::Fp8, Source::Rows(x)) => {
            let kernel = eight_bits(format, kernels::rows_i8, kernels::rows_e4m3);
            queue.launch(kernel, launch, QuantizeRows { x, k, out, scales });
        }
        (Format::Int8 | Format::Fp8, Source::Normed { x, gain, eps, absmax }) => {
            let kernel = eight_bits(format, kernels::norm_i8, kernels::norm_e4m3);
            queue.launch(kernel, launch, QuantizeNorm { x, gain, k, eps, out, scales, absmax });
        }
        (Format::Int8 | Format::Fp8, Source::Swiglu(gate_up)) => {
            let kernel = eight_bits(format, kernels::swiglu_i8, kernels::swiglu_e4m3);
            queue.launch(kernel, launch, QuantizeSwiglu { gate_up, f: k, out, scales });
        }
        (Format::Fp8Block | Format::Int4 | Format::Nvfp4, _) => unsupported(format),
    }
    operand
}

/// What is there for each format of eight bits.
pub(super) fn eight_bits<T>(format: Format, int8: T, fp8: T) -> T {
    match format {
        Format::Int8 => int8,
        Format::Fp8 => fp8,
        Format::F32 | Format::Bf16 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
    }
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
    if is_bits4(w.format) {
        return w.gemm_bits4(queue, x, rows, bias, output, out);
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

/// Threads of a block of the plain GEMM.
const PLAIN_THREADS: usize = 256;

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
            Format::F32 => kernels::gemm_plain_f32,
            Format::Bf16 => kernels::gemm_plain_bf16,
            Format::Int8 => kernels::gemm_plain_i8,
            Format::Fp8 => kernels::gemm_plain_e4m3,
            Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
        };
        self.launch(queue, kernel);
    }

    /// The same with the kernel at hand.
    pub fn launch(&self, queue: &mut CudaQueue, kernel: Kernel<GemmPlain>) {
        let PlainGemm { a, b, sizes: (m, n, k), scales, bias, add, out } = *self;
        let args = GemmPlain {
            a: a.0,
            a_m: a.1 as u64,
            a_k: a.2 as u64,
            b: b.0,
            b_n: b.1 as u64,
            b_k: b.2 as u64,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            row_scales: scales.0,
            column_scales: scales.1,
            bias,
            add: u32::from(add),
            out,
        };
        let grid = [n.div_ceil(PLAIN_TILE), m.div_ceil(PLAIN_TILE), 1];
        queue.launch(kernel, Launch::grid(grid, PLAIN_THREADS), args);
    }
}

/// [`crate::Queue::linear`]
pub(super) fn linear(queue: &mut CudaQueue, args: Linear<Cuda>) {
    let Linear { x, rows, norm, w, bias, adapter, output, out } = args;
    assert!(rows * w.k <= x.len && rows * w.n <= out.len, "linear: rows");
    assert!(bias.is_none_or(|bias| bias.len >= w.n), "linear: bias");
    let source = match norm {
        Some(norm) => normed(x, &norm, w.k),
        None => Source::Rows(x.at()),
    };
    let x = operand(queue, w.format, source, rows, w.k);
    gemm(queue, x, rows, w, bias.map_or(0, CudaTensor::at), output, out.at());
    adapter::forward(queue, adapter, (w, x), source, rows, out.at());
}

/// RMSNorm of the rows of a tensor.
pub(super) fn normed(x: &CudaTensor, norm: &Norm<Cuda>, width: usize) -> Source {
    assert!(norm.gain.len == width, "rmsnorm: gain");
    Source::Normed { x: x.at(), gain: norm.gain.at(), eps: norm.eps, absmax: 0 }
}
