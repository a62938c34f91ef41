//! Forward passes without gradients: rows in, keys and values kept in pages, hidden rows out.

use super::batch::{Batch, PAGE, Targets};
use super::layer::{self, Activations, Temporary};
use super::network::Network;
use qurl_kernels::backend::{DRAWN_WORDS, Extent, HeadOutput, SampleRow};
use qurl_kernels::{Backend, BackendError};

/// Working memory for forward passes of up to a fixed number of rows.
pub struct Inference<B: Backend> {
    rows: usize,
    acts: Activations<B>,
    temp: Temporary<B>,
    /// `[rows, d]` the residual stream.
    x: B::Tensor,
    /// `[rows, d]` picked rows of it, and those normalised.
    picked: B::Tensor,
    hidden: B::Tensor,
    /// Drawn tokens.
    drawn: B::Tensor,
}

impl<B: Backend> Inference<B> {
    /// Memory for `rows` rows at a time.
    pub fn new(backend: &B, net: &Network<B>, rows: usize) -> Result<Self, BackendError> {
        let d = net.config().hidden_size;
        Ok(Inference {
            rows,
            acts: Activations::new(backend, net, rows, false)?,
            temp: Temporary::new(backend, net, rows)?,
            x: backend.zeros(rows * d)?,
            picked: backend.zeros(rows * d)?,
            hidden: backend.zeros(rows * d)?,
            drawn: backend.zeros(rows * DRAWN_WORDS)?,
        })
    }

    /// Rows that fit into one pass.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Runs the blocks over the rows of the batch; `kv` has the pages of every layer.
    pub fn forward(&mut self, backend: &B, net: &Network<B>, batch: &Batch, kv: &mut [B::Kv]) {
        self.check(batch);
        backend.gather(&net.embed, &batch.ids, net.config().hidden_size, &mut self.x);
        self.blocks(backend, net, batch, kv, Extent::Whole);
    }

    /// [`Inference::forward`] of a batch whose ids may name rows of the last [`Inference::draw`], as far as a
    /// [`Backend::step`] wants it: all blocks take the same inputs.
    pub fn forward_step(
        &mut self,
        backend: &B,
        net: &Network<B>,
        batch: &Batch,
        kv: &mut [B::Kv],
        extent: Extent,
    ) {
        self.check(batch);
        backend.gather_tokens(&net.embed, &batch.ids, &self.drawn, net.config().hidden_size, &mut self.x);
        self.blocks(backend, net, batch, kv, extent);
    }

    fn check(&self, batch: &Batch) {
        assert!(batch.rows() <= self.rows, "{} rows in a workspace of {}", batch.rows(), self.rows);
    }

    fn blocks(&mut self, backend: &B, net: &Network<B>, batch: &Batch, kv: &mut [B::Kv], extent: Extent) {
        let blocks = match extent {
            Extent::Whole => net.blocks.len(),
            Extent::Inputs => 1,
        };
        for (block, kv) in net.blocks.iter().zip(kv).take(blocks) {
            layer::forward(backend, net, block, batch, kv, &mut self.x, &mut self.acts, &mut self.temp);
        }
    }

    /// Final hidden states `[rows.len(), d]` of some rows of the last forward pass, ready for the head.
    pub fn hidden(&mut self, backend: &B, net: &Network<B>, rows: &[u32]) -> &B::Tensor {
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
        &self.hidden
    }

    /// Log-probs, entropies and argmax tokens for some rows of the last forward pass.
    pub fn head(
        &mut self,
        backend: &B,
        net: &Network<B>,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, BackendError> {
        let hidden = self.hidden(backend, net, &targets.rows);
        backend.head(hidden, &net.head, &targets.tokens, temperature)
    }

    /// Draws the tokens that follow some rows of the last forward pass, one `draws` each. [`Inference::ask_drawn`] asks
    /// for them.
    pub fn draw(&mut self, backend: &B, net: &Network<B>, rows: &[u32], draws: &[SampleRow]) {
        self.hidden(backend, net, rows);
        backend.draw(&self.hidden, &net.head, draws, &mut self.drawn);
    }

    /// Begins to read the first `rows` tokens that the last [`Inference::draw`] drew.
    pub fn ask_drawn(&self, backend: &B, rows: usize) -> Result<B::Asked, BackendError> {
        backend.ask_drawn(&self.drawn, rows)
    }
}

/// Log-probs (with entropies and argmax tokens) of every token but the first of whole sequences, in chunks of at
/// most `chunk` rows. How sequences are batched and chunked does not change a bit of the result.
pub fn score<B: Backend, S: AsRef<[u32]>>(
    backend: &B,
    net: &Network<B>,
    sequences: &[S],
    temperature: f32,
    chunk: usize,
) -> Result<Vec<HeadOutput>, BackendError> {
    let targets = Targets::of(sequences, |_, _| true);
    let batch = Batch::whole(sequences);
    let mut kv = page_store(backend, net, batch.pages.len(), PAGE)?;
    let mut work = Inference::new(backend, net, chunk.min(batch.rows()).max(1))?;
    let mut all = HeadOutput::default();
    for start in (0..batch.rows()).step_by(work.rows()) {
        let end = (start + work.rows()).min(batch.rows());
        work.forward(backend, net, &batch.chunk(start..end), &mut kv);
        let first = all.logp.len();
        let here = first..first + targets.rows[first..].partition_point(|&row| (row as usize) < end);
        let rows = targets.rows[here.clone()].iter().map(|row| row - start as u32).collect();
        let part = Targets { rows, tokens: targets.tokens[here].to_vec() };
        if !part.is_empty() {
            all.extend(work.head(backend, net, &part, temperature)?);
        }
    }
    let mut from = 0;
    Ok(sequences
        .iter()
        .map(|s| {
            let range = from..from + s.as_ref().len().saturating_sub(1);
            from = range.end;
            all.part(range)
        })
        .collect())
}

/// Pages for the keys and values of every layer.
pub fn page_store<B: Backend>(
    backend: &B,
    net: &Network<B>,
    pages: usize,
    page_size: usize,
) -> Result<Vec<B::Kv>, BackendError> {
    let c = net.config();
    (0..c.num_layers)
        .map(|_| backend.kv_pages(net.options().kv_format, pages, page_size, c.num_kv_heads, c.head_dim))
        .collect()
}
