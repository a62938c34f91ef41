//! A model that is being trained.
//!
//! It owns the master weights in f32 ([`Master`]), their gradients and moments, and the packed network that
//! computes. A step adds up gradients over micro-batches ([`Learner::accumulate`]), shard by shard
//! ([`Learner::end_shard`]), and ends with one [`Learner::update`], after which the network is packed again
//! from the new weights. What the loss is, is the caller's business: it sees the log-probs of a micro-batch,
//! or of some of its targets, and answers with their derivatives.

use crate::checkpoint::LearnerSnapshot;
use crate::gradients::Gradients;
use crate::master::Master;
use crate::optimizer::{AdamWOptions, Optimizer, UpdateReport};
use crate::ranks::Ranks;
use qurl_kernels::types::HeadOutput;
pub use qurl_kernels::types::LossGradient;
use qurl_kernels::{Device, DeviceError, Format, Queue, Rounding};
use qurl_model::compute::{Batch, Network, NetworkOptions, Tape, TapeOptions, Targets, whole_batch};
use qurl_model::{ModelConfig, ParamInfo, Params, params};
use std::ops::Range;

/// How a learner computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnerOptions {
    /// f32, or bf16 with f32 master weights and sums.
    pub compute: Format,
    /// Longest sequence.
    pub positions: usize,
    /// Micro-batches and recomputation.
    pub tape: TapeOptions,
    /// The optimizer.
    pub adamw: AdamWOptions,
}

/// What the derivatives of a loss by the log-prob and entropy of a target depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossScope {
    /// That target alone: the loss may be asked for some targets at a time, and the head computes its logits
    /// once.
    Token,
    /// All targets of its sequence: the loss is asked once for the whole micro-batch, and the head computes
    /// its logits again for the gradients.
    Sequence,
}

/// A model that is being trained.
pub struct Learner<D: Device> {
    /// Master weights.
    pub master: Master<D>,
    grads: Gradients<D>,
    net: Network<D>,
    /// Moments and the number of updates.
    pub optimizer: Optimizer<D>,
    tape: Tape<D>,
    ranks: Ranks,
}

impl<D: Device> Learner<D> {
    /// Takes over weights, on one rank.
    pub fn new(
        queue: &mut D::Queue,
        config: &ModelConfig,
        weights: &Params<Vec<f32>>,
        options: LearnerOptions,
    ) -> Result<Self, DeviceError> {
        Self::on_ranks(queue, config, weights, options, &Ranks::alone())
    }

    /// Takes over weights, which are the same on all ranks.
    pub fn on_ranks(
        queue: &mut D::Queue,
        config: &ModelConfig,
        weights: &Params<Vec<f32>>,
        options: LearnerOptions,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let shapes = params::shapes(config, weights.value_head.is_some());
        Self::of(queue, config, shapes, Some(weights.as_ref()), options, ranks, &mut |_| ())
    }

    /// Takes over weights of these shapes; without any they are zero: for plans. `taken` is called with each
    /// part of the memory after it was taken.
    pub(crate) fn of(
        queue: &mut D::Queue,
        config: &ModelConfig,
        shapes: Params<ParamInfo>,
        weights: Option<Params<&Vec<f32>>>,
        options: LearnerOptions,
        ranks: &Ranks,
        taken: &mut dyn FnMut(&str),
    ) -> Result<Self, DeviceError> {
        let (device, value_head) = (queue.device().clone(), shapes.value_head.is_some());
        let mut master = Master::new(queue, shapes.map(|leaf| leaf.len()), weights, ranks)?;
        taken("weights in f32");
        let grads = Gradients::new(&*device, master.lengths(), ranks.shards_each())?;
        taken("gradients");
        let network = NetworkOptions {
            positions: options.positions,
            ..NetworkOptions::training(config, options.compute)
        };
        let net = Network::of_leaves(queue, config, value_head, &mut master, network)?;
        taken("packed weights");
        let optimizer = Optimizer::new(&*device, master.lengths(), options.adamw, ranks)?;
        taken("moments");
        let tape = Tape::new(&*device, &net, options.tape)?;
        taken("activations");
        Ok(Learner { master, grads, net, optimizer, tape, ranks: ranks.clone() })
    }

