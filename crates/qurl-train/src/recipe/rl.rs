//! `[data]`, `[rollout]`, `[algorithm]`, `[actor]`, `[critic]`, `[run]`: reinforcement learning.
//!
//! Names follow verl where its users know them. Every part has vetted defaults; what cannot be guessed
//! (sizes, learning rates) has none.

mod algorithm;
mod rollout;
mod run;
mod updates;

pub use algorithm::{Algorithm, FilterGroups, KlInReward};
pub use rollout::{NormNoise, Rollout, Workers};
pub use run::{Alarm, AlarmAction, Run, Stage};
pub use updates::Updates;

use super::{Check, RecipeError, Trainer};
use crate::shards;
use qurl_model::compute::TapeOptions;
use qurl_rl::{Estimator, LossAggMode, RlError};
use qurl_rollout::{RolloutError, Sampling};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `[data]`: sizes of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Prompts of a step; each is answered `rollout.n` times.
    pub train_batch_size: usize,
    /// The longest prompt in tokens; problems with longer ones are left out, and it is said how many.
    pub max_prompt_length: usize,
    /// Most tokens of a response; a longer one is cut off there.
    pub max_response_length: usize,
}

/// Everything that reinforcement learning needs, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct RlPlan {
    /// Sizes of a step.
    pub data: Data,
    /// How responses are sampled.
    pub rollout: Rollout,
    /// From rewards to the loss.
    pub algorithm: Algorithm,
    /// The actor's updates.
    pub actor: Updates,
    /// The critic's updates, where there is one.
    pub critic: Option<Updates>,
    /// How long.
    pub run: Run,
    /// Temperature and top-p of evaluations, where the task's preset says so.
    pub preset_sampling: Option<(f32, f32)>,
}

/// Shortest mean length of the sequences of a micro-batch that its memory is made for; shorter ones make it
/// smaller.
const SHORT_SEQUENCE: usize = 16;

impl RlPlan {
    /// The memory of a micro-batch.
    pub fn tape(&self, trainer: &Trainer) -> TapeOptions {
        let rows = trainer.micro_tokens.max(self.longest());
        TapeOptions { rows, sequences: rows.div_ceil(SHORT_SEQUENCE), recompute: trainer.recompute }
    }

    /// Passes that a shard of an update takes at most.
    pub fn passes_of_shard(&self, of: &Updates, trainer: &Trainer) -> usize {
        let (sequences, longest) = (of.ppo_mini_batch_size * self.max_responses(), self.longest());
        shards::most_passes(sequences, longest, trainer.shards, self.tape(trainer))
    }

    /// Most responses to a prompt, at any step.
    fn max_responses(&self) -> usize {
        let stages = self.run.stages.iter().filter_map(|stage| stage.n);
        stages.chain([self.rollout.n]).max().unwrap_or(1)
    }

    /// Bytes of the tensors of a checkpoint of a model with so many parameters.
    pub fn checkpoint_bytes(&self, parameters: u64) -> u64 {
        let learners = 1 + u64::from(self.critic.is_some());
        let copies =
            u64::from(self.algorithm.needs_reference()) + u64::from(self.run.update_metrics_freq > 0);
        4 * parameters * (3 * learners + copies + self.rollout.lag)
    }

    /// How `run.test_k` samples are taken.
    pub fn test_sampling(&self) -> Sampling {
        let (temperature, top_p) = self.preset_sampling.unwrap_or((self.rollout.temperature, 1.0));
        Sampling {
            temperature: self.run.test_temperature.unwrap_or(temperature),
            top_p: self.run.test_top_p.unwrap_or(top_p),
            top_k: 0,
            min_p: 0.0,
        }
    }

    /// Longest sequence of the whole run.
    pub fn longest(&self) -> usize {
        let stages = self.run.stages.iter().map(|s| s.max_response_length).max().unwrap_or(0);
        self.data.max_prompt_length + self.data.max_response_length.max(stages)
    }

    /// Most tokens of a response, and responses per prompt, at a step.
    pub fn sizes_at(&self, step: u64) -> (usize, usize) {
        let stage = self.run.stages.iter().rfind(|s| s.from_step <= step);
        let length = stage.map_or(self.data.max_response_length, |s| s.max_response_length);
        (length, stage.and_then(|s| s.n).unwrap_or(self.rollout.n))
    }

    /// Learning rate of a step (from 1) under `updates`. Where a stage has a new optimizer the schedule
    /// begins again, as that of a run of its own: it warms up from the stage's first step and decays up to
    /// the next such stage.
    pub fn lr_at(&self, updates: &Updates, step: u64) -> f64 {
        let fresh = || self.run.stages.iter().filter(|s| s.new_optimizer).map(|s| s.from_step);
        let first = fresh().rfind(|&from| from <= step).unwrap_or(1);
        let end = fresh().find(|&from| from > step).unwrap_or(u64::MAX).min(self.run.total_steps + 1);
        updates.schedule(end.saturating_sub(first)).at(step.saturating_sub(first))
    }

