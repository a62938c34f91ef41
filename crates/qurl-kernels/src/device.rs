//! The seam, one half: a [`Device`] owns memory. What is computed in that memory is asked of a [`Queue`].

use crate::queue::Queue;
use crate::types::{DeviceError, Format, KvShape, MomentShape, WeightShape};
use std::sync::Arc;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// One line for people: what it is and how fast it may be.
    pub description: String,
    /// Its kind: devices of one kind compute the same bits.
    pub kind: String,
    /// Its number among the devices of its kind.
    pub ordinal: usize,
    /// Whether operations return before they are done. Then it pays to issue the next step before the last
    /// one is read, and to pad batches to few sizes, whose steps can be [replayed](Queue::replay).
    pub asynchronous: bool,
}

/// Bytes of a device's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Free now.
    pub free: usize,
    /// All of it.
    pub total: usize,
    /// What this process has allocated.
    pub allocated: usize,
    /// The most that this process had allocated at a time.
    pub peak: usize,
    /// Bytes of the host's memory that hold a part of the state, page-locked.
    pub on_host: usize,
}

/// What may be allocated of a device's own memory at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes at a time.
    pub bytes: usize,
    /// What set it, as errors name it: a key of a recipe.
    pub set_by: &'static str,
}

/// Something that computes: a CPU with its threads, a GPU. It allocates and says what it is; it may be shared
/// by threads, each with a [`Queue`] of its own.
///
/// ```
/// use qurl_kernels::types::{KvFormat, KvShape};
/// use qurl_kernels::{Cpu, Device, DeviceError, Queue};
/// use std::sync::Arc;
///
/// let device = Arc::new(Cpu::from_env()?);
/// println!("{}", device.info().description);
///
/// // Pages of 16 tokens with two heads of 64: eight bits a number and a scale for each head, for keys and
/// // for values.
/// let shape = KvShape { format: KvFormat::Int8, pages: 8, page_size: 16, kv_heads: 2, head_dim: 64 };
/// assert_eq!(device.kv_page_bytes(shape), 16 * 2 * 2 * (64 + 4));
/// let pages = device.kv_pages(shape)?;
///
/// let sums = std::thread::scope(|scope| {
///     let sum = |x: f32| -> Result<f64, DeviceError> {
///         let mut queue = device.queue()?;
///         let tensor = queue.upload(&vec![x; 1000])?;
///         queue.sum_squares(&[&tensor])
///     };
///     let threads = [2.0, 3.0].map(|x| scope.spawn(move || sum(x)));
///     threads.map(|thread| thread.join().expect("a thread that ends"))
/// });
/// assert_eq!(sums, [Ok(4000.0), Ok(9000.0)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Device: Send + Sync + Sized + 'static {
    /// A buffer of f32 numbers.
    type Tensor: Send + Sync;
    /// Packed weights of a linear layer.
    type Weight: Send + Sync;
    /// Pages with the keys and values of one layer.
    type Kv: Send + Sync;
    /// What an MLP leaves for its backward pass: gate and up projections, in a format of the device's choice.
    type KeptMlp: Send + Sync;
    /// An optimizer's first and second moments of a tensor, or of a piece of one.
    type Moments: Send + Sync;
    /// The rows of a pass: see [`Queue::load`].
    type Batch: Send + Sync;
    /// Sampled tokens of one step, in the device's memory.
    type Tokens: Send + Sync;
    /// Sampled tokens on their way to the host.
    type Pending: Send;
    /// Issues operations.
    type Queue: Queue<Device = Self>;
    /// See [`Device::counting`].
    type Counting: Device;

    /// What this device is.
    fn info(&self) -> DeviceInfo;
    /// Its memory, where it has its own.
    fn memory(&self) -> Option<DeviceMemory>;
    /// Refuses allocations beyond a limit from now on, where the device has memory of its own; `None` is
    /// none.
    fn limit_memory(&self, limit: Option<MemoryLimit>);
    /// A device on which nothing is computed and whose allocations are counted: a run's memory plan is what
    /// the real constructors and operations take there. It is like this one, or a large GPU where this one
    /// has no memory of its own.
    fn counting(&self) -> Self::Counting;
    /// A new queue. Operations of one queue run in their order; nothing orders those of two queues but
    /// [`Queue::synchronize`].
    fn queue(self: &Arc<Self>) -> Result<Self::Queue, DeviceError>;

    /// A tensor of zeros.
    fn zeros(&self, len: usize) -> Result<Self::Tensor, DeviceError>;
    /// Memory for packed weights, to be filled by [`Queue::pack`].
    fn weight(&self, shape: WeightShape) -> Result<Self::Weight, DeviceError>;
    /// Pages for the keys and values of one layer.
    fn kv_pages(&self, shape: KvShape) -> Result<Self::Kv, DeviceError>;
    /// Memory for what `rows` rows leave in an MLP of this width, for weights in a format that is trained, or
    /// in a quantized one beside trained weights in bf16.
    fn kept_mlp(&self, rows: usize, width: usize, format: Format) -> Result<Self::KeptMlp, DeviceError>;
    /// Moments, zero.
    fn moments(&self, shape: MomentShape) -> Result<Self::Moments, DeviceError>;
    /// A batch without rows.
    fn batch(&self) -> Self::Batch;
    /// Memory for the sampled tokens of `rows` rows.
    fn tokens(&self, rows: usize) -> Result<Self::Tokens, DeviceError>;

    /// Numbers of a tensor.
    fn len(tensor: &Self::Tensor) -> usize;
    /// What packed weights are.
    fn weight_shape(weight: &Self::Weight) -> WeightShape;
    /// Bytes of packed weights that a forward GEMM reads.
    fn weight_bytes(weight: &Self::Weight) -> usize;
    /// Bytes of one page of one layer.
    fn kv_page_bytes(&self, shape: KvShape) -> usize;
}
