//! How many bytes a rank has sent, by kind: what the cost model (`docs/scale.md`) is held against.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that this rank has sent so far: payload, once for each rank that receives it, whatever the path.
/// A broadcast counts at its root.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Tensors, each rank its piece: gradients.
    pub all_to_all: u64,
    /// Tensors, pieces of all ranks to all ranks: weights.
    pub all_gather: u64,
    /// Tensors of one rank.
    pub broadcast: u64,
    /// Bytes of the host: facts about sequences, sampled tokens, ....
    pub host: u64,
}

impl Moved {
    /// All kinds together.
    pub fn total(&self) -> u64 {
        self.all_to_all + self.all_gather + self.broadcast + self.host
    }

    /// What was sent since an earlier moment.
    pub fn since(&self, earlier: &Moved) -> Moved {
        Moved {
            all_to_all: self.all_to_all - earlier.all_to_all,
            all_gather: self.all_gather - earlier.all_gather,
            broadcast: self.broadcast - earlier.broadcast,
            host: self.host - earlier.host,
        }
    }
}

/// The counters behind [`Moved`].
#[derive(Default)]
pub(super) struct Counters {
    all_to_all: AtomicU64,
    all_gather: AtomicU64,
    broadcast: AtomicU64,
    host: AtomicU64,
}

/// A kind of exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllToAll,
    AllGather,
    Broadcast,
    Host,
}

impl Counters {
    pub fn add(&self, kind: Kind, bytes: usize) {
        let counter = match kind {
            Kind::AllToAll => &self.all_to_all,
            Kind::AllGather => &self.all_gather,
            Kind::Broadcast => &self.broadcast,
            Kind::Host => &self.host,
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub fn moved(&self) -> Moved {
        Moved {
            all_to_all: self.all_to_all.load(Ordering::Relaxed),
            all_gather: self.all_gather.load(Ordering::Relaxed),
            broadcast: self.broadcast.load(Ordering::Relaxed),
            host: self.host.load(Ordering::Relaxed),
        }
    }
}
