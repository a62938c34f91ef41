//! How far the policy that sampled is from the policy that is trained.
//!
//! Measured once per step on all sampled tokens, between `behav` and `prox`. In this project both come from
//! the same kernels, so without quantization every number here is exactly that of equal policies, and with it
//! they measure quantization and nothing else. Names follow what users of other libraries watch (`kl`,
//! `k3_kl`, `ppl_ratio`, `chi2_token`, `rollout_probs_diff_mean`, ...).

use crate::error::{RlError, same_length, sequence_count};
use crate::{LOG_RATIO_LIMIT, ratio, stats};
use serde::Serialize;

/// Perplexities are limited to e to this power.
const LOG_PPL_LIMIT: f64 = 100.0;

/// Distance between behaviour and proximal policy; ρ = π_prox/π_behav.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Mismatch {
    /// Tokens that counted.
    pub tokens: u64,
    /// KL(behav‖prox) as mean of log π_behav − log π_prox (Fig. 3a).
    pub kl: f64,
    /// The same by the estimator ρ − 1 − log ρ, which has less noise and no sign.
    pub k3_kl: f64,
    /// Largest ρ (Fig. 3b).
    pub rho_max: f64,
    /// Smallest ρ.
    pub rho_min: f64,
    /// Mean ρ; 1 in expectation, whatever the policies.
    pub rho_mean: f64,
    /// Median ρ.
    pub rho_p50: f64,
    /// ρ that 1 token in 100 exceeds.
    pub rho_p99: f64,
    /// ρ that 1 token in 1000 exceeds.
    pub rho_p999: f64,
    /// Effective sample size under the weights ρ, as a share of the tokens.
    pub ess: f64,
    /// Mean |π_behav − π_prox| of the sampled tokens (Fig. 4b).
    pub probs_diff_mean: f64,
    /// Its largest value.
    pub probs_diff_max: f64,
    /// Its standard deviation.
    pub probs_diff_std: f64,
    /// Correlation of the two probabilities; absent where one of them does not vary.
    pub probs_pearson_corr: Option<f64>,
    /// Mean over sequences of the perplexity under prox.
    pub training_ppl: f64,
    /// Mean over sequences of the perplexity under behav.
    pub rollout_ppl: f64,
    /// Mean over sequences of log(training perplexity / rollout perplexity).
    pub log_ppl_diff: f64,
    /// Mean of its absolute value.
    pub log_ppl_abs_diff: f64,
    /// Mean over sequences of training perplexity / rollout perplexity.
    pub ppl_ratio: f64,
    /// χ² of tokens: mean of ρ² minus 1.
    pub chi2_token: f64,
    /// χ² of sequences: mean of (Π ρ)² minus 1.
    pub chi2_seq: f64,
}

impl Mismatch {
    /// Measures the tokens that count; nothing where none does.
    pub fn measure<F: Copy + Into<f64>>(
        behav: &[F],
        prox: &[F],
        mask: &[bool],
        seq: &[u32],
    ) -> Result<Option<Self>, RlError> {
        same_length("prox", prox.len(), "behav", behav.len())?;
        same_length("mask", mask.len(), "behav", behav.len())?;
        same_length("seq", seq.len(), "behav", behav.len())?;
        let b: Vec<f64> = stats::masked(behav, mask).collect();
        let p: Vec<f64> = stats::masked(prox, mask).collect();
        if b.is_empty() {
            return Ok(None);
        }
        let kept: Vec<usize> = seq.iter().zip(mask).filter(|(_, m)| **m).map(|(&s, _)| s as usize).collect();
        let rho = Rho::of(&b, &p);
        let prob = |logp: &[f64]| logp.iter().map(|l| l.min(0.0).exp()).collect::<Vec<f64>>();
        let (prob_b, prob_p) = (prob(&b), prob(&p));
        let diff: Vec<f64> = prob_b.iter().zip(&prob_p).map(|(x, y)| (x - y).abs()).collect();
        let diff_mean = stats::mean(&diff);
        let s = Sequences::of(&b, &p, &kept, sequence_count(seq));
        Ok(Some(Self {
            tokens: b.len() as u64,
            kl: mean_of(b.iter().zip(&p).map(|(b, p)| b - p)),
            k3_kl: rho.k3,
            rho_max: stats::quantile_of_sorted(&rho.sorted, 1.0),
            rho_min: stats::quantile_of_sorted(&rho.sorted, 0.0),
            rho_mean: rho.sum / b.len() as f64,
            rho_p50: stats::quantile_of_sorted(&rho.sorted, 0.5),
            rho_p99: stats::quantile_of_sorted(&rho.sorted, 0.99),
            rho_p999: stats::quantile_of_sorted(&rho.sorted, 0.999),
            ess: stats::effective_sample_share(b.len() as u64, rho.sum, rho.square_sum),
            probs_diff_mean: diff_mean,
            probs_diff_max: diff.iter().copied().fold(0.0, f64::max),
            probs_diff_std: stats::variance(&diff, diff_mean).sqrt(),
            probs_pearson_corr: stats::pearson(&prob_b, &prob_p),
            training_ppl: mean_of(s.mean_prox.iter().map(|l| (-l).min(LOG_PPL_LIMIT).exp())),
            rollout_ppl: mean_of(s.mean_behav.iter().map(|l| (-l).min(LOG_PPL_LIMIT).exp())),
            log_ppl_diff: mean_of(s.log_ppl_diffs()),
            log_ppl_abs_diff: mean_of(s.log_ppl_diffs().map(f64::abs)),
            ppl_ratio: mean_of(s.log_ppl_diffs().map(ratio)),
            chi2_token: rho.square_sum / b.len() as f64 - 1.0,
            chi2_seq: mean_of(s.log_rho_sum.iter().map(|&l| ratio(l) * ratio(l))) - 1.0,
        }))
    }
}

