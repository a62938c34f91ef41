//! AdamW over all parameters of a model, with clipping by the global norm.
//!
//! Weight decay applies to every parameter, as PyTorch's optimizer and the trainers built on it do. A
//! gradient that is not finite is never applied: the step is skipped and reported.
//!
//! Several ranks share the work, the master weights and the moments (ZeRO-1): each leaf is cut into a piece
//! for each rank ([`Ranks::cuts`]). A rank receives its piece of everyone's gradient, adds these in the order
//! of the ranks' tree and updates its piece; new weights are gathered where they are packed
//! ([`crate::master`]). AdamW works on single numbers and the norm is summed over fixed blocks, so no bit
//! depends on how many ranks there are.

use crate::ranks::Ranks;
use qurl_kernels::ops::{AddPieces, AllToAll, Slice, Update};
use qurl_kernels::types::AdamW;
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Constants of the optimizer, with the names and defaults of its peers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWOptions {
    /// Decay of the mean of past gradients.
    pub beta1: f64,
    /// Decay of the mean of their squares.
    pub beta2: f64,
    /// Added to the root of that mean, against a division by zero.
    pub eps: f64,
    /// Share of a weight that an update takes off, times the learning rate. It applies to every parameter.
    pub weight_decay: f64,
    /// Gradients with a larger norm over all parameters are scaled down to it.
    pub clip_grad: f64,
}

impl Default for AdamWOptions {
    fn default() -> Self {
        AdamWOptions { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, clip_grad: 1.0 }
    }
}

/// Moments of all parameters, or of this rank's pieces of them, and the number of updates made.
pub struct Optimizer<D: Device> {
    options: AdamWOptions,
    /// Updates made so far.
    pub steps: u64,
    /// First moments.
    pub first: Params<D::Tensor>,
    /// Second moments.
    pub second: Params<D::Tensor>,
    ranks: Ranks,
    /// [ranks, own piece] of the largest leaf, where there are other ranks.
    received: Option<D::Tensor>,
}

/// What an update did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpdateReport {
    /// Global norm of the gradients before clipping.
    pub grad_norm: f64,
    /// False where the norm was not finite: nothing was changed.
    pub applied: bool,
}

impl<D: Device> Optimizer<D> {
    /// Zero moments for leaves of these lengths, of which each of the ranks has its pieces.
    pub fn new(
        device: &D,
        lengths: &Params<usize>,
        options: AdamWOptions,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let piece = |len: &usize| ranks.piece(*len).len();
        let zeros = || lengths.as_ref().try_map(|len| device.zeros(piece(len)));
        let largest = lengths.iter().map(piece).max().unwrap_or(0);
        let received = (ranks.size() > 1).then(|| device.zeros(ranks.size() * largest)).transpose()?;
        let (first, second, ranks) = (zeros()?, zeros()?, ranks.clone());
        Ok(Optimizer { options, steps: 0, first, second, ranks, received })
    }

    /// Begins again: zero moments, no updates made.
    pub fn reset(&mut self, queue: &mut D::Queue) {
        for moment in self.first.iter_mut().chain(self.second.iter_mut()) {
            let len = D::len(moment);
            queue.clear(moment, len);
        }
        self.steps = 0;
    }

    /// Adds up the ranks' gradients: each has the sum of its own piece afterwards.
    fn reduce(&mut self, queue: &mut D::Queue, grads: &mut Params<D::Tensor>) -> Result<(), DeviceError> {
        let Some(received) = &mut self.received else { return Ok(()) };
        let (count, ranks) = (self.ranks.size(), self.ranks.collective());
        for g in grads.iter_mut() {
            let (cuts, own) = (self.ranks.cuts(D::len(g)), self.ranks.piece(D::len(g)));
            queue.all_to_all(AllToAll { ranks, from: &*g, cuts: &cuts, into: received })?;
            queue.add_pieces(AddPieces { pieces: received, count, len: own.len(), to: g, at: own.start });
        }
        Ok(())
    }

    /// The norm of gradients that [`Optimizer::reduce`] has added up.
    fn norm(&self, queue: &mut D::Queue, grads: &Params<D::Tensor>) -> Result<f64, DeviceError> {
        if self.ranks.size() == 1 {
            return Ok(queue.sum_squares(&grads.iter().collect::<Vec<_>>())?.sqrt());
        }
        let slice = |tensor| {
            let own = self.ranks.piece(D::len(tensor));
            Slice { tensor, at: own.start, len: own.len() }
        };
        let own = queue.block_squares(&grads.iter().map(slice).collect::<Vec<_>>())?;
        // Leaf by leaf, the pieces of rank 0 first: the order of one rank.
        let mut leaves = vec![Vec::new(); own.len()];
        for pieces in self.ranks.gather(own)? {
            leaves.iter_mut().zip(pieces).for_each(|(leaf, piece)| leaf.extend(piece));
        }
        Ok(queue.add_block_squares(&leaves)?.sqrt())
    }

    /// Adds up the ranks' gradients, clips, updates this rank's pieces of the weights and clears the
    /// gradients.
    pub fn step(
        &mut self,
        queue: &mut D::Queue,
        lr: f64,
        pieces: &mut Params<D::Tensor>,
        grads: &mut Params<D::Tensor>,
    ) -> Result<UpdateReport, DeviceError> {
        self.reduce(queue, grads)?;
        let grad_norm = self.norm(queue, grads)?;
        let applied = grad_norm.is_finite();
        if applied {
            self.steps += 1;
            let o = &self.options;
            // As torch.nn.utils.clip_grad_norm_ does it.
            let scale = (o.clip_grad / (grad_norm + 1e-6)).min(1.0);
            let adamw = AdamW {
                lr: lr as f32,
                beta1: o.beta1 as f32,
                beta2: o.beta2 as f32,
                eps: o.eps as f32,
                weight_decay: o.weight_decay as f32,
                step: self.steps,
                grad_scale: scale as f32,
            };
            let moments = self.first.iter_mut().zip(self.second.iter_mut());
            for ((w, g), (m, v)) in pieces.iter_mut().zip(grads.iter()).zip(moments) {
                let at = self.ranks.piece(D::len(g)).start;
                queue.adamw(Update { adamw, w, g, at, m, v });
            }
        }
        for g in grads.iter_mut() {
            let len = D::len(g);
            queue.clear(g, len);
        }
        Ok(UpdateReport { grad_norm, applied })
    }
}
