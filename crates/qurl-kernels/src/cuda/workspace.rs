//! Working memory of operations: taken piece by piece, given back all at once when the next operation begins.
//!
//! An address is good until the operation ends: where a block is too small, another one is chained to it, and
//! none is moved or freed. When the next operation begins, several blocks become one. Then addresses change,
//! and whoever keeps some (recorded steps) must drop them: [`Workspace::is_fragmented`] says so before.
//!
//! How much is held depends on the largest operation so far and not on those before it, so that a run whose
//! operations grow holds what the rehearsal of its largest one did: several blocks become one of as many
//! bytes as an operation took at most, and are given back before that one is taken. Only while an operation
//! finds the block too small, it holds more: the rest of the block that its first piece without place did not
//! fit into, which is less than that piece and less than the block, and less than [`BLOCK_BYTES`] for each
//! block that is chained. An operation whose first piece has no place gives the block back before.

use super::context::{ALIGN, Context};
use super::ffi::DevicePtr;
use super::memory::Buffer;
use crate::types::DeviceError;
use std::sync::Arc;

/// Blocks are multiples of this.
const BLOCK_BYTES: usize = 1 << 20;

/// Memory of one queue: operations of a queue run one after the other, so they share it.
#[derive(Default)]
pub(super) struct Workspace {
    blocks: Vec<Buffer>,
    top: Mark,
    /// The most bytes that an operation took.
    most: usize,
    /// Whether the operation at hand has taken something.
    touched: bool,
}

/// How much of the workspace is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// The block that is taken from,
    block: usize,
    /// how much of it is taken,
    used: usize,
    /// and how much of all blocks: pieces, without what was left at the ends of blocks.
    taken: usize,
}

impl Workspace {
    /// An operation begins: what others took is given back.
    pub fn begin(&mut self) {
        (self.top, self.touched) = (Mark::default(), false);
    }

    /// How much is taken.
    pub fn mark(&self) -> Mark {
        self.top
    }

    /// Gives back what was taken since: kernels that come later may overwrite it.
    pub fn rewind(&mut self, mark: Mark) {
        self.top = mark;
    }

    /// Whether there are several blocks.
    pub fn is_fragmented(&self) -> bool {
        self.blocks.len() > 1
    }

    /// Whether a block that has to grow can be given back before: the operation at hand holds nothing of it.
    pub fn can_be_replaced(&self) -> bool {
        !self.blocks.is_empty() && !self.touched
    }

    /// Makes one block of all, for the largest operation so far and at least so many bytes. The driver waits
    /// for what has been issued before memory goes.
    pub fn merge(&mut self, context: &Arc<Context>, bytes: usize) -> Result<(), DeviceError> {
        self.begin();
        self.blocks.clear();
        self.most = self.most.max(bytes);
        self.blocks.push(Buffer::new(context, self.most.next_multiple_of(BLOCK_BYTES), "workspace")?);
        Ok(())
    }

    /// So many bytes of the blocks at hand.
    pub fn take(&mut self, bytes: usize) -> Option<DevicePtr> {
        let bytes = bytes.next_multiple_of(ALIGN);
        while let Some(block) = self.blocks.get(self.top.block) {
            if self.top.used + bytes <= block.bytes() {
                let at = block.at() + self.top.used as u64;
                self.top.used += bytes;
                self.top.taken += bytes;
                self.most = self.most.max(self.top.taken);
                self.touched = true;
                return Some(at);
            }
            self.top = Mark { block: self.top.block + 1, used: 0, ..self.top };
        }
        None
    }

