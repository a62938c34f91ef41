//! Linear layers: packed weights, activations on their way into a product, and the choice of the kernel.
//!
//! Activations are converted to the product's number format right before it, in scratch memory; RMSNorm and SwiGLU are
//! fused into that conversion. Forward products of a network that is trained run in the kernels of inference, so that its
//! log-probabilities have the engine's bits; the products of its way back are cuBLASLt's, which reads weights by rows.

use super::ffi::DevicePtr;
use super::gemm::{self, Gates, Packed};
use super::gpu::Gpu;
use super::launch::args;
use super::lt::Lt;
use super::memory::{Buffer, Slot};
use crate::backend::Output;
use crate::{DeviceError, Format, Rounding};
use std::sync::Arc;

/// Longest sums of int8 products that cannot leave 32 bits.
const INT8_MAX_K: usize = 65_536;
/// Rows that scratch operands are padded to: kernels may read (never use) rows of a last tile.
const ROW_TILE: usize = 256;

/// Packed weights of a linear layer.
pub struct CudaWeight {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) format: Format,
    pub(super) trained: bool,
    /// In the tiles of [`gemm`]; else rows.
    packed: bool,
    /// `[n, k]` in the format's numbers.
    data: Buffer,
    /// The same in rows, for the way back of trained weights that are packed.
    rows: Option<Buffer>,
    /// One per output channel, for codes.
    scales: Option<Buffer>,
}

impl CudaWeight {
    /// Room for weights `[n, k]`.
    pub fn new(
        gpu: &Arc<Gpu>,
        n: usize,
        k: usize,
        format: Format,
        trained: bool,
    ) -> Result<Self, DeviceError> {
        let refuse = |reason: String| Err(DeviceError::Pack { format, reason });
        let bytes = match format {
            Format::F32 => 4,
            Format::Bf16 => 2,
            Format::Int8 | Format::Fp8 => 1,
            _ => return refuse("not supported on cuda; expected f32, bf16, int8 or fp8".to_string()),
        };
        if format.is_quantized() && trained {
            return refuse("quantized weights have no gradients; train in f32 or bf16".to_string());
        }
        if n == 0 || k == 0 {
            return refuse(format!("a matrix of {n} by {k} has no weights"));
        }
        if format == Format::Int8 && k > INT8_MAX_K {
            return refuse(format!("{k} inputs, but 32-bit sums hold at most {INT8_MAX_K}"));
        }
        let packed = gemm::packed_bytes(format, n, k);
        let data = Buffer::new(gpu, packed.unwrap_or(n * k * bytes), "weights")?;
        let both = trained && packed.is_some();
        let rows = both.then(|| Buffer::new(gpu, n * k * bytes, "rows of weights")).transpose()?;
        let scales = format.is_quantized().then(|| Buffer::new(gpu, 4 * n, "weight scales")).transpose()?;
        Ok(CudaWeight { n, k, format, trained, packed: packed.is_some(), data, rows, scales })
    }

    /// Packs weights `[n, k]`.
    pub fn fill(&mut self, gpu: &Gpu, weights: DevicePtr, rounding: Rounding) -> Result<(), DeviceError> {
        let (n, k) = (self.n, self.k);
        let rows = match (&self.rows, self.packed) {
            (Some(rows), _) => rows.at(),
            (None, true) => gpu.scratch(Slot::Codes, n * k * if self.format == Format::Bf16 { 2 } else { 1 }),
            (None, false) => self.data.at(),
        };
        let pack = || {
            if self.packed {
                gemm::pack(gpu, self.format, rows, n, k, self.data.at());
            }
        };
        let kernel = match self.format {
            Format::Int8 => "weights_i8",
            Format::Fp8 => "weights_e4m3",
            Format::Bf16 => {
                gpu.launch_next(
                    "quantize",
                    "rows_bf16",
                    [n, 1, 1],
                    threads(k),
                    0,
                    args![weights, k as u32, rows],
                );
                pack();
                return Ok(());
            }
            _ => {
                gpu.copy(weights, self.data.at(), 4 * n * k);
                return Ok(());
            }
        };
        let (stochastic, seed) = match rounding {
            Rounding::Nearest => (0u32, 0),
            Rounding::Stochastic { seed } => (1, seed),
        };
        let bad = gpu.scratch(Slot::Results, 4);
        gpu.fill(bad, 0xff, 4);
        let scales = self.scales();
        let given = args![weights, k as u32, stochastic, seed, rows, scales, bad];
        gpu.launch("quantize", kernel, [n, 1, 1], threads(k), 0, given);
        pack();
        let mut row = [0u32];
        gpu.read(bad, &mut row)?;
        match row[0] {
            u32::MAX => Ok(()),
            row => {
                let mut values = vec![0.0f32; k];
                gpu.read(weights + (row as usize * k * 4) as u64, &mut values)?;
                let column = values.iter().position(|x| !x.is_finite()).unwrap_or(0);
                let reason =
                    format!("row {row}, column {column} is {}; expected finite numbers", values[column]);
                Err(DeviceError::Pack { format: self.format, reason })
            }
        }
    }

