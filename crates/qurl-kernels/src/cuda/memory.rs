//! Device memory: owned buffers, scratch areas that are used again, and the way of small inputs to the device.
//!
//! Inputs that live on the host (token ids, positions, page numbers) are *staged*: copied to page-locked memory and from
//! there to a device area of the same layout. Inside a step ([`super::replay`]) all of them go over in one copy, at
//! places that stay the same from step to step, so that a recorded step finds them.

use super::ffi::{DevicePtr, Driver, Status};
use super::gemm;
use super::gpu::{Gpu, Mode};
use super::kv::LastSeen;
use crate::DeviceError;
use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

/// Out of memory, as the driver says it.
const OUT_OF_MEMORY: Status = 2;
/// Bytes of the ring for inputs outside of steps, and of the area for inputs of a step, at first.
const STAGING_BYTES: usize = 16 << 20;
const ALIGN: usize = 256;
/// Bytes of the area of counters.
pub(super) const COUNTER_BYTES: usize = 64 << 10;
/// Bytes for the largest numbers of parts of rows.
pub(super) const MAXIMA_BYTES: usize = 4 << 20;
/// Staged inputs that are compared with a new one.
const REMEMBERED: usize = 8;

/// Memory on the device, freed when dropped.
pub struct Buffer {
    gpu: Arc<Gpu>,
    at: DevicePtr,
    bytes: usize,
}

impl Buffer {
    /// Takes memory; its content is whatever was there.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize, what: &str) -> Result<Buffer, DeviceError> {
        let at = gpu.allocate(bytes, what)?;
        Ok(Buffer { gpu: gpu.clone(), at, bytes })
    }

    /// Takes memory of zeros.
    pub fn zeros(gpu: &Arc<Gpu>, bytes: usize, what: &str) -> Result<Buffer, DeviceError> {
        let buffer = Buffer::new(gpu, bytes, what)?;
        gpu.fill(buffer.at, 0, bytes);
        Ok(buffer)
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
        self.gpu.bind();
        // SAFETY: allocated in `new`; the driver waits for work that still uses it.
        unsafe { (self.gpu.driver.free)(self.at) };
        self.gpu.allocated.sub(self.bytes);
    }
}

/// Bytes that this process has allocated on the device, and the most it ever had.
#[derive(Default)]
pub(super) struct Allocated {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Allocated {
    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn sub(&self, bytes: usize) {
        self.now.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The most there ever was.
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }
}

/// What a scratch area is for: one per use inside an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// The left operand of a product in the product's number format.
    Left,
    /// Its scales.
    LeftScales,
    /// The largest magnitudes of its rows.
    Largest,
    /// A second operand.
    Right,
    /// A gradient that several products read, while others of their operands come and go.
    Gradient,
    /// Numbers before they are packed.
    Codes,
    /// Workspace of products.
    Product,
    /// Logits and their gradients.
    Logits,
    /// Sums of parts of a row, a column or an array.
    Partials,
    /// Workspace of attention.
    Attention,
    /// Keys to be sorted.
    Sorted,
    /// Counters between the blocks of a kernel.
    Counters,
    /// Words on their way between the blocks of a kernel.
    Words,
    /// Small results on their way to the host.
    Results,
}

const SLOTS: usize = Slot::Results as usize + 1;

#[derive(Clone, Copy)]
struct Area {
    at: DevicePtr,
    bytes: usize,
}

/// Page-locked memory and its twin on the device.
struct Staging {
    host: *mut u8,
    device: DevicePtr,
    bytes: usize,
    used: usize,
    /// The last inputs: offset and length.
    recent: Vec<(usize, usize)>,
}

impl Default for Staging {
    fn default() -> Self {
        Staging { host: std::ptr::null_mut(), device: 0, bytes: 0, used: 0, recent: Vec::new() }
    }
}

/// Scratch and staging of a device.
#[derive(Default)]
pub(super) struct Memory {
    scratch: [Option<Area>; SLOTS],
    ring: Staging,
    step: Staging,
    /// Areas that were too small.
    retired: Vec<Staging>,
    /// A step did not fit into its area.
    pub step_overflow: bool,
    /// Page-locked memory for results.
    results: Option<(usize, *mut u8)>,
}

