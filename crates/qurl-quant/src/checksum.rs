//! One number for all weights of a model, wherever they live: see [`qurl_kernels::checksum`].

use qurl_kernels::checksum::{SEED, mix, values};
use qurl_kernels::queue::Tensor;
use qurl_kernels::{DeviceError, Queue};
use qurl_model::Params;

/// Checksum of parameters on a device; the same number on every one.
pub fn params<Q: Queue>(queue: &mut Q, weights: &Params<Tensor<Q>>) -> Result<u64, DeviceError> {
    weights.iter().try_fold(SEED, |sum, leaf| Ok(mix(sum, queue.checksum(leaf)?)))
}

/// The same of parameters on the host.
pub fn host_params(weights: &Params<Vec<f32>>) -> u64 {
    weights.iter().fold(SEED, |sum, leaf| mix(sum, values(leaf)))
}
