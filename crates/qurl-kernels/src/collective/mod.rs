//! Many processes: a [`Collective`] moves bytes between the ranks of a run, and never adds.
//!
//! Sums are the trainer's own, in a fixed order, so that the bits of a run do not depend on how many ranks it
//! has or on what moves the bytes. Here is who sends what to whom ([`Collective`], over the one primitive of
//! a [`transport`]); tensors are exchanged by a queue of their device
//! ([`Queue::all_to_all`](crate::Queue::all_to_all) and its neighbours).
//!
//! Every rank calls the same exchanges in the same order, with sizes that fit each other.
//!
//! ```
//! use qurl_kernels::Collective;
//!
//! let ranks = Collective::threads(3).into_iter().map(|ranks| {
//!     std::thread::spawn(move || ranks.all_gather_bytes(&vec![7; ranks.rank()]))
//! });
//! for gathered in ranks.collect::<Vec<_>>() {
//!     assert_eq!(gathered.join().expect("a rank that ends")?, [vec![], vec![7], vec![7, 7]]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod agree;
mod end;
mod error;
pub mod launch;
mod moved;
mod mpi;
mod mpi_library;
pub(crate) mod nccl_library;
mod open;
mod pieces;
mod rendezvous;
mod threads;
pub(crate) mod transport;
mod watch;

pub use error::CollectiveError;
pub use launch::{Launch, LaunchError, Launcher};
pub use moved::Moved;
pub use open::Join;
pub use rendezvous::Address;
pub use watch::{Limits, LimitsError};

pub(crate) use moved::Kind;
pub(crate) use pieces::{Pieces, bytes_of, bytes_of_mut};

use crate::cuda::nccl::Clique;
use moved::Counters;
use threads::Threads;
use transport::{Receive, Send, Transport};
use watch::Watch;

/// One rank's end of what connects the ranks of a run.
pub struct Collective {
    rank: usize,
    size: usize,
    transport: Transport,
    /// Over the other processes, where there are any.
    watch: Option<Watch>,
    /// The MPI job by which GPUs learned of their rendezvous.
    job: Option<Box<Collective>>,
    moved: Counters,
}

impl Collective {
    /// A run of one rank.
    pub fn alone() -> Collective {
        Collective::over(0, 1, Transport::Alone)
    }

    /// Ranks that are threads of one process, in the order of their numbers: for tests, with tensors of a
    /// CPU. An exchange with a rank that has been dropped is an error.
    pub fn threads(size: usize) -> Vec<Collective> {
        let transports = Threads::all(size).into_iter().enumerate();
        transports.map(|(rank, threads)| Collective::over(rank, size, Transport::Threads(threads))).collect()
    }

    /// A rank whose others are only thought of: what it would send is counted, what it would receive is left
    /// as it is, and lists of all ranks' bytes hold its own. For plans, on a device that only counts.
    pub fn counted(rank: usize, size: usize) -> Collective {
        assert!(rank < size, "rank {rank} of {size}");
        Collective::over(rank, size, Transport::Counted)
    }

    fn over(rank: usize, size: usize, transport: Transport) -> Collective {
        Collective { rank, size, transport, watch: None, job: None, moved: Counters::default() }
    }

    /// Its number, from 0 on. Rank 0 writes the run.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Bytes sent so far, by kind.
    pub fn moved(&self) -> Moved {
        self.moved.moved()
    }

    /// Counts what is sent.
    pub(crate) fn count(&self, kind: Kind, bytes: usize) {
        self.moved.add(kind, bytes);
    }

    /// The clique of GPUs, where there is one.
    pub(crate) fn clique(&self) -> Option<&Clique> {
        match &self.transport {
            Transport::Nccl(clique) => Some(clique),
            Transport::Alone | Transport::Counted | Transport::Threads(_) | Transport::Mpi(_) => None,
        }
    }

    /// Tells the watch that an exchange begins: its number, of which all ranks have as many.
    pub(crate) fn begin_exchange(&self) -> u64 {
        self.watch.as_ref().map_or(0, Watch::begin_exchange)
    }

