//! Arguments of the operations of a [`Queue`](crate::Queue): one struct each, whose fields say what is read
//! and what is written. T tokens (rows), d hidden size, f MLP width, H heads of hd, V vocabulary.

use crate::collective::Collective;
use crate::device::Device;
use crate::types::{AdamW, AdapterBlocks, HeadGradient, HeadOutput, Heads, KvFormat, Rounding};

/// What happens to the old content of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Overwritten.
    Store,
    /// Added to (residual connections).
    Add,
}

/// RMSNorm's parameters.
pub struct Norm<'a, D: Device> {
    /// [d], as wide as the rows.
    pub gain: &'a D::Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

/// RMSNorm's parameters on the backward pass.
pub struct NormBackward<'a, D: Device> {
    /// [d], as wide as the rows.
    pub gain: &'a D::Tensor,
    /// Added to the mean square.
    pub eps: f32,
    /// [d], added to; `None` where the gain is frozen.
    pub dgain: Option<&'a mut D::Tensor>,
}

/// RMSNorm of every query and key head (Qwen3).
pub struct QkNorm<'a, D: Device> {
    /// [hd] for queries.
    pub q: Norm<'a, D>,
    /// [hd] for keys.
    pub k: Norm<'a, D>,
}

/// [`QkNorm`] on the backward pass.
pub struct QkNormBackward<'a, D: Device> {
    /// [T, qkv] queries, keys and values as they were before the norms.
    pub raw: &'a D::Tensor,
    /// [hd] for queries.
    pub q: NormBackward<'a, D>,
    /// [hd] for keys.
    pub k: NormBackward<'a, D>,
}

/// Rotary tables `[positions, hd / 2]`.
pub struct Rope<'a, D: Device> {
    /// Cosines.
    pub cos: &'a D::Tensor,
    /// Sines.
    pub sin: &'a D::Tensor,
}

/// Packs weights `[n, k]`.
pub struct Pack<'a, D: Device> {
    /// [n, k] row-major.
    pub from: &'a D::Tensor,
    /// Matters to quantized formats only.
    pub rounding: Rounding,
    /// Takes a copy of `from`: an embedding that is also the head is read once.
    pub copy: Option<&'a mut D::Tensor>,
    /// Overwritten. After an error (quantized formats refuse numbers that are not finite) it must not be used
    /// before a successful packing.
    pub to: &'a mut D::Weight,
}

/// Which rows of a table are meant.
pub enum Index<'a, D: Device> {
    /// These.
    Rows(&'a [u32]),
    /// The tokens of a batch; those that the host has not seen are in `sampled`.
    Tokens {
        /// The batch.
        batch: &'a D::Batch,
        /// What the last step sampled; `None` where the batch names no sampled tokens.
        sampled: Option<&'a D::Tokens>,
    },
    /// The rows of a batch whose next token is sampled.
    Sampled(&'a D::Batch),
}

/// `out[i] = table[index[i]]`.
pub struct Gather<'a, D: Device> {
    /// [any, width]
    pub table: &'a D::Tensor,
    /// Which rows.
    pub index: Index<'a, D>,
    /// Numbers of a row.
    pub width: usize,
    /// [index, width], overwritten.
    pub out: &'a mut D::Tensor,
}

/// `table[index[i]] += rows[i]`, in the order of i.
pub struct ScatterAdd<'a, D: Device> {
    /// [index, width]
    pub rows: &'a D::Tensor,
    /// Which rows of the table.
    pub index: Index<'a, D>,
    /// Numbers of a row.
    pub width: usize,
    /// [any, width], added to.
    pub table: &'a mut D::Tensor,
}

/// `out = rmsnorm(x) * gain`.
pub struct RmsNorm<'a, D: Device> {
    /// [T, d]
    pub x: &'a D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// The norm.
    pub norm: Norm<'a, D>,
    /// [T, d], overwritten.
    pub out: &'a mut D::Tensor,
}

