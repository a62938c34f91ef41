//! Checkpoints: everything a run needs to resume as if it had never stopped.
//!
//! `checkpoints/step-N/` is a Hugging Face directory (the master weights in f32, so that they are the state
//! and the model at once) with the rest of the state beside it:
//!
//! | file | holds |
//! |---|---|
//! | `optimizer.safetensors` | the actor's moments; of R ranks each writes its pieces of them, as in \
//!   `optimizer-00002-of-00004.safetensors`, and any number of ranks reads them |
//! | `critic/`, `critic_optimizer.safetensors` | the critic, where there is one |
//! | `reference.safetensors` | the reference model, where the recipe has one |
//! | `measured.safetensors` | the weights that the next weight update is measured from |
//! | `old.safetensors` | older weights that the next steps sample with (`rollout.lag`), in pieces like the \
//!   moments |
//! | `state.json` | step, problems drawn, counts of updates, KL coefficient, accuracies, hash of the recipe |
//! | `recipe.toml` | the recipe |
//! | `metrics.jsonl` | the run's lines up to the step, without times, in case the run's own file is lost |
//! | `manifest.json` | length and checksum of every other file |
//!
//! There is no state of a random number generator: all random numbers are functions of seed, step and place.
//!
//! A checkpoint is written under a temporary name, synced and renamed ([`Store`]), from a copy of the state
//! and on a thread of its own ([`Writer`]), so that training continues meanwhile; [`Keeper`] says when. What
//! a disk or a foreign program damages later is found by the manifest.

mod error;
mod keeper;
mod manifest;
mod moments;
mod snapshot;
mod store;
mod tensors;
mod writer;

pub use error::CheckpointError;
pub use keeper::Keeper;
pub use manifest::Manifest;
pub use snapshot::{LearnerSnapshot, Snapshot, State};
pub use store::{Keep, ModelFiles, Newest, Store, Torn};
pub use writer::Writer;
