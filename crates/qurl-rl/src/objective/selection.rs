//! Tokens that an objective drops because of where θ is now. They weigh nothing and stay in the denominator.
//!
//! Unlike a [`Correction`](super::Correction), which looks at the two policies of the rollout, these look at
//! θ: at all tokens of a sequence, or of a mini-batch.

use super::correction::sequence_sums;
use super::{Ratio, Resolved, Tokens, log_ratios};

/// Which tokens are kept; nothing where an objective drops none in this way.
pub(super) fn kept<F: Copy + Into<f64>>(resolved: &Resolved, tokens: &Tokens<F>) -> Option<Vec<bool>> {
    let moment = resolved.second_moment.map(|tau| below_moment(tau, resolved.ratio, tokens));
    let policy = resolved.clip.off_policy_mask.map(|tau| on_policy(tau, tokens));
    match (moment, policy) {
        (Some(a), Some(b)) => Some(a.into_iter().zip(b).map(|(a, b)| a && b).collect()),
        (a, b) => a.or(b),
    }
}

/// The off-policy sequence mask: without tokens of negative advantage where the mean of log π_behav − log π_θ
/// over the sequence is above τ.
fn on_policy<F: Copy + Into<f64>>(tau: f64, tokens: &Tokens<F>) -> Vec<bool> {
    let log_ratios = log_ratios(Ratio::Behav, tokens);
    let (sums, counts) = sequence_sums(&log_ratios, tokens.mask, tokens.seq);
    let far = |s: usize| -sums[s] / counts[s].max(1) as f64 > tau;
    (0..tokens.mask.len()).map(|t| !(tokens.adv[t].into() < 0.0 && far(tokens.seq[t] as usize))).collect()
}

/// M2PO: without the tokens of the largest squared log-ratios, as many as it takes for the mean of the others
/// to be at most τ. Of equal squares the later token goes first.
fn below_moment<F: Copy + Into<f64>>(tau: f64, ratio: Ratio, tokens: &Tokens<F>) -> Vec<bool> {
    let squares: Vec<f64> = log_ratios(ratio, tokens).iter().map(|x| x * x).collect();
    let mut order: Vec<usize> = (0..squares.len()).filter(|&t| tokens.mask[t]).collect();
    order.sort_by(|&a, &b| squares[a].total_cmp(&squares[b]).then(a.cmp(&b)));
    let mut kept = vec![false; squares.len()];
    let mut sum = 0.0;
    // The mean of the smallest squares grows with their number.
    for (i, &t) in order.iter().enumerate() {
        sum += squares[t];
        if sum > tau * (i + 1) as f64 {
            break;
        }
        kept[t] = true;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::super::Objective;
    use super::*;

    const PROX: [f64; 5] = [-1.0, -1.0, -1.0, -1.0, -1.0];
    const THETA: [f64; 5] = [-1.1, -0.8, -9.0, -1.3, -0.9];
    const BEHAV: [f64; 5] = [-1.0, -0.5, -1.0, -1.2, -1.0];
    const ADV: [f64; 5] = [-1.0, 1.0, -1.0, -1.0, -1.0];
    const MASK: [bool; 5] = [true, true, false, true, true];
    const SEQ: [u32; 5] = [0, 0, 0, 1, 1];

    fn kept_by(text: &str) -> Option<Vec<bool>> {
        let objective: Objective = serde_json::from_str(text).unwrap();
        let tokens = Tokens { theta: &THETA, prox: &PROX, behav: &BEHAV, adv: &ADV, mask: &MASK, seq: &SEQ };
        objective.kept(&tokens)
    }

    #[test]
    fn by_hand() {
        // Means of log π_behav − log π_θ: (0.1 + 0.3)/2 = 0.2 and (0.1 − 0.1)/2 = 0.
        let mask = |tau: f64| kept_by(&format!(r#"{{"type":"acr","off_policy_mask":{tau}}}"#)).unwrap();
        assert_eq!(mask(0.19), [false, true, false, true, true]);
        assert_eq!(mask(0.21), [true; 5]);
        assert_eq!(kept_by(r#"{"type":"off-policy-mask","tau":0.19}"#), Some(mask(0.19)));
        // Squares of log π_θ − log π_prox: 0.01, 0.04, (masked), 0.09, 0.01; sums of the smallest 0.01, 0.02,
        // 0.06, 0.15.
        let m2po = |tau: f64| kept_by(&format!(r#"{{"type":"m2po","tau":{tau}}}"#)).unwrap();
        assert_eq!(m2po(0.0376), [true, true, false, true, true]);
        assert_eq!(m2po(0.0374), [true, true, false, false, true]);
        assert_eq!(m2po(0.0199), [true, false, false, false, true]);
        assert_eq!(m2po(0.009), [false; 5]);
        // To the policy that sampled: 0.01, 0.09, (masked), 0.01, 0.01.
        let behav = kept_by(r#"{"type":"m2po","tau":0.02,"ratio":"behav"}"#).unwrap();
        assert_eq!(behav, [true, false, false, true, true]);
        let both = kept_by(r#"{"type":"m2po","tau":0.0374,"off_policy_mask":0.19}"#).unwrap();
        assert_eq!(both, [false, true, false, false, true]);
        assert_eq!(kept_by(r#"{"type":"acr"}"#), None);
    }
}
