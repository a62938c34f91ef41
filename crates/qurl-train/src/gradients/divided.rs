//! Gradients that are divided among the ranks (ZeRO-3).
//!
//! A rank has the gradients of the block at hand and of the one that is leaving, and its pieces of sums over
//! shards: after r rounds as many sums as r has bits that are set. A shard that takes several passes has to
//! be added up in one place: then the rank keeps the gradients of all blocks, and they leave in the last
//! pass. So shards of one micro-batch take the least memory.

use super::parts::{InFlight, leaves};
use crate::ranks::Ranks;
use qurl_kernels::ops::AddPieces;
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::compute::Part;
use qurl_model::{LayerParams, Params};

/// Gradients of a rank's part of the model, and of what it computes.
pub(crate) struct Divided<D: Device> {
    lengths: Params<usize>,
    /// Whole blocks of the shard at hand: two in turn, or all. Zeros but for the one at hand.
    layers: Vec<LayerParams<D::Tensor>>,
    /// [V, d] the embedding; the head, too, whose gradients have left before those of the embedding come.
    pub table: D::Tensor,
    /// [V, d] the head, where that is not so.
    head: Option<D::Tensor>,
    pub final_norm: D::Tensor,
    pub value_head: Option<D::Tensor>,
    /// This rank's pieces of sums over rounds, the widest first.
    sums: Vec<Params<D::Tensor>>,
    /// How many of them there are.
    depth: usize,
    /// Rounds that are in the sums.
    ended: usize,
    /// Rounds of a mini-batch: shards of each rank.
    rounds: usize,
    /// As long as the longest piece.
    sum: D::Tensor,
    /// Whether the pass at hand is the last of its shard.
    pub leaving: bool,
    flight: InFlight<D>,
}

impl<D: Device> Divided<D> {
    /// Zeros.
    pub fn new(device: &D, lengths: &Params<usize>, ranks: &Ranks) -> Result<Self, DeviceError> {
        let rounds = ranks.shards_each();
        let layer = |_| lengths.layers[0].clone().try_map(&mut |len| device.zeros(len));
        let piece = |len: usize| ranks.piece(len).len();
        let pieces = |_| lengths.clone().try_map(|len| device.zeros(piece(len)));
        let longest = lengths.iter().map(|&len| piece(len)).max().unwrap_or(0);
        Ok(Divided {
            layers: (0..lengths.layers.len().min(2)).map(layer).collect::<Result<_, _>>()?,
            table: device.zeros(lengths.embed.max(lengths.head.unwrap_or(0)))?,
            head: None,
            final_norm: device.zeros(lengths.final_norm)?,
            value_head: lengths.value_head.map(|len| device.zeros(len)).transpose()?,
            sums: (0..rounds.ilog2().max(1)).map(pieces).collect::<Result<_, _>>()?,
            depth: 0,
            ended: 0,
            rounds,
            sum: device.zeros(longest)?,
            leaving: false,
            flight: InFlight::new(device, lengths, ranks)?,
            lengths: lengths.clone(),
        })
    }

    /// Keeps the gradients of all blocks from now on.
    pub fn keep_all(&mut self, device: &D) -> Result<(), DeviceError> {
        while self.layers.len() < self.lengths.layers.len() {
            let layer = self.lengths.layers[0].clone();
            self.layers.push(layer.try_map(&mut |len| device.zeros(len))?);
        }
        if let (None, Some(len)) = (&self.head, self.lengths.head) {
            self.head = Some(device.zeros(len)?);
        }
        Ok(())
    }

    /// [V, d]: the output head.
    pub fn head(&mut self) -> &mut D::Tensor {
        self.head.as_mut().unwrap_or(&mut self.table)
    }

    /// A block.
    pub fn block(&mut self, index: usize) -> &mut LayerParams<D::Tensor> {
        let place = index % self.layers.len();
        &mut self.layers[place]
    }

    /// The pass at hand adds nothing more to a part.
    pub fn complete(&mut self, queue: &mut D::Queue, part: Part) -> Result<(), DeviceError> {
        if !self.leaving {
            return Ok(());
        }
        self.receive(queue)?;
        let mut flight_of = |leaves: Vec<&D::Tensor>| self.flight.begin(queue, part, leaves);
        match part {
            Part::Head if self.lengths.head.is_none() => flight_of(Vec::new()),
            Part::Head => flight_of(vec![self.head.as_ref().unwrap_or(&self.table)]),
            Part::Block(index) => flight_of(self.layers[index % self.layers.len()].as_ref().into_leaves()),
            Part::Rest => {
                let rest = [Some(&self.table), Some(&self.final_norm), self.value_head.as_ref()];
                flight_of(rest.into_iter().flatten().collect())
            }
        }
    }

    /// Adds the part that has arrived to the sums of its pieces, and clears what was sent.
    fn receive(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        let count = self.flight.ranks.size();
        let Some((part, arrived)) = self.flight.arrived(queue)? else { return Ok(()) };
        let (depth, equal) = (self.depth, self.ended.trailing_ones() as usize);
        for (leaf, pieces) in arrived.into_iter().enumerate() {
            let mut sums: Vec<&mut D::Tensor> =
                self.sums.iter_mut().filter_map(|sum| leaves(sum, part).into_iter().nth(leaf)).collect();
            let Some(len) = sums.first().map(|sum| D::len(sum)).filter(|&len| len > 0) else { continue };
            let sum_up = |queue: &mut D::Queue, to: &mut D::Tensor| {
                queue.add_pieces(AddPieces { pieces, count, len, to, at: 0 });
            };
            if equal == 0 {
                sum_up(queue, &mut *sums[depth]);
                continue;
            }
            sum_up(queue, &mut self.sum);
            queue.add(&self.sum, &mut *sums[depth - 1], len);
            for k in 1..equal {
                let (wider, narrower) = sums.split_at_mut(depth - k);
                queue.add(&*narrower[0], &mut *wider[depth - k - 1], len);
            }
        }
        let sent = match part {
            Part::Head if self.lengths.head.is_none() => Vec::new(),
            Part::Head => vec![self.head()],
            Part::Block(index) => self.block(index).as_mut().into_leaves(),
            Part::Rest => {
                let rest = [Some(&mut self.table), Some(&mut self.final_norm), self.value_head.as_mut()];
                rest.into_iter().flatten().collect()
            }
        };
        for leaf in sent {
            let len = D::len(leaf);
            queue.clear(leaf, len);
        }
        Ok(())
    }

    /// All ranks have computed one shard more.
    pub fn end_shard(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        assert!(self.ended < self.rounds && self.leaving, "a round in which nothing has left");
        self.receive(queue)?;
        self.leaving = false;
        self.depth = self.depth + 1 - self.ended.trailing_ones() as usize;
        self.ended += 1;
        Ok(())
    }

    /// Ends the mini-batch.
    pub fn end(&mut self) {
        assert_eq!(self.ended, self.rounds, "rounds of a mini-batch");
        (self.depth, self.ended) = (0, 0);
    }

    /// The sum of all shards.
    pub fn sum(&self) -> &Params<D::Tensor> {
        &self.sums[0]
    }
}
