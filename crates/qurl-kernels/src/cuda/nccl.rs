//! A clique of GPUs: NCCL's communicator of a run, on a stream of its own.
//!
//! Exchanges run in the order in which they are issued, the same at every rank, beside what the queue's
//! stream computes; events order the two where one needs what the other makes ([`super::exchange`]). Bytes of
//! the host go through a staging buffer on the device, piece by piece.

use super::context::{Context, STREAM_NON_BLOCKING};
use super::device::Cuda;
use super::ffi::{DevicePtr, Handle};
use super::memory::{Buffer, Event};
use super::pulse::Pulse;
use crate::collective::nccl_library::{BYTES, Comm, Nccl, UniqueId};
use crate::collective::transport::{Receive, Send};
use crate::collective::{CollectiveError, Pieces};
use crate::types::DeviceError;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of the host's that are sent at a time, to all ranks together; as many are received.
const STAGING: usize = 32 << 20;

/// This GPU among those of the run.
pub(crate) struct Clique {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    rank: usize,
    size: usize,
    /// One exchange at a time; held by whoever waits for one.
    turn: Mutex<Parts>,
    pulse: Arc<Pulse>,
}

struct Parts {
    comm: Comm,
    stream: Handle,
    /// What the queue has been given up to now.
    ready: Event,
    /// [sent, received], each [ranks, `STAGING` / ranks].
    staging: Buffer,
}

// SAFETY: handles of NCCL and of the driver, used under the mutex; the driver's context is made current
// before every call.
unsafe impl std::marker::Send for Parts {}

/// What rank 0 makes for all.
pub(crate) fn unique_id() -> Result<Vec<u8>, CollectiveError> {
    let nccl = Nccl::find()?;
    let mut id = UniqueId([0; 128]);
    // SAFETY: the place is valid.
    let status = unsafe { (nccl.unique_id)(&mut id) };
    nccl.done("ncclGetUniqueId", status, std::ptr::null_mut())?;
    Ok(id.0.to_vec())
}

impl Clique {
    /// Joins; returns once all ranks have.
    pub fn join(device: &Cuda, rank: usize, size: usize, id: &[u8]) -> Result<Clique, DeviceError> {
        let nccl = Arc::new(Nccl::find()?);
        let context = device.context().clone();
        let Ok(id) = id.try_into().map(UniqueId) else {
            let (what, reason) =
                ("joining the clique of GPUs".to_string(), format!("{} bytes of id", id.len()));
            return Err(CollectiveError::Failed { what, reason }.into());
        };
        let [ready, event] = [Event::new(&context)?, Event::new(&context)?];
        let staging = Buffer::new(&context, 2 * STAGING, "bytes between ranks")?;
        context.bind()?;
        let (mut stream, mut comm) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the places are valid; the context is current.
        unsafe {
            let status = (context.driver.stream_create)(&mut stream, STREAM_NON_BLOCKING);
            context.done("making a stream", status)?;
            let status = (nccl.init_rank)(&mut comm, size as c_int, id, rank as c_int);
            nccl.done("ncclCommInitRank", status, std::ptr::null_mut())?;
        }
        let pulse = Arc::new(Pulse::new(nccl.clone(), context.clone(), comm, event));
        let turn = Mutex::new(Parts { comm, stream, ready, staging });
        Ok(Clique { nccl, context, rank, size, turn, pulse })
    }

