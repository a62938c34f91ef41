//! The master weights of a model that is trained, in f32: this rank's pieces of them.
//!
//! One rank has them whole. Of several ranks each has the pieces that it updates ([`Ranks::cuts`]), and whole
//! leaves exist where one is packed or read: the ranks gather it into memory that leaves share
//! ([`crate::gather`]). All ranks ask for the same leaves in the same order.

use crate::gather::Gather;
use crate::ranks::Ranks;
use qurl_kernels::checksum::{SEED, mix};
use qurl_kernels::{Device, DeviceError, Format, Queue};
use qurl_model::compute::Leaves;
use qurl_model::{ParamInfo, Params};

/// Master weights.
pub struct Master<D: Device> {
    /// Numbers of each whole leaf.
    lengths: Params<usize>,
    /// What this rank has of them.
    pub(crate) pieces: Params<D::Tensor>,
    ranks: Ranks,
    pub(crate) gather: Gather<D>,
}

impl<D: Device> Master<D> {
    /// Takes over this rank's pieces of weights of a model that computes in this format, or zeros.
    pub fn new(
        queue: &mut D::Queue,
        shapes: &Params<ParamInfo>,
        compute: Format,
        weights: Option<Params<&Vec<f32>>>,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let device = queue.device().clone();
        let lengths = shapes.as_ref().map(ParamInfo::len);
        let pieces = match weights {
            Some(weights) => weights.try_map(|leaf| queue.upload(&leaf[ranks.piece(leaf.len())]))?,
            None => lengths.clone().try_map(|len| device.zeros(ranks.piece(len).len()))?,
        };
        let gather = Gather::new(&*device, shapes, compute, ranks)?;
        Ok(Master { lengths, pieces, ranks: ranks.clone(), gather })
    }

    /// Numbers of each whole leaf.
    pub fn lengths(&self) -> &Params<usize> {
        &self.lengths
    }

    /// Numbers of each whole leaf, and this rank's pieces, which are about to change.
    pub(crate) fn parts_mut(&mut self) -> (&Params<usize>, &mut Params<D::Tensor>) {
        self.gather.forget();
        (&self.lengths, &mut self.pieces)
    }

    /// All weights, on the host of every rank.
    pub fn read(&mut self, queue: &mut D::Queue) -> Result<Params<Vec<f32>>, DeviceError> {
        let mut next = 0..;
        self.lengths.clone().try_map(|len| {
            let leaf = self.leaf(queue, next.next().unwrap_or_default())?;
            queue.read(leaf, len)
        })
    }

    /// Takes over weights of the same layout.
    pub fn write(&mut self, queue: &mut D::Queue, weights: &Params<Vec<f32>>) {
        self.gather.forget();
        for (to, from) in self.pieces.iter_mut().zip(weights.iter()) {
            queue.write(to, &from[self.ranks.piece(from.len())]);
        }
    }

    /// A number that tells these weights from others, the same at every rank; other numbers of ranks have
    /// another one.
    pub fn checksum(&self, queue: &mut D::Queue) -> Result<u64, DeviceError> {
        let own: Vec<u64> =
            self.pieces.iter().map(|piece| queue.checksum(piece)).collect::<Result<_, DeviceError>>()?;
        Ok(self.ranks.join(own)?.into_iter().fold(SEED, mix))
    }
}

impl<D: Device> Leaves<D> for Master<D> {
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        self.leaf_for(queue, index, Format::F32)
    }

    fn leaf_for(
        &mut self,
        queue: &mut D::Queue,
        index: usize,
        format: Format,
    ) -> Result<&D::Tensor, DeviceError> {
        self.gather.leaf(queue, &self.lengths, index, &self.pieces, format)
    }
}
