//! Weights change only between requests: an engine takes over new ones, lends its memory to another network,
//! and gives the memory of its pages back while it does not sample.

use super::{ENGINES, Engine};
use crate::error::RolloutError;
use crate::request::{RequestId, WeightVersion};
use qurl_kernels::{Device, DeviceError};
use qurl_model::Params;
use qurl_model::compute::Network;
use std::sync::atomic::Ordering;

impl<D: Device> Engine<D> {
    /// Takes over changed parameters. Refused while requests are in flight.
    pub fn load(
        &mut self,
        queue: &mut D::Queue,
        params: &Params<D::Tensor>,
        weights: WeightVersion,
    ) -> Result<(), RolloutError> {
        self.load_with(weights, |network| network.refresh(queue, params))
    }

    /// Lets `change` write new weights into the network. Refused while requests are in flight; if it fails,
    /// the engine refuses requests until another load succeeds.
    pub fn load_with(
        &mut self,
        weights: WeightVersion,
        change: impl FnOnce(&mut Network<D>) -> Result<(), DeviceError>,
    ) -> Result<(), RolloutError> {
        if self.unfinished() > 0 {
            return Err(RolloutError::Busy { unfinished: self.unfinished() });
        }
        self.weights = None;
        self.scheduler.forget_prefixes();
        change(&mut self.network)?;
        self.weights = Some(weights);
        Ok(())
    }

    /// Lets `work` use the engine, its memory included, with another network of the same model. Requests that
    /// `work` leaves in flight are dropped. Refused while requests are in flight.
    ///
    /// # Panics
    /// If the network is of another model.
    pub fn with_network<T>(
        &mut self,
        network: &mut Network<D>,
        weights: WeightVersion,
        work: impl FnOnce(&mut Engine<D>) -> T,
    ) -> Result<T, RolloutError> {
        let own = self.weights;
        self.swap_network(network, Some(weights))?;
        let result = work(self);
        let left: Vec<RequestId> =
            self.pending.keys().copied().chain(self.failed.iter().map(|(id, _)| *id)).collect();
        left.into_iter().for_each(|id| self.cancel(id));
        self.swap_network(network, own)?;
        Ok(result)
    }

    /// Gives the memory of the pages back, until [`Engine::wake`]. Refused while requests are in flight.
    pub fn sleep(&mut self) -> Result<(), RolloutError> {
        if self.unfinished() > 0 {
            return Err(RolloutError::Busy { unfinished: self.unfinished() });
        }
        self.scheduler.forget_prefixes();
        self.kv = Vec::new();
        Ok(())
    }

    /// Takes the memory of the pages again; nothing where the engine does not sleep.
    pub fn wake(&mut self) -> Result<(), RolloutError> {
        if self.kv.is_empty() {
            let (_, pages) = self.options.pages(&*self.device, &self.network)?;
            self.kv = self.options.page_store(&*self.device, &self.network, pages)?;
            // Recorded steps know the old addresses.
            self.identity = ENGINES.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn swap_network(
        &mut self,
        other: &mut Network<D>,
        weights: Option<WeightVersion>,
    ) -> Result<(), RolloutError> {
        if self.unfinished() > 0 {
            return Err(RolloutError::Busy { unfinished: self.unfinished() });
        }
        let (old, new) = (*self.network.options(), *other.options());
        assert!(
            self.network.config() == other.config() && old.positions == new.positions,
            "a network of another model"
        );
        self.weights = None;
        self.scheduler.forget_prefixes();
        std::mem::swap(&mut self.network, other);
        if old.kv_format != new.kv_format {
            // The same bytes as pages of another format. The old ones go first, so that both are never there
            // at once.
            let (page_bytes, pages) = self.options.pages(&*self.device, &self.network)?;
            self.kv.clear();
            self.kv = self.options.page_store(&*self.device, &self.network, pages)?;
            self.page_bytes = page_bytes;
            self.scheduler = self.options.scheduler(pages);
            // Recorded steps know the old addresses.
            self.identity = ENGINES.fetch_add(1, Ordering::Relaxed);
        }
        self.weights = weights;
        Ok(())
    }
}
