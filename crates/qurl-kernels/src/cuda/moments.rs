//! The optimizer's moments on a GPU, and an update with them.

use super::context::Context;
use super::device::Cuda;
use super::ffi::DevicePtr;
use super::kernels;
use super::launch::Launch;
use super::memory::{Buffer, HostState, Plain};
use super::queue::CudaQueue;
use crate::ops::Update;
use crate::types::{AdamW, DeviceError, MOMENT_BLOCK, MomentFormat, MomentShape, MomentValues, Moments};
use std::sync::Arc;

/// Both moments of a tensor.
pub struct CudaMoments {
    format: MomentFormat,
    len: usize,
    first: Stored,
    second: Stored,
}

/// One moment of a tensor.
struct Stored {
    /// [n], up to the end of a block where blocks share an exponent.
    values: Values,
    /// [ceil(n / MOMENT_BLOCK)], where they do; always on the device, a byte at a time would be slow on the
    /// bus.
    exponents: Option<Buffer>,
}

/// Where the values of a moment are.
enum Values {
    Device(Buffer),
    /// An update reads and writes each number once, in order, so it runs at the speed of the bus without
    /// copies on the device.
    Host(HostState),
}

impl CudaMoments {
    /// Zeros.
    pub(super) fn new(context: &Arc<Context>, shape: MomentShape) -> Result<Self, DeviceError> {
        let MomentShape { len, format, on_host } = shape;
        let on_device = |bytes| Buffer::zeros(context, bytes, "moments");
        let values = |bytes| match on_host {
            true => HostState::zeros(context, bytes).map(Values::Host),
            false => on_device(bytes).map(Values::Device),
        };
        let stored = || {
            let blocks = len.div_ceil(MOMENT_BLOCK);
            let (values, exponents) = match format {
                MomentFormat::F32 => (values(4 * len)?, None),
                MomentFormat::Bf16 => (values(2 * len)?, None),
                MomentFormat::EightBit => (values(MOMENT_BLOCK * blocks)?, Some(on_device(blocks)?)),
            };
            Ok::<_, DeviceError>(Stored { values, exponents })
        };
        Ok(CudaMoments { format, len, first: stored()?, second: stored()? })
    }
}

impl Values {
    fn at(&self) -> DevicePtr {
        match self {
            Values::Device(buffer) => buffer.at(),
            Values::Host(state) => state.at(),
        }
    }

    fn read<T: Plain>(&self, q: &mut CudaQueue, mut to: Vec<T>) -> Result<Vec<T>, DeviceError> {
        match self {
            Values::Device(buffer) => q.read_values(buffer.at(), &mut to)?,
            Values::Host(state) => state.read(q, &mut to)?,
        }
        Ok(to)
    }

    fn write<T: Plain>(&mut self, q: &mut CudaQueue, from: &[T]) -> Result<(), DeviceError> {
        match self {
            Values::Device(buffer) => q.write_values(buffer.at(), from),
            Values::Host(state) => state.write(q, from)?,
        }
        Ok(())
    }
}

impl Stored {
    fn exponents_at(&self) -> DevicePtr {
        self.exponents.as_ref().map_or(0, Buffer::at)
    }

    fn read(&self, q: &mut CudaQueue, len: usize, format: MomentFormat) -> Result<MomentValues, DeviceError> {
        Ok(match MomentValues::zeros(len, format) {
            MomentValues::F32(to) => MomentValues::F32(self.values.read(q, to)?),
            MomentValues::Bf16(to) => MomentValues::Bf16(self.values.read(q, to)?),
            MomentValues::EightBit { values, mut exponents } => {
                q.read_values(self.exponents_at(), &mut exponents)?;
                MomentValues::EightBit { values: self.values.read(q, values)?, exponents }
            }
        })
    }

    fn write(&mut self, q: &mut CudaQueue, from: &MomentValues) -> Result<(), DeviceError> {
        match from {
            MomentValues::F32(from) => self.values.write(q, from),
            MomentValues::Bf16(from) => self.values.write(q, from),
            MomentValues::EightBit { values, exponents } => {
                q.write_values(self.exponents_at(), exponents);
                self.values.write(q, values)
            }
        }
    }
}

/// See [`Queue::read_moments`](crate::Queue::read_moments).
pub(super) fn read(q: &mut CudaQueue, from: &CudaMoments) -> Result<Moments, DeviceError> {
    let CudaMoments { format, len, first, second } = from;
    Ok(Moments { first: first.read(q, *len, *format)?, second: second.read(q, *len, *format)? })
}

/// See [`Queue::write_moments`](crate::Queue::write_moments).
pub(super) fn write(q: &mut CudaQueue, to: &mut CudaMoments, from: &Moments) -> Result<(), DeviceError> {
    let CudaMoments { format: expected, len, first, second } = to;
    for (to, from) in [(first, &from.first), (second, &from.second)] {
        assert_eq!(from.len(), *len, "moments of another length");
        if from.format() != *expected {
            return Err(DeviceError::Moments { found: from.format(), expected: *expected });
        }
        to.write(q, from)?;
    }
    Ok(())
}

/// One update.
pub(super) fn adamw(q: &mut CudaQueue, args: Update<Cuda>) {
    let Update { adamw: a, w, g, at, moments } = args;
    // Of the whole tensor, or of the piece alone.
    let from = if g.len == w.len { 0 } else { at };
    assert!(from + w.len <= g.len && w.len == moments.len, "adamw: lengths");
    assert!(at.is_multiple_of(4), "adamw: four numbers a thread");
    if w.len == 0 {
        return;
    }
    let AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale } = a;
    let updates = i32::try_from(step).unwrap_or(i32::MAX);
    let correction1 = 1.0 - f64::from(beta1).powi(updates);
    let correction2 = 1.0 - f64::from(beta2).powi(updates);
    let args = kernels::AdamW {
        w: w.at(),
        g: g.at() + 4 * from as u64,
        m: moments.first.values.at(),
        v: moments.second.values.at(),
        m_exponents: moments.first.exponents_at(),
        v_exponents: moments.second.exponents_at(),
        count: w.len as u64,
        at: at as u32, // thresholds repeat after 2^32 numbers
        step: step as u32,
        grad_scale,
        beta1,
        beta2,
        rest1: 1.0 - beta1,
        rest2: 1.0 - beta2,
        keep: 1.0 - lr * weight_decay,
        step_size: (-f64::from(lr) / correction1) as f32,
        root_correction: (1.0 / correction2.sqrt()) as f32,
        eps,
    };
    let kernel = match moments.format {
        MomentFormat::F32 => kernels::adamw_f32,
        MomentFormat::Bf16 => kernels::adamw_bf16,
        MomentFormat::EightBit => kernels::adamw_8bit,
    };
    // Four numbers a thread; enough threads for the last ones of an odd length, too.
    q.launch(kernel, Launch::elements(w.len.div_ceil(4).clamp(4, 1 << 22)), args);
}
