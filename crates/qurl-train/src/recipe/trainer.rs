//! `[trainer]`: how and where a run computes.

use super::{Check, Recipe, RecipeError, Rollout, device_name, format_name, recompute_name, schema};
use qurl_kernels::{DeviceKind, Format};
use qurl_model::compute::Recompute;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How and where a run computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Trainer {
    /// Everything random follows from it: the same recipe with the same seed gives the same bits.
    pub seed: u64,
    /// Number format of the training; weights, moments and sums are kept in f32 either way.
    #[serde(with = "format_name")]
    #[schemars(schema_with = "schema::trained_formats")]
    pub compute: Format,
    /// Which weights run the forward passes of reinforcement learning: `full`, or those of the `rollout`.
    pub forward: Forward,
    /// Most tokens that are trained on at once, or one longest sequence where that has more. It bounds
    /// memory; results do not depend on it beyond rounding.
    pub micro_tokens: usize,
    /// What of a block's forward pass is not kept and is computed again in the backward pass, the last block
    /// apart, which changes no bit. `none`: nothing. `mlp`: the gate and up projections, which are most of
    /// the activations. `block`: all but the down projection, so that only the inputs of blocks are kept;
    /// the least memory. `true` and `false` are read as `block` and `none`.
    #[serde(with = "recompute_name")]
    #[schemars(schema_with = "schema::recomputations")]
    pub recompute: Recompute,
    /// Pack the weights of blocks once, for the forward pass, and unpack a layer's where the backward pass
    /// needs them: 2 bytes a parameter of the blocks less memory in bf16, for a copy of each layer's weights
    /// in every backward pass. It changes no bit.
    #[serde(skip_serializing_if = "is_false")]
    pub pack_once: bool,
    /// Shards that a mini-batch is cut into, a power of two. Each adds up a gradient of its own, and these
    /// are added in a fixed binary tree. A run may have any number of ranks that divides it and has the same
    /// bits with all of them; other shards round otherwise. One rank holds a few gradients more with many
    /// shards.
    pub shards: usize,
    /// What several ranks divide among them, by ZeRO's stages: 1 for master weights and moments; 3 for
    /// gradients and the weights packed for training, too, which are then gathered block by block in every
    /// pass. It changes no bit. With 3, shards that are one micro-batch each take the least memory.
    pub zero_stage: usize,
    /// Write a checkpoint every so many steps; 0 for none but the one that Ctrl-C makes. A warm start writes
    /// none.
    pub save_freq: u64,
    /// Most memory of the device that a run may take, in MiB, with the driver's share: a run whose plan needs
    /// more is refused, as one that the device does not hold, and on a GPU so is what it would allocate
    /// beyond it later on. By default all that is free. On a CPU it is the machine's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_budget_mb: Option<usize>,
    /// How many of the newest checkpoints are kept; a run resumes from the newest.
    pub keep_last: usize,
    /// How many of the checkpoints with the highest test accuracy are kept beside them, or in supervised
    /// training with the lowest validation loss.
    pub keep_best: usize,
    /// Where to compute; `auto` is a GPU if there is one, else the CPU.
    #[serde(with = "device_name")]
    #[schemars(schema_with = "schema::devices")]
    pub device: DeviceKind,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            seed: 1,
            compute: Format::Bf16,
            forward: Forward::Full,
            micro_tokens: 2048,
            recompute: Recompute::None,
            pack_once: false,
            shards: 1,
            zero_stage: 1,
            save_freq: 10,
            memory_budget_mb: None,
            keep_last: 2,
            keep_best: 1,
            device: DeviceKind::Auto,
        }
    }
}

/// For keys that are written only where they are set.
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

/// The weights that run the forward passes of reinforcement learning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Forward {
    /// Those of `trainer.compute`: the rollout's quantization is corrected for by the objective.
    #[default]
    Full,
    /// The engine's own packed weights, in `rollout.format` with the head and the cache of keys and values as
    /// the engine has them. Gradients go straight through the rounding to the weights in `trainer.compute`.
    /// The policy that samples is then the policy that is trained, to the bit, nothing is left to correct
    /// for, and scoring is as fast as prefill. After each update the weights are packed again. Held-out
    /// problems are solved by these weights, too: it is the quantized model that gets better.
    Rollout,
}

impl Recipe {
    /// A forward pass of the rollout's weights goes with gradients in bf16 alone: what is kept for them is.
    pub(super) fn check_forward(&self, check: Check) -> Result<(), RecipeError> {
        if self.trainer.forward == Forward::Full {
            return Ok(());
        }
        let stage = self.trainer.zero_stage;
        let expected = "1, since blocks that come one at a time cannot be run by the rollout's weights; or \
                        trainer.forward = \"full\"";
        check.that("trainer.zero_stage", stage, stage == 1, expected)?;
        let compute = self.trainer.compute;
        let expected = "bf16, which trainer.forward = \"rollout\" computes gradients in";
        check.that("trainer.compute", compute, compute == Format::Bf16, expected)?;
        let format = self.rollout.as_ref().map_or(Rollout::default().format, |r| r.format);
        let expected =
            "a format below f32: with trainer.forward = \"rollout\" gradients are computed in bf16";
        check.that("rollout.format", format, format != Format::F32, expected)?;
        let expected =
            "full: with [lora] the engine's base and adapters run the trainer's forward passes anyway";
        check.that("trainer.forward", "rollout", self.lora.is_none(), expected)?;
        let noisy = self.rollout.as_ref().is_some_and(|r| r.norm_noise.is_some());
        let expected = "no section with trainer.forward = \"rollout\": the noise is on the rollouts only, \
                        and here their weights train, too";
        check.that("rollout.norm_noise", "there", !noisy, expected)?;
        let lag = self.rollout.as_ref().map_or(0, |r| r.lag);
        let expected =
            "0: with trainer.forward = \"rollout\" the engine's weights are those that are trained";
        check.that("rollout.lag", lag, lag == 0, expected)
    }
}
