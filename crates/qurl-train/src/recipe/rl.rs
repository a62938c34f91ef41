//! `[data]`, `[rollout]`, `[algorithm]`, `[actor]`, `[critic]`, `[run]`: reinforcement learning.
//!
//! Names follow verl where its users know them. Every part has vetted defaults; what cannot be guessed (sizes, learning
//! rates) has none.

use super::{Check, RecipeError, Trainer, format_name};
use crate::optimizer::AdamWOptions;
use crate::schedule::{Decay, Schedule};
use qurl_kernels::Format;
use qurl_kernels::backend::KvFormat;
use qurl_model::compute::TapeOptions;
use qurl_rl::{Estimator, KlControl, KlEstimator, LossAggMode, Objective, OverlongBuffer};
use qurl_rollout::{EngineOptions, Sampling};
use serde::{Deserialize, Serialize};

/// `[data]`: sizes of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// Prompts of a step.
    pub train_batch_size: usize,
    /// Longest prompt in tokens.
    pub max_prompt_length: usize,
    /// Most tokens of a response.
    pub max_response_length: usize,
}

/// `[rollout]`: how responses are sampled, and with which copy of the actor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rollout {
    /// Responses per prompt.
    pub n: usize,
    /// Number format of the rollout's weights.
    #[serde(with = "format_name")]
    pub format: Format,
    /// Quantize the output head too.
    pub quantize_head: bool,
    /// Round weights up or down at random (seeded) instead of to the nearest code.
    pub stochastic_rounding: bool,
    /// Number format of stored keys and values; by default the one that fits `format`.
    #[serde(with = "kv_format_name", skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvFormat>,
    /// Sampling temperature; all policies are scored at it.
    pub temperature: f32,
    /// 1 samples from the whole distribution, as training needs it.
    pub top_p: f32,
    /// 0 samples from the whole distribution, as training needs it.
    pub top_k: u32,
    /// Allow `top_p` and `top_k` to cut off tokens although the trainer scores the whole distribution.
    pub allow_truncated_sampling: bool,
    /// Update-aware quantization: the invariant scale s, 1 for none.
    pub uaq: f64,
    /// Memory for keys and values, in MB.
    pub kv_cache_mb: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Most sequences computed at the same time.
    pub max_num_seqs: usize,
    /// Most tokens of an engine step.
    pub max_num_batched_tokens: usize,
}

impl Default for Rollout {
    fn default() -> Self {
        Rollout {
            n: 1,
            format: Format::Int8,
            quantize_head: false,
            stochastic_rounding: false,
            kv_cache: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            allow_truncated_sampling: false,
            uaq: 1.0,
            kv_cache_mb: 1024,
            page_size: 16,
            max_num_seqs: 256,
            max_num_batched_tokens: 1024,
        }
    }
}

impl Rollout {
    /// Size of the engine.
    pub fn engine_options(&self) -> EngineOptions {
        EngineOptions {
            kv_bytes: self.kv_cache_mb << 20,
            page_size: self.page_size,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
        }
    }

    /// How training rollouts are drawn.
    pub fn sampling(&self) -> Sampling {
        Sampling { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, min_p: 0.0 }
    }
}

/// Dynamic sampling (DAPO): groups whose rewards are all equal are dropped and others drawn instead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilterGroups {
    /// Most batches of prompts that are sampled to fill one; a step that is not full then is an error.
    pub max_num_gen_batches: usize,
    /// Train on the whole mini-batches that were found instead, however few.
    #[serde(default)]
    pub allow_fewer: bool,
}

/// KL to the reference model, taken off the rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlInReward {
    /// Estimator.
    #[serde(default = "KlInReward::default_penalty")]
    pub kl_penalty: KlEstimator,
    /// Fixed or adaptive coefficient.
    pub kl_ctrl: KlControl,
}

impl KlInReward {
    fn default_penalty() -> KlEstimator {
        KlEstimator::K1
    }
}

