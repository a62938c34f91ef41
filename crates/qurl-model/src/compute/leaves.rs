//! Where the weights of a network come from, leaf by leaf: never need all of them be on the device in full,
//! nor, from files, on the host.

use super::network::random_leaf;
use crate::config::ModelConfig;
use crate::hf::OpenModel;
use crate::params::{Params, shapes};
use qurl_kernels::{Device, DeviceError, Format, Queue};
use std::collections::BTreeMap;

/// Master weights, leaf by leaf: never need all of them be in one place.
pub trait Leaves<D: Device> {
    /// A whole leaf, by its number in the order of [`Params`].
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError>;

    /// A leaf of a block that is packed in this format, to the nearest value: a matrix may have been rounded
    /// to the format before. All leaves of a block are asked for in order and with one format.
    fn leaf_for(
        &mut self,
        queue: &mut D::Queue,
        index: usize,
        _format: Format,
    ) -> Result<&D::Tensor, DeviceError> {
        self.leaf(queue, index)
    }
}

impl<D: Device> Leaves<D> for &Params<D::Tensor> {
    fn leaf(&mut self, _queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        Ok(self.iter().nth(index).unwrap_or_else(|| panic!("weights of another model: no leaf {index}")))
    }
}

/// The weights of a model that is not trained.
#[derive(Clone, Copy)]
pub enum Base<'a> {
    /// On the host.
    Host(&'a Params<Vec<f32>>),
    /// In files.
    Files(&'a OpenModel),
    /// Made on the device, as [`random_leaf`] makes them with this seed: for benchmarks.
    Random(&'a ModelConfig, u64),
    /// Zeros of these lengths, in the order of [`Params`]: for plans.
    Zeros(&'a [usize]),
}

impl Base<'_> {
    /// How many leaves there are.
    pub fn leaves(&self) -> usize {
        match self {
            Base::Host(params) => params.iter().len(),
            Base::Files(model) => model.leaves(),
            Base::Random(config, _) => shapes(config, false).iter().len(),
            Base::Zeros(lengths) => lengths.len(),
        }
    }
}

/// A [`Base`] on its way to the device, where one leaf is at a time.
pub struct BaseLeaves<'a, D: Device> {
    base: Base<'a>,
    leaf: Option<(usize, D::Tensor)>,
    /// Checksums of the leaves that were there, where they are wanted.
    sums: Option<BTreeMap<usize, u64>>,
}

impl<'a, D: Device> BaseLeaves<'a, D> {
    /// The leaves of a base.
    pub fn new(base: Base<'a>) -> Self {
        BaseLeaves { base, leaf: None, sums: None }
    }

    /// The same, whose leaves are checksummed while they are on the device anyway.
    pub fn summed(base: Base<'a>) -> Self {
        BaseLeaves { sums: Some(BTreeMap::new()), ..BaseLeaves::new(base) }
    }

    /// The checksums of the leaves that were there, in their order.
    pub fn into_sums(self) -> Vec<u64> {
        self.sums.into_iter().flat_map(BTreeMap::into_values).collect()
    }
}

impl<D: Device> Leaves<D> for BaseLeaves<'_, D> {
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        if self.leaf.as_ref().is_none_or(|(at, _)| *at != index) {
            self.leaf = None; // before the next one is there
            let missing = || panic!("weights of another model: no leaf {index}");
            let leaf = match self.base {
                Base::Host(params) => queue.upload(params.iter().nth(index).unwrap_or_else(missing))?,
                Base::Files(model) => {
                    let values = model.leaf(index).map_err(|error| DeviceError::Source(error.to_string()))?;
                    queue.upload(&values)?
                }
                Base::Random(config, seed) => {
                    let info = shapes(config, false).into_iter().nth(index);
                    random_leaf::<D>(queue, config, &info.unwrap_or_else(|| panic!("no leaf {index}")), seed)?
                }
                Base::Zeros(lengths) => {
                    queue.device().zeros(*lengths.get(index).unwrap_or_else(|| panic!("no leaf {index}")))?
                }
            };
            if let Some(sums) = &mut self.sums {
                sums.insert(index, queue.checksum(&leaf)?);
            }
            self.leaf = Some((index, leaf));
        }
        match &self.leaf {
            Some((_, leaf)) => Ok(leaf),
            None => unreachable!("read above"),
        }
    }
}