impl Memory {
    pub(super) fn release(self, driver: &Driver) {
        // SAFETY: allocated by the same driver; the device is idle.
        unsafe {
            for area in self.scratch.into_iter().flatten() {
                (driver.free)(area.at);
            }
            for staging in self.retired.into_iter().chain([self.ring, self.step]) {
                if staging.bytes > 0 {
                    (driver.host_free)(staging.host.cast());
                    (driver.free)(staging.device);
                }
            }
            if let Some((_, host)) = self.results {
                (driver.host_free)(host.cast());
            }
        }
    }
}

impl Gpu {
    fn lock_memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<DevicePtr, DeviceError> {
        self.bind();
        let mut at = 0;
        // SAFETY: the place is valid.
        match unsafe { (self.driver.alloc)(&mut at, bytes.max(ALIGN)) } {
            0 => {
                self.allocated.add(bytes);
                Ok(at)
            }
            OUT_OF_MEMORY => {
                let (free, total) = self.memory_info();
                let device = format!("{} ({} of {} MiB free)", self.name(), free >> 20, total >> 20);
                Err(DeviceError::OutOfMemory { device, need: bytes, what: what.to_string() })
            }
            status => {
                self.check("taking memory", status);
                self.result().map(|()| at)
            }
        }
    }

    /// An area of at least so many bytes, the same from call to call; its content is whatever was left there. The
    /// device's memory may be short: then the error is kept and the address is 0.
    pub(super) fn scratch(&self, slot: Slot, bytes: usize) -> DevicePtr {
        let mut memory = self.lock_memory();
        let area = &mut memory.scratch[slot as usize];
        if let Some(area) = area.filter(|area| area.bytes >= bytes) {
            return area.at;
        }
        self.bind();
        if let Some(old) = area.take() {
            // SAFETY: allocated below; the driver waits for work that still uses it.
            unsafe { (self.driver.free)(old.at) };
            self.allocated.sub(old.bytes);
        }
        // Some room to grow, so that slowly growing requests do not free and allocate each time.
        let roomy = (bytes + bytes / 8).next_multiple_of(1 << 20);
        match self.allocate(roomy, &format!("scratch ({slot:?})")) {
            Ok(at) => {
                *area = Some(Area { at, bytes: roomy });
                at
            }
            Err(error) => {
                self.lock_state().keep(error);
                0
            }
        }
    }

    /// An area of zeros for counters that kernels leave at zero again, [`COUNTER_BYTES`] long.
    pub(super) fn counters(&self) -> DevicePtr {
        self.prepared(Slot::Counters, COUNTER_BYTES, 0)
    }

    /// An area for words that the blocks of a kernel leave for each other: EMPTY (all bits set), and left so by every
    /// kernel. First [`MAXIMA_BYTES`] for largest numbers, then the partial sums of products.
    pub(super) fn words(&self) -> DevicePtr {
        self.prepared(Slot::Words, MAXIMA_BYTES + gemm::partial_bytes(self), 0xff)
    }

    /// An area that is filled once, and that only kernels use which leave it so.
    fn prepared(&self, slot: Slot, bytes: usize, byte: u8) -> DevicePtr {
        let known = self.lock_memory().scratch[slot as usize];
        known.map_or_else(
            || {
                let at = self.scratch(slot, bytes);
                self.bind();
                // SAFETY: the area was just taken; in a recorded step the fill must not be repeated, so it is not recorded.
                let status = unsafe { (self.driver.fill_now)(at, byte, bytes) };
                self.check("preparing memory", status);
                at
            },
            |area| area.at,
        )
    }