    /// Who trains it.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The network with the newest weights.
    pub fn network(&self) -> &Network<D> {
        &self.net
    }

    /// The same, to be lent to an engine ([`Engine::with_network`](qurl_rollout::Engine::with_network)).
    pub fn network_mut(&mut self) -> &mut Network<D> {
        &mut self.net
    }

    /// Scores targets with the newest weights, without gradients and in the memory of the updates.
    pub fn score(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.tape.score(queue, &self.net, batch, targets, temperature)
    }

    /// [`Learner::score`] with another network of the same model.
    pub fn score_with(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.tape.score(queue, net, batch, targets, temperature)
    }

    /// A critic's values of rows, without gradients and in the memory of the updates.
    pub fn values(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        self.tape.values(queue, &self.net, batch, rows)
    }

    /// Logits of rows with the newest weights and with those of another network of the same model.
    pub fn logits_of_both(
        &mut self,
        queue: &mut D::Queue,
        other: &Network<D>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
        let own = self.tape.logits(queue, &self.net, batch, rows)?;
        Ok((own, self.tape.logits(queue, other, batch, rows)?))
    }

    /// Runs one micro-batch of the shard at hand forward, asks for the loss's derivatives, and adds the
    /// gradients. The loss is asked for ranges of targets, in order: for all at once where its scope is a
    /// sequence.
    pub fn accumulate<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        targets: Targets,
        temperature: f32,
        scope: LossScope,
        mut loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
    ) -> Result<(), E> {
        if targets.is_empty() {
            return Ok(());
        }
        let Learner { tape, net, grads, .. } = self;
        let grads = grads.shard();
        match scope {
            LossScope::Token => tape.train(queue, net, batch, &targets, temperature, loss, grads),
            LossScope::Sequence => {
                let forward = tape.forward(queue, net, batch, targets, temperature)?;
                let gradient = loss(0..forward.out.logp.len(), &forward.out)?;
                tape.backward(queue, net, forward, gradient.borrowed(), grads);
                Ok(())
            }
        }
    }

    /// Runs one micro-batch of a critic forward, asks for the derivatives by the values of `rows`, adds the
    /// gradients.
    pub fn accumulate_values<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        rows: &[u32],
        loss: impl FnOnce(&[f32]) -> Result<Vec<f32>, E>,
    ) -> Result<(), E> {
        if rows.is_empty() {
            return Ok(());
        }
        let values = self.tape.forward_values(queue, &self.net, batch, rows)?;
        let gradient = loss(&values)?;
        self.tape.backward_values(queue, &self.net, rows, &gradient, self.grads.shard());
        Ok(())
    }

    /// What was added so far was one of this rank's shards ([`Ranks::own_shards_of`]); the next begins at
    /// zero.
    pub fn end_shard(&mut self, queue: &mut D::Queue) {
        self.grads.end_shard(queue);
    }

    /// One optimizer update with the gradients of all shards, at all ranks.
    pub fn update(&mut self, queue: &mut D::Queue, lr: f64) -> Result<UpdateReport, DeviceError> {
        let grads = self.grads.sum(queue);
        let report = self.optimizer.step(queue, lr, &mut self.master.pieces, grads)?;
        if report.applied {
            self.net.refresh_leaves(queue, &mut self.master, Rounding::Nearest)?;
        }
        Ok(report)
    }

    /// Does the largest things that training does, for what they allocate: a full micro-batch with its
    /// update, and scoring by this network and by `other`.
    pub(crate) fn rehearse(
        &mut self,
        queue: &mut D::Queue,
        tape: TapeOptions,
        longest: usize,
        other: Option<&Network<D>>,
    ) -> Result<(), DeviceError> {
        let ids = full_batch(tape, longest);
        let (batch, targets) = (whole_batch(&ids), Targets::of(&ids, |_, _| true));
        self.score(queue, &batch, &targets, 1.0)?;
        if let Some(other) = other {
            self.score_with(queue, other, &batch, &targets, 1.0)?;
        }
        // The head in one pass: it holds more logits at a time than in two.
        self.accumulate(queue, &batch, targets, 1.0, LossScope::Token, |_, out| {
            let zeros = vec![0.0; out.logp.len()];
            Ok::<_, DeviceError>(LossGradient { dlogp: zeros.clone(), dentropy: zeros })
        })?;
        self.update(queue, 0.0).map(|_| ())
    }

    /// [`Learner::rehearse`] of a critic.
    pub(crate) fn rehearse_values(
        &mut self,
        queue: &mut D::Queue,
        tape: TapeOptions,
        longest: usize,
    ) -> Result<(), DeviceError> {
        let ids = full_batch(tape, longest);
        let batch = whole_batch(&ids);
        let rows: Vec<u32> = (0..batch.rows() as u32).collect();
        self.values(queue, &batch, &rows)?;
        let zeros = |values: &[f32]| Ok::<_, DeviceError>(vec![0.0; values.len()]);
        self.accumulate_values(queue, &batch, &rows, zeros)?;
        self.update(queue, 0.0).map(|_| ())
    }

    /// The weights, on the host of every rank.
    pub fn weights(&mut self, queue: &mut D::Queue) -> Result<Params<Vec<f32>>, DeviceError> {
        self.master.read(queue)
    }

    /// Another network of the same weights.
    pub fn packed(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Network<D>, DeviceError> {
        let value_head = self.master.lengths().value_head.is_some();
        Network::of_leaves(queue, &self.net.config().clone(), value_head, &mut self.master, options)
    }

    /// Weights, moments and the number of updates, on the host. Gradients are not part of it: take it between
    /// updates.
    pub fn snapshot(&mut self, queue: &mut D::Queue) -> Result<LearnerSnapshot, DeviceError> {
        let weights = self.weights(queue)?;
        let Optimizer { first, second, steps, .. } = &self.optimizer;
        Ok(LearnerSnapshot {
            weights,
            first: read::<D>(queue, first)?,
            second: read::<D>(queue, second)?,
            updates: *steps,
        })
    }

    /// Takes over the state of a model of the same layout.
    pub fn restore(&mut self, queue: &mut D::Queue, from: &LearnerSnapshot) -> Result<(), DeviceError> {
        self.master.write(queue, &from.weights);
        let to = [&mut self.optimizer.first, &mut self.optimizer.second];
        for (to, from) in to.into_iter().zip([&from.first, &from.second]) {
            to.iter_mut().zip(from.iter()).for_each(|(to, from)| queue.write(to, from));
        }
        self.optimizer.steps = from.updates;
        self.net.refresh_leaves(queue, &mut self.master, Rounding::Nearest)
    }
}

