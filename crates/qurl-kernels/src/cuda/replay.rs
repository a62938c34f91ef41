//! Decode steps as recorded graphs.
//!
//! A step is some hundred small launches; issuing them one by one can take longer than running them. A
//! recorded graph of them is launched as one. It is found by an explicit key: whose step it is, and the shape
//! of its batch, which is all that its launches depend on ([`super::batch`]). A step of a new key is run
//! directly, at the second time it is recorded, and from then on nothing but the batch is looked at. A step
//! that cannot be recorded is always run directly.

use super::batch::{BatchShape, CudaBatch};
use super::ffi::{Driver, Handle};
use super::queue::{CudaQueue, Needs};
use crate::types::DeviceError;
use std::collections::{HashMap, HashSet};

/// Graphs that are kept; beyond that all are dropped.
const MAX_GRAPHS: usize = 192;
/// Keys that are remembered; beyond that all are forgotten.
const MAX_SEEN: usize = 1 << 14;
/// Only this thread's calls are checked while recording.
const CAPTURE_THREAD_LOCAL: i32 = 1;

/// Which step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct StepKey {
    /// Whose, as the caller says: of which operations on which buffers.
    owner: u64,
    shape: BatchShape,
}

struct Recorded {
    graph: Handle,
    needs: Needs,
}

/// Recorded steps of a queue.
#[derive(Default)]
pub(super) struct Graphs {
    recorded: HashMap<StepKey, Recorded>,
    seen: HashSet<StepKey>,
    /// Those that could not be recorded.
    refused: HashSet<StepKey>,
}

impl Graphs {
    pub fn len(&self) -> usize {
        self.recorded.len()
    }

    /// Drops all of them.
    pub fn clear(&mut self, driver: &Driver) {
        // SAFETY: the driver keeps a graph in flight alive until it is done.
        self.recorded.drain().for_each(|(_, step)| unsafe {
            (driver.graph_exec_destroy)(step.graph);
        });
    }
}

impl Needs {
    /// Panics where a batch has more than the buffers of the step: the operations would have.
    fn check(&self, batch: &CudaBatch) {
        let (have, most) = (&batch.bounds, &self.most);
        assert!(have.token <= most.token && have.sampled <= most.sampled, "recorded step: tokens");
        assert!(have.position <= most.position, "recorded step: positions");
        assert!(have.slot <= most.slot && have.page <= most.page, "recorded step: pages");
        assert!(self.page_sizes.iter().all(|&size| batch.has_pages(size)), "recorded step: list of pages");
    }
}

impl CudaQueue {
    /// [`crate::Queue::replay`]
    pub(super) fn replay_step(&mut self, owner: u64, batch: &CudaBatch, run: &mut dyn FnMut(&mut CudaQueue)) {
        // Many rows of a sequence are cut into work on the host.
        if self.recording.is_some() || !batch.shape.single {
            return run(self);
        }
        // Before the search: it may drop recorded steps.
        self.tidy();
        let key = StepKey { owner, shape: batch.shape };
        if let Some(step) = self.graphs.recorded.get(&key) {
            step.needs.check(batch);
            let graph = step.graph;
            return self.launch_graph(graph);
        }
        if self.graphs.seen.len() >= MAX_SEEN {
            self.graphs.seen.clear();
            self.graphs.refused.clear();
        }
        if self.graphs.seen.insert(key) || self.graphs.refused.contains(&key) {
            return run(self);
        }
        // While recording nothing runs, so what fails then says nothing of results.
        let error = self.error.take();
        let recorded = self.record(key, run);
        self.error = error;
        match recorded {
            Ok(graph) => self.launch_graph(graph),
            Err(_) => {
                self.graphs.refused.insert(key);
                run(self);
            }
        }
    }

    fn launch_graph(&mut self, graph: Handle) {
        self.bind();
        // SAFETY: graph and stream are alive.
        let status = unsafe { (self.context.driver.graph_launch)(graph, self.stream) };
        self.check("launching a recorded step", status);
        self.packed = false;
    }

    /// Records a step.
    fn record(&mut self, key: StepKey, run: &mut dyn FnMut(&mut CudaQueue)) -> Result<Handle, DeviceError> {
        if self.graphs.len() >= MAX_GRAPHS {
            self.graphs.clear(&self.context.driver);
        }
        self.bind();
        // SAFETY: nothing but launches, copies and fills on the stream happens while recording.
        let status = unsafe { (self.context.driver.capture_begin)(self.stream, CAPTURE_THREAD_LOCAL) };
        self.context.done("recording a step", status)?;
        self.recording = Some(Needs::default());
        run(self);
        let needs = self.recording.take().unwrap_or_default();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: recording began above; every place is valid.
        let status = unsafe { (self.context.driver.capture_end)(self.stream, &mut graph) };
        self.check("recording a step", status);
        if graph.is_null() {
            self.fail("recording a step gave nothing".to_string());
        } else {
            // Of a part of the step nothing is made.
            if self.error.is_none() {
                // SAFETY: the place is valid, the graph was recorded.
                let status = unsafe { (self.context.driver.graph_instantiate)(&mut executable, graph, 0) };
                self.check("making a graph of a step", status);
            }
            // SAFETY: nobody has the graph any more.
            unsafe { (self.context.driver.graph_destroy)(graph) };
        }
        self.result()?;
        self.graphs.recorded.insert(key, Recorded { graph: executable, needs });
        Ok(executable)
    }

