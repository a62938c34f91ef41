//! Weights that come while a pass needs them: it gathers each block before it computes, while the block
//! before it computes.
//!
//! What is gathered are the master weights, and each rank packs the block from them, so the packed weights
//! have the bits of a whole network's. Where weights are divided among the ranks (ZeRO-3), every pass gathers
//! all blocks, and there is memory for one packed block, beside that of the [`Gather`]; embedding, last norm
//! and head stay whole. Where the network is whole (ZeRO-1), the first forward pass after an update takes the
//! blocks over.

use crate::gather::Gather;
use qurl_kernels::{Device, DeviceError};
use qurl_model::LayerParams;
use qurl_model::compute::{Block, Network, Weights};

/// Memory for one packed block.
pub(crate) struct Slot<D: Device> {
    block: Block<D>,
    /// Which one is there.
    holds: Option<usize>,
    /// Which one is being gathered.
    in_flight: Option<usize>,
}

impl<D: Device> Slot<D> {
    /// Memory for a block of this network.
    pub fn new(device: &D, net: &Network<D>) -> Result<Self, DeviceError> {
        Ok(Slot { block: Block::empty(device, net.config(), net.options())?, holds: None, in_flight: None })
    }
}

/// The weights of a pass of a learner: of its own network, or of another one of the same model.
pub(crate) enum PassWeights<'a, D: Device> {
    /// All blocks are there.
    Whole(&'a Network<D>),
    /// All blocks have their place, and those from `fresh` on are still those of before the update.
    Behind {
        net: &'a mut Network<D>,
        /// This rank's pieces of the blocks.
        pieces: &'a [LayerParams<D::Tensor>],
        gather: &'a mut Gather<D>,
        fresh: &'a mut usize,
    },
    /// They come one at a time.
    Divided {
        /// All but the blocks.
        net: &'a Network<D>,
        /// This rank's pieces of the blocks.
        pieces: &'a [LayerParams<D::Tensor>],
        slot: &'a mut Slot<D>,
        gather: &'a mut Gather<D>,
    },
}

impl<'a, D: Device> PassWeights<'a, D> {
    /// Of a network without blocks where there is a slot for them.
    pub fn of(
        net: &'a Network<D>,
        pieces: &'a [LayerParams<D::Tensor>],
        slot: Option<&'a mut Slot<D>>,
        gather: &'a mut Gather<D>,
    ) -> Self {
        match slot {
            Some(slot) => PassWeights::Divided { net, pieces, slot, gather },
            None => PassWeights::Whole(net),
        }
    }
}

impl<D: Device> Weights<D> for PassWeights<'_, D> {
    fn network(&self) -> &Network<D> {
        match self {
            PassWeights::Whole(net) | PassWeights::Divided { net, .. } => net,
            PassWeights::Behind { net, .. } => net,
        }
    }

    fn prefetch(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError> {
        match self {
            PassWeights::Behind { pieces, gather, fresh, .. } if index >= **fresh => {
                gather.begin_layer(queue, &pieces[index], gather.own_travel())
            }
            PassWeights::Whole(_) | PassWeights::Behind { .. } => Ok(()),
            PassWeights::Divided { pieces, slot, gather, .. } => {
                gather.begin_layer(queue, &pieces[index], gather.own_travel())?;
                slot.in_flight = Some(index);
                Ok(())
            }
        }
    }

    fn load(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError> {
        match self {
            PassWeights::Behind { net, gather, fresh, .. } if index >= **fresh => {
                assert_eq!(index, **fresh, "a block that was not prefetched");
                gather.arrive(queue)?;
                net.refresh_block(queue, index, gather.layer())?;
                **fresh += 1;
            }
            PassWeights::Whole(_) | PassWeights::Behind { .. } => {}
            PassWeights::Divided { net, slot, gather, .. } => {
                if slot.in_flight.take() == Some(index) {
                    gather.arrive(queue)?;
                    slot.block.refresh(queue, net.config(), index, gather.layer())?;
                    slot.holds = Some(index);
                }
                assert_eq!(slot.holds, Some(index), "a block that was not prefetched");
            }
        }
        Ok(())
    }

    fn block(&self, index: usize) -> &Block<D> {
        match self {
            PassWeights::Whole(net) => net.block(index),
            PassWeights::Behind { net, .. } => net.block(index),
            PassWeights::Divided { slot, .. } => &slot.block,
        }
    }
}

/// A network that is scored and never trained, divided as a learner's own is.
pub struct Frozen<D: Device> {
    /// Without blocks where they are divided.
    pub(crate) net: Network<D>,
    /// This rank's pieces of its blocks, where they are divided.
    pub(crate) pieces: Vec<LayerParams<D::Tensor>>,
}

impl<D: Device> Frozen<D> {
    /// A network that has its blocks.
    pub fn whole(net: Network<D>) -> Frozen<D> {
        Frozen { net, pieces: Vec::new() }
    }
}