    /// Bytes that a forward product reads.
    pub fn bytes(&self) -> usize {
        self.data.bytes() + self.scales.as_ref().map_or(0, Buffer::bytes)
    }

    fn scales(&self) -> DevicePtr {
        self.scales.as_ref().map_or(0, Buffer::at)
    }

    /// The weights in tiles, where they are.
    pub(super) fn tiles(&self) -> Option<Packed> {
        let (tiles, scales) = (self.data.at(), self.scales());
        let packed = Packed {
            format: self.format,
            n: self.n,
            k: self.k,
            tiles,
            scales,
            gates: Gates::None,
            largest: 0,
        };
        self.packed.then_some(packed)
    }
}

/// Threads that convert a row: few for narrow rows, whose sums over a block cost more than their numbers.
fn threads(width: usize) -> u32 {
    width.div_ceil(16).next_power_of_two().clamp(128, 1024) as u32
}

/// Where the rows of a product come from.
#[derive(Clone, Copy)]
pub(super) enum Rows {
    /// As they are.
    Plain(DevicePtr),
    /// RMSNorm of rows. A place for the largest magnitudes of the product's rows is made ready on the way (or 0).
    Normed { x: DevicePtr, gain: DevicePtr, eps: f32, largest: DevicePtr },
    /// SwiGLU of rows of gates and values.
    Swiglu(DevicePtr),
}

/// The left operand of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub data: DevicePtr,
    pub scales: DevicePtr,
    /// Rows that may be read, those of the batch and what lies behind them.
    pub readable: usize,
}

/// Room for the codes of rows and their scales.
pub(super) fn code_room(gpu: &Gpu, count: usize, k: usize) -> Left {
    let padded = count.next_multiple_of(ROW_TILE);
    let (data, scales) = (gpu.scratch(Slot::Left, padded * k), gpu.scratch(Slot::LeftScales, padded * 4));
    Left { data, scales, readable: padded }
}

