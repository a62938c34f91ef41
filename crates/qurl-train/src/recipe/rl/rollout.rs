//! `[rollout]`: how responses are sampled, and with which copy of the actor.

use crate::recipe::{format_name, schema};
use crate::workers::Without;
use qurl_kernels::{Device, Format, KvFormat};
use qurl_rollout::{EngineOptions, Sampling};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// Tokens of a page of keys and values; 64 on a GPU and 16 on a CPU, where it is not given. It changes no
    /// bit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_size: Option<usize>,
    /// Most responses that are sampled at the same time.
    pub max_num_seqs: usize,
    /// Most tokens, of prompts and responses together, that are computed at once; 8192 on a GPU and 1024 on a
    /// CPU, where it is not given. It changes no bit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_num_batched_tokens: Option<usize>,
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
            page_size: None,
            max_num_seqs: 256,
            max_num_batched_tokens: None,
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
    /// The share of samples that the trainer checks by computing them again, to find workers that lie or
    /// fail: all log-probs and two of the tokens (docs/workers.md).
    pub spot_check: f64,
    /// Allow workers on other kinds of devices than the trainer's. Their samples are as good, but not the
    /// same bits.
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

    /// Size of the engine on a device.
    pub fn engine_options<D: Device>(&self, device: &D) -> EngineOptions {
        let defaults = EngineOptions::of_device(device);
        EngineOptions {
            kv_bytes: self.kv_cache_mb << 20,
            page_size: self.page_size.unwrap_or(defaults.page_size),
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(defaults.max_num_batched_tokens),
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
