//! Why a run of reinforcement learning stops.

use crate::base::OtherBase;
use crate::recipe::RecipeError;
use crate::solve::{SolveError, Trouble};
use crate::workers::PoolError;
use qurl_kernels::DeviceError;
use qurl_kernels::collective::CollectiveError;
use qurl_quant::QuantError;
use qurl_rl::RlError;
use qurl_rollout::RolloutError;

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The computation.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An exchange with other ranks.
    #[error(transparent)]
    Exchange(#[from] CollectiveError),
    /// The rollout engine.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// Prompts, responses and verdicts.
    #[error(transparent)]
    Solve(#[from] SolveError),
    /// Advantages and objectives.
    #[error(transparent)]
    Rl(#[from] RlError),
    /// Scaling and diagnostics of the weights.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// Dynamic sampling did not find enough.
    #[error(
        "key `algorithm.filter_groups.max_num_gen_batches` is {batches}: after so many batches of prompts \
         only {found} of {wanted} groups had responses with different rewards (the others: {right} all \
         right, {wrong} all wrong, {other} all alike otherwise); allow more batches, choose problems that \
         fit the model, or set `algorithm.filter_groups.allow_fewer = true` to train on whole mini-batches \
         of what was found"
    )]
    TooFewGroups {
        /// Batches of prompts sampled.
        batches: usize,
        /// Groups found.
        found: usize,
        /// Groups of a step.
        wanted: usize,
        /// Dropped groups whose responses were all right.
        right: usize,
        /// Dropped groups whose responses were all wrong.
        wrong: usize,
        /// Other groups that were dropped.
        other: usize,
        /// Mean entropy of all responses.
        entropy: f64,
    },
    /// A checkpoint of another kind of run.
    #[error(
        "the checkpoint has (critic, reference, measured weights) = {found:?}, the recipe asks for \
         {expected:?}"
    )]
    OtherState {
        /// What the checkpoint has.
        found: [bool; 3],
        /// What the recipe asks for.
        expected: [bool; 3],
    },
    /// A checkpoint of a run with another lag.
    #[error("the checkpoint has the weights of versions {found:?}, `rollout.lag` asks for {expected:?}")]
    OtherLag {
        /// What the checkpoint has.
        found: Vec<u64>,
        /// What the recipe asks for.
        expected: Vec<u64>,
    },
    /// A checkpoint of a run with other problems.
    #[error("the problems of the task are not those that the run was begun with: its files were changed")]
    OtherProblems,
    /// Adapters of another base.
    #[error(transparent)]
    OtherBase(#[from] OtherBase),
}

impl TrainError {
    /// Whether the run was told to end while it waited for the scores of a reward command.
    pub fn is_cancelled(&self) -> bool {
        match self {
            TrainError::Solve(SolveError::Reward(error)) => error.is_cancelled(),
            TrainError::Solve(SolveError::Workers(error)) => *error == PoolError::Stopped,
            TrainError::Solve(SolveError::OtherRank { trouble, .. }) => *trouble == Trouble::Cancelled,
            _ => false,
        }
    }

    /// Whether every rank of the run has failed with this error, or with one that names the rank that did.
    pub fn is_of_all_ranks(&self) -> bool {
        matches!(self, TrainError::TooFewGroups { .. } | TrainError::Rl(_))
            || matches!(self, TrainError::Solve(error) if !error.is_exchange())
    }
}
