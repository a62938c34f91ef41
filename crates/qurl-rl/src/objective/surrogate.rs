//! The per-token functions: log-ratio and advantage in, loss and slope out.
//!
//! `slope` is the derivative by log π_θ. Where a clip holds, the loss is flat and the slope is 0; the side of
//! the clip is reported, because the share of clipped tokens on each side is how a run shows that it is in
//! trouble.

use super::correction::binary_kl;
use super::settings::Divergence;
use crate::{inside_limit, ratio};

/// Upper limit of a sequence's mean log-ratio in GSPO.
const GSPO_LOG_RATIO_MAX: f64 = 10.0;

/// Which function of ratio and advantage a token's loss is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Surrogate {
    /// The pessimistic minimum of the ratio and the clipped ratio.
    Ppo,
    /// The log-likelihood, weighted by the clipped ratio.
    Cispo,
    /// The ratio as it is.
    Unclipped,
    /// The ratio, truncated in the derivative, of tokens near the policy that sampled them.
    Dppo {
        /// How that is measured.
        divergence: Divergence,
        /// How far tokens of negative advantage may fall.
        delta_low: f64,
        /// How far tokens of positive advantage may rise.
        delta_high: f64,
        /// The largest ratio of a derivative.
        ratio_max: f64,
    },
}

/// The clip range of one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Smallest ratio that still moves a token with negative advantage.
    pub low: f64,
    /// Largest ratio that still moves a token with positive advantage.
    pub high: f64,
    /// Dual clip: largest ratio that still moves a token with negative advantage.
    pub dual: Option<f64>,
}

/// Which bound took the gradient of a token away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The upper bound: a good token had already become likely enough.
    Upper,
    /// The lower bound: a bad token had already become unlikely enough.
    Lower,
    /// The dual clip: a bad token had become far likelier.
    Dual,
}

/// Loss of one token before any weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLoss {
    /// The loss.
    pub loss: f64,
    /// Its derivative by log π_θ.
    pub slope: f64,
    /// The bound that holds, if any.
    pub side: Option<Side>,
}

/// PPO: −min(R·A, clip(R)·A), for A < 0 no more than −c·A (dual clip).
pub fn ppo(log_ratio: f64, adv: f64, bounds: &Bounds) -> TokenLoss {
    clipped_surrogate(ratio(log_ratio), inside_limit(log_ratio), adv, bounds)
}

/// GSPO: PPO on the geometric mean ratio of the sequence. Every token's log-prob is taken to move the ratio
/// by itself, which under `seq-mean-token-mean` is the gradient of the sequence's loss.
pub fn gspo(mean_log_ratio: f64, adv: f64, bounds: &Bounds) -> TokenLoss {
    let limited = mean_log_ratio.min(GSPO_LOG_RATIO_MAX);
    clipped_surrogate(limited.exp(), mean_log_ratio <= GSPO_LOG_RATIO_MAX, adv, bounds)
}

/// CISPO: −sg(clip(R))·A·log π_θ. The ratio is a constant weight, so no token loses its gradient.
pub fn cispo(theta: f64, log_ratio: f64, adv: f64, bounds: &Bounds) -> TokenLoss {
    let ratio = ratio(log_ratio);
    let slope = -ratio.max(bounds.low).min(bounds.high) * adv;
    let side = match ratio {
        r if r > bounds.high => Some(Side::Upper),
        r if r < bounds.low => Some(Side::Lower),
        _ => None,
    };
    TokenLoss { loss: slope * theta, slope, side }
}

/// −R·A, without a clip.
pub fn unclipped(log_ratio: f64, adv: f64) -> TokenLoss {
    let loss = -adv * ratio(log_ratio);
    TokenLoss { loss, slope: if inside_limit(log_ratio) { loss } else { 0.0 }, side: None }
}

/// −R̂·A up to `ratio_max` and beyond it a straight line in log R̂, so that the slope is −min(R̂,
/// ratio_max)·A everywhere.
pub fn truncated_slope(log_ratio: f64, adv: f64, ratio_max: f64) -> TokenLoss {
    let ratio = ratio(log_ratio);
    let beyond = (log_ratio - ratio_max.ln()).max(0.0);
    let slope = -adv * ratio.min(ratio_max);
    TokenLoss {
        loss: slope - adv * ratio_max * if ratio > ratio_max { beyond } else { 0.0 },
        slope,
        side: None,
    }
}

/// The side on which DPPO drops a token: its probability has moved away from that of the policy that sampled
/// it by more than is allowed, and the update would push it further.
pub fn dppo_drops(
    theta: f64,
    behav: f64,
    adv: f64,
    divergence: Divergence,
    (delta_low, delta_high): (f64, f64),
) -> Option<Side> {
    let moved = theta.exp() - behav.exp();
    let beyond = |delta: f64| match divergence {
        Divergence::Tv => moved.abs() > delta,
        Divergence::Kl => binary_kl(behav, theta) > delta,
    };
    match () {
        () if adv > 0.0 && moved > 0.0 && beyond(delta_high) => Some(Side::Upper),
        () if adv < 0.0 && moved < 0.0 && beyond(delta_low) => Some(Side::Lower),
        () => None,
    }
}

