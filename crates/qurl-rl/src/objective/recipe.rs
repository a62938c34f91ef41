//! Objectives as recipes name them: a type, its settings, vetted defaults.
//!
//! The settings of a type are its own struct ([`settings`](super::settings)), so that an unknown key is an
//! error and every key may be left out. The five of the paper are `naive`, `quantized-is`, `decoupled`, `tis`
//! and `acr`; the others are what users know from elsewhere. GSPO, CISPO and the off-policy mask may be
//! combined with any [`Correction`], and every objective with the off-policy mask.

use super::correction::Correction;
pub use super::settings::*;
use super::surrogate::Surrogate;
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
    /// PPO weighted by ρ, without the tokens whose probabilities under the two policies diverge.
    Kpop(Kpop),
    /// The ratio to the quantized policy that sampled the tokens, without a clip and without the tokens that
    /// have moved too far from it in the direction they are pushed.
    Dppo(Dppo),
    /// PPO weighted by the importance weight of the whole response, without the responses whose weight is
    /// above `c`.
    SequenceMis(Truncated),
    /// PPO without the tokens of negative advantage in responses that have become unlikely.
    OffPolicyMask(OffPolicyMask),
    /// The ratio without a clip and without the tokens that make the second moment of its logarithm large.
    M2po(M2po),
}

impl Default for Objective {
    fn default() -> Self {
        Self::Acr(Truncated::default())
    }
}

impl Objective {
    /// Every type a recipe can name.
    pub const TYPES: [&'static str; 15] = [
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
        "kpop",
        "dppo",
        "sequence-mis",
        "off-policy-mask",
        "m2po",
    ];

