//! Proof of training: whole steps against PyTorch, recipes that learn, ranks that agree.

mod common;
mod cost;
mod dapo_rewards;
mod disk;
mod goldens;
mod grpo_step;
mod learns;
mod lora;
mod memory;
mod ppo_step;
mod ranks;
mod rl;
mod sft;
mod stages;
mod uaq;
mod workers;
