//! Training: the forward pass of whole sequences with everything kept, and the hand-written backward pass.
//!
//! [`Tape`] owns the memory of one micro-batch. `forward` runs the blocks (the same [`layer::forward`] as
//! inference) and the head; `backward` takes `dL/dlogp` per scored token and adds to the gradients of all
//! parameters. What is kept of each block is a matter of memory alone ([`Recompute`]): what is not kept is
//! computed again in the backward pass, with the same bits.
//!
//! The forward pass may be run by another network than the one that gradients pass through, packed from the
//! same master weights in any format, with keys and values in any format ([`Tape::train_straight`]): rounding
//! then has the gradient of the identity. What was rounded on the way, activations included, is kept as it
//! was before, and keys and values as they are after it, since that is where attention's derivative is taken.
//!
//! A leaf that is frozen has no numbers in the tree of gradients, and its gradient is not computed.
//!
//! Scoring without gradients ([`Tape::score`], [`Tape::values`], [`Tape::logits`]) runs in the same memory,
//! with any network of the model: a step of RL scores its rollouts without allocating anything.

mod backward;
mod recompute;
mod score;

use super::batch::{PAGE, Targets};
use super::layer::{self, Activations};
use super::network::{Block, Network};
use super::weights::{GradientSink, Weights, next_forward};
use backward::trained;
use qurl_kernels::ops::{
    Gather, Head, HeadBackward, HeadTraining, Index, MlpPass, Norm, RmsNorm, RowDots, RowDotsBackward,
};
use qurl_kernels::types::{Batch, HeadGradient, HeadOutput, KvShape, LossGradient};
use qurl_kernels::{Device, DeviceError, KvFormat, Queue};
pub use recompute::Recompute;
use std::ops::Range;

/// How a tape uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TapeOptions {
    /// Most rows (tokens) of a micro-batch.
    pub rows: usize,
    /// Most sequences of a micro-batch: each begins a page of keys and values of its own.
    pub sequences: usize,
    /// What the backward pass computes again.
    pub recompute: Recompute,
}

impl TapeOptions {
    /// Pages that the keys and values of one block can take.
    pub fn pages(&self) -> usize {
        self.rows / PAGE + self.sequences + 1
    }
}

/// Memory of one micro-batch: activations, then gradients of activations.
pub struct Tape<D: Device> {
    options: TapeOptions,
    /// The rows of the micro-batch at hand, and how many they are.
    batch: D::Batch,
    rows: usize,
    /// Input of each block `[rows, d]`.
    inputs: Vec<D::Tensor>,
    /// Kept activations of each block; a single one where blocks are run again.
    acts: Vec<Activations<D>>,
    /// Gate and up projections of each block; a single one where they are computed again.
    mlps: Vec<D::KeptMlp>,
    /// Keys and values of the block that is running.
    kv: D::Kv,
    kv_format: KvFormat,
    /// `[rows, d]` the residual stream; backward: its gradient.
    x: D::Tensor,
    /// `[targets, d]` scored rows of the last block's output, and those normalised.
    picked: D::Tensor,
    hidden: D::Tensor,
    /// `[targets, d]` gradient of `hidden`.
    dhidden: D::Tensor,
    /// `[rows, qkv]` gradient of a block's queries, keys and values.
    dqkv: D::Tensor,
}

/// What a forward pass leaves for the backward pass.
pub struct Forward {
    targets: Targets,
    temperature: f32,
    /// Log-probs, entropies and argmax tokens of the targets.
    pub out: HeadOutput,
}

impl<D: Device> Tape<D> {
    /// Takes the memory.
    pub fn new(device: &D, net: &Network<D>, options: TapeOptions) -> Result<Self, DeviceError> {
        Self::with_kv(device, net, net.options().kv_format, options)
    }

