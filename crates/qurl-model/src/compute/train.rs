//! Training: the forward pass of whole sequences with everything kept, and the hand-written backward pass.
//!
//! [`Tape`] owns the memory of one micro-batch. `forward` runs the blocks (the same [`layer::forward`] as inference)
//! and the head; `backward` takes `dL/dlogp` per scored token and adds to the gradients of all parameters. With
//! recomputation only the input of each block is kept, and a block's forward pass is run again on the way back.
//!
//! Scoring without gradients ([`Tape::score`], [`Tape::values`], [`Tape::logits`]) runs in the same memory, with any
//! network of the model: a step of RL scores its rollouts without allocating anything.

use super::batch::{Batch, PAGE, Targets};
use super::layer::{self, Activations, Temporary, head_rows};
use super::network::{Block, Network};
use crate::params::{LayerParams, Params};
use qurl_kernels::backend::{HeadGradient, HeadOutput, KvFormat, Output};
use qurl_kernels::{Backend, BackendError};

/// How a tape uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TapeOptions {
    /// Most rows (tokens) of a micro-batch.
    pub rows: usize,
    /// Most sequences of a micro-batch: each begins a page of keys and values of its own.
    pub sequences: usize,
    /// Keep only the inputs of the blocks and run each block again in the backward pass.
    pub recompute: bool,
}

impl TapeOptions {
    /// Pages that the keys and values of one block can take.
    pub fn pages(&self) -> usize {
        self.rows / PAGE + self.sequences + 1
    }
}

/// Memory of one micro-batch: activations, then gradients of activations.
pub struct Tape<B: Backend> {
    options: TapeOptions,
    /// Input of each block `[rows, d]`.
    inputs: Vec<B::Tensor>,
    /// Kept activations of each block; a single one with recomputation.
    acts: Vec<Activations<B>>,
    temp: Temporary<B>,
    /// Keys and values of the block that is running.
    kv: B::Kv,
    kv_format: KvFormat,
    /// `[rows, d]` the residual stream; backward: its gradient.
    x: B::Tensor,
    /// `[targets, d]` scored rows of the last block's output, and those normalised.
    picked: B::Tensor,
    hidden: B::Tensor,
    /// Gradients of a block's intermediate values.
    dnormed: B::Tensor,
    dattention: B::Tensor,
    dqkv: B::Tensor,
}

/// What a forward pass leaves for the backward pass.
pub struct Forward {
    batch: Batch,
    targets: Targets,
    temperature: f32,
    /// Log-probs, entropies and argmax tokens of the targets.
    pub out: HeadOutput,
}

impl<B: Backend> Tape<B> {
    /// Takes the memory.
    pub fn new(backend: &B, net: &Network<B>, options: TapeOptions) -> Result<Self, BackendError> {
        let c = net.config();
        let (rows, d) = (options.rows, c.hidden_size);
        let kept = if options.recompute { 1 } else { c.num_layers };
        let kv_format = net.options().kv_format;
        let zeros = |width: usize| backend.zeros(rows * width);
        Ok(Tape {
            options,
            inputs: (0..c.num_layers).map(|_| zeros(d)).collect::<Result<_, _>>()?,
            acts: (0..kept).map(|_| Activations::new(backend, net, rows, true)).collect::<Result<_, _>>()?,
            temp: Temporary::new(backend, net, rows)?,
            kv: backend.kv_pages(kv_format, options.pages(), PAGE, c.num_kv_heads, c.head_dim)?,
            kv_format,
            x: zeros(d)?,
            picked: zeros(d)?,
            hidden: zeros(d)?,
            dnormed: zeros(d)?,
            dattention: zeros(c.q_dim())?,
            dqkv: zeros(c.qkv_dim())?,
        })
    }

    /// How the tape uses memory.
    pub fn options(&self) -> TapeOptions {
        self.options
    }

    fn run_block(&mut self, backend: &B, net: &Network<B>, index: usize, batch: &Batch) {
        let acts = if self.options.recompute { &mut self.acts[0] } else { &mut self.acts[index] };
        layer::forward(
            backend,
            net,
            &net.blocks[index],
            batch,
            &mut self.kv,
            &mut self.x,
            acts,
            &mut self.temp,
        );
    }

    fn embed(&mut self, backend: &B, net: &Network<B>, batch: &Batch) {
        let TapeOptions { rows, sequences, .. } = self.options;
        assert!(batch.rows() <= rows && batch.spans.len() <= sequences, "micro-batch larger than its tape");
        backend.gather(&net.embed, &batch.ids, net.config().hidden_size, &mut self.x);
    }

