//! Passes without gradients in the memory of a tape, with any network of the model.

use super::Tape;
use crate::compute::PAGE;
use crate::compute::batch::Targets;
use crate::compute::layer;
use crate::compute::weights::{Weights, next_forward};
use qurl_kernels::ops::{Head, Linear, Output};
use qurl_kernels::types::{Batch, HeadOutput};
use qurl_kernels::{Device, DeviceError, Queue};

impl<D: Device> Tape<D> {
    /// Runs all blocks and keeps nothing: neither activations nor the keys and values of the block before.
    fn run_blocks_once(
        &mut self,
        queue: &mut D::Queue,
        weights: &mut impl Weights<D>,
        batch: &Batch,
    ) -> Result<(), DeviceError> {
        let net = weights.network();
        self.embed(queue, net, batch);
        // Quantized networks may store keys and values in fewer bits than the trainer does.
        let mut own = match net.options().kv_format {
            format if format == self.kv_format => None,
            _ => Some(queue.device().kv_pages(net.kv_shape(batch.pages.len(), PAGE))?),
        };
        let kv = own.as_mut().unwrap_or(&mut self.kv);
        let rows = (&self.batch, self.rows);
        for index in 0..net.config().num_layers {
            next_forward(queue, weights, index)?;
            let (net, block) = (weights.network(), weights.block(index));
            layer::forward(queue, net, block, rows, kv, &mut self.x, self.acts[0].pass());
        }
        Ok(())
    }

    /// Log-probs, entropies and argmax tokens of the targets of whole sequences, without gradients.
    pub fn score(
        &mut self,
        queue: &mut D::Queue,
        mut weights: impl Weights<D>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.run_blocks_once(queue, &mut weights, batch)?;
        let net = weights.network();
        self.pick(queue, net, &targets.rows);
        let (hidden, targets) = (&self.hidden, &targets.tokens);
        queue.head(Head { hidden, head: &net.head, targets, temperature })
    }

    /// A critic's values of the chosen rows of whole sequences, without gradients.
    ///
    /// # Panics
    /// If the network has no value head.
    pub fn values(
        &mut self,
        queue: &mut D::Queue,
        mut weights: impl Weights<D>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        self.run_blocks_once(queue, &mut weights, batch)?;
        self.value_head(queue, weights.network(), rows)
    }

    /// Logits `[rows.len(), vocabulary]` of the chosen rows of whole sequences: for diagnostics of few rows.
    pub fn logits(
        &mut self,
        queue: &mut D::Queue,
        mut weights: impl Weights<D>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        self.run_blocks_once(queue, &mut weights, batch)?;
        let net = weights.network();
        self.pick(queue, net, rows);
        let len = rows.len() * net.config().vocab_size;
        let mut logits = queue.device().zeros(len)?;
        queue.linear(Linear {
            adapter: None,
            x: &self.hidden,
            rows: rows.len(),
            norm: None,
            w: &net.head,
            bias: None,
            output: Output::Store,
            out: &mut logits,
        });
        queue.read(&logits, len)
    }
}
