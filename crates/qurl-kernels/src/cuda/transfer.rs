//! What goes between the host and the device on a queue, and copies inside of the device.

use super::ffi::DevicePtr;
use super::memory::{Buffer, Pinned, Plain};
use super::queue::CudaQueue;
use super::staging::ListKey;
use crate::types::DeviceError;

/// Results of at most so many bytes come through page-locked memory.
const SMALL_RESULT: usize = 1 << 20;
/// Bytes of the rows of a batch at least: recorded steps know where they are.
const MIN_AREA: usize = 1 << 16;

impl CudaQueue {
    /// Whether an operation may take inputs from the host now, or give results to it.
    fn talks_to_host(&mut self, what: &str) -> bool {
        if self.recording.is_some() {
            self.fail(format!("{what} inside of a recorded step"));
        }
        self.recording.is_none()
    }

    /// Brings an input to the device; the address is good until the operation ends.
    pub(super) fn stage<T: Plain>(&mut self, values: &[T]) -> DevicePtr {
        let bytes = size_of_val(values);
        if bytes == 0 || !self.talks_to_host("inputs from the host") {
            return 0;
        }
        self.bind();
        let (to, host) = match self.ring.place(&self.context, bytes) {
            Ok(place) => place,
            Err(error) => {
                self.keep(Err(error));
                return 0;
            }
        };
        // SAFETY: both places have the bytes; plain numbers without padding. The host's is not written again
        // before the ring begins anew, which waits for the stream.
        let status = unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), host, bytes);
            (self.context.driver.copy_in)(to, host.cast(), bytes, self.stream)
        };
        self.check("sending inputs", status);
        to
    }

    /// A list of work that other layers may have brought to the device already.
    pub(super) fn stage_list(&mut self, key: ListKey, make: impl FnOnce() -> Vec<u32>) -> DevicePtr {
        if let Some(&at) = self.ring.lists.get(&key) {
            return at;
        }
        let at = self.stage(&make());
        // Nowhere, where it was refused.
        if at != 0 {
            self.ring.lists.insert(key, at);
        }
        at
    }

    /// The address of a buffer of at least so many bytes; one that is too small is replaced.
    pub(super) fn area(&mut self, area: &mut Option<Buffer>, bytes: usize) -> DevicePtr {
        if area.as_ref().is_none_or(|area| area.bytes() < bytes) {
            *area = None;
            match Buffer::new(&self.context, bytes.next_power_of_two().max(MIN_AREA), "rows of a batch") {
                Ok(buffer) => *area = Some(buffer),
                Err(error) => self.keep(Err(error)),
            }
        }
        area.as_ref().map_or(0, Buffer::at)
    }

    /// Sends bytes that `fill` writes, without waiting for earlier ones.
    pub(super) fn send(&mut self, to: DevicePtr, bytes: usize, fill: impl FnOnce(&mut Pinned)) {
        if bytes == 0 || to == 0 || !self.talks_to_host("rows of a batch") {
            return;
        }
        self.bind();
        self.next_outbox = (self.next_outbox + 1) % self.outboxes.len();
        let (host, sent) = match self.outboxes[self.next_outbox].free(&self.context, bytes) {
            Ok(parts) => parts,
            Err(error) => return self.keep(Err(error)),
        };
        fill(host);
        let (host, sent, driver) = (host.host(), sent.handle, &self.context.driver);
        // SAFETY: both places have the bytes; the host's is not written before the event has passed.
        let (copied, marked) = unsafe {
            let copied = (driver.copy_in)(to, host.cast(), bytes, self.stream);
            (copied, (driver.event_record)(sent, self.stream))
        };
        self.check("sending rows", copied);
        self.check("marking rows", marked);
    }

    /// Writes values to the device, any number of them.
    pub(super) fn write_values<T: Plain>(&mut self, to: DevicePtr, values: &[T]) {
        if values.is_empty() || !self.talks_to_host("values from the host") {
            return;
        }
        self.bind();
        // SAFETY: the caller gives an address with place for them; the values are borrowed until they have
        // been read.
        let status = unsafe {
            (self.context.driver.copy_in)(to, values.as_ptr().cast(), size_of_val(values), self.stream)
        };
        self.check("sending values", status);
        self.wait_for_all();
    }

    /// Reads from the device into `values`.
    pub(super) fn read_values<T: Plain>(
        &mut self,
        from: DevicePtr,
        values: &mut [T],
    ) -> Result<(), DeviceError> {
        let bytes = size_of_val(values);
        if !self.talks_to_host("results") || bytes == 0 {
            return self.result();
        }
        self.bind();
        let small = bytes <= SMALL_RESULT;
        let target: *mut u8 = match small {
            true => self.result_memory(bytes)?,
            false => values.as_mut_ptr().cast(),
        };
        // SAFETY: the target has the bytes, and the copy is waited for before anyone looks at it.
        let status = unsafe { (self.context.driver.copy_out)(target.cast(), from, bytes, self.stream) };
        self.check("reading results", status);
        self.wait_for_all();
        self.result()?;
        if small {
            // SAFETY: so many bytes were copied there, and any bit pattern is a value.
            unsafe { std::ptr::copy_nonoverlapping(target, values.as_mut_ptr().cast::<u8>(), bytes) };
        }
        Ok(())
    }

    /// Page-locked memory: copies into it need no detour.
    fn result_memory(&mut self, bytes: usize) -> Result<*mut u8, DeviceError> {
        let memory = match self.results.take().filter(|memory| memory.bytes() >= bytes) {
            Some(memory) => memory,
            None => Pinned::new(&self.context, bytes.next_power_of_two().max(1 << 16))?,
        };
        Ok(self.results.insert(memory).host())
    }

    /// A copy inside the device's memory.
    pub(super) fn copy_bytes(&mut self, from: DevicePtr, to: DevicePtr, bytes: usize) {
        if bytes == 0 || self.has_failed() {
            return;
        }
        self.bind();
        // SAFETY: the caller gives addresses of at least so many bytes.
        let status = unsafe { (self.context.driver.copy)(to, from, bytes, self.stream) };
        self.check("copying", status);
    }

    /// Sets bytes.
    pub(super) fn fill_bytes(&mut self, to: DevicePtr, byte: u8, bytes: usize) {
        if bytes == 0 || self.has_failed() {
            return;
        }
        self.bind();
        // SAFETY: the caller gives an address of at least so many bytes.
        let status = unsafe { (self.context.driver.fill8)(to, byte, bytes, self.stream) };
        self.check("clearing", status);
    }
}

