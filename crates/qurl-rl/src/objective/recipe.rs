//! Objectives as recipes name them: a type, its settings, vetted defaults.
//!
//! The settings of a type are its own struct, so that an unknown key is an error and every key may be left
//! out. The five of the paper are `naive`, `quantized-is`, `decoupled`, `tis` and `acr`; the others are what
//! users know from elsewhere. GSPO and CISPO may be combined with any [`Correction`].

use super::correction::{self, Correction};
use super::{Ratio, Resolved};
use crate::error::{RlError, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The objective of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Objective {
    /// PPO as if the full-precision policy had sampled the tokens (Eq. 1 of the paper).
    Naive(Clip),
    /// PPO on the ratio to the quantized policy that sampled the tokens (Eq. 3).
    QuantizedIs(Clip),
    /// PPO on the ratio to the full-precision policy before the step, weighted by ρ, the probability of the
    /// token under it over that under the quantized one (Eq. 4).
    Decoupled(Clip),
    /// The same with the weight truncated at `c`: truncated importance sampling, as FlashRL does it (Eq. 5).
    Tis(Truncated),
    /// The same with the upper clip bound widened where the weight was truncated: adaptive clipping, QuRL's
    /// own (Eq. 9).
    Acr(Truncated),
    /// PPO weighted by the truncated importance weight of the whole response.
    SequenceTis(Truncated),
    /// PPO weighted by ρ, without the tokens whose ρ is outside a band.
    Icepop(Icepop),
    /// PPO without the responses whose geometric mean of ρ is outside a band.
    GeoMask(GeoMask),
    /// PPO on the geometric mean of the ratios of a response; the loss is aggregated by
    /// `seq-mean-token-mean`.
    Gspo(Gspo),
    /// The log-likelihood weighted by advantage and clipped ratio.
    Cispo(Cispo),
}

impl Default for Objective {
    fn default() -> Self {
        Self::Acr(Truncated::default())
    }
}

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
}

impl Default for Clip {
    fn default() -> Self {
        Self { clip_ratio_low: 0.2, clip_ratio_high: 0.2, clip_ratio_c: None }
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
}

impl Default for Truncated {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c } = Clip::default();
        Self { c: correction::default_truncation(), clip_ratio_low, clip_ratio_high, clip_ratio_c }
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
}

impl Default for Icepop {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c } = Clip::default();
        let (low, high) = (correction::default_icepop_low(), correction::default_icepop_high());
        Self { low, high, clip_ratio_low, clip_ratio_high, clip_ratio_c }
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
}

impl Default for GeoMask {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, clip_ratio_c } = Clip::default();
        let (low, high) = (correction::default_geo_low(), correction::default_geo_high());
        Self { low, high, clip_ratio_low, clip_ratio_high, clip_ratio_c }
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
}

impl Default for Gspo {
    fn default() -> Self {
        Self { clip_ratio_low: 3e-4, clip_ratio_high: 4e-4, correction: Correction::None {} }
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
}

impl Default for Cispo {
    fn default() -> Self {
        let Clip { clip_ratio_low, clip_ratio_high, .. } = Clip::default();
        Self { clip_ratio_low, clip_ratio_high, correction: Correction::None {} }
    }
}

impl Objective {
    /// Every type a recipe can name.
    pub const TYPES: [&'static str; 10] = [
        "naive",
        "quantized-is",
        "decoupled",
        "tis",
        "acr",
        "sequence-tis",
        "icepop",
        "geo-mask",
        "gspo",
        "cispo",
    ];

    /// The type as a recipe names it.
    pub fn name(&self) -> &'static str {
        let [naive, quantized_is, decoupled, tis, acr, sequence_tis, icepop, geo, gspo, cispo] = Self::TYPES;
        match self {
            Self::Naive(_) => naive,
            Self::QuantizedIs(_) => quantized_is,
            Self::Decoupled(_) => decoupled,
            Self::Tis(_) => tis,
            Self::Acr(_) => acr,
            Self::SequenceTis(_) => sequence_tis,
            Self::Icepop(_) => icepop,
            Self::GeoMask(_) => geo,
            Self::Gspo(_) => gspo,
            Self::Cispo(_) => cispo,
        }
    }

    /// Checks the settings.
    pub fn check(&self) -> Result<(), RlError> {
        let Resolved { clip, correction, .. } = self.resolve();
        let above = |value: f64, bound: f64| value.is_finite() && value >= bound;
        let expected = "a finite number not below 0";
        setting(above(clip.clip_ratio_low, 0.0), "clip_ratio_low", clip.clip_ratio_low, expected)?;
        setting(above(clip.clip_ratio_high, 0.0), "clip_ratio_high", clip.clip_ratio_high, expected)?;
        if let Some(c) = clip.clip_ratio_c {
            setting(c.is_finite() && c > 1.0, "clip_ratio_c", c, "a finite number above 1")?;
        }
        correction.check()
    }

