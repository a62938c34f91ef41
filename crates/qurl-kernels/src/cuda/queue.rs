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
use super::memory::{Buffer, Event, Pinned};
use super::pending::Landing;
use super::replay::Graphs;
use super::staging::{Outbox, Ring};
use super::workspace::{Mark, Workspace};
use crate::types::DeviceError;
use std::sync::Arc;

/// Bytes of the area of counters.
pub(super) const COUNTER_BYTES: usize = 64 << 10;
/// Bytes for the absmax of parts of rows.
pub(super) const ABSMAX_BYTES: usize = 4 << 20;

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
    pub(super) ring: Ring,
    pub(super) outboxes: [Outbox; 2],
    pub(super) next_outbox: usize,
    /// Page-locked memory for small results.
    pub(super) results: Option<Pinned>,
    /// Page-locked memory for sampled tokens that nobody waits for.
    pub(super) landings: Vec<Landing>,
    pub(super) graphs: Graphs,
    /// While a step is recorded: what it needs.
    pub(super) recording: Option<Needs>,
    pub(super) maps: TensorMaps,
    /// Whether weights have been written since the last launch.
    pub(super) packed: bool,
    /// cuBLASLt, once it has been looked for, where the machine has it.
    lt: Option<Option<Lt>>,
    /// The end of the exchanges begun so far, where some were.
    pub(super) exchanged: Option<Event>,
    pub(super) error: Option<DeviceError>,
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
            packed: false,
            lt: None,
            exchanged: None,
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

    /// Whether an error was kept. Nothing is issued then: addresses may be 0 where memory was short, and a
    /// kernel that touches them would end the whole context, with a message that hides the first.
    pub(super) fn has_failed(&self) -> bool {
        self.error.is_some()
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
        self.workspace.begin();
    }

    /// Gives memory that was too small its final size.
    pub(super) fn tidy(&mut self) {
        if self.workspace.is_fragmented() {
            // Recorded steps have addresses of the workspace.
            self.graphs.clear(&self.context.driver);
            let merged = self.workspace.merge(&self.context, 0);
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
        let grown = match self.workspace.can_be_replaced() {
            true => {
                self.graphs.clear(&self.context.driver);
                self.workspace.merge(&self.context, bytes)
            }
            false => self.workspace.grow(&self.context, bytes),
        };
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

#[cfg(test)]
mod tests {
    use super::super::counting::GpuProfile;
    use super::*;
    use crate::types::{Batch, SampleRow, Span, Token};
    use crate::{Device, Queue};

    fn queue() -> CudaQueue {
        Arc::new(Cuda::counting_as(&GpuProfile::h200())).queue().expect("a queue")
    }

    /// One row of each sequence, at these positions.
    fn decode_step(positions: &[usize]) -> Batch {
        let mut batch = Batch::default();
        for (row, &position) in positions.iter().enumerate() {
            batch.tokens.push(Token::Sampled(row as u32));
            batch.positions.push(position as u32);
            batch.slots.push(position as u32);
            batch.spans.push(Span { row, rows: 1, position, pages: batch.pages.len() });
            batch.pages.extend(0..=(position / 16) as u32);
            batch.sampled_rows.push(row as u32);
            batch.samples.push(SampleRow::greedy());
        }
        batch
    }

    #[test]
    fn steps_of_one_shape_are_those_that_choose_the_same_kernels() {
        let mut queue = queue();
        let (mut batch, device) = (queue.device().batch(), queue.device().clone());
        let mut shape = |queue: &mut CudaQueue, rows: &Batch| {
            queue.load(&mut batch, rows);
            batch.shape
        };
        let first = shape(&mut queue, &decode_step(&[3, 40, 17]));
        assert_eq!(shape(&mut queue, &decode_step(&[60, 41, 18])), first);
        // Another number of tiles, another number of rows, another way to sample.
        assert_ne!(shape(&mut queue, &decode_step(&[64, 41, 18])), first);
        assert_ne!(shape(&mut queue, &decode_step(&[3, 40])), first);
        let mut truncated = decode_step(&[3, 40, 17]);
        truncated.samples[1] = SampleRow { temperature: 1.0, top_k: 5, ..SampleRow::greedy() };
        assert_ne!(shape(&mut queue, &truncated), first);
        // Another batch lies elsewhere.
        let mut other = device.batch();
        queue.load(&mut other, &decode_step(&[3, 40, 17]));
        assert_ne!(other.shape, first);
        queue.synchronize().expect("nothing fails");
    }

    #[test]
    #[should_panic(expected = "recorded step: positions")]
    fn a_position_beyond_the_tables_of_a_step_is_found() {
        let mut queue = queue();
        let mut batch = queue.device().batch();
        queue.load(&mut batch, &decode_step(&[3, 64]));
        queue.need(&batch, |needs| needs.most.position = 64);
    }
}
