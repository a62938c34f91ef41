//! One file a command.

pub mod bench;
pub mod generate;
pub mod score;
pub mod sft;
