//! The one primitive that a transport has: a group of messages to and from other ranks, which go in any order
//! but those between the same two ranks. What goes where is decided above ([`super`]), once for all of them.

use super::CollectiveError;
use super::mpi::Mpi;
use super::threads::Threads;
use crate::cuda::nccl::Clique;

/// Bytes for another rank.
pub(crate) struct Send<'a> {
    pub to: usize,
    pub bytes: &'a [u8],
}

/// Bytes from another rank, as many as it sends.
pub(crate) struct Receive<'a> {
    pub from: usize,
    pub bytes: &'a mut [u8],
}

/// What moves the bytes.
pub(crate) enum Transport {
    /// One rank: there is nobody to talk to.
    Alone,
    /// Others are only thought of: what would be sent is counted, what would come is left as it is.
    Counted,
    /// Threads of this process.
    Threads(Threads),
    /// Processes of an MPI job.
    Mpi(Mpi),
    /// GPUs, by NCCL.
    Nccl(Box<Clique>),
}

impl Transport {
    /// Sends and receives, and returns when all of it is done. No rank sends to itself.
    pub fn exchange(&self, sends: &[Send], receives: &mut [Receive]) -> Result<(), CollectiveError> {
        match self {
            Transport::Alone | Transport::Counted => Ok(()),
            Transport::Threads(threads) => threads.exchange(sends, receives),
            Transport::Mpi(mpi) => mpi.exchange(sends, receives),
            Transport::Nccl(clique) => clique.exchange(sends, receives),
        }
    }
}
