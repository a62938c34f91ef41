//! A queue: a stream and everything that operations on it need, used by one owner at a time.
//!
//! Operations run in order on the stream. One that fails cannot tell its caller (operations return nothing),
//! so the first error is kept and comes out where results are read. What the operations are is in
//! [`super::ops`].
//!
//! Some kernels have blocks that wait for each other, and so need all of them resident
//! (`Context::blocks_at_once`). That counts on the whole device: two queues of one device must not run such
//! kernels (GEMMs, decode attention) at the same time, or each may hold SMs that the other waits for. Whoever
//! has two of them synchronizes one before using the other.

use super::batch::Bounds;
use super::context::{Context, STREAM_NON_BLOCKING};
use super::device::Cuda;
use super::ffi::{DevicePtr, Handle, Status};
use super::gemm;
use super::launch::TensorMaps;
use super::lt::Lt;
use super::memory::{Buffer, Pinned, Plain};
use super::pending::Landing;
use super::replay::Graphs;
use super::staging::{ListKey, Outbox, Ring};
use super::workspace::{Mark, Workspace};
use crate::types::DeviceError;
use std::sync::Arc;

/// Bytes of the area of counters.
pub(super) const COUNTER_BYTES: usize = 64 << 10;
/// Bytes for the absmax of parts of rows.
pub(super) const ABSMAX_BYTES: usize = 4 << 20;
/// Results of at most so many bytes come through page-locked memory.
const SMALL_RESULT: usize = 1 << 20;

/// What a recorded step needs of its batches: as many tokens, positions, ... as its buffers have.
#[derive(Clone, Debug)]
pub(super) struct Needs {
    pub most: Bounds,
    /// Page sizes that the list of pages is read with.
    pub page_sizes: Vec<usize>,
}

impl Default for Needs {
    fn default() -> Self {
        let most = usize::MAX;
        let most = Bounds { token: most, sampled: most, position: most, slot: most, page: most };
        Needs { most, page_sizes: Vec::new() }
    }
}

/// A stream of one device with its workspace, staging and recorded steps.
pub struct CudaQueue {
    device: Arc<Cuda>,
    pub(super) context: Arc<Context>,
    pub(super) stream: Handle,
    workspace: Workspace,
    /// Zeros, for counters that kernels leave at zero again: [`COUNTER_BYTES`].
    counters: Buffer,
    /// Words that the blocks of a kernel publish for each other: EMPTY (all bits set), and left so by every
    /// kernel. First [`ABSMAX_BYTES`] for absmax, then the partial sums of GEMMs.
    words: Buffer,
    ring: Ring,
    outboxes: [Outbox; 2],
    next_outbox: usize,
    /// Page-locked memory for small results.
    results: Option<Pinned>,
    /// Page-locked memory for sampled tokens that nobody waits for.
    pub(super) landings: Vec<Landing>,
    pub(super) graphs: Graphs,
    /// While a step is recorded: what it needs.
    pub(super) recording: Option<Needs>,
    pub(super) maps: TensorMaps,
    /// cuBLASLt, once it has been looked for, where the machine has it.
    lt: Option<Option<Lt>>,
    error: Option<DeviceError>,
}

// SAFETY: the raw pointers are handles of the driver and page-locked memory that this queue alone owns; the
// driver takes them from any thread in which the context is current, which every call to it sees to. A queue
// is not `Sync`.
unsafe impl Send for CudaQueue {}

impl CudaQueue {
    /// A new stream on a device.
    pub(super) fn new(device: &Arc<Cuda>) -> Result<CudaQueue, DeviceError> {
        let context = device.context().clone();
        let counters = Buffer::zeros(&context, COUNTER_BYTES, "counters")?;
        let words = ABSMAX_BYTES + gemm::partial_bytes(&context);
        let words = Buffer::filled(&context, words, 0xff, "words between blocks")?;
        context.bind()?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the place is valid.
        let status = unsafe { (context.driver.stream_create)(&mut stream, STREAM_NON_BLOCKING) };
        context.done("making a stream", status)?;
        Ok(CudaQueue {
            device: device.clone(),
            context,
            stream,
            workspace: Workspace::default(),
            counters,
            words,
            ring: Ring::default(),
            outboxes: Default::default(),
            next_outbox: 0,
            results: None,
            landings: Vec::new(),
            graphs: Graphs::default(),
            recording: None,
            maps: TensorMaps::default(),
            lt: None,
            error: None,
        })
    }

    pub(super) fn owner(&self) -> &Arc<Cuda> {
        &self.device
    }

    /// Keeps the first error for the next reading of results.
    pub(super) fn keep(&mut self, result: Result<(), DeviceError>) {
        if let Err(error) = result {
            self.error.get_or_insert(error);
        }
    }

    /// Keeps an error for the next reading of results.
    pub(super) fn fail(&mut self, what: String) {
        let error = self.context.error(what);
        self.keep(Err(error));
    }

