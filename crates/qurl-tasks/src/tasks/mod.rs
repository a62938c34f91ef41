//! The tasks: generated ones with a difficulty dial, Countdown, and data sets.

pub mod arithmetic;
pub mod countdown;
pub mod dataset;
pub mod mod_chain;
pub mod sorting;
pub mod synthetic;
pub mod word_problems;

pub use dataset::DatasetTask;
pub use synthetic::{Kind, Synthetic, TaskError};
