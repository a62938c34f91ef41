//! `[data]`, `[rollout]`, `[algorithm]`, `[actor]`, `[critic]`, `[run]`: reinforcement learning.
//!
//! Names follow verl where its users know them. Every part has vetted defaults; what cannot be guessed
//! (sizes, learning rates) has none.

use super::{Check, RecipeError, Trainer, format_name, schema};
use crate::optimizer::AdamWOptions;
use crate::schedule::{Decay, Schedule};
use crate::shards;
use crate::workers::Without;
use qurl_kernels::Format;
use qurl_kernels::KvFormat;
use qurl_model::compute::TapeOptions;
use qurl_rl::{Estimator, KlControl, KlEstimator, LossAggMode, Objective, OverlongBuffer, RlError};
use qurl_rollout::{EngineOptions, RolloutError, Sampling};
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

/// `[rollout]`: how responses are sampled, and with which copy of the actor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rollout {
    /// Responses to each prompt. Estimators that compare within a group need at least 2.
    pub n: usize,
    /// Number format of the weights that sample; training is not quantized, unless `trainer.forward` runs its
    /// forward passes with these weights, too.
    #[serde(with = "format_name")]
    #[schemars(schema_with = "schema::formats")]
    pub format: Format,
    /// Quantize the output head, too.
    pub quantize_head: bool,
    /// Round weights up or down at random (seeded) instead of to the nearest code.
    pub stochastic_rounding: bool,
    /// Number format of stored keys and values; by default int8 or fp8 where `rollout.format` is, and else
    /// what the model computes in.
    #[serde(with = "kv_format_name", skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::kv_formats")]
    pub kv_cache: Option<KvFormat>,
    /// Temperature of sampling; log-probs of the training are taken at it, too.
    pub temperature: f32,
    /// Nucleus sampling. 1 samples from the whole distribution, as training needs it.
    pub top_p: f32,
    /// Sample among so many tokens. 0 samples from the whole distribution, as training needs it.
    pub top_k: u32,
    /// Allow `rollout.top_p` and `rollout.top_k` to cut off tokens although training scores the whole
    /// distribution.
    pub allow_truncated_sampling: bool,
    /// Update-aware quantization: the factor by which weights are made smaller and their inputs larger, 1 for
    /// none.
    pub uaq: f64,
    /// Noise on the gains of the norms of the copy that samples, for exploration (QeRL's adaptive
    /// quantization noise). Training, scoring and evaluations are without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_noise: Option<NormNoise>,
    /// How many steps rollouts lag behind: step t trains on rollouts of the weights that step t - lag began
    /// with (the first `lag` steps on those of the start). 0 samples with the newest weights.
    #[serde(skip_serializing_if = "is_zero")]
    pub lag: u64,
    /// Other processes that sample for this one (`qurl worker --join URL`), and come and go. They and the
    /// trainer share the secret in the environment variable QURL_WORKER_SECRET.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<Workers>,
    /// Memory for keys and values, in MiB.
    pub kv_cache_mb: usize,
    /// Tokens of a page of keys and values.
    pub page_size: usize,
    /// Most responses that are sampled at the same time.
    pub max_num_seqs: usize,
    /// Most tokens, of prompts and responses together, that are computed at once.
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
            norm_noise: None,
            lag: 0,
            workers: None,
            kv_cache_mb: 1024,
            page_size: 16,
            max_num_seqs: 256,
            max_num_batched_tokens: 1024,
        }
    }
}

/// `[rollout.workers]`: other processes that sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Workers {
    /// Address and port where the trainer listens for workers; port 0 takes a free one. TLS is left to a
    /// proxy.
    pub listen: String,
    /// What happens while no worker is there: the trainer samples by itself, or waits.
    pub without: Without,
    /// Seconds of silence after which the prompts of a worker are given to others.
    pub lease_s: u64,
    /// The share of samples that the trainer computes again, to find workers that lie or fail.
    pub spot_check: f64,
    /// Allow workers on other kinds of devices than the trainer's. Their samples are as good, but not the same
    /// bits.
    pub any_device: bool,
}

