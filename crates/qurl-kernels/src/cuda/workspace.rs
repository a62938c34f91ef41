//! Working memory of operations: taken piece by piece, given back all at once when the next operation begins.
//!
//! An address is good until the operation ends: where a block is too small, another one is chained to it, and
//! none is moved or freed. When the next operation begins, several blocks become one. Then addresses change,
//! and whoever keeps some (recorded steps) must drop them: [`Workspace::is_fragmented`] says so before.

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
}

/// How much of the workspace is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// The block that is taken from,
    block: usize,
    /// and how much of it is taken.
    used: usize,
}

impl Workspace {
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

    /// Makes one block of several.
    pub fn merge(&mut self, context: &Arc<Context>) -> Result<(), DeviceError> {
        let bytes = self.blocks.iter().map(Buffer::bytes).sum();
        *self = Workspace::default();
        self.blocks.push(Buffer::new(context, bytes, "workspace")?);
        Ok(())
    }

    /// So many bytes of the blocks at hand.
    pub fn take(&mut self, bytes: usize) -> Option<DevicePtr> {
        let bytes = bytes.next_multiple_of(ALIGN);
        while let Some(block) = self.blocks.get(self.top.block) {
            if self.top.used + bytes <= block.bytes() {
                let at = block.at() + self.top.used as u64;
                self.top.used += bytes;
                return Some(at);
            }
            self.top = Mark { block: self.top.block + 1, used: 0 };
        }
        None
    }

    /// Chains a block that has so many bytes, and some more, so that slowly growing operations do not chain
    /// one each.
    pub fn grow(&mut self, context: &Arc<Context>, bytes: usize) -> Result<(), DeviceError> {
        let bytes = (bytes + bytes / 8).next_multiple_of(BLOCK_BYTES);
        self.blocks.push(Buffer::new(context, bytes, "workspace")?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::counting::GpuProfile;
    use super::super::device::Cuda;
    use super::*;

    /// What one operation takes never overlaps and is never moved, however often the workspace grows; the
    /// next operation finds one block that has all of it.
    #[test]
    fn addresses_of_an_operation_stay() {
        let cuda = Cuda::counting_as(&GpuProfile::h200());
        let mut workspace = Workspace::default();
        let mut operation = |sizes: &[usize]| {
            workspace.rewind(Mark::default());
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
                workspace.merge(cuda.context()).expect("memory");
            }
            blocks
        };
        let sizes = [100, 3 << 20, 17, 5 << 20, 1 << 20, 255];
        assert!(operation(&sizes) > 1);
        assert_eq!([operation(&sizes), operation(&sizes[1..]), operation(&sizes)], [1, 1, 1]);
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
