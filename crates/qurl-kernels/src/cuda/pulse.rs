//! What is asked of a clique of GPUs while its exchanges run.
//!
//! The threads that issue exchanges wait in calls that do not return where a GPU or a link is stuck. So
//! another one asks (`collective/watch.rs`), over a mutex of its own: nothing here waits, and nobody waits
//! who holds it.

use super::context::Context;
use super::ffi::Handle;
use super::memory::Event;
use crate::collective::nccl_library::{Comm, Nccl};
use crate::types::DeviceError;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `ncclInProgress`
const IN_PROGRESS: c_int = 7;

pub(super) struct Pulse {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    marked: Mutex<Marked>,
}

struct Marked {
    /// The clique, or null once it has been given up.
    comm: Comm,
    /// After the exchange that was issued last, its number, and the last that is known to have ended.
    event: Event,
    number: u64,
    ended: u64,
}

// SAFETY: a handle of NCCL, which any thread may ask for errors while others use it; it is given up under the
// mutex before it is destroyed.
unsafe impl Send for Marked {}

impl Pulse {
    pub fn new(nccl: Arc<Nccl>, context: Arc<Context>, comm: Comm, event: Event) -> Pulse {
        Pulse { nccl, context, marked: Mutex::new(Marked { comm, event, number: 0, ended: 0 }) }
    }

    fn marked(&self) -> MutexGuard<'_, Marked> {
        self.marked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was issued last on the clique's stream is the exchange of this number.
    pub fn mark(&self, stream: Handle, number: u64) -> Result<(), DeviceError> {
        let mut marked = self.marked();
        self.context.bind()?;
        // SAFETY: the event and the stream are alive.
        let status = unsafe { (self.context.driver.event_record)(marked.event.handle, stream) };
        self.context.done("marking a stream", status)?;
        marked.number = number;
        Ok(())
    }

    /// The clique is about to be destroyed.
    pub fn give_up(&self) {
        self.marked().comm = std::ptr::null_mut();
    }

    /// The last exchange that has ended, or what NCCL says of the clique.
    pub fn ask(&self) -> Result<u64, String> {
        let mut marked = self.marked();
        if marked.comm.is_null() {
            return Ok(marked.ended);
        }
        let mut status = 0;
        // SAFETY: the clique is alive, the place valid.
        let asked = unsafe { (self.nccl.async_error)(marked.comm, &mut status) };
        if let Some(error) = [asked, status].into_iter().find(|&error| !matches!(error, 0 | IN_PROGRESS)) {
            return Err(format!("NCCL: {}", self.nccl.text(error, marked.comm)));
        }
        // An error of the device is the queue's to tell.
        if self.context.bind().is_ok() {
            // SAFETY: the event is alive.
            let passed = unsafe { (self.context.driver.event_query)(marked.event.handle) } == 0;
            marked.ended = if passed { marked.number } else { marked.ended };
        }
        Ok(marked.ended)
    }
}

#[cfg(test)]
mod tests {
    use super::super::counting::{self, GpuProfile};
    use super::super::ffi::{Driver, Status};
    use super::*;
    use crate::collective::nccl_library::UniqueId;
    use std::cell::Cell;
    use std::ffi::{c_char, c_void};

    type At = *mut c_void;

    thread_local! {
        /// What the driver says of an event, and NCCL of the clique.
        static EVENT: Cell<Status> = const { Cell::new(0) };
        static ERROR: Cell<c_int> = const { Cell::new(0) };
    }

    unsafe extern "C" fn event_query(_: Handle) -> Status {
        EVENT.get()
    }
    unsafe extern "C" fn unique_id(_: *mut UniqueId) -> c_int {
        0
    }
    unsafe extern "C" fn init_rank(_: *mut Comm, _: c_int, _: UniqueId, _: c_int) -> c_int {
        0
    }
    unsafe extern "C" fn destroy(_: Comm) -> c_int {
        0
    }
    unsafe extern "C" fn async_error(_: Comm, status: *mut c_int) -> c_int {
        // SAFETY: the caller gives a valid place.
        unsafe { *status = ERROR.get() };
        0
    }
    unsafe extern "C" fn error_string(_: c_int) -> *const c_char {
        c"unhandled system error".as_ptr()
    }
    unsafe extern "C" fn last_error(_: Comm) -> *const c_char {
        c"a cable".as_ptr()
    }
    unsafe extern "C" fn group() -> c_int {
        0
    }
    unsafe extern "C" fn message(_: At, _: usize, _: c_int, _: c_int, _: Comm, _: Handle) -> c_int {
        0
    }
    unsafe extern "C" fn all_gather(_: At, _: At, _: usize, _: c_int, _: Comm, _: Handle) -> c_int {
        0
    }
    unsafe extern "C" fn broadcast(_: At, _: At, _: usize, _: c_int, _: c_int, _: Comm, _: Handle) -> c_int {
        0
    }

    /// An exchange has ended once its event has passed; an error of the clique is told, and not asked for any
    /// more after the clique has been given up.
    #[test]
    fn exchanges_end_with_their_events() {
        let driver = Driver { event_query, ..counting::driver() };
        let context = Arc::new(Context::counting(driver, &GpuProfile::h200()));
        let event = Event::new(&context).expect("an event");
        let (file, version) = (String::new(), (2, 18, 0));
        let nccl = Nccl {
            unique_id,
            init_rank,
            destroy,
            async_error,
            error_string,
            last_error,
            group_start: group,
            group_end: group,
            send: message,
            recv: message,
            all_gather,
            broadcast,
            file,
            version,
        };
        let mut comm = 0;
        let pulse = Pulse::new(Arc::new(nccl), context, (&raw mut comm).cast(), event);
        let stream = std::ptr::null_mut();
        const NOT_READY: Status = 600;
        for (number, status, ended) in [(3, 0, 3), (4, NOT_READY, 3), (5, NOT_READY, 3), (5, 0, 5)] {
            pulse.mark(stream, number).expect("marked");
            EVENT.set(status);
            assert_eq!(pulse.ask(), Ok(ended), "{number}");
        }
        ERROR.set(IN_PROGRESS);
        assert_eq!(pulse.ask(), Ok(5));
        ERROR.set(2);
        assert_eq!(pulse.ask(), Err("NCCL: unhandled system error (2): a cable".to_string()));
        pulse.give_up();
        assert_eq!(pulse.ask(), Ok(5));
    }
}
