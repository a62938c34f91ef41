//! Corrections for having sampled from `behav` and not from `prox`: one constant weight per token.
//!
//! ρ = π_prox/π_behav. Weighting by ρ is unbiased and may explode (quantization makes ρ up to 1e5); the
//! others trade bias for a bound, each in its own way: truncate the token's or the sequence's weight, or drop
//! tokens or sequences outside a trusted band. The weight multiplies the loss after all clipping and carries
//! no gradient.

use crate::error::{RlError, same_length, sequence_count, setting};
use crate::ratio;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How tokens are weighted for having come from another policy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Correction {
    /// No weight: the tokens are taken as if the policy being trained had sampled them.
    None {},
    /// Weight ρ of the token.
    TokenIs {},
    /// Weight min(ρ, C): truncated importance sampling.
    TokenTis {
        /// The largest weight C.
        #[serde(default = "default_truncation")]
        c: f64,
    },
    /// Weight min(Π ρ, C), the product running over the whole response.
    SequenceTis {
        /// The largest weight C.
        #[serde(default = "default_truncation")]
        c: f64,
    },
    /// Weight ρ inside `low` to `high` and 0 outside; a token outside still counts in the mean (IcePop).
    Icepop {
        /// The smallest ρ that is kept.
        #[serde(default = "default_icepop_low")]
        low: f64,
        /// The largest ρ that is kept.
        #[serde(default = "default_icepop_high")]
        high: f64,
    },
    /// Weight 1 where the geometric mean of a response's ρ is inside `low` to `high`; other responses are
    /// rejected.
    GeoMask {
        /// The smallest geometric mean of ρ that is kept.
        #[serde(default = "default_geo_low")]
        low: f64,
        /// The largest geometric mean of ρ that is kept.
        #[serde(default = "default_geo_high")]
        high: f64,
    },
    /// Weight ρ where the token's probabilities p = π_prox and q = π_behav diverge by at most φ, D(p‖q) ≤ φ
    /// and D(q‖p) ≤ φ with the KL divergence D of "this token or another", and 0 elsewhere; a token that is
    /// dropped still counts in the mean (KPop).
    Kpop {
        /// The largest divergence that is kept.
        #[serde(default = "default_phi")]
        phi: f64,
    },
    /// Weight Π ρ over the whole response where it is at most C; other responses weigh 0 and still count in
    /// the mean.
    SequenceMis {
        /// The largest weight C that is kept.
        #[serde(default = "default_truncation")]
        c: f64,
    },
}

impl Default for Correction {
    fn default() -> Self {
        Self::None {}
    }
}

/// The usual truncation C of ρ.
pub(super) fn default_truncation() -> f64 {
    2.0
}
pub(super) fn default_icepop_low() -> f64 {
    0.5
}
pub(super) fn default_icepop_high() -> f64 {
    5.0
}
pub(super) fn default_geo_low() -> f64 {
    0.999
}
pub(super) fn default_geo_high() -> f64 {
    1.001
}

pub(super) fn default_phi() -> f64 {
    0.1
}

impl Correction {
    /// Checks the settings.
    pub fn check(&self) -> Result<(), RlError> {
        match *self {
            Self::None {} | Self::TokenIs {} => Ok(()),
            Self::TokenTis { c } | Self::SequenceTis { c } | Self::SequenceMis { c } => {
                setting(c > 0.0 && c.is_finite(), "c", c, "a finite number above 0")
            }
            Self::Icepop { low, high } | Self::GeoMask { low, high } => {
                setting(low >= 0.0 && low <= high, "low", low, "a number from 0 to `high`")?;
                setting(high.is_finite(), "high", high, "a finite number")
            }
            Self::Kpop { phi } => {
                setting(phi >= 0.0 && phi.is_finite(), "phi", phi, "a finite number not below 0")
            }
        }
    }

    /// Whether a token's weight depends on other tokens of its sequence.
    pub(super) fn looks_at_sequences(&self) -> bool {
        match self {
            Self::SequenceTis { .. } | Self::SequenceMis { .. } | Self::GeoMask { .. } => true,
            Self::None {}
            | Self::TokenIs {}
            | Self::TokenTis { .. }
            | Self::Icepop { .. }
            | Self::Kpop { .. } => false,
        }
    }

    /// The weight of every token; masked ones get 0.
    pub fn weights<F: Copy + Into<f64>>(
        &self,
        behav: &[F],
        prox: &[F],
        mask: &[bool],
        seq: &[u32],
    ) -> Result<Vec<f64>, RlError> {
        same_length("prox", prox.len(), "behav", behav.len())?;
        same_length("mask", mask.len(), "behav", behav.len())?;
        same_length("seq", seq.len(), "behav", behav.len())?;
        let log_rho: Vec<f64> =
            (0..mask.len()).map(|t| if mask[t] { prox[t].into() - behav[t].into() } else { 0.0 }).collect();
        let keep_inside = |rho: f64, low: f64, high: f64, kept: f64| {
            if (low..=high).contains(&rho) { kept } else { 0.0 }
        };
        let of_sequence = self.looks_at_sequences();
        let (sums, counts) =
            if of_sequence { sequence_sums(&log_rho, mask, seq) } else { Default::default() };
        let weight = |t: usize| {
            let s = seq[t] as usize;
            match *self {
                Self::None {} => 1.0,
                Self::TokenIs {} => ratio(log_rho[t]),
                Self::TokenTis { c } => ratio(log_rho[t]).min(c),
                Self::SequenceTis { c } => ratio(sums[s]).min(c),
                Self::Icepop { low, high } => {
                    let rho = ratio(log_rho[t]);
                    keep_inside(rho, low, high, rho)
                }
                Self::GeoMask { low, high } => {
                    keep_inside(ratio(sums[s] / counts[s].max(1) as f64), low, high, 1.0)
                }
                Self::Kpop { phi } => {
                    let (p, q) = (prox[t].into(), behav[t].into());
                    let kept = binary_kl(p, q) <= phi && binary_kl(q, p) <= phi;
                    if kept { ratio(log_rho[t]) } else { 0.0 }
                }
                Self::SequenceMis { c } => {
                    let product = ratio(sums[s]);
                    keep_inside(product, 0.0, c, product)
                }
            }
        };
        Ok((0..mask.len()).map(|t| if mask[t] { weight(t) } else { 0.0 }).collect())
    }
}