    /// Tells the watch that it has ended, and all before it.
    fn end_exchange(&self, number: u64) {
        if let Some(watch) = &self.watch {
            watch.end_exchange(number);
        }
    }

    /// Whether the other ranks are only thought of.
    pub(crate) fn only_counts(&self) -> bool {
        matches!(self.transport, Transport::Counted)
    }

    /// Everyone's bytes at every rank, by rank; lengths may differ.
    pub fn all_gather_bytes(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        if self.only_counts() {
            self.count(Kind::Host, (self.size - 1) * mine.len());
            return Ok(vec![mine.to_vec(); self.size]);
        }
        let lengths = self.all_lengths(mine.len())?;
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|&len| vec![0; len]).collect();
        all[self.rank].copy_from_slice(mine);
        let sends = self.others().map(|to| Send { to, bytes: mine }).collect::<Vec<_>>();
        let mut receives = Vec::new();
        for (from, bytes) in all.iter_mut().enumerate().filter(|(from, _)| *from != self.rank) {
            receives.push(Receive { from, bytes });
        }
        self.count(Kind::Host, (self.size - 1) * mine.len());
        self.exchange(&sends, &mut receives)?;
        Ok(all)
    }

    /// Everyone's bytes at rank 0, by rank; lengths may differ. The others get `None`.
    pub fn gather_bytes(&self, mine: &[u8]) -> Result<Option<Vec<Vec<u8>>>, CollectiveError> {
        if self.rank != 0 {
            self.count(Kind::Host, mine.len());
            self.exchange(&[Send { to: 0, bytes: &length(mine) }], &mut [])?;
            self.exchange(&[Send { to: 0, bytes: mine }], &mut [])?;
            return Ok(None);
        }
        if self.only_counts() {
            return Ok(Some(vec![mine.to_vec(); self.size]));
        }
        let mut lengths = vec![length(mine); self.size];
        self.exchange(&[], &mut self.receive_from_others(&mut lengths))?;
        let mut all: Vec<Vec<u8>> = lengths.iter().map(|len| vec![0; from_length(len)]).collect();
        all[0].copy_from_slice(mine);
        self.exchange(&[], &mut self.receive_from_others(&mut all))?;
        Ok(Some(all))
    }

    /// The root's bytes at every rank. What the others give is dropped.
    pub fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        assert!(root < self.size, "root {root} of {} ranks", self.size);
        let mut len = length(&bytes);
        self.spread(root, &mut len)?;
        let mut bytes =
            if self.rank == root || self.only_counts() { bytes } else { vec![0; from_length(&len)] };
        if self.rank == root {
            self.count(Kind::Host, (self.size - 1) * bytes.len());
        }
        self.spread(root, &mut bytes)?;
        Ok(bytes)
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.all_lengths(0).map(|_| ())
    }

    /// Exchanges of tensors in the memory of the host that travel together.
    pub(crate) fn together(&self) -> Together<'_> {
        Together { ranks: self, sends: Vec::new(), receives: Vec::new() }
    }

    /// [`Queue::broadcast`](crate::Queue::broadcast) in the memory of the host.
    pub(crate) fn broadcast(&self, root: usize, tensor: &mut [u8]) -> Result<(), CollectiveError> {
        assert!(root < self.size, "root {root} of {} ranks", self.size);
        if self.rank == root {
            self.count(Kind::Broadcast, (self.size - 1) * tensor.len());
        }
        self.spread(root, tensor)
    }

    /// The root's bytes to all, along a binomial tree: each rank that has them sends to the half it leads.
    fn spread(&self, root: usize, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        let place = (self.rank + self.size - root) % self.size;
        let rank = |place: usize| (place + root) % self.size;
        let leads = if place == 0 { self.size.next_power_of_two() } else { 1 << place.trailing_zeros() };
        // One exchange everywhere, though the root only sends.
        self.as_one(|transport| {
            if place != 0 {
                let from = rank(place - leads);
                transport.exchange(&[], &mut [Receive { from, bytes: &mut *bytes }])?;
            }
            let bytes: &[u8] = bytes;
            let reach = std::iter::successors(Some(leads / 2), |reach| Some(reach / 2))
                .take_while(|&reach| reach > 0);
            let below = reach.map(|reach| place + reach).filter(|&below| below < self.size);
            let sends = below.map(|below| Send { to: rank(below), bytes }).collect::<Vec<_>>();
            transport.exchange(&sends, &mut [])
        })
    }

    fn exchange(&self, sends: &[Send], receives: &mut [Receive]) -> Result<(), CollectiveError> {
        self.as_one(|transport| transport.exchange(sends, receives))
    }

    /// All exchanges of bytes of the host come here; the watch takes what runs for one exchange.
    fn as_one(
        &self,
        run: impl FnOnce(&Transport) -> Result<(), CollectiveError>,
    ) -> Result<(), CollectiveError> {
        let number = self.begin_exchange();
        let done = run(&self.transport);
        self.end_exchange(number);
        done
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size).filter(move |&other| other != rank)
    }

    fn receive_from_others<'a, B: AsMut<[u8]>>(&self, places: &'a mut [B]) -> Vec<Receive<'a>> {
        let places = places.iter_mut().enumerate().filter(|(from, _)| *from != self.rank);
        places.map(|(from, bytes)| Receive { from, bytes: bytes.as_mut() }).collect()
    }

    fn all_lengths(&self, mine: usize) -> Result<Vec<usize>, CollectiveError> {
        let mine = (mine as u64).to_le_bytes();
        let mut lengths = vec![mine; self.size];
        let sends = self.others().map(|to| Send { to, bytes: &mine }).collect::<Vec<_>>();
        self.exchange(&sends, &mut self.receive_from_others(&mut lengths))?;
        Ok(lengths.iter().map(from_length).collect())
    }
}