/// Sequences that fill a micro-batch, as long as they may be.
fn full_batch(tape: TapeOptions, longest: usize) -> Vec<Vec<u32>> {
    let starts = (0..tape.rows).step_by(longest.max(1)).take(tape.sequences);
    starts.map(|start| vec![0; longest.min(tape.rows - start)]).collect()
}

/// Copies of tensors on the host.
fn read<D: Device>(
    queue: &mut D::Queue,
    tensors: &Params<D::Tensor>,
) -> Result<Params<Vec<f32>>, DeviceError> {
    tensors.as_ref().try_map(|tensor| queue.read(tensor, D::len(tensor)))
}

/// Splits whole sequences into micro-batches of at most `rows` tokens and `sequences` sequences, in order. A
/// sequence longer than `rows` is an error of the caller.
pub fn micro_batches(lengths: &[usize], options: TapeOptions) -> Vec<std::ops::Range<usize>> {
    let mut batches = Vec::new();
    let (mut start, mut rows) = (0, 0);
    for (i, &length) in lengths.iter().enumerate() {
        if i > start && (rows + length > options.rows || i - start == options.sequences) {
            batches.push(start..i);
            (start, rows) = (i, 0);
        }
        rows += length;
    }
    if start < lengths.len() {
        batches.push(start..lengths.len());
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_keep_order_and_bounds() {
        let options = TapeOptions { rows: 10, sequences: 3, recompute: false };
        assert_eq!(micro_batches(&[4, 4, 4, 1, 1, 1, 1, 10], options), [0..2, 2..5, 5..7, 7..8]);
        assert!(micro_batches(&[], options).is_empty());
    }
}