    /// Takes the memory, for forward passes of a network with keys and values in another format.
    pub fn with_kv(
        device: &D,
        net: &Network<D>,
        kv_format: KvFormat,
        options: TapeOptions,
    ) -> Result<Self, DeviceError> {
        let c = net.config();
        let (rows, d) = (options.rows, c.hidden_size);
        let (blocks, mlps) = options.recompute.kept(c.num_layers);
        let zeros = |width: usize| device.zeros(rows * width);
        Ok(Tape {
            options,
            batch: device.batch(),
            rows: 0,
            inputs: (0..c.num_layers).map(|_| zeros(d)).collect::<Result<_, _>>()?,
            acts: (0..blocks).map(|_| Activations::new(device, net, rows, true)).collect::<Result<_, _>>()?,
            mlps: (0..mlps).map(|_| layer::kept_mlp(device, net, rows)).collect::<Result<_, _>>()?,
            kv: device.kv_pages(KvShape { format: kv_format, ..net.kv_shape(options.pages(), PAGE) })?,
            kv_format,
            x: zeros(d)?,
            picked: zeros(d)?,
            hidden: zeros(d)?,
            dhidden: zeros(d)?,
            dqkv: zeros(c.qkv_dim())?,
        })
    }

    /// How the tape uses memory.
    pub fn options(&self) -> TapeOptions {
        self.options
    }

    /// Runs a block of a forward pass that a backward pass follows: what that computes again is not kept now.
    fn run_block(&mut self, queue: &mut D::Queue, net: &Network<D>, block: &Block<D>, index: usize) {
        let last = index + 1 == net.config().num_layers;
        let (at, mlp) = self.options.recompute.places(index);
        let acts = &mut self.acts[at];
        let written = match self.options.recompute.of_block(last) {
            Recompute::None => acts.keep(MlpPass::Keep(&mut self.mlps[mlp])),
            Recompute::Mlp => acts.keep(MlpPass::Forward),
            Recompute::Block => acts.pass(),
        };
        let rows = (&self.batch, self.rows);
        layer::forward(queue, net, block, rows, &mut self.kv, &mut self.x, written);
    }

    fn embed(&mut self, queue: &mut D::Queue, net: &Network<D>, batch: &Batch) {
        let TapeOptions { rows, sequences, .. } = self.options;
        assert!(batch.rows() <= rows && batch.spans.len() <= sequences, "micro-batch larger than its tape");
        queue.load(&mut self.batch, batch);
        self.rows = batch.rows();
        let index = Index::Tokens { batch: &self.batch, sampled: None };
        let width = net.config().hidden_size;
        queue.gather(Gather { table: &net.embed, index, width, out: &mut self.x });
    }

    fn value_head(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        let Some(w) = &net.value_head else { panic!("the network has no value head") };
        self.pick(queue, net, rows);
        queue.row_dots(RowDots { hidden: &self.hidden, rows: rows.len(), w })
    }

    fn run_blocks(
        &mut self,
        queue: &mut D::Queue,
        weights: &mut impl Weights<D>,
        batch: &Batch,
    ) -> Result<(), DeviceError> {
        let net = weights.network();
        assert!(net.options().kv_format == self.kv_format, "tape: format of keys and values");
        let (d, layers) = (net.config().hidden_size, net.config().num_layers);
        self.embed(queue, net, batch);
        for index in 0..layers {
            queue.copy(&self.x, &mut self.inputs[index], self.rows * d);
            next_forward(queue, weights, index)?;
            let (net, block) = (weights.network(), weights.block(index));
            self.run_block(queue, net, block, index);
        }
        Ok(())
    }

    /// Picks rows of the last block's output and normalises them into `hidden`.
    fn pick(&mut self, queue: &mut D::Queue, net: &Network<D>, rows: &[u32]) {
        let c = net.config();
        let (index, width) = (Index::Rows(rows), c.hidden_size);
        queue.gather(Gather { table: &self.x, index, width, out: &mut self.picked });
        let norm = Norm { gain: &net.final_norm, eps: c.rms_norm_eps };
        queue.rmsnorm(RmsNorm { x: &self.picked, rows: rows.len(), norm, out: &mut self.hidden });
    }

    /// Runs whole sequences and scores the targets at this temperature.
    pub fn forward(
        &mut self,
        queue: &mut D::Queue,
        mut weights: impl Weights<D>,
        batch: &Batch,
        targets: Targets,
        temperature: f32,
    ) -> Result<Forward, DeviceError> {
        self.run_blocks(queue, &mut weights, batch)?;
        let net = weights.network();
        self.pick(queue, net, &targets.rows);
        let (hidden, tokens) = (&self.hidden, &targets.tokens);
        let out = queue.head(Head { hidden, head: &net.head, targets: tokens, temperature })?;
        Ok(Forward { targets, temperature, out })
    }

