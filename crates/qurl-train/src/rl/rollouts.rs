//! The rollouts of a step: one batch of prompts, or with dynamic sampling as many as it takes to fill one.

use super::{RlTrainer, TrainError};
use crate::solve::{SolveOptions, Solved, draw_problems};
use qurl_kernels::Device;
use qurl_rl::advantage::group::in_mixed_group;
use qurl_tasks::task::Split;

/// What the first half of a step gives.
pub(super) struct Rolled {
    /// The groups to learn from.
    pub groups: Vec<Solved>,
    /// What it took to find them.
    pub sampled: Sampled,
    /// Seconds of judging.
    pub verifying: f64,
    /// Mean entropy of all responses, those of dropped groups included.
    pub entropy: f64,
}

/// What was sampled for the batch of a step; more than the batch where groups were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    /// Batches of prompts.
    pub batches: usize,
    /// Groups of responses.
    pub groups: usize,
    /// Those with different rewards among their responses, which an advantage within groups can learn from.
    pub mixed: usize,
}

impl Sampled {
    /// One more batch of prompts.
    pub fn add(&mut self, solved: &[Solved]) -> Result<(), TrainError> {
        self.batches += 1;
        self.groups += solved.len();
        for group in solved {
            self.mixed += usize::from(is_mixed(group)?);
        }
        Ok(())
    }
}

/// Whether the rewards of a group differ.
fn is_mixed(group: &Solved) -> Result<bool, TrainError> {
    let rewards: Vec<f64> = group.responses.iter().map(|r| r.verdict.reward).collect();
    Ok(in_mixed_group(&rewards, &vec![0; rewards.len()])?.contains(&true))
}

/// Sums of entropies over tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Entropy {
    sum: f64,
    tokens: u64,
}

impl Entropy {
    /// Adds the tokens of all responses, in order.
    pub fn add(&mut self, groups: &[Solved]) {
        for entropy in groups.iter().flat_map(|g| &g.responses).flat_map(|r| &r.sample.entropies) {
            self.sum += f64::from(*entropy);
            self.tokens += 1;
        }
    }

    /// The mean; NaN of nothing.
    pub fn mean(&self) -> f64 {
        self.sum / self.tokens as f64
    }
}

/// Groups that dynamic sampling dropped, by what their responses were.
#[derive(Clone, Copy, Debug, Default)]
struct Dropped {
    right: usize,
    wrong: usize,
    other: usize,
}

impl Dropped {
    fn add(&mut self, group: &Solved) {
        let all = |correct: bool| group.responses.iter().all(|r| r.verdict.correct == correct);
        match () {
            () if all(true) => self.right += 1,
            () if all(false) => self.wrong += 1,
            () => self.other += 1,
        }
    }
}

impl<D: Device> RlTrainer<D> {
    /// How a batch of prompts of a step is sampled.
    pub(super) fn solve_options(&self, step: u64, batch: usize) -> SolveOptions {
        let (max_new, n) = self.plan.sizes_at(step);
        let most = self.plan.algorithm.filter_groups.as_ref().map_or(1, |f| f.max_num_gen_batches);
        SolveOptions {
            max_prompt: self.plan.data.max_prompt_length,
            n,
            sampling: self.plan.rollout.sampling(),
            max_new,
            seed: self.seed,
            // Its own random numbers for every batch of prompts.
            step: step * most as u64 + batch as u64,
            lengths: self.lengths,
        }
    }

    /// Samples groups until the batch is full; with dynamic sampling, groups whose rewards are all equal are
    /// dropped.
    pub(super) fn rollouts(&mut self) -> Result<Rolled, TrainError> {
        let (mut verifying, mut entropy) = (0.0, Entropy::default());
        let wanted = self.plan.data.train_batch_size;
        let filter = self.plan.algorithm.filter_groups.clone();
        let most = filter.as_ref().map_or(1, |f| f.max_num_gen_batches);
        let mut kept: Vec<Solved> = Vec::with_capacity(wanted);
        let (mut dropped, mut sampled) = (Dropped::default(), Sampled::default());
        for batch in 0..most {
            let problems = draw_problems(&*self.task, Split::Train, self.seed, self.drawn, wanted as u64)?;
            self.drawn += wanted as u64;
            let options = self.solve_options(self.step, batch);
            let (solved, seconds) = self.solve_batch(problems, options)?;
            self.check_versions(&solved)?;
            verifying += seconds;
            entropy.add(&solved);
            sampled.add(&solved)?;
            if filter.is_none() {
                return Ok(Rolled { groups: solved, sampled, verifying, entropy: entropy.mean() });
            }
            for group in solved {
                match is_mixed(&group)? {
                    true => kept.push(group),
                    false => dropped.add(&group),
                }
            }
            if kept.len() >= wanted {
                kept.truncate(wanted);
                return Ok(Rolled { groups: kept, sampled, verifying, entropy: entropy.mean() });
            }
        }
        let found = kept.len();
        if filter.is_none_or(|f| !f.allow_fewer) {
            let Dropped { right, wrong, other } = dropped;
            let entropy = entropy.mean();
            return Err(TrainError::TooFewGroups {
                batches: most,
                found,
                wanted,
                right,
                wrong,
                other,
                entropy,
            });
        }
        // A mini-batch that is not whole would weigh its responses more than the others do.
        let mini = self.plan.actor.ppo_mini_batch_size;
        kept.truncate(found / mini * mini);
        Ok(Rolled { groups: kept, sampled, verifying, entropy: entropy.mean() })
    }
}
