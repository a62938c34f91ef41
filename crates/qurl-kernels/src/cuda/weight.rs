//! Packed weights of linear layers.

use super::bits4::{self, is_bits4, operand_format};
use super::context::Context;
use super::ffi::DevicePtr;
use super::gemm::{self, Gating, Packed};
use super::kernels::{self, GemmUnpack, QuantizeWeights, RowsBf16};
use super::launch::Launch;
use super::linear::conversion_threads;
use super::memory::Buffer;
use super::queue::CudaQueue;
use crate::types::{DeviceError, Format, Rounding, WeightShape};
use std::sync::Arc;

/// Longest sums of int8 GEMMs that cannot leave 32 bits.
const INT8_MAX_K: usize = 65_536;

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
    /// The same in rows, for the backward pass of trained weights that are packed.
    rows: Option<Buffer>,
    /// One per output channel, for quantized values; of four bits what [`bits4::scale_bytes`] says.
    scales: Option<Buffer>,
}

/// Bytes of a number of tokens that weights in a format are multiplied with, and of weights but those in four
/// bits.
pub(super) fn number_bytes(format: Format) -> usize {
    match operand_format(format) {
        Format::F32 => 4,
        Format::Bf16 => 2,
        Format::Int8 | Format::Fp8 => 1,
        Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
    }
}

/// [`CudaWeight::new`] refuses such weights, so none of them comes further.
pub(super) fn unsupported(format: Format) -> ! {
    unreachable!("weights in {format} cannot be made on cuda")
}

impl CudaWeight {
    /// Memory for weights.
    pub(super) fn new(context: &Arc<Context>, shape: WeightShape) -> Result<Self, DeviceError> {
        let WeightShape { n, k, format, trained } = shape;
        let refuse = |reason: String| Err(DeviceError::Pack { format, reason });
        if format == Format::Fp8Block {
            return refuse("not supported on cuda; expected f32, bf16, int8, fp8, int4 or nvfp4".to_string());
        }
        if format.is_quantized() && trained {
            return refuse("quantized weights have no gradients; train in f32 or bf16".to_string());
        }
        if n == 0 || k == 0 {
            return refuse(format!("a matrix of {n} by {k} has no weights"));
        }
        if format == Format::Int8 && k > INT8_MAX_K {
            return refuse(format!("{k} inputs, but 32-bit sums hold at most {INT8_MAX_K}"));
        }
        let bytes = match is_bits4(format) {
            true => n * k.div_ceil(2),
            false => n * k * number_bytes(format),
        };
        let packed = gemm::packed_bytes(format, n, k);
        let data = Buffer::new(context, packed.unwrap_or(bytes), "weights")?;
        let both = trained && packed.is_some();
        let rows = both.then(|| Buffer::new(context, bytes, "rows of weights")).transpose()?;
        let scales = match format {
            Format::F32 | Format::Bf16 => 0,
            Format::Int4 | Format::Nvfp4 => bits4::scale_bytes(format, n, k, packed.is_some()),
            Format::Int8 | Format::Fp8 | Format::Fp8Block => 4 * n,
        };
        let scales = (scales > 0).then(|| Buffer::new(context, scales, "weight scales"));
        Ok(CudaWeight {
            n,
            k,
            format,
            trained,
            packed: packed.is_some(),
            data,
            rows,
            scales: scales.transpose()?,
        })
    }

    /// Packs weights `[n, k]`.
    pub(super) fn fill(
        &mut self,
        queue: &mut CudaQueue,
        weights: DevicePtr,
        rounding: Rounding,
    ) -> Result<(), DeviceError> {
        let (n, k, format) = (self.n, self.k, self.format);
        if format == Format::Bf16 && self.packed {
            let rows = self.rows.as_ref().map_or(0, Buffer::at);
            gemm::pack_bf16(queue, weights, n, k, rows, self.data.at());
            return Ok(());
        }
        if is_bits4(format) {
            let bad = self.no_bad_row(queue);
            self.fill_bits4(queue, weights, rounding, bad);
            return self.refuse_bad_row(queue, weights, bad);
        }
        let rows = match (&self.rows, self.packed) {
            (Some(rows), _) => rows.at(),
            (None, true) => queue.alloc(n * k * number_bytes(format)),
            (None, false) => self.data.at(),
        };
        let (launch, k32) = (Launch::blocks(n, conversion_threads(k)), k as u32);
        let kernel = match format {
            Format::F32 => {
                queue.copy_bytes(weights, self.data.at(), 4 * n * k);
                return Ok(());
            }
            Format::Bf16 => {
                queue.launch(kernels::rows_bf16, launch, RowsBf16 { x: weights, k: k32, out: rows });
                return Ok(());
            }
            Format::Int8 => kernels::weights_i8,
            Format::Fp8 => kernels::weights_e4m3,
            Format::Fp8Block | Format::Int4 | Format::Nvfp4 => unsupported(format),
        };
        let (stochastic, seed) = match rounding {
            Rounding::Nearest => (0u32, 0),
            Rounding::Stochastic { seed } => (1, seed),
        };
        let (bad, scales) = (self.no_bad_row(queue), self.scales());
        let args = QuantizeWeights { w: weights, k: k32, stochastic, seed, out: rows, scales, bad };
        queue.launch(kernel, launch, args);
        self.pack(queue, rows);
        self.refuse_bad_row(queue, weights, bad)
    }

