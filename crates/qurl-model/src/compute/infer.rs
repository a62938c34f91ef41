//! Forward passes without gradients: rows in, keys and values kept in pages, hidden rows out.

use super::batch::{self, PAGE, Targets};
use super::layer::{self, Activations};
use super::network::Network;
use qurl_kernels::ops::{Gather, Head, Index, Norm, RmsNorm, Sample, Top};
use qurl_kernels::types::{Batch, HeadOutput};
use qurl_kernels::{Device, DeviceError, Queue};

/// Working memory for forward passes of up to a fixed number of rows.
pub struct Inference<D: Device> {
    limit: usize,
    /// The rows of the pass at hand.
    batch: D::Batch,
    /// How many they are, and how many of them are sampled.
    rows: usize,
    sampled_rows: usize,
    buffers: Buffers<D>,
}

/// What a pass writes.
struct Buffers<D: Device> {
    acts: Activations<D>,
    /// `[rows, d]` the residual stream.
    x: D::Tensor,
    /// `[rows, d]` picked rows of it, and those normalised.
    picked: D::Tensor,
    hidden: D::Tensor,
    /// Sampled tokens.
    sampled: D::Tokens,
}

impl<D: Device> Inference<D> {
    /// Memory for `limit` rows at a time.
    pub fn new(device: &D, net: &Network<D>, limit: usize) -> Result<Self, DeviceError> {
        let d = net.config().hidden_size;
        let buffers = Buffers {
            acts: Activations::new(device, net, limit, false)?,
            x: device.zeros(limit * d)?,
            picked: device.zeros(limit * d)?,
            hidden: device.zeros(limit * d)?,
            sampled: device.tokens(limit)?,
        };
        Ok(Inference { limit, batch: device.batch(), rows: 0, sampled_rows: 0, buffers })
    }

    /// Rows that fit into one pass.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Runs the blocks over the rows of the batch, and samples the tokens that it asks for; `kv` has the
    /// pages of every layer. With a key the pass may be replayed from a record (see [`Queue::replay`]): it
    /// names these buffers, this network and these pages, and no others.
    pub fn step(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        rows: &Batch,
        kv: &mut [D::Kv],
        key: Option<u64>,
    ) {
        assert!(rows.rows() <= self.limit, "{} rows in a workspace of {}", rows.rows(), self.limit);
        let Inference { batch, buffers, .. } = self;
        queue.load(batch, rows);
        (self.rows, self.sampled_rows) = (rows.rows(), rows.sampled_rows.len());
        let (rows, sampled) = (self.rows, self.sampled_rows);
        let mut run = |queue: &mut D::Queue| {
            buffers.forward(queue, net, (batch, rows), kv);
            if sampled > 0 {
                buffers.sample(queue, net, (batch, sampled));
            }
        };
        match key {
            Some(key) => queue.replay(key, batch, &mut run),
            None => run(queue),
        }
    }

    /// Log-probs, entropies and argmax tokens for some rows of the last pass.
    pub fn head(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.buffers.pick(queue, net, Index::Rows(&targets.rows), targets.len());
        let hidden = &self.buffers.hidden;
        queue.head(Head { hidden, head: &net.head, targets: &targets.tokens, temperature })
    }

    /// The `count` most probable tokens after some rows of the last pass, the best first; each row with what
    /// its logits are multiplied with.
    pub fn top(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        rows: &[u32],
        factors: &[f32],
        count: usize,
    ) -> Result<Vec<Vec<(u32, f32)>>, DeviceError> {
        self.buffers.pick(queue, net, Index::Rows(rows), rows.len());
        queue.top(Top { hidden: &self.buffers.hidden, head: &net.head, factors, count })
    }

    /// Begins to bring the first `rows` tokens that the last pass sampled to the host.
    pub fn fetch(&self, queue: &mut D::Queue, rows: usize) -> Result<D::Pending, DeviceError> {
        queue.fetch(&self.buffers.sampled, rows)
    }
}

impl<D: Device> Buffers<D> {
    fn forward(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        (batch, rows): (&D::Batch, usize),
        kv: &mut [D::Kv],
    ) {
        let index = Index::Tokens { batch, sampled: Some(&self.sampled) };
        let width = net.config().hidden_size;
        queue.gather(Gather { table: &net.embed, index, width, out: &mut self.x });
        for (block, kv) in net.blocks.iter().zip(kv) {
            layer::forward(queue, net, block, (batch, rows), kv, &mut self.x, self.acts.pass());
        }
    }

    /// Final hidden states `[rows, d]` of some rows, ready for the head.
    fn pick(&mut self, queue: &mut D::Queue, net: &Network<D>, index: Index<D>, rows: usize) {
        let c = net.config();
        let (width, norm) = (c.hidden_size, Norm { gain: &net.final_norm, eps: c.rms_norm_eps });
        queue.gather(Gather { table: &self.x, index, width, out: &mut self.picked });
        queue.rmsnorm(RmsNorm { x: &self.picked, rows, norm, out: &mut self.hidden });
    }

    /// Samples the tokens that follow the rows which the batch names.
    fn sample(&mut self, queue: &mut D::Queue, net: &Network<D>, (batch, rows): (&D::Batch, usize)) {
        self.pick(queue, net, Index::Sampled(batch), rows);
        let (hidden, out) = (&self.hidden, &mut self.sampled);
        queue.sample(Sample { hidden, head: &net.head, batch, out });
    }
}

/// Log-probs (with entropies and argmax tokens) of every token but the first of whole sequences, in chunks of
/// at most `chunk` rows. How sequences are batched and chunked does not change a bit of the result.
pub fn score<D: Device, S: AsRef<[u32]>>(
    queue: &mut D::Queue,
    net: &Network<D>,
    sequences: &[S],
    temperature: f32,
    chunk: usize,
) -> Result<Vec<HeadOutput>, DeviceError> {
    let targets = Targets::of(sequences, |_, _| true);
    let whole = batch::whole_batch(sequences);
    let device = queue.device().clone();
    let mut kv = page_store(&*device, net, whole.pages.len(), PAGE)?;
    let mut work = Inference::new(&*device, net, chunk.min(whole.rows()).max(1))?;
    let mut all = HeadOutput::default();
    for start in (0..whole.rows()).step_by(work.limit()) {
        let end = (start + work.limit()).min(whole.rows());
        work.step(queue, net, &batch::chunk(&whole, start..end), &mut kv, None);
        let first = all.logp.len();
        let here = first..first + targets.rows[first..].partition_point(|&row| (row as usize) < end);
        let rows = targets.rows[here.clone()].iter().map(|row| row - start as u32).collect();
        let part = Targets { rows, tokens: targets.tokens[here].to_vec() };
        if !part.is_empty() {
            all.extend(work.head(queue, net, &part, temperature)?);
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
pub fn page_store<D: Device>(
    device: &D,
    net: &Network<D>,
    pages: usize,
    page_size: usize,
) -> Result<Vec<D::Kv>, DeviceError> {
    (0..net.config().num_layers).map(|_| device.kv_pages(net.kv_shape(pages, page_size))).collect()
}