    /// Asks for the last exchange that has ended, or for what is wrong with the clique, without waiting.
    pub fn pulse(&self) -> impl Fn() -> Result<u64, String> + std::marker::Send + 'static {
        let pulse = Arc::downgrade(&self.pulse);
        move || pulse.upgrade().map_or(Ok(0), |pulse| pulse.ask())
    }

    /// What was issued last is the exchange of this number.
    pub(super) fn mark(&self, number: u64) -> Result<(), DeviceError> {
        let stream = self.turn().stream;
        self.pulse.mark(stream, number)
    }

    /// What the library is.
    pub fn description(&self) -> String {
        let (major, minor, patch) = self.nccl.version;
        format!("NCCL {major}.{minor}.{patch} ({})", self.nccl.file)
    }

    /// Bytes of the device that exchanges of host bytes take.
    pub const fn device_bytes() -> usize {
        2 * STAGING
    }

    /// Of each of these `(from, pieces, into)`, each rank its piece of the others' `from`; the own piece is
    /// the caller's matter.
    pub(super) fn all_to_all(
        &self,
        queue: Handle,
        done: &Event,
        tensors: &[(DevicePtr, Pieces, DevicePtr)],
    ) -> Result<(), DeviceError> {
        self.after(queue, done, |parts| {
            self.group(parts, |group| {
                for (from, pieces, into) in tensors {
                    let own = pieces.range(self.rank).len();
                    for peer in (0..self.size).filter(|&peer| peer != self.rank) {
                        group.send(from + pieces.range(peer).start as u64, pieces.range(peer).len(), peer)?;
                        group.receive(into + (peer * own) as u64, own, peer)?;
                    }
                }
                Ok(())
            })
        })
    }

    /// Everyone's pieces of these tensors to all ranks, in place: those of even pieces by NCCL's own
    /// algorithm, small and uneven ones by messages, all of a block as one group, which NCCL runs together.
    pub(super) fn all_gather(
        &self,
        queue: Handle,
        done: &Event,
        tensors: &[(Pieces, DevicePtr)],
    ) -> Result<(), DeviceError> {
        self.after(queue, done, |parts| {
            self.group(parts, |group| {
                for (pieces, tensor) in tensors {
                    let own = pieces.range(self.rank);
                    if pieces.even() {
                        group.all_gather(tensor + own.start as u64, *tensor, own.len())?;
                        continue;
                    }
                    for peer in (0..self.size).filter(|&peer| peer != self.rank) {
                        let theirs = pieces.range(peer);
                        group.send(tensor + own.start as u64, own.len(), peer)?;
                        group.receive(tensor + theirs.start as u64, theirs.len(), peer)?;
                    }
                }
                Ok(())
            })
        })
    }

    /// The root's bytes to all.
    pub(super) fn broadcast(
        &self,
        queue: Handle,
        done: &Event,
        root: usize,
        tensor: DevicePtr,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.after(queue, done, |parts| {
            let (tensor, root) = (at(tensor), root as c_int);
            // SAFETY: the caller's tensor has the bytes.
            let status = unsafe {
                (self.nccl.broadcast)(tensor, tensor, bytes, BYTES, root, parts.comm, parts.stream)
            };
            Ok(self.nccl.done("ncclBroadcast", status, parts.comm)?)
        })
    }

    /// Bytes of the host, through the staging buffer: rounds of one piece of every message each, of a size
    /// that depends on the number of ranks alone.
    pub fn exchange(&self, sends: &[Send], receives: &mut [Receive]) -> Result<(), CollectiveError> {
        let piece = (STAGING / self.size).next_multiple_of(256) - 256;
        let lengths = sends.iter().map(|send| send.bytes.len());
        let lengths = lengths.chain(receives.iter().map(|receive| receive.bytes.len()));
        let rounds = lengths.max().unwrap_or(0).div_ceil(piece);
        let parts = self.turn();
        for round in 0..rounds {
            let begin = round * piece;
            let of = |len: usize| begin.min(len)..(begin + piece).min(len);
            self.round(&parts, piece, sends, receives, &of).map_err(|error| match error {
                DeviceError::Exchange(error) => error,
                error => {
                    let what = "an exchange of bytes between GPUs".to_string();
                    CollectiveError::Failed { what, reason: error.to_string() }
                }
            })?;
        }
        Ok(())
    }

    fn round(
        &self,
        parts: &Parts,
        piece: usize,
        sends: &[Send],
        receives: &mut [Receive],
        of: &dyn Fn(usize) -> std::ops::Range<usize>,
    ) -> Result<(), DeviceError> {
        let context = &self.context;
        context.bind()?;
        let sent = |slot: usize| parts.staging.at() + (slot * piece) as u64;
        let received = |slot: usize| sent(0) + STAGING as u64 + (slot * piece) as u64;
        for (slot, send) in sends.iter().enumerate() {
            let bytes = &send.bytes[of(send.bytes.len())];
            if !bytes.is_empty() {
                // SAFETY: a slot has the bytes; they are borrowed until the stream has been waited for.
                let status = unsafe {
                    (context.driver.copy_in)(sent(slot), bytes.as_ptr().cast(), bytes.len(), parts.stream)
                };
                context.done("sending bytes to the device", status)?;
            }
        }
        self.group(parts, |group| {
            for (slot, send) in sends.iter().enumerate() {
                group.send(sent(slot), of(send.bytes.len()).len(), send.to)?;
            }
            for (slot, receive) in receives.iter().enumerate() {
                group.receive(received(slot), of(receive.bytes.len()).len(), receive.from)?;
            }
            Ok(())
        })?;
        for (slot, receive) in receives.iter_mut().enumerate() {
            let range = of(receive.bytes.len());
            let bytes = &mut receive.bytes[range];
            if !bytes.is_empty() {
                // SAFETY: as above; nobody looks at the bytes before the stream has been waited for.
                let status = unsafe {
                    (context.driver.copy_out)(
                        bytes.as_mut_ptr().cast(),
                        received(slot),
                        bytes.len(),
                        parts.stream,
                    )
                };
                context.done("receiving bytes from the device", status)?;
            }
        }
        // SAFETY: the stream is alive as long as self.
        context.done("waiting for the device", unsafe { (context.driver.stream_wait)(parts.stream) })?;
        let mut status = 0;
        // SAFETY: the clique is alive, the place valid.
        let asked = unsafe { (self.nccl.async_error)(parts.comm, &mut status) };
        self.nccl.done("ncclCommGetAsyncError", asked, parts.comm)?;
        Ok(self.nccl.done("an exchange", status, parts.comm)?)
    }

    fn turn(&self) -> MutexGuard<'_, Parts> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs an exchange after what a queue's stream has been given, and marks its end.
    fn after(
        &self,
        queue: Handle,
        done: &Event,
        run: impl FnOnce(&Parts) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let (parts, driver) = (self.turn(), &self.context.driver);
        self.context.bind()?;
        // SAFETY: streams and events are alive.
        unsafe {
            self.context.done("marking a stream", (driver.event_record)(parts.ready.handle, queue))?;
            let status = (driver.stream_wait_event)(parts.stream, parts.ready.handle, 0);
            self.context.done("ordering streams", status)?;
        }
        run(&parts)?;
        // SAFETY: as above.
        let status = unsafe { (driver.event_record)(done.handle, parts.stream) };
        self.context.done("marking a stream", status)
    }

    /// Exchanges that run at the same time.
    fn group(
        &self,
        parts: &Parts,
        fill: impl FnOnce(&Group) -> Result<(), CollectiveError>,
    ) -> Result<(), DeviceError> {
        let group = Group { nccl: &self.nccl, parts };
        // SAFETY: no arguments.
        self.nccl.done("ncclGroupStart", unsafe { (self.nccl.group_start)() }, parts.comm)?;
        let filled = fill(&group);
        // SAFETY: as above; a group that was begun is ended, whatever happened in it.
        let ended = self.nccl.done("ncclGroupEnd", unsafe { (self.nccl.group_end)() }, parts.comm);
        Ok(filled.and(ended)?)
    }

    /// Leaves the clique, with all ranks.
    pub fn close(&self) -> Result<(), CollectiveError> {
        let mut parts = self.turn();
        if parts.comm.is_null() {
            return Ok(());
        }
        let failed = |error: DeviceError| CollectiveError::Failed {
            what: "leaving the clique of GPUs".to_string(),
            reason: error.to_string(),
        };
        self.context.bind().map_err(failed)?;
        let comm = std::mem::replace(&mut parts.comm, std::ptr::null_mut());
        self.pulse.give_up();
        // SAFETY: the stream and the clique are alive; the clique is not used again.
        let (waited, status) =
            unsafe { ((self.context.driver.stream_wait)(parts.stream), (self.nccl.destroy)(comm)) };
        self.context.done("waiting for the device", waited).map_err(failed)?;
        self.nccl.done("ncclCommDestroy", status, std::ptr::null_mut())
    }
}