    /// Keeps an error of the driver.
    pub(super) fn check(&mut self, what: &str, status: Status) {
        if status != 0 {
            let result = self.context.done(what, status);
            self.keep(result);
        }
    }

    /// The error that was kept, if any. It stays: what was computed since is of no use.
    pub(super) fn result(&self) -> Result<(), DeviceError> {
        self.error.clone().map_or(Ok(()), Err)
    }

    /// Makes the context current in this thread.
    pub(super) fn bind(&mut self) {
        let bound = self.context.bind();
        self.keep(bound);
    }

    /// Waits until all work is done.
    pub(super) fn wait_for_all(&mut self) {
        self.bind();
        // SAFETY: the stream is alive as long as self.
        let status = unsafe { (self.context.driver.stream_wait)(self.stream) };
        self.check("waiting for the device", status);
    }

    /// The first thing of every operation: the workspace and the ring are its own from here on.
    pub(super) fn begin(&mut self) {
        // What a recorded step needs was there when it ran directly, and addresses must not change in it.
        if self.recording.is_none() {
            self.tidy();
        }
        self.workspace.rewind(Mark::default());
    }

    /// Gives memory that was too small its final size.
    pub(super) fn tidy(&mut self) {
        if self.workspace.is_fragmented() {
            // Recorded steps have addresses of the workspace.
            self.graphs.clear(&self.context.driver);
            let merged = self.workspace.merge(&self.context);
            self.keep(merged);
        }
        if self.ring.is_spent() {
            self.wait_for_all();
            self.ring.rewind();
        }
    }

    /// Memory of the workspace, good until the operation ends; its content is whatever was left there. The
    /// device's memory may be short: then the error is kept and the address is 0.
    pub(super) fn alloc(&mut self, bytes: usize) -> DevicePtr {
        if bytes == 0 {
            return 0;
        }
        if let Some(at) = self.workspace.take(bytes) {
            return at;
        }
        if self.recording.is_some() {
            self.fail("a recorded step needs more workspace than it did when it ran directly".to_string());
            return 0;
        }
        let grown = self.workspace.grow(&self.context, bytes);
        self.keep(grown);
        self.workspace.take(bytes).unwrap_or(0)
    }

    /// How much of the workspace is taken.
    pub(super) fn mark(&self) -> Mark {
        self.workspace.mark()
    }

    /// Gives back what was taken of the workspace since.
    pub(super) fn rewind(&mut self, mark: Mark) {
        self.workspace.rewind(mark);
    }

    /// Zeros for counters that kernels leave at zero again.
    pub(super) fn counters(&self) -> DevicePtr {
        self.counters.at()
    }

    /// EMPTY words for absmax between blocks, which kernels leave EMPTY again.
    pub(super) fn absmax_words(&self) -> DevicePtr {
        self.words.at()
    }

    /// EMPTY words for partial sums between blocks, which kernels leave EMPTY again.
    pub(super) fn partial_words(&self) -> DevicePtr {
        self.words.at() + ABSMAX_BYTES as u64
    }

    /// cuBLASLt, where the machine has it; lent by value, for it works on the queue.
    pub(super) fn with_lt(&mut self, run: impl FnOnce(&mut Lt, &mut CudaQueue) -> bool) -> bool {
        self.bind();
        let mut lt = self.lt.take().unwrap_or_else(|| {
            let opened = Lt::open(&self.context);
            opened.unwrap_or_else(|error| {
                self.keep(Err(error));
                None
            })
        });
        let done = lt.as_mut().is_some_and(|lt| run(lt, self));
        self.lt = Some(lt);
        done
    }

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
        self.ring.lists.insert(key, at);
        at
    }

    /// The address of a buffer of at least so many bytes; one that is too small is replaced.
    pub(super) fn area(&mut self, area: &mut Option<Buffer>, bytes: usize) -> DevicePtr {
        if area.as_ref().is_none_or(|area| area.bytes() < bytes) {
            *area = None;
            match Buffer::new(&self.context, bytes.next_power_of_two(), "rows of a batch") {
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
        if bytes == 0 {
            return;
        }
        self.bind();
        // SAFETY: the caller gives addresses of at least so many bytes.
        let status = unsafe { (self.context.driver.copy)(to, from, bytes, self.stream) };
        self.check("copying", status);
    }

    /// Sets bytes.
    pub(super) fn fill_bytes(&mut self, to: DevicePtr, byte: u8, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.bind();
        // SAFETY: the caller gives an address of at least so many bytes.
        let status = unsafe { (self.context.driver.fill8)(to, byte, bytes, self.stream) };
        self.check("clearing", status);
    }

    /// Recorded steps at hand.
    pub fn recorded_steps(&self) -> usize {
        self.graphs.len()
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        // Whatever is in flight uses the memory that goes now.
        self.wait_for_all();
        self.graphs.clear(&self.context.driver);
        // SAFETY: nothing is issued on the stream any more.
        unsafe { (self.context.driver.stream_destroy)(self.stream) };
    }
}