    /// Brings an input to the device; the address is good until the current operation (or step) has been issued.
    pub(super) fn stage<T: Plain>(&self, values: &[T]) -> DevicePtr {
        // SAFETY: plain numbers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
        let mode = self.lock_state().mode;
        self.bind();
        let mut memory = self.lock_memory();
        match mode {
            Mode::Direct => self.stage_now(&mut memory, bytes),
            Mode::Dry | Mode::Step => match memory.step.place(bytes) {
                Some(at) => at,
                None => {
                    memory.step_overflow = true;
                    0
                }
            },
        }
    }

    fn stage_now(&self, memory: &mut Memory, bytes: &[u8]) -> DevicePtr {
        let ring = &memory.ring;
        if let Some(at) = ring.find(bytes) {
            return ring.device + at as u64;
        }
        // Sixteen times as long as its longest input: the inputs of one operation never meet on the ring.
        if ring.bytes < 16 * bytes.len() + ALIGN {
            self.grow(memory, (16 * bytes.len() + ALIGN).next_power_of_two().max(STAGING_BYTES));
        }
        let ring = &mut memory.ring;
        if ring.bytes < 16 * bytes.len() + ALIGN {
            return 0; // The error is kept.
        }
        if ring.used + bytes.len() > ring.bytes {
            // Once around: everything sent before must have arrived.
            // SAFETY: the stream is alive.
            let status = unsafe { (self.driver.stream_wait)(self.stream) };
            self.check("waiting for the device", status);
            ring.used = 0;
            ring.recent.clear();
        }
        let at = ring.used;
        ring.put(at, bytes);
        ring.used = (at + bytes.len()).next_multiple_of(ALIGN);
        // SAFETY: both areas have room; the host's part is not written again before the ring has gone around.
        let status = unsafe {
            (self.driver.copy_in)(ring.device + at as u64, ring.host.add(at).cast(), bytes.len(), self.stream)
        };
        self.check("sending inputs", status);
        ring.device + at as u64
    }

    /// Begins the inputs of a step.
    pub(super) fn begin_step(&self) {
        let mut memory = self.lock_memory();
        memory.step.used = 0;
        memory.step.recent.clear();
        drop(memory);
        *self.last_seen() = LastSeen::default();
    }

    /// Bytes of the inputs that the step has so far.
    pub(super) fn step_inputs(&self) -> usize {
        self.lock_memory().step.used
    }

    /// Makes room for the inputs of a step, or twice the room after an overflow; whether there was need.
    pub(super) fn grow_step(&self) -> bool {
        let mut memory = self.lock_memory();
        let overflow = std::mem::take(&mut memory.step_overflow);
        if overflow || memory.step.bytes == 0 {
            let bytes = (2 * memory.step.bytes).max(STAGING_BYTES);
            let old = std::mem::take(&mut memory.step);
            memory.retired.push(old);
            memory.step = self.new_staging(bytes);
        }
        overflow
    }

    /// Sends all inputs of a step.
    pub(super) fn send_step(&self) {
        let memory = self.lock_memory();
        let step = &memory.step;
        if step.used > 0 {
            // SAFETY: both areas have room; the host's part is not written before the copy is seen to be done.
            let status =
                unsafe { (self.driver.copy_in)(step.device, step.host.cast(), step.used, self.stream) };
            self.check("sending inputs", status);
        }
    }

    /// A larger ring. The old one stays: addresses in it may be in use by the operation at hand.
    fn grow(&self, memory: &mut Memory, bytes: usize) {
        let old = std::mem::replace(&mut memory.ring, self.new_staging(bytes));
        memory.retired.push(old);
    }

    fn new_staging(&self, bytes: usize) -> Staging {
        let mut host: *mut c_void = std::ptr::null_mut();
        // SAFETY: the place is valid.
        let status = unsafe { (self.driver.host_alloc)(&mut host, bytes, 0) };
        self.check("taking page-locked memory", status);
        match self.allocate(bytes, "inputs") {
            Ok(device) if status == 0 => Staging { host: host.cast(), device, bytes, ..Staging::default() },
            Ok(_) => Staging::default(),
            Err(error) => {
                self.lock_state().keep(error);
                Staging::default()
            }
        }
    }

