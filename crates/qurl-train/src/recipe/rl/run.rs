//! `[run]`: how long, and what is measured on the way.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
