//! Proof of the formats: numbers, budgets and kernels against plain code, and what a model loses by them.

mod checksum;
mod kernels;
mod model;
mod numbers;
mod scores;