    /// Reads from the device into `values`.
    pub(super) fn read<T: Plain>(&self, from: DevicePtr, values: &mut [T]) -> Result<(), DeviceError> {
        if self.lock_state().mode != Mode::Direct {
            self.fail("results were read inside of a step".to_string());
            return self.result();
        }
        self.bind();
        let bytes = size_of_val(values);
        let mut memory = self.lock_memory();
        let small = bytes <= 1 << 20;
        let target: *mut u8 = match small {
            true => self.result_memory(&mut memory, bytes)?,
            false => values.as_mut_ptr().cast(),
        };
        // SAFETY: the target has room, and the copy is waited for before anyone looks at it.
        unsafe {
            let status = (self.driver.copy_out)(target.cast(), from, bytes, self.stream);
            self.check("reading results", status);
            let status = (self.driver.stream_wait)(self.stream);
            self.check("waiting for the device", status);
            self.result()?;
            if small {
                std::ptr::copy_nonoverlapping(target, values.as_mut_ptr().cast::<u8>(), bytes);
            }
        }
        Ok(())
    }

    /// Page-locked memory: copies into it need no detour.
    fn result_memory(&self, memory: &mut Memory, bytes: usize) -> Result<*mut u8, DeviceError> {
        if let Some((_, host)) = memory.results.filter(|(have, _)| *have >= bytes) {
            return Ok(host);
        }
        let mut host: *mut c_void = std::ptr::null_mut();
        let size = bytes.next_power_of_two().max(1 << 16);
        // SAFETY: the old memory is not in use: reads wait for their copies.
        unsafe {
            if let Some((_, old)) = memory.results.take() {
                (self.driver.host_free)(old.cast());
            }
            let status = (self.driver.host_alloc)(&mut host, size, 0);
            self.check("taking page-locked memory", status);
        }
        self.result()?;
        memory.results = Some((size, host.cast()));
        Ok(host.cast())
    }

    /// Writes values to the device, any number of them.
    pub(super) fn write_values<T: Plain>(&self, to: DevicePtr, values: &[T]) {
        if values.is_empty() {
            return;
        }
        self.bind();
        // SAFETY: the caller gives an address with room; the values must not change before they have been read.
        unsafe {
            let status = (self.driver.copy_in)(to, values.as_ptr().cast(), size_of_val(values), self.stream);
            self.check("sending values", status);
            let status = (self.driver.stream_wait)(self.stream);
            self.check("waiting for the device", status);
        }
    }
}

impl super::gpu::State {
    /// Keeps the first error.
    pub(super) fn keep(&mut self, error: DeviceError) {
        self.error.get_or_insert(error);
    }
}

impl Staging {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        // SAFETY: the caller has made sure of the room.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.host.add(at), bytes.len()) };
        if self.recent.len() == REMEMBERED {
            self.recent.remove(0);
        }
        self.recent.push((at, bytes.len()));
    }

    /// The same bytes among the last inputs: layers ask for the same positions again and again.
    fn find(&self, bytes: &[u8]) -> Option<usize> {
        let same = |&&(at, len): &&(usize, usize)| {
            // SAFETY: remembered inputs lie inside the area.
            len == bytes.len() && unsafe { std::slice::from_raw_parts(self.host.add(at), len) } == bytes
        };
        self.recent.iter().rev().find(same).map(|&(at, _)| at)
    }

    /// Places an input of a step. Rooms are powers of two, so that growing inputs seldom move the others.
    fn place(&mut self, bytes: &[u8]) -> Option<DevicePtr> {
        if let Some(at) = self.find(bytes) {
            return Some(self.device + at as u64);
        }
        let room = bytes.len().next_power_of_two().max(ALIGN);
        if self.used + room > self.bytes {
            return None;
        }
        let at = self.used;
        self.put(at, bytes);
        self.used += room;
        Some(self.device + at as u64)
    }
}

/// Numbers and structures of numbers without padding.
///
/// # Safety
/// Any bit pattern is a value and there are no padding bytes.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: plain numbers.
unsafe impl Plain for [u32; 4] {}
// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u64 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}
// SAFETY: plain numbers.
unsafe impl Plain for f64 {}
