//! One file a command.

pub mod bench;
pub mod eval;
pub mod generate;
pub mod grade;
pub mod inspect;
pub mod objective;
pub mod quantize;
pub mod score;
pub mod sft;
pub mod train;