/// Brings rows into the number format of a product.
pub(super) fn left(gpu: &Gpu, format: Format, rows: Rows, count: usize, k: usize) -> Left {
    let bytes = match format {
        Format::F32 => 4,
        Format::Bf16 => 2,
        _ => 1,
    };
    if let (Format::F32, Rows::Plain(data)) = (format, rows) {
        return Left { data, scales: 0, readable: count };
    }
    let padded = count.next_multiple_of(ROW_TILE);
    let data = gpu.scratch(Slot::Left, padded * k * bytes);
    let scales = gpu.scratch(Slot::LeftScales, padded * 4);
    let grid = [count, 1, 1];
    let k32 = k as u32;
    match (format, rows) {
        (Format::F32, Rows::Normed { x, gain, eps, .. }) => {
            let given = args![x, gain, 0u64, 1u32, k32, k32, eps, data];
            gpu.launch_next("norm", "norm_forward", grid, 256, 0, given);
        }
        (Format::F32, Rows::Swiglu(x)) => {
            let elements = count * k;
            let given = args![x, k32, elements, data];
            gpu.launch("elementwise", "swiglu", [elements.div_ceil(256), 1, 1], 256, 0, given);
        }
        (Format::Bf16, Rows::Plain(x)) => {
            gpu.launch_next("quantize", "rows_bf16", grid, threads(k), 0, args![x, k32, data])
        }
        (Format::Bf16, Rows::Normed { x, gain, eps, .. }) => {
            gpu.launch_next("quantize", "norm_bf16", grid, threads(k), 0, args![x, gain, k32, eps, data]);
        }
        (Format::Bf16, Rows::Swiglu(x)) => {
            gpu.launch_next("quantize", "swiglu_bf16", grid, threads(k), 0, args![x, k32, data]);
        }
        (_, rows) => {
            let fp8 = format == Format::Fp8;
            match rows {
                Rows::Plain(x) => {
                    let kernel = if fp8 { "rows_e4m3" } else { "rows_i8" };
                    gpu.launch_next("quantize", kernel, grid, threads(k), 0, args![x, k32, data, scales]);
                }
                Rows::Normed { x, gain, eps, largest } => {
                    let kernel = if fp8 { "norm_e4m3" } else { "norm_i8" };
                    let given = args![x, gain, k32, eps, data, scales, largest];
                    gpu.launch_next("quantize", kernel, grid, threads(k), 0, given);
                }
                Rows::Swiglu(x) => {
                    let kernel = if fp8 { "swiglu_e4m3" } else { "swiglu_i8" };
                    gpu.launch_next("quantize", kernel, grid, threads(k), 0, args![x, k32, data, scales]);
                }
            }
        }
    }
    Left { data, scales: if format.is_quantized() { scales } else { 0 }, readable: padded }
}

/// Words from the largest magnitude of a row to that of the next: those of common.cuh.
const LARGEST_STRIDE: usize = 32;
/// Numbers of a row whose codes one block makes.
const KNOWN_SHARE: usize = 4 * 4 * 256;

/// Codes of rows whose largest magnitudes are known.
fn known_codes(
    gpu: &Gpu,
    format: Format,
    rows: DevicePtr,
    largest: DevicePtr,
    count: usize,
    k: usize,
) -> Left {
    let left = code_room(gpu, count, k);
    let kernel = if format == Format::Fp8 { "known_e4m3" } else { "known_i8" };
    let given = args![rows, k as u32, largest, left.data, left.scales];
    gpu.launch_next("quantize", kernel, [count, k.div_ceil(KNOWN_SHARE), 1], 256, 0, given);
    left
}

/// All of an MLP whose weights are packed: `x += (silu(gate) * up) down^T` of the normed rows. Gates and ups meet inside the
/// first product, which finds the largest magnitude of each row for its codes; `room` (an address and bytes) takes the
/// result, `[rows, width]`.
pub(super) fn mlp(
    gpu: &Gpu,
    (gain, eps): (DevicePtr, f32),
    rows: usize,
    gate_up: Packed,
    down: &CudaWeight,
    room: (DevicePtr, usize),
    x: DevicePtr,
) {
    let (room, room_bytes) = room;
    let format = gate_up.format;
    let largest = match format {
        Format::Bf16 => 0,
        _ => gpu.scratch(Slot::Largest, 4 * LARGEST_STRIDE * rows),
    };
    let first = left(gpu, format, Rows::Normed { x, gain, eps, largest }, rows, gate_up.k);
    gemm::linear(gpu, first, rows, Packed { gates: Gates::Swiglu, largest, ..gate_up }, 0, false, room);
    let second = match format {
        Format::Bf16 => Left { data: room, scales: 0, readable: room_bytes / (2 * down.k) },
        format => known_codes(gpu, format, room, largest, rows, down.k),
    };
    forward(gpu, second, rows, down, 0, Output::Add, x);
}

/// Gates and ups of the normed rows, with the bits that they have inside [`mlp`]: the way back needs them.
pub(super) fn gates_and_ups(gpu: &Gpu, normed: Rows, rows: usize, gate_up: Packed, out: DevicePtr) {
    let first = left(gpu, gate_up.format, normed, rows, gate_up.k);
    gemm::linear(gpu, first, rows, Packed { gates: Gates::Paired, ..gate_up }, 0, false, out);
}