/// Backward of [`RmsNorm`].
pub struct RmsNormBackward<'a, D: Device> {
    /// [T, d] the input of the forward pass.
    pub x: &'a D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// The norm.
    pub norm: NormBackward<'a, D>,
    /// [T, d] gradient of the output; used up.
    pub dy: &'a mut D::Tensor,
    /// [T, d], added to.
    pub dx: &'a mut D::Tensor,
}

/// A low-rank update beside a linear layer (LoRA): `(x A^T) B^T` is added to the layer's output after its own
/// GEMM, where x is what that GEMM reads, in full where the layer quantizes it. Both matrices are in f32 or
/// bf16, whatever the layer's weights are in.
pub struct Adapter<'a, D: Device> {
    /// [r, k]: of all modules of the layer, one after the other.
    pub a: &'a D::Weight,
    /// [n, r]: made by [`Spread`].
    pub b: &'a D::Weight,
}

impl<D: Device> Clone for Adapter<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Adapter<'_, D> {}

/// Backward of [`Adapter`].
pub struct AdapterBackward<'a, D: Device> {
    /// [r, k], packed as trained.
    pub a: &'a D::Weight,
    /// [n, r], packed as trained.
    pub b: &'a D::Weight,
    /// How the gradient of `b` goes into `db`.
    pub blocks: &'a AdapterBlocks,
    /// [r, k], added to.
    pub da: &'a mut D::Tensor,
    /// [stacked outputs, rank], added to.
    pub db: &'a mut D::Tensor,
}

/// Makes the block-diagonal matrix `[n, width]` of an adapter, scaled, from its stacked blocks.
pub struct Spread<'a, D: Device> {
    /// [stacked outputs, rank]
    pub from: &'a D::Tensor,
    /// Which blocks there are.
    pub blocks: &'a AdapterBlocks,
    /// Outputs of the layer.
    pub n: usize,
    /// [at least n width], overwritten so far.
    pub to: &'a mut D::Tensor,
}

/// `out (+)= norm(x) W^T (+ bias)`, and the update of an adapter.
pub struct Linear<'a, D: Device> {
    /// [T, k]
    pub x: &'a D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// RMSNorm of the rows before the GEMM.
    pub norm: Option<Norm<'a, D>>,
    /// [n, k]
    pub w: &'a D::Weight,
    /// [n]
    pub bias: Option<&'a D::Tensor>,
    /// Its adapter.
    pub adapter: Option<Adapter<'a, D>>,
    /// What happens to the old content of `out`.
    pub output: Output,
    /// [T, n]
    pub out: &'a mut D::Tensor,
}

/// Backward of [`Linear`]. `dw` and `dbias` are added to, and `None` where they are frozen. Without a norm
/// `dx = dy W`; with one, `dx += ` the gradient of what went into the norm (there is a residual connection
/// around it). Weights that are not packed as trained have no `dw`; where they are quantized, `dx` is that of
/// the numbers that they stand for, straight through the rounding of x.
pub struct LinearBackward<'a, D: Device> {
    /// [T, k] the input of the forward pass.
    pub x: &'a D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// RMSNorm of the rows before the GEMM.
    pub norm: Option<NormBackward<'a, D>>,
    /// [n, k]
    pub w: &'a D::Weight,
    /// The adapter beside it.
    pub adapter: Option<AdapterBackward<'a, D>>,
    /// [T, n] gradient of the output.
    pub dy: &'a D::Tensor,
    /// [n, k]
    pub dw: Option<&'a mut D::Tensor>,
    /// [n]
    pub dbias: Option<&'a mut D::Tensor>,
    /// [T, k]
    pub dx: Option<&'a mut D::Tensor>,
}

