//! Whole leaves of weights of which each rank has a piece: where they are gathered.
//!
//! There is memory for one block, so that all of its leaves can be on their way while another block computes,
//! and for one leaf of each length beside the blocks.

use crate::ranks::Ranks;
use qurl_kernels::ops::{AddPieces, AllGather, Exchange};
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::{LayerParams, Params};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Memory for whole leaves.
pub(crate) struct Gather<D: Device> {
    ranks: Ranks,
    /// A block; none where there are no other ranks.
    layer: Option<LayerParams<D::Tensor>>,
    /// Other leaves, by their length.
    rest: BTreeMap<usize, D::Tensor>,
}

/// Where a leaf is, by its number in the order of [`Params`].
fn place(index: usize, layers: usize, of_layer: usize) -> Option<usize> {
    // The embedding comes first, then the blocks.
    let in_layers = (1..1 + layers * of_layer).contains(&index);
    in_layers.then(|| (index - 1) % of_layer)
}

impl<D: Device> Gather<D> {
    /// Takes the memory.
    pub fn new(device: &D, lengths: &Params<usize>, ranks: &Ranks) -> Result<Self, DeviceError> {
        let mut gather = Gather { ranks: ranks.clone(), layer: None, rest: BTreeMap::new() };
        if ranks.size() == 1 {
            return Ok(gather);
        }
        let zeros = &mut |len| device.zeros(len);
        gather.layer = lengths.layers.first().cloned().map(|layer| layer.try_map(zeros)).transpose()?;
        let tables = [Some(lengths.embed), Some(lengths.final_norm), lengths.head, lengths.value_head];
        let adapters = lengths.adapters.iter().flat_map(|adapters| adapters.as_ref().into_leaves());
        // Frozen leaves have no numbers.
        for len in tables.into_iter().flatten().chain(adapters.copied()).filter(|&len| len > 0) {
            if let Entry::Vacant(place) = gather.rest.entry(len) {
                place.insert(device.zeros(len)?);
            }
        }
        Ok(gather)
    }

    /// A whole leaf, of which this rank has `piece`.
    pub fn leaf<'a>(
        &'a mut self,
        queue: &mut D::Queue,
        lengths: &Params<usize>,
        index: usize,
        piece: &'a D::Tensor,
    ) -> Result<&'a D::Tensor, DeviceError> {
        let Some(layer) = &mut self.layer else { return Ok(piece) };
        let layer = layer.as_mut().into_leaves();
        let len = *lengths.iter().nth(index).unwrap_or_else(|| panic!("no leaf {index}"));
        if len == 0 {
            return Ok(piece);
        }
        let whole = match place(index, lengths.layers.len(), layer.len()) {
            Some(at) => layer.into_iter().nth(at),
            None => self.rest.get_mut(&len),
        };
        let Some(whole) = whole else { panic!("no memory for leaf {index}") };
        begin::<D>(queue, &self.ranks, piece, whole)?;
        queue.join_exchanges()?;
        Ok(whole)
    }

    /// Begins to gather a block, of which this rank has these pieces.
    pub fn begin_layer(
        &mut self,
        queue: &mut D::Queue,
        pieces: &LayerParams<D::Tensor>,
    ) -> Result<(), DeviceError> {
        let Some(layer) = &mut self.layer else { panic!("one rank has all blocks") };
        let leaves = pieces.as_ref().into_leaves().into_iter().zip(layer.as_mut().into_leaves());
        leaves.into_iter().try_for_each(|(piece, whole)| begin::<D>(queue, &self.ranks, piece, whole))
    }

    /// The block that was gathered last.
    pub fn layer(&self) -> &LayerParams<D::Tensor> {
        self.layer.as_ref().unwrap_or_else(|| panic!("one rank has all blocks"))
    }
}

/// Begins to gather a leaf from everyone's piece.
fn begin<D: Device>(
    queue: &mut D::Queue,
    ranks: &Ranks,
    piece: &D::Tensor,
    whole: &mut D::Tensor,
) -> Result<(), DeviceError> {
    let len = D::len(whole);
    let (own, cuts) = (ranks.piece(len), ranks.cuts(len));
    queue.add_pieces(AddPieces { pieces: piece, count: 1, len: own.len(), to: whole, at: own.start });
    queue.begin_exchange(Exchange::AllGather(AllGather {
        ranks: ranks.collective(),
        cuts: &cuts,
        tensor: whole,
    }))
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn leaves_of_blocks_share_memory_with_those_of_other_blocks() {
        let places: Vec<Option<usize>> = (0..9).map(|index| place(index, 2, 3)).collect();
        let (a, b, c) = (Some(0), Some(1), Some(2));
        assert_eq!(places, [None, a, b, c, a, b, c, None, None]);
    }
}
