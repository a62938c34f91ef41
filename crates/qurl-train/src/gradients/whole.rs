//! Gradients of the whole model on every rank (ZeRO-1).
//!
//! L shards of a rank take log2(L) + 1 gradients of memory; one shard is one gradient that is added to. In
//! the last pass of the last shard a part is added up as soon as it is complete and leaves for its owners,
//! while the backward pass goes on.

use super::parts::{InFlight, leaves, parts};
use crate::ranks::Ranks;
use qurl_kernels::ops::AddPieces;
use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;
use qurl_model::compute::Part;

/// Gradients of a rank's shards.
pub(crate) struct Whole<D: Device> {
    /// Sums of 2^k shards each, the widest first, then the shard that is being computed; zeros after it.
    sums: Vec<Params<D::Tensor>>,
    /// Which of them is being computed.
    current: usize,
    /// Shards that are in the sums.
    ended: usize,
    /// Shards of a mini-batch.
    shards: usize,
    /// Whether the pass at hand is the last of its shard.
    pub leaving: bool,
    /// Whether the parts of the last shard have left.
    left: bool,
    /// Where there are other ranks.
    flight: Option<InFlight<D>>,
}

impl<D: Device> Whole<D> {
    /// Zeros.
    pub fn new(device: &D, lengths: &Params<usize>, ranks: &Ranks) -> Result<Self, DeviceError> {
        let shards = ranks.shards_each();
        let zeros = |_| lengths.clone().try_map(|len| device.zeros(len));
        let sums = (0..=shards.ilog2()).map(zeros).collect::<Result<_, _>>()?;
        let flight = (ranks.size() > 1).then(|| InFlight::new(device, lengths, ranks)).transpose()?;
        Ok(Whole { sums, current: 0, ended: 0, shards, leaving: false, left: false, flight })
    }

    /// Where the shard at hand is added up.
    pub fn shard(&mut self) -> &mut Params<D::Tensor> {
        &mut self.sums[self.current]
    }

    /// The pass at hand adds nothing more to a part.
    pub fn complete(&mut self, queue: &mut D::Queue, part: Part) -> Result<(), DeviceError> {
        if self.leaving && self.ended + 1 == self.shards {
            self.left = part == Part::Rest;
            self.end_part(queue, part)?;
        }
        Ok(())
    }

    /// The shard at hand is complete.
    pub fn end_shard(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        assert!(self.ended < self.shards, "more shards than a mini-batch has");
        if !self.left {
            parts(self.sums[0].layers.len()).try_for_each(|part| self.end_part(queue, part))?;
        }
        self.receive(queue)?;
        (self.leaving, self.left) = (false, false);
        self.ended += 1;
        self.current = self.current + 1 - self.ended.trailing_zeros() as usize;
        Ok(())
    }

    /// Adds a part of the shard at hand to the sums of as many shards as there are after it; after the last
    /// one it leaves.
    fn end_part(&mut self, queue: &mut D::Queue, part: Part) -> Result<(), DeviceError> {
        let ended = self.ended + 1;
        for k in 0..ended.trailing_zeros() as usize {
            let (left, right) = self.sums.split_at_mut(self.current - k);
            let left = left.last_mut().unwrap_or_else(|| panic!("a sum of as many shards"));
            for (to, from) in leaves(left, part).into_iter().zip(leaves(&mut right[0], part)) {
                let len = D::len(to);
                queue.drain(from, to, len);
            }
        }
        if ended == self.shards {
            self.receive(queue)?;
            if let Some(flight) = &mut self.flight {
                flight.begin(queue, part, leaves(&mut self.sums[0], part).into_iter().map(|leaf| &*leaf))?;
            }
        }
        Ok(())
    }

    /// Adds up the part that is on its way: this rank has the sum of its pieces afterwards.
    fn receive(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        let Some(flight) = &mut self.flight else { return Ok(()) };
        let ranks = flight.ranks.clone();
        let Some((part, pieces)) = flight.arrived(queue)? else { return Ok(()) };
        for (to, pieces) in
            leaves(&mut self.sums[0], part).into_iter().zip(pieces).filter(|(to, _)| D::len(to) > 0)
        {
            let own = ranks.piece(D::len(to));
            queue.add_pieces(AddPieces { pieces, count: ranks.size(), len: own.len(), to, at: own.start });
        }
        Ok(())
    }

    /// Ends the mini-batch; shards that were not computed are zero.
    pub fn end(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        while self.ended < self.shards {
            self.end_shard(queue)?;
        }
        (self.current, self.ended) = (0, 0);
        Ok(())
    }

    /// The sum of all shards.
    pub fn sum(&self) -> &Params<D::Tensor> {
        &self.sums[0]
    }

    /// Begins again at zero.
    pub fn clear(&mut self, queue: &mut D::Queue) {
        for leaf in self.sums[0].iter_mut() {
            let len = D::len(leaf);
            queue.clear(leaf, len);
        }
    }
}
