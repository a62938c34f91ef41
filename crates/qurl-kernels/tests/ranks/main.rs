//! Exchanges between ranks: the same checks of content over every transport, and what becomes of the others
//! when one rank fails.

mod every;
mod faults;
mod job;
mod mpi;
mod nccl;
mod threads;
