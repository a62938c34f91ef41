//! Settings of the types of [`Objective`](super::recipe::Objective), each with its defaults.
//!
//! Every type spells its own keys out, so that an unknown one is an error and the reference of recipes says
//! of each what it means.

use super::correction::{self, Correction};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Clip range of the ratio.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Clip {
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// Dual clip: the ratio beyond which a token with a negative advantage no longer pushes. 3 is usual; not
    /// set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_ratio_c: Option<f64>,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Clip {
    fn default() -> Self {
        Self { clip_ratio_low: 0.2, clip_ratio_high: 0.2, clip_ratio_c: None, off_policy_mask: None }
    }
}

/// Settings of the objectives that truncate a weight.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Truncated {
    /// The largest weight C.
    pub c: f64,
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// Dual clip: the ratio beyond which a token with a negative advantage no longer pushes. 3 is usual; not
    /// set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_ratio_c: Option<f64>,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Truncated {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask } = Clip::default();
        let c = correction::default_truncation();
        Self { c, clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask }
    }
}

/// Settings of `icepop`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Icepop {
    /// The smallest ρ that is kept.
    pub low: f64,
    /// The largest ρ that is kept.
    pub high: f64,
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// Dual clip: the ratio beyond which a token with a negative advantage no longer pushes. 3 is usual; not
    /// set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_ratio_c: Option<f64>,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Icepop {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask } = Clip::default();
        let (low, high) = (correction::default_icepop_low(), correction::default_icepop_high());
        Self { low, high, clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask }
    }
}

/// Settings of `geo-mask`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GeoMask {
    /// The smallest geometric mean of ρ that is kept.
    pub low: f64,
    /// The largest geometric mean of ρ that is kept.
    pub high: f64,
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// Dual clip: the ratio beyond which a token with a negative advantage no longer pushes. 3 is usual; not
    /// set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_ratio_c: Option<f64>,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for GeoMask {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask } = Clip::default();
        let (low, high) = (correction::default_geo_low(), correction::default_geo_high());
        Self { low, high, clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask }
    }
}

/// Settings of `gspo`. Ratios of whole sequences stay far closer to 1, and so must the bounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Gspo {
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// How tokens are weighted for having been sampled by the quantized policy.
    pub correction: Correction,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Gspo {
    fn default() -> Self {
        Self {
            clip_ratio_low: 3e-4,
            clip_ratio_high: 4e-4,
            correction: Correction::None {},
            off_policy_mask: None,
        }
    }
}

/// Settings of `cispo`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Cispo {
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// How tokens are weighted for having been sampled by the quantized policy.
    pub correction: Correction,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Cispo {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, .. } = Clip::default();
        Self { clip_ratio_low, clip_ratio_high, correction: Correction::None {}, off_policy_mask: None }
    }
}

/// Settings of `kpop`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Kpop {
    /// The largest divergence φ of the token's probability between the two policies, in either direction,
    /// that is kept.
    pub phi: f64,
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// Dual clip: the ratio beyond which a token with a negative advantage no longer pushes. 3 is usual; not
    /// set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_ratio_c: Option<f64>,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Kpop {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask } = Clip::default();
        let phi = correction::default_phi();
        Self { phi, clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask }
    }
}

/// How `dppo` measures how far a token's probability has moved from the policy that sampled it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Divergence {
    /// Total variation of "this token or another": the difference of its probabilities.
    #[default]
    Tv,
    /// KL divergence of "this token or another".
    Kl,
}

/// Settings of `dppo`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Dppo {
    /// How the distance from the policy that sampled the token is measured: `tv` or `kl`.
    pub divergence: Divergence,
    /// The distance below which a token with a negative advantage may fall before it stops pushing.
    pub delta_low: f64,
    /// The distance above which a token with a positive advantage may rise before it stops pushing.
    pub delta_high: f64,
    /// The largest ratio of new to sampling probability that a derivative has.
    pub ratio_max: f64,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for Dppo {
    fn default() -> Self {
        let divergence = Divergence::Tv;
        Self { divergence, delta_low: 0.2, delta_high: 0.2, ratio_max: 20.0, off_policy_mask: None }
    }
}

/// Settings of `off-policy-mask`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OffPolicyMask {
    /// The largest mean of log π_behav − log π_θ over a response with which its tokens of negative advantage
    /// are kept.
    pub tau: f64,
    /// How tokens are weighted for having been sampled by the quantized policy.
    pub correction: Correction,
    /// How far below 1 the ratio of new to old probability may fall before a token stops pushing: the bound
    /// is 1 minus this.
    pub clip_ratio_low: f64,
    /// How far above 1 the ratio may rise: the bound is 1 plus this. More than `clip_ratio_low` keeps rare
    /// tokens alive (DAPO).
    pub clip_ratio_high: f64,
    /// Dual clip: the ratio beyond which a token with a negative advantage no longer pushes. 3 is usual; not
    /// set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_ratio_c: Option<f64>,
}

impl Default for OffPolicyMask {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c, .. } = Clip::default();
        let correction = Correction::None {};
        Self { tau: 0.05, correction, clip_ratio_low, clip_ratio_high, clip_ratio_c }
    }
}

/// The ratio whose second moment `m2po` bounds, and which it takes without a clip.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MomentRatio {
    /// π_θ/π_prox: how far the updates of this step have gone.
    #[default]
    Prox,
    /// π_θ/π_behav: the same and quantization.
    Behav,
}

/// Settings of `m2po`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct M2po {
    /// The largest mean of the squared log-ratios of a mini-batch's tokens: those with the largest squares
    /// are dropped until it is reached.
    pub tau: f64,
    /// Which ratio: `prox` or `behav`.
    pub ratio: MomentRatio,
    /// Off-policy sequence mask: a token with a negative advantage is dropped, but stays in the mean, where
    /// the mean of log π_behav − log π_θ over its response is above this. Not set means off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_policy_mask: Option<f64>,
}

impl Default for M2po {
    fn default() -> Self {
        Self { tau: 0.04, ratio: MomentRatio::Prox, off_policy_mask: None }
    }
}
