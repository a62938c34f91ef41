//! What an objective tells about the tokens it saw. Counts and sums, so that micro-batches merge by addition;
//! shares and means are asked for at the end.

use super::surrogate::Side;
use crate::{LOG_RATIO_LIMIT, stats};
use serde::Serialize;

/// Facts about the tokens that an objective was evaluated on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Facts {
    /// Tokens that counted.
    pub tokens: u64,
    /// Tokens clipped at the upper bound.
    pub clipped_upper: u64,
    /// Tokens clipped at the lower bound.
    pub clipped_lower: u64,
    /// Tokens capped by the dual clip.
    pub clipped_dual: u64,
    /// Tokens whose correction weight is 0.
    pub rejected: u64,
    /// Sum of the log-ratios, each limited to ±20.
    pub log_ratio_sum: f64,
    /// Sum of the ratios.
    pub ratio_sum: f64,
    /// Smallest ratio; infinite before the first token.
    pub ratio_min: f64,
    /// Largest ratio.
    pub ratio_max: f64,
    /// Sum of the correction weights.
    pub weight_sum: f64,
    /// Sum of their squares.
    pub weight_square_sum: f64,
    /// Largest correction weight.
    pub weight_max: f64,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            tokens: 0,
            clipped_upper: 0,
            clipped_lower: 0,
            clipped_dual: 0,
            rejected: 0,
            log_ratio_sum: 0.0,
            ratio_sum: 0.0,
            ratio_min: f64::INFINITY,
            ratio_max: 0.0,
            weight_sum: 0.0,
            weight_square_sum: 0.0,
            weight_max: 0.0,
        }
    }
}

impl Facts {
    /// Records one token that counts.
    pub(super) fn add(&mut self, log_ratio: f64, side: Option<Side>, weight: f64) {
        let log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
        let ratio = log_ratio.exp();
        self.tokens += 1;
        self.clipped_upper += u64::from(side == Some(Side::Upper));
        self.clipped_lower += u64::from(side == Some(Side::Lower));
        self.clipped_dual += u64::from(side == Some(Side::Dual));
        self.rejected += u64::from(weight == 0.0);
        self.log_ratio_sum += log_ratio;
        self.ratio_sum += ratio;
        self.ratio_min = self.ratio_min.min(ratio);
        self.ratio_max = self.ratio_max.max(ratio);
        self.weight_sum += weight;
        self.weight_square_sum += weight * weight;
        self.weight_max = self.weight_max.max(weight);
    }

    /// Adds the facts of other tokens.
    pub fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.clipped_upper += other.clipped_upper;
        self.clipped_lower += other.clipped_lower;
        self.clipped_dual += other.clipped_dual;
        self.rejected += other.rejected;
        self.log_ratio_sum += other.log_ratio_sum;
        self.ratio_sum += other.ratio_sum;
        self.ratio_min = self.ratio_min.min(other.ratio_min);
        self.ratio_max = self.ratio_max.max(other.ratio_max);
        self.weight_sum += other.weight_sum;
        self.weight_square_sum += other.weight_square_sum;
        self.weight_max = self.weight_max.max(other.weight_max);
    }

    fn share(&self, count: u64) -> f64 {
        count as f64 / self.tokens.max(1) as f64
    }

    /// Share of tokens clipped at the upper or lower bound (Fig. 2b; `pg_clipfrac`).
    pub fn clip_fraction(&self) -> f64 {
        self.share(self.clipped_upper + self.clipped_lower)
    }

    /// Share of tokens clipped at the upper bound.
    pub fn clip_fraction_upper(&self) -> f64 {
        self.share(self.clipped_upper)
    }

    /// Share of tokens clipped at the lower bound.
    pub fn clip_fraction_lower(&self) -> f64 {
        self.share(self.clipped_lower)
    }

    /// Share of tokens capped by the dual clip (`pg_clipfrac_lower` elsewhere).
    pub fn clip_fraction_dual(&self) -> f64 {
        self.share(self.clipped_dual)
    }

    /// Share of tokens with correction weight 0.
    pub fn rejected_fraction(&self) -> f64 {
        self.share(self.rejected)
    }

    /// Mean ratio.
    pub fn ratio_mean(&self) -> f64 {
        self.ratio_sum / self.tokens.max(1) as f64
    }

    /// Mean of −log ratio: how far θ has moved from the denominator of the ratio (`ppo_kl`).
    pub fn ppo_kl(&self) -> f64 {
        0.0 - self.log_ratio_sum / self.tokens.max(1) as f64
    }

    /// Mean correction weight.
    pub fn weight_mean(&self) -> f64 {
        self.weight_sum / self.tokens.max(1) as f64
    }

    /// Effective sample size of the correction weights as a share of the tokens.
    pub fn effective_sample_share(&self) -> f64 {
        stats::effective_sample_share(self.tokens, self.weight_sum, self.weight_square_sum)
    }
}
