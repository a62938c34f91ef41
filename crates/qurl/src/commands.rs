//! One file a command.

pub mod bench;
pub mod eval;
pub mod generate;
pub mod grade;
pub mod objective;
pub mod score;
pub mod sft;
pub mod train;