    /// Runs all blocks and keeps nothing: every block overwrites the activations of the one before.
    fn run_blocks_once(&mut self, backend: &B, net: &Network<B>, batch: &Batch) -> Result<(), BackendError> {
        let c = net.config();
        self.embed(backend, net, batch);
        // Quantized networks may store keys and values in fewer bits than the trainer does.
        let mut own = match net.options().kv_format {
            format if format == self.kv_format => None,
            format => Some(backend.kv_pages(format, batch.pages.len(), PAGE, c.num_kv_heads, c.head_dim)?),
        };
        let kv = own.as_mut().unwrap_or(&mut self.kv);
        for block in &net.blocks {
            layer::forward(backend, net, block, batch, kv, &mut self.x, &mut self.acts[0], &mut self.temp);
        }
        Ok(())
    }

    /// Log-probs, entropies and argmax tokens of the targets of whole sequences, without gradients.
    pub fn score(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, BackendError> {
        self.run_blocks_once(backend, net, batch)?;
        self.pick(backend, net, &targets.rows);
        backend.head(&self.hidden, &net.head, &targets.tokens, temperature)
    }

    /// A critic's values of the chosen rows of whole sequences, without gradients.
    ///
    /// # Panics
    /// If the network has no value head.
    pub fn values(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, BackendError> {
        let Some(value_head) = &net.value_head else { panic!("the network has no value head") };
        self.run_blocks_once(backend, net, batch)?;
        self.pick(backend, net, rows);
        backend.row_dots(&self.hidden, rows.len(), value_head)
    }

    /// Logits `[rows.len(), vocabulary]` of the chosen rows of whole sequences: for diagnostics of few rows.
    pub fn logits(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, BackendError> {
        self.run_blocks_once(backend, net, batch)?;
        self.pick(backend, net, rows);
        let len = rows.len() * net.config().vocab_size;
        let mut logits = backend.zeros(len)?;
        backend.linear(&self.hidden, rows.len(), &net.head, None, Output::Store, &mut logits);
        backend.download(&logits, len)
    }

    fn run_blocks(&mut self, backend: &B, net: &Network<B>, batch: &Batch) {
        let (rows, d) = (batch.rows(), net.config().hidden_size);
        self.embed(backend, net, batch);
        for index in 0..net.blocks.len() {
            backend.copy(&self.x, &mut self.inputs[index], rows * d);
            self.run_block(backend, net, index, batch);
        }
    }

    /// Picks rows of the last block's output and normalises them into `hidden`.
    fn pick(&mut self, backend: &B, net: &Network<B>, rows: &[u32]) {
        let c = net.config();
        backend.gather(&self.x, rows, c.hidden_size, &mut self.picked);
        backend.rmsnorm(
            &self.picked,
            &net.final_norm,
            rows.len(),
            c.hidden_size,
            c.rms_norm_eps,
            &mut self.hidden,
        );
    }

    /// Runs whole sequences and scores the targets at this temperature.
    pub fn forward(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: Batch,
        targets: Targets,
        temperature: f32,
    ) -> Result<Forward, BackendError> {
        self.run_blocks(backend, net, &batch);
        self.pick(backend, net, &targets.rows);
        let out = backend.head(&self.hidden, &net.head, &targets.tokens, temperature)?;
        Ok(Forward { batch, targets, temperature, out })
    }

    /// Adds the gradients of the loss to `grads`, given `dL/dlogp` (and `dL/dentropy`) of the targets. Must follow the
    /// forward pass it belongs to.
    pub fn backward(
        &mut self,
        backend: &B,
        net: &Network<B>,
        forward: Forward,
        gradient: HeadGradient,
        grads: &mut Params<B::Tensor>,
    ) {
        let Forward { batch, targets, temperature, out } = forward;
        let dweight = grads.head.as_mut().unwrap_or(&mut grads.embed);
        let dhidden = &mut self.dnormed;
        backend.head_backward(
            &self.hidden,
            &net.head,
            &targets.tokens,
            temperature,
            &out,
            gradient,
            dhidden,
            dweight,
        );
        self.backward_from_hidden(backend, net, &batch, &targets.rows, grads);
    }

    /// Runs whole sequences and gives the critic's values of the chosen rows.
    ///
    /// # Panics
    /// If the network has no value head.
    pub fn forward_values(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, BackendError> {
        let Some(value_head) = &net.value_head else { panic!("the network has no value head") };
        self.run_blocks(backend, net, batch);
        self.pick(backend, net, rows);
        backend.row_dots(&self.hidden, rows.len(), value_head)
    }

    /// Backward of [`Tape::forward_values`], given `dL/dvalue` of the rows.
    ///
    /// # Panics
    /// If the network has no value head.
    pub fn backward_values(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        rows: &[u32],
        gradient: &[f32],
        grads: &mut Params<B::Tensor>,
    ) {
        let (Some(value_head), Some(dvalue_head)) = (&net.value_head, &mut grads.value_head) else {
            panic!("the network has no value head")
        };
        backend.row_dots_backward(
            &self.hidden,
            rows.len(),
            value_head,
            gradient,
            &mut self.dnormed,
            dvalue_head,
        );
        self.backward_from_hidden(backend, net, batch, rows, grads);
    }

    /// From the gradient of the picked hidden rows (in `dnormed`) back to the embedding.
    fn backward_from_hidden(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        picked: &[u32],
        grads: &mut Params<B::Tensor>,
    ) {
        let c = net.config();
        let (rows, d, eps) = (batch.rows(), c.hidden_size, c.rms_norm_eps);
        // `hidden` has done its work: it takes the gradient of the picked rows before the norm.
        backend.clear(&mut self.hidden, picked.len() * d);
        let (dy, dgain) = (&mut self.dnormed, &mut grads.final_norm);
        backend.rmsnorm_backward(
            &self.picked,
            &net.final_norm,
            picked.len(),
            d,
            eps,
            dy,
            &mut self.hidden,
            dgain,
        );
        // From here on, `x` is the gradient of the residual stream.
        backend.clear(&mut self.x, rows * d);
        backend.scatter_add(&self.hidden, picked, d, &mut self.x);
        for index in (0..net.blocks.len()).rev() {
            if self.options.recompute {
                // Run the block again from its input; the gradient waits in `hidden`.
                std::mem::swap(&mut self.x, &mut self.hidden);
                backend.copy(&self.inputs[index], &mut self.x, rows * d);
                self.run_block(backend, net, index, batch);
                std::mem::swap(&mut self.x, &mut self.hidden);
            }
            self.block_backward(backend, net, index, batch, &mut grads.layers[index]);
        }
        backend.scatter_add(&self.x, &batch.ids, d, &mut grads.embed);
    }

    /// One block: `x` holds the gradient of its output and receives that of its input.
    fn block_backward(
        &mut self,
        backend: &B,
        net: &Network<B>,
        index: usize,
        batch: &Batch,
        grads: &mut LayerParams<B::Tensor>,
    ) {
        let c = net.config();
        let (rows, d, f, eps) = (batch.rows(), c.hidden_size, c.intermediate_size, c.rms_norm_eps);
        let block: &Block<B> = &net.blocks[index];
        let input = &self.inputs[index];
        let acts = if self.options.recompute { &mut self.acts[0] } else { &mut self.acts[index] };
        let (Some(middle), Some(lse)) = (&acts.middle, &acts.lse) else {
            panic!("activations were not kept")
        };

        // MLP: x = middle + down(swiglu(gate_up(norm(middle))))
        let Temporary { normed, activated } = &mut self.temp;
        backend.mlp_backward(
            middle,
            &block.mlp_norm,
            rows,
            f,
            eps,
            &block.gate_up,
            &block.down,
            &self.x,
            normed,
            &mut acts.gate_up,
            activated,
            &mut grads.gate_up,
            &mut grads.down,
            &mut self.dnormed,
        );
        backend.rmsnorm_backward(
            middle,
            &block.mlp_norm,
            rows,
            d,
            eps,
            &mut self.dnormed,
            &mut self.x,
            &mut grads.mlp_norm,
        );

        // Attention: middle = input + o(attention(rope(qkv(norm(input)))))
        backend.linear_backward(
            &acts.attention,
            &self.x,
            rows,
            &block.o,
            &mut grads.o,
            None,
            &mut self.dattention,
        );
        let heads = net.heads();
        backend.attention_backward(
            heads,
            net.options().kv_format,
            &acts.qkv,
            &batch.spans,
            &acts.attention,
            &self.dattention,
            lse,
            &mut self.dqkv,
        );
        let rotated = c.num_heads + c.num_kv_heads;
        backend.rope(&mut self.dqkv, c.qkv_dim(), rotated, c.head_dim, &batch.positions, net.rope(), true);
        if let (Some(q_norm), Some(k_norm), Some(raw)) = (&block.q_norm, &block.k_norm, &acts.qkv_raw)
            && let (Some(dq_norm), Some(dk_norm)) = (&mut grads.q_norm, &mut grads.k_norm)
        {
            let (queries, keys) = head_rows(net, rows);
            backend.head_norm_backward(raw, q_norm, queries, eps, &mut self.dqkv, dq_norm);
            backend.head_norm_backward(raw, k_norm, keys, eps, &mut self.dqkv, dk_norm);
        }
        backend.norm_linear_backward(
            input,
            &block.attn_norm,
            rows,
            eps,
            &block.qkv,
            &self.dqkv,
            normed,
            &mut grads.qkv,
            grads.qkv_bias.as_mut(),
            &mut self.dnormed,
        );
        backend.rmsnorm_backward(
            input,
            &block.attn_norm,
            rows,
            d,
            eps,
            &mut self.dnormed,
            &mut self.x,
            &mut grads.attn_norm,
        );
    }
}
