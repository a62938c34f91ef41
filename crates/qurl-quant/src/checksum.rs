//! One number for all weights of a model, wherever they live: see [`qurl_kernels::checksum`].

use qurl_kernels::checksum::{SEED, mix, values};
use qurl_kernels::queue::Tensor;
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::compute::{Base, BaseLeaves, Leaves};
use qurl_model::hf::OpenModel;
use qurl_model::{HfError, Params};

/// Checksum of parameters on a device; the same number on every one.
pub fn params<Q: Queue>(queue: &mut Q, weights: &Params<Tensor<Q>>) -> Result<u64, DeviceError> {
    weights.iter().try_fold(SEED, |sum, leaf| Ok(mix(sum, queue.checksum(leaf)?)))
}

/// The same of parameters on the host.
pub fn host_params(weights: &Params<Vec<f32>>) -> u64 {
    weights.iter().fold(SEED, |sum, leaf| mix(sum, values(leaf)))
}

/// The same of the weights of files, of which one leaf is in memory at a time.
pub fn files(model: &OpenModel) -> Result<u64, HfError> {
    (0..model.leaves()).try_fold(SEED, |sum, index| Ok(mix(sum, values(&model.leaf(index)?))))
}

/// Leaves whose checksums are noted as they pass: weights that are packed leaf by leaf need not be read once
/// more to know which they are.
pub struct Summed<'a, D: Device> {
    leaves: BaseLeaves<'a, D>,
    sums: Vec<Option<u64>>,
}

impl<'a, D: Device> Summed<'a, D> {
    /// The leaves of a base.
    pub fn new(base: Base<'a>) -> Self {
        Summed { sums: vec![None; base.leaves()], leaves: BaseLeaves::new(base) }
    }

    /// The checksum of all; leaves that nobody has asked for are read now.
    pub fn total(mut self, queue: &mut D::Queue) -> Result<u64, DeviceError> {
        let mut total = SEED;
        for index in 0..self.sums.len() {
            if self.sums[index].is_none() {
                self.leaf(queue, index)?;
            }
            total = self.sums[index].map_or(total, |sum| mix(total, sum));
        }
        Ok(total)
    }
}

impl<D: Device> Leaves<D> for Summed<'_, D> {
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        let leaf = self.leaves.leaf(queue, index)?;
        if self.sums[index].is_none() {
            self.sums[index] = Some(queue.checksum(leaf)?);
        }
        Ok(leaf)
    }
}
