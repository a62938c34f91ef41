//! A device with one queue: uploads, downloads and the operations that most tests call.

use qurl_kernels::cpu::Context;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::ops::{Linear, Norm, Output, Pack, RmsNorm, Rope, Sample};
use qurl_kernels::types::{Batch, Sampled, WeightShape};
use qurl_kernels::{Cpu, Device, Format, Queue, Rounding};
use std::cell::{RefCell, RefMut};
use std::sync::Arc;

/// A device and the queue that a test uses.
pub struct Ops<D: Device> {
    device: Arc<D>,
    queue: RefCell<D::Queue>,
}

/// The CPU at every level of this machine.
pub fn cpus(threads: usize) -> Vec<Ops<Cpu>> {
    Level::available().into_iter().map(|level| Ops::new(Cpu::new(level, threads))).collect()
}

impl<D: Device> Ops<D> {
    pub fn new(device: D) -> Ops<D> {
        let device = Arc::new(device);
        let queue = RefCell::new(device.queue().expect("a queue"));
        Ops { device, queue }
    }

    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// What the device is, for messages.
    pub fn name(&self) -> String {
        self.device.info().description
    }

    /// The queue, for one operation.
    pub fn queue(&self) -> RefMut<'_, D::Queue> {
        self.queue.borrow_mut()
    }

    /// A tensor with these values.
    pub fn up(&self, values: &[f32]) -> D::Tensor {
        self.queue().upload(values).expect("memory for a test")
    }

    /// A tensor of NaN: what an operation overwrites, it must not read.
    pub fn stale(&self, len: usize) -> D::Tensor {
        self.up(&vec![f32::NAN; len])
    }

    /// All values of a tensor, exactly.
    pub fn down(&self, tensor: &D::Tensor) -> Vec<f64> {
        let values = self.queue().read(tensor, D::len(tensor)).expect("results");
        values.into_iter().map(f64::from).collect()
    }

    /// Weights `[n, k]` that are trained.
    pub fn trained(&self, values: &[f32], n: usize, k: usize, format: Format) -> D::Weight {
        self.packed(values, WeightShape { n, k, format, trained: true }, Rounding::Nearest)
    }

    /// Weights `[n, k]` for forward passes.
    pub fn frozen(&self, values: &[f32], n: usize, k: usize, format: Format) -> D::Weight {
        self.packed(values, WeightShape { n, k, format, trained: false }, Rounding::Nearest)
    }

    pub fn packed(&self, values: &[f32], shape: WeightShape, rounding: Rounding) -> D::Weight {
        let mut to = self.device.weight(shape).expect("memory for a test");
        self.pack(&self.up(values), rounding, None, &mut to);
        to
    }

    pub fn pack(
        &self,
        from: &D::Tensor,
        rounding: Rounding,
        copy: Option<&mut D::Tensor>,
        to: &mut D::Weight,
    ) {
        self.queue().pack(Pack { from, rounding, copy, to }).expect("weights pack");
    }

    /// What rows leave in an MLP of this width.
    pub fn kept_mlp(&self, rows: usize, width: usize, format: Format) -> D::KeptMlp {
        self.device.kept_mlp(rows, width, format).expect("memory for a test")
    }

    /// The identity `[n, n]`, whose GEMM with f32 rows gives the rows; trained.
    pub fn identity(&self, n: usize) -> D::Weight {
        let one_or_zero = |i: usize| if i / n == i % n { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..n * n).map(one_or_zero).collect();
        self.trained(&values, n, n, Format::F32)
    }

    /// A batch with these rows.
    pub fn load(&self, rows: &Batch) -> D::Batch {
        let mut batch = self.device.batch();
        self.queue().load(&mut batch, rows);
        batch
    }

    pub fn linear(
        &self,
        x: &D::Tensor,
        rows: usize,
        w: &D::Weight,
        bias: Option<&D::Tensor>,
        output: Output,
        out: &mut D::Tensor,
    ) {
        self.queue().linear(Linear { adapter: None, x, rows, norm: None, w, bias, output, out });
    }

    pub fn rmsnorm(&self, x: &D::Tensor, rows: usize, gain: &D::Tensor, eps: f32, out: &mut D::Tensor) {
        self.queue().rmsnorm(RmsNorm { x, rows, norm: Norm { gain, eps }, out });
    }

    /// Samples as the batch says and waits for the tokens.
    pub fn sample(&self, hidden: &D::Tensor, head: &D::Weight, rows: &Batch) -> Vec<Sampled> {
        let (batch, count) = (self.load(rows), rows.samples.len());
        let mut out = self.device.tokens(count).expect("memory for a test");
        let mut queue = self.queue();
        queue.sample(Sample { hidden, head, batch: &batch, out: &mut out });
        let pending = queue.fetch(&out, count).expect("sampled tokens");
        queue.wait(pending).expect("sampled tokens")
    }
}

impl Ops<Cpu> {
    /// For kernels of the CPU that are no operations of a queue.
    pub fn context(&self) -> &Context {
        self.device.context()
    }
}

/// Rotary tables on a device.
pub struct Tables<D: Device> {
    cos: D::Tensor,
    sin: D::Tensor,
}

impl<D: Device> Tables<D> {
    pub fn new(ops: &Ops<D>, cos: &[f32], sin: &[f32]) -> Tables<D> {
        Tables { cos: ops.up(cos), sin: ops.up(sin) }
    }

    /// Tables that rotate nothing.
    pub fn still(ops: &Ops<D>, positions: usize, head_dim: usize) -> Tables<D> {
        let len = positions * head_dim / 2;
        Tables::new(ops, &vec![1.0; len], &vec![0.0; len])
    }

    pub fn rope(&self) -> Rope<'_, D> {
        Rope { cos: &self.cos, sin: &self.sin }
    }
}
