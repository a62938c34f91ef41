//! The paper's three recipes: each starts on a random model of its own shape and does two steps on data in
//! the formats that the sets are published in, and docs/paper.md says of them what they say themselves.

mod data;
mod model;
mod starts;
mod table;
