//! The forward pass of one transformer block: the only one there is.

use super::batch::Batch;
use super::network::{Block, Network};
use qurl_kernels::backend::{Placed, Rows};
use qurl_kernels::{Backend, BackendError};

/// What a block's forward pass writes. Training gives every block its own and keeps them for the backward pass;
/// inference uses one for all blocks.
pub struct Activations<B: Backend> {
    /// `[rows, qkv]` before QK-norm; only for models that have it, and only in training.
    pub(crate) qkv_raw: Option<B::Tensor>,
    /// `[rows, qkv]` queries, keys (both rotated) and values.
    pub(crate) qkv: B::Tensor,
    /// `[rows, heads * head_dim]` output of attention.
    pub(crate) attention: B::Tensor,
    /// `[rows, heads]` softmax denominators; only in training.
    pub(crate) lse: Option<B::Tensor>,
    /// `[rows, d]` the residual stream between attention and MLP; only in training.
    pub(crate) middle: Option<B::Tensor>,
    /// `[rows, 2 f]` gate and up projection.
    pub(crate) gate_up: B::Tensor,
}

impl<B: Backend> Activations<B> {
    /// Memory for `rows` rows.
    pub fn new(backend: &B, net: &Network<B>, rows: usize, kept: bool) -> Result<Self, BackendError> {
        let c = net.config();
        Ok(Activations {
            qkv_raw: (kept && c.qk_norm).then(|| backend.zeros(rows * c.qkv_dim())).transpose()?,
            qkv: backend.zeros(rows * c.qkv_dim())?,
            attention: backend.zeros(rows * c.q_dim())?,
            lse: kept.then(|| backend.zeros(rows * c.num_heads)).transpose()?,
            middle: kept.then(|| backend.zeros(rows * c.hidden_size)).transpose()?,
            gate_up: backend.zeros(rows * 2 * c.intermediate_size)?,
        })
    }
}

/// Memory that a block needs only while it runs.
pub struct Temporary<B: Backend> {
    /// `[rows, d]` a normalised copy of the residual stream.
    pub(crate) normed: B::Tensor,
    /// `[rows, f]` output of SwiGLU.
    pub(crate) activated: B::Tensor,
}

impl<B: Backend> Temporary<B> {
    /// Memory for `rows` rows.
    pub fn new(backend: &B, net: &Network<B>, rows: usize) -> Result<Self, BackendError> {
        let c = net.config();
        Ok(Temporary {
            normed: backend.zeros(rows * c.hidden_size)?,
            activated: backend.zeros(rows * c.intermediate_size)?,
        })
    }
}

/// The query heads, then the key heads, inside rows of `[rows, qkv]`.
pub(crate) fn head_rows<B: Backend>(net: &Network<B>, rows: usize) -> (Rows, Rows) {
    let c = net.config();
    let queries = Rows { start: 0, outer: rows, stride: c.qkv_dim(), per: c.num_heads, width: c.head_dim };
    (queries, Rows { start: c.q_dim(), per: c.num_kv_heads, ..queries })
}

/// Runs one block on the rows of the batch: `x[rows, d]` is the residual stream, read and updated.
pub fn forward<B: Backend>(
    backend: &B,
    net: &Network<B>,
    block: &Block<B>,
    batch: &Batch,
    kv: &mut B::Kv,
    x: &mut B::Tensor,
    acts: &mut Activations<B>,
    temp: &mut Temporary<B>,
) {
    let c = net.config();
    let (rows, d, f, eps) = (batch.rows(), c.hidden_size, c.intermediate_size, c.rms_norm_eps);
    let heads = net.heads();

    let (normed, bias) = (&mut temp.normed, block.qkv_bias.as_ref());
    backend.norm_linear(x, &block.attn_norm, rows, eps, &block.qkv, bias, normed, &mut acts.qkv);
    if let (Some(q_norm), Some(k_norm)) = (&block.q_norm, &block.k_norm) {
        if let Some(raw) = &mut acts.qkv_raw {
            backend.copy(&acts.qkv, raw, rows * c.qkv_dim());
        }
        let (queries, keys) = head_rows(net, rows);
        backend.head_norm(&mut acts.qkv, q_norm, queries, eps);
        backend.head_norm(&mut acts.qkv, k_norm, keys, eps);
    }
    let format = net.options().kv_format;
    let Batch { positions, slots, spans, pages, .. } = batch;
    let placed = Placed { positions, slots, spans, pages };
    let (qkv, out, lse) = (&mut acts.qkv, &mut acts.attention, acts.lse.as_mut());
    backend.attend(heads, qkv, net.rope(), placed, kv, format, out, lse, &block.o, x);

    if let Some(middle) = &mut acts.middle {
        backend.copy(x, middle, rows * d);
    }
    let Temporary { normed, activated } = temp;
    let (gate_up, down) = (&block.gate_up, &block.down);
    backend.mlp(x, &block.mlp_norm, rows, f, eps, gate_up, down, normed, &mut acts.gate_up, activated);
}