/// What an [`Mlp`] computes. What is kept is for the backward pass; quantized weights keep for one through
/// weights of the kept format.
pub enum MlpPass<'a, D: Device> {
    /// `x` is updated, and nothing is kept.
    Forward,
    /// `x` is updated, and what the backward pass needs is kept.
    Keep(&'a mut D::KeptMlp),
    /// What [`MlpPass::Keep`] keeps, bit for bit, and no more: `x` stays, since the backward pass never reads
    /// the output of the down projection, which is a third of the GEMMs.
    KeepOnly(&'a mut D::KeptMlp),
}

impl<'a, D: Device> MlpPass<'a, D> {
    /// Where to keep, and whether that is all there is to do.
    pub(crate) fn split(self) -> (Option<&'a mut D::KeptMlp>, bool) {
        match self {
            MlpPass::Forward => (None, false),
            MlpPass::Keep(kept) => (Some(kept), false),
            MlpPass::KeepOnly(kept) => (Some(kept), true),
        }
    }
}

/// `x += swiglu(norm(x) gate_up^T) down^T`: a block's dense MLP.
pub struct Mlp<'a, D: Device> {
    /// [T, d], read, and updated unless the pass only keeps.
    pub x: &'a mut D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// RMSNorm before it.
    pub norm: Norm<'a, D>,
    /// [2 f, d] gate projection, then up projection.
    pub gate_up: &'a D::Weight,
    /// [d, f]
    pub down: &'a D::Weight,
    /// Adapter of the gate and up projections.
    pub gate_up_adapter: Option<Adapter<'a, D>>,
    /// Adapter of the down projection.
    pub down_adapter: Option<Adapter<'a, D>>,
    /// What is computed and kept.
    pub pass: MlpPass<'a, D>,
}

/// Backward of [`Mlp`]. Gradients of weights are added to, and `None` where they are frozen.
pub struct MlpBackward<'a, D: Device> {
    /// [T, d] the residual stream that went in.
    pub x: &'a D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// RMSNorm before it.
    pub norm: NormBackward<'a, D>,
    /// [2 f, d]
    pub gate_up: &'a D::Weight,
    /// [d, f]
    pub down: &'a D::Weight,
    /// Adapter of the gate and up projections.
    pub gate_up_adapter: Option<AdapterBackward<'a, D>>,
    /// Adapter of the down projection.
    pub down_adapter: Option<AdapterBackward<'a, D>>,
    /// What the forward pass kept; used up.
    pub kept: &'a mut D::KeptMlp,
    /// [2 f, d]
    pub dgate_up: Option<&'a mut D::Tensor>,
    /// [d, f]
    pub ddown: Option<&'a mut D::Tensor>,
    /// [T, d] gradient of the residual stream that came out; becomes that of what went in.
    pub dx: &'a mut D::Tensor,
}

/// What attention leaves for its backward pass.
pub struct KeptAttention<'a, D: Device> {
    /// [T, qkv] queries, keys and values before the norms of heads; where there are such norms.
    pub raw: Option<&'a mut D::Tensor>,
    /// [T, H hd] output of attention.
    pub out: &'a mut D::Tensor,
    /// [T, H] logarithms of the softmax denominators.
    pub lse: &'a mut D::Tensor,
}

/// `x += attention(qkv) o^T`: norms of heads, rotation, keys and values rounded to the pages' format and
/// stored there, causal attention of the rows of all sequences, output projection.
pub struct Attend<'a, D: Device> {
    /// The layer's heads.
    pub heads: Heads,
    /// The rows.
    pub batch: &'a D::Batch,
    /// [T, qkv] queries, keys and values; what the backward pass needs where `kept` is given, else used up.
    pub qkv: &'a mut D::Tensor,
    /// Norms of query and key heads.
    pub qk_norm: Option<QkNorm<'a, D>>,
    /// Rotary tables.
    pub rope: Rope<'a, D>,
    /// The layer's pages; those of the rows are written.
    pub kv: &'a mut D::Kv,
    /// [d, H hd] output projection.
    pub o: &'a D::Weight,
    /// Adapter of the output projection.
    pub adapter: Option<Adapter<'a, D>>,
    /// [T, d] the residual stream, added to.
    pub x: &'a mut D::Tensor,
    /// For the backward pass.
    pub kept: Option<KeptAttention<'a, D>>,
}

