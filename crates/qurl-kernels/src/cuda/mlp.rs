//! A block's MLP: gate and up projections, SwiGLU and down projection, what is kept for training, and the
//! backward pass.
//!
//! On Hopper the first GEMM brings gate and up together, in training, too: in bf16 the epilogue then also
//! keeps both projections. What is kept is in the format of the weights that the backward pass goes through,
//! since only that pass reads it: in bf16 the projections are rounded, as they are where PyTorch trains in
//! that format, and the output of SwiGLU, which the down projection read, is kept beside them; with eight-bit
//! weights, as it was before it was quantized. SwiGLU itself is always made of the sums in f32, so the
//! trainer's forward pass has the engine's bits.

use super::adapter;
use super::bits4::operand_format;
use super::constants::{ABSMAX_STRIDE, QUANTIZED_FOURS};
use super::context::Context;
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::gemm::{self, Gating, Packed};
use super::kernels::{self, QuantizeKnown, RowsBf16, SwigluBackward, SwigluBackwardBf16, SwigluRowsBf16};
use super::launch::Launch;
use super::linear::{Operand, Source, conversion_threads, eight_bits, gemm, normed, operand, padded_rows};
use super::linear_backward::{self, address, converted, gradient_format, input_gradient, weight_gradient};
use super::memory::Buffer;
use super::norm::{self, NormRows};
use super::queue::CudaQueue;
use super::weight::{CudaWeight, number_bytes};
use crate::ops::{Adapter, Mlp, MlpBackward, NormBackward, Output};
use crate::types::{DeviceError, Format, Rows};
use std::sync::Arc;

/// What an MLP leaves for its backward pass, in the format of its gradients.
pub struct CudaKeptMlp {
    rows: usize,
    /// Width of the MLP.
    f: usize,
    format: Format,
    /// `[rows, 2 f]` gate and up projections.
    gate_up: Buffer,
    /// `[rows, f]` the output of SwiGLU, in bf16; in f32 it is computed again.
    activated: Option<Buffer>,
}

impl CudaKeptMlp {
    /// Memory for `rows` rows of an MLP of width `f`.
    pub(super) fn new(
        context: &Arc<Context>,
        rows: usize,
        f: usize,
        format: Format,
    ) -> Result<Self, DeviceError> {
        let format = gradient_format(format);
        let bytes = number_bytes(format) * f;
        let activated = (format == Format::Bf16).then_some(padded_rows(rows) * bytes);
        let projected = 2 * rows * bytes;
        let gate_up = Buffer::zeros(context, projected, "kept projections")?;
        let zeros = |bytes| Buffer::zeros(context, bytes, "kept activations");
        let activated = activated.map(zeros).transpose()?;
        Ok(CudaKeptMlp { rows, f, format, gate_up, activated })
    }

    /// Where things are: gate and up projections, and the operand of the down projection where it is kept.
    /// Quantized weights keep what bf16 ones do.
    fn places(&self, rows: usize, f: usize, format: Format) -> (DevicePtr, Option<Operand>) {
        let fits = rows <= self.rows && f == self.f && gradient_format(format) == self.format;
        assert!(fits, "mlp: what is kept");
        let readable = padded_rows(self.rows);
        let activated = self.activated.as_ref().map(|b| Operand { data: b.at(), scales: 0, readable });
        (self.gate_up.at(), activated)
    }
}

