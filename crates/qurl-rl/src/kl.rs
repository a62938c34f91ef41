//! Estimators of KL(π_θ‖π_ref) from sampled tokens, as a term of the loss or as a part of the reward.
//!
//! With d = log π_θ − log π_ref: k1 = d is unbiased and noisy, k2 = d²/2 has a bias but the right gradient in
//! expectation, k3 = e^−d − 1 + d is unbiased and never negative. As a loss the *gradient* is what matters,
//! and k1's has mean zero; the variants with `+` therefore report their value but push with the gradient of
//! k2.

use crate::error::{RlError, same_length, sequence_count};
use crate::{inside_limit, ratio};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// k3 is limited to this, as its exponential would otherwise rule the batch.
const K3_LIMIT: f64 = 10.0;

/// Which estimator (`kl_loss_type`, `kl_penalty`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KlEstimator {
    /// d, the difference of the log-probs: unbiased, noisy, with a gradient of mean zero in a loss.
    #[serde(rename = "k1", alias = "kl")]
    #[schemars(extend("x-aliases" = ["kl"]))]
    K1,
    /// |d|.
    #[serde(rename = "abs")]
    Abs,
    /// d²/2: a bias, but the right gradient.
    #[serde(rename = "k2", alias = "mse")]
    #[schemars(extend("x-aliases" = ["mse"]))]
    K2,
    /// e^−d − 1 + d: unbiased and never negative.
    #[serde(rename = "k3", alias = "low_var_kl", alias = "low-var-kl")]
    #[schemars(extend("x-aliases" = ["low_var_kl", "low-var-kl"]))]
    K3,
    /// Value of k1, gradient of k2.
    #[serde(rename = "k1+", alias = "kl+")]
    #[schemars(extend("x-aliases" = ["kl+"]))]
    K1Plus,
    /// Value of |d|, gradient of k2.
    #[serde(rename = "abs+")]
    AbsPlus,
    /// Value of k3, gradient of k2.
    #[serde(rename = "k3+", alias = "low_var_kl+", alias = "low-var-kl+")]
    #[schemars(extend("x-aliases" = ["low_var_kl+", "low-var-kl+"]))]
    K3Plus,
}

/// A term of the loss: its value and its derivative by the log-prob of every token.
#[derive(Debug, Clone, PartialEq)]
pub struct KlLoss {
    /// coefficient · Σ weight · KL.
    pub loss: f64,
    /// Its derivative by log π_θ of every token.
    pub dlogp: Vec<f64>,
    /// Sum of the estimates over the tokens that count.
    pub kl_sum: f64,
    /// Number of tokens that count.
    pub tokens: u64,
}

/// Rewards from which a KL penalty has been taken.
#[derive(Debug, Clone, PartialEq)]
pub struct KlReward {
    /// reward − coefficient · KL; a masked token keeps its reward.
    pub rewards: Vec<f64>,
    /// Mean over sequences of the mean over their tokens, the number a
    /// [`KlCoefficient`](crate::KlCoefficient) adapts to.
    pub mean_kl: f64,
}

impl KlEstimator {
    /// Estimate at one token, and its derivative by log π_θ.
    pub fn at(&self, theta: f64, reference: f64) -> (f64, f64) {
        let d = theta - reference;
        match self {
            Self::K1 => (d, 1.0),
            Self::Abs => (d.abs(), if d == 0.0 { 0.0 } else { d.signum() }),
            Self::K2 => (0.5 * d * d, d),
            Self::K3 => {
                let inverse = ratio(-d);
                let limited = d.clamp(-crate::LOG_RATIO_LIMIT, crate::LOG_RATIO_LIMIT);
                let value = inverse - 1.0 + limited;
                let moves = inside_limit(d) && value <= K3_LIMIT;
                (value.min(K3_LIMIT), if moves { 1.0 - inverse } else { 0.0 })
            }
            Self::K1Plus => (Self::K1.at(theta, reference).0, d),
            Self::AbsPlus => (Self::Abs.at(theta, reference).0, d),
            Self::K3Plus => (Self::K3.at(theta, reference).0, d),
        }
    }

    /// KL as a term of the loss. `weight` are the aggregation weights of the policy loss.
    pub fn in_loss<F: Copy + Into<f64>>(
        &self,
        coefficient: f64,
        theta: &[F],
        reference: &[F],
        mask: &[bool],
        weight: &[f64],
    ) -> Result<KlLoss, RlError> {
        let n = theta.len();
        same_length("reference", reference.len(), "theta", n)?;
        same_length("mask", mask.len(), "theta", n)?;
        same_length("weight", weight.len(), "theta", n)?;
        let mut out = KlLoss { loss: 0.0, dlogp: vec![0.0; n], kl_sum: 0.0, tokens: 0 };
        for t in (0..n).filter(|&t| mask[t]) {
            let (value, slope) = self.at(theta[t].into(), reference[t].into());
            out.loss += coefficient * weight[t] * value;
            out.dlogp[t] = coefficient * weight[t] * slope;
            out.kl_sum += value;
            out.tokens += 1;
        }
        Ok(out)
    }

