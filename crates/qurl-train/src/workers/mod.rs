//! Rollout workers: other processes that sample for a trainer, on machines that come and go.
//!
//! The trainer hands out prompts by their global number (step, prompt) with all that a sample depends on:
//! ids, sampling settings, the seed of its random numbers, and the version of the weights, as bytes that are
//! already quantized ([`delta`]). So it does not matter who samples a prompt, when, or how often: a prompt
//! whose worker is lost is handed out again and comes back with the same bits, and a run has the same bits
//! with any number of workers, or none.
//!
//! [`Pool`] is the trainer's side: versions, prompts, leases, answers; plain data under a lock, which HTTP
//! threads and the trainer's thread share. [`Worker`] is the other side. Neither knows HTTP: a [`Link`] moves
//! the messages of [`protocol`]. An answer is checked twice: whether it can be one ([`check`](mod@check)), as
//! it comes, and for some samples whether it is the one, by computing them again ([`spot`]).

pub mod check;
pub mod delta;
mod pool;
pub mod protocol;
pub mod spot;
mod worker;

pub use pool::{Pool, PoolError, PoolOptions, Refused, Without};
pub use worker::{Done, Link, LinkError, Worker, WorkerError, WorkerOptions};
