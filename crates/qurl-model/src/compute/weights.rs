//! What a pass reads and writes that need not be whole in one place: the weights of its blocks, and the
//! gradients of the model.
//!
//! A [`Network`] has all its blocks, and [`Params`] all gradients. Where a model is divided among ranks,
//! blocks are gathered one at a time and gradients leave as soon as they are complete; passes see only the
//! two traits below, and compute the same either way.

use super::network::{Block, Network};
use crate::params::{LayerAdapters, LayerParams, Params};
use qurl_kernels::{Device, DeviceError};

/// The weights of a pass. A forward pass loads every block from the first to the last, a backward pass from
/// the last, which is there, to the first; both prefetch a block while the one before it computes.
pub trait Weights<D: Device> {
    /// Everything but the blocks.
    fn network(&self) -> &Network<D>;
    /// Begins to bring a block, beside what computes.
    fn prefetch(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError>;
    /// Makes a block ready to compute: the one that was prefetched, or the one that is there.
    fn load(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError>;
    /// The block that was loaded.
    fn block(&self, index: usize) -> &Block<D>;
}

impl<D: Device> Weights<D> for &Network<D> {
    fn network(&self) -> &Network<D> {
        self
    }

    fn prefetch(&mut self, _queue: &mut D::Queue, _index: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn load(&mut self, _queue: &mut D::Queue, _index: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn block(&self, index: usize) -> &Block<D> {
        Network::block(self, index)
    }
}

impl<D: Device, W: Weights<D>> Weights<D> for &mut W {
    fn network(&self) -> &Network<D> {
        W::network(self)
    }

    fn prefetch(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError> {
        W::prefetch(self, queue, index)
    }

    fn load(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError> {
        W::load(self, queue, index)
    }

    fn block(&self, index: usize) -> &Block<D> {
        W::block(self, index)
    }
}

/// Loads the next block of a forward pass and begins to bring the one after it.
pub(super) fn next_forward<D: Device>(
    queue: &mut D::Queue,
    weights: &mut impl Weights<D>,
    index: usize,
) -> Result<(), DeviceError> {
    if index == 0 {
        weights.prefetch(queue, 0)?;
    }
    weights.load(queue, index)?;
    match index + 1 < weights.network().config().num_layers {
        true => weights.prefetch(queue, index + 1),
        false => Ok(()),
    }
}

/// Loads the next block of a backward pass and begins to bring the one before it. In between, the part that
/// is complete may leave: then nothing that is waited for now was begun after it.
pub(super) fn next_backward<D: Device>(
    queue: &mut D::Queue,
    weights: &mut impl Weights<D>,
    grads: &mut impl GradientSink<D>,
    index: usize,
) -> Result<(), DeviceError> {
    weights.load(queue, index)?;
    let last = index + 1 == weights.network().config().num_layers;
    grads.complete(queue, if last { Part::Head } else { Part::Block(index + 1) })?;
    match index {
        0 => Ok(()),
        index => weights.prefetch(queue, index - 1),
    }
}

/// The exchanges of a forward pass without rows, for a rank that has nothing to compute while others do.
pub fn idle_forward<D: Device>(
    queue: &mut D::Queue,
    mut weights: impl Weights<D>,
) -> Result<(), DeviceError> {
    (0..weights.network().config().num_layers).try_for_each(|index| next_forward(queue, &mut weights, index))
}

/// [`idle_forward`] and the exchanges of the backward pass after it.
pub fn idle_training<D: Device>(
    queue: &mut D::Queue,
    mut weights: impl Weights<D>,
    grads: &mut impl GradientSink<D>,
) -> Result<(), DeviceError> {
    let layers = weights.network().config().num_layers;
    (0..layers).try_for_each(|index| next_forward(queue, &mut weights, index))?;
    (0..layers).rev().try_for_each(|index| next_backward(queue, &mut weights, grads, index))?;
    grads.complete(queue, Part::Block(0))?;
    grads.complete(queue, Part::Rest)
}

/// Gradients that a backward pass completes, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The output head, where it is not the embedding.
    Head,
    /// A block, from the last to the first.
    Block(usize),
    /// All the rest: the embedding, the last norm, the value head.
    Rest,
}

/// Gradients of a block and of its adapters.
pub type BlockGradients<'a, D> =
    (&'a mut LayerParams<<D as Device>::Tensor>, Option<&'a mut LayerAdapters<<D as Device>::Tensor>>);

/// Where a backward pass adds the gradients of a model.
pub trait GradientSink<D: Device> {
    /// [V, d]: the output head, or the embedding where that is the head.
    fn head(&mut self) -> &mut D::Tensor;
    /// [1, d]: the value head of a critic.
    fn value_head(&mut self) -> Option<&mut D::Tensor>;
    /// [d]: the norm before the head.
    fn final_norm(&mut self) -> &mut D::Tensor;
    /// A block, and its adapters where it has some.
    fn block(&mut self, index: usize) -> BlockGradients<'_, D>;
    /// [V, d]: the embedding.
    fn embed(&mut self) -> &mut D::Tensor;
    /// This pass adds nothing more to a part.
    fn complete(&mut self, queue: &mut D::Queue, part: Part) -> Result<(), DeviceError>;
}

impl<D: Device> GradientSink<D> for Params<D::Tensor> {
    fn head(&mut self) -> &mut D::Tensor {
        self.head.as_mut().unwrap_or(&mut self.embed)
    }

    fn value_head(&mut self) -> Option<&mut D::Tensor> {
        self.value_head.as_mut()
    }

    fn final_norm(&mut self) -> &mut D::Tensor {
        &mut self.final_norm
    }

    fn block(&mut self, index: usize) -> BlockGradients<'_, D> {
        (&mut self.layers[index], self.adapters.get_mut(index))
    }

    fn embed(&mut self) -> &mut D::Tensor {
        &mut self.embed
    }

    fn complete(&mut self, _queue: &mut D::Queue, _part: Part) -> Result<(), DeviceError> {
        Ok(())
    }
}
