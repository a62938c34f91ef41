//! Proof of the engine: what it schedules, samples and emits, alone and beside others, and that its bits are
//! the trainer's (`parity`; on a GPU `cuda`).

mod ahead;
mod bad_input;
mod biased;
mod common;
mod context;
mod cuda;
mod engine;
mod exported;
mod lent;
mod parity;
mod scheduler;
