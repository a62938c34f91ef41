//! Training: from a recipe to a trained model.
//!
//! [`recipe`] says what a run does; [`start`] is what it begins with. [`learner`] holds a model that is being
//! trained (weights, gradients, moments, packed copies) and the two things every kind of training does with
//! it: add up gradients of micro-batches, and update. [`sft`] is supervised training on top of it. [`rl`] is
//! one step of reinforcement learning, and [`run`] the loop around it. [`checkpoint`] saves the state of a
//! run and [`runlog`] what it reports: together they are what a run directory holds. [`solve`] has the engine
//! answer problems and judges the answers; [`evaluate`] does so for whole sets. [`best`] says what the best
//! of several evaluations is.

pub mod best;
pub mod checkpoint;
pub mod compare;
pub mod crc32c;
pub mod evaluate;
pub mod learner;
pub mod lengths;
pub mod memory;
pub mod optimizer;
pub mod recipe;
pub mod rl;
pub mod run;
pub mod runlog;
pub mod schedule;
pub mod sft;
pub mod solve;
pub mod start;
