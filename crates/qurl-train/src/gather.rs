//! Whole leaves of weights of which each rank has a piece: where they are gathered.
//!
//! There is memory for one block, all of whose leaves travel together, maybe while another block computes,
//! and for one leaf of each length beside the blocks. Linear layers that are to be packed in bf16 travel in
//! bf16: rounding is the same before and after, and half as many bytes go over the links.

use crate::ranks::Ranks;
use qurl_kernels::ops::{AddPieces, AllGather, Exchange, Narrow, Widen};
use qurl_kernels::{Device, DeviceError, Format, Queue};
use qurl_model::{LayerParams, ParamInfo, Params};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// As what a block travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Travel {
    /// All leaves in f32.
    Full,
    /// Linear layers in bf16.
    Bf16,
}

impl Travel {
    /// For packing in a format by a run that computes in another.
    pub fn of(compute: Format, packed: Format) -> Travel {
        match (compute, packed) {
            (Format::Bf16, Format::Bf16) => Travel::Bf16,
            _ => Travel::Full,
        }
    }

    /// Numbers of four bytes that this many values of a leaf take.
    pub fn numbers(self, leaf: &ParamInfo, values: usize) -> usize {
        match self {
            Travel::Bf16 if leaf.kind.is_block_linear() => values.div_ceil(2),
            Travel::Full | Travel::Bf16 => values,
        }
    }
}

/// Memory for whole leaves.
pub(crate) struct Gather<D: Device> {
    ranks: Ranks,
    compute: Format,
    /// A block; none where there are no other ranks.
    layer: Option<LayerParams<D::Tensor>>,
    /// Its linear layers in bf16, on their way; empty where it computes in f32.
    narrow: LayerParams<Option<D::Tensor>>,
    /// Other leaves, by their length.
    rest: BTreeMap<usize, D::Tensor>,
    /// As what the block on its way travels.
    in_flight: Option<Travel>,
    /// The block that is there, and its leaf that was last asked for.
    held: Option<(usize, Travel, usize)>,
}

/// Where a leaf is, by its number in the order of [`Params`]: which block, and which leaf of it.
fn place(index: usize, layers: usize, of_layer: usize) -> Option<(usize, usize)> {
    // The embedding comes first, then the blocks.
    let in_layers = (1..1 + layers * of_layer).contains(&index);
    in_layers.then(|| ((index - 1) / of_layer, (index - 1) % of_layer))
}

impl<D: Device> Gather<D> {
    /// Takes the memory for leaves of these shapes of a model that computes in this format.
    pub fn new(
        device: &D,
        shapes: &Params<ParamInfo>,
        compute: Format,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let none = shapes.layers[0].as_ref().try_map(&mut |_| Ok::<_, DeviceError>(None))?;
        let mut gather = Gather {
            ranks: ranks.clone(),
            compute,
            layer: None,
            narrow: none,
            rest: BTreeMap::new(),
            in_flight: None,
            held: None,
        };
        if ranks.size() == 1 {
            return Ok(gather);
        }
        let layer = shapes.layers[0].as_ref();
        gather.layer = Some(layer.try_map(&mut |leaf: &ParamInfo| device.zeros(leaf.len()))?);
        if compute == Format::Bf16 {
            gather.narrow = shapes.layers[0].as_ref().try_map(&mut |leaf: &ParamInfo| {
                let linear = leaf.kind.is_block_linear() && !leaf.is_empty();
                linear.then(|| device.zeros(Travel::Bf16.numbers(leaf, leaf.len()))).transpose()
            })?;
        }
        let tables =
            [Some(&shapes.embed), Some(&shapes.final_norm), shapes.head.as_ref(), shapes.value_head.as_ref()];
        let adapters = shapes.adapters.iter().flat_map(|adapters| adapters.as_ref().into_leaves());
        let lengths = tables.into_iter().flatten().chain(adapters).map(ParamInfo::len);
        // Frozen leaves have no numbers.
        for len in lengths.filter(|&len| len > 0) {
            if let Entry::Vacant(place) = gather.rest.entry(len) {
                place.insert(device.zeros(len)?);
            }
        }
        Ok(gather)
    }

