//! Other networks of a learner's weights: the one that samples, a reference, what an evaluation is lent.

use super::Learner;
use crate::divided::Frozen;
use qurl_kernels::{Device, DeviceError, Queue, Rounding};
use qurl_model::compute::{Network, NetworkOptions};

impl<D: Device> Learner<D> {
    /// The network, which may be waiting for its newest weights ([`Learner::catch_up`]); without blocks where
    /// they are divided among the ranks.
    pub fn network(&self) -> &Network<D> {
        &self.net
    }

    /// A whole network of the newest weights, to be lent to an engine
    /// ([`Engine::with_network`](qurl_rollout::Engine::with_network)): its own, or one packed into `memory`
    /// where blocks are divided. All ranks call it.
    pub fn whole_network<'a>(
        &'a mut self,
        queue: &mut D::Queue,
        memory: &'a mut Option<Network<D>>,
    ) -> Result<&'a mut Network<D>, DeviceError> {
        self.catch_up(queue)?;
        match self.slot {
            None => Ok(&mut self.net),
            Some(_) => {
                let options = NetworkOptions { trained: false, ..*self.net.options() };
                Ok(memory.insert(self.packed(queue, options)?))
            }
        }
    }

    /// Another network of the same weights; where there are adapters, of the same base in the same memory,
    /// without them unless the options have them.
    pub fn sharing(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Network<D>, DeviceError> {
        self.catch_up(queue)?;
        let mut network = self.net.sharing(queue, options)?;
        if options.lora.is_some() {
            network.refresh_leaves(queue, &mut self.master, Rounding::Nearest)?;
        }
        Ok(network)
    }

    /// Another network of the same weights, packed anew.
    pub fn packed(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Network<D>, DeviceError> {
        let value_head = self.master.lengths().value_head.is_some();
        Network::of_leaves(queue, &self.net.config().clone(), value_head, &mut self.master, options)
    }

    /// Another network of the same weights, to be scored with ([`Learner::score_with`]): divided as the own
    /// one is.
    pub fn frozen(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Frozen<D>, DeviceError> {
        if self.slot.is_none() {
            return Ok(Frozen { net: self.packed(queue, options)?, pieces: Vec::new() });
        }
        let (config, master) = (self.net.config().clone(), &mut self.master);
        let value_head = master.lengths().value_head.is_some();
        let net = Network::without_blocks(queue, &config, value_head, master, options)?;
        let device = queue.device().clone();
        let pieces = master.pieces.layers.iter().map(|layer| {
            layer.as_ref().try_map(&mut |piece| {
                let mut copy = device.zeros(D::len(piece))?;
                queue.copy(piece, &mut copy, D::len(piece));
                Ok(copy)
            })
        });
        let pieces = pieces.collect::<Result<_, DeviceError>>()?;
        Ok(Frozen { net, pieces })
    }

    /// Lets such a network have the newest weights.
    pub fn refreeze(&mut self, queue: &mut D::Queue, frozen: &mut Frozen<D>) -> Result<(), DeviceError> {
        for (from, to) in self.master.pieces.layers.iter().zip(&mut frozen.pieces) {
            for (from, to) in from.as_ref().into_leaves().into_iter().zip(to.as_mut().into_leaves()) {
                queue.copy(from, to, D::len(from));
            }
        }
        frozen.net.refresh_leaves(queue, &mut self.master, Rounding::Nearest)
    }
}
