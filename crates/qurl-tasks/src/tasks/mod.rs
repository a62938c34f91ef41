//! The tasks: generated ones with a difficulty dial, Countdown, data sets, and any of them with rewards of
//! one's own.

pub mod arithmetic;
pub mod countdown;
pub mod dataset;
pub mod mod_chain;
pub mod overlap;
pub mod rewarded;
pub mod sorting;
pub mod synthetic;
pub mod word_problems;

pub use dataset::DatasetTask;
pub use rewarded::RewardedTask;
pub use synthetic::{Kind, Synthetic, TaskError};
