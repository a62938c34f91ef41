//! Training: from a recipe to a trained model.
//!
//! [`recipe`] says what a run does; [`start`] is what it begins with. [`learner`] holds a model that is being
//! trained (weights, gradients, moments, packed copies) and the two things every kind of training does with
//! it: add up gradients of micro-batches, and update. [`sft`] is supervised training on top of it. [`rl`] is
//! one step of reinforcement learning, and [`run`] the loop around it. [`checkpoint`] saves the state of a
//! run and [`runlog`] what it reports: together they are what a run directory holds. [`solve`] has the engine
//! answer problems and judges the answers; [`evaluate`] does so for whole sets. [`best`] says what the best
//! of several evaluations is. [`ranks`] are the processes that train one model together, [`shards`] what
//! makes their bits those of one. [`workers`] are other processes that sample for a trainer.
//!
//! # Where to start
//!
//! Read `docs/tour.md` beside [`rl::RlTrainer::step`]: one step of reinforcement learning from top to bottom.
//! [`run::Run`] is the loop around it, and what `qurl train` does is little more.
//!
//! A recipe is read, changed as `--set` does it, and becomes a checked plan; what is wrong is named by file,
//! line and key:
//! ```
//! use qurl_train::recipe::Recipe;
//!
//! let text = std::fs::read_to_string("../../recipes/tiny-grpo.toml")?;
//! let recipe = Recipe::parse(&text, "tiny-grpo.toml", &["rollout.format=fp8".to_string()])?;
//! let plan = recipe.rl("tiny-grpo.toml")?;
//! assert_eq!((plan.rollout.n, plan.rollout.format.name()), (8, "fp8"));
//!
//! let wrong = Recipe::parse(&text.replace("n = 8", "m = 8"), "mine.toml", &[]).unwrap_err();
//! assert!(wrong.to_string().contains("unknown key `rollout.m`"), "{wrong}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod base;
pub mod best;
pub mod checkpoint;
pub mod compare;
pub mod cost;
pub mod crc32c;
mod divided;
pub mod evaluate;
mod gather;
mod gradients;
pub mod learner;
pub mod lengths;
pub mod master;
pub mod memory;
pub mod optimizer;
pub mod ranks;
pub mod recipe;
pub mod rl;
pub mod run;
pub mod runlog;
pub mod schedule;
pub mod sft;
pub mod shards;
pub mod solve;
pub mod start;
pub mod study;
pub mod wire;
pub mod workers;
