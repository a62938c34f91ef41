//! Backward of linear layers, alone and with what stands in front of them.
//!
//! A gradient that several products read is brought into their format once, and what only products read is made in it at
//! once: in bf16 a training step would otherwise spend a tenth of its time on conversions. Values are rounded as they would
//! be by themselves, so the bits are those of the parts (`tests/kernels/cuda_fused.rs`).

use super::ffi::DevicePtr;
use super::gpu::Gpu;
use super::launch::args;
use super::linear::{self, CudaWeight, Rows};
use super::memory::Slot;
use super::sums;
use crate::Format;

/// Threads of a block that computes gradients of SwiGLU, four numbers each.
const SWIGLU_THREADS: u32 = 256;
/// Numbers of a row that such a block takes.
const SWIGLU_SHARE: usize = 4 * SWIGLU_THREADS as usize;

/// Gates and ups become their gradients; `out`, on entry the gradient of the output, becomes the output.
pub(super) fn swiglu(gpu: &Gpu, gate_up: DevicePtr, out: DevicePtr, rows: usize, f: usize) {
    let given = args![gate_up, f as u32, out];
    gpu.launch_next("elementwise", "swiglu_backward", swiglu_grid(rows, f), SWIGLU_THREADS, 0, given);
}

/// RMSNorm of rows in the format of the weights that multiply them, in [`Slot::Left`].
pub(super) fn normed(
    gpu: &Gpu,
    x: DevicePtr,
    gain: DevicePtr,
    eps: f32,
    rows: usize,
    w: &CudaWeight,
) -> DevicePtr {
    if w.format != Format::Bf16 {
        return linear::left(gpu, w.format, Rows::Normed { x, gain, eps, largest: 0 }, rows, w.k).data;
    }
    let to = linear::operand_room(gpu, rows, w.k, Slot::Left);
    gpu.launch_next("norm", "norm_forward_bf16", [rows, 1, 1], 256, 0, args![x, gain, w.k as u32, eps, to]);
    to
}

/// `dw += dy^T x`, `dbias += sum dy` (unless it is 0) and `dx = dy W`; `x` is in the weights' format.
pub(super) fn gradients(
    gpu: &Gpu,
    x: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dw: DevicePtr,
    dbias: DevicePtr,
    dx: DevicePtr,
) {
    if dbias != 0 {
        sums::of_columns(gpu, dy, 0, rows, w.n, dbias);
    }
    let dy = linear::converted(gpu, w.format, dy, rows, w.n, Slot::Right);
    products(gpu, x, dy, rows, w, dw, dx);
}

/// `dw += dy^T x` and `dx = dy W`; both operands are in the weights' format.
pub(super) fn products(
    gpu: &Gpu,
    x: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dw: DevicePtr,
    dx: DevicePtr,
) {
    linear::weight_gradient(gpu, w.format, x, dy, rows, w.n, w.k, dw);
    linear::input_gradient(gpu, dy, rows, w, dx);
}

/// Backward of `swiglu(gate_up) down^T`: `ddown += ...`, and where the gradients of gates and ups are, in the weights'
/// format. In f32 they take the place of `gate_up`; in bf16, which products alone read, they come to [`Slot::Right`], and the
/// output of SwiGLU to [`Slot::Left`]. `activated` is working memory `[rows, down.k]`.
pub(super) fn swiglu_linear(
    gpu: &Gpu,
    gate_up: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    down: &CudaWeight,
    activated: DevicePtr,
    ddown: DevicePtr,
) -> DevicePtr {
    let (format, f) = (down.format, down.k);
    // Both products of `down` read it, and between them the gradients of gates and ups take the place of second operands.
    let dy = linear::converted(gpu, format, dy, rows, down.n, Slot::Gradient);
    linear::input_gradient(gpu, dy, rows, down, activated);
    let (gradients, out) = match format {
        Format::Bf16 => {
            let gradients = linear::operand_room(gpu, rows, 2 * f, Slot::Right);
            let out = linear::operand_room(gpu, rows, f, Slot::Left);
            let given = args![gate_up, activated, f as u32, gradients, out];
            gpu.launch_next(
                "elementwise",
                "swiglu_backward_bf16",
                swiglu_grid(rows, f),
                SWIGLU_THREADS,
                0,
                given,
            );
            (gradients, out)
        }
        _ => {
            swiglu(gpu, gate_up, activated, rows, f);
            (gate_up, activated)
        }
    };
    linear::weight_gradient(gpu, format, out, dy, rows, down.n, f, ddown);
    gradients
}

fn swiglu_grid(rows: usize, f: usize) -> [usize; 3] {
    [rows, f.div_ceil(SWIGLU_SHARE), 1]
}