/// Backward of [`Attend`] for whole sequences side by side.
pub struct AttendBackward<'a, D: Device> {
    /// The layer's heads.
    pub heads: Heads,
    /// The rows.
    pub batch: &'a D::Batch,
    /// Format of the pages, to which the keys and values in `qkv` have been rounded; a device may compute in
    /// it.
    pub kv_format: KvFormat,
    /// [T, qkv] as the forward pass left them.
    pub qkv: &'a D::Tensor,
    /// Norms of query and key heads.
    pub qk_norm: Option<QkNormBackward<'a, D>>,
    /// Rotary tables.
    pub rope: Rope<'a, D>,
    /// [T, H hd] kept.
    pub out: &'a D::Tensor,
    /// [T, H] kept.
    pub lse: &'a D::Tensor,
    /// [d, H hd] output projection.
    pub o: &'a D::Weight,
    /// Adapter of the output projection.
    pub adapter: Option<AdapterBackward<'a, D>>,
    /// [T, d] gradient of the residual stream.
    pub dx: &'a D::Tensor,
    /// [d, H hd], added to; `None` where it is frozen.
    pub d_o: Option<&'a mut D::Tensor>,
    /// [T, qkv] gradient of what went in; overwritten.
    pub dqkv: &'a mut D::Tensor,
}

/// Log-probabilities of targets, entropies and argmax tokens of hidden rows.
pub struct Head<'a, D: Device> {
    /// [T, d]
    pub hidden: &'a D::Tensor,
    /// [V, d]
    pub head: &'a D::Weight,
    /// [T]
    pub targets: &'a [u32],
    /// Logits are divided by it.
    pub temperature: f32,
}

/// Backward of [`Head`].
pub struct HeadBackward<'a, D: Device> {
    /// [T, d]
    pub hidden: &'a D::Tensor,
    /// [V, d]: the logits are those of the forward pass, in any format.
    pub head: &'a D::Weight,
    /// [V, d], the same weights packed as trained: gradients pass through these.
    pub trained: &'a D::Weight,
    /// [T]
    pub targets: &'a [u32],
    /// Logits are divided by it.
    pub temperature: f32,
    /// What the forward pass gave.
    pub out: &'a HeadOutput,
    /// What the loss asks for.
    pub gradient: HeadGradient<'a>,
    /// [T, d], overwritten.
    pub dhidden: &'a mut D::Tensor,
    /// [V, d], added to; `None` where it is frozen.
    pub dweight: Option<&'a mut D::Tensor>,
}

/// [`Head`] and [`HeadBackward`] in one.
pub struct HeadTraining<'a, D: Device> {
    /// [T, d]
    pub hidden: &'a D::Tensor,
    /// [V, d], in any format.
    pub head: &'a D::Weight,
    /// [V, d], the same weights packed as trained: gradients pass through these.
    pub trained: &'a D::Weight,
    /// [T]
    pub targets: &'a [u32],
    /// Logits are divided by it.
    pub temperature: f32,
    /// [T, d], overwritten.
    pub dhidden: &'a mut D::Tensor,
    /// [V, d], added to; `None` where it is frozen.
    pub dweight: Option<&'a mut D::Tensor>,
}

/// Samples a token for each hidden row, as the batch says.
pub struct Sample<'a, D: Device> {
    /// [sampled rows of the batch, d]
    pub hidden: &'a D::Tensor,
    /// [V, d]
    pub head: &'a D::Weight,
    /// How.
    pub batch: &'a D::Batch,
    /// Overwritten.
    pub out: &'a mut D::Tokens,
}

/// The most probable tokens of hidden rows.
pub struct Top<'a, D: Device> {
    /// [T, d]
    pub hidden: &'a D::Tensor,
    /// [V, d]
    pub head: &'a D::Weight,
    /// [T] what the logits of each row are multiplied with: one by its temperature.
    pub factors: &'a [f32],
    /// How many tokens of each row; at most V.
    pub count: usize,
}

/// `hidden[row] . w`: the scalar head of a critic.
pub struct RowDots<'a, D: Device> {
    /// [T, d]
    pub hidden: &'a D::Tensor,
    /// Rows T.
    pub rows: usize,
    /// [d]
    pub w: &'a D::Tensor,
}

/// Backward of [`RowDots`].
pub struct RowDotsBackward<'a, D: Device> {
    /// [T, d]
    pub hidden: &'a D::Tensor,
    /// [d]
    pub w: &'a D::Tensor,
    /// [T] gradients of the results.
    pub gradient: &'a [f32],
    /// [T, d], overwritten.
    pub dhidden: &'a mut D::Tensor,
    /// [d], added to.
    pub dw: &'a mut D::Tensor,
}

