//! Ranks that are processes of an MPI job, connected by the MPI library that the machine has.
//!
//! Messages are sent and received without blocking and polled for, with pauses: ranks often share cores, and
//! a library that waits by spinning would take them from the rank it waits for. Nothing else of MPI is used,
//! so the table ([`library`](super::mpi_library)) is short and the same for every implementation.

use super::CollectiveError;
use super::end;
use super::mpi_library::Library;
use super::transport::{Receive, Send};
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the largest message; counts of MPI are 32-bit numbers.
const MAX_MESSAGE: usize = 64 << 20;
/// The tag of all messages.
const TAG: c_int = 23;
/// Bytes of a status, at least as many as any implementation writes.
const STATUS: usize = 64;
/// How long polling does not pause.
const EAGER: Duration = Duration::from_millis(1);
/// A pause between polls.
const PAUSE: Duration = Duration::from_micros(50);

/// This process in the job.
pub(crate) struct Mpi {
    library: Library,
    /// One call at a time: the library promises no more.
    lock: Mutex<()>,
    rank: usize,
    size: usize,
    /// How long an exchange may take while nobody watches over the ranks.
    patience: Option<Duration>,
}

impl Mpi {
    /// Finds the library and joins the job that its launcher started, whose size is known from the launcher's
    /// variables. An exchange that takes longer than `patience` ends the process: not every launcher ends the
    /// ranks that wait for one that has died.
    pub fn join(rank: usize, size: usize, patience: Duration) -> Result<Mpi, CollectiveError> {
        let library = Library::find()?;
        library.init()?;
        let (its_rank, its_size) = library.place()?;
        if (its_rank, its_size) != (rank, size) {
            let reason = format!(
                "{} says that this is rank {its_rank} of {its_size}, and the variables of the launcher say \
                 rank {rank} of {size}: the library and the launcher are of different implementations, or \
                 srun needs --mpi=pmix or --mpi=pmi2; QURL_MPI may name the library's file",
                library.file
            );
            return Err(CollectiveError::Library { library: "MPI".to_string(), reason });
        }
        Ok(Mpi { library, lock: Mutex::new(()), rank, size, patience: Some(patience) })
    }

    /// From here on somebody watches over the ranks.
    pub fn watched(&mut self) {
        self.patience = None;
    }

    /// What the library is.
    pub fn description(&self) -> String {
        format!("MPI ({}, {})", self.library.version, self.library.file)
    }

    /// Sends and receives. A failure ends the process: the library may go on writing into memory that the
    /// caller would free.
    pub fn exchange(&self, sends: &[Send], receives: &mut [Receive]) -> Result<(), CollectiveError> {
        let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let parts = |len: usize| len.div_ceil(MAX_MESSAGE);
        let count = sends.iter().map(|send| parts(send.bytes.len())).sum::<usize>()
            + receives.iter().map(|receive| parts(receive.bytes.len())).sum::<usize>();
        let mut requests = self.library.requests(count);
        let mut next = 0;
        for receive in receives {
            for part in receive.bytes.chunks_mut(MAX_MESSAGE) {
                // SAFETY: the memory is borrowed until all requests are done: nothing returns before.
                let status = unsafe {
                    self.library.receive(part.as_mut_ptr(), part.len(), receive.from, TAG, requests.at(next))
                };
                self.check(status, "receiving from", receive.from);
                next += 1;
            }
        }
        for send in sends {
            for part in send.bytes.chunks(MAX_MESSAGE) {
                // SAFETY: as above.
                let status =
                    unsafe { self.library.send(part.as_ptr(), part.len(), send.to, TAG, requests.at(next)) };
                self.check(status, "sending to", send.to);
                next += 1;
            }
        }
        let (mut statuses, began) = (vec![0u8; STATUS * count], Instant::now());
        loop {
            let mut done = 0;
            // SAFETY: `count` requests, and memory for as many statuses.
            let status = unsafe {
                self.library.test_all(count, requests.at(0), &mut done, statuses.as_mut_ptr().cast())
            };
            self.check(status, "waiting for", self.rank);
            if done != 0 {
                return Ok(());
            }
            if let Some(patience) = self.patience.filter(|&patience| began.elapsed() > patience) {
                let (rank, size, seconds) = (self.rank, self.size, patience.as_secs_f64());
                end::process(&format!(
                    "rank {rank} of {size}: the other ranks did not answer over MPI within {seconds} s"
                ));
            }
            match began.elapsed() < EAGER {
                true => std::thread::yield_now(),
                false => std::thread::sleep(PAUSE),
            }
        }
    }

    fn check(&self, status: c_int, what: &str, other: usize) {
        if status != 0 {
            let (rank, size, text) = (self.rank, self.size, self.library.error_text(status));
            end::process(&format!("rank {rank} of {size}: {what} rank {other}: MPI says: {text}"));
        }
    }

    /// Leaves the job, with all ranks; nothing may be exchanged afterwards.
    pub fn finalize(&self) -> Result<(), CollectiveError> {
        let _lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.library.finalize()
    }
}