    /// A whole leaf, of which this rank has a piece, to be packed in a format. Leaves of a block come
    /// together with the first of them that is asked for.
    pub fn leaf<'a>(
        &'a mut self,
        queue: &mut D::Queue,
        lengths: &Params<usize>,
        index: usize,
        pieces: &'a Params<D::Tensor>,
        format: Format,
    ) -> Result<&'a D::Tensor, DeviceError> {
        let Some(piece) = pieces.iter().nth(index) else { panic!("no leaf {index}") };
        let len = *lengths.iter().nth(index).unwrap_or_else(|| panic!("no leaf {index}"));
        let (Some(layer), true) = (&self.layer, len > 0) else { return Ok(piece) };
        let of_layer = layer.as_ref().into_leaves().len();
        let Some((block, at)) = place(index, lengths.layers.len(), of_layer) else {
            let Some(whole) = self.rest.get_mut(&len) else { panic!("no memory for leaf {index}") };
            let mut moving = vec![begin::<D>(queue, &self.ranks, piece, whole, None)];
            exchange::<D>(queue, &self.ranks, &mut moving)?;
            queue.join_exchanges()?;
            return Ok(whole);
        };
        let travel = Travel::of(self.compute, format);
        let there = self.held.is_some_and(|(held, as_, last)| held == block && as_ == travel && last < at);
        if !there {
            self.begin_layer(queue, &pieces.layers[block], travel)?;
            self.arrive(queue)?;
        }
        self.held = Some((block, travel, at));
        let leaf = self.layer().as_ref().into_leaves().into_iter().nth(at);
        Ok(leaf.unwrap_or_else(|| panic!("no leaf {at} of a block")))
    }

    /// The weights are others now.
    pub fn forget(&mut self) {
        self.held = None;
    }

    /// As what blocks travel that are packed as the model computes.
    pub fn own_travel(&self) -> Travel {
        Travel::of(self.compute, self.compute)
    }

    /// Begins to gather a block, of which this rank has these pieces.
    pub fn begin_layer(
        &mut self,
        queue: &mut D::Queue,
        pieces: &LayerParams<D::Tensor>,
        travel: Travel,
    ) -> Result<(), DeviceError> {
        assert_eq!(self.in_flight, None, "a block is on its way");
        let Some(layer) = &mut self.layer else { panic!("one rank has all blocks") };
        (self.held, self.in_flight) = (None, Some(travel));
        let leaves = pieces.as_ref().into_leaves().into_iter().zip(layer.as_mut().into_leaves());
        let mut moving = Vec::new();
        for ((piece, whole), narrow) in leaves.zip(self.narrow.as_mut().into_leaves()) {
            let narrow = narrow.as_mut().filter(|_| travel == Travel::Bf16);
            moving.push(begin::<D>(queue, &self.ranks, piece, whole, narrow));
        }
        exchange::<D>(queue, &self.ranks, &mut moving)
    }

    /// Waits for the block on its way.
    pub fn arrive(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        let (Some(travel), Some(layer)) = (self.in_flight.take(), &mut self.layer) else {
            panic!("no block is on its way")
        };
        queue.join_exchanges()?;
        if travel == Travel::Bf16 {
            for (whole, narrow) in
                layer.as_mut().into_leaves().into_iter().zip(self.narrow.as_ref().into_leaves())
            {
                let Some(narrow) = narrow else { continue };
                let len = D::len(whole);
                queue.widen(Widen { from: narrow, to: whole, len });
            }
        }
        Ok(())
    }

    /// The block that was gathered last.
    pub fn layer(&self) -> &LayerParams<D::Tensor> {
        self.layer.as_ref().unwrap_or_else(|| panic!("one rank has all blocks"))
    }
}

/// A tensor that travels, and where it is cut.
type Moving<'a, D> = (Vec<usize>, &'a mut <D as Device>::Tensor);

/// Puts the own piece of a leaf into its place: in f32, or narrowed.
fn begin<'a, D: Device>(
    queue: &mut D::Queue,
    ranks: &Ranks,
    piece: &D::Tensor,
    whole: &'a mut D::Tensor,
    narrow: Option<&'a mut D::Tensor>,
) -> Moving<'a, D> {
    let len = D::len(whole);
    let (own, mut cuts) = (ranks.piece(len), ranks.cuts(len));
    match narrow {
        None => {
            queue.add_pieces(AddPieces { pieces: piece, count: 1, len: own.len(), to: whole, at: own.start });
            (cuts, whole)
        }
        Some(narrow) => {
            queue.narrow(Narrow { from: piece, len: own.len(), to: narrow, at: own.start });
            // All but the last are even.
            cuts.iter_mut().for_each(|cut| *cut = cut.div_ceil(2));
            (cuts, narrow)
        }
    }
}

/// Begins to gather such tensors.
fn exchange<D: Device>(
    queue: &mut D::Queue,
    ranks: &Ranks,
    moving: &mut [Moving<D>],
) -> Result<(), DeviceError> {
    let ranks = ranks.collective();
    let tensors =
        moving.iter_mut().map(|(cuts, tensor)| AllGather::<D> { ranks, cuts, tensor: &mut **tensor });
    queue.begin_exchange(Exchange::AllGather(tensors.collect()))
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn leaves_of_blocks_share_memory_with_those_of_other_blocks() {
        let places: Vec<Option<(usize, usize)>> = (0..9).map(|index| place(index, 2, 3)).collect();
        let of = |block| (0..3).map(move |leaf| Some((block, leaf)));
        let expected: Vec<_> = [None].into_iter().chain(of(0)).chain(of(1)).chain([None, None]).collect();
        assert_eq!(places, expected);
    }
}