    /// Chains a block that has so many bytes.
    pub fn grow(&mut self, context: &Arc<Context>, bytes: usize) -> Result<(), DeviceError> {
        let bytes = bytes.next_multiple_of(BLOCK_BYTES);
        self.blocks.push(Buffer::new(context, bytes, "workspace")?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::counting::GpuProfile;
    use super::super::device::Cuda;
    use super::super::queue::CudaQueue;
    use super::*;
    use crate::{Device, Queue};

    /// What one operation takes never overlaps and is never moved, however often the workspace grows; the
    /// next operation finds one block that has all of it.
    #[test]
    fn addresses_of_an_operation_stay() {
        let cuda = Cuda::counting_as(&GpuProfile::h200());
        let mut workspace = Workspace::default();
        let mut operation = |sizes: &[usize]| {
            workspace.begin();
            let mut taken: Vec<(DevicePtr, usize)> = Vec::new();
            for &bytes in sizes {
                let at = workspace.take(bytes).unwrap_or_else(|| {
                    workspace.grow(cuda.context(), bytes).expect("memory");
                    workspace.take(bytes).expect("the block that was chained")
                });
                let apart = |&(other, size): &(DevicePtr, usize)| {
                    at + bytes as u64 <= other || other + size as u64 <= at
                };
                assert!(at.is_multiple_of(ALIGN as u64) && taken.iter().all(apart));
                taken.push((at, bytes));
            }
            let blocks = workspace.blocks.len();
            let held = |&(at, bytes): &(DevicePtr, usize)| {
                let inside = |b: &Buffer| b.at() <= at && at + bytes as u64 <= b.at() + b.bytes() as u64;
                workspace.blocks.iter().any(inside)
            };
            assert!(taken.iter().all(held), "a block was given back");
            if workspace.is_fragmented() {
                workspace.merge(cuda.context(), 0).expect("memory");
            }
            blocks
        };
        let sizes = [100, 3 << 20, 17, 5 << 20, 1 << 20, 255];
        assert!(operation(&sizes) > 1);
        assert_eq!([operation(&sizes), operation(&sizes[1..]), operation(&sizes)], [1, 1, 1]);
    }

    /// Operations that grow hold in the end what the largest one alone does, and while one finds no place not
    /// more than is said above.
    #[test]
    fn what_is_held_is_what_the_largest_operation_takes() {
        let operation = |queue: &mut CudaQueue, sizes: &[usize]| {
            queue.begin();
            sizes.iter().for_each(|&bytes| assert_ne!(queue.alloc(bytes), 0));
            queue.device().memory().expect("its memory").allocated
        };
        let queue = || {
            let queue = Arc::new(Cuda::counting_as(&GpuProfile::h200())).queue().expect("a queue");
            let fixed = queue.device().memory().expect("its memory").allocated;
            (queue, fixed)
        };
        // Pieces of an operation on so many rows: several sizes, the largest in the middle, at the beginning.
        for order in [[1, 300, 9000, 40, 5000], [9000, 1, 300, 40, 5000], [3, 2, 1, 1, 1]] {
            let sizes = |rows: usize| order.map(|width| width * rows * 4);
            let rounded = |rows: usize| sizes(rows).map(|bytes| bytes.next_multiple_of(ALIGN));
            let most = rounded(32_768).iter().sum::<usize>();
            let (mut full, fixed) = queue();
            operation(&mut full, &sizes(32_768));
            assert_eq!(operation(&mut full, &sizes(1)) - fixed, most.next_multiple_of(BLOCK_BYTES));
            let planned = full.device().memory().expect("its memory").peak - fixed;
            assert!(planned <= most + order.len() * BLOCK_BYTES, "{planned} of {most}");

            let (mut growing, fixed) = queue();
            let (mut held, mut largest) = (0, 0);
            for rows in [100, 2000, 1999, 15_000, 16_001, 7, 31_000, 32_768] {
                let during = operation(&mut growing, &sizes(rows)) - fixed;
                let piece = rounded(rows).into_iter().max().unwrap_or(0).min(held);
                largest = largest.max(rounded(rows).iter().sum());
                assert!(during <= largest + piece + order.len() * BLOCK_BYTES, "{rows} rows: {during}");
                held = operation(&mut growing, &[1]) - fixed;
                assert_eq!(held, largest.next_multiple_of(BLOCK_BYTES), "{rows} rows");
            }
            let peak = growing.device().memory().expect("its memory").peak - fixed;
            let piece = rounded(32_768).into_iter().max().unwrap_or(0);
            assert!(peak <= planned + piece + order.len() * BLOCK_BYTES, "{peak} of {planned}");
        }
    }

    #[test]
    fn what_is_given_back_is_taken_again() {
        let cuda = Cuda::counting_as(&GpuProfile::h200());
        let mut workspace = Workspace::default();
        workspace.grow(cuda.context(), 1000).expect("memory");
        let kept = workspace.take(10);
        let mark = workspace.mark();
        let first = workspace.take(100);
        workspace.rewind(mark);
        assert!(workspace.take(50) == first && first != kept);
    }
}
