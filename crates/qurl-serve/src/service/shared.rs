//! What the worker and those who ask share: places in the queue, and what is counted.

use qurl_rollout::{EngineStats, WeightVersion};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Why a request or an order is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The queue is full.
    #[error("{waiting} sequences are in flight, and {limit} is the limit: try again later")]
    Full {
        /// In flight now.
        waiting: usize,
        /// The limit.
        limit: usize,
    },
    /// More samples at once than the server ever holds.
    #[error("n = {n} samples, of all prompts together, are more than the {limit} that may be in flight")]
    TooMany {
        /// Samples asked for.
        n: usize,
        /// The limit.
        limit: usize,
    },
    /// The engine has ended.
    #[error("the engine has ended")]
    Ended,
}

/// Bounds of a histogram's buckets in seconds.
const BOUNDS: [f64; 16] =
    [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];

/// How often times fell into which range.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Histogram {
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    pub(crate) fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.counts[BOUNDS.partition_point(|bound| *bound < seconds)] += 1;
        self.sum += seconds;
    }

    /// Bounds with the number of times up to each, the last without a bound; and the sum of all.
    pub fn cumulative(&self) -> (Vec<(Option<f64>, u64)>, f64) {
        let bounds = BOUNDS.iter().copied().map(Some).chain([None]);
        let mut sum = 0;
        let counts = self.counts.iter().map(|count| {
            sum += count;
            sum
        });
        (bounds.zip(counts).collect(), self.sum)
    }
}

/// What the engine is doing, as of its last step.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Whether it can compute requests.
    pub healthy: bool,
    /// Whether it was paused.
    pub paused: bool,
    /// The weights in use.
    pub weights: WeightVersion,
    /// Sequences that hold pages.
    pub running: usize,
    /// Sequences in flight that do not.
    pub waiting: usize,
    /// Pages for keys and values, and how many of them are held; tokens of a page.
    pub pages: usize,
    /// Pages that somebody holds, or that are kept for requests to come.
    pub pages_used: usize,
    /// Pages that requests in flight hold, as of a moment ago.
    pub pages_in_use: usize,
    /// What the engine has counted.
    pub stats: EngineStats,
    /// Requests that ended, failed, were aborted, and whose clients left.
    pub done: u64,
    /// Requests that could not be computed.
    pub failed: u64,
    /// Requests that were aborted.
    pub aborted: u64,
    /// Requests whose clients left.
    pub gone: u64,
    /// Requests that were refused because the queue was full.
    pub refused: u64,
    /// Sequences that a stop token or a stop string ended.
    pub stopped: u64,
    /// Sequences that were as long as they may be.
    pub cut: u64,
    /// Tokens of prompts of the requests that were taken up.
    pub prompt_tokens: u64,
    /// From arrival to the first token.
    pub first_token: Histogram,
    /// Between tokens of a sample.
    pub between_tokens: Histogram,
    /// From arrival to the end.
    pub whole: Histogram,
}

/// What both sides see.
pub(super) struct Shared {
    in_flight: AtomicUsize,
    limit: usize,
    refused: AtomicU64,
    now: Mutex<Snapshot>,
}

impl Shared {
    pub fn new(running: usize, waiting: usize) -> Shared {
        let now = Mutex::new(Snapshot { healthy: true, ..Snapshot::default() });
        let limit = running.saturating_add(waiting);
        Shared { in_flight: AtomicUsize::new(0), limit, refused: AtomicU64::new(0), now }
    }

    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker's word.
    pub fn publish(&self, now: &Snapshot) {
        self.lock().clone_from(now);
    }

    /// The worker's last word; what waits in the channel counts as waiting.
    pub fn snapshot(&self) -> Snapshot {
        let now = self.lock().clone();
        let waiting = self.in_flight.load(Ordering::Relaxed).saturating_sub(now.running);
        Snapshot { waiting, refused: self.refused.load(Ordering::Relaxed), ..now }
    }

    /// Whether there could be places for so many sequences.
    pub fn could_hold(&self, n: usize) -> Result<(), Refused> {
        match self.limit {
            limit if n > limit => Err(Refused::TooMany { n, limit }),
            _ => Ok(()),
        }
    }

    /// Takes places for so many sequences.
    pub fn enter(self: Arc<Self>, n: usize) -> Result<Place, Refused> {
        self.could_hold(n)?;
        let limit = self.limit;
        let enter = |waiting: usize| waiting.checked_add(n).filter(|together| *together <= limit);
        match self.in_flight.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enter) {
            Ok(_) => Ok(Place { shared: self, n }),
            Err(waiting) => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                Err(Refused::Full { waiting, limit })
            }
        }
    }
}

/// Places in the queue; given back when dropped.
pub(super) struct Place {
    shared: Arc<Shared>,
    n: usize,
}

impl Place {
    /// Some of them.
    pub fn split(&mut self, n: usize) -> Place {
        let n = n.min(self.n);
        self.n -= n;
        Place { shared: self.shared.clone(), n }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.in_flight.fetch_sub(self.n, Ordering::Relaxed);
    }
}