impl Default for Workers {
    fn default() -> Self {
        Workers {
            listen: "127.0.0.1:7979".to_string(),
            without: Without::Trainer,
            lease_s: 60,
            spot_check: 0.02,
            any_device: false,
        }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Rollout {
    /// The version of the weights that a step's rollouts are made with: the step that began with them.
    pub fn version_at(&self, step: u64) -> u64 {
        step.saturating_sub(self.lag).max(1)
    }

    /// The versions older than its own that the steps after `step` still sample with.
    pub fn old_versions_after(&self, step: u64) -> std::ops::Range<u64> {
        self.version_at(step + 1)..step + 1
    }

    /// Size of the engine.
    pub fn engine_options(&self) -> EngineOptions {
        EngineOptions {
            kv_bytes: self.kv_cache_mb << 20,
            page_size: self.page_size,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            share_prefixes: false,
        }
    }

    /// Number format of keys and values, where it is not that of the model: long contexts are read at the
    /// speed of memory, so 8 bits halve their time.
    pub fn kv_format(&self) -> Option<KvFormat> {
        self.kv_cache.or(match self.format {
            Format::Int8 => Some(KvFormat::Int8),
            Format::Fp8 | Format::Fp8Block => Some(KvFormat::Fp8),
            Format::F32 | Format::Bf16 | Format::Int4 | Format::Nvfp4 => None,
        })
    }

    /// How training rollouts are sampled.
    pub fn sampling(&self) -> Sampling {
        Sampling { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, min_p: 0.0 }
    }
}

/// `[rollout.norm_noise]`: normal noise on norm gains, with a deviation that falls from stage to stage.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NormNoise {
    /// Deviation of the noise in the first stage with noise.
    pub sigma_start: f64,
    /// Deviation in the last stage; between the two it falls by the same factor from stage to stage.
    pub sigma_end: f64,
    /// Stages with noise, of equally many steps. One more without noise comes before them.
    pub num_stages: u64,
}

impl Default for NormNoise {
    fn default() -> Self {
        NormNoise { sigma_start: 1e-2, sigma_end: 1e-4, num_stages: 10 }
    }
}

impl NormNoise {
    /// The deviation at a step (from 1) of a run of so many.
    pub fn sigma_at(&self, step: u64, total_steps: u64) -> f64 {
        let stage =
            (step.saturating_sub(1) * (self.num_stages + 1) / total_steps.max(1)).min(self.num_stages);
        match stage {
            0 => 0.0,
            1 => self.sigma_start,
            stage => {
                let share = (stage - 1) as f64 / (self.num_stages - 1).max(1) as f64;
                self.sigma_start * (self.sigma_end / self.sigma_start).powf(share)
            }
        }
    }
}

/// Dynamic sampling (DAPO): groups whose rewards are all equal are dropped and others sampled instead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FilterGroups {
    /// Most batches of prompts that are sampled to fill one step; a step that is not full then ends the run
    /// with an error.
    pub max_num_gen_batches: usize,
    /// Train on the whole mini-batches that were found by then instead, however few.
    #[serde(default)]
    pub allow_fewer: bool,
}

/// KL to the reference model, taken off the rewards.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KlInReward {
    /// How the KL of a token is estimated.
    #[serde(default = "KlInReward::default_penalty")]
    pub kl_penalty: KlEstimator,
    /// The coefficient of the KL, fixed or adaptive.
    pub kl_ctrl: KlControl,
}

impl KlInReward {
    fn default_penalty() -> KlEstimator {
        KlEstimator::K1
    }
}

