//! Weights that are divided among the ranks (ZeRO-3): a pass gathers each block before it computes, while the
//! block before it computes.
//!
//! What is gathered are the master weights, and each rank packs the block from them, so the packed weights
//! have the bits of a whole network's. There is memory for one packed block, beside that of the [`Gather`].
//! Embedding, last norm and head stay whole.

use crate::gather::Gather;
use qurl_kernels::{Device, DeviceError, Queue};
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
        }
    }

    fn prefetch(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError> {
        let PassWeights::Divided { pieces, slot, gather, .. } = self else { return Ok(()) };
        gather.begin_layer(queue, &pieces[index])?;
        slot.in_flight = Some(index);
        Ok(())
    }

    fn load(&mut self, queue: &mut D::Queue, index: usize) -> Result<(), DeviceError> {
        let PassWeights::Divided { net, slot, gather, .. } = self else { return Ok(()) };
        if slot.in_flight.take() == Some(index) {
            queue.join_exchanges()?;
            slot.block.refresh(queue, net.config(), index, gather.layer())?;
            slot.holds = Some(index);
        }
        assert_eq!(slot.holds, Some(index), "a block that was not prefetched");
        Ok(())
    }

    fn block(&self, index: usize) -> &Block<D> {
        match self {
            PassWeights::Whole(net) => net.block(index),
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
