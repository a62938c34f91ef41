//! Decode steps as recorded graphs.
//!
//! A step is some hundred small launches; issuing them one by one can take longer than running them. A
//! recorded graph of them is launched as one. It is found by an explicit key: whose step it is, and the shape
//! of its batch, which is all that its launches depend on ([`super::batch`]). A step of a new key is run
//! directly, at the second time it is recorded, and from then on nothing but the batch is looked at.

use super::batch::{BatchShape, CudaBatch};
use super::ffi::{Driver, Handle};
use super::queue::{CudaQueue, Needs};
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
        }
        if self.graphs.seen.insert(key) {
            return run(self);
        }
        match self.record(key, run) {
            Some(graph) => self.launch_graph(graph),
            None => run(self),
        }
    }

    fn launch_graph(&mut self, graph: Handle) {
        self.bind();
        // SAFETY: graph and stream are alive.
        let status = unsafe { (self.context.driver.graph_launch)(graph, self.stream) };
        self.check("launching a recorded step", status);
    }

    /// Records a step; `None` if that failed.
    fn record(&mut self, key: StepKey, run: &mut dyn FnMut(&mut CudaQueue)) -> Option<Handle> {
        if self.graphs.len() >= MAX_GRAPHS {
            self.graphs.clear(&self.context.driver);
        }
        self.bind();
        // SAFETY: nothing but launches, copies and fills on the stream happens while recording.
        if unsafe { (self.context.driver.capture_begin)(self.stream, CAPTURE_THREAD_LOCAL) } != 0 {
            return None;
        }
        self.recording = Some(Needs::default());
        run(self);
        let needs = self.recording.take().unwrap_or_default();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: recording began above; every place is valid.
        let (ended, made) = unsafe {
            let ended = (self.context.driver.capture_end)(self.stream, &mut graph);
            match ended == 0 && !graph.is_null() {
                false => (ended, -1),
                true => {
                    let made = (self.context.driver.graph_instantiate)(&mut executable, graph, 0);
                    (self.context.driver.graph_destroy)(graph);
                    (ended, made)
                }
            }
        };
        self.check("recording a step", ended);
        if made != 0 {
            return None;
        }
        self.graphs.recorded.insert(key, Recorded { graph: executable, needs });
        Some(executable)
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
