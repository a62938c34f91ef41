//! Training: from a recipe to a trained model.
//!
//! [`learner`] holds a model that is being trained (weights, gradients, moments, packed copies) and the two things
//! every kind of training does with it: add up gradients of micro-batches, and update. [`sft`] is supervised training
//! on top of it.

pub mod learner;
pub mod optimizer;
pub mod schedule;
