//! From losses of tokens to the loss of a mini-batch.
//!
//! Every mode is a weighted sum, loss = Σ_t weight_t · loss_t, whose weights depend on mask and sequence
//! lengths alone. So the denominator is counted once for the whole mini-batch (and summed over processes
//! where there are several), turned into one weight per token, and micro-batches can then be processed apart
//! in any grouping: their losses and gradients simply add up to those of the mini-batch.

use crate::error::{RlError, same_length, sequence_count};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the losses of tokens become one number (`loss_agg_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LossAggMode {
    /// Mean over all tokens, so that long responses count more (DAPO).
    #[default]
    TokenMean,
    /// Sum over all tokens.
    TokenSum,
    /// Sum within a response, mean over responses.
    SeqMeanTokenSum,
    /// Mean within a response, mean over responses (GRPO as published; Eq. 1 of the paper).
    SeqMeanTokenMean,
    /// Sum within a response divided by a constant length, mean over responses (Dr. GRPO).
    SeqMeanTokenSumNorm,
}

/// Counts over a mini-batch, from which the weights of all modes follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Denominator {
    /// Tokens that count.
    pub tokens: u64,
    /// Sequences with at least one token that counts: fully masked ones drop out.
    pub sequences: u64,
    /// Positions, masked or not, of the longest sequence.
    pub longest: u64,
}

impl Denominator {
    /// Counts one mini-batch (or the part of it that this process holds).
    pub fn count(mask: &[bool], seq: &[u32]) -> Result<Self, RlError> {
        same_length("seq", seq.len(), "mask", mask.len())?;
        let mut positions = vec![0u64; sequence_count(seq)];
        let counted = counted_tokens(mask, seq);
        for &s in seq {
            positions[s as usize] += 1;
        }
        Ok(Self {
            tokens: counted.iter().sum(),
            sequences: counted.iter().filter(|&&n| n > 0).count() as u64,
            longest: positions.into_iter().max().unwrap_or(0),
        })
    }

    /// Counts of two parts that share no sequence.
    pub fn merge(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            sequences: self.sequences + other.sequences,
            longest: self.longest.max(other.longest),
        }
    }
}

/// An aggregation mode with its one setting.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Aggregation {
    /// The mode.
    pub mode: LossAggMode,
    /// The constant length of `seq-mean-token-sum-norm`; the longest sequence of the mini-batch where absent.
    /// Set it (to the longest response allowed) to keep the scale of the loss the same through training.
    pub loss_scale_factor: Option<f64>,
}

impl Aggregation {
    /// Weight of every token: `mask` and `seq` may be any part of the mini-batch that was counted in
    /// `denominator`, as long as it holds whole sequences. Masked tokens get 0.
    pub fn token_weights(
        &self,
        denominator: &Denominator,
        mask: &[bool],
        seq: &[u32],
    ) -> Result<Vec<f64>, RlError> {
        same_length("seq", seq.len(), "mask", mask.len())?;
        let sequences = denominator.sequences.max(1) as f64;
        let weight_of_all = match self.mode {
            LossAggMode::TokenMean => 1.0 / denominator.tokens.max(1) as f64,
            LossAggMode::TokenSum => 1.0,
            LossAggMode::SeqMeanTokenSum | LossAggMode::SeqMeanTokenMean => 1.0 / sequences,
            LossAggMode::SeqMeanTokenSumNorm => {
                let length = self.loss_scale_factor.unwrap_or(denominator.longest.max(1) as f64);
                crate::error::setting(
                    length > 0.0 && length.is_finite(),
                    "loss_scale_factor",
                    length,
                    "a finite number above 0",
                )?;
                1.0 / (sequences * length)
            }
        };
        let lengths = counted_tokens(mask, seq);
        let weight = |(&m, &s): (&bool, &u32)| match (m, self.mode) {
            (false, _) => 0.0,
            (true, LossAggMode::SeqMeanTokenMean) => weight_of_all / lengths[s as usize] as f64,
            (true, _) => weight_of_all,
        };
        Ok(mask.iter().zip(seq).map(weight).collect())
    }

    /// Counts and weights of a mini-batch that is at hand as a whole.
    pub fn weights_of(&self, mask: &[bool], seq: &[u32]) -> Result<Vec<f64>, RlError> {
        self.token_weights(&Denominator::count(mask, seq)?, mask, seq)
    }
}

/// Tokens that count, per sequence. The slices have been found equally long.
fn counted_tokens(mask: &[bool], seq: &[u32]) -> Vec<u64> {
    let mut counted = vec![0u64; sequence_count(seq)];
    for (&m, &s) in mask.iter().zip(seq) {
        counted[s as usize] += u64::from(m);
    }
    counted
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: [bool; 7] = [true, true, false, true, false, false, true];
    const SEQ: [u32; 7] = [0, 0, 0, 1, 2, 2, 3];

    fn weights(mode: LossAggMode, loss_scale_factor: Option<f64>) -> Vec<f64> {
        Aggregation { mode, loss_scale_factor }.weights_of(&MASK, &SEQ).unwrap()
    }

    #[test]
    fn weights_of_every_mode() {
        let on = |w: [f64; 4]| vec![w[0], w[1], 0.0, w[2], 0.0, 0.0, w[3]];
        let third = 1.0 / 3.0;
        assert_eq!(weights(LossAggMode::TokenMean, None), on([0.25; 4]));
        assert_eq!(weights(LossAggMode::TokenSum, None), on([1.0; 4]));
        assert_eq!(weights(LossAggMode::SeqMeanTokenSum, None), on([third; 4]));
        assert_eq!(
            weights(LossAggMode::SeqMeanTokenMean, None),
            on([third / 2.0, third / 2.0, third, third])
        );
        // The longest sequence has three positions, one of them masked.
        assert_eq!(weights(LossAggMode::SeqMeanTokenSumNorm, None), on([1.0 / 9.0; 4]));
        assert_eq!(weights(LossAggMode::SeqMeanTokenSumNorm, Some(10.0)), on([1.0 / 30.0; 4]));
    }

    #[test]
    fn fully_masked_sequences_drop_out() {
        let d = Denominator::count(&MASK, &SEQ).unwrap();
        assert_eq!(d, Denominator { tokens: 4, sequences: 3, longest: 3 });
    }

    #[test]
    fn parts_add_up_to_the_whole() {
        for mode in [
            LossAggMode::TokenMean,
            LossAggMode::TokenSum,
            LossAggMode::SeqMeanTokenSum,
            LossAggMode::SeqMeanTokenMean,
            LossAggMode::SeqMeanTokenSumNorm,
        ] {
            let all = weights(mode, None);
            // Two processes hold sequences {0, 1} and {2, 3}; the second numbers its own from 0.
            let (m1, s1, m2) = (&MASK[..4], &SEQ[..4], &MASK[4..]);
            let s2: Vec<u32> = SEQ[4..].iter().map(|s| s - 2).collect();
            let d = Denominator::count(m1, s1).unwrap().merge(Denominator::count(m2, &s2).unwrap());
            let agg = Aggregation { mode, loss_scale_factor: None };
            let mut parts = agg.token_weights(&d, m1, s1).unwrap();
            parts.extend(agg.token_weights(&d, m2, &s2).unwrap());
            assert_eq!(parts, all, "{mode:?}");
        }
    }

    #[test]
    fn nothing_to_count_gives_zero_weights() {
        let w = Aggregation::default().weights_of(&[false, false], &[0, 1]).unwrap();
        assert_eq!(w, vec![0.0, 0.0]);
        assert!(Aggregation::default().weights_of(&[], &[]).unwrap().is_empty());
    }

    #[test]
    fn lengths_and_factors_are_checked() {
        assert!(matches!(
            Denominator::count(&[true], &[0, 1]),
            Err(RlError::Length { name: "seq", len: 2, .. })
        ));
        let agg = Aggregation { mode: LossAggMode::SeqMeanTokenSumNorm, loss_scale_factor: Some(0.0) };
        assert!(agg.weights_of(&MASK, &SEQ).is_err());
    }

    #[test]
    fn names_are_the_known_ones() {
        let parsed: LossAggMode = serde_json::from_str("\"seq-mean-token-sum-norm\"").unwrap();
        assert_eq!(parsed, LossAggMode::SeqMeanTokenSumNorm);
        assert!(serde_json::from_str::<LossAggMode>("\"mean\"").is_err());
    }
}