/// `[algorithm]`: from rewards to the loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Algorithm {
    /// From rewards to advantages.
    pub adv_estimator: Estimator,
    /// The policy loss.
    #[serde(default)]
    pub objective: Objective,
    /// From losses of tokens to the loss of a mini-batch.
    #[serde(default)]
    pub loss_agg_mode: LossAggMode,
    /// Constant length of `seq-mean-token-sum-norm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale_factor: Option<f64>,
    /// Coefficient of the entropy bonus.
    #[serde(default)]
    pub entropy_coeff: f64,
    /// Coefficient of the KL to the reference model in the loss; 0 for none.
    #[serde(default)]
    pub kl_loss_coef: f64,
    /// Its estimator.
    #[serde(default = "Algorithm::default_kl")]
    pub kl_loss_type: KlEstimator,
    /// KL to the reference model in the rewards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_in_reward: Option<KlInReward>,
    /// Dynamic sampling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter_groups: Option<FilterGroups>,
    /// Penalty for responses near the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlong_buffer: Option<OverlongBuffer>,
}

impl Algorithm {
    fn default_kl() -> KlEstimator {
        KlEstimator::K3
    }

    /// Whether the reference model is needed.
    pub fn needs_reference(&self) -> bool {
        self.kl_loss_coef != 0.0 || self.kl_in_reward.is_some()
    }
}

/// `[actor]` and `[critic]`: an optimizer and how often it is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Updates {
    /// Peak learning rate.
    pub lr: f64,
    /// Training steps of linear warm-up.
    #[serde(default)]
    pub lr_warmup_steps: u64,
    /// `constant` or `cosine` after the warm-up.
    #[serde(default)]
    pub decay: Decay,
    /// Where the cosine ends, as a share of the peak.
    #[serde(default)]
    pub min_lr_ratio: f64,
    /// Prompts of a mini-batch: one update each.
    pub ppo_mini_batch_size: usize,
    /// Passes over the batch of a step.
    #[serde(default = "Updates::one")]
    pub ppo_epochs: usize,
    /// The optimizer.
    #[serde(default)]
    pub optim: AdamWOptions,
    /// Critic only: how far a value may move from its old one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cliprange_value: Option<f64>,
}

impl Updates {
    fn one() -> usize {
        1
    }

    /// The learning rate over the steps of a run.
    pub fn schedule(&self, total_steps: u64) -> Schedule {
        Schedule {
            peak: self.lr,
            warmup_steps: self.lr_warmup_steps,
            total_steps,
            decay: self.decay,
            min_lr_ratio: self.min_lr_ratio,
        }
    }

    fn check(&self, check: Check, section: &str, batch: usize) -> Result<(), RecipeError> {
        let key = |name: &str| format!("{section}.{name}");
        check.that(&key("lr"), self.lr, self.lr.is_finite() && self.lr > 0.0, "a positive number")?;
        let mini = self.ppo_mini_batch_size;
        let fits = mini > 0 && mini <= batch && batch.is_multiple_of(mini);
        check.that(
            &key("ppo_mini_batch_size"),
            mini,
            fits,
            &format!("a divisor of data.train_batch_size = {batch}"),
        )?;
        check.that(&key("ppo_epochs"), self.ppo_epochs, self.ppo_epochs > 0, "at least 1")?;
        check.that(
            &key("min_lr_ratio"),
            self.min_lr_ratio,
            (0.0..=1.0).contains(&self.min_lr_ratio),
            "a number from 0 to 1",
        )?;
        let range = self.cliprange_value.is_none_or(|c| c > 0.0);
        check.that(&key("cliprange_value"), self.cliprange_value.unwrap_or(0.0), range, "a positive number")?;
        self.optim.check(check, &key("optim"))
    }
}

/// What happens when the run leaves its band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmAction {
    /// Say so and go on.
    #[default]
    Warn,
    /// End the run.
    Stop,
}