/// [`crate::Queue::mlp`]
pub(super) fn mlp(queue: &mut CudaQueue, args: Mlp<Cuda>) {
    let Mlp { x, rows, norm, gate_up, down, gate_up_adapter, down_adapter, pass } = args;
    assert!(rows * gate_up.k <= x.len && down.n == gate_up.k && gate_up.n == 2 * down.k, "mlp: widths");
    let f = down.k;
    let source = normed(x, &norm, gate_up.k);
    let (kept, keep_only) = pass.split();
    let kept = kept.map(|kept| kept.places(rows, f, gate_up.format));
    // The residual stream that the down projection is added to, where it is wanted.
    let x_at = (!keep_only).then_some(x.at());
    // What is added to the projections comes before they are brought together.
    let apart = gate_up_adapter.is_some();
    let together = |w: &Packed| !apart && w.format == down.format && w.takes_gating(&queue.context);
    if let Some(packed) = gate_up.tiles().filter(together) {
        return gated_mlp(queue, source, rows, packed, (down, down_adapter), x_at, kept);
    }
    let projected = match kept {
        Some((gate_up, None)) => gate_up,
        Some((_, Some(_))) | None => queue.alloc(4 * rows * gate_up.n),
    };
    let first = operand(queue, gate_up.format, source, rows, gate_up.k);
    gemm(queue, first, rows, gate_up, 0, Output::Store, projected);
    adapter::forward(queue, gate_up_adapter, (gate_up, first), source, rows, projected);
    let source = Source::Swiglu(projected);
    let activated = kept.and_then(|(kept, activated)| Some((kept, activated?)));
    if let Some((kept, activated)) = activated {
        let args = SwigluRowsBf16 { gate_up: projected, f: f as u32, kept, out: activated.data };
        queue.launch(kernels::swiglu_bf16, Launch::blocks(rows, conversion_threads(f)), args);
    }
    let Some(x_at) = x_at else { return };
    let second = match activated {
        Some((_, activated)) if operand_format(down.format) == Format::Bf16 => activated,
        _ => operand(queue, down.format, source, rows, f),
    };
    gemm(queue, second, rows, down, 0, Output::Add, x_at);
    adapter::forward(queue, down_adapter, (down, second), source, rows, x_at);
}

/// Threads of a block that quantizes a part of a row, and numbers of that part.
const KNOWN_THREADS: usize = 256;
const KNOWN_SHARE: usize = 4 * QUANTIZED_FOURS * KNOWN_THREADS;

/// An MLP whose gate and up projections are brought together inside of the first GEMM, which keeps them where
/// training wants them and finds the absmax of each row of the result in eight bits: `x += (silu(gate) * up)
/// down^T`, where there is an `x` to add to.
fn gated_mlp(
    queue: &mut CudaQueue,
    source: Source,
    rows: usize,
    gate_up: Packed,
    (down, down_adapter): (&CudaWeight, Option<Adapter<Cuda>>),
    x: Option<DevicePtr>,
    kept: Option<(DevicePtr, Option<Operand>)>,
) {
    let (format, f) = (gate_up.format, down.k);
    let quantized = operand_format(format).is_quantized();
    let absmax = if quantized { queue.alloc(4 * ABSMAX_STRIDE * rows) } else { 0 };
    let source = match source {
        Source::Normed { x, gain, eps, .. } => Source::Normed { x, gain, eps, absmax },
        other => other,
    };
    let first = operand(queue, format, source, rows, gate_up.k);
    // In bf16 the result is what the second GEMM reads.
    let (kept, kept_activated) = kept.unwrap_or((0, None));
    let second = match kept_activated {
        Some(activated) if !quantized => activated,
        _ => Operand::alloc(queue, format, rows, f),
    };
    let activated = if quantized { queue.alloc(4 * rows * f) } else { second.data };
    let gated = Packed { gating: Gating::Swiglu { absmax, kept }, ..gate_up };
    gemm::linear(queue, first, rows, gated, 0, false, activated);
    if quantized {
        if x.is_some() {
            let kernel = eight_bits(format, kernels::known_i8, kernels::known_e4m3);
            let Operand { data: out, scales, .. } = second;
            let args = QuantizeKnown { x: activated, k: f as u32, absmax, out, scales };
            queue.launch(kernel, Launch::grid([rows, f.div_ceil(KNOWN_SHARE), 1], KNOWN_THREADS), args);
        }
        if let Some(Operand { data: out, .. }) = kept_activated {
            let args = RowsBf16 { x: activated, k: f as u32, out };
            queue.launch(kernels::rows_bf16, Launch::blocks(rows, conversion_threads(f)), args);
        }
    }
    let Some(x) = x else { return };
    gemm(queue, second, rows, down, 0, Output::Add, x);
    adapter::forward(queue, down_adapter, (down, second), Source::Rows(activated), rows, x);
}

/// Threads of a block that computes gradients of SwiGLU.
const SWIGLU_THREADS: usize = 256;
/// Numbers of a row that such a block takes, in f32 and in bf16.
const SWIGLU_SHARE: usize = 4 * SWIGLU_THREADS;
const SWIGLU_SHARE_BF16: usize = 8 * SWIGLU_THREADS;