/// Numbers in the format of trained weights, in a scratch area of their own.
pub(super) fn converted(
    gpu: &Gpu,
    format: Format,
    x: DevicePtr,
    rows: usize,
    width: usize,
    slot: Slot,
) -> DevicePtr {
    if format == Format::F32 {
        return x;
    }
    let to = operand_room(gpu, rows, width, slot);
    gpu.launch_next("quantize", "rows_bf16", [rows, 1, 1], threads(width), 0, args![x, width as u32, to]);
    to
}

/// Room for bf16 rows that a product reads.
pub(super) fn operand_room(gpu: &Gpu, rows: usize, width: usize, slot: Slot) -> DevicePtr {
    gpu.scratch(slot, rows.next_multiple_of(ROW_TILE) * width * 2)
}

/// `out[rows, n] (+)= x W^T (+ bias)`
pub(super) fn forward(
    gpu: &Gpu,
    x: Left,
    rows: usize,
    w: &CudaWeight,
    bias: DevicePtr,
    output: Output,
    out: DevicePtr,
) {
    let add = output == Output::Add;
    if let Some(weights) = w.tiles() {
        return gemm::linear(gpu, x, rows, weights, bias, add, out);
    }
    let product = Plain {
        a: (x.data, w.k, 1),
        b: (w.data.at(), w.k, 1),
        sizes: (rows, w.n, w.k),
        scales: (x.scales, w.scales()),
        bias,
        add,
        out,
    };
    product.run(gpu, w.format);
}

/// `dx[rows, k] = dy[rows, n] W`; `dy` is in the weights' format.
pub(super) fn input_gradient(gpu: &Gpu, dy: DevicePtr, rows: usize, w: &CudaWeight, dx: DevicePtr) {
    assert!(w.trained, "weights packed for inference have no input gradient");
    let weights = w.rows.as_ref().unwrap_or(&w.data).at();
    if w.format == Format::Bf16
        && Lt::takes(w.n, w.k)
        && gpu.lt().is_some_and(|lt| lt.input_gradient(gpu, dy, weights, rows, w.n, w.k, dx))
    {
        return;
    }
    let product = Plain {
        a: (dy, w.n, 1),
        b: (weights, 1, w.k),
        sizes: (rows, w.k, w.n),
        scales: (0, 0),
        bias: 0,
        add: false,
        out: dx,
    };
    product.run(gpu, w.format);
}

/// `dw[n, k] += dy^T x`; both are in the format.
pub(super) fn weight_gradient(
    gpu: &Gpu,
    format: Format,
    x: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    n: usize,
    k: usize,
    dw: DevicePtr,
) {
    if format == Format::Bf16
        && Lt::takes(n, k)
        && gpu.lt().is_some_and(|lt| lt.weight_gradient(gpu, x, dy, rows, n, k, dw))
    {
        return;
    }
    let product = Plain {
        a: (dy, 1, n),
        b: (x, 1, k),
        sizes: (n, k, rows),
        scales: (0, 0),
        bias: 0,
        add: true,
        out: dw,
    };
    product.run(gpu, format);
}

/// A product with plain arithmetic, operands given as (address, stride of rows, stride along k).
struct Plain {
    a: (DevicePtr, usize, usize),
    b: (DevicePtr, usize, usize),
    sizes: (usize, usize, usize),
    scales: (DevicePtr, DevicePtr),
    bias: DevicePtr,
    add: bool,
    out: DevicePtr,
}

impl Plain {
    fn run(&self, gpu: &Gpu, format: Format) {
        let kernel = match format {
            Format::F32 => "product_f32",
            Format::Bf16 => "product_bf16",
            Format::Int8 => "product_i8",
            _ => "product_e4m3",
        };
        let Plain { a, b, sizes: (m, n, k), scales, bias, add, out } = *self;
        let given = args![
            a.0,
            a.1,
            a.2,
            b.0,
            b.1,
            b.2,
            m as u32,
            n as u32,
            k as u32,
            scales.0,
            scales.1,
            bias,
            u32::from(add),
            out
        ];
        gpu.launch("gemm_plain", kernel, [n.div_ceil(64), m.div_ceil(64), 1], 256, 0, given);
    }
}
