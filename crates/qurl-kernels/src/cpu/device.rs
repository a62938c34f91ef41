//! [`Device`] for the CPU: memory of the machine, threads, and the level of instructions.

use super::buf::{Aligned, out_of_memory};
use super::gemm::{PackedB, Precision, Right};
use super::kv::KvPages;
use super::level::{Level, LevelError};
use super::moments::CpuMoments;
use super::quant::QuantB;
use super::queue::CpuQueue;
use super::{Context, canonical};
use crate::cuda::Cuda;
use crate::cuda::counting::GpuProfile;
use crate::device::{Device, DeviceInfo, DeviceMemory, MemoryLimit};
use crate::types::{Batch, DeviceError, Format, KvShape, MomentShape, Sampled, WeightShape};
use std::sync::Arc;

/// The CPU as a [`Device`].
pub struct Cpu {
    pub(super) ctx: Context,
}

/// Packed weights of a linear layer.
pub struct CpuWeight {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) forward: Forward,
    /// For the gradient of the input, where the weights are trained.
    pub(super) backward: Option<PackedB>,
}

/// Weights as the forward GEMM reads them.
pub(super) enum Forward {
    Float(PackedB),
    Quantized(QuantB),
}

/// The rows of a pass: on the CPU they are where they were.
#[derive(Default)]
pub struct CpuBatch(pub(super) Batch);

/// Sampled tokens.
pub struct CpuTokens(pub(super) Vec<Sampled>);

/// Why the CPU cannot be set up as asked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    /// `QURL_CPU` is wrong.
    #[error(transparent)]
    Level(#[from] LevelError),
    /// `QURL_THREADS` is wrong.
    #[error("QURL_THREADS={0:?} is not a number of threads; expected 1 to 1024")]
    Threads(String),
}

impl Cpu {
    /// All threads of the machine (or `QURL_THREADS`) at its best level (or `QURL_CPU`).
    pub fn from_env() -> Result<Cpu, CpuError> {
        let available = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = match std::env::var("QURL_THREADS") {
            Ok(text) if !text.is_empty() => match text.parse() {
                Ok(threads) if (1..=1024).contains(&threads) => threads,
                _ => return Err(CpuError::Threads(text)),
            },
            _ => available,
        };
        Ok(Cpu::new(Level::from_env()?, threads))
    }

    /// A given level and number of threads.
    pub fn new(level: Level, threads: usize) -> Cpu {
        Cpu { ctx: Context::new(level, threads) }
    }

    /// Level, threads and scratch memory of the kernels.
    pub fn context(&self) -> &Context {
        &self.ctx
    }
}

impl Device for Cpu {
    type Tensor = Aligned<f32>;
    type Weight = CpuWeight;
    type Kv = KvPages;
    /// `[rows, 2 f]` gate and up projections.
    type KeptMlp = Aligned<f32>;
    type Moments = CpuMoments;
    type Batch = CpuBatch;
    type Tokens = CpuTokens;
    /// Nothing is in flight: an operation is done when it returns.
    type Pending = Vec<Sampled>;
    type Queue = CpuQueue;
    type Counting = Cuda;

    fn info(&self) -> DeviceInfo {
        let description = format!("cpu, {} threads, {}", self.ctx.threads(), self.ctx.level());
        let kind = format!("cpu, {}", self.ctx.level());
        DeviceInfo { description, kind, ordinal: 0, asynchronous: false }
    }

    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// The memory is the machine's, whose limits are not ours.
    fn limit_memory(&self, _: Option<MemoryLimit>) {}

    fn counting(&self) -> Cuda {
        Cuda::counting_as(&GpuProfile::h200())
    }

    fn queue(self: &Arc<Self>) -> Result<CpuQueue, DeviceError> {
        Ok(CpuQueue::new(self.clone()))
    }

    fn zeros(&self, len: usize) -> Result<Aligned<f32>, DeviceError> {
        let missing = || out_of_memory(len.saturating_mul(size_of::<f32>()), "a tensor");
        Aligned::try_zeros(len).ok_or_else(missing)
    }

    fn weight(&self, shape: WeightShape) -> Result<CpuWeight, DeviceError> {
        let WeightShape { n, k, format, trained } = shape;
        let float = |precision| {
            let forward = Forward::Float(PackedB::new(&self.ctx, precision, k, n)?);
            let backward = trained.then(|| PackedB::new(&self.ctx, precision, n, k)).transpose()?;
            Ok(CpuWeight { n, k, forward, backward })
        };
        match format {
            Format::F32 => float(Precision::F32),
            Format::Bf16 => float(Precision::Bf16),
            Format::Int8 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 if trained => {
                let reason = "quantized weights have no gradients; train in f32 or bf16".to_string();
                Err(DeviceError::Pack { format, reason })
            }
            Format::Int8 | Format::Fp8 | Format::Fp8Block | Format::Int4 | Format::Nvfp4 => {
                let forward = Forward::Quantized(QuantB::new(&self.ctx, format, n, k)?);
                Ok(CpuWeight { n, k, forward, backward: None })
            }
        }
    }

    fn kv_pages(&self, shape: KvShape) -> Result<KvPages, DeviceError> {
        Ok(KvPages::new(shape))
    }

    fn kept_mlp(&self, rows: usize, width: usize, _format: Format) -> Result<Aligned<f32>, DeviceError> {
        self.zeros(rows * 2 * width)
    }

    fn moments(&self, shape: MomentShape) -> Result<CpuMoments, DeviceError> {
        CpuMoments::new(shape.len, shape.format)
    }

    fn batch(&self) -> CpuBatch {
        CpuBatch::default()
    }

    fn tokens(&self, rows: usize) -> Result<CpuTokens, DeviceError> {
        Ok(CpuTokens(vec![Sampled::default(); rows]))
    }

    fn len(tensor: &Aligned<f32>) -> usize {
        <[f32]>::len(tensor)
    }

    fn weight_shape(weight: &CpuWeight) -> WeightShape {
        canonical::shape(weight)
    }

    fn weight_bytes(weight: &CpuWeight) -> usize {
        match &weight.forward {
            Forward::Float(forward) => forward.bytes(),
            Forward::Quantized(forward) => forward.bytes(),
        }
    }

    fn kv_page_bytes(&self, shape: KvShape) -> usize {
        KvPages::page_bytes(shape)
    }
}

impl CpuWeight {
    /// As the forward GEMM reads it.
    pub(super) fn right(&self) -> Right<'_> {
        match &self.forward {
            Forward::Float(forward) => forward.into(),
            Forward::Quantized(forward) => forward.into(),
        }
    }

    /// In the numbers that gradients are computed with.
    pub(super) fn float(&self) -> &PackedB {
        match &self.forward {
            Forward::Float(forward) => forward,
            Forward::Quantized(_) => panic!("quantized weights have no gradients"),
        }
    }

    /// As the gradient of the input reads it.
    pub(super) fn transposed(&self) -> &PackedB {
        match &self.backward {
            Some(packed) => packed,
            None => panic!("weights packed for inference have no input gradient"),
        }
    }
}
