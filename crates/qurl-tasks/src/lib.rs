//! Tasks with verifiable rewards: problems, prompts, answer graders, data sets, metrics.
//!
//! This crate depends on none of the others: a response is text, a verdict is a number.
//!
//! # Where to start
//!
//! * [`grader`] decides whether a response is right.
//! * [`task`] is what a trainer sees; [`tasks`] holds generated tasks, Countdown and data sets.
//! * [`data`] reads JSONL, gzip JSONL and parquet; [`presets`] has templates and evaluation settings,
//!   [`prompt`] templates of one's own.
//! * [`reward`] is several weighted rewards in one; [`external`] asks a command or a server for one.
//! * [`metrics`] and [`grade_lines`] serve evaluation.
//!
//! Is this answer right?
//! ```
//! use qurl_tasks::grader::equivalent;
//!
//! assert!(equivalent(r"\frac{1}{2}", "0.5"));
//! assert!(equivalent(r"\sqrt{8}", r"2\sqrt{2}"));
//! assert!(!equivalent("(x+1)^2", "x^2+1"));
//! ```
#![forbid(unsafe_code)]

pub mod data;
pub mod external;
pub mod grade_lines;
pub mod grader;
pub mod metrics;
pub mod presets;
pub mod prompt;
pub mod reward;
pub mod rng;
pub mod setting;
pub mod task;
pub mod tasks;

pub use task::{Attempt, Message, Problem, Prompt, RewardValues, Split, Task, Verdict};