/// `[run.alarm]`: the band of a healthy run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Alarm {
    /// Largest KL(behav||prox).
    pub mismatch_kl: f64,
    /// Smallest mean entropy.
    pub entropy_low: f64,
    /// Largest mean entropy.
    pub entropy_high: f64,
    /// What to do when one of these bounds is crossed.
    pub action: AlarmAction,
    /// Steps in a row with a symptom of broken training (every update skipped, gradients of zero, uniform logits, no
    /// entropy left) after which the run ends with an error; 0 goes on for ever.
    pub patience: u64,
}

impl Default for Alarm {
    fn default() -> Self {
        Alarm { mismatch_kl: 0.05, entropy_low: 0.0, entropy_high: 20.0, action: AlarmAction::Warn, patience: 3 }
    }
}

/// A stretch of the run with its own sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// First step of the stage.
    pub from_step: u64,
    /// Most tokens of a response from then on.
    pub max_response_length: usize,
    /// Responses per prompt from then on; `rollout.n` where it is not given, whatever the stage before had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// At its start the actor as it is then becomes the reference model, and an adaptive KL coefficient begins again.
    #[serde(default)]
    pub new_reference: bool,
    /// At its start the optimizers of actor and critic begin again: moments, update count, and learning rate schedule.
    #[serde(default)]
    pub new_optimizer: bool,
}

/// `[run]`: how long, and what is measured on the way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Steps.
    pub total_steps: u64,
    /// Evaluate every so many steps; 0 for before and after only.
    #[serde(default)]
    pub test_freq: u64,
    /// Held-out problems of an evaluation.
    #[serde(default = "Run::default_problems")]
    pub test_problems: u64,
    /// Samples of each held-out problem beside the greedy response: an evaluation gives Avg@k then, too; 0 for none.
    #[serde(default)]
    pub test_k: usize,
    /// Temperature of these samples; by default that of the task's preset, else of the rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_temperature: Option<f32>,
    /// Nucleus sampling of these samples; by default that of the task's preset, else 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_top_p: Option<f32>,
    /// Measure weight update, quantization error and flipped codes every so many steps; 0 for never.
    #[serde(default = "Run::default_update_freq")]
    pub update_metrics_freq: u64,
    /// Write sampled rollouts at the first step and every so many; 0 for never.
    #[serde(default = "Run::default_rollout_freq")]
    pub rollout_log_freq: u64,
    /// Rollouts that are written then.
    #[serde(default = "Run::default_rollout_samples")]
    pub rollout_log_samples: usize,
    /// Response tokens of a step for which the mismatch KL is measured over the whole vocabulary; 0 for none.
    #[serde(default = "Run::default_full_kl")]
    pub full_kl_positions: usize,
    /// Leave the scaling of update-aware quantization in the model that the run writes, which then is marked.
    #[serde(default)]
    pub export_uaq: bool,
    /// The band of a healthy run.
    #[serde(default)]
    pub alarm: Alarm,
    /// Stretches with other sizes, such as a growing context.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<Stage>,
}

impl Run {
    fn default_problems() -> u64 {
        200
    }

    fn default_update_freq() -> u64 {
        16
    }

    fn default_rollout_freq() -> u64 {
        10
    }

    fn default_rollout_samples() -> usize {
        8
    }

    /// Whether the rollouts of a step are written.
    pub fn logs_rollouts_at(&self, step: u64) -> bool {
        self.rollout_log_freq > 0 && (step == 1 || step.is_multiple_of(self.rollout_log_freq))
    }

    fn default_full_kl() -> usize {
        64
    }
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

/// Shortest mean length of the sequences of a micro-batch that its memory is made for; shorter ones make it smaller.
const SHORT_SEQUENCE: usize = 16;

impl RlPlan {
    /// The memory of a micro-batch.
    pub fn tape(&self, trainer: &Trainer) -> TapeOptions {
        let rows = trainer.micro_tokens.max(self.longest());
        TapeOptions { rows, sequences: rows.div_ceil(SHORT_SEQUENCE), recompute: trainer.recompute }
    }

