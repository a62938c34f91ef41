//! Gradients of the shards of a mini-batch, added up in a fixed binary tree.
//!
//! Either each rank has gradients of the whole model, adds up those of its shards, which are neighbours, and
//! sends the sum ([`whole`]: ZeRO-1). Or it has those of few blocks: the gradients of a shard leave block by
//! block while its backward pass runs, and each rank adds up its pieces of everyone's ([`divided`]: ZeRO-3).
//! Then the ranks compute neighbouring shards at the same time, so that what arrives together is a subtree.
//! The tree is the same, and so is every bit.
//!
//! The tree is walked as a binary counter: after every shard (or every round of one shard of each rank), sums
//! of equally many are added.

mod divided;
mod parts;
mod whole;

use crate::ranks::Ranks;
use divided::Divided;
use qurl_kernels::{Device, DeviceError};
use qurl_model::Params;
use qurl_model::compute::{BlockGradients, GradientSink, Part};
use whole::Whole;

/// Gradients of a model on one rank.
pub(crate) enum Gradients<D: Device> {
    Whole(Whole<D>),
    Divided(Divided<D>),
}

/// The sum of all shards.
pub(crate) struct Sum<'a, D: Device> {
    /// Of whole leaves, of which this rank's pieces are summed up; or these pieces.
    pub leaves: &'a Params<D::Tensor>,
    /// Whether they are pieces.
    pub pieces: bool,
}

impl<D: Device> Gradients<D> {
    /// Zeros.
    pub fn new(device: &D, lengths: &Params<usize>, ranks: &Ranks) -> Result<Self, DeviceError> {
        Ok(match ranks.divides_weights() {
            true => Gradients::Divided(Divided::new(device, lengths, ranks)?),
            false => Gradients::Whole(Whole::new(device, lengths, ranks)?),
        })
    }

    /// The next shard begins, which takes so many passes at the rank that has the most.
    pub fn begin_shard(&mut self, device: &D, passes: usize) -> Result<(), DeviceError> {
        match self {
            Gradients::Divided(divided) if passes > 1 => divided.keep_all(device),
            Gradients::Divided(_) | Gradients::Whole(_) => Ok(()),
        }
    }

    /// The next pass is the last one of the shard: what it completes may leave.
    pub fn begin_last_pass(&mut self) {
        match self {
            Gradients::Whole(whole) => whole.leaving = true,
            Gradients::Divided(divided) => divided.leaving = true,
        }
    }

    /// The shard at hand is complete.
    pub fn end_shard(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        match self {
            Gradients::Whole(whole) => whole.end_shard(queue),
            Gradients::Divided(divided) => divided.end_shard(queue),
        }
    }

    /// Ends the mini-batch. Shards that were not computed are zero, where gradients are whole.
    pub fn end(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        match self {
            Gradients::Whole(whole) => whole.end(queue),
            Gradients::Divided(divided) => {
                divided.end();
                Ok(())
            }
        }
    }

    /// The sum of all shards, after [`Gradients::end`].
    pub fn sum(&self) -> Sum<'_, D> {
        match self {
            Gradients::Whole(whole) => Sum { leaves: whole.sum(), pieces: false },
            Gradients::Divided(divided) => Sum { leaves: divided.sum(), pieces: true },
        }
    }

    /// The sum was used up.
    pub fn clear(&mut self, queue: &mut D::Queue) {
        match self {
            Gradients::Whole(whole) => whole.clear(queue),
            // Sums of pieces are overwritten.
            Gradients::Divided(_) => {}
        }
    }
}

impl<D: Device> GradientSink<D> for Gradients<D> {
    fn head(&mut self) -> &mut D::Tensor {
        match self {
            Gradients::Whole(whole) => GradientSink::<D>::head(whole.shard()),
            Gradients::Divided(divided) => divided.head(),
        }
    }

    fn value_head(&mut self) -> Option<&mut D::Tensor> {
        match self {
            Gradients::Whole(whole) => whole.shard().value_head.as_mut(),
            Gradients::Divided(divided) => divided.value_head.as_mut(),
        }
    }

    fn final_norm(&mut self) -> &mut D::Tensor {
        match self {
            Gradients::Whole(whole) => &mut whole.shard().final_norm,
            Gradients::Divided(divided) => &mut divided.final_norm,
        }
    }

    fn block(&mut self, index: usize) -> BlockGradients<'_, D> {
        match self {
            Gradients::Whole(whole) => GradientSink::<D>::block(whole.shard(), index),
            Gradients::Divided(divided) => (divided.block(index), None),
        }
    }

    fn embed(&mut self) -> &mut D::Tensor {
        match self {
            Gradients::Whole(whole) => &mut whole.shard().embed,
            Gradients::Divided(divided) => &mut divided.table,
        }
    }

    fn complete(&mut self, queue: &mut D::Queue, part: Part) -> Result<(), DeviceError> {
        match self {
            Gradients::Whole(whole) => whole.complete(queue, part),
            Gradients::Divided(divided) => divided.complete(queue, part),
        }
    }
}
