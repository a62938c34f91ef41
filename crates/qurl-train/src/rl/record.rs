//! What is written down about a step.

use super::{RolloutBatch, Sampled, Tested};
use crate::optimizer::UpdateReport;
use crate::solve::{Solved, accuracy, reward_parts};
use crate::wire::wire;
use qurl_rl::{Facts, Mismatch};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

/// A figure of the weights: in total and per block.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Layered {
    /// Over all matrices.
    pub total: f64,
    /// Block by block.
    pub layers: Vec<f64>,
}

/// How far the rewards of a batch spread.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RewardSpread {
    /// Standard deviation of all rewards.
    pub reward_std: f64,
    /// Standard deviation within a group, mean over the groups: what advantages within groups are made of.
    pub reward_group_std: f64,
    /// Smallest reward.
    pub reward_min: f64,
    /// Largest reward.
    pub reward_max: f64,
}

impl RewardSpread {
    /// Of groups; nothing where there is no response.
    pub fn of(groups: &[Solved]) -> Option<RewardSpread> {
        let groups: Vec<Vec<f64>> =
            groups.iter().map(|g| g.responses.iter().map(|r| r.verdict.reward).collect()).collect();
        let all: Vec<f64> = groups.iter().flatten().copied().collect();
        Some(RewardSpread {
            reward_std: deviation(&all)?,
            reward_group_std: groups.iter().filter_map(|g| deviation(g)).fold(0.0, |a, b| a + b)
                / groups.len() as f64,
            reward_min: all.iter().copied().fold(f64::INFINITY, f64::min),
            reward_max: all.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

/// Standard deviation (of the values as they are, not of what they may be a sample of); nothing of no values.
fn deviation(values: &[f64]) -> Option<f64> {
    let count = values.len() as f64;
    let mean = values.iter().fold(0.0, |a, b| a + b) / count;
    let squares = values.iter().fold(0.0, |sum, x| sum + (x - mean) * (x - mean));
    (count > 0.0).then(|| (squares / count).sqrt())
}

/// What of the mismatch is quantization and what is age, where rollouts lag behind: ρ = π_prox/π_behav is
/// (π_old/π_behav)·(π_prox/π_old), with π_old the weights that sampled, in full precision. Measured on all
/// response tokens of some sequences.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Lagged {
    /// The step that began with the weights that sampled.
    pub rollout_version: u64,
    /// Between behav and old.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch_quantization: Option<Mismatch>,
    /// Between old and prox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mismatch_staleness: Option<Mismatch>,
}

/// Facts of one training step. Everything but `timing` is a function of recipe and seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepRecord {
    /// From 1.
    pub step: u64,
    /// Mean reward of all responses.
    pub reward: f64,
    /// How far rewards spread, where there are responses.
    #[serde(flatten)]
    pub reward_spread: Option<RewardSpread>,
    /// Share of right responses; rewards play no part.
    pub accuracy: f64,
    /// Means of the named parts of the rewards, before their weights.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub reward_parts: BTreeMap<String, f64>,
    /// Groups of the batch.
    pub groups: usize,
    /// Batches that were sampled to fill it.
    pub gen_batches: usize,
    /// Groups that were sampled for it; more than `groups` where some were dropped.
    pub sampled_groups: usize,
    /// Those of them whose rewards differ: what dynamic sampling keeps.
    pub mixed_groups: usize,
    /// Tokens of all responses.
    pub response_tokens: usize,
    /// Mean tokens of a response.
    pub response_length: f64,
    /// Share of responses that were cut off.
    pub truncated: f64,
    /// Mean entropy of the distributions that were sampled from, with those of groups that were dropped.
    pub rollout_entropy: f64,
    /// Distance between the policy that sampled and the policy that is trained.
    pub mismatch: Option<Mismatch>,
    /// KL(behav||prox) over the whole vocabulary, mean over a sample of positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_kl: Option<f64>,
    /// How old the rollouts are, and what that makes of the mismatch.
    #[serde(flatten)]
    pub lagged: Option<Lagged>,
    /// Learning rate of the actor.
    pub lr: f64,
    /// Loss, mean over the updates.
    pub loss: f64,
    /// Mean entropy under the actor while it was updated.
    pub entropy: f64,
    /// Norm of the gradients before clipping, mean over the updates.
    pub grad_norm: f64,
    /// Updates that were applied.
    pub updates: u64,
    /// Updates that were skipped because their gradient was not finite.
    pub skipped_updates: u64,
    /// Share of tokens clipped at the upper bound.
    pub clip_fraction_upper: f64,
    /// Share of tokens clipped at the lower bound.
    pub clip_fraction_lower: f64,
    /// Share of tokens capped by the dual clip.
    pub clip_fraction_dual: f64,
    /// Share of tokens that the objective dropped, or rejected before the updates.
    pub rejected_fraction: f64,
    /// Largest ratio of the updated to the proximal policy.
    pub ratio_max: f64,
    /// Mean KL to the reference model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_kl: Option<f64>,
    /// Coefficient of that KL in the rewards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl_coef: Option<f64>,
    /// The critic's loss, mean over its updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_loss: Option<f64>,
    /// Norm of the critic's gradients before clipping, mean over its updates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_grad_norm: Option<f64>,
    /// Greedy accuracy on held-out problems after this step, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_accuracy: Option<f64>,
    /// Mean reward of the greedy responses to held-out problems after this step, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_reward: Option<f64>,
    /// Mean accuracy of `run.test_k` samples on held-out problems after this step, where measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_avg_at_k: Option<f64>,
    /// Normalized weight update since it was last measured (Eq. 13).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_update: Option<Layered>,
    /// Normalized quantization error of the weights (Eq. 14).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization_error: Option<Layered>,
    /// Share of the quantized values that changed since it was last measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flipped_codes: Option<Layered>,
    /// Seconds of the phases, and `total`.
    pub timing: BTreeMap<String, f64>,
    /// Whether some token had an advantage: without one there is nothing to learn, and a gradient of zero is
    /// no fault.
    #[serde(skip)]
    pub learnable: bool,
    #[serde(skip)]
    facts: Facts,
    #[serde(skip)]
    sums: Sums,
}

/// What the objective said about some tokens of a mini-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Said {
    /// Counts and ratios.
    pub facts: Facts,
    /// Their part of the loss.
    pub loss: f64,
    /// Sum of their entropies under the actor.
    pub entropy_sum: f64,
    /// Tokens that count.
    pub tokens: u64,
    /// Sum of their KL to the reference model and how many counted, where it is part of the loss.
    pub reference_kl: Option<(f64, u64)>,
}

wire!(Facts {
    tokens,
    clipped_upper,
    clipped_lower,
    clipped_dual,
    rejected,
    log_ratio_sum,
    ratio_sum,
    ratio_min,
    ratio_max,
    weight_sum,
    weight_square_sum,
    weight_max,
});
wire!(Said { facts, loss, entropy_sum, tokens, reference_kl });

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    loss: f64,
    entropy: f64,
    entropy_tokens: u64,
    left_out: u64,
    norms: f64,
    reference_kl: f64,
    reference_tokens: u64,
    value_loss: f64,
    value_norms: f64,
    value_updates: u64,
    value_applied: u64,
}