    /// Bytes of the tensors of a checkpoint of a model with so many parameters.
    pub fn checkpoint_bytes(&self, parameters: u64) -> u64 {
        let learners = 1 + u64::from(self.critic.is_some());
        let copies = u64::from(self.algorithm.needs_reference()) + u64::from(self.run.update_metrics_freq > 0);
        4 * parameters * (3 * learners + copies)
    }

    /// How `run.test_k` samples are drawn.
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

    /// Learning rate of a step (from 1) under `updates`. Where a stage has a new optimizer the schedule begins again,
    /// as that of a run of its own: it warms up from the stage's first step and decays up to the next such stage.
    pub fn lr_at(&self, updates: &Updates, step: u64) -> f64 {
        let fresh = || self.run.stages.iter().filter(|s| s.new_optimizer).map(|s| s.from_step);
        let first = fresh().rfind(|&from| from <= step).unwrap_or(1);
        let end = fresh().find(|&from| from > step).unwrap_or(u64::MAX).min(self.run.total_steps + 1);
        updates.schedule(end.saturating_sub(first)).at(step.saturating_sub(first))
    }

    pub(crate) fn check(&self, check: Check) -> Result<(), RecipeError> {
        let RlPlan { data, rollout, algorithm, actor, critic, run, preset_sampling: _ } = self;
        let sizes = [
            ("data.train_batch_size", data.train_batch_size, 1 << 20),
            ("data.max_prompt_length", data.max_prompt_length, 1 << 24),
            ("data.max_response_length", data.max_response_length, 1 << 24),
            ("rollout.n", rollout.n, 1 << 16),
            ("rollout.kv_cache_mb", rollout.kv_cache_mb, 1 << 24),
            ("rollout.max_num_seqs", rollout.max_num_seqs, 1 << 20),
            ("rollout.max_num_batched_tokens", rollout.max_num_batched_tokens, 1 << 24),
        ];
        for (key, found, most) in sizes {
            check.size(key, found, most)?;
        }
        let pages = rollout.page_size > 0 && rollout.page_size.is_multiple_of(16) && rollout.page_size <= 1 << 16;
        check.that("rollout.page_size", rollout.page_size, pages, "a multiple of 16, at most 65536")?;
        let grouped =
            matches!(algorithm.adv_estimator, Estimator::Grpo { .. } | Estimator::DrGrpo {} | Estimator::Rloo {});
        let in_a_group = "at least 2 for advantages within a group";
        check.that("rollout.n", rollout.n, !grouped || rollout.n > 1, in_a_group)?;
        if let Err(e) = rollout.sampling().check(usize::MAX) {
            check.that("rollout", e, false, "sampling settings in their ranges")?;
        }
        check.that(
            "rollout.temperature",
            rollout.temperature,
            rollout.temperature > 0.0,
            "above 0: training needs samples",
        )?;
        let whole = rollout.sampling().is_full() || rollout.allow_truncated_sampling;
        let expected = "top_p = 1 and top_k = 0, because the trainer scores the whole distribution (or set rollout.allow_truncated_sampling)";
        check.that("rollout.top_p", rollout.top_p, whole, expected)?;
        check.that(
            "rollout.uaq",
            rollout.uaq,
            (1.0 / 64.0..=64.0).contains(&rollout.uaq),
            "a number from 1/64 to 64, 1 for none",
        )?;
        let rl = |key: &str, result: Result<(), qurl_rl::RlError>| match result {
            Ok(()) => Ok(()),
            Err(e) => check.that(key, e, false, "a setting in its range"),
        };
        rl("algorithm.adv_estimator", algorithm.adv_estimator.check())?;
        rl("algorithm.objective", algorithm.objective.check())?;
        if let Some(kl) = &algorithm.kl_in_reward {
            rl("algorithm.kl_in_reward.kl_ctrl", kl.kl_ctrl.check())?;
        }
        if let Some(buffer) = &algorithm.overlong_buffer {
            rl("algorithm.overlong_buffer", buffer.check(data.max_response_length))?;
        }
        if let Some(filter) = &algorithm.filter_groups {
            let batches = filter.max_num_gen_batches;
            check.size("algorithm.filter_groups.max_num_gen_batches", batches, 1000)?;
        }
        let coefficient = |x: f64| (0.0..=1e3).contains(&x);
        let expected = "a number from 0 to 1000";
        check.that("algorithm.kl_loss_coef", algorithm.kl_loss_coef, coefficient(algorithm.kl_loss_coef), expected)?;
        check.that(
            "algorithm.entropy_coeff",
            algorithm.entropy_coeff,
            coefficient(algorithm.entropy_coeff),
            expected,
        )?;
        let factor = algorithm.loss_scale_factor.unwrap_or(1.0);
        check.that("algorithm.loss_scale_factor", factor, factor.is_finite() && factor > 0.0, "a positive number")?;
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
        check.that("run.total_steps", run.total_steps, run.total_steps > 0, "at least 1")?;
        let Alarm { mismatch_kl, entropy_low, entropy_high, .. } = run.alarm;
        for (key, value) in [("mismatch_kl", mismatch_kl), ("entropy_low", entropy_low), ("entropy_high", entropy_high)]
        {
            check.that(&format!("run.alarm.{key}"), value, !value.is_nan(), "a number")?;
        }
        check.that(
            "run.test_problems",
            run.test_problems,
            (1..=1 << 20).contains(&run.test_problems),
            "1 to 1048576",
        )?;
        check.that("run.test_k", run.test_k, run.test_k <= 1 << 16, "0 to 65536")?;
        if let Err(e) = self.test_sampling().check(usize::MAX) {
            check.that("run.test_temperature", e, false, "sampling settings in their ranges")?;
        }
        let starts: Vec<u64> = run.stages.iter().map(|s| s.from_step).collect();
        let ordered = starts.windows(2).all(|w| w[0] < w[1]);
        check.that("run.stages", format!("{starts:?} in from_step"), ordered, "stages in their order")?;
        for (i, stage) in run.stages.iter().enumerate() {
            let key = |name: &str| format!("run.stages[{i}].{name}");
            check.that(&key("from_step"), stage.from_step, stage.from_step > 0, "at least 1, the first step")?;
            let there = !stage.new_reference || algorithm.needs_reference();
            let expected = "false where there is no reference model: no algorithm.kl_loss_coef and no kl_in_reward";
            check.that(&key("new_reference"), stage.new_reference, there, expected)?;
            check.size(&key("max_response_length"), stage.max_response_length, 1 << 24)?;
            let n = stage.n.unwrap_or(rollout.n);
            check.size(&key("n"), n, 1 << 16)?;
            check.that(&key("n"), n, !grouped || n > 1, in_a_group)?;
            if let Some(buffer) = &algorithm.overlong_buffer {
                rl(&key("max_response_length"), buffer.check(stage.max_response_length))?;
            }
        }
        Ok(())
    }
}

/// A key/value format by its name.
mod kv_format_name {
    use qurl_kernels::backend::KvFormat;
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(format: &Option<KvFormat>, serializer: S) -> Result<S::Ok, S::Error> {
        match format {
            Some(format) => serializer.serialize_str(format.name()),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(deserializer: D) -> Result<Option<KvFormat>, D::Error> {
        let name = String::deserialize(deserializer)?;
        let found = KvFormat::ALL.into_iter().find(|f| f.name() == name);
        let known = KvFormat::ALL.map(KvFormat::name).join(", ");
        found
            .map(Some)
            .ok_or_else(|| de::Error::custom(format!("unknown kv_cache format {name:?}; expected one of {known}")))
    }
}