    /// A place for the first row with a number that is not finite.
    fn no_bad_row(&self, queue: &mut CudaQueue) -> DevicePtr {
        let bad = queue.alloc(4);
        queue.fill_bytes(bad, 0xff, 4);
        bad
    }

    /// An error where a row was found there.
    fn refuse_bad_row(
        &self,
        queue: &mut CudaQueue,
        weights: DevicePtr,
        bad: DevicePtr,
    ) -> Result<(), DeviceError> {
        let (k, format) = (self.k, self.format);
        let mut row = [0u32];
        queue.read_values(bad, &mut row)?;
        match row[0] {
            u32::MAX => Ok(()),
            row => {
                let mut values = vec![0.0f32; k];
                queue.read_values(weights + (row as usize * k * 4) as u64, &mut values)?;
                let column = values.iter().position(|x| !x.is_finite()).unwrap_or(0);
                let reason =
                    format!("row {row}, column {column} is {}; expected finite numbers", values[column]);
                Err(DeviceError::Pack { format, reason })
            }
        }
    }

    /// Packs rows of numbers, where they are in tiles.
    pub(super) fn pack(&self, queue: &mut CudaQueue, rows: DevicePtr) {
        if self.packed {
            gemm::pack(queue, self.format, rows, self.n, self.k, self.data.at());
        }
    }

    /// Bytes that a forward GEMM reads.
    pub(super) fn bytes(&self) -> usize {
        self.data.bytes() + self.scales.as_ref().map_or(0, Buffer::bytes)
    }

    /// The weights in rows and in the numbers that gradients are computed with, for the gradient of the
    /// input: unpacked into the workspace where they are not there.
    pub(super) fn gradient_rows(&self, queue: &mut CudaQueue) -> DevicePtr {
        let there = !self.packed || self.rows.is_some();
        let kernel = match self.format {
            Format::F32 => return self.rows(),
            Format::Bf16 if there => return self.rows(),
            Format::Bf16 => kernels::gemm_unpack_bf16,
            Format::Int8 => kernels::gemm_unpack_i8,
            Format::Fp8 => kernels::gemm_unpack_e4m3,
            Format::Int4 | Format::Nvfp4 => return self.bits4_numbers(queue, false),
            Format::Fp8Block => unsupported(self.format),
        };
        let (n, k) = (self.n, self.k);
        let rows = queue.alloc(n * k * number_bytes(Format::Bf16));
        let k_blocks = self.tiles().map_or(0, |tiles| tiles.blocks() as u32);
        let (weights, scales) = (self.data.at(), self.scales());
        let args = GemmUnpack { weights, scales, rows, n: n as u32, k: k as u32, k_blocks };
        queue.launch(kernel, Launch::elements(n * k.div_ceil(8)), args);
        rows
    }

    /// The numbers that the forward pass reads.
    pub(super) fn data(&self) -> &Buffer {
        &self.data
    }

    /// The scales, where there are some.
    pub(super) fn scale_buffer(&self) -> Option<&Buffer> {
        self.scales.as_ref()
    }

    pub(super) fn scales(&self) -> DevicePtr {
        self.scales.as_ref().map_or(0, Buffer::at)
    }

    /// The weights in rows: those of the forward pass where they are not in tiles, and of the backward pass
    /// always.
    pub(super) fn rows(&self) -> DevicePtr {
        self.rows.as_ref().unwrap_or(&self.data).at()
    }

    /// The weights in tiles, where they are.
    pub(super) fn tiles(&self) -> Option<Packed> {
        let packed = Packed {
            format: self.format,
            n: self.n,
            k: self.k,
            tiles: self.data.at(),
            scales: self.scales(),
            gating: Gating::None,
        };
        self.packed.then_some(packed)
    }
}