    /// The type as a recipe names it.
    pub fn name(&self) -> &'static str {
        let place = match self {
            Self::Naive(_) => 0,
            Self::QuantizedIs(_) => 1,
            Self::Decoupled(_) => 2,
            Self::Tis(_) => 3,
            Self::Acr(_) => 4,
            Self::SequenceTis(_) => 5,
            Self::Icepop(_) => 6,
            Self::GeoMask(_) => 7,
            Self::Gspo(_) => 8,
            Self::Cispo(_) => 9,
            Self::Kpop(_) => 10,
            Self::Dppo(_) => 11,
            Self::SequenceMis(_) => 12,
            Self::OffPolicyMask(_) => 13,
            Self::M2po(_) => 14,
        };
        Self::TYPES[place]
    }

    /// Checks the settings.
    pub fn check(&self) -> Result<(), RlError> {
        let Resolved { clip, correction, surrogate, .. } = self.resolve();
        let above = |key, value: f64, bound: f64, expected| {
            setting(value.is_finite() && value >= bound, key, value, expected)
        };
        let expected = "a finite number not below 0";
        above("clip_ratio_low", clip.clip_ratio_low, 0.0, expected)?;
        above("clip_ratio_high", clip.clip_ratio_high, 0.0, expected)?;
        if let Some(c) = clip.clip_ratio_c {
            setting(c.is_finite() && c > 1.0, "clip_ratio_c", c, "a finite number above 1")?;
        }
        if let Some(tau) = clip.off_policy_mask {
            let key = if matches!(self, Self::OffPolicyMask(_)) { "tau" } else { "off_policy_mask" };
            above(key, tau, 0.0, expected)?;
        }
        if let Surrogate::Dppo { delta_low, delta_high, ratio_max, .. } = surrogate {
            above("delta_low", delta_low, 0.0, expected)?;
            above("delta_high", delta_high, 0.0, expected)?;
            above("ratio_max", ratio_max, 1.0, "a finite number not below 1")?;
        }
        if let Self::M2po(m) = self {
            above("tau", m.tau, 0.0, expected)?;
        }
        correction.check()
    }

    /// The parameters behind the name.
    pub(super) fn resolve(&self) -> Resolved {
        let on = |ratio, clip, correction| Resolved {
            ratio,
            surrogate: Surrogate::Ppo,
            clip,
            correction,
            widen_beyond: None,
            second_moment: None,
        };
        let clip = |clip_ratio_low, clip_ratio_high, clip_ratio_c, off_policy_mask| Clip {
            clip_ratio_low,
            clip_ratio_high,
            clip_ratio_c,
            off_policy_mask,
        };
        let unclipped = |off_policy_mask| clip(0.0, 0.0, None, off_policy_mask);
        let truncated =
            |t: &Truncated| clip(t.clip_ratio_low, t.clip_ratio_high, t.clip_ratio_c, t.off_policy_mask);
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
                clip(i.clip_ratio_low, i.clip_ratio_high, i.clip_ratio_c, i.off_policy_mask),
                Correction::Icepop { low: i.low, high: i.high },
            ),
            Self::GeoMask(g) => on(
                Ratio::Prox,
                clip(g.clip_ratio_low, g.clip_ratio_high, g.clip_ratio_c, g.off_policy_mask),
                Correction::GeoMask { low: g.low, high: g.high },
            ),
            Self::Gspo(g) => on(
                Ratio::Sequence,
                clip(g.clip_ratio_low, g.clip_ratio_high, None, g.off_policy_mask),
                g.correction,
            ),
            Self::Cispo(c) => Resolved {
                surrogate: Surrogate::Cispo,
                ..on(
                    Ratio::Prox,
                    clip(c.clip_ratio_low, c.clip_ratio_high, None, c.off_policy_mask),
                    c.correction,
                )
            },
            Self::Kpop(k) => on(
                Ratio::Prox,
                clip(k.clip_ratio_low, k.clip_ratio_high, k.clip_ratio_c, k.off_policy_mask),
                Correction::Kpop { phi: k.phi },
            ),
            Self::Dppo(d) => Resolved {
                surrogate: Surrogate::Dppo {
                    divergence: d.divergence,
                    delta_low: d.delta_low,
                    delta_high: d.delta_high,
                    ratio_max: d.ratio_max,
                },
                ..on(Ratio::Behav, unclipped(d.off_policy_mask), Correction::None {})
            },
            Self::SequenceMis(t) => on(Ratio::Prox, truncated(t), Correction::SequenceMis { c: t.c }),
            Self::OffPolicyMask(o) => on(
                Ratio::Prox,
                clip(o.clip_ratio_low, o.clip_ratio_high, o.clip_ratio_c, Some(o.tau)),
                o.correction,
            ),
            Self::M2po(m) => Resolved {
                surrogate: Surrogate::Unclipped,
                second_moment: Some(m.tau),
                ..on(
                    match m.ratio {
                        MomentRatio::Prox => Ratio::Prox,
                        MomentRatio::Behav => Ratio::Behav,
                    },
                    unclipped(m.off_policy_mask),
                    Correction::None {},
                )
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
        let expected = Truncated { clip_ratio_high: 0.28, clip_ratio_c: Some(3.0), ..Truncated::default() };
        let expected = Truncated { c: 4.0, clip_ratio_low: 0.1, ..expected };
        assert_eq!(parse(text).unwrap(), Objective::Acr(expected));
        let text = r#"{"type":"dppo","divergence":"kl","delta_low":0.1,"off_policy_mask":0.3}"#;
        let expected = Dppo { divergence: Divergence::Kl, delta_low: 0.1, ..Dppo::default() };
        let expected = Dppo { off_policy_mask: Some(0.3), ..expected };
        assert_eq!(parse(text).unwrap(), Objective::Dppo(expected));
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
            (r#"{"type":"kpop","phi":-0.1}"#, "phi"),
            (r#"{"type":"dppo","delta_low":-0.1}"#, "delta_low"),
            (r#"{"type":"dppo","delta_high":-0.1}"#, "delta_high"),
            (r#"{"type":"dppo","ratio_max":0.5}"#, "ratio_max"),
            (r#"{"type":"sequence-mis","c":0}"#, "c"),
            (r#"{"type":"off-policy-mask","tau":-1}"#, "tau"),
            (r#"{"type":"acr","off_policy_mask":-1}"#, "off_policy_mask"),
            (r#"{"type":"m2po","tau":-1}"#, "tau"),
        ] {
            let error = parse(text).unwrap().check().unwrap_err();
            assert!(matches!(error, RlError::Setting { key: k, .. } if k == key), "{error}");
        }
    }
}
