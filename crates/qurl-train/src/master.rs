//! The master weights of a model that is trained, in f32: this rank's pieces of them.
//!
//! One rank has them whole. Of several ranks each has the pieces that it updates ([`Ranks::cuts`]), and whole
//! leaves exist one at a time, where one is packed or read: the ranks gather it into a buffer that all leaves
//! of its length share. All ranks ask for the same leaves in the same order.

use crate::ranks::Ranks;
use qurl_kernels::checksum::{SEED, mix};
use qurl_kernels::ops::{AddPieces, AllGather};
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;
use qurl_model::compute::Leaves;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Master weights.
pub struct Master<D: Device> {
    /// Numbers of each whole leaf.
    lengths: Params<usize>,
    /// What this rank has of them.
    pub(crate) pieces: Params<D::Tensor>,
    ranks: Ranks,
    /// Whole leaves by their length, where there are other ranks.
    gathered: BTreeMap<usize, D::Tensor>,
}

impl<D: Device> Master<D> {
    /// Takes over this rank's pieces of weights, or zeros.
    pub fn new(
        queue: &mut D::Queue,
        lengths: Params<usize>,
        weights: Option<Params<&Vec<f32>>>,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let device = queue.device().clone();
        let pieces = match weights {
            Some(weights) => weights.try_map(|leaf| queue.upload(&leaf[ranks.piece(leaf.len())]))?,
            None => lengths.clone().try_map(|len| device.zeros(ranks.piece(len).len()))?,
        };
        let mut gathered = BTreeMap::new();
        for &len in lengths.iter().filter(|_| ranks.size() > 1) {
            if let Entry::Vacant(place) = gathered.entry(len) {
                place.insert(device.zeros(len)?);
            }
        }
        Ok(Master { lengths, pieces, ranks: ranks.clone(), gathered })
    }

    /// Numbers of each whole leaf.
    pub fn lengths(&self) -> &Params<usize> {
        &self.lengths
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
        let Some((piece, &len)) = self.pieces.iter().zip(self.lengths.iter()).nth(index) else {
            panic!("leaf {index} of {}", self.lengths.iter().len())
        };
        let Some(whole) = self.gathered.get_mut(&len) else { return Ok(piece) };
        let (own, cuts) = (self.ranks.piece(len), self.ranks.cuts(len));
        queue.add_pieces(AddPieces { pieces: piece, count: 1, len: own.len(), to: whole, at: own.start });
        queue.all_gather(AllGather { ranks: self.ranks.collective(), cuts: &cuts, tensor: whole })?;
        Ok(whole)
    }
}
