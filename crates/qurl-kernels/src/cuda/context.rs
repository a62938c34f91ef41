//! The driver's context of one GPU: what the GPU is, its memory, and the kernels that are loaded on it.
//!
//! Everything that allocates on a GPU holds its context alive. What changes in it is behind mutexes or
//! atomic, so a context is shared by all queues of a device.

use super::compile::Architecture;
use super::ffi::{self, DevicePtr, Driver, Handle, Nvrtc, Status};
use super::launch::Kernels;
use crate::device::MemoryLimit;
use crate::types::DeviceError;
use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The oldest architecture with the instructions that the kernels use.
pub(super) const OLDEST: u32 = 80;
/// The architecture that has kernels of its own: GEMMs, and the backward pass of attention.
pub(super) const HOPPER: u32 = 90;
const ATTRIBUTE_SMS: c_int = 16;
pub(super) const ATTRIBUTE_MAJOR: c_int = 75;
pub(super) const ATTRIBUTE_MINOR: c_int = 76;
/// Shared memory that a block may have if its kernel asks for it.
const ATTRIBUTE_SHARED: c_int = 97;
/// A stream that does not wait for the default stream.
pub(super) const STREAM_NON_BLOCKING: u32 = 1;
/// Out of memory, as the driver says it.
const OUT_OF_MEMORY: Status = 2;
/// Bytes that addresses in device memory are multiples of.
pub(super) const ALIGN: usize = 256;

/// A GPU in use.
pub(super) struct Context {
    pub driver: Driver,
    /// Compiles kernels; none on a device that only counts.
    pub nvrtc: Option<Nvrtc>,
    /// The memory of a device that only counts ([`super::counting`]).
    capacity: usize,
    device: c_int,
    handle: Handle,
    /// Where new memory is filled: queues' streams do not wait for the default one.
    filling: Mutex<Handle>,
    pub name: String,
    pub ordinal: usize,
    pub architecture: Architecture,
    /// The architecture whose instructions are used: its own, or an older one.
    pub generation: u32,
    pub sms: usize,
    /// Bytes of shared memory that a block may have.
    pub shared: usize,
    pub kernels: Kernels,
    /// Bytes that this process has allocated, and the most it ever had.
    allocated: AtomicUsize,
    peak: AtomicUsize,
    /// Bytes of state in page-locked memory of the host.
    on_host: AtomicUsize,
    /// What may be allocated at most, where something bounds it.
    limit: Mutex<Option<MemoryLimit>>,
}

// SAFETY: the raw pointers are handles of the driver, whose functions may be called from any thread once the
// context is current there, which `bind` sees to before every call.
unsafe impl Send for Context {}
// SAFETY: as above; driver functions that take the context or a module are thread-safe, the stream is used
// under its mutex, and everything else that changes is behind a mutex or atomic.
unsafe impl Sync for Context {}