    /// The parameters behind the name.
    pub(super) fn resolve(&self) -> Resolved {
        let on =
            |ratio, clip, correction| Resolved { ratio, cispo: false, clip, correction, widen_beyond: None };
        let clip = |clip_ratio_low, clip_ratio_high, clip_ratio_c| Clip {
            clip_ratio_low,
            clip_ratio_high,
            clip_ratio_c,
        };
        let truncated = |t: &Truncated| clip(t.clip_ratio_low, t.clip_ratio_high, t.clip_ratio_c);
        match self {
            Self::Naive(c) => on(Ratio::Prox, *c, Correction::None {}),
            Self::QuantizedIs(c) => on(Ratio::Behav, *c, Correction::None {}),
            Self::Decoupled(c) => on(Ratio::Prox, *c, Correction::TokenIs {}),
            Self::Tis(t) => on(Ratio::Prox, truncated(t), Correction::TokenTis { c: t.c }),
            Self::Acr(t) => Resolved {
                widen_beyond: Some(t.c),
                ..on(Ratio::Prox, truncated(t), Correction::TokenTis { c: t.c })
            },
            Self::SequenceTis(t) => on(Ratio::Prox, truncated(t), Correction::SequenceTis { c: t.c }),
            Self::Icepop(i) => on(
                Ratio::Prox,
                clip(i.clip_ratio_low, i.clip_ratio_high, i.clip_ratio_c),
                Correction::Icepop { low: i.low, high: i.high },
            ),
            Self::GeoMask(g) => on(
                Ratio::Prox,
                clip(g.clip_ratio_low, g.clip_ratio_high, g.clip_ratio_c),
                Correction::GeoMask { low: g.low, high: g.high },
            ),
            Self::Gspo(g) => {
                on(Ratio::Sequence, clip(g.clip_ratio_low, g.clip_ratio_high, None), g.correction)
            }
            Self::Cispo(c) => Resolved {
                cispo: true,
                ..on(Ratio::Prox, clip(c.clip_ratio_low, c.clip_ratio_high, None), c.correction)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Objective, serde_json::Error> {
        serde_json::from_str(text)
    }

    #[test]
    fn every_type_has_defaults_and_survives_a_round_trip() {
        for name in Objective::TYPES {
            let objective = parse(&format!(r#"{{"type":"{name}"}}"#)).unwrap();
            assert_eq!(objective.name(), name);
            objective.check().unwrap();
            assert_eq!(parse(&serde_json::to_string(&objective).unwrap()).unwrap(), objective);
        }
    }

    #[test]
    fn settings_are_read() {
        let text = r#"{"type":"acr","c":4.0,"clip_ratio_low":0.1,"clip_ratio_high":0.28,"clip_ratio_c":3.0}"#;
        let expected =
            Truncated { c: 4.0, clip_ratio_low: 0.1, clip_ratio_high: 0.28, clip_ratio_c: Some(3.0) };
        assert_eq!(parse(text).unwrap(), Objective::Acr(expected));
        let text = r#"{"type":"cispo","correction":{"type":"token-tis"}}"#;
        let expected = Cispo { correction: Correction::TokenTis { c: 2.0 }, ..Cispo::default() };
        assert_eq!(parse(text).unwrap(), Objective::Cispo(expected));
    }

    #[test]
    fn unknown_keys_and_types_are_errors() {
        assert!(parse(r#"{"type":"naive","c":2.0}"#).is_err());
        assert!(parse(r#"{"type":"acr","cap":2.0}"#).is_err());
        assert!(parse(r#"{"type":"ppo"}"#).is_err());
        assert!(parse(r#"{"c":2.0}"#).is_err());
    }

    #[test]
    fn impossible_settings_name_their_key() {
        for (text, key) in [
            (r#"{"type":"tis","c":-1}"#, "c"),
            (r#"{"type":"naive","clip_ratio_low":-0.1}"#, "clip_ratio_low"),
            (r#"{"type":"naive","clip_ratio_high":-0.1}"#, "clip_ratio_high"),
            (r#"{"type":"naive","clip_ratio_c":1.0}"#, "clip_ratio_c"),
            (r#"{"type":"icepop","low":9.0}"#, "low"),
        ] {
            let error = parse(text).unwrap().check().unwrap_err();
            assert!(matches!(error, RlError::Setting { key: k, .. } if k == key), "{error}");
        }
    }
}
