//! Files from outside, read with care, and files of ours that must survive.
//!
//! - [`open`], [`read`] and [`read_text`] read what a user or a model directory names: regular files only,
//!   and no more bytes than the caller can use. A FIFO would block, a device would never end.
//! - [`caught`] runs a parser of another crate on bytes that nobody vouches for: its panic becomes a value.
//! - [`watched`] and [`watched_each`] run what may take all time or memory, and give up on it.
//! - [`json_size`] says how many values a JSON text has, before they are made.
//! - [`available_memory`] is what a model or a run has to fit into.
//! - [`disk`] is what run directories and checkpoints are changed by, so that they survive a loss of power
//!   and a test can show it.
//!
//! A crate of its own below all others, because model directories, data sets and runs need the same care.
#![forbid(unsafe_code)]

mod caught;
pub mod disk;
mod json;
mod memory;
mod read;
mod watch;

pub use caught::caught;
pub use json::{JsonSize, json_size};
pub use memory::available_memory;
pub use read::{MIB, open, read, read_line, read_text};
pub use watch::{GaveUp, Patience, watched, watched_each};
