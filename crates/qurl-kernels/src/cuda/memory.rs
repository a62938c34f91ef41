//! Memory that is owned: buffers on the device and page-locked buffers on the host.

use super::context::Context;
use super::ffi::DevicePtr;
use super::queue::CudaQueue;
use crate::Queue;
use crate::types::DeviceError;
use std::sync::Arc;

/// Memory on the device, freed when dropped.
pub(super) struct Buffer {
    context: Arc<Context>,
    at: DevicePtr,
    bytes: usize,
}

impl Buffer {
    /// Takes memory; its content is whatever was there.
    pub fn new(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Buffer, DeviceError> {
        let at = context.allocate(bytes, what)?;
        Ok(Buffer { context: context.clone(), at, bytes })
    }

    /// Takes memory with all bytes set to `byte`, ready for any queue.
    pub fn filled(context: &Arc<Context>, bytes: usize, byte: u8, what: &str) -> Result<Buffer, DeviceError> {
        let buffer = Buffer::new(context, bytes, what)?;
        if bytes > 0 {
            context.fill(buffer.at, byte, bytes)?;
        }
        Ok(buffer)
    }

    /// Takes memory of zeros.
    pub fn zeros(context: &Arc<Context>, bytes: usize, what: &str) -> Result<Buffer, DeviceError> {
        Buffer::filled(context, bytes, 0, what)
    }

    /// Its address.
    pub fn at(&self) -> DevicePtr {
        self.at
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`; whoever issues work on the buffer borrows it, so none is issued any
        // more, and the driver waits for what was, exchanges in flight included.
        unsafe { self.context.free(self.at, self.bytes) };
    }
}

/// Page-locked memory of the host: copies between it and the device need no detour and do not block.
pub(super) struct Pinned {
    context: Arc<Context>,
    host: *mut u8,
    bytes: usize,
}

// SAFETY: memory that this value alone owns; the driver frees it from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Takes memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Pinned, DeviceError> {
        context.bind()?;
        let mut host = std::ptr::null_mut();
        // SAFETY: the place is valid.
        let status = unsafe { (context.driver.host_alloc)(&mut host, bytes, 0) };
        context.done(&format!("taking {} MiB of page-locked memory", bytes >> 20), status)?;
        Ok(Pinned { context: context.clone(), host: host.cast(), bytes })
    }

    /// Its address.
    pub fn host(&self) -> *mut u8 {
        self.host
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes values from a byte on, which is a multiple of their size.
    pub fn put<T: Plain>(&mut self, at: usize, values: impl ExactSizeIterator<Item = T>) {
        let count = values.len();
        assert!(at.is_multiple_of(align_of::<T>()) && at + count * size_of::<T>() <= self.bytes, "staging");
        // SAFETY: inside the memory by the check above.
        let to = unsafe { self.host.add(at).cast::<T>() };
        for (i, value) in values.take(count).enumerate() {
            // SAFETY: one of the `count` places that were checked. `&mut self` is the only access of the
            // host, and the owner of a copy in flight waits before it writes again.
            unsafe { to.add(i).write(value) };
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`; the driver waits for copies in flight.
            unsafe { (self.context.driver.host_free)(self.host.cast()) };
        }
    }
}

/// State in page-locked memory of the host that kernels read and write over the bus, at the same address as
/// the host does (all memory of a 64-bit process has one).
pub(super) struct HostState {
    context: Arc<Context>,
    /// None on a device that only counts.
    memory: Option<Pinned>,
    bytes: usize,
}

// SAFETY: what a shared reference gives is the address, which only queues that borrow the state issue work
// on, and values that are read when the queue is idle.
unsafe impl Sync for HostState {}

impl HostState {
    /// Takes memory of zeros.
    pub fn zeros(context: &Arc<Context>, bytes: usize) -> Result<HostState, DeviceError> {
        let memory = match context.only_counts() || bytes == 0 {
            true => None,
            false => {
                let memory = Pinned::new(context, bytes)?;
                // SAFETY: so many bytes were taken, and no device knows of them yet.
                unsafe { std::ptr::write_bytes(memory.host(), 0, bytes) };
                Some(memory)
            }
        };
        context.keep_on_host(bytes);
        Ok(HostState { context: context.clone(), memory, bytes })
    }

    /// Its address, on the device as well.
    pub fn at(&self) -> DevicePtr {
        self.memory.as_ref().map_or(0, |memory| memory.host() as DevicePtr)
    }

    /// Its first values, once `queue` has done everything that was issued on it.
    pub fn read<T: Plain>(&self, queue: &mut CudaQueue, to: &mut [T]) -> Result<(), DeviceError> {
        queue.synchronize()?;
        assert!(size_of_val(to) <= self.bytes, "reading host state: length");
        if let Some(memory) = &self.memory {
            // SAFETY: inside the memory by the check above, aligned as the driver aligns; the queue is idle,
            // and any bit pattern is a value.
            unsafe { std::ptr::copy_nonoverlapping(memory.host().cast(), to.as_mut_ptr(), to.len()) };
        }
        Ok(())
    }

    /// Overwrites its first values, once `queue` has done everything that was issued on it.
    pub fn write<T: Plain>(&mut self, queue: &mut CudaQueue, from: &[T]) -> Result<(), DeviceError> {
        queue.synchronize()?;
        assert!(size_of_val(from) <= self.bytes, "writing host state: length");
        if let Some(memory) = &self.memory {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), memory.host().cast(), from.len()) };
        }
        Ok(())
    }
}

impl Drop for HostState {
    fn drop(&mut self) {
        self.context.drop_from_host(self.bytes);
    }
}

/// An event of the driver that is only waited for.
pub(super) struct Event {
    context: Arc<Context>,
    pub handle: super::ffi::Handle,
}

// SAFETY: a handle of the driver that this value alone owns; it may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that has passed.
    pub fn new(context: &Arc<Context>) -> Result<Event, DeviceError> {
        const WITHOUT_TIMING: u32 = 2;
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the place is valid.
        let status = unsafe { (context.driver.event_create)(&mut handle, WITHOUT_TIMING) };
        context.done("making an event", status)?;
        Ok(Event { context: context.clone(), handle })
    }

    /// Waits until everything that was issued before the event was recorded is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.context.bind()?;
        // SAFETY: the event is alive.
        let status = unsafe { (self.context.driver.event_wait)(self.handle) };
        self.context.done("waiting for the device", status)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`.
            unsafe { (self.context.driver.event_destroy)(self.handle) };
        }
    }
}

/// Numbers and structures of numbers without padding.
///
/// # Safety
/// Any bit pattern is a value and there are no padding bytes.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: plain numbers.
unsafe impl Plain for [u32; 2] {}
// SAFETY: plain numbers.
unsafe impl Plain for [u32; 4] {}
// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u64 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: plain numbers.
unsafe impl Plain for f64 {}