/// One AdamW update of a tensor, or of a piece of it.
pub struct Update<'a, D: Device> {
    /// Constants of the update.
    pub adamw: AdamW,
    /// [piece] weights.
    pub w: &'a mut D::Tensor,
    /// Gradient of the whole tensor, or of the piece alone.
    pub g: &'a D::Tensor,
    /// Where the piece begins in the tensor, a multiple of [`SQUARES_BLOCK`](crate::types::SQUARES_BLOCK).
    pub at: usize,
    /// [piece] moments.
    pub moments: &'a mut D::Moments,
}

/// Adds up `count` pieces of the same place, a power of two, in a binary tree: neighbours first, then
/// neighbours of these sums.
pub struct AddPieces<'a, D: Device> {
    /// [count, len]
    pub pieces: &'a D::Tensor,
    /// How many there are.
    pub count: usize,
    /// Values of each.
    pub len: usize,
    /// The sum overwrites `at..at + len`.
    pub to: &'a mut D::Tensor,
    /// Where.
    pub at: usize,
}

/// Rounds values to bf16, two of which lie in a number of `to`: what travels between ranks where it will be
/// rounded to bf16 anyway.
pub struct Narrow<'a, D: Device> {
    /// [at least len]
    pub from: &'a D::Tensor,
    /// How many values; an odd one is followed by a zero.
    pub len: usize,
    /// [at least (at + len) / 2, rounded up]
    pub to: &'a mut D::Tensor,
    /// The place of the first value, an even number.
    pub at: usize,
}

/// Takes values in bf16 apart again.
pub struct Widen<'a, D: Device> {
    /// [at least len / 2, rounded up], as [`Narrow`] makes it.
    pub from: &'a D::Tensor,
    /// [at least len], overwritten.
    pub to: &'a mut D::Tensor,
    /// How many values.
    pub len: usize,
}

/// Some of a tensor's values.
pub struct Slice<'a, D: Device> {
    /// All values.
    pub tensor: &'a D::Tensor,
    /// The first.
    pub at: usize,
    /// How many.
    pub len: usize,
}

/// An exchange of tensors between ranks: see [`Queue::begin_exchange`](crate::Queue::begin_exchange). Several
/// tensors travel together, as one group of messages.
pub enum Exchange<'a, D: Device> {
    /// Each rank its pieces of everyone's tensors.
    AllToAll(Vec<AllToAll<'a, D>>),
    /// Everyone's pieces to all ranks.
    AllGather(Vec<AllGather<'a, D>>),
    /// One rank's tensor to all ranks.
    Broadcast(Broadcast<'a, D>),
}

/// Rank r receives `cuts[r]..cuts[r + 1]` of every rank's `from`: what it adds up afterwards.
pub struct AllToAll<'a, D: Device> {
    /// Who takes part.
    pub ranks: &'a Collective,
    /// [at least cuts[ranks]]
    pub from: &'a D::Tensor,
    /// [ranks + 1] offsets, from 0 on; the same at every rank.
    pub cuts: &'a [usize],
    /// [ranks, own piece], overwritten: the own piece of rank 0's `from`, of rank 1's, ....
    pub into: &'a mut D::Tensor,
}

/// Every rank gets all pieces.
pub struct AllGather<'a, D: Device> {
    /// Who takes part.
    pub ranks: &'a Collective,
    /// [ranks + 1] offsets, from 0 on; the same at every rank.
    pub cuts: &'a [usize],
    /// [at least cuts[ranks]]; rank r's own piece is `cuts[r]..cuts[r + 1]`, those of others are overwritten.
    pub tensor: &'a mut D::Tensor,
}

/// Every rank gets the root's tensor.
pub struct Broadcast<'a, D: Device> {
    /// Who takes part.
    pub ranks: &'a Collective,
    /// Whose tensor it is.
    pub root: usize,
    /// As long as everyone's; overwritten where the rank is not the root.
    pub tensor: &'a mut D::Tensor,
}
