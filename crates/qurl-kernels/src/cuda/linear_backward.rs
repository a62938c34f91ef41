//! Backward of linear layers: a gradient that several products read is brought into their format once.

use super::ffi::DevicePtr;
use super::gpu::Gpu;
use super::launch::args;
use super::linear::{self, CudaWeight};
use super::memory::Slot;
use crate::Format;

/// Threads of a block that computes gradients of SwiGLU, four numbers each.
const SWIGLU_THREADS: u32 = 256;
/// Numbers of a row that such a block takes.
const SWIGLU_SHARE: usize = 4 * SWIGLU_THREADS as usize;

/// Gates and ups become their gradients; `out`, on entry the gradient of the output, becomes the output.
pub(super) fn swiglu(gpu: &Gpu, gate_up: DevicePtr, out: DevicePtr, rows: usize, f: usize) {
    let grid = [rows, f.div_ceil(SWIGLU_SHARE), 1];
    gpu.launch_next("elementwise", "swiglu_backward", grid, SWIGLU_THREADS, 0, args![gate_up, f as u32, out]);
}

/// The same for bf16 products, all that ever reads the results: gradients of gates and ups `[rows, 2 f]` in
/// [`Slot::Right`] and the output `[rows, f]` in [`Slot::Left`].
fn swiglu_bf16(gpu: &Gpu, gate_up: DevicePtr, dout: DevicePtr, rows: usize, f: usize) -> (DevicePtr, DevicePtr) {
    let gradients = linear::operand_room(gpu, rows, 2 * f, Slot::Right);
    let out = linear::operand_room(gpu, rows, f, Slot::Left);
    let given = args![gate_up, dout, f as u32, gradients, out];
    let grid = [rows, f.div_ceil(SWIGLU_SHARE), 1];
    gpu.launch_next("elementwise", "swiglu_backward_bf16", grid, SWIGLU_THREADS, 0, given);
    (gradients, out)
}

/// `dw += dy^T x` and `dx = dy W`; `dy` is in the weights' format and not in [`Slot::Left`], which `x` takes.
pub(super) fn gradients(
    gpu: &Gpu,
    x: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    w: &CudaWeight,
    dw: DevicePtr,
    dx: DevicePtr,
) {
    let x = linear::converted(gpu, w.format, x, rows, w.k, Slot::Left);
    linear::weight_gradient(gpu, w.format, x, dy, rows, w.n, w.k, dw);
    linear::input_gradient(gpu, dy, rows, w, false, dx);
}

/// Backward of `swiglu(gate_up) down^T` with bf16 weights: `ddown += ...`, and where the gradients of gates and ups are,
/// in bf16. `activated` is working memory `[rows, down.k]`.
pub(super) fn swiglu_linear(
    gpu: &Gpu,
    gate_up: DevicePtr,
    dy: DevicePtr,
    rows: usize,
    down: &CudaWeight,
    activated: DevicePtr,
    ddown: DevicePtr,
) -> DevicePtr {
    // Both products of `down` read it, and between them the gradients of gates and ups take the place of second operands.
    let dy = linear::converted(gpu, Format::Bf16, dy, rows, down.n, Slot::Gradient);
    linear::input_gradient(gpu, dy, rows, down, false, activated);
    let (gradients, out) = swiglu_bf16(gpu, gate_up, activated, rows, down.k);
    linear::weight_gradient(gpu, Format::Bf16, out, dy, rows, down.n, down.k, ddown);
    gradients
}
