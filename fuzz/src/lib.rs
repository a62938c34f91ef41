//! Hostile input for everything that reads what others made: model directories, data sets, recipes,
//! checkpoints, requests, answers.
//!
//! An input is a few named parts ([`input`]); number `i` of a target is a function of the target, a seed and
//! `i` alone: one of the target's seeds, changed a few times ([`mutate`]). So a run needs no corpus that
//! grows, any input can be made again, and a run can be cut into pieces. A [`worker`] process runs the inputs
//! with limits on memory and time; [`supervise`] starts workers, and another one after an input that ended
//! one, and keeps what failed.
//!
//! What a target promises: it ends, within its time and memory, without a panic; what it accepts it can use.

#![forbid(unsafe_code)]

pub mod input;
pub mod mutate;
pub mod random;
pub mod supervise;
pub mod targets;
pub mod worker;
