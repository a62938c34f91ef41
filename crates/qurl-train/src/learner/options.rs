//! How a learner computes, and what it starts from.

use crate::optimizer::AdamWOptions;
use qurl_kernels::{Format, KvFormat};
use qurl_model::compute::{Base, NetworkOptions, TapeOptions};
use qurl_model::{Lora, ModelConfig, ParamInfo, Params, params};

/// How a learner computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnerOptions {
    /// f32, or bf16 with f32 master weights and sums.
    pub compute: Format,
    /// Longest sequence.
    pub positions: usize,
    /// Whether blocks are packed for the forward pass alone ([`NetworkOptions::pack_once`]).
    pub pack_once: bool,
    /// Format of keys and values, where a forward pass of training is run by a network that stores them in
    /// another than `compute` does ([`accumulate_straight`](super::Learner::accumulate_straight)).
    pub kv_format: Option<KvFormat>,
    /// Micro-batches and recomputation.
    pub tape: TapeOptions,
    /// The optimizer.
    pub adamw: AdamWOptions,
    /// Adapters that are trained beside a frozen base, instead of all weights.
    pub lora: Option<LoraOptions>,
}

/// Adapters beside a frozen base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraOptions {
    /// The adapters.
    pub lora: Lora,
    /// Number format of the base.
    pub base_format: Format,
    /// Whether its output head has that format, too.
    pub quantize_head: bool,
}

impl LearnerOptions {
    /// Names and shapes of what is trained; a critic has a value head beside it.
    pub(crate) fn shapes(&self, config: &ModelConfig) -> Params<ParamInfo> {
        self.lora.map_or_else(|| params::shapes(config, false), |lora| lora.lora.shapes(config))
    }

    /// Of the network that it trains.
    pub(super) fn network(&self, config: &ModelConfig) -> NetworkOptions {
        let format = self.lora.map_or(self.compute, |lora| lora.base_format);
        let mut options = NetworkOptions {
            positions: self.positions,
            pack_once: self.pack_once,
            ..NetworkOptions::training(config, format)
        };
        if let Some(lora) = self.lora {
            options = if lora.quantize_head { options.quantize_head() } else { options };
            options.lora = Some(lora.lora);
            options.kv_format = self.kv_format.unwrap_or(options.kv_format);
        }
        options
    }
}

/// What a learner starts from.
#[derive(Clone, Copy)]
pub enum LearnerStart<'a> {
    /// Weights that are all trained.
    Whole(&'a Params<Vec<f32>>),
    /// A frozen base, and adapters beside it.
    Adapters(Base<'a>, &'a Params<Vec<f32>>),
}

/// What the derivatives of a loss by the log-prob and entropy of a target depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossScope {
    /// That target alone: the loss may be asked for some targets at a time, and the head computes its logits
    /// once.
    Token,
    /// All targets of its sequence: the loss is asked once for the whole micro-batch, and the head computes
    /// its logits again for the gradients.
    Sequence,
}
