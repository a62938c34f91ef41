//! The seam, other half: a [`Queue`] issues the operations that models, the rollout engine and the trainer
//! are written with.
//!
//! Operations are coarse, one for each thing a transformer does, so that a device can fuse as it likes
//! inside. Tensors are opaque: a device decides where they live and how activations are stored; workspace is
//! the queue's own matter. Operations do not fail one by one (a device would report later anyway): what can
//! fail is allocating and reading results back, and those return errors. Shapes are the caller's
//! responsibility: a wrong one is a bug in this project and panics.
//!
//! Rows are tokens. Every operation treats its rows independently and sums in an order that depends on
//! nothing but the row (or, for gradients of weights, on the order of the rows).

use crate::device::Device;
use crate::ops::*;
use crate::types::{Batch, DeviceError, HeadOutput, LossGradient, Moments as HostMoments, Sampled};
use std::ops::Range;
use std::sync::Arc;

/// Operations in order, on one device. Used by `&mut`, since it owns stream, workspace, staging and recorded
/// steps.
///
/// ```
/// use qurl_kernels::ops::{Linear, Output, Pack};
/// use qurl_kernels::types::WeightShape;
/// use qurl_kernels::{Cpu, Device, Format, Queue, Rounding};
/// use std::sync::Arc;
///
/// let device = Arc::new(Cpu::from_env()?);
/// let mut queue = device.queue()?;
///
/// // A linear layer of three inputs and two outputs in int8, with a scale for each output: here both are
/// // one, and 0.5 is rounded to the even neighbour.
/// let from = queue.upload(&[127.0, 0.0, -64.0, 0.5, -127.0, 0.0])?;
/// let mut w = device.weight(WeightShape { n: 2, k: 3, format: Format::Int8, trained: false })?;
/// queue.pack(Pack { from: &from, rounding: Rounding::Nearest, copy: None, to: &mut w })?;
///
/// let x = queue.upload(&[1.0, 2.0, 127.0])?;
/// let mut out = device.zeros(2)?;
/// let output = Output::Store;
/// let (x, w) = (&x, &w);
/// queue.linear(Linear { x, rows: 1, norm: None, w, bias: None, adapter: None, output, out: &mut out });
/// assert_eq!(queue.read(&out, 2)?, [127.0 - 64.0 * 127.0, -127.0 * 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Queue: Send + Sized + 'static {
    /// Where the operations run.
    type Device: Device<Queue = Self>;

    /// The device.
    fn device(&self) -> &Arc<Self::Device>;
    /// Waits until everything issued so far is done.
    fn synchronize(&mut self) -> Result<(), DeviceError>;

    /// Overwrites the beginning of a tensor.
    fn write(&mut self, tensor: &mut Tensor<Self>, values: &[f32]);
    /// The first `len` values of a tensor.
    fn read(&mut self, tensor: &Tensor<Self>, len: usize) -> Result<Vec<f32>, DeviceError>;
    /// Copies the first `len` values.
    fn copy(&mut self, from: &Tensor<Self>, to: &mut Tensor<Self>, len: usize);
    /// Sets the first `len` values to zero.
    fn clear(&mut self, tensor: &mut Tensor<Self>, len: usize);
    /// Fills a tensor with random numbers around zero, of a deviation of about `factor`: weights for
    /// benchmarks.
    fn fill_random(&mut self, tensor: &mut Tensor<Self>, seed: u64, factor: f32);
    /// Makes the second matrix of an adapter, ready to be packed.
    fn spread(&mut self, args: Spread<Self::Device>);
    /// Appends the canonical bytes ([`crate::canonical`]) of packed weights.
    fn export(
        &mut self,
        weight: &<Self::Device as Device>::Weight,
        to: &mut Vec<u8>,
    ) -> Result<(), DeviceError>;
    /// Packs weights from their canonical bytes; an error where those are of another matrix.
    fn import(&mut self, bytes: &[u8], to: &mut <Self::Device as Device>::Weight) -> Result<(), DeviceError>;
    /// Packs weights.
    fn pack(&mut self, args: Pack<Self::Device>) -> Result<(), DeviceError>;

    /// Brings the rows of a pass to the device. The operations that take the batch see these rows.
    fn load(&mut self, batch: &mut <Self::Device as Device>::Batch, rows: &Batch);
    /// Runs a step whose only input is `batch`. A device may record what `run` issues and later replay the
    /// record without calling it: for the same `key` and a batch of the same shape, `run` must issue the same
    /// operations on the same buffers, and read no results. Keys of other buffers must be other keys.
    fn replay(&mut self, key: u64, batch: &<Self::Device as Device>::Batch, run: &mut dyn FnMut(&mut Self));

    /// Picks rows of a table: embeddings, rows that are scored or sampled.
    fn gather(&mut self, args: Gather<Self::Device>);
    /// Backward of [`Queue::gather`].
    fn scatter_add(&mut self, args: ScatterAdd<Self::Device>);
    /// RMSNorm.
    fn rmsnorm(&mut self, args: RmsNorm<Self::Device>);
    /// Backward of RMSNorm.
    fn rmsnorm_backward(&mut self, args: RmsNormBackward<Self::Device>);
    /// A linear layer, with the norm before it.
    fn linear(&mut self, args: Linear<Self::Device>);
    /// Backward of a linear layer.
    fn linear_backward(&mut self, args: LinearBackward<Self::Device>);
    /// A block's MLP.
    fn mlp(&mut self, args: Mlp<Self::Device>);
    /// Backward of a block's MLP.
    fn mlp_backward(&mut self, args: MlpBackward<Self::Device>);
    /// A block's attention, from queries, keys and values to the residual stream.
    fn attend(&mut self, args: Attend<Self::Device>);
    /// Backward of a block's attention.
    fn attend_backward(&mut self, args: AttendBackward<Self::Device>);
    /// Copies one page of keys and values to another.
    fn copy_page(&mut self, kv: &mut <Self::Device as Device>::Kv, from: usize, to: usize);

    /// The log-probability head. Logits never exist for more than a few rows at a time.
    fn head(&mut self, args: Head<Self::Device>) -> Result<HeadOutput, DeviceError>;
    /// Backward of the head.
    fn head_backward(&mut self, args: HeadBackward<Self::Device>);
    /// The head and its backward pass, for a loss whose derivatives by what the head says of a target depend
    /// on that target alone: `loss` is asked for ranges of targets, in order, and no logit is computed twice.
    /// The bits are those of [`Queue::head`] and [`Queue::head_backward`]. After an error of `loss` some
    /// gradients have been added.
    fn head_training<E: From<DeviceError>>(
        &mut self,
        args: HeadTraining<Self::Device>,
        mut loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
    ) -> Result<(), E> {
        let HeadTraining { hidden, head, trained, targets, temperature, dhidden, dweight } = args;
        let out = &self.head(Head { hidden, head, targets, temperature })?;
        let gradient = &loss(0..targets.len(), out)?;
        let gradient = gradient.borrowed();
        self.head_backward(HeadBackward {
            hidden,
            head,
            trained,
            targets,
            temperature,
            out,
            gradient,
            dhidden,
            dweight,
        });
        Ok(())
    }
    /// Samples tokens. Without truncation a token's log-probability has the bits of [`Queue::head`].
    fn sample(&mut self, args: Sample<Self::Device>);
    /// The most probable tokens of each row, the best first, with the log-probabilities that [`Queue::head`]
    /// gives them; none for a row whose logits are not finite.
    fn top(&mut self, args: Top<Self::Device>) -> Result<Vec<Vec<(u32, f32)>>, DeviceError>;
    /// Begins to bring the first `rows` sampled tokens to the host; what is sampled into `tokens` later does
    /// not change the answer.
    fn fetch(&mut self, tokens: &Tokens<Self>, rows: usize) -> Result<Pending<Self>, DeviceError>;
    /// Waits for sampled tokens, and for nothing that was issued after they were fetched.
    fn wait(&mut self, pending: Pending<Self>) -> Result<Vec<Sampled>, DeviceError>;
    /// A critic's values.
    fn row_dots(&mut self, args: RowDots<Self::Device>) -> Result<Vec<f32>, DeviceError>;
    /// Backward of a critic's values.
    fn row_dots_backward(&mut self, args: RowDotsBackward<Self::Device>);

    /// One AdamW update.
    fn adamw(&mut self, args: Update<Self::Device>);
    /// Copies moments to the host.
    fn read_moments(&mut self, from: &Moments<Self>) -> Result<HostMoments, DeviceError>;
    /// Overwrites moments with as many of the host; those in another format are an error.
    fn write_moments(&mut self, to: &mut Moments<Self>, from: &HostMoments) -> Result<(), DeviceError>;
    /// `to[i] += from[i]` for the first `len` values.
    fn add(&mut self, from: &Tensor<Self>, to: &mut Tensor<Self>, len: usize);
    /// [`Queue::add`], after which the first `len` values of `from` are zero.
    fn drain(&mut self, from: &mut Tensor<Self>, to: &mut Tensor<Self>, len: usize) {
        self.add(from, to, len);
        self.clear(from, len);
    }
    /// Adds up pieces in a binary tree.
    fn add_pieces(&mut self, args: AddPieces<Self::Device>);
    /// Rounds values to bf16, in half the memory.
    fn narrow(&mut self, args: Narrow<Self::Device>);
    /// Values of [`Queue::narrow`] in f32.
    fn widen(&mut self, args: Widen<Self::Device>);
    /// Sum of the squares of all values: of each tensor's, added up in order.
    fn sum_squares(&mut self, tensors: &[&Tensor<Self>]) -> Result<f64, DeviceError>;
    /// The parts of [`Queue::sum_squares`]: for each slice, the sums of the squares of blocks of
    /// [`SQUARES_BLOCK`](crate::types::SQUARES_BLOCK) values.
    fn block_squares(&mut self, slices: &[Slice<Self::Device>]) -> Result<Vec<Vec<f64>>, DeviceError>;
    /// [`Queue::sum_squares`] from the blocks of each whole tensor, to the bit.
    fn add_block_squares(&mut self, blocks: &[Vec<f64>]) -> Result<f64, DeviceError>;
    /// [`crate::checksum::values`] of a tensor.
    fn checksum(&mut self, tensor: &Tensor<Self>) -> Result<u64, DeviceError>;

    /// Begins an exchange of tensors between ranks, after everything issued so far. What is issued afterwards
    /// may run at the same time and must not use the tensors before [`Queue::join_exchanges`]: that is how
    /// gradients travel while the backward pass goes on. Every rank begins the same exchanges in the same
    /// order.
    fn begin_exchange(&mut self, exchange: Exchange<Self::Device>) -> Result<(), DeviceError>;
    /// What is issued from here on runs after all exchanges begun so far.
    fn join_exchanges(&mut self) -> Result<(), DeviceError>;
    /// Each rank its piece of everyone's tensor.
    fn all_to_all(&mut self, args: AllToAll<Self::Device>) -> Result<(), DeviceError> {
        self.begin_exchange(Exchange::AllToAll(vec![args]))?;
        self.join_exchanges()
    }
    /// Everyone's piece to all ranks.
    fn all_gather(&mut self, args: AllGather<Self::Device>) -> Result<(), DeviceError> {
        self.begin_exchange(Exchange::AllGather(vec![args]))?;
        self.join_exchanges()
    }
    /// One rank's tensor to all ranks.
    fn broadcast(&mut self, args: Broadcast<Self::Device>) -> Result<(), DeviceError> {
        self.begin_exchange(Exchange::Broadcast(args))?;
        self.join_exchanges()
    }

    /// A tensor with these values.
    fn upload(&mut self, values: &[f32]) -> Result<Tensor<Self>, DeviceError> {
        let mut tensor = self.device().zeros(values.len())?;
        self.write(&mut tensor, values);
        Ok(tensor)
    }
}

/// A tensor of a queue's device.
pub type Tensor<Q> = <<Q as Queue>::Device as Device>::Tensor;
/// Moments in the memory of a queue's device.
pub type Moments<Q> = <<Q as Queue>::Device as Device>::Moments;
/// Sampled tokens in the memory of a queue's device.
pub type Tokens<Q> = <<Q as Queue>::Device as Device>::Tokens;
/// Sampled tokens on their way to the host.
pub type Pending<Q> = <<Q as Queue>::Device as Device>::Pending;
