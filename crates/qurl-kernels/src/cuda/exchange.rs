//! Exchanges of tensors between ranks that are GPUs, by their clique ([`super::nccl`]).
//!
//! A rank without others copies, and on a device that only counts what would be sent is counted.
//!
//! NCCL's kernels may run beside those of the queue, some of which have blocks that wait for each other and
//! need all of them resident. Both streams have the same priority, so that the kernel that was dispatched
//! first has all its blocks before the other gets any.

use super::device::{Cuda, CudaTensor};
use super::ffi::{DevicePtr, Handle};
use super::memory::Event;
use super::nccl::Clique;
use super::queue::CudaQueue;
use crate::collective::{Collective, CollectiveError, Kind, Pieces};
use crate::ops::{AllGather, AllToAll, Broadcast, Exchange};
use crate::types::DeviceError;

/// Begins an exchange after what the queue has been given so far.
pub(super) fn begin(queue: &mut CudaQueue, exchange: Exchange<Cuda>) -> Result<(), DeviceError> {
    match exchange {
        Exchange::AllToAll(tensors) => {
            let Some(ranks) = tensors.first().map(|first| first.ranks) else { return Ok(()) };
            let rank = ranks.rank();
            let mut places = Vec::with_capacity(tensors.len());
            for AllToAll { from, cuts, into, .. } in tensors {
                let pieces = Pieces::new(cuts, ranks.size(), from.len);
                let own = pieces.range(rank);
                assert!(4 * into.len >= pieces.received(rank), "all to all: [ranks, own piece], the tensor");
                let at = |tensor: &CudaTensor, offset: usize| -> DevicePtr { tensor.at() + offset as u64 };
                queue.copy_bytes(at(from, own.start), at(into, rank * own.len()), own.len());
                ranks.count(Kind::AllToAll, pieces.total() - own.len());
                places.push((from.at(), pieces, into.at()));
            }
            with_others(queue, ranks, |clique, stream, done| clique.all_to_all(stream, done, &places))
        }
        Exchange::AllGather(tensors) => {
            let Some(ranks) = tensors.first().map(|first| first.ranks) else { return Ok(()) };
            let mut places = Vec::with_capacity(tensors.len());
            for AllGather { cuts, tensor, .. } in tensors {
                let pieces = Pieces::new(cuts, ranks.size(), tensor.len);
                ranks.count(Kind::AllGather, (ranks.size() - 1) * pieces.range(ranks.rank()).len());
                places.push((pieces, tensor.at()));
            }
            with_others(queue, ranks, |clique, stream, done| clique.all_gather(stream, done, &places))
        }
        Exchange::Broadcast(Broadcast { ranks, root, tensor }) => {
            assert!(root < ranks.size(), "root {root} of {} ranks", ranks.size());
            if ranks.rank() == root {
                ranks.count(Kind::Broadcast, (ranks.size() - 1) * 4 * tensor.len);
            }
            with_others(queue, ranks, |clique, stream, done| {
                clique.broadcast(stream, done, root, tensor.at(), 4 * tensor.len)
            })
        }
    }
}

/// What is issued from here on runs after the exchanges begun so far.
pub(super) fn join(queue: &mut CudaQueue) -> Result<(), DeviceError> {
    if let Some(exchanged) = queue.exchanged.as_ref().map(|event| event.handle) {
        queue.bind();
        // SAFETY: the stream and the event are alive.
        let status = unsafe { (queue.context.driver.stream_wait_event)(queue.stream, exchanged, 0) };
        queue.check("ordering streams", status);
    }
    queue.result()
}

/// Begins an exchange with others, if there are any.
fn with_others(
    queue: &mut CudaQueue,
    ranks: &Collective,
    exchange: impl FnOnce(&Clique, Handle, &Event) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    if ranks.size() == 1 || queue.context.only_counts() {
        return Ok(());
    }
    if queue.recording.is_some() {
        queue.fail("an exchange between ranks inside of a recorded step".to_string());
        return queue.result();
    }
    let Some(clique) = ranks.clique() else {
        let reason = "tensors of a GPU are exchanged by NCCL, and these ranks are connected otherwise";
        let what = "an exchange of tensors".to_string();
        return Err(CollectiveError::Failed { what, reason: reason.to_string() }.into());
    };
    let exchanged = match &queue.exchanged {
        Some(event) => event,
        None => queue.exchanged.insert(Event::new(&queue.context)?),
    };
    let number = ranks.begin_exchange();
    exchange(clique, queue.stream, exchanged)?;
    clique.mark(number)
}
