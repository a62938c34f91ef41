//! Advantages that run along the tokens of a sequence: GAE with a critic, discounted returns without one, and
//! the whitening both end with.
//!
//! The recursions walk all tokens backwards once and keep one running state per sequence, so sequences may be
//! packed in any way. Masked tokens in the middle of a sequence (tool output, observations) are stepped over:
//! they carry the state of the token after them to the token before them.

use crate::error::{RlError, same_length, sequence_count};
use crate::stats;

/// Keeps the division by the spread finite when all tokens have the same advantage.
const WHITEN_EPSILON: f64 = 1e-8;

/// What a token-level estimator yields.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// One advantage per token.
    pub advantages: Vec<f64>,
    /// What the critic should have said, one return per token.
    pub returns: Vec<f64>,
}

/// Generalised advantage estimation: δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, returns = A + V.
/// Advantages are not whitened and masked tokens get 0.
pub fn gae<F: Copy + Into<f64>>(
    rewards: &[F],
    values: &[F],
    mask: &[bool],
    seq: &[u32],
    gamma: f64,
    lam: f64,
) -> Result<Estimate, RlError> {
    let n = rewards.len();
    same_length("values", values.len(), "rewards", n)?;
    same_length("mask", mask.len(), "rewards", n)?;
    same_length("seq", seq.len(), "rewards", n)?;
    // Value and advantage of the next token that counts.
    let mut after = vec![(0.0, 0.0); sequence_count(seq)];
    let (mut advantages, mut returns) = (vec![0.0; n], vec![0.0; n]);
    for t in (0..n).rev().filter(|&t| mask[t]) {
        let (next_value, next_advantage) = after[seq[t] as usize];
        let value: f64 = values[t].into();
        let delta = rewards[t].into() + gamma * next_value - value;
        let advantage = delta + gamma * lam * next_advantage;
        after[seq[t] as usize] = (value, advantage);
        advantages[t] = advantage;
        returns[t] = advantage + value;
    }
    Ok(Estimate { advantages, returns })
}

/// Discounted reward to go, G_t = r_t + γ·G_{t+1}; a masked token ends the sum of the tokens before it, and
/// gets 0 itself.
pub fn reward_to_go<F: Copy + Into<f64>>(
    rewards: &[F],
    mask: &[bool],
    seq: &[u32],
    gamma: f64,
) -> Result<Vec<f64>, RlError> {
    let n = rewards.len();
    same_length("mask", mask.len(), "rewards", n)?;
    same_length("seq", seq.len(), "rewards", n)?;
    let mut after = vec![0.0; sequence_count(seq)];
    let mut returns = vec![0.0; n];
    for t in (0..n).rev() {
        let state: &mut f64 = &mut after[seq[t] as usize];
        *state = if mask[t] { rewards[t].into() + gamma * *state } else { 0.0 };
        returns[t] = *state;
    }
    Ok(returns)
}

/// Shifts and scales the unmasked values to mean 0 and (Bessel-corrected) variance 1: (x − μ)/√(var + 1e-8).
/// Masked tokens get 0, and so does a single token, which has no spread.
pub fn whiten<F: Copy + Into<f64>>(values: &[F], mask: &[bool]) -> Result<Vec<f64>, RlError> {
    same_length("mask", mask.len(), "values", values.len())?;
    let counted: Vec<f64> = stats::masked(values, mask).collect();
    let mean = stats::mean(&counted);
    let scale = (stats::variance(&counted, mean) + WHITEN_EPSILON).sqrt();
    let whitened = |(&v, &m): (&F, &bool)| if m { (v.into() - mean) / scale } else { 0.0 };
    Ok(values.iter().zip(mask).map(whitened).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gae_with_lambda_one_is_return_minus_value() {
        let (rewards, values) = ([0.0f64, 0.0, 1.0], [0.2f64, 0.5, 0.7]);
        let e = gae(&rewards, &values, &[true; 3], &[0; 3], 1.0, 1.0).unwrap();
        for (a, v) in e.advantages.iter().zip(values) {
            assert!((a - (1.0 - v)).abs() < 1e-15);
        }
        assert!(e.returns.iter().all(|r| (r - 1.0).abs() < 1e-15));
    }

    #[test]
    fn gae_steps_over_masked_tokens() {
        let with = gae(
            &[0.1f64, 9.0, 9.0, 1.0],
            &[0.3f64, 8.0, 8.0, 0.6],
            &[true, false, false, true],
            &[0; 4],
            0.9,
            0.8,
        )
        .unwrap();
        let without = gae(&[0.1f64, 1.0], &[0.3f64, 0.6], &[true; 2], &[0; 2], 0.9, 0.8).unwrap();
        assert_eq!(with.advantages, [without.advantages[0], 0.0, 0.0, without.advantages[1]]);
        assert_eq!(with.returns, [without.returns[0], 0.0, 0.0, without.returns[1]]);
    }

    #[test]
    fn packing_does_not_matter() {
        let apart = gae(&[1.0f64, 2.0, 3.0, 4.0], &[0.5f64; 4], &[true; 4], &[0, 0, 1, 1], 0.9, 0.7).unwrap();
        let mixed = gae(&[1.0f64, 3.0, 2.0, 4.0], &[0.5f64; 4], &[true; 4], &[0, 1, 0, 1], 0.9, 0.7).unwrap();
        let a = &mixed.advantages;
        assert_eq!(apart.advantages, [a[0], a[2], a[1], a[3]]);
    }

    #[test]
    fn reward_to_go_by_hand() {
        let g = reward_to_go(&[1.0f64, 0.0, 4.0, 8.0], &[true; 4], &[0, 0, 0, 1], 0.5).unwrap();
        assert_eq!(g, [2.0, 2.0, 4.0, 8.0]);
        let g = reward_to_go(&[1.0f64, 5.0, 4.0], &[true, false, true], &[0; 3], 0.5).unwrap();
        assert_eq!(g, [1.0, 0.0, 4.0]);
    }

    #[test]
    fn whitened_values_have_mean_0_and_variance_1() {
        let mask = [true, true, false, true];
        let w = whiten(&[1.0f32, 2.0, 100.0, 6.0], &mask).unwrap();
        let kept = [w[0], w[1], w[3]];
        assert_eq!(w[2], 0.0);
        assert!(stats::mean(&kept).abs() < 1e-12);
        assert!((stats::variance(&kept, 0.0) - 1.0).abs() < 1e-8);
        assert_eq!(whiten(&[3.0f64], &[true]).unwrap(), [0.0]);
        assert_eq!(whiten(&[0.3f64; 3], &[true; 3]).unwrap(), [0.0; 3]);
        assert!(whiten::<f64>(&[], &[]).unwrap().is_empty());
    }

    #[test]
    fn lengths_are_checked() {
        assert!(gae(&[1.0f32], &[], &[true], &[0], 1.0, 1.0).is_err());
        assert!(reward_to_go(&[1.0f32], &[true], &[], 1.0).is_err());
        assert!(whiten(&[1.0f32], &[]).is_err());
    }
}
