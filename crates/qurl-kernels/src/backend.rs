//! The operations that models, the rollout engine and the trainer are written with.
//!
//! They are coarse, one for each thing a transformer does, so that a backend can fuse as it likes inside. Tensors are
//! opaque: a backend decides where they live and how activations are stored. Operations do not fail one by one (a
//! device would report later anyway); what can fail is taking memory and reading results back, and those return
//! errors. Shapes are the caller's responsibility: a wrong one is a bug in this project and panics.
//!
//! Rows are tokens. Every operation treats its rows independently and sums in an order that depends on nothing but
//! the row (or, for gradients of weights, on the order of the rows).

pub use crate::cpu::adamw::AdamW;
pub use crate::cpu::attention::{Heads, Span};
pub use crate::cpu::head::{HeadGradient, HeadOutput};
pub use crate::cpu::kv::{KvFormat, UnknownKvFormat};
pub use crate::cpu::norm::Rows;
pub use crate::cpu::sample::{SampleRow, Sampled};
use crate::{Format, Rounding};

/// What can go wrong on a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The memory asked for is not there.
    #[error("out of memory on {device}: {need} bytes asked for {what}")]
    OutOfMemory {
        /// Where.
        device: String,
        /// How much.
        need: usize,
        /// What for.
        what: String,
    },
    /// Weights cannot be packed.
    #[error("cannot pack weights as {format}: {reason}")]
    Pack {
        /// The format asked for.
        format: Format,
        /// What is wrong with the weights.
        reason: String,
    },
    /// There is no such device, or it cannot be used.
    #[error("device {device} cannot be used: {reason}")]
    Unavailable {
        /// The device asked for.
        device: String,
        /// What is missing.
        reason: String,
    },
    /// A device failed while computing.
    #[error("{device} failed: {what}")]
    Device {
        /// The device.
        device: String,
        /// What it was doing and what it said.
        what: String,
    },
}

/// How the product of a linear layer meets the old content of its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Overwrite.
    Store,
    /// Add (residual connections, gradients that flow together).
    Add,
}

/// A set of rotary tables `[positions, head_dim / 2]`.
pub struct Rope<'a, T> {
    /// Cosines.
    pub cos: &'a T,
    /// Sines.
    pub sin: &'a T,
}

/// Rows of a pass: where they are, where their keys and values go, and what they see.
#[derive(Clone, Copy)]
pub struct Placed<'a> {
    /// A row's position in its sequence.
    pub positions: &'a [u32],
    /// `page * page_size + place` of its keys and values.
    pub slots: &'a [u32],
    /// The sequences that the rows belong to.
    pub spans: &'a [Span],
    /// The pages of the spans.
    pub pages: &'a [u32],
}

/// Values of a tensor that hold a drawn token: its number (as bits), log-probability and entropy.
pub const DRAWN_WORDS: usize = 3;

/// Set in an id that names a row of the last draw in place of a token; no vocabulary reaches so far.
const NAMES_DRAW: u32 = 1 << 31;

/// The id of a token that the host has not seen: the one that this row of the last draw gave.
pub fn drawn_id(row: u32) -> u32 {
    debug_assert!(row < NAMES_DRAW);
    row | NAMES_DRAW
}

/// The row of the last draw that an id names; `None` if it is a token.
pub fn drawn_row(id: u32) -> Option<usize> {
    (id & NAMES_DRAW != 0).then_some((id & !NAMES_DRAW) as usize)
}

/// How much of a step is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// The operations that take inputs from the host, and what else may tell one step from another. Later layers do what the
    /// first has done.
    Inputs,
}

