//! [`Device`] for CUDA: memory on a GPU.

use super::batch::CudaBatch;
use super::canonical;
use super::constants::TOKEN_WORDS;
use super::context::{Context, OLDEST};
use super::ffi::{self, DevicePtr};
use super::kv::CudaKv;
use super::memory::Buffer;
use super::mlp::CudaKeptMlp;
use super::moments::CudaMoments;
use super::pending::CudaPending;
use super::queue::CudaQueue;
use super::weight::CudaWeight;
use crate::device::{Device, DeviceInfo, DeviceMemory, MemoryLimit};
use crate::types::{DeviceError, Format, KvShape, MomentShape, WeightShape};
use std::sync::Arc;

/// An NVIDIA GPU.
pub struct Cuda {
    context: Arc<Context>,
}

/// Numbers on the device.
pub struct CudaTensor {
    buffer: Buffer,
    pub(super) len: usize,
}

impl CudaTensor {
    pub(super) fn at(&self) -> DevicePtr {
        self.buffer.at()
    }
}

/// Sampled tokens on the device, three words each.
pub struct CudaTokens {
    buffer: Buffer,
    pub(super) rows: usize,
}

impl CudaTokens {
    pub(super) fn at(&self) -> DevicePtr {
        self.buffer.at()
    }
}

/// Names the newest architecture whose instructions are used: 80 runs the kernels of older GPUs on a newer
/// one.
const NEWEST: &str = "QURL_CUDA_NEWEST";

impl Cuda {
    /// A GPU of the machine by its number; an error where there is none or its driver or compiler is missing.
    /// [`NEWEST`] may keep it from newer instructions.
    pub fn open(ordinal: usize) -> Result<Cuda, DeviceError> {
        let newest = match std::env::var(NEWEST) {
            Err(_) => u32::MAX,
            Ok(given) => given.parse().ok().filter(|&newest| newest >= OLDEST).ok_or_else(|| {
                let reason =
                    format!("{NEWEST} is {given:?}, expected 80 (for compute capability 8.0) or more");
                DeviceError::Unavailable { device: format!("cuda:{ordinal}"), reason }
            })?,
        };
        Cuda::open_as(ordinal, newest)
    }

    /// The same, with instructions of at most the architecture `newest` (80 for compute capability 8.0): how
    /// tests see what older devices do.
    pub fn open_as(ordinal: usize, newest: u32) -> Result<Cuda, DeviceError> {
        Ok(Cuda { context: Arc::new(Context::open(ordinal, newest)?) })
    }

    pub(super) fn of(context: Arc<Context>) -> Cuda {
        Cuda { context }
    }

    /// Whether the machine has a driver, usable or not, or is said to have one.
    pub fn has_driver() -> bool {
        ffi::has_driver()
    }

    /// Compiles the kernels that the cache does not have, on all cores; `say` hears before how many files
    /// those are.
    pub fn compile_kernels(&self, say: impl FnOnce(usize)) -> Result<(), DeviceError> {
        self.context.compile_kernels(say)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Device for Cuda {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Kv = CudaKv;
    type KeptMlp = CudaKeptMlp;
    type Moments = CudaMoments;
    type Batch = CudaBatch;
    type Tokens = CudaTokens;
    type Pending = CudaPending;
    type Queue = CudaQueue;
    type Counting = Cuda;

    fn info(&self) -> DeviceInfo {
        let Context { name, sms, ordinal, .. } = &*self.context;
        let memory = self.context.memory_info();
        let free = memory.map(|(free, total)| format!(", {} of {} MiB free", free >> 20, total >> 20));
        let description = format!("cuda, {name}, {sms} SMs{}", free.unwrap_or_default());
        DeviceInfo { description, kind: format!("cuda, {name}"), ordinal: *ordinal, asynchronous: true }
    }

    fn memory(&self) -> Option<DeviceMemory> {
        let (free, total) = self.context.memory_info().ok()?;
        let (allocated, peak) = (self.context.allocated(), self.context.peak_memory());
        Some(DeviceMemory { free, total, allocated, peak, on_host: self.context.on_host() })
    }

    fn limit_memory(&self, limit: Option<MemoryLimit>) {
        self.context.set_limit(limit);
    }

    fn counting(&self) -> Cuda {
        Cuda::counting_as(&self.profile())
    }

    fn queue(self: &Arc<Self>) -> Result<CudaQueue, DeviceError> {
        CudaQueue::new(self)
    }

    fn zeros(&self, len: usize) -> Result<CudaTensor, DeviceError> {
        Ok(CudaTensor { buffer: Buffer::zeros(&self.context, 4 * len, "a tensor")?, len })
    }

    fn weight(&self, shape: WeightShape) -> Result<CudaWeight, DeviceError> {
        CudaWeight::new(&self.context, shape)
    }

    fn kv_pages(&self, shape: KvShape) -> Result<CudaKv, DeviceError> {
        CudaKv::new(&self.context, shape)
    }

    fn kept_mlp(&self, rows: usize, width: usize, format: Format) -> Result<CudaKeptMlp, DeviceError> {
        CudaKeptMlp::new(&self.context, rows, width, format)
    }

    fn moments(&self, shape: MomentShape) -> Result<CudaMoments, DeviceError> {
        CudaMoments::new(&self.context, shape)
    }

    fn batch(&self) -> CudaBatch {
        CudaBatch::default()
    }

    fn tokens(&self, rows: usize) -> Result<CudaTokens, DeviceError> {
        Ok(CudaTokens {
            buffer: Buffer::zeros(&self.context, 4 * TOKEN_WORDS * rows, "sampled tokens")?,
            rows,
        })
    }

    fn len(tensor: &CudaTensor) -> usize {
        tensor.len
    }

    fn weight_shape(weight: &CudaWeight) -> WeightShape {
        canonical::shape(weight)
    }

    fn weight_bytes(weight: &CudaWeight) -> usize {
        weight.bytes()
    }

    fn kv_page_bytes(&self, shape: KvShape) -> usize {
        CudaKv::page_bytes(shape)
    }
}