/// A group that is being filled.
struct Group<'a> {
    nccl: &'a Nccl,
    parts: &'a Parts,
}

impl Group<'_> {
    fn send(&self, from: DevicePtr, bytes: usize, to: usize) -> Result<(), CollectiveError> {
        if bytes == 0 {
            return Ok(());
        }
        let Parts { comm, stream, .. } = *self.parts;
        // SAFETY: the caller gives an address of at least so many bytes.
        let status = unsafe { (self.nccl.send)(at(from), bytes, BYTES, to as c_int, comm, stream) };
        self.nccl.done(&format!("ncclSend to rank {to}"), status, comm)
    }

    fn receive(&self, into: DevicePtr, bytes: usize, from: usize) -> Result<(), CollectiveError> {
        if bytes == 0 {
            return Ok(());
        }
        let Parts { comm, stream, .. } = *self.parts;
        // SAFETY: as above.
        let status = unsafe { (self.nccl.recv)(at(into), bytes, BYTES, from as c_int, comm, stream) };
        self.nccl.done(&format!("ncclRecv from rank {from}"), status, comm)
    }

    /// `bytes` of every rank, one after the other; in place, where the own ones are already there.
    fn all_gather(&self, own: DevicePtr, all: DevicePtr, bytes: usize) -> Result<(), CollectiveError> {
        let Parts { comm, stream, .. } = *self.parts;
        // SAFETY: the caller's tensor has the bytes of all ranks; in place, as NCCL allows: the sent piece is
        // where it will be received.
        let status = unsafe { (self.nccl.all_gather)(at(own), at(all), bytes, BYTES, comm, stream) };
        self.nccl.done("ncclAllGather", status, comm)
    }
}

fn at(address: DevicePtr) -> *mut c_void {
    address as *mut c_void
}