    /// KL as a penalty on the rewards. `logp` is the policy that is held to the reference: the old actor.
    pub fn in_reward<F: Copy + Into<f64>>(
        &self,
        coefficient: f64,
        rewards: &[F],
        logp: &[F],
        reference: &[F],
        mask: &[bool],
        seq: &[u32],
    ) -> Result<KlReward, RlError> {
        let n = rewards.len();
        same_length("logp", logp.len(), "rewards", n)?;
        same_length("reference", reference.len(), "rewards", n)?;
        same_length("mask", mask.len(), "rewards", n)?;
        same_length("seq", seq.len(), "rewards", n)?;
        let mut of_sequence = vec![(0.0, 0u64); sequence_count(seq)];
        let mut penalised: Vec<f64> = rewards.iter().map(|&r| r.into()).collect();
        for t in (0..n).filter(|&t| mask[t]) {
            let (value, _) = self.at(logp[t].into(), reference[t].into());
            penalised[t] -= coefficient * value;
            let (sum, count) = &mut of_sequence[seq[t] as usize];
            *sum += value;
            *count += 1;
        }
        let means: Vec<f64> = of_sequence
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(sum, count)| sum / *count as f64)
            .collect();
        Ok(KlReward { rewards: penalised, mean_kl: crate::stats::mean(&means) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [KlEstimator; 7] = [
        KlEstimator::K1,
        KlEstimator::Abs,
        KlEstimator::K2,
        KlEstimator::K3,
        KlEstimator::K1Plus,
        KlEstimator::AbsPlus,
        KlEstimator::K3Plus,
    ];

    #[test]
    fn no_divergence_no_penalty() {
        for k in ALL {
            let (value, slope) = k.at(-1.5, -1.5);
            assert_eq!(value, 0.0, "{k:?}");
            assert_eq!(slope, if k == KlEstimator::K1 { 1.0 } else { 0.0 }, "{k:?}");
        }
    }

    #[test]
    fn plus_variants_keep_the_value_and_take_the_gradient_of_k2() {
        for (plain, plus) in [
            (KlEstimator::K1, KlEstimator::K1Plus),
            (KlEstimator::Abs, KlEstimator::AbsPlus),
            (KlEstimator::K3, KlEstimator::K3Plus),
        ] {
            assert_eq!(plus.at(-1.0, -1.7).0, plain.at(-1.0, -1.7).0);
            assert_eq!(plus.at(-1.0, -1.7).1, KlEstimator::K2.at(-1.0, -1.7).1);
        }
    }

    #[test]
    fn k3_is_limited() {
        assert_eq!(KlEstimator::K3.at(-10.0, -1.0), (10.0, 0.0)); // e^9 − 1 − 9 is far above 10
        assert_eq!(KlEstimator::K3.at(1e4, -1e4).1, 0.0);
        assert!(KlEstimator::K3.at(1e4, -1e4).0 <= 10.0);
    }

    #[test]
    fn in_the_reward_by_hand() {
        let out = KlEstimator::K1
            .in_reward(
                0.1,
                &[0.0f64, 1.0, 0.0, 2.0],
                &[-1.0, -2.0, -9.0, -1.0],
                &[-1.5, -1.0, -1.0, -3.0],
                &[true, true, false, true],
                &[0, 0, 0, 1],
            )
            .unwrap();
        for (got, want) in out.rewards.iter().zip([-0.05, 1.1, 0.0, 1.8]) {
            assert!((got - want).abs() < 1e-12);
        }
        // Means of the sequences: (0.5 − 1)/2 and 2.
        assert!((out.mean_kl - 0.875).abs() < 1e-12);
    }

    #[test]
    fn lengths_are_checked() {
        assert!(KlEstimator::K1.in_loss(1.0, &[0.0f64], &[], &[true], &[1.0]).is_err());
        assert!(KlEstimator::K1.in_reward(1.0, &[0.0f64], &[0.0], &[0.0], &[true], &[]).is_err());
    }

    #[test]
    fn known_names_are_accepted() {
        for (name, k) in [
            ("kl", KlEstimator::K1),
            ("mse", KlEstimator::K2),
            ("low_var_kl", KlEstimator::K3),
            ("k3+", KlEstimator::K3Plus),
        ] {
            assert_eq!(serde_json::from_str::<KlEstimator>(&format!("\"{name}\"")).unwrap(), k);
        }
        for k in ALL {
            let name = serde_json::to_string(&k).unwrap();
            assert_eq!(serde_json::from_str::<KlEstimator>(&name).unwrap(), k);
        }
    }
}