/// Messages of several tensors that wait to be exchanged: ranks wait for each other once.
pub(crate) struct Together<'a> {
    ranks: &'a Collective,
    sends: Vec<Send<'a>>,
    receives: Vec<Receive<'a>>,
}

impl<'a> Together<'a> {
    /// [`Queue::all_to_all`](crate::Queue::all_to_all)
    pub fn all_to_all(&mut self, from: &'a [u8], pieces: &Pieces, into: &'a mut [u8]) {
        let (ranks, own) = (self.ranks, pieces.range(self.ranks.rank));
        let mut slots = pieces.slots(ranks.rank, into);
        slots[ranks.rank].copy_from_slice(&from[own.clone()]);
        ranks.count(Kind::AllToAll, pieces.total() - own.len());
        self.sends.extend(ranks.others().map(|to| Send { to, bytes: &from[pieces.range(to)] }));
        self.receive(slots);
    }

    /// [`Queue::all_gather`](crate::Queue::all_gather)
    pub fn all_gather(&mut self, pieces: &Pieces, tensor: &'a mut [u8]) {
        let ranks = self.ranks;
        let mut slices = pieces.slices(tensor);
        let mine: &'a [u8] = &*std::mem::take(&mut slices[ranks.rank]);
        ranks.count(Kind::AllGather, (ranks.size - 1) * mine.len());
        self.sends.extend(ranks.others().map(|to| Send { to, bytes: mine }));
        self.receive(slices);
    }

    fn receive(&mut self, places: Vec<&'a mut [u8]>) {
        let places = places.into_iter().enumerate().filter(|(from, _)| *from != self.ranks.rank);
        self.receives.extend(places.map(|(from, bytes)| Receive { from, bytes }));
    }

    /// Sends and receives all of it.
    pub fn exchange(mut self) -> Result<(), CollectiveError> {
        self.ranks.exchange(&self.sends, &mut self.receives)
    }
}

fn length(bytes: &[u8]) -> [u8; 8] {
    (bytes.len() as u64).to_le_bytes()
}

fn from_length(bytes: &[u8; 8]) -> usize {
    u64::from_le_bytes(*bytes) as usize
}