#[cfg(test)]
mod tests {
    use super::super::context::Context;
    use super::super::counting::{self, GpuProfile};
    use super::super::device::Cuda;
    use super::super::ffi::{Driver, Handle, LaunchConfig, Status};
    use super::super::kernels;
    use super::super::launch::Launch;
    use super::super::queue::Needs;
    use super::super::staging::ListKind;
    use super::*;
    use crate::{Device, Queue};
    use std::ffi::c_void;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn queue() -> CudaQueue {
        Arc::new(Cuda::counting_as(&GpuProfile::h200())).queue().expect("a queue")
    }

    #[test]
    fn a_recorded_step_takes_nothing_from_the_host() {
        let mut queue = queue();
        assert!(queue.stage(&[1u32, 2]) != 0);
        queue.recording = Some(Needs::default());
        assert_eq!(queue.stage(&[1u32, 2]), 0);
        let error = queue.synchronize().expect_err("kept").to_string();
        assert!(error.contains("inputs from the host inside of a recorded step"), "{error}");
    }

    #[test]
    fn lists_of_work_are_staged_once_for_a_load() {
        let mut queue = queue();
        let key = |generation| ListKey { generation, kind: ListKind::Forward { group: 4 } };
        let first = queue.stage_list(key(1), || vec![0; 64]);
        assert_eq!(queue.stage_list(key(1), || panic!("it is there")), first);
        let other = queue.stage_list(key(2), || vec![0; 64]);
        assert!(other >= first + 4 * 64);
    }

    /// A kernel at address 0 would end the context, and hide that memory was short.
    #[test]
    fn nothing_is_issued_after_an_error() {
        static ISSUED: AtomicUsize = AtomicUsize::new(0);
        unsafe extern "C" fn copy(_: DevicePtr, _: DevicePtr, _: usize, _: Handle) -> Status {
            ISSUED.fetch_add(1, Ordering::Relaxed);
            0
        }
        unsafe extern "C" fn fill8(_: DevicePtr, _: u8, _: usize, _: Handle) -> Status {
            ISSUED.fetch_add(1, Ordering::Relaxed);
            0
        }
        unsafe extern "C" fn launch(
            _: *const LaunchConfig,
            _: Handle,
            _: *mut *mut c_void,
            _: *mut *mut c_void,
        ) -> Status {
            ISSUED.fetch_add(1, Ordering::Relaxed);
            0
        }
        let driver = Driver { copy, fill8, launch, ..counting::driver() };
        let context = Context::counting(driver, &GpuProfile::h200());
        let mut queue = Arc::new(Cuda::of(Arc::new(context))).queue().expect("a queue");
        let issue = |queue: &mut CudaQueue| {
            let before = ISSUED.load(Ordering::Relaxed);
            queue.copy_bytes(1, 2, 3);
            queue.fill_bytes(1, 0, 2);
            let args = kernels::SquarePartials { x: 1, count: 2, per: 3, partials: 4 };
            queue.launch(kernels::square_partials, Launch::blocks(1, 256), args);
            ISSUED.load(Ordering::Relaxed) - before
        };
        assert_eq!(issue(&mut queue), 3);
        queue.fail("memory is short".to_string());
        assert_eq!(issue(&mut queue), 0);
    }

    /// Inside of an operation inputs never overlap, however large: the ring begins anew between two
    /// operations only.
    #[test]
    fn inputs_of_an_operation_do_not_overlap() {
        let mut queue = queue();
        let large = vec![0u8; 5 << 20];
        for _ in 0..4 {
            queue.begin();
            let at: Vec<DevicePtr> = (0..6).map(|_| queue.stage(&large)).collect();
            for (i, a) in at.iter().enumerate() {
                assert!(at[..i].iter().all(|b| a.abs_diff(*b) >= large.len() as u64), "{at:?}");
            }
        }
    }
}
