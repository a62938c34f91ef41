//! A device: its context, its one stream, and what has gone wrong on it.
//!
//! Everything runs in order on one stream. A launch ([`super::launch`]) that fails cannot tell its caller (operations return
//! nothing), so the first error is kept and comes out where results are read.

use super::compile::Architecture;
use super::drawn::Room;
use super::ffi::{self, Driver, Handle, Nvrtc, Status};
use super::kv::LastSeen;
use super::launch::Kernels;
use super::lt::Lt;
use super::memory::{Allocated, Memory};
use super::replay::{Replay, StepHash};
use crate::DeviceError;
use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The oldest architecture with the instructions that the kernels use.
const OLDEST: u32 = 80;
const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
const ATTRIBUTE_L2_BYTES: c_int = 38;
const ATTRIBUTE_MAJOR: c_int = 75;
const ATTRIBUTE_MINOR: c_int = 76;

/// How launches are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Run, with inputs uploaded as they come.
    Direct,
    /// Hash, do not run.
    Dry,
    /// Run, with inputs that the dry run has uploaded.
    Step,
}

pub(super) struct State {
    pub mode: Mode,
    pub hash: StepHash,
    pub error: Option<DeviceError>,
}

/// A device in use.
pub struct Gpu {
    pub(super) driver: Driver,
    pub(super) nvrtc: Nvrtc,
    device: c_int,
    context: Handle,
    pub(super) stream: Handle,
    name: String,
    pub(super) architecture: Architecture,
    /// The architecture whose instructions are used: its own, or an older one.
    pub(super) generation: u32,
    pub(super) multiprocessors: u32,
    l2_bytes: usize,
    pub(super) kernels: Kernels,
    pub(super) state: Mutex<State>,
    pub(super) memory: Mutex<Memory>,
    pub(super) replay: Mutex<Replay>,
    /// Page-locked memory for drawn tokens that nobody waits for.
    pub(super) rooms: Mutex<Vec<Room>>,
    pub(super) allocated: Allocated,
    last_seen: Mutex<LastSeen>,
    lt: OnceLock<Option<Lt>>,
}

// SAFETY: driver handles may be used from any thread once the context is current there, which every entry sees to.
unsafe impl Send for Gpu {}
// SAFETY: as above; what changes is behind mutexes.
unsafe impl Sync for Gpu {}

