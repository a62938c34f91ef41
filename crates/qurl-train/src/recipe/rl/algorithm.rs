//! `[algorithm]`: from rewards to the loss.

use qurl_rl::{Estimator, KlControl, KlEstimator, LossAggMode, Objective, OverlongBuffer};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