impl StepRecord {
    /// What is known after the rollouts.
    pub fn new(
        step: u64,
        solved: &[Solved],
        batch: &RolloutBatch,
        sampled: Sampled,
        rollout_entropy: f64,
    ) -> StepRecord {
        let samples: Vec<_> = solved.iter().flat_map(|s| &s.responses).map(|r| &r.sample).collect();
        let count = samples.len().max(1) as f64;
        StepRecord {
            step,
            reward: solved
                .iter()
                .flat_map(|s| &s.responses)
                .map(|r| r.verdict.reward)
                .fold(0.0, |a, b| a + b)
                / count,
            reward_spread: RewardSpread::of(solved),
            accuracy: accuracy(solved),
            reward_parts: reward_parts(solved),
            groups: solved.len(),
            gen_batches: sampled.batches,
            sampled_groups: sampled.groups,
            mixed_groups: sampled.mixed,
            response_tokens: batch.tokens(),
            response_length: batch.tokens() as f64 / count,
            truncated: samples.iter().filter(|s| s.finish.is_truncated()).count() as f64 / count,
            rollout_entropy,
            mismatch: None,
            full_kl: None,
            lagged: None,
            lr: 0.0,
            loss: 0.0,
            entropy: 0.0,
            grad_norm: 0.0,
            updates: 0,
            skipped_updates: 0,
            clip_fraction_upper: 0.0,
            clip_fraction_lower: 0.0,
            clip_fraction_dual: 0.0,
            rejected_fraction: 0.0,
            ratio_max: 0.0,
            reference_kl: None,
            kl_coef: None,
            value_loss: None,
            value_grad_norm: None,
            test_accuracy: None,
            test_reward: None,
            test_avg_at_k: None,
            weight_update: None,
            quantization_error: None,
            flipped_codes: None,
            timing: BTreeMap::new(),
            learnable: false,
            facts: Facts::default(),
            sums: Sums::default(),
        }
    }

