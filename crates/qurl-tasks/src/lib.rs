//! Tasks with verifiable rewards: problems, prompts, answer graders, data sets, metrics.
//!
//! This crate depends on none of the others: a response is text, a verdict is a number.

pub mod grader;
pub mod rng;
