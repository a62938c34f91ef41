//! Passes without gradients: scoring, values and logits in the memory of the updates, with the newest weights
//! or with another network of the same model, and what a rank does that has no rows of a pass.

use super::{Learner, at_work};
use crate::divided::{Frozen, PassWeights};
use crate::gradients::Gradients;
use qurl_kernels::types::HeadOutput;
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::{Batch, Network, Tape, Targets, idle_forward};

/// Passes through a model, those without rows included: what gathers blocks where they are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passes {
    /// Forward alone.
    pub forward: u64,
    /// Forward and backward.
    pub training: u64,
}

impl std::ops::Add for Passes {
    type Output = Passes;

    fn add(self, other: Passes) -> Passes {
        Passes { forward: self.forward + other.forward, training: self.training + other.training }
    }
}

impl<D: Device> Learner<D> {
    /// Passes so far.
    pub fn passed(&self) -> Passes {
        self.passed
    }

    /// Takes over the newest weights, where the next forward pass would do it. All ranks call it at the same
    /// places: before they exchange anything else after passes that not all of them may have made.
    pub fn catch_up(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        match self.fresh < self.net.config().num_layers {
            true => idle_forward(queue, self.weights_of_pass().0),
            false => Ok(()),
        }
    }

    /// The weights of a pass.
    pub(super) fn weights_of_pass(
        &mut self,
    ) -> (PassWeights<'_, D>, &mut Tape<D>, &mut Option<Gradients<D>>) {
        let Learner { net, slot, fresh, master, tape, grads, .. } = self;
        let (pieces, gather) = (&master.pieces.layers, &mut master.gather);
        let weights = match *fresh < net.config().num_layers {
            true => PassWeights::Behind { net, pieces, gather, fresh },
            false => PassWeights::of(net, pieces, slot.as_mut(), gather),
        };
        (weights, at_work(tape), grads)
    }

    /// The same of another network of the same model.
    fn weights_of<'a>(&'a mut self, other: &'a Frozen<D>) -> (PassWeights<'a, D>, &'a mut Tape<D>) {
        let Learner { slot, master, tape, .. } = self;
        (PassWeights::of(&other.net, &other.pieces, slot.as_mut(), &mut master.gather), at_work(tape))
    }

    /// Scores targets with the newest weights, without gradients and in the memory of the updates.
    ///
    /// Where weights are divided, all ranks pass alike: one that has nothing to score is
    /// [idle](Learner::idle).
    pub fn score(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.passed.forward += 1;
        let (weights, tape, _) = self.weights_of_pass();
        tape.score(queue, weights, batch, targets, temperature)
    }

    /// [`Learner::score`] with another network of the same model, or with its own where there is none.
    pub fn score_with(
        &mut self,
        queue: &mut D::Queue,
        net: Option<&Network<D>>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        if let Some(net) = net {
            return at_work(&mut self.tape).score(queue, net, batch, targets, temperature);
        }
        self.score(queue, batch, targets, temperature)
    }

    /// [`Learner::score`] with a frozen network, which is divided as the own one is.
    pub fn score_frozen(
        &mut self,
        queue: &mut D::Queue,
        other: &Frozen<D>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.passed.forward += 1;
        let (weights, tape) = self.weights_of(other);
        tape.score(queue, weights, batch, targets, temperature)
    }

    /// A critic's values of rows, without gradients and in the memory of the updates.
    pub fn values(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        self.passed.forward += 1;
        let (weights, tape, _) = self.weights_of_pass();
        tape.values(queue, weights, batch, rows)
    }

    /// Does what the other ranks need of this one while they pass with the newest weights.
    pub fn idle(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        self.passed.forward += 1;
        idle_forward(queue, self.weights_of_pass().0)
    }

    /// [`Learner::idle`] with a frozen network.
    pub fn idle_with(&mut self, queue: &mut D::Queue, other: &Frozen<D>) -> Result<(), DeviceError> {
        self.passed.forward += 1;
        idle_forward(queue, self.weights_of(other).0)
    }

    /// Logits of rows with the newest weights, or with another network of the same model.
    pub fn logits_with(
        &mut self,
        queue: &mut D::Queue,
        net: Option<&Network<D>>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        if let Some(net) = net {
            return at_work(&mut self.tape).logits(queue, net, batch, rows);
        }
        self.passed.forward += 1;
        let (weights, tape, _) = self.weights_of_pass();
        tape.logits(queue, weights, batch, rows)
    }
}