    /// Adds the gradients of the loss to `grads`, given `dL/dlogp` (and `dL/dentropy`) of the targets. Must
    /// follow the forward pass it belongs to.
    pub fn backward(
        &mut self,
        queue: &mut D::Queue,
        weights: impl Weights<D>,
        forward: Forward,
        gradient: HeadGradient,
        grads: &mut impl GradientSink<D>,
    ) -> Result<(), DeviceError> {
        self.backward_straight(queue, None, weights, forward, gradient, grads)
    }

    /// [`Tape::backward`] through `weights` of a forward pass that `ran` has run, where there is one: another
    /// network of the same weights.
    pub fn backward_straight(
        &mut self,
        queue: &mut D::Queue,
        ran: Option<&Network<D>>,
        mut weights: impl Weights<D>,
        forward: Forward,
        gradient: HeadGradient,
        grads: &mut impl GradientSink<D>,
    ) -> Result<(), DeviceError> {
        let net = weights.network();
        let ran_head = &ran.unwrap_or(net).head;
        let Forward { targets, temperature, out } = forward;
        queue.head_backward(HeadBackward {
            hidden: &self.hidden,
            head: ran_head,
            trained: net.trained_head(),
            targets: &targets.tokens,
            temperature,
            out: &out,
            gradient,
            dhidden: &mut self.dhidden,
            dweight: trained::<D>(grads.head()),
        });
        self.backward_from_hidden(queue, ran, &mut weights, &targets.rows, grads)
    }

    /// [`Tape::forward`] and [`Tape::backward`] in one, for a loss whose derivatives by what the head says of
    /// a target depend on that target alone: it is asked for ranges of targets, in order, and the head
    /// computes its logits once. The gradients have the same bits. After an error of the loss some have been
    /// added.
    pub fn train<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        weights: impl Weights<D>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
        loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
        grads: &mut impl GradientSink<D>,
    ) -> Result<(), E> {
        self.train_straight(queue, None, weights, batch, targets, temperature, loss, grads)
    }

    /// [`Tape::train`] with a forward pass of `ran`, where there is one, another network of the same weights,
    /// and gradients through `weights`.
    pub fn train_straight<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        ran: Option<&Network<D>>,
        mut weights: impl Weights<D>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
        loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
        grads: &mut impl GradientSink<D>,
    ) -> Result<(), E> {
        match ran {
            Some(mut ran) => self.run_blocks(queue, &mut ran, batch)?,
            None => self.run_blocks(queue, &mut weights, batch)?,
        }
        let net = weights.network();
        let ran_net = ran.unwrap_or(net);
        self.pick(queue, ran_net, &targets.rows);
        let head = HeadTraining {
            hidden: &self.hidden,
            head: &*ran_net.head,
            trained: net.trained_head(),
            targets: &targets.tokens,
            temperature,
            dhidden: &mut self.dhidden,
            dweight: trained::<D>(grads.head()),
        };
        queue.head_training(head, loss)?;
        Ok(self.backward_from_hidden(queue, ran, &mut weights, &targets.rows, grads)?)
    }

    /// Runs whole sequences and gives the critic's values of the chosen rows.
    ///
    /// # Panics
    /// If the network has no value head.
    pub fn forward_values(
        &mut self,
        queue: &mut D::Queue,
        mut weights: impl Weights<D>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        self.run_blocks(queue, &mut weights, batch)?;
        self.value_head(queue, weights.network(), rows)
    }

    /// Backward of [`Tape::forward_values`], given `dL/dvalue` of the rows.
    ///
    /// # Panics
    /// If the network has no value head.
    pub fn backward_values(
        &mut self,
        queue: &mut D::Queue,
        mut weights: impl Weights<D>,
        rows: &[u32],
        gradient: &[f32],
        grads: &mut impl GradientSink<D>,
    ) -> Result<(), DeviceError> {
        let (Some(w), Some(dw)) = (&weights.network().value_head, grads.value_head()) else {
            panic!("the network has no value head")
        };
        let (hidden, dhidden) = (&self.hidden, &mut self.dhidden);
        queue.row_dots_backward(RowDotsBackward { hidden, w, gradient, dhidden, dw });
        self.backward_from_hidden(queue, None, &mut weights, rows, grads)
    }
}