/// The pessimistic minimum; `moves` says whether the ratio still depends on log π_θ.
fn clipped_surrogate(ratio: f64, moves: bool, adv: f64, bounds: &Bounds) -> TokenLoss {
    let plain = -adv * ratio;
    let clipped = -adv * ratio.max(bounds.low).min(bounds.high);
    let flat = |loss, side| TokenLoss { loss, slope: 0.0, side: Some(side) };
    if clipped > plain {
        return flat(clipped, if adv > 0.0 { Side::Upper } else { Side::Lower });
    }
    match bounds.dual {
        Some(c) if adv < 0.0 && plain > -adv * c => flat(-adv * c, Side::Dual),
        _ => TokenLoss { loss: plain, slope: if moves { plain } else { 0.0 }, side: None },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { low: 0.8, high: 1.28, dual: Some(3.0) };

    #[test]
    fn each_side_by_hand() {
        let at = |r: f64, adv| ppo(r.ln(), adv, &BOUNDS);
        let flat = |loss, side| TokenLoss { loss, slope: 0.0, side: Some(side) };
        assert_eq!(at(2.0, 1.5), flat(-1.28 * 1.5, Side::Upper));
        assert_eq!(at(0.5, -1.5), flat(0.8 * 1.5, Side::Lower));
        assert_eq!(at(4.0, -1.5), flat(4.5, Side::Dual));
        // The clip does not hold where it would help: unlikely good tokens and likely bad ones keep their
        // slope.
        for (r, adv) in [(0.5, 1.5), (2.0, -1.5), (1.0, 1.5), (1.0, -1.5)] {
            let t = at(r, adv);
            assert!((t.loss + adv * r).abs() < 1e-12 && t.slope == t.loss && t.side.is_none());
        }
    }

    #[test]
    fn no_advantage_no_clip() {
        for log_ratio in [-5.0, 0.0, 5.0] {
            let t = ppo(log_ratio, 0.0, &BOUNDS);
            assert!(t.loss == 0.0 && t.slope == 0.0 && t.side.is_none());
        }
    }

    #[test]
    fn beyond_the_limit_there_is_no_slope() {
        let open = Bounds { dual: None, ..BOUNDS };
        assert_eq!(ppo(21.0, -1.0, &open).slope, 0.0);
        assert_eq!(ppo(21.0, -1.0, &open).loss, 20f64.exp());
        assert_eq!(gspo(11.0, -1.0, &open).slope, 0.0);
        assert_eq!(gspo(11.0, -1.0, &open).loss, 10f64.exp());
    }

    #[test]
    fn dppo_drops_only_what_would_go_further() {
        let drops =
            |theta: f64, behav: f64, adv, kind| dppo_drops(theta.ln(), behav.ln(), adv, kind, (0.2, 0.3));
        let tv = Divergence::Tv;
        assert_eq!(drops(0.61, 0.3, 1.0, tv), Some(Side::Upper));
        assert_eq!([drops(0.59, 0.3, 1.0, tv), drops(0.61, 0.3, -1.0, tv)], [None; 2]);
        assert_eq!(drops(0.3, 0.51, -1.0, tv), Some(Side::Lower));
        assert_eq!([drops(0.3, 0.49, -1.0, tv), drops(0.3, 0.51, 1.0, tv)], [None; 2]);
        // D(0.3‖0.9) = 1.03, D(0.5‖0.1) = 0.51, D(0.5‖0.3) = 0.087
        let kl = Divergence::Kl;
        assert_eq!(drops(0.9, 0.3, 1.0, kl), Some(Side::Upper));
        assert_eq!(drops(0.1, 0.5, -1.0, kl), Some(Side::Lower));
        assert_eq!(
            [drops(0.1, 0.5, 1.0, kl), drops(0.3, 0.5, -1.0, kl), drops(0.9, 0.3, 0.0, kl)],
            [None; 3]
        );
    }

    #[test]
    fn a_truncated_slope_is_that_of_a_continuous_loss() {
        let at = |r: f64, adv| truncated_slope(r.ln(), adv, 20.0);
        assert!((at(3.0, 2.0).loss + 6.0).abs() < 1e-12 && (at(3.0, 2.0).slope + 6.0).abs() < 1e-12);
        assert_eq!(at(50.0, -2.0).slope, 40.0);
        assert!((at(20.0 + 1e-9, 1.0).loss - at(20.0 - 1e-9, 1.0).loss).abs() < 1e-6);
        assert!((at(40.0, 1.0).loss + 20.0 * (1.0 + 2f64.ln())).abs() < 1e-12);
    }

    #[test]
    fn cispo_keeps_every_gradient() {
        let t = cispo(-2.0, 1.0, 0.5, &BOUNDS);
        assert_eq!((t.slope, t.loss, t.side), (-0.64, 1.28, Some(Side::Upper)));
        let t = cispo(-2.0, -1.0, 0.5, &BOUNDS);
        assert_eq!((t.slope, t.side), (-0.4, Some(Side::Lower)));
        assert_eq!(cispo(-2.0, 0.0, 0.5, &BOUNDS).side, None);
    }
}