/// KL(behav||prox) over the whole vocabulary at each token, from logits `[tokens, vocabulary]` of both.
pub fn full_vocabulary_kls(
    behav: &[f32],
    prox: &[f32],
    vocabulary: usize,
    temperature: f64,
) -> Result<Vec<f64>, RlError> {
    same_length("prox logits", prox.len(), "behav logits", behav.len())?;
    if vocabulary == 0 {
        return Ok(Vec::new());
    }
    let rows = behav.chunks_exact(vocabulary).zip(prox.chunks_exact(vocabulary));
    let kls = rows.map(|(b, p)| {
        let (b, p) = (log_softmax(b, temperature), log_softmax(p, temperature));
        b.iter().zip(&p).map(|(b, p)| b.exp() * (b - p)).sum::<f64>()
    });
    Ok(kls.collect())
}

/// KL(behav‖prox) over the whole vocabulary, mean over the rows of two `[rows, vocabulary]` arrays of logits
/// at a temperature: what [`Mismatch::kl`] estimates from one token a row. `None` without rows.
pub fn full_vocabulary_kl(
    behav: &[f32],
    prox: &[f32],
    vocabulary: usize,
    temperature: f64,
) -> Result<Option<f64>, RlError> {
    let kls = full_vocabulary_kls(behav, prox, vocabulary, temperature)?;
    Ok((!kls.is_empty()).then(|| mean_of(kls.into_iter())))
}

fn log_softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|&x| x as f64 / temperature).collect();
    let largest = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let total = scaled.iter().map(|x| (x - largest).exp()).sum::<f64>().ln() + largest;
    scaled.iter().map(|x| x - total).collect()
}

/// The ρ of all tokens, sorted, with the sums taken in token order.
struct Rho {
    sorted: Vec<f64>,
    sum: f64,
    square_sum: f64,
    k3: f64,
}

impl Rho {
    fn of(behav: &[f64], prox: &[f64]) -> Self {
        let (mut sum, mut square_sum, mut k3_sum) = (0.0, 0.0, 0.0);
        let mut sorted = Vec::with_capacity(behav.len());
        for (b, p) in behav.iter().zip(prox) {
            let log_rho = (p - b).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT);
            let rho = ratio(log_rho);
            sum += rho;
            square_sum += rho * rho;
            k3_sum += rho - 1.0 - log_rho;
            sorted.push(rho);
        }
        sorted.sort_by(f64::total_cmp);
        Self { sum, square_sum, k3: k3_sum / behav.len().max(1) as f64, sorted }
    }
}

/// Means and sums of every sequence that has a token that counts.
struct Sequences {
    mean_behav: Vec<f64>,
    mean_prox: Vec<f64>,
    log_rho_sum: Vec<f64>,
}

impl Sequences {
    fn of(behav: &[f64], prox: &[f64], seq: &[usize], count: usize) -> Self {
        let mut sums = vec![(0.0, 0.0, 0.0, 0u64); count];
        for ((b, p), &s) in behav.iter().zip(prox).zip(seq) {
            let (sum_b, sum_p, sum_log_rho, n) = &mut sums[s];
            *sum_b += b;
            *sum_p += p;
            *sum_log_rho += p - b;
            *n += 1;
        }
        sums.retain(|s| s.3 > 0);
        Self {
            mean_behav: sums.iter().map(|s| s.0 / s.3 as f64).collect(),
            mean_prox: sums.iter().map(|s| s.1 / s.3 as f64).collect(),
            log_rho_sum: sums.iter().map(|s| s.2).collect(),
        }
    }

