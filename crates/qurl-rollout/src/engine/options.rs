//! The size of an engine, and the pages that follow from it.

use crate::error::RolloutError;
use crate::pages::PagePool;
use crate::scheduler::{Limits, Scheduler};
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::Network;
use qurl_model::compute::infer::page_store;

/// Size of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Memory for keys and values of all layers, in bytes.
    pub kv_bytes: usize,
    /// Tokens of a page, a multiple of 16.
    pub page_size: usize,
    /// Most sequences that are computed at the same time.
    pub max_num_seqs: usize,
    /// Most tokens of a step; longer prompts are computed in chunks.
    pub max_num_batched_tokens: usize,
    /// Whether requests that begin alike share the pages of what they have in common; it changes no bit of
    /// any sample.
    pub share_prefixes: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            kv_bytes: 1 << 30,
            page_size: 16,
            max_num_seqs: 256,
            max_num_batched_tokens: 1024,
            share_prefixes: false,
        }
    }
}

impl EngineOptions {
    /// What suits a device: a GPU reads keys and values faster in longer pages, and needs more rows at once
    /// for its GEMMs.
    pub fn of_device<D: Device>(device: &D) -> EngineOptions {
        match device.info().asynchronous {
            true => EngineOptions { page_size: 64, max_num_batched_tokens: 8192, ..EngineOptions::default() },
            false => EngineOptions::default(),
        }
    }

    /// Bytes of a page in all layers, and how many pages the memory holds for a network.
    pub(super) fn pages<D: Device>(
        &self,
        device: &D,
        network: &Network<D>,
    ) -> Result<(usize, usize), RolloutError> {
        let (c, n) = (network.config(), network.options());
        let layer_bytes = device.kv_page_bytes(network.kv_shape(1, self.page_size));
        let page_bytes = layer_bytes * c.num_layers;
        // Slots are numbered with 32 bits, and no more pages are taken than all sequences can fill (twice,
        // for prompts that wait for their samples).
        let useful = self.max_num_seqs.saturating_mul(2 * n.positions.div_ceil(self.page_size));
        let numbered = u32::MAX as usize / self.page_size - 1;
        match (self.kv_bytes / page_bytes.max(1)).min(numbered).min(useful) {
            0 => Err(RolloutError::OutOfRange {
                key: "kv_bytes",
                found: self.kv_bytes.to_string(),
                expected: format!("at least the {page_bytes} bytes of one page"),
            }),
            pages => Ok((page_bytes, pages)),
        }
    }

    /// Memory of the pages, and of one more for the rows that pad a step.
    pub(super) fn page_store<D: Device>(
        &self,
        device: &D,
        network: &Network<D>,
        pages: usize,
    ) -> Result<Vec<D::Kv>, DeviceError> {
        page_store(device, network, pages + 1, self.page_size)
    }

    pub(super) fn scheduler(&self, pages: usize) -> Scheduler {
        let &EngineOptions { page_size, max_num_seqs, max_num_batched_tokens, .. } = self;
        let limits = Limits { max_num_seqs, max_num_batched_tokens };
        let mut scheduler = Scheduler::new(limits, PagePool::new(pages, page_size));
        if self.share_prefixes {
            scheduler.share_prefixes();
        }
        scheduler
    }
}
