//! Decode steps as recorded graphs.
//!
//! A step is some hundred small launches; issuing them one by one can take longer than running them. So a step is first
//! run *dry*: launches are not issued but hashed with all their arguments, and inputs are placed in the step's area. A
//! graph recorded from a step with the same hash does exactly the same work, and is launched in its place. Nothing has
//! to be declared: a new batch size, a grown scratch area or other weights simply make another hash. A hash seen for
//! the first time is run directly, at the second time it is recorded.
//!
//! The host should keep ahead of the device, so only the part of a step that takes inputs is run dry, as long as its own hash is known
//! to belong to a recorded step.

use super::ffi::{Driver, Handle};
use super::gpu::{Gpu, Mode};
use super::kv::LastSeen;
use crate::backend::Extent;
use std::collections::{HashMap, HashSet};
use std::sync::PoisonError;

/// Graphs that are kept; beyond that all are dropped.
const MOST_GRAPHS: usize = 192;
/// Hashes that are remembered; beyond that all are forgotten.
const MOST_SEEN: usize = 1 << 14;
/// Only this thread's calls are checked while recording.
const CAPTURE_THREAD_LOCAL: i32 = 1;

/// A hash of everything a step launches: two chains of 64 bits, a few operations a word, since a step has thousands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct StepHash(u64, u64);

impl StepHash {
    /// Adds one number.
    #[inline]
    pub fn word(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.1 = (self.1 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

#[derive(Default)]
pub(super) struct Replay {
    graphs: HashMap<StepHash, Handle>,
    /// The hash of a step by that of the part that takes inputs.
    whole: HashMap<StepHash, StepHash>,
    seen: HashSet<StepHash>,
    /// Marks that the inputs of the last step have been copied.
    sent: Option<Handle>,
}

impl Replay {
    pub(super) fn release(self, driver: &Driver) {
        // SAFETY: nothing uses the handles any more.
        unsafe {
            self.graphs.values().for_each(|&graph| {
                (driver.graph_exec_destroy)(graph);
            });
            if let Some(event) = self.sent {
                (driver.event_destroy)(event);
            }
        }
    }
}

impl Gpu {
    /// Runs a step: `run` only issues operations and reads no results, and does the same every time it is called.
    pub(super) fn step(&self, of: u64, run: &mut dyn FnMut(Extent)) {
        if self.lock_state().mode != Mode::Direct {
            return run(Extent::Whole);
        }
        self.bind();
        let mut replay = self.replay.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait_for_inputs(&mut replay);
        self.grow_step();
        let (part, inputs) = self.dry(of, Extent::Inputs, run);
        let known = replay.whole.get(&part).copied().filter(|hash| replay.graphs.contains_key(hash));
        let hash = known.unwrap_or_else(|| {
            let (hash, all_inputs) = self.dry(of, Extent::Whole, run);
            if replay.whole.len() >= MOST_SEEN {
                replay.whole.clear();
            }
            // Layers that bring inputs of their own are always run dry as a whole.
            if inputs == all_inputs {
                replay.whole.insert(part, hash);
            }
            hash
        });
        self.lock_state().mode = Mode::Step;
        self.send_step();
        if let Some(event) = replay.sent {
            // SAFETY: event and stream are alive.
            let status = unsafe { (self.driver.event_record)(event, self.stream) };
            self.check("marking inputs", status);
        }
        if replay.seen.len() >= MOST_SEEN {
            replay.seen.clear();
        }
        let recorded = replay.graphs.get(&hash).copied();
        let graph = match recorded {
            Some(graph) => Some(graph),
            None if replay.seen.insert(hash) => None,
            None => self.record(&mut replay, hash, run),
        };
        match graph {
            Some(graph) => {
                // SAFETY: graph and stream are alive.
                let status = unsafe { (self.driver.graph_launch)(graph, self.stream) };
                self.check("launching a recorded step", status);
            }
            None => {
                self.begin_step();
                run(Extent::Whole);
            }
        }
        self.lock_state().mode = Mode::Direct;
        *self.last_seen() = LastSeen::default();
    }

    /// Hashes the launches of a step and places its inputs; the hash, and the bytes of the inputs.
    fn dry(&self, of: u64, extent: Extent, run: &mut dyn FnMut(Extent)) -> (StepHash, usize) {
        loop {
            self.begin_step();
            let mut state = self.lock_state();
            (state.mode, state.hash) = (Mode::Dry, StepHash::default());
            state.hash.word(of);
            drop(state);
            run(extent);
            if !self.grow_step() {
                return (self.lock_state().hash, self.step_inputs());
            }
        }
    }

    /// Records a step; `None` if that failed.
    fn record(&self, replay: &mut Replay, hash: StepHash, run: &mut dyn FnMut(Extent)) -> Option<Handle> {
        if replay.graphs.len() >= MOST_GRAPHS {
            // SAFETY: the driver keeps a graph in flight alive until it is done.
            replay.graphs.drain().for_each(|(_, graph)| unsafe {
                (self.driver.graph_exec_destroy)(graph);
            });
        }
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: nothing but launches, copies and fills on the stream happens while recording.
        unsafe {
            if (self.driver.capture_begin)(self.stream, CAPTURE_THREAD_LOCAL) != 0 {
                return None;
            }
            self.begin_step();
            run(Extent::Whole);
            let ended = (self.driver.capture_end)(self.stream, &mut graph);
            if ended != 0 || graph.is_null() {
                self.check("recording a step", ended);
                return None;
            }
            let made = (self.driver.graph_instantiate)(&mut executable, graph, 0);
            (self.driver.graph_destroy)(graph);
            if made != 0 {
                return None;
            }
        }
        replay.graphs.insert(hash, executable);
        Some(executable)
    }

    /// The host's copy of the inputs may be overwritten once the device has it.
    fn wait_for_inputs(&self, replay: &mut Replay) {
        // SAFETY: the event lives in `replay`; the flag asks for no timing.
        unsafe {
            match replay.sent {
                Some(event) => {
                    let status = (self.driver.event_wait)(event);
                    self.check("waiting for inputs", status);
                }
                None => {
                    let mut event = std::ptr::null_mut();
                    let status = (self.driver.event_create)(&mut event, 2);
                    self.check("making an event", status);
                    replay.sent = (status == 0).then_some(event);
                }
            }
        }
    }

    /// Recorded steps at hand.
    pub fn recorded_steps(&self) -> usize {
        self.replay.lock().unwrap_or_else(PoisonError::into_inner).graphs.len()
    }
}