thread_local! {
    /// The context that is current in this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// The architecture that has kernels of its own: products, and attention's way back.
pub(super) const HOPPER: u32 = 90;

impl Gpu {
    /// The first device of the machine, with instructions of at most the architecture `newest`.
    pub fn open_as(newest: u32) -> Result<Gpu, DeviceError> {
        let unavailable = |reason: String| DeviceError::Unavailable { device: "cuda".to_string(), reason };
        let driver = ffi::driver().map_err(unavailable)?;
        let text = |status: Status| error_text(&driver, status);
        let asked = |what: &str, status: Status| match status {
            0 => Ok(()),
            status => Err(unavailable(format!("{what}: {}", text(status)))),
        };
        let (mut count, mut device, mut context, mut stream) =
            (0, 0, std::ptr::null_mut(), std::ptr::null_mut());
        let mut name = [0 as std::ffi::c_char; 256];
        let mut attributes = [0; 4];
        // SAFETY: every place is valid for what the function writes; the context is made current before its use.
        unsafe {
            asked("starting the driver", (driver.init)(0))?;
            asked("counting devices", (driver.device_count)(&mut count))?;
            if count == 0 {
                return Err(unavailable("the driver sees no device".to_string()));
            }
            asked("choosing a device", (driver.device_get)(&mut device, 0))?;
            asked("naming the device", (driver.device_name)(name.as_mut_ptr(), 255, device))?;
            let wanted = [ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR, ATTRIBUTE_MULTIPROCESSORS, ATTRIBUTE_L2_BYTES];
            for (value, attribute) in attributes.iter_mut().zip(wanted) {
                asked("asking the device", (driver.device_attribute)(value, attribute, device))?;
            }
        }
        // SAFETY: the driver ends the name with a zero inside the array.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let [major, minor, multiprocessors, l2_bytes] = attributes.map(c_int::unsigned_abs);
        let architecture = Architecture(major * 10 + minor);
        if architecture.0 < OLDEST {
            let found = format!("{name} has compute capability {major}.{minor}, expected 8.0 or newer");
            return Err(unavailable(found));
        }
        let nvrtc = ffi::nvrtc().map_err(unavailable)?;
        // SAFETY: as above.
        unsafe {
            asked("opening the device", (driver.context_retain)(&mut context, device))?;
            asked("opening the device", (driver.context_set)(context))?;
            asked("making a stream", (driver.stream_create)(&mut stream, 1))?;
        }
        CURRENT.set(context as usize);
        let state = State { mode: Mode::Direct, hash: StepHash::default(), error: None };
        Ok(Gpu {
            driver,
            nvrtc,
            device,
            context,
            stream,
            name,
            architecture,
            generation: architecture.0.min(newest),
            multiprocessors,
            l2_bytes: l2_bytes as usize,
            kernels: Kernels::default(),
            state: Mutex::new(state),
            memory: Mutex::default(),
            replay: Mutex::default(),
            rooms: Mutex::default(),
            allocated: Allocated::default(),
            last_seen: Mutex::default(),
            lt: OnceLock::new(),
        })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The architecture whose instructions may be used.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Its number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Bytes of its second-level cache.
    pub fn l2_bytes(&self) -> usize {
        self.l2_bytes
    }

    /// Free and total bytes of its memory.
    pub fn memory_info(&self) -> (usize, usize) {
        self.bind();
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places are valid.
        let status = unsafe { (self.driver.memory_info)(&mut free, &mut total) };
        self.check("asking for memory", status);
        (free, total)
    }

    /// The most bytes that this process had allocated at a time.
    pub fn peak_memory(&self) -> usize {
        self.allocated.peak()
    }

    /// cuBLASLt, where the machine has it.
    pub(super) fn lt(&self) -> Option<&Lt> {
        self.bind();
        self.lt.get_or_init(|| Lt::open().ok()).as_ref()
    }

    /// Makes the context current in this thread.
    pub(super) fn bind(&self) {
        if CURRENT.get() != self.context as usize {
            // SAFETY: the context is alive as long as self.
            let status = unsafe { (self.driver.context_set)(self.context) };
            self.check("binding the context", status);
            CURRENT.set(self.context as usize);
        }
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sequences that the last layer of the step at hand asked for.
    pub(super) fn last_seen(&self) -> MutexGuard<'_, LastSeen> {
        self.last_seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the first error for the next reading of results.
    pub(super) fn check(&self, what: &str, status: Status) {
        if status != 0 {
            self.fail(format!("{what}: {}", error_text(&self.driver, status)));
        }
    }

    /// Keeps an error for the next reading of results.
    pub(super) fn fail(&self, what: String) {
        let error = DeviceError::Device { device: self.name.clone(), what };
        self.lock_state().error.get_or_insert(error);
    }

    /// The error that was kept, if any. It stays: what was computed since is of no use.
    pub(super) fn result(&self) -> Result<(), DeviceError> {
        self.lock_state().error.clone().map_or(Ok(()), Err)
    }

    /// Waits until all work is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.bind();
        // SAFETY: the stream is alive as long as self.
        let status = unsafe { (self.driver.stream_wait)(self.stream) };
        self.check("waiting for the device", status);
        self.result()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.bind();
        let memory = std::mem::take(&mut *self.memory.lock().unwrap_or_else(PoisonError::into_inner));
        memory.release(&self.driver);
        let replay = std::mem::take(&mut *self.replay.lock().unwrap_or_else(PoisonError::into_inner));
        replay.release(&self.driver);
        let rooms = std::mem::take(&mut *self.rooms.lock().unwrap_or_else(PoisonError::into_inner));
        rooms.into_iter().for_each(|room| room.release(&self.driver));
        // SAFETY: nothing uses the handles any more: every buffer holds the device alive.
        unsafe {
            self.lt.take();
            self.kernels.release(&self.driver);
            (self.driver.stream_destroy)(self.stream);
            (self.driver.context_release)(self.device);
        }
        CURRENT.set(0);
    }
}

/// What the driver says of an error.
pub(super) fn error_text(driver: &Driver, status: Status) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver's texts live for ever.
    unsafe {
        (driver.error_text)(status, &mut text);
        match text.is_null() {
            true => format!("CUDA error {status}"),
            false => format!("{} (CUDA error {status})", CStr::from_ptr(text).to_string_lossy()),
        }
    }
}
