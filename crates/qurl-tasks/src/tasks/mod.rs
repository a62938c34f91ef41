//! The tasks: generated ones with a difficulty dial, Countdown, data sets, and any of them with a reward from outside.

pub mod arithmetic;
pub mod command;
pub mod countdown;
pub mod dataset;
pub mod mod_chain;
pub mod overlap;
pub mod sorting;
pub mod synthetic;
pub mod word_problems;

pub use command::CommandTask;
pub use dataset::DatasetTask;
pub use synthetic::{Kind, Synthetic, TaskError};