    /// What an operation's buffers can take: operations assert it of their batch, and recorded ones of every
    /// later one.
    pub(super) fn need(&mut self, batch: &CudaBatch, note: impl FnOnce(&mut Needs)) {
        let mut needs = self.recording.take();
        let mut own = Needs::default();
        note(needs.as_mut().unwrap_or(&mut own));
        needs.as_ref().unwrap_or(&own).check(batch);
        self.recording = needs;
    }
}

#[cfg(test)]
mod tests {
    use super::super::context::Context;
    use super::super::counting::{self, GpuProfile};
    use super::super::device::Cuda;
    use super::super::ffi::{DevicePtr, Driver, Status};
    use crate::types::{Batch, Span, Token};
    use crate::{Device, Queue};
    use std::cell::Cell;
    use std::sync::Arc;

    /// What the driver refuses while a step is recorded: nothing, beginning, a fill, the end, the graph.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Refuses {
        Nothing,
        Begin,
        Fill,
        End,
        Graph,
    }

    thread_local! {
        static REFUSES: Cell<Refuses> = const { Cell::new(Refuses::Nothing) };
        static CAPTURING: Cell<bool> = const { Cell::new(false) };
        static FILLED: Cell<usize> = const { Cell::new(0) };
    }

    const REFUSED: Status = 900;
    type Handle = super::Handle;

    fn status(refused: bool) -> Status {
        if refused { REFUSED } else { 0 }
    }
    unsafe extern "C" fn begin(_: Handle, _: i32) -> Status {
        CAPTURING.set(REFUSES.get() != Refuses::Begin);
        status(REFUSES.get() == Refuses::Begin)
    }
    unsafe extern "C" fn fill(_: DevicePtr, _: u8, _: usize, _: Handle) -> Status {
        FILLED.set(FILLED.get() + usize::from(!CAPTURING.get()));
        status(CAPTURING.get() && REFUSES.get() == Refuses::Fill)
    }
    unsafe extern "C" fn end(_: Handle, graph: *mut Handle) -> Status {
        CAPTURING.set(false);
        let refused = matches!(REFUSES.get(), Refuses::Fill | Refuses::End);
        // SAFETY: the caller gives a valid place.
        unsafe { *graph = if refused { std::ptr::null_mut() } else { 1 as Handle } };
        status(refused)
    }
    unsafe extern "C" fn instantiate(_: *mut Handle, _: Handle, _: u64) -> Status {
        status(REFUSES.get() == Refuses::Graph)
    }

    /// A step that the driver does not record runs directly, each time, and nothing is wrong afterwards; an
    /// error that was there before stays.
    #[test]
    fn a_step_that_cannot_be_recorded_runs_directly() {
        for refuses in [Refuses::Nothing, Refuses::Begin, Refuses::Fill, Refuses::End, Refuses::Graph] {
            REFUSES.set(refuses);
            let driver = Driver {
                capture_begin: begin,
                capture_end: end,
                graph_instantiate: instantiate,
                fill8: fill,
                ..counting::driver()
            };
            let cuda = Arc::new(Cuda::of(Arc::new(Context::counting(driver, &GpuProfile::h200()))));
            let mut queue = cuda.queue().expect("a queue");
            let mut batch = cuda.batch();
            let rows = Batch {
                tokens: vec![Token::Id(0)],
                positions: vec![0],
                slots: vec![0],
                spans: vec![Span { row: 0, rows: 1, position: 0, pages: 0 }],
                pages: vec![0],
                ..Batch::default()
            };
            queue.load(&mut batch, &rows);
            let mut tensor = cuda.zeros(1).expect("a tensor");
            let (mut calls, before) = (0, FILLED.get());
            for _ in 0..5 {
                queue.replay(1, &batch, &mut |queue| {
                    queue.clear(&mut tensor, 1);
                    calls += 1;
                });
                queue.synchronize().unwrap_or_else(|error| panic!("{refuses:?}: {error}"));
            }
            let (recorded, directly) = (queue.recorded_steps(), FILLED.get() - before);
            // Once directly, once to record it, then the graph; or five times directly, and once in vain.
            let want = match refuses {
                Refuses::Nothing => (1, 1, 2),
                Refuses::Begin => (0, 5, 5),
                Refuses::Fill | Refuses::End | Refuses::Graph => (0, 5, 6),
            };
            assert_eq!((recorded, directly, calls), want, "{refuses:?}");
            queue.fail("broken before".to_string());
            queue.replay(2, &batch, &mut |queue| queue.clear(&mut tensor, 1));
            queue.replay(2, &batch, &mut |queue| queue.clear(&mut tensor, 1));
            let error = queue.synchronize().expect_err("kept").to_string();
            assert!(error.contains("broken before"), "{error}");
        }
    }
}