    fn log_ppl_diffs(&self) -> impl Iterator<Item = f64> {
        self.mean_behav.iter().zip(&self.mean_prox).map(|(b, p)| b - p)
    }
}

/// Mean of an iterator; 0 of nothing.
fn mean_of(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0u64);
    for value in values {
        sum += value;
        count += 1;
    }
    sum / count.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kl_over_the_whole_vocabulary() {
        // Two coins: logits ln 3 and 0 are probabilities 3/4 and 1/4, against 1/2 and 1/2.
        let (behav, prox) = ([3f32.ln(), 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]);
        let first = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        let kl = full_vocabulary_kl(&behav, &prox, 2, 1.0).unwrap().unwrap();
        assert!((kl - first / 2.0).abs() < 1e-7, "{kl}");
        // At temperature 1/2 the odds are squared: 9/10 and 1/10.
        let hot = 0.9 * 1.8f64.ln() + 0.1 * 0.2f64.ln();
        let kl = full_vocabulary_kl(&behav[..2], &prox[..2], 2, 0.5).unwrap().unwrap();
        assert!((kl - hot).abs() < 1e-6, "{kl}");
        assert_eq!(full_vocabulary_kl(&prox, &prox, 2, 1.0).unwrap(), Some(0.0));
        assert_eq!(full_vocabulary_kl(&[], &[], 2, 1.0).unwrap(), None);
        assert!(full_vocabulary_kl(&behav, &prox[..2], 2, 1.0).is_err());
    }

    #[test]
    fn equal_policies_are_exactly_equal() {
        let logp = [-0.3f32, -2.0, -1.25, -0.01];
        let m = Mismatch::measure(&logp, &logp, &[true; 4], &[0, 0, 1, 1]).unwrap().unwrap();
        assert_eq!([m.kl, m.k3_kl, m.probs_diff_mean, m.probs_diff_max, m.probs_diff_std], [0.0; 5]);
        assert_eq!([m.log_ppl_diff, m.log_ppl_abs_diff, m.chi2_token, m.chi2_seq], [0.0; 4]);
        assert_eq!([m.rho_max, m.rho_min, m.rho_mean, m.rho_p50, m.rho_p999, m.ess, m.ppl_ratio], [1.0; 7]);
        assert_eq!(m.training_ppl, m.rollout_ppl);
        assert!((m.probs_pearson_corr.unwrap() - 1.0).abs() < 1e-15);
    }

    #[test]
    fn one_outlier_by_hand() {
        // 999 equal tokens and one that behav thought a thousand times less likely.
        let n = 1000;
        let mut behav = vec![-1.0f64; n];
        behav[17] = -1.0 - 1000f64.ln();
        let prox = vec![-1.0f64; n];
        let m = Mismatch::measure(&behav, &prox, &vec![true; n], &vec![0; n]).unwrap().unwrap();
        assert!((m.rho_max - 1000.0).abs() < 1e-9);
        assert_eq!((m.rho_p50, m.rho_p99, m.rho_p999), (1.0, 1.0, 1.0));
        assert!((m.kl + 1000f64.ln() / 1000.0).abs() < 1e-12);
        assert!((m.ess - 1999f64.powi(2) / (1000.0 * (999.0 + 1e6))).abs() < 1e-12);
        assert!((m.probs_diff_max - 0.999 * (-1f64).exp()).abs() < 1e-12);
        assert!(m.k3_kl > 0.0);
    }

    #[test]
    fn masked_tokens_do_not_count() {
        let all = Mismatch::measure(&[-1.0f32, -2.0], &[-1.5, -2.5], &[true; 2], &[0, 1]).unwrap();
        let with = Mismatch::measure(
            &[-1.0f32, f32::NAN, -2.0],
            &[-1.5, 3.0, -2.5],
            &[true, false, true],
            &[0, 7, 1],
        )
        .unwrap();
        assert_eq!(all, with);
        assert_eq!(Mismatch::measure(&[-1.0f32], &[-1.5], &[false], &[0]).unwrap(), None);
        assert!(Mismatch::measure(&[-1.0f32], &[], &[false], &[0]).is_err());
    }
}