    /// Adds what the objective said about some tokens. All ranks add all of it, in the order of the tokens.
    pub fn add_said(&mut self, said: &Said) {
        if let Some((sum, tokens)) = said.reference_kl {
            self.add_reference_kl(sum, tokens);
        }
        self.facts.merge(&said.facts);
        self.sums.loss += said.loss;
        self.sums.entropy += said.entropy_sum;
        self.sums.entropy_tokens += said.tokens;
        let share = |n: u64| n as f64 / self.facts.tokens.max(1) as f64;
        self.clip_fraction_upper = share(self.facts.clipped_upper);
        self.clip_fraction_lower = share(self.facts.clipped_lower);
        self.clip_fraction_dual = share(self.facts.clipped_dual);
        self.set_rejected_fraction();
        self.ratio_max = self.facts.ratio_max;
        self.entropy = self.sums.entropy / self.sums.entropy_tokens.max(1) as f64;
    }

    /// Tokens of a mini-batch that the objective has rejected before it was evaluated.
    pub fn add_left_out(&mut self, tokens: u64) {
        self.sums.left_out += tokens;
        self.set_rejected_fraction();
    }

    fn set_rejected_fraction(&mut self) {
        let (left_out, Facts { tokens, rejected, .. }) = (self.sums.left_out, self.facts);
        self.rejected_fraction = (rejected + left_out) as f64 / (tokens + left_out).max(1) as f64;
    }

    fn add_reference_kl(&mut self, sum: f64, tokens: u64) {
        self.sums.reference_kl += sum;
        self.sums.reference_tokens += tokens;
        self.reference_kl = Some(self.sums.reference_kl / self.sums.reference_tokens.max(1) as f64);
    }

    /// An update was made or skipped.
    pub fn add_update(&mut self, report: UpdateReport) {
        self.updates += u64::from(report.applied);
        self.skipped_updates += u64::from(!report.applied);
        if report.applied {
            self.sums.norms += report.grad_norm;
        }
        self.grad_norm = self.sums.norms / self.updates.max(1) as f64;
        self.loss = self.sums.loss / (self.updates + self.skipped_updates).max(1) as f64;
    }

    /// Adds the critic's loss on a micro-batch; all ranks add all of them, in their order.
    pub fn add_value_loss(&mut self, loss: f64) {
        self.sums.value_loss += loss;
    }

    /// An update of the critic was made or skipped.
    pub fn add_value_update(&mut self, report: UpdateReport) {
        self.sums.value_updates += 1;
        self.value_loss = Some(self.sums.value_loss / self.sums.value_updates as f64);
        if report.applied {
            self.sums.value_applied += 1;
            self.sums.value_norms += report.grad_norm;
        }
        self.value_grad_norm = Some(self.sums.value_norms / self.sums.value_applied.max(1) as f64);
    }

    /// Takes note of an evaluation after the step.
    pub fn add_test(&mut self, tested: Tested) {
        self.test_accuracy = Some(tested.accuracy);
        self.test_reward = tested.reward;
        self.test_avg_at_k = tested.avg_at_k;
    }

    /// Adds the time of something that is done beside the step: `test`, `log`, `checkpoint`.
    pub fn add_phase(&mut self, name: &str, seconds: f64) {
        for name in [name, "total"] {
            *self.timing.entry(name.to_string()).or_default() += seconds;
        }
    }

    /// Response tokens per second of rollout.
    pub fn rollout_tokens_per_s(&self) -> f64 {
        self.response_tokens as f64 / self.timing.get("rollout").copied().unwrap_or(f64::NAN)
    }

    /// Response tokens per second of the updates.
    pub fn training_tokens_per_s(&self) -> f64 {
        self.response_tokens as f64 / self.timing.get("update").copied().unwrap_or(f64::NAN)
    }
}

/// Times the phases of a step.
pub struct Phases {
    began: Instant,
    last: Instant,
    seconds: BTreeMap<String, f64>,
}

impl Phases {
    /// The step begins.
    pub fn start() -> Phases {
        let now = Instant::now();
        Phases { began: now, last: now, seconds: BTreeMap::new() }
    }

    /// A phase ends here.
    pub fn end(&mut self, name: &str) {
        let now = Instant::now();
        self.seconds.insert(name.to_string(), (now - self.last).as_secs_f64());
        self.last = now;
    }

    /// A part of a phase gets a name of its own.
    pub fn split(&mut self, phase: &str, part: &str, seconds: f64) {
        if let Some(whole) = self.seconds.get_mut(phase) {
            *whole -= seconds;
        }
        self.seconds.insert(part.to_string(), seconds);
    }

    /// The step ends.
    pub fn finish(mut self) -> BTreeMap<String, f64> {
        self.seconds.insert("total".to_string(), self.began.elapsed().as_secs_f64());
        self.seconds
    }
}
