//! Parts of the gradients of a model on their way to their owners.
//!
//! A part is complete while the backward pass goes on with the next one; its pieces travel meanwhile, and are
//! added when the next part is complete. One part is on its way at a time.

use crate::ranks::Ranks;
use qurl_kernels::ops::{AllToAll, Exchange};
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;
use qurl_model::compute::Part;

/// The parts of a model in the order in which a backward pass completes them.
pub(super) fn parts(layers: usize) -> impl Iterator<Item = Part> {
    std::iter::once(Part::Head).chain((0..layers).rev().map(Part::Block)).chain([Part::Rest])
}

/// The leaves of a part.
pub(super) fn leaves<T>(params: &mut Params<T>, part: Part) -> Vec<&mut T> {
    match part {
        Part::Head => params.head.as_mut().into_iter().collect(),
        Part::Block(index) => {
            let adapters = params.adapters.get_mut(index).map(|adapters| adapters.as_mut().into_leaves());
            params.layers[index]
                .as_mut()
                .into_leaves()
                .into_iter()
                .chain(adapters.into_iter().flatten())
                .collect()
        }
        Part::Rest => [Some(&mut params.embed), Some(&mut params.final_norm), params.value_head.as_mut()]
            .into_iter()
            .flatten()
            .collect(),
    }
}

/// Everyone's pieces of the part on its way, and which one that is.
pub(super) struct InFlight<D: Device> {
    pub ranks: Ranks,
    pub part: Option<Part>,
    /// [ranks, own piece] of every leaf of a block and of its adapters.
    layer: Vec<D::Tensor>,
    /// The same of the embedding or the head, the last norm and the value head.
    rest: Vec<D::Tensor>,
}

/// A part, and everyone's pieces of its leaves.
pub(super) type Arrived<'a, D> = (Part, Vec<&'a <D as Device>::Tensor>);

impl<D: Device> InFlight<D> {
    /// Takes the memory.
    pub fn new(device: &D, lengths: &Params<usize>, ranks: &Ranks) -> Result<Self, DeviceError> {
        let zeros = &mut |len: usize| device.zeros(ranks.size() * ranks.piece(len).len());
        let mut of_all = lengths.clone();
        let layer = leaves(&mut of_all, Part::Block(0)).into_iter().map(|len| zeros(*len));
        let layer = layer.collect::<Result<_, _>>()?;
        let table = lengths.embed.max(lengths.head.unwrap_or(0));
        let rest = [Some(table), Some(lengths.final_norm), lengths.value_head];
        let rest = rest.into_iter().flatten().map(zeros).collect::<Result<_, _>>()?;
        Ok(InFlight { ranks: ranks.clone(), part: None, layer, rest })
    }

    /// Sends a part's leaves, which must stay as they are until [`InFlight::arrived`].
    pub fn begin<'a>(
        &mut self,
        queue: &mut D::Queue,
        part: Part,
        leaves: impl IntoIterator<Item = &'a D::Tensor>,
    ) -> Result<(), DeviceError> {
        assert_eq!(self.part, None, "a part is on its way");
        self.part = Some(part);
        let into = match part {
            Part::Block(_) => self.layer.iter_mut().collect::<Vec<_>>(),
            Part::Head | Part::Rest => self.rest.iter_mut().collect(),
        };
        // Frozen leaves have no numbers.
        let moving = leaves.into_iter().zip(into).filter(|(from, _)| D::len(from) > 0);
        let mut moving: Vec<_> =
            moving.map(|(from, into)| (self.ranks.cuts(D::len(from)), from, into)).collect();
        let ranks = self.ranks.collective();
        let tensors = moving.iter_mut().map(|(cuts, from, into)| AllToAll::<D> {
            ranks,
            from: *from,
            cuts,
            into: &mut **into,
        });
        queue.begin_exchange(Exchange::AllToAll(tensors.collect()))
    }

    /// The part that was on its way, if there was one.
    pub fn arrived(&mut self, queue: &mut D::Queue) -> Result<Option<Arrived<'_, D>>, DeviceError> {
        let Some(part) = self.part.take() else { return Ok(None) };
        queue.join_exchanges()?;
        let pieces = match part {
            Part::Block(_) => self.layer.iter().collect(),
            Part::Head | Part::Rest => self.rest.iter().collect(),
        };
        Ok(Some((part, pieces)))
    }
}
