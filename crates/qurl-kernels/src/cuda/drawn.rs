//! Drawn tokens on their way to the host.
//!
//! The copy is issued behind the step that draws, with an event behind it, so that the host can issue the next step first and
//! then wait for these tokens alone. Every answer has page-locked memory of its own until it has been read. Memory of answers
//! that nobody waits for is used again at once: a later copy into it comes later on the stream.

use super::ffi::{DevicePtr, Driver, Handle};
use super::gpu::{Gpu, Mode};
use crate::DeviceError;
use crate::backend::{DRAWN_WORDS, Sampled};
use std::ffi::c_void;
use std::sync::{Arc, PoisonError};

/// Bytes of a room at least.
const LEAST_BYTES: usize = 1 << 14;
/// An event that is only waited for.
const EVENT_WITHOUT_TIMING: u32 = 2;

/// Page-locked memory and the event behind the last copy into it.
pub(super) struct Room {
    host: *mut c_void,
    bytes: usize,
    event: Handle,
}

// SAFETY: addresses and handles of the driver, which may be used from any thread.
unsafe impl Send for Room {}
// SAFETY: as above; a shared room is only looked at.
unsafe impl Sync for Room {}

impl Room {
    /// Gives the memory back; waits for a copy into it.
    pub(super) fn release(self, driver: &Driver) {
        // SAFETY: both were made in `take_room` and nobody else has them; nothing is written after the event.
        unsafe {
            (driver.event_wait)(self.event);
            (driver.event_destroy)(self.event);
            (driver.host_free)(self.host);
        }
    }
}

/// Drawn tokens on their way from the device.
pub struct CudaDrawn {
    gpu: Arc<Gpu>,
    /// There until it is dropped.
    room: Option<Room>,
    rows: usize,
}

/// Begins to read what [`super::head::draw`] wrote.
pub(super) fn ask(gpu: &Arc<Gpu>, from: DevicePtr, rows: usize) -> Result<CudaDrawn, DeviceError> {
    if gpu.lock_state().mode != Mode::Direct {
        gpu.fail("drawn tokens were asked for inside of a step".to_string());
    }
    gpu.result()?;
    gpu.bind();
    let bytes = rows * DRAWN_WORDS * size_of::<u32>();
    let room = gpu.take_room(bytes)?;
    // SAFETY: the room is large enough and belongs to this answer until the event has passed.
    unsafe {
        if bytes > 0 {
            let status = (gpu.driver.copy_out)(room.host, from, bytes, gpu.stream);
            gpu.check("reading drawn tokens", status);
        }
        let status = (gpu.driver.event_record)(room.event, gpu.stream);
        gpu.check("marking drawn tokens", status);
    }
    Ok(CudaDrawn { gpu: gpu.clone(), room: Some(room), rows })
}

impl CudaDrawn {
    /// The tokens, as soon as they are here.
    pub(super) fn wait(self) -> Result<Vec<Sampled>, DeviceError> {
        let Some(room) = &self.room else { return Ok(Vec::new()) };
        self.gpu.bind();
        // SAFETY: the event is alive as long as the room.
        let status = unsafe { (self.gpu.driver.event_wait)(room.event) };
        self.gpu.check("waiting for drawn tokens", status);
        self.gpu.result()?;
        // SAFETY: so many words were copied into the room, and the copy is done.
        let words = unsafe { std::slice::from_raw_parts(room.host.cast::<u32>(), self.rows * DRAWN_WORDS) };
        let one =
            |w: &[u32]| Sampled { token: w[0], logp: f32::from_bits(w[1]), entropy: f32::from_bits(w[2]) };
        Ok(words.chunks_exact(DRAWN_WORDS).map(one).collect())
    }
}

impl Drop for CudaDrawn {
    fn drop(&mut self) {
        let mut rooms = self.gpu.rooms.lock().unwrap_or_else(PoisonError::into_inner);
        rooms.extend(self.room.take());
    }
}

impl Gpu {
    /// A room of at least so many bytes.
    fn take_room(&self, bytes: usize) -> Result<Room, DeviceError> {
        let known = self.rooms.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match known {
            Some(room) if room.bytes >= bytes => return Ok(room),
            Some(room) => room.release(&self.driver),
            None => {}
        }
        let bytes = bytes.next_power_of_two().max(LEAST_BYTES);
        let (mut host, mut event) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both places are valid.
        unsafe {
            let status = (self.driver.host_alloc)(&mut host, bytes, 0);
            self.check("taking page-locked memory", status);
            self.result()?;
            let status = (self.driver.event_create)(&mut event, EVENT_WITHOUT_TIMING);
            self.check("making an event", status);
            if status != 0 {
                (self.driver.host_free)(host);
            }
        }
        self.result()?;
        Ok(Room { host, bytes, event })
    }
}