/// A place that computes: see the module's text.
pub trait Backend: Send + Sync + 'static {
    /// A buffer of numbers.
    type Tensor: Send + Sync;
    /// A linear layer's weights, packed.
    type Weight: Send + Sync;
    /// Keys and values of one layer, in pages.
    type Kv: Send + Sync;
    /// Drawn tokens on their way to the host.
    type Asked: Send + Sync;

    /// One line for people: what this is and how fast it may be.
    fn describe(&self) -> String;

    /// A tensor of zeros.
    fn zeros(&self, len: usize) -> Result<Self::Tensor, BackendError>;
    /// A tensor with these values.
    fn upload(&self, values: &[f32]) -> Result<Self::Tensor, BackendError>;
    /// The first `len` values of a tensor.
    fn download(&self, tensor: &Self::Tensor, len: usize) -> Result<Vec<f32>, BackendError>;
    /// Overwrites the beginning of a tensor.
    fn write(&self, tensor: &mut Self::Tensor, values: &[f32]);
    /// Copies the first `len` values.
    fn copy(&self, from: &Self::Tensor, to: &mut Self::Tensor, len: usize);
    /// Sets the first `len` values to zero.
    fn clear(&self, tensor: &mut Self::Tensor, len: usize);
    /// Number of values.
    fn len(&self, tensor: &Self::Tensor) -> usize;
    /// Fills a tensor with random numbers around zero, of a deviation of about `factor`: weights for benchmarks.
    fn fill_random(&self, tensor: &mut Self::Tensor, seed: u64, factor: f32);
    /// Free and total bytes of its memory, where it has its own.
    fn memory(&self) -> Option<(usize, usize)> {
        None
    }
    /// The most bytes that this process had allocated at a time, if the device has memory of its own.
    fn peak_memory(&self) -> Option<usize> {
        None
    }
    /// Waits until everything issued so far is done.
    fn synchronize(&self) -> Result<(), BackendError> {
        Ok(())
    }

    /// The number of rows that a decode step of `rows` rows should be filled up to: devices that record steps keep few
    /// sizes.
    fn bucket(&self, rows: usize) -> usize {
        rows
    }
    /// Runs operations that belong together and whose results are read after all of them. A device may call `run`
    /// several times (to look, then to record), so it must do the same each time and read no results. `of` says whose
    /// step it is: steps of the same number differ only in what the operations of [`Extent::Inputs`] are given.
    fn step(&self, _of: u64, run: &mut dyn FnMut(Extent)) {
        run(Extent::Whole);
    }
    /// Whether operations return before they are done: then it pays to issue the next step before the last one is read.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Packs weights `[n, k]`; `trained` keeps what the gradient of the input needs too.
    fn pack(
        &self,
        weights: &Self::Tensor,
        n: usize,
        k: usize,
        format: Format,
        trained: bool,
    ) -> Result<Self::Weight, BackendError>;
    /// Packs changed weights of the same shape into the same memory. After an error (quantized formats refuse numbers
    /// that are not finite) the packed weights must not be used before a successful repack.
    fn repack(&self, weights: &Self::Tensor, packed: &mut Self::Weight) -> Result<(), BackendError> {
        self.repack_rounded(weights, packed, Rounding::Nearest)
    }
    /// [`Backend::repack`] with a choice of rounding, which matters to quantized formats only.
    fn repack_rounded(
        &self,
        weights: &Self::Tensor,
        packed: &mut Self::Weight,
        rounding: Rounding,
    ) -> Result<(), BackendError>;
    /// [`Backend::repack_rounded`] that copies the weights too: an embedding that is also the head is read once.
    fn repack_and_copy(
        &self,
        weights: &Self::Tensor,
        packed: &mut Self::Weight,
        rounding: Rounding,
        copy: &mut Self::Tensor,
    ) -> Result<(), BackendError> {
        self.copy(weights, copy, self.len(weights));
        self.repack_rounded(weights, packed, rounding)
    }
    /// Bytes of packed weights that a forward product reads.
    fn weight_bytes(&self, packed: &Self::Weight) -> usize;

    /// `out[i] = table[ids[i]]` with rows of `d`: embeddings, and picking rows.
    fn gather(&self, table: &Self::Tensor, ids: &[u32], d: usize, out: &mut Self::Tensor);
    /// [`Backend::gather`] of tokens, some of which are named by rows of the last draw ([`drawn_id`]): these are taken from
    /// `drawn`, which [`Backend::draw`] has written.
    fn gather_tokens(
        &self,
        table: &Self::Tensor,
        ids: &[u32],
        drawn: &Self::Tensor,
        d: usize,
        out: &mut Self::Tensor,
    );
    /// `table[ids[i]] += rows[i]`, in the order of i.
    fn scatter_add(&self, rows: &Self::Tensor, ids: &[u32], d: usize, table: &mut Self::Tensor);

    /// `out = rmsnorm(x) * gain` over rows of `width`.
    fn rmsnorm(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        width: usize,
        eps: f32,
        out: &mut Self::Tensor,
    );
    /// Backward of [`Backend::rmsnorm`]: `dx += ...`, `dgain += ...`; `dy` is used up.
    fn rmsnorm_backward(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        width: usize,
        eps: f32,
        dy: &mut Self::Tensor,
        dx: &mut Self::Tensor,
        dgain: &mut Self::Tensor,
    );
    /// RMSNorm of heads inside rows, in place.
    fn head_norm(&self, x: &mut Self::Tensor, gain: &Self::Tensor, rows: Rows, eps: f32);
    /// Backward of [`Backend::head_norm`]: the gradient of its output becomes that of its input `x`.
    fn head_norm_backward(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: Rows,
        eps: f32,
        gradient: &mut Self::Tensor,
        dgain: &mut Self::Tensor,
    );

    /// `out[rows, n] (+)= x[rows, k] W^T (+ bias)`.
    fn linear(
        &self,
        x: &Self::Tensor,
        rows: usize,
        w: &Self::Weight,
        bias: Option<&Self::Tensor>,
        output: Output,
        out: &mut Self::Tensor,
    );
    /// `out = rmsnorm(x) W^T (+ bias)` with rows as wide as the gain; `normed` is working memory of the size of `x`.
    fn norm_linear(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        eps: f32,
        w: &Self::Weight,
        bias: Option<&Self::Tensor>,
        normed: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        self.rmsnorm(x, gain, rows, self.len(gain), eps, normed);
        self.linear(normed, rows, w, bias, Output::Store, out);
    }
    /// `out (+)= swiglu(gate_up) W^T` with `w` of `width` inputs; `activated` is working memory `[rows, width]`.
    fn swiglu_linear(
        &self,
        gate_up: &Self::Tensor,
        rows: usize,
        width: usize,
        w: &Self::Weight,
        output: Output,
        activated: &mut Self::Tensor,
        out: &mut Self::Tensor,
    ) {
        self.swiglu(gate_up, rows, width, activated);
        self.linear(activated, rows, w, None, output, out);
    }
    /// `x += swiglu(rmsnorm(x) gate_up^T) down^T`, all of a block's MLP. Where the weights are trained, `projected`
    /// holds `[rows, 2 f]` gates and ups afterwards; `normed` and `activated` are working memory.
    fn mlp(
        &self,
        x: &mut Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        width: usize,
        eps: f32,
        gate_up: &Self::Weight,
        down: &Self::Weight,
        normed: &mut Self::Tensor,
        projected: &mut Self::Tensor,
        activated: &mut Self::Tensor,
    ) {
        self.norm_linear(x, gain, rows, eps, gate_up, None, normed, projected);
        self.swiglu_linear(projected, rows, width, down, Output::Add, activated, x);
    }
    /// `dx[rows, k] = dy[rows, n] W`; the weights must have been packed as trained.
    fn linear_input_gradient(&self, dy: &Self::Tensor, rows: usize, w: &Self::Weight, dx: &mut Self::Tensor);
    /// `dw[n, k] += dy^T x`, `dbias[n] += sum dy`.
    fn linear_weight_gradient(
        &self,
        x: &Self::Tensor,
        dy: &Self::Tensor,
        rows: usize,
        w: &Self::Weight,
        dw: &mut Self::Tensor,
        dbias: Option<&mut Self::Tensor>,
    );

    /// All of a product's backward: `dw += dy^T x`, `dbias += sum dy`, `dx = dy W`.
    fn linear_backward(
        &self,
        x: &Self::Tensor,
        dy: &Self::Tensor,
        rows: usize,
        w: &Self::Weight,
        dw: &mut Self::Tensor,
        dbias: Option<&mut Self::Tensor>,
        dx: &mut Self::Tensor,
    ) {
        self.linear_weight_gradient(x, dy, rows, w, dw, dbias);
        self.linear_input_gradient(dy, rows, w, dx);
    }
    /// Backward of [`Backend::norm_linear`] up to the output of its norm: `dw += dy^T rmsnorm(x)`, `dbias += sum dy`,
    /// `dnormed = dy W`. `normed` is working memory of the size of `x`.
    fn norm_linear_backward(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        eps: f32,
        w: &Self::Weight,
        dy: &Self::Tensor,
        normed: &mut Self::Tensor,
        dw: &mut Self::Tensor,
        dbias: Option<&mut Self::Tensor>,
        dnormed: &mut Self::Tensor,
    ) {
        self.rmsnorm(x, gain, rows, self.len(gain), eps, normed);
        self.linear_backward(normed, dy, rows, w, dw, dbias, dnormed);
    }
    /// Backward of [`Backend::mlp`] up to the output of its norm: `x` is what went in, `dy` the gradient of what came out,
    /// `projected` what the forward pass left there. `dgate_up += ...`, `ddown += ...`, and `dnormed` is overwritten.
    /// `projected` is used up: what it holds afterwards differs from device to device. `normed` and `activated` are
    /// working memory.
    fn mlp_backward(
        &self,
        x: &Self::Tensor,
        gain: &Self::Tensor,
        rows: usize,
        width: usize,
        eps: f32,
        gate_up: &Self::Weight,
        down: &Self::Weight,
        dy: &Self::Tensor,
        normed: &mut Self::Tensor,
        projected: &mut Self::Tensor,
        activated: &mut Self::Tensor,
        dgate_up: &mut Self::Tensor,
        ddown: &mut Self::Tensor,
        dnormed: &mut Self::Tensor,
    ) {
        self.linear_input_gradient(dy, rows, down, activated);
        self.swiglu_backward(projected, activated, rows, width);
        self.linear_weight_gradient(activated, dy, rows, down, ddown, None);
        self.norm_linear_backward(x, gain, rows, eps, gate_up, projected, normed, dgate_up, None, dnormed);
    }

    /// Rotates the first `heads` heads of every row of `x[rows, stride]` by its position, or back.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        stride: usize,
        heads: usize,
        head_dim: usize,
        positions: &[u32],
        rope: Rope<Self::Tensor>,
        inverse: bool,
    );

    /// Memory for keys and values of one layer.
    fn kv_pages(
        &self,
        format: KvFormat,
        pages: usize,
        page_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Result<Self::Kv, BackendError>;
    /// Bytes that a page of one layer takes.
    fn kv_page_bytes(&self, format: KvFormat, page_size: usize, kv_heads: usize, head_dim: usize) -> usize;
    /// Rounds the keys and values in rows of queries, keys and values to what `format` stores.
    fn round_kv(&self, qkv: &mut Self::Tensor, rows: usize, heads: Heads, format: KvFormat);
    /// Stores the keys and values of rows; `slots[row] = page * page_size + place`.
    fn kv_write(&self, qkv: &Self::Tensor, heads: Heads, slots: &[u32], kv: &mut Self::Kv);
    /// Rotates queries and keys of rows, rounds keys and values to the format of the pages and stores them.
    fn rope_store(
        &self,
        qkv: &mut Self::Tensor,
        heads: Heads,
        positions: &[u32],
        rope: Rope<Self::Tensor>,
        slots: &[u32],
        kv: &mut Self::Kv,
        format: KvFormat,
    ) {
        let rotated = heads.heads + heads.kv_heads;
        self.rope(qkv, heads.qkv_width(), rotated, heads.head_dim, positions, rope, false);
        self.round_kv(qkv, positions.len(), heads, format);
        self.kv_write(qkv, heads, slots, kv);
    }
    /// Copies one page to another.
    fn kv_copy_page(&self, kv: &mut Self::Kv, from: usize, to: usize);
    /// Causal attention of the rows of all spans; `lse` is kept for the backward pass.
    fn attention(
        &self,
        heads: Heads,
        qkv: &Self::Tensor,
        kv: &Self::Kv,
        spans: &[Span],
        pages: &[u32],
        out: &mut Self::Tensor,
        lse: Option<&mut Self::Tensor>,
    );
    /// Rotates and stores as [`Backend::rope_store`], attends, and `x += attention w^T`. Where `lse` is kept, `qkv` and
    /// `out` hold what the backward pass needs afterwards.
    fn attend(
        &self,
        heads: Heads,
        qkv: &mut Self::Tensor,
        rope: Rope<Self::Tensor>,
        rows: Placed,
        kv: &mut Self::Kv,
        format: KvFormat,
        out: &mut Self::Tensor,
        lse: Option<&mut Self::Tensor>,
        w: &Self::Weight,
        x: &mut Self::Tensor,
    ) {
        self.rope_store(qkv, heads, rows.positions, rope, rows.slots, kv, format);
        self.attention(heads, qkv, kv, rows.spans, rows.pages, out, lse);
        self.linear(out, rows.positions.len(), w, None, Output::Add, x);
    }
    /// Backward of [`Backend::attention`] for whole sequences, side by side: `dqkv` is overwritten. `format` is that of
    /// the pages, to which the keys and values in `qkv` have been rounded; a device may compute in it.
    fn attention_backward(
        &self,
        heads: Heads,
        format: KvFormat,
        qkv: &Self::Tensor,
        spans: &[Span],
        out: &Self::Tensor,
        dout: &Self::Tensor,
        lse: &Self::Tensor,
        dqkv: &mut Self::Tensor,
    );

    /// `out[rows, f] = silu(gate) * up` from `gate_up[rows, 2 f]`.
    fn swiglu(&self, gate_up: &Self::Tensor, rows: usize, f: usize, out: &mut Self::Tensor);
    /// Replaces `gate_up` by its gradient, and `out`, on entry the gradient of the output, by the output itself.
    fn swiglu_backward(&self, gate_up: &mut Self::Tensor, out: &mut Self::Tensor, rows: usize, f: usize);

    /// Log-probabilities of targets, entropies and likeliest tokens of hidden rows.
    fn head(
        &self,
        hidden: &Self::Tensor,
        head: &Self::Weight,
        targets: &[u32],
        temperature: f32,
    ) -> Result<HeadOutput, BackendError>;
    /// Draws a token for each hidden row. Without truncation its log-probability has the bits of [`Backend::head`].
    fn sample(
        &self,
        hidden: &Self::Tensor,
        head: &Self::Weight,
        rows: &[SampleRow],
    ) -> Result<Vec<Sampled>, BackendError> {
        let mut out = self.zeros(rows.len() * DRAWN_WORDS)?;
        self.draw(hidden, head, rows, &mut out);
        self.drawn(self.ask_drawn(&out, rows.len())?)
    }
    /// [`Backend::sample`] without reading the result, which takes [`DRAWN_WORDS`] values a row of `out`.
    fn draw(&self, hidden: &Self::Tensor, head: &Self::Weight, rows: &[SampleRow], out: &mut Self::Tensor);
    /// Begins to read what [`Backend::draw`] wrote for the first `rows` rows; what is drawn into `out` later does not
    /// change the answer.
    fn ask_drawn(&self, out: &Self::Tensor, rows: usize) -> Result<Self::Asked, BackendError>;
    /// Waits for drawn tokens, and for nothing that was issued after they were asked for.
    fn drawn(&self, asked: Self::Asked) -> Result<Vec<Sampled>, BackendError>;
    /// Backward of [`Backend::head`]: `dhidden` is overwritten, `dweight += ...`.
    fn head_backward(
        &self,
        hidden: &Self::Tensor,
        head: &Self::Weight,
        targets: &[u32],
        temperature: f32,
        out: &HeadOutput,
        gradient: HeadGradient,
        dhidden: &mut Self::Tensor,
        dweight: &mut Self::Tensor,
    );
    /// `hidden[row] . w`: the scalar head of a critic.
    fn row_dots(
        &self,
        hidden: &Self::Tensor,
        rows: usize,
        w: &Self::Tensor,
    ) -> Result<Vec<f32>, BackendError>;
    /// Backward of [`Backend::row_dots`]: `dhidden` is overwritten, `dw += ...`.
    fn row_dots_backward(
        &self,
        hidden: &Self::Tensor,
        rows: usize,
        w: &Self::Tensor,
        gradient: &[f32],
        dhidden: &mut Self::Tensor,
        dw: &mut Self::Tensor,
    );

    /// One AdamW update of a tensor.
    fn adamw(
        &self,
        constants: &AdamW,
        w: &mut Self::Tensor,
        g: &Self::Tensor,
        m: &mut Self::Tensor,
        v: &mut Self::Tensor,
    );
    /// Sum of the squares of all values: of each tensor's, added up in order.
    fn sum_squares(&self, tensors: &[&Self::Tensor]) -> Result<f64, BackendError>;
    /// [`crate::checksum::values`] of a tensor.
    fn checksum(&self, x: &Self::Tensor) -> Result<u64, BackendError>;
}
