//! The forward pass of one transformer block: the only one there is. A backward pass that kept less than it
//! needs runs it again, or its MLP alone, with [`MlpPass::KeepOnly`].

use super::adapters::beside;
use super::network::{Block, Network};
use crate::params::{DenseMlp, MlpParams};
use qurl_kernels::ops::{Attend, KeptAttention, Linear, Mlp, MlpPass, Norm, Output, QkNorm};
use qurl_kernels::{Device, DeviceError, Queue};

/// What a block's forward pass writes. Training gives every block its own and keeps them for the backward
/// pass; inference uses one for all blocks, and keeps nothing.
pub struct Activations<D: Device> {
    /// `[rows, qkv]` queries, keys (both rotated) and values.
    pub(crate) qkv: D::Tensor,
    /// Only in training.
    pub(crate) kept: Option<Kept<D>>,
}

/// What the backward pass of a block needs of its attention, and of its MLP but for the gate and up
/// projections, which are the widest and have a buffer of their own ([`kept_mlp`]).
pub struct Kept<D: Device> {
    /// `[rows, qkv]` before QK-norm; only for models that have it.
    pub(crate) qkv_raw: Option<D::Tensor>,
    /// `[rows, heads * head_dim]` output of attention.
    pub(crate) attention: D::Tensor,
    /// `[rows, heads]` softmax denominators.
    pub(crate) lse: D::Tensor,
    /// `[rows, d]` the residual stream between attention and MLP.
    pub(crate) middle: D::Tensor,
}

/// Memory for the gate and up projections of `rows` rows of a block.
pub(crate) fn kept_mlp<D: Device>(
    device: &D,
    net: &Network<D>,
    rows: usize,
) -> Result<D::KeptMlp, DeviceError> {
    device.kept_mlp(rows, net.config().intermediate_size, net.options().format)
}

impl<D: Device> Activations<D> {
    /// Memory for `rows` rows.
    pub fn new(device: &D, net: &Network<D>, rows: usize, kept: bool) -> Result<Self, DeviceError> {
        let c = net.config();
        let zeros = |width: usize| device.zeros(rows * width);
        let kept_buffers = || {
            Ok::<_, DeviceError>(Kept {
                qkv_raw: c.qk_norm.then(|| zeros(c.qkv_dim())).transpose()?,
                attention: zeros(c.q_dim())?,
                lse: zeros(c.num_heads)?,
                middle: zeros(c.hidden_size)?,
            })
        };
        Ok(Activations { qkv: zeros(c.qkv_dim())?, kept: kept.then(kept_buffers).transpose()? })
    }
}

/// What one pass of a block writes beside the residual stream.
pub struct Written<'a, D: Device> {
    qkv: &'a mut D::Tensor,
    kept: Option<&'a mut Kept<D>>,
    mlp: MlpPass<'a, D>,
}

impl<D: Device> Activations<D> {
    /// For a pass with a backward, where there is memory to keep what it needs; what the MLP does is said
    /// apart.
    pub fn keep<'a>(&'a mut self, mlp: MlpPass<'a, D>) -> Written<'a, D> {
        Written { qkv: &mut self.qkv, kept: self.kept.as_mut(), mlp }
    }

    /// For a pass without a backward: a device may fuse what is not kept and never write it.
    pub fn pass(&mut self) -> Written<'_, D> {
        Written { qkv: &mut self.qkv, kept: None, mlp: MlpPass::Forward }
    }
}

/// Runs one block on the rows of the batch: `x[rows, d]` is the residual stream, read and updated; where the
/// MLP only keeps, to what it is between attention and MLP.
pub fn forward<D: Device>(
    queue: &mut D::Queue,
    net: &Network<D>,
    block: &Block<D>,
    (batch, rows): (&D::Batch, usize),
    kv: &mut D::Kv,
    x: &mut D::Tensor,
    written: Written<D>,
) {
    let c = net.config();
    let (w, low, eps) = (&block.params, &block.adapters, c.rms_norm_eps);
    let Written { qkv, kept, mlp: pass } = written;
    let (mut raw, mut attention, mut middle) = (None, None, None);
    if let Some(kept) = kept {
        raw = kept.qkv_raw.as_mut();
        attention = Some((&mut kept.attention, &mut kept.lse));
        middle = Some(&mut kept.middle);
    }

    queue.linear(Linear {
        x,
        rows,
        norm: Some(Norm { gain: w.attn_norm.tensor(), eps }),
        w: w.qkv.weight(),
        bias: w.qkv_bias.as_ref().map(|bias| bias.tensor()),
        adapter: beside(&low.qkv),
        output: Output::Store,
        out: qkv,
    });
    let head_norms = w.q_norm.as_ref().zip(w.k_norm.as_ref());
    queue.attend(Attend {
        heads: block.heads,
        batch,
        qkv,
        qk_norm: head_norms
            .map(|(q, k)| QkNorm { q: Norm { gain: q.tensor(), eps }, k: Norm { gain: k.tensor(), eps } }),
        rope: net.rope(),
        kv,
        o: w.o.weight(),
        adapter: beside(&low.o),
        x,
        kept: attention.map(|(out, lse)| KeptAttention { raw: raw.take(), out, lse }),
    });
    if let Some(middle) = middle.take() {
        queue.copy(x, middle, rows * c.hidden_size);
    }
    mlp(queue, net, block, rows, x, pass);
}

/// Runs a block's MLP on the residual stream that comes out of its attention.
pub fn mlp<D: Device>(
    queue: &mut D::Queue,
    net: &Network<D>,
    block: &Block<D>,
    rows: usize,
    x: &mut D::Tensor,
    pass: MlpPass<D>,
) {
    let (w, low, eps) = (&block.params, &block.adapters, net.config().rms_norm_eps);
    let MlpParams::Dense(DenseMlp { gate_up: projections, down }) = &w.mlp;
    queue.mlp(Mlp {
        x,
        rows,
        norm: Norm { gain: w.mlp_norm.tensor(), eps },
        gate_up: projections.weight(),
        down: down.weight(),
        gate_up_adapter: beside(&low.gate_up),
        down_adapter: beside(&low.down),
        pass,
    });
}