/// `[algorithm]`: from rewards to the loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Algorithm {
    /// How rewards become advantages; this is what tells PPO from GRPO.
    pub adv_estimator: Estimator,
    /// The policy loss, and how it corrects for the quantized policy that sampled the tokens.
    #[serde(default)]
    pub objective: Objective,
    /// How the losses of tokens become the loss of a mini-batch.
    #[serde(default)]
    pub loss_agg_mode: LossAggMode,
    /// The constant length of `seq-mean-token-sum-norm`; not set means the longest response of the
    /// mini-batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale_factor: Option<f64>,
    /// Coefficient of the entropy bonus; 0 for none.
    #[serde(default)]
    pub entropy_coeff: f64,
    /// Coefficient of the KL to the reference model in the loss; 0 for none. The reference model is the one
    /// the run starts from.
    #[serde(default)]
    pub kl_loss_coef: f64,
    /// How that KL is estimated.
    #[serde(default = "Algorithm::default_kl")]
    pub kl_loss_type: KlEstimator,
    /// KL to the reference model, taken off the rewards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_in_reward: Option<KlInReward>,
    /// Dynamic sampling (DAPO): groups whose rewards are all equal are dropped, and others are sampled
    /// instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter_groups: Option<FilterGroups>,
    /// A penalty for responses near the limit of their length (DAPO).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlong_buffer: Option<OverlongBuffer>,
}

impl Algorithm {
    fn default_kl() -> KlEstimator {
        KlEstimator::K3
    }

    /// Whether the log-probs of prox are needed before the first update, for rewards or to reject sequences.
    /// Elsewhere that update computes those of its own mini-batch.
    pub fn needs_prox_first(&self) -> bool {
        self.kl_in_reward.is_some() || self.objective.rejects()
    }

    /// Whether the reference model is needed.
    pub fn needs_reference(&self) -> bool {
        self.kl_loss_coef != 0.0 || self.kl_in_reward.is_some()
    }
}

/// `[actor]` and `[critic]`: an optimizer and how often it is used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Updates {
    /// The learning rate at its peak.
    pub lr: f64,
    /// First steps, over which the learning rate grows to its peak.
    #[serde(default)]
    pub lr_warmup_steps: u64,
    /// What follows the warm-up.
    #[serde(default)]
    pub decay: Decay,
    /// Where the cosine ends, as a share of the peak.
    #[serde(default)]
    pub min_lr_ratio: f64,
    /// Prompts of a mini-batch, each of which makes one update; a divisor of `data.train_batch_size`.
    pub ppo_mini_batch_size: usize,
    /// Passes over the responses of a step.
    #[serde(default = "Updates::one")]
    pub ppo_epochs: usize,
    /// The AdamW optimizer.
    #[serde(default)]
    pub optim: AdamWOptions,
    /// How far a value of the critic may move from its old one in a step; for `[critic]` only.
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
        let mini = self.ppo_mini_batch_size;
        let fits = mini > 0 && mini <= batch && batch.is_multiple_of(mini);
        let expected = format!("a divisor of data.train_batch_size = {batch}");
        check.that(&key("ppo_mini_batch_size"), mini, fits, &expected)
    }
}

/// What happens when the run leaves its band.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AlarmAction {
    /// Say so, and continue.
    #[default]
    Warn,
    /// End the run.
    Stop,
}

/// `[run.alarm]`: the band of a healthy run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Alarm {
    /// The largest KL of the quantized policy to the full-precision one.
    pub mismatch_kl: f64,
    /// The smallest mean entropy.
    pub entropy_low: f64,
    /// The largest mean entropy.
    pub entropy_high: f64,
    /// What to do where one of these bounds is crossed.
    pub action: AlarmAction,
    /// Steps in a row with a symptom of broken training (every update skipped, gradients of zero, uniform
    /// logits, no entropy left) after which the run ends with an error; 0 for never.
    pub patience: u64,
}

impl Default for Alarm {
    fn default() -> Self {
        Alarm {
            mismatch_kl: 0.05,
            entropy_low: 0.0,
            entropy_high: 20.0,
            action: AlarmAction::Warn,
            patience: 3,
        }
    }
}

