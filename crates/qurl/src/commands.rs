//! One file a command.

pub mod bench;
pub mod chat;
pub mod chat_renderer;
pub mod compare;
pub mod completions;
pub mod dash;
pub mod eval;
pub mod export;
pub mod generate;
pub mod grade;
pub mod inspect;
pub mod man;
pub mod merge;
pub mod objective;
pub mod plan;
pub mod quantize;
pub mod recipe;
pub mod report;
pub mod reward_guard;
pub mod score;
pub mod serve;
pub mod sft;
pub mod study;
pub mod train;
pub mod worker;
