//! Sampled tokens, and other small results, on their way to the host.
//!
//! The copy is issued after the step that samples, with an event after it, so that the host can issue the
//! next step first and then wait for these tokens alone. Every answer has page-locked memory of its own until
//! it has been read.

use super::constants::TOKEN_WORDS;
use super::context::Context;
use super::ffi::DevicePtr;
use super::memory::{Event, Pinned};
use super::queue::CudaQueue;
use crate::types::{DeviceError, Sampled};
use std::sync::Arc;

/// Bytes of a landing at least.
const MIN_BYTES: usize = 1 << 14;

/// Page-locked memory and the event after the last copy into it.
pub(super) struct Landing {
    memory: Pinned,
    landed: Event,
}

impl Landing {
    fn new(context: &Arc<Context>, bytes: usize) -> Result<Landing, DeviceError> {
        let memory = Pinned::new(context, bytes.next_power_of_two().max(MIN_BYTES))?;
        Ok(Landing { memory, landed: Event::new(context)? })
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // The memory goes: no copy into it may be in flight. An error is reported by whoever reads results
        // next.
        let _ = self.landed.wait();
    }
}

/// Words on their way from the device.
pub(super) struct PendingWords {
    landing: Landing,
    count: usize,
}

/// Sampled tokens on their way from the device.
pub struct CudaPending(PendingWords);

/// Begins to bring words to the host; what is written there later does not change them.
pub(super) fn fetch_words(
    queue: &mut CudaQueue,
    from: DevicePtr,
    count: usize,
) -> Result<PendingWords, DeviceError> {
    if queue.recording.is_some() {
        queue.fail("results were fetched inside of a recorded step".to_string());
    }
    queue.result()?;
    queue.bind();
    let bytes = count * size_of::<u32>();
    let landing = match queue.landings.pop().filter(|landing| landing.memory.bytes() >= bytes) {
        Some(landing) => landing,
        None => Landing::new(&queue.context, bytes)?,
    };
    let (host, event, stream) = (landing.memory.host(), landing.landed.handle, queue.stream);
    if bytes > 0 {
        // SAFETY: the landing is large enough and belongs to this answer until the event has passed.
        let status = unsafe { (queue.context.driver.copy_out)(host.cast(), from, bytes, stream) };
        queue.check("reading results", status);
    }
    // SAFETY: event and stream are alive.
    let status = unsafe { (queue.context.driver.event_record)(event, stream) };
    queue.check("marking results", status);
    Ok(PendingWords { landing, count })
}

/// Waits for words, and for nothing that was issued after they were fetched.
pub(super) fn wait_words<T>(
    queue: &mut CudaQueue,
    pending: PendingWords,
    read: impl FnOnce(&[u32]) -> T,
) -> Result<T, DeviceError> {
    let PendingWords { landing, count } = pending;
    let landed = landing.landed.wait();
    queue.keep(landed);
    queue.result()?;
    let words = landing.memory.host().cast::<u32>();
    // SAFETY: so many words were copied there, and the copy is done.
    let found = read(unsafe { std::slice::from_raw_parts(words, count) });
    queue.landings.push(landing);
    Ok(found)
}

/// [`crate::Queue::fetch`]
pub(super) fn fetch(
    queue: &mut CudaQueue,
    tokens: DevicePtr,
    rows: usize,
) -> Result<CudaPending, DeviceError> {
    fetch_words(queue, tokens, rows * TOKEN_WORDS).map(CudaPending)
}

/// [`crate::Queue::wait`]
pub(super) fn wait(queue: &mut CudaQueue, pending: CudaPending) -> Result<Vec<Sampled>, DeviceError> {
    let one = |w: &[u32]| Sampled { token: w[0], logp: f32::from_bits(w[1]), entropy: f32::from_bits(w[2]) };
    wait_words(queue, pending.0, |words| words.chunks_exact(TOKEN_WORDS).map(one).collect())
}