    pub(crate) fn check(&self, check: Check) -> Result<(), RecipeError> {
        let RlPlan { data, rollout, algorithm, actor, critic, run, preset_sampling: _ } = self;
        let grouped = matches!(
            algorithm.adv_estimator,
            Estimator::Grpo { .. }
                | Estimator::DrGrpo {}
                | Estimator::Rloo {}
                | Estimator::ReinforcePlusPlusBaseline {}
        );
        let check_n = |key: &str, n: usize| {
            check.that(key, n, !grouped || n > 1, "at least 2 for advantages within a group")?;
            let expected = "at least 2 with algorithm.filter_groups, which drops groups of one reward";
            check.that(key, n, algorithm.filter_groups.is_none() || n > 1, expected)
        };
        check_n("rollout.n", rollout.n)?;
        let whole = rollout.sampling().is_full() || rollout.allow_truncated_sampling;
        let expected = "top_p = 1 and top_k = 0, because the trainer scores the whole distribution (or set \
                        rollout.allow_truncated_sampling)";
        check.that("rollout.top_p", rollout.top_p, whole, expected)?;
        let (lag, steps) = (rollout.lag, run.total_steps);
        let expected = format!(
            "less than run.total_steps = {steps}: else all rollouts are those of the weights at the start"
        );
        check.that("rollout.lag", lag, lag == 0 || lag < steps, &expected)?;
        if let Some(workers) = &rollout.workers {
            let address = workers.listen.parse::<std::net::SocketAddr>().is_ok();
            check.that(
                "rollout.workers.listen",
                &workers.listen,
                address,
                "an IP address and a port, as in 127.0.0.1:7979",
            )?;
        }
        let rl = |section: &str, result: Result<(), RlError>| match result {
            Ok(()) => Ok(()),
            Err(RlError::Setting { key, value, expected }) => {
                let key = key.strip_prefix("overlong_buffer.").unwrap_or(key);
                check.that(&format!("{section}.{key}"), value, false, expected)
            }
            Err(error) => check.that(section, error, false, "settings in their ranges"),
        };
        rl("algorithm.adv_estimator", algorithm.adv_estimator.check())?;
        rl("algorithm.objective", algorithm.objective.check())?;
        if let Some(kl) = &algorithm.kl_in_reward {
            let kl = kl.kl_ctrl;
            let most = data.train_batch_size * self.max_responses();
            rl("algorithm.kl_in_reward.kl_ctrl", kl.check().and_then(|()| kl.check_samples(most)))?;
        }
        if let Some(buffer) = &algorithm.overlong_buffer {
            rl("algorithm.overlong_buffer", buffer.check(data.max_response_length))?;
        }
        let mode = algorithm.objective.loss_agg_mode(algorithm.loss_agg_mode);
        let fits = algorithm.loss_scale_factor.is_none() || mode == LossAggMode::SeqMeanTokenSumNorm;
        check.that(
            "algorithm.loss_scale_factor",
            algorithm.loss_scale_factor.unwrap_or(0.0),
            fits,
            "nothing: it belongs to algorithm.loss_agg_mode = \"seq-mean-token-sum-norm\", which gspo does \
             not have",
        )?;
        actor.check(check, "actor", data.train_batch_size)?;
        check.that(
            "actor.cliprange_value",
            actor.cliprange_value.unwrap_or(0.0),
            actor.cliprange_value.is_none(),
            "nothing: it belongs to [critic]",
        )?;
        let needed = algorithm.adv_estimator.needs_critic();
        let found = if critic.is_some() { "there" } else { "missing" };
        check.that(
            "critic",
            found,
            critic.is_some() == needed,
            "a section exactly when algorithm.adv_estimator is gae",
        )?;
        if let Some(critic) = critic {
            critic.check(check, "critic", data.train_batch_size)?;
        }
        if let Err(RolloutError::OutOfRange { found, expected, .. }) = self.test_sampling().check(usize::MAX)
        {
            check.that("run.test_temperature", found, false, &expected)?;
        }
        let starts: Vec<u64> = run.stages.iter().map(|s| s.from_step).collect();
        let ordered = starts.windows(2).all(|w| w[0] < w[1]);
        check.that("run.stages", format!("{starts:?} in from_step"), ordered, "stages in their order")?;
        for (i, stage) in run.stages.iter().enumerate() {
            let key = |name: &str| format!("run.stages[{i}].{name}");
            let there = !stage.new_reference || algorithm.needs_reference();
            let expected =
                "false where there is no reference model: no algorithm.kl_loss_coef and no kl_in_reward";
            check.that(&key("new_reference"), stage.new_reference, there, expected)?;
            check_n(&key("n"), stage.n.unwrap_or(rollout.n))?;
            if let Some(buffer) = &algorithm.overlong_buffer {
                let (found, longest) = (buffer.len, stage.max_response_length);
                let expected = format!("at most {} = {longest}", key("max_response_length"));
                check.that("algorithm.overlong_buffer.len", found, found <= longest, &expected)?;
            }
        }
        Ok(())
    }
}
