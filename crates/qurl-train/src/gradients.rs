//! Gradients of the shards of a mini-batch, added up in a binary tree.
//!
//! A binary counter: after every shard the sums of equally many shards are added, so that the tree is the
//! same whoever computes which subtree of it, and L shards take log2(L) + 1 gradients of memory. One shard is
//! one gradient that is added to.

use qurl_kernels::{Device, DeviceError, Queue};
use qurl_model::Params;

/// Gradients of a rank's shards.
pub(crate) struct Gradients<D: Device> {
    /// Sums of 2^k shards each, the widest first, then the shard that is being computed; zeros after it.
    sums: Vec<Params<D::Tensor>>,
    /// Which of them is being computed.
    current: usize,
    /// Shards that are in the sums.
    ended: usize,
    /// Shards of a mini-batch.
    shards: usize,
}

impl<D: Device> Gradients<D> {
    /// Zeros, for a power of two of shards.
    pub fn new(device: &D, params: &Params<usize>, shards: usize) -> Result<Self, DeviceError> {
        let zeros = |_| params.clone().try_map(|len| device.zeros(len));
        let sums = (0..=shards.ilog2()).map(zeros).collect::<Result<_, _>>()?;
        Ok(Gradients { sums, current: 0, ended: 0, shards })
    }

    /// Where the shard at hand is added up.
    pub fn shard(&mut self) -> &mut Params<D::Tensor> {
        &mut self.sums[self.current]
    }

    /// The shard at hand is complete.
    pub fn end_shard(&mut self, queue: &mut D::Queue) {
        assert!(self.ended < self.shards, "more shards than a mini-batch has");
        self.ended += 1;
        for _ in 0..self.ended.trailing_zeros() {
            let (left, right) = self.sums.split_at_mut(self.current);
            let (left, right) = (&mut left[self.current - 1], &mut right[0]);
            for (to, from) in left.iter_mut().zip(right.iter_mut()) {
                let len = D::len(to);
                queue.add(&*from, to, len);
                queue.clear(from, len);
            }
            self.current -= 1;
        }
        self.current += 1;
    }

    /// The sum of all shards; those that were not computed are zero. The caller uses it up and clears it.
    pub fn sum(&mut self, queue: &mut D::Queue) -> &mut Params<D::Tensor> {
        while self.ended < self.shards {
            self.end_shard(queue);
        }
        (self.current, self.ended) = (0, 0);
        &mut self.sums[0]
    }
}
