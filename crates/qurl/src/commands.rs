//! One file a command.

pub mod bench;
pub mod score;
pub mod sft;
