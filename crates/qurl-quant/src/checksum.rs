//! One number for all weights of a model, wherever they live: see [`qurl_kernels::checksum`].

use qurl_kernels::checksum::{SEED, mix, values};
use qurl_kernels::{Backend, BackendError};
use qurl_model::Params;

/// Checksum of parameters on a backend; the same number on every one.
pub fn params<B: Backend>(backend: &B, weights: &Params<B::Tensor>) -> Result<u64, BackendError> {
    weights.iter().try_fold(SEED, |sum, leaf| Ok(mix(sum, backend.checksum(leaf)?)))
}

/// The same of parameters on the host.
pub fn host_params(weights: &Params<Vec<f32>>) -> u64 {
    weights.iter().fold(SEED, |sum, leaf| mix(sum, values(leaf)))
}
