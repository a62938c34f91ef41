//! Entropy bonus: a reward for staying undecided.
//!
//! Entropy is a function of all logits of a position, not of the sampled token's log-prob, so its gradient is
//! the head's business. What the head needs from here is dL/dH of every token; it multiplies by dH/dz_j =
//! −p_j·(log p_j + H), divided by the sampling temperature.

use crate::error::{RlError, same_length};

/// The bonus as a term of the loss.
#[derive(Debug, Clone, PartialEq)]
pub struct EntropyBonus {
    /// −coefficient · Σ weight · H.
    pub loss: f64,
    /// dL/dH of every token: −coefficient · weight.
    pub dentropy: Vec<f64>,
    /// Sum of the entropies over the tokens that count.
    pub entropy_sum: f64,
    /// Number of tokens that count.
    pub tokens: u64,
}

/// Entropy bonus with coefficient `entropy_coeff`; `weight` are the aggregation weights of the policy loss.
pub fn entropy_bonus<F: Copy + Into<f64>>(
    entropy_coeff: f64,
    entropy: &[F],
    mask: &[bool],
    weight: &[f64],
) -> Result<EntropyBonus, RlError> {
    let n = entropy.len();
    same_length("mask", mask.len(), "entropy", n)?;
    same_length("weight", weight.len(), "entropy", n)?;
    let mut out = EntropyBonus { loss: 0.0, dentropy: vec![0.0; n], entropy_sum: 0.0, tokens: 0 };
    for t in (0..n).filter(|&t| mask[t]) {
        let h: f64 = entropy[t].into();
        out.loss -= entropy_coeff * weight[t] * h;
        out.dentropy[t] = -entropy_coeff * weight[t];
        out.entropy_sum += h;
        out.tokens += 1;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let out = entropy_bonus(0.5, &[1.0f32, 7.0, 2.0], &[true, false, true], &[0.25, 0.0, 0.5]).unwrap();
        assert_eq!(out.loss, -0.5 * (0.25 + 1.0));
        assert_eq!(out.dentropy, [-0.125, 0.0, -0.25]);
        assert_eq!((out.entropy_sum, out.tokens), (3.0, 2));
        assert!(entropy_bonus(0.5, &[1.0f32], &[], &[1.0]).is_err());
    }

    /// The formula promised to the head, against finite differences over the logits.
    #[test]
    fn gradient_by_logits() {
        let entropy = |z: &[f64]| {
            let total: f64 = z.iter().map(|z| z.exp()).sum();
            -z.iter().map(|z| z.exp() / total * (z - total.ln())).sum::<f64>()
        };
        let z = [0.3, -1.0, 2.0];
        let total: f64 = z.iter().map(|z: &f64| z.exp()).sum();
        let h = entropy(&z);
        for j in 0..3 {
            let p = z[j].exp() / total;
            let (mut up, mut down) = (z, z);
            up[j] += 1e-6;
            down[j] -= 1e-6;
            let numeric = (entropy(&up) - entropy(&down)) / 2e-6;
            assert!((numeric + p * (p.ln() + h)).abs() < 1e-8);
        }
    }
}