/// A stretch of the run with its own sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// The first step of the stage.
    pub from_step: u64,
    /// Most tokens of a response from then on.
    pub max_response_length: usize,
    /// Responses to each prompt from then on; `rollout.n` where it is not given, whatever the stage before
    /// had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<usize>,
    /// At the start of the stage the actor as it is then becomes the reference model, and an adaptive
    /// coefficient of the KL begins again.
    #[serde(default)]
    pub new_reference: bool,
    /// At the start of the stage the optimizers of actor and critic begin again, with their schedule of the
    /// learning rate.
    #[serde(default)]
    pub new_optimizer: bool,
}

/// `[run]`: how long, and what is measured on the way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Number of steps.
    pub total_steps: u64,
    /// Measure the accuracy on held-out problems every so many steps; 0 for before and after the run only.
    #[serde(default)]
    pub test_freq: u64,
    /// Held-out problems that are measured on, at most as many as there are.
    #[serde(default = "Run::default_problems")]
    pub test_problems: u64,
    /// Samples of each held-out problem beside the greedy response, for Avg@k; 0 for none.
    #[serde(default)]
    pub test_k: usize,
    /// Temperature of these samples; by default that of the task's preset, else of the rollout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_temperature: Option<f32>,
    /// Nucleus sampling of these samples; by default that of the task's preset, else 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_top_p: Option<f32>,
    /// Measure the update of the weights, the error of quantization and the quantized values that changed
    /// every so many steps; 0 for never.
    #[serde(default = "Run::default_update_freq")]
    pub update_metrics_freq: u64,
    /// Write some responses to `rollouts/` at the first step and every so many; 0 for never.
    #[serde(default = "Run::default_rollout_freq")]
    pub rollout_log_freq: u64,
    /// Responses that are written then.
    #[serde(default = "Run::default_rollout_samples")]
    pub rollout_log_samples: usize,
    /// Tokens of a step for which the KL of the quantized policy to the full-precision one is measured over
    /// the whole vocabulary; 0 for none.
    #[serde(default = "Run::default_full_kl")]
    pub full_kl_positions: usize,
    /// Leave the scaling of `rollout.uaq` in the model that the run writes, which is marked then.
    #[serde(default)]
    pub export_uaq: bool,
    /// The band of a healthy run, and what happens outside it.
    #[serde(default)]
    pub alarm: Alarm,
    /// Stretches of the run with other sizes, such as a growing context: one `[[run.stages]]` each, in order.
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
        let stages = self.run.stages.iter().filter_map(|stage| stage.n);
        let n = stages.chain([self.rollout.n]).max().unwrap_or(1);
        let (sequences, longest) = (of.ppo_mini_batch_size * n, self.longest());
        shards::most_passes(sequences, longest, trainer.shards, self.tape(trainer))
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
            Estimator::Grpo { .. } | Estimator::DrGrpo {} | Estimator::Rloo {}
        );
        let in_a_group = "at least 2 for advantages within a group";
        check.that("rollout.n", rollout.n, !grouped || rollout.n > 1, in_a_group)?;
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
            rl("algorithm.kl_in_reward.kl_ctrl", kl.kl_ctrl.check())?;
        }
        if let Some(buffer) = &algorithm.overlong_buffer {
            rl("algorithm.overlong_buffer", buffer.check(data.max_response_length))?;
        }
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
            let n = stage.n.unwrap_or(rollout.n);
            check.that(&key("n"), n, !grouped || n > 1, in_a_group)?;
            if let Some(buffer) = &algorithm.overlong_buffer {
                let (found, longest) = (buffer.len, stage.max_response_length);
                let expected = format!("at most {} = {longest}", key("max_response_length"));
                check.that("algorithm.overlong_buffer.len", found, found <= longest, &expected)?;
            }
        }
        Ok(())
    }
}

/// A key/value format by its name.
mod kv_format_name {
    use qurl_kernels::KvFormat;
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
        found.map(Some).ok_or_else(|| {
            de::Error::custom(format!("unknown kv_cache format {name:?}; expected one of {known}"))
        })
    }
}
