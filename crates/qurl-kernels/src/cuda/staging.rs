//! The way of small inputs from the host to the device.
//!
//! Inputs of single operations (rows that are picked, targets, lists of work) go through a [`Ring`] of
//! page-locked memory with a twin on the device. The rows of a pass go into their batch's own memory
//! ([`super::batch`]) through one of two [`Outbox`]es: while the device still copies from one, the host fills
//! the other.

use super::context::{ALIGN, Context};
use super::ffi::DevicePtr;
use super::memory::{Buffer, Event, Pinned};
use crate::types::DeviceError;
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of a ring at first.
const RING_BYTES: usize = 16 << 20;
/// Bytes of an outbox at least.
const OUTBOX_BYTES: usize = 64 << 10;

/// A list of work for an attention kernel: it depends on the sequences of a batch and on the layer's heads,
/// and layers are usually alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ListKey {
    /// Which [`load`](crate::Queue::load).
    pub generation: u64,
    pub kind: ListKind,
}

/// Whose list it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ListKind {
    /// Of attention, with so many query heads that share a key/value head.
    Forward { group: usize },
    /// Of its backward pass, with so many rows of a block.
    Backward { owned: usize },
}

/// Page-locked memory and its twin on the device. Inside of an operation it is only filled; it begins anew
/// between two.
#[derive(Default)]
pub(super) struct Ring {
    now: Option<(Pinned, Buffer)>,
    used: usize,
    /// Rings that were too small for the operation at hand, which may hold addresses in them.
    retired: Vec<(Pinned, Buffer)>,
    /// Lists of work that are still there.
    pub lists: HashMap<ListKey, DevicePtr>,
}

impl Ring {
    /// Whether it is time to begin anew; first, everything sent before must have arrived.
    pub fn is_spent(&self) -> bool {
        !self.retired.is_empty() || self.now.as_ref().is_some_and(|(host, _)| self.used > host.bytes() / 2)
    }

    /// Begins anew.
    pub fn rewind(&mut self) {
        self.used = 0;
        self.retired.clear();
        self.lists.clear();
    }

    /// A place for so many bytes: on the device, and on the host.
    pub fn place(
        &mut self,
        context: &Arc<Context>,
        bytes: usize,
    ) -> Result<(DevicePtr, *mut u8), DeviceError> {
        if self.now.as_ref().is_none_or(|(host, _)| self.used + bytes > host.bytes()) {
            let size = (4 * bytes).next_power_of_two().max(RING_BYTES);
            let new = (Pinned::new(context, size)?, Buffer::new(context, size, "inputs")?);
            self.retired.extend(self.now.replace(new));
            self.used = 0;
        }
        let Some((host, device)) = &self.now else { return Ok((0, std::ptr::null_mut())) };
        let at = self.used;
        self.used = (at + bytes).next_multiple_of(ALIGN);
        // SAFETY: inside the memory by the check above.
        Ok((device.at() + at as u64, unsafe { host.host().add(at) }))
    }
}

/// Page-locked memory that rows are sent from, and the event after the last copy from it.
#[derive(Default)]
pub(super) struct Outbox {
    parts: Option<(Pinned, Event)>,
}

impl Outbox {
    /// Memory of at least so many bytes that the device does not read any more, and the event that marks the
    /// next copy.
    pub fn free(
        &mut self,
        context: &Arc<Context>,
        bytes: usize,
    ) -> Result<&mut (Pinned, Event), DeviceError> {
        if let Some((_, sent)) = &self.parts {
            sent.wait()?;
        }
        let parts = match self.parts.take().filter(|(host, _)| host.bytes() >= bytes) {
            Some(parts) => parts,
            None => {
                let bytes = bytes.next_power_of_two().max(OUTBOX_BYTES);
                (Pinned::new(context, bytes)?, Event::new(context)?)
            }
        };
        Ok(self.parts.insert(parts))
    }
}