/// Probabilities are kept this far from 0 and 1 where divergences are computed.
const PROBABILITY_MARGIN: f64 = 1e-6;

/// KL divergence of "this token or another" of two policies, given its log-probs: a ln(a/b) + (1−a)
/// ln((1−a)/(1−b)).
pub(super) fn binary_kl(log_a: f64, log_b: f64) -> f64 {
    let probability = |log: f64| log.exp().clamp(PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN);
    let (a, b) = (probability(log_a), probability(log_b));
    a * (a / b).ln() + (1.0 - a) * ((1.0 - a) / (1.0 - b)).ln()
}

/// Sum over the unmasked tokens of every sequence, and their number. The slices have been found equally long.
pub(super) fn sequence_sums(values: &[f64], mask: &[bool], seq: &[u32]) -> (Vec<f64>, Vec<u64>) {
    let count = sequence_count(seq);
    let (mut sums, mut counts) = (vec![0.0; count], vec![0u64; count]);
    for ((&v, &m), &s) in values.iter().zip(mask).zip(seq) {
        if m {
            sums[s as usize] += v;
            counts[s as usize] += 1;
        }
    }
    (sums, counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    // Two sequences; the middle token of the first is masked. log ρ = 1, (masked), −0.5 | 0.2
    const BEHAV: [f64; 4] = [-2.0, -9.0, -1.0, -1.2];
    const PROX: [f64; 4] = [-1.0, -1.0, -1.5, -1.0];
    const MASK: [bool; 4] = [true, false, true, true];
    const SEQ: [u32; 4] = [0, 0, 0, 1];

    fn weights(c: Correction) -> Vec<f64> {
        c.weights(&BEHAV, &PROX, &MASK, &SEQ).unwrap()
    }

    fn close(a: Vec<f64>, b: [f64; 4]) {
        assert!(a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-12), "{a:?} {b:?}");
    }

    #[test]
    fn weights_by_hand() {
        let e = f64::exp;
        close(weights(Correction::None {}), [1.0, 0.0, 1.0, 1.0]);
        close(weights(Correction::TokenIs {}), [e(1.0), 0.0, e(-0.5), e(0.2)]);
        close(weights(Correction::TokenTis { c: 2.0 }), [2.0, 0.0, e(-0.5), e(0.2)]);
        close(weights(Correction::SequenceTis { c: 1.5 }), [1.5, 0.0, 1.5, e(0.2)]);
        close(weights(Correction::SequenceTis { c: 2.0 }), [e(0.5), 0.0, e(0.5), e(0.2)]);
        close(weights(Correction::Icepop { low: 0.7, high: 3.0 }), [e(1.0), 0.0, 0.0, e(0.2)]);
        // geometric means e^0.25 and e^0.2
        close(weights(Correction::GeoMask { low: 0.8, high: 1.25 }), [0.0, 0.0, 0.0, 1.0]);
        close(weights(Correction::GeoMask { low: 0.8, high: 1.3 }), [1.0, 0.0, 1.0, 1.0]);
        // products e^0.5 and e^0.2
        close(weights(Correction::SequenceMis { c: 1.5 }), [0.0, 0.0, 0.0, e(0.2)]);
        close(weights(Correction::SequenceMis { c: 2.0 }), [e(0.5), 0.0, e(0.5), e(0.2)]);
        // The first token: D(e^-1‖e^-2) = 0.170, D(e^-2‖e^-1) = 0.136.
        close(weights(Correction::Kpop { phi: 0.15 }), [0.0, 0.0, e(-0.5), e(0.2)]);
        close(weights(Correction::Kpop { phi: 0.175 }), [e(1.0), 0.0, e(-0.5), e(0.2)]);
        assert!((binary_kl(-1.0, -2.0) - 0.1698).abs() < 1e-4 && binary_kl(-1e4, -1e4) == 0.0);
    }

    #[test]
    fn equal_policies_need_no_correction() {
        for c in [
            Correction::None {},
            Correction::TokenIs {},
            Correction::TokenTis { c: 2.0 },
            Correction::SequenceTis { c: 2.0 },
            Correction::Icepop { low: 0.5, high: 5.0 },
            Correction::GeoMask { low: 0.999, high: 1.001 },
            Correction::Kpop { phi: 0.1 },
            Correction::SequenceMis { c: 2.0 },
        ] {
            let w = c.weights(&PROX, &PROX, &[true; 4], &SEQ).unwrap();
            assert_eq!(w, [1.0; 4], "{c:?}");
        }
    }

    #[test]
    fn settings_are_checked() {
        assert!(Correction::TokenTis { c: 0.0 }.check().is_err());
        assert!(Correction::TokenTis { c: f64::NAN }.check().is_err());
        assert!(Correction::Icepop { low: 2.0, high: 1.0 }.check().is_err());
        assert!(Correction::GeoMask { low: 0.5, high: f64::INFINITY }.check().is_err());
        assert!(Correction::GeoMask { low: 0.999, high: 1.001 }.check().is_ok());
    }
}