thread_local! {
    /// The context that is current in this thread.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

impl Context {
    /// A GPU of the machine, with instructions of at most the architecture `newest`.
    pub fn open(ordinal: usize, newest: u32) -> Result<Context, DeviceError> {
        let unavailable =
            |reason: String| DeviceError::Unavailable { device: format!("cuda:{ordinal}"), reason };
        let (driver, _) = ffi::driver().map_err(unavailable)?;
        let done = |what: &str, status: Status| match status {
            0 => Ok(()),
            status => Err(unavailable(format!("{what}: {}", error_text(&driver, status)))),
        };
        let (mut count, mut device) = (0, 0);
        let (mut handle, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut name = [0 as std::ffi::c_char; 256];
        let mut attributes = [0; 4];
        // SAFETY: every place is valid for what the function writes.
        unsafe {
            done("starting the driver", (driver.init)(0))?;
            done("counting devices", (driver.device_count)(&mut count))?;
            let wanted = c_int::try_from(ordinal).ok().filter(|&wanted| wanted < count);
            let Some(wanted) = wanted else {
                return Err(unavailable(match count {
                    0 => "the driver sees no device".to_string(),
                    count => format!("the driver sees {count} devices, numbered from 0"),
                }));
            };
            done("choosing a device", (driver.device_get)(&mut device, wanted))?;
            done("naming the device", (driver.device_name)(name.as_mut_ptr(), 255, device))?;
            let wanted = [ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR, ATTRIBUTE_SMS, ATTRIBUTE_SHARED];
            for (value, attribute) in attributes.iter_mut().zip(wanted) {
                done("asking the device", (driver.device_attribute)(value, attribute, device))?;
            }
        }
        // SAFETY: the driver ends the name with a zero inside the array.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let [major, minor, sms, shared] = attributes.map(c_int::unsigned_abs);
        let architecture = Architecture(major * 10 + minor);
        if architecture.0 < OLDEST {
            let found = format!("{name} has compute capability {major}.{minor}, expected 8.0 or newer");
            return Err(unavailable(found));
        }
        let nvrtc = ffi::nvrtc().map_err(unavailable)?;
        // SAFETY: every place is valid; the context is made current before its use.
        unsafe {
            done("opening the device", (driver.context_retain)(&mut handle, device))?;
            done("opening the device", (driver.context_set)(handle))?;
            done("making a stream", (driver.stream_create)(&mut stream, STREAM_NON_BLOCKING))?;
        }
        CURRENT.set(handle as usize);
        Ok(Context {
            driver,
            nvrtc: Some(nvrtc),
            capacity: 0,
            device,
            handle,
            filling: Mutex::new(stream),
            name,
            ordinal,
            architecture,
            generation: architecture.0.min(newest),
            sms: sms as usize,
            shared: (shared as usize).min(shared_of(newest)),
            kernels: Kernels::default(),
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            on_host: AtomicUsize::new(0),
            limit: Mutex::new(None),
        })
    }

    /// A GPU that is not there: allocations are counted, nothing is computed.
    pub fn counting(driver: Driver, gpu: &super::counting::GpuProfile) -> Context {
        Context {
            driver,
            nvrtc: None,
            capacity: gpu.memory,
            device: 0,
            handle: std::ptr::null_mut(),
            filling: Mutex::new(std::ptr::null_mut()),
            name: gpu.name.clone(),
            ordinal: 0,
            architecture: Architecture(gpu.architecture),
            generation: gpu.architecture,
            sms: gpu.sms,
            shared: gpu.shared,
            kernels: Kernels::default(),
            allocated: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            on_host: AtomicUsize::new(0),
            limit: Mutex::new(None),
        }
    }

    /// Whether nothing is computed.
    pub fn only_counts(&self) -> bool {
        self.nvrtc.is_none()
    }

    /// Makes the context current in this thread.
    pub fn bind(&self) -> Result<(), DeviceError> {
        if CURRENT.get() != self.handle as usize {
            // SAFETY: the context is alive as long as self.
            self.done("binding the context", unsafe { (self.driver.context_set)(self.handle) })?;
            CURRENT.set(self.handle as usize);
        }
        Ok(())
    }

    /// What a status of the driver means.
    pub fn done(&self, what: &str, status: Status) -> Result<(), DeviceError> {
        match status {
            0 => Ok(()),
            status => Err(self.error(format!("{what}: {}", error_text(&self.driver, status)))),
        }
    }

    /// An error of this GPU.
    pub fn error(&self, what: String) -> DeviceError {
        DeviceError::Device { device: self.name.clone(), what }
    }

    /// Free and total bytes of its memory.
    pub fn memory_info(&self) -> Result<(usize, usize), DeviceError> {
        if self.only_counts() {
            let allocated = self.allocated.load(Ordering::Relaxed);
            return Ok((self.capacity.saturating_sub(allocated), self.capacity));
        }
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both places are valid.
        let status = unsafe { (self.driver.memory_info)(&mut free, &mut total) };
        self.done("asking for memory", status)?;
        Ok((free, total))
    }

    /// Bytes that this process has allocated.
    pub fn allocated(&self) -> usize {
        self.allocated.load(Ordering::Relaxed)
    }

    /// The most bytes that this process had allocated at a time.
    pub fn peak_memory(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// Bytes of state in page-locked memory of the host.
    pub fn on_host(&self) -> usize {
        self.on_host.load(Ordering::Relaxed)
    }

    /// So many bytes of state are kept in page-locked memory of the host from now on.
    pub fn keep_on_host(&self, bytes: usize) {
        self.on_host.fetch_add(bytes, Ordering::Relaxed);
    }

    /// They are not any more.
    pub fn drop_from_host(&self, bytes: usize) {
        self.on_host.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bounds what may be allocated from now on.
    pub fn set_limit(&self, limit: Option<MemoryLimit>) {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) = limit;
    }

    /// Takes memory; its content is whatever was there.
    pub fn allocate(&self, bytes: usize, what: &str) -> Result<DevicePtr, DeviceError> {
        self.bind()?;
        // Counted before it is taken, so that threads cannot pass the limit together.
        let now = self.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        let taken = self.take(now, bytes, what);
        match &taken {
            Ok(_) => self.peak.fetch_max(now, Ordering::Relaxed),
            Err(_) => self.allocated.fetch_sub(bytes, Ordering::Relaxed),
        };
        taken
    }

    /// Memory of the driver, with which `now` bytes are allocated.
    fn take(&self, now: usize, bytes: usize, what: &str) -> Result<DevicePtr, DeviceError> {
        let limit = *self.limit.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(MemoryLimit { bytes: most, set_by }) = limit.filter(|limit| now > limit.bytes) {
            let (used, most) = ((now - bytes) >> 20, most >> 20);
            let device = format!("{} ({used} of the {most} MiB that {set_by} leaves are taken)", self.name);
            return Err(DeviceError::OutOfMemory { device, need: bytes, what: what.to_string() });
        }
        let mut at = 0;
        // SAFETY: the place is valid.
        match unsafe { (self.driver.alloc)(&mut at, bytes.max(ALIGN)) } {
            OUT_OF_MEMORY => {
                let (free, total) = self.memory_info()?;
                let device = format!("{} ({} of {} MiB free)", self.name, free >> 20, total >> 20);
                Err(DeviceError::OutOfMemory { device, need: bytes, what: what.to_string() })
            }
            status => self.done("taking memory", status).map(|()| at),
        }
    }

    /// Gives memory of [`Context::allocate`] back.
    ///
    /// # Safety
    /// Nothing is issued that uses the memory after this call; the driver waits for what has been issued.
    pub unsafe fn free(&self, at: DevicePtr, bytes: usize) {
        // An error here is one that the next operation reports, too.
        if self.bind().is_ok() {
            // SAFETY: what the caller says.
            unsafe { (self.driver.free)(at) };
        }
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Sets bytes, and waits until that is done: any queue may use the memory afterwards.
    pub fn fill(&self, at: DevicePtr, byte: u8, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        let stream = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller gives an address of at least so many bytes; the stream is alive as long as self.
        unsafe {
            self.done("filling memory", (self.driver.fill8)(at, byte, bytes, *stream))?;
            self.done("waiting for the device", (self.driver.stream_wait)(*stream))
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let bound = self.bind().is_ok();
        let stream = *self.filling.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nothing uses the handles any more: every buffer and every queue holds the context alive.
        unsafe {
            if bound {
                self.kernels.release(&self.driver);
                (self.driver.stream_destroy)(stream);
            }
            (self.driver.context_release)(self.device);
        }
        CURRENT.set(0);
    }
}

/// Bytes of shared memory that a block of an architecture may have.
pub(super) fn shared_of(architecture: u32) -> usize {
    match architecture {
        80 | 87 => 163 << 10,
        86 | 88 | 89 | 120 | 121 => 99 << 10,
        _ => 227 << 10,
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
