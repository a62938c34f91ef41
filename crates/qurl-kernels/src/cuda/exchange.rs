//! Exchanges of tensors between ranks that are GPUs.
//!
//! A rank without others copies, and one on a device that only counts counts what it would send.

use super::device::{Cuda, CudaTensor};
use super::ffi::DevicePtr;
use super::queue::CudaQueue;
use crate::collective::{Collective, CollectiveError, Kind, Pieces};
use crate::ops::{AllGather, AllToAll, Broadcast, Exchange};
use crate::types::DeviceError;

/// Begins an exchange after what the queue has been given so far.
pub(super) fn begin(queue: &mut CudaQueue, exchange: Exchange<Cuda>) -> Result<(), DeviceError> {
    match exchange {
        Exchange::AllToAll(AllToAll { ranks, from, cuts, into }) => {
            let pieces = Pieces::new(cuts, ranks.size(), from.len);
            let (rank, own) = (ranks.rank(), pieces.range(ranks.rank()));
            assert!(4 * into.len >= pieces.received(rank), "all to all: [ranks, own piece] and the tensor");
            let at = |tensor: &CudaTensor, offset: usize| -> DevicePtr { tensor.at() + offset as u64 };
            queue.copy_bytes(at(from, own.start), at(into, rank * own.len()), own.len());
            ranks.count(Kind::AllToAll, pieces.total() - own.len());
            others(queue, ranks)
        }
        Exchange::AllGather(AllGather { ranks, cuts, tensor }) => {
            let pieces = Pieces::new(cuts, ranks.size(), tensor.len);
            ranks.count(Kind::AllGather, (ranks.size() - 1) * pieces.range(ranks.rank()).len());
            others(queue, ranks)
        }
        Exchange::Broadcast(Broadcast { ranks, root, tensor }) => {
            assert!(root < ranks.size(), "root {root} of {} ranks", ranks.size());
            if ranks.rank() == root {
                ranks.count(Kind::Broadcast, (ranks.size() - 1) * 4 * tensor.len);
            }
            others(queue, ranks)
        }
    }
}

/// What is issued from here on runs after the exchanges begun so far.
pub(super) fn join(queue: &mut CudaQueue) -> Result<(), DeviceError> {
    queue.result()
}

/// Whether there is nobody to talk to; an error where nothing can reach the others' memory.
fn others(queue: &CudaQueue, ranks: &Collective) -> Result<(), DeviceError> {
    if ranks.size() == 1 || queue.context.only_counts() {
        return Ok(());
    }
    let reason =
        "tensors of a GPU are exchanged by NCCL, and these ranks are connected otherwise".to_string();
    Err(CollectiveError::Failed { what: "an exchange of tensors".to_string(), reason }.into())
}
