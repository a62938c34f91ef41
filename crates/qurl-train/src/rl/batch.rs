//! The rollouts of a step as flat arrays over response tokens.
//!
//! Sequences stand in the order of their groups; the tokens of all responses follow each other. Prompts are
//! kept for the forward passes but carry no loss, so every array here has one entry per response token.

use crate::recipe::RlPlan;
use crate::solve::Solved;
use qurl_model::compute::Targets;
use std::ops::Range;

/// The rollouts of a step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RolloutBatch {
    /// Prompt and response of each sequence.
    sequences: Vec<Vec<u32>>,
    /// Length of each prompt.
    prompts: Vec<usize>,
    /// Where each sequence's tokens begin in the arrays below, and where the last ends.
    starts: Vec<usize>,
    /// Prompt number of each sequence.
    pub groups: Vec<u32>,
    /// Sequence of each token.
    pub seq: Vec<u32>,
    /// Which tokens count.
    pub mask: Vec<bool>,
    /// Log-prob under the policy that sampled.
    pub behav: Vec<f32>,
    /// Log-prob under the actor at the beginning of the step; NaN where the first update is to compute it.
    pub prox: Vec<f32>,
    /// Log-prob under the reference model; empty where there is none.
    pub reference: Vec<f32>,
    /// Reward, on the last token of each response.
    pub rewards: Vec<f32>,
    /// The critic's values; empty where there is none.
    pub values: Vec<f32>,
    /// Advantages.
    pub advantages: Vec<f32>,
    /// What the critic should have said.
    pub returns: Vec<f32>,
}

/// The tokens of some neighbouring sequences.
pub struct View<'a> {
    /// Sequence of each token, counted from 0 in this view.
    pub seq: Vec<u32>,
    /// Which tokens count.
    pub mask: &'a [bool],
    /// See [`RolloutBatch`].
    pub behav: &'a [f32],
    /// See [`RolloutBatch`].
    pub prox: &'a [f32],
    /// See [`RolloutBatch`].
    pub reference: &'a [f32],
    /// See [`RolloutBatch`].
    pub values: &'a [f32],
    /// See [`RolloutBatch`].
    pub advantages: &'a [f32],
    /// See [`RolloutBatch`].
    pub returns: &'a [f32],
}

impl View<'_> {
    /// Some of the tokens.
    pub fn tokens(&self, tokens: Range<usize>) -> View<'_> {
        let some = |x: &'_ [f32]| -> Range<usize> { if x.is_empty() { 0..0 } else { tokens.clone() } };
        View {
            seq: self.seq[tokens.clone()].to_vec(),
            mask: &self.mask[tokens.clone()],
            behav: &self.behav[tokens.clone()],
            prox: &self.prox[some(self.prox)],
            reference: &self.reference[some(self.reference)],
            values: &self.values[some(self.values)],
            advantages: &self.advantages[some(self.advantages)],
            returns: &self.returns[some(self.returns)],
        }
    }
}

impl RolloutBatch {
    /// Lays the responses of a step side by side, with their rewards (and the penalty for overlong ones).
    pub fn pack(solved: &[Solved], plan: &RlPlan, step: u64) -> RolloutBatch {
        let (max_response, _) = plan.sizes_at(step);
        let mut batch = RolloutBatch { starts: vec![0], ..RolloutBatch::default() };
        for (group, solved) in solved.iter().enumerate() {
            for response in &solved.responses {
                let tokens = &response.sample.tokens;
                let sequence = batch.sequences.len() as u32;
                batch.sequences.push(solved.prompt.iter().chain(tokens).copied().collect());
                batch.prompts.push(solved.prompt.len());
                batch.groups.push(group as u32);
                batch.seq.extend(std::iter::repeat_n(sequence, tokens.len()));
                batch.mask.extend(std::iter::repeat_n(true, tokens.len()));
                batch.behav.extend_from_slice(&response.sample.logprobs);
                batch.rewards.extend(std::iter::repeat_n(0.0, tokens.len()));
                let penalty =
                    plan.algorithm.overlong_buffer.map_or(0.0, |b| b.penalty(tokens.len(), max_response));
                if let Some(last) = batch.rewards.last_mut().filter(|_| !tokens.is_empty()) {
                    *last = (response.verdict.reward + penalty) as f32;
                }
                batch.starts.push(batch.seq.len());
            }
        }
        batch
    }

    /// Response tokens.
    pub fn tokens(&self) -> usize {
        self.seq.len()
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Lengths of the sequences, prompts included.
    pub fn lengths(&self) -> Vec<usize> {
        self.sequences.iter().map(Vec::len).collect()
    }

    /// Tokens of some sequences.
    pub fn ids(&self, sequences: Range<usize>) -> Vec<&[u32]> {
        self.sequences[sequences].iter().map(Vec::as_slice).collect()
    }

    /// The response tokens of some sequences as targets, in the order of the arrays.
    pub fn targets(&self, sequences: Range<usize>) -> Targets {
        let prompts = &self.prompts[sequences.clone()];
        Targets::of(&self.ids(sequences), |sequence, position| position >= prompts[sequence])
    }

    /// Where the response tokens of some sequences lie in the arrays.
    pub fn token_range(&self, sequences: Range<usize>) -> Range<usize> {
        self.starts[sequences.start]..self.starts[sequences.end]
    }

    /// The arrays of some sequences.
    pub fn view(&self, sequences: Range<usize>) -> View<'_> {
        let tokens = self.token_range(sequences.clone());
        let optional = |x: &'_ [f32]| -> Range<usize> { if x.is_empty() { 0..0 } else { tokens.clone() } };
        View {
            seq: self.seq[tokens.clone()].iter().map(|s| s - sequences.start as u32).collect(),
            mask: &self.mask[tokens.clone()],
            behav: &self.behav[tokens.clone()],
            prox: &self.prox[optional(&self.prox)],
            reference: &self.reference[optional(&self.reference)],
            values: &self.values[optional(&self.values)],
            advantages: &self.advantages[optional(&self.advantages)],
            returns: &self.returns[optional(&self.returns)],
        }
    }

    /// Ranges of sequences with `prompts` groups each.
    pub fn mini_batches(&self, prompts: usize) -> Vec<Range<usize>> {
        let group_count = self.groups.last().map_or(0, |&g| g as usize + 1);
        let first_of = |group: usize| self.groups.partition_point(|&g| (g as usize) < group);
        (0..group_count).step_by(prompts.max(1)).map(|g| first_of(g)..first_of(g + prompts)).collect()
    }
}