/// [`crate::Queue::mlp_backward`]
pub(super) fn mlp_backward(queue: &mut CudaQueue, args: MlpBackward<Cuda>) {
    let MlpBackward { x, rows, norm, gate_up, down, kept, dgate_up, ddown, dx, .. } = args;
    let (gate_up_adapter, down_adapter) = (args.gate_up_adapter, args.down_adapter);
    let NormBackward { gain, eps, dgain } = norm;
    let (d, f) = (gate_up.k, down.k);
    assert!(gate_up.n == 2 * f && down.n == d && gain.len == d, "mlp backward: widths");
    assert!(rows * d <= x.len.min(dx.len), "mlp backward: rows");
    assert!(dgate_up.as_ref().is_none_or(|dw| 2 * f * d <= dw.len), "mlp backward: gate and up weights");
    assert!(ddown.as_ref().is_none_or(|dw| d * f <= dw.len), "mlp backward: down weights");
    assert!(dgain.as_ref().is_none_or(|dgain| dgain.len == d), "mlp backward: gain");
    assert!(gate_up.format == down.format, "mlp backward: formats");
    let (dgate_up, ddown, dgain) = (address(dgate_up), address(ddown), address(dgain));
    let format = down.format;
    let (projected, kept) = kept.places(rows, f, format);

    // The gradients of the projections take their place; `activated` is the output of SwiGLU.
    let dy = converted(queue, format, dx.at(), rows, d);
    let mut du = 0;
    let activated = match kept {
        Some(activated) => {
            let dout = match &down_adapter {
                Some(adapter) => {
                    let (dout, low) =
                        linear_backward::adapted_input_gradient_bf16(queue, dy, rows, down, adapter);
                    du = low;
                    dout
                }
                None => linear_backward::input_gradient_bf16(queue, dy, rows, down),
            };
            let launch = Launch::grid([rows, f.div_ceil(SWIGLU_SHARE_BF16), 1], SWIGLU_THREADS);
            let args = SwigluBackwardBf16 { gate_up: projected, dout, f: f as u32 };
            queue.launch(kernels::swiglu_backward_bf16, launch, args);
            activated
        }
        None => {
            let out = queue.alloc(4 * rows * f);
            input_gradient(queue, dy, rows, down, Output::Store, out);
            if let Some(adapter) = &down_adapter {
                du = adapter::add_input_gradient(queue, adapter, down, dy, rows, out);
            }
            let launch = Launch::grid([rows, f.div_ceil(SWIGLU_SHARE), 1], SWIGLU_THREADS);
            queue.launch(
                kernels::swiglu_backward,
                launch,
                SwigluBackward { gate_up: projected, f: f as u32, out },
            );
            Operand { data: out, scales: 0, readable: rows }
        }
    };
    if let Some(ddown) = ddown {
        weight_gradient(queue, activated.data, dy, rows, down, ddown);
    }
    if let Some(adapter) = down_adapter {
        adapter::weight_gradients(queue, adapter, Ok(activated), dy, du, rows);
    }
    let dnormed = queue.alloc(4 * rows * d);
    input_gradient(queue, projected, rows, gate_up, Output::Store, dnormed);
    if let Some(adapter) = gate_up_adapter {
        assert!(dgate_up.is_none(), "mlp backward: weights beside an adapter are frozen");
        let du = adapter::add_input_gradient(queue, &adapter, gate_up, projected, rows, dnormed);
        let source = Source::Normed { x: x.at(), gain: gain.at(), eps, absmax: 0 };
        adapter::weight_gradients(queue, adapter, Err(source), projected, du, rows);
    }
    let before = NormRows { x: x.at(), gain: gain.at(), rows: Rows::dense(rows, d), eps };
    match dgate_up {
        Some(dgate_up) => {
            let normed = norm::backward_and_normed(queue, before, dnormed, dx.at(), dgain, gate_up);
            weight_gradient(queue, normed, projected, rows, gate_up, dgate_up);
        }
        None => norm::backward(queue, before, dnormed, Some(dx.at()), dgain),
    }
}
