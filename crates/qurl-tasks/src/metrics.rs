//! Evaluation metrics: Avg@k, pass@k and maj@k with confidence intervals. Pure functions of verdicts.
//!
//! Samples of one problem are not independent, so the unit of all intervals is the problem. They are Wilson
//! intervals at 95%: for one sample per problem exactly the usual one, otherwise with the number of problems
//! corrected by how much the per-problem values vary. Unlike a bootstrap they stay honest when all values are
//! 0 or 1.

use serde::Serialize;

/// Quantile of the normal distribution for 95%.
const Z: f64 = 1.959_963_984_540_054;

/// A mean over problems with its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
    /// Problems it was taken over.
    pub problems: usize,
}

/// The mean of per-problem values in [0, 1]; `None` without problems.
pub fn mean(values: &[f64]) -> Option<Estimate> {
    if values.is_empty() {
        return None;
    }
    let n = values.len() as f64;
    let p = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - p) * (v - p)).sum::<f64>() / n;
    // How many yes/no problems would give the same standard error.
    let effective = if variance > 0.0 { n * p * (1.0 - p) / variance } else { n };
    let denominator = 1.0 + Z * Z / effective;
    let centre = (p + Z * Z / (2.0 * effective)) / denominator;
    let half = Z / denominator * (p * (1.0 - p) / effective + Z * Z / (4.0 * effective * effective)).sqrt();
    Some(Estimate {
        value: p,
        low: (centre - half).clamp(0.0, p),
        high: (centre + half).clamp(p, 1.0),
        problems: values.len(),
    })
}

/// The unweighted mean of figures of several sets, each with its own problems: small sets count as much as
/// large ones. `None` without sets. The interval joins those of the sets, taken as independent, by their
/// distances from the values (the MOVER method), so that it is as honest near 0 and 1 as they are; of one set
/// it is that set's.
pub fn mean_over_sets(sets: &[Estimate]) -> Option<Estimate> {
    if sets.is_empty() {
        return None;
    }
    let n = sets.len() as f64;
    let value = sets.iter().map(|s| s.value).sum::<f64>() / n;
    let half =
        |distance: fn(&Estimate) -> f64| sets.iter().map(|s| distance(s).powi(2)).sum::<f64>().sqrt() / n;
    Some(Estimate {
        value,
        low: value - half(|s| s.value - s.low),
        high: value + half(|s| s.high - s.value),
        problems: sets.iter().map(|s| s.problems).sum(),
    })
}

/// Avg@k: the mean over all samples of how right they are, averaged over problems. With one greedy sample
/// this is accuracy.
pub fn avg_at_k(correct: &[Vec<f64>]) -> Option<Estimate> {
    let per_problem: Vec<f64> = correct
        .iter()
        .filter(|samples| !samples.is_empty())
        .map(|samples| samples.iter().sum::<f64>() / samples.len() as f64)
        .collect();
    mean(&per_problem)
}

/// The probability that at least one of k samples drawn without replacement from n is right, when c of n are:
/// the unbiased estimator 1 − C(n−c, k) / C(n, k). `None` when k is 0 or more than n.
pub fn pass_at_k_of(n: usize, c: usize, k: usize) -> Option<f64> {
    if k == 0 || k > n || c > n {
        return None;
    }
    if n - c < k {
        return Some(1.0);
    }
    let all_wrong: f64 = (n - c + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product();
    Some(1.0 - all_wrong)
}

/// pass@k over problems; `None` when a problem has fewer than k samples.
pub fn pass_at_k(correct: &[Vec<bool>], k: usize) -> Option<Estimate> {
    let per_problem: Option<Vec<f64>> = correct
        .iter()
        .map(|samples| pass_at_k_of(samples.len(), samples.iter().filter(|c| **c).count(), k))
        .collect();
    mean(&per_problem?)
}

/// One sample for a majority vote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vote {
    /// The answer, if the response had one.
    pub answer: Option<String>,
    /// Whether it is right.
    pub correct: bool,
}

/// maj@k: the samples of a problem are cut into runs of k, each run votes, and the problem's value is the
/// share of runs whose most frequent answer is right. A tie counts by the share of right answers among the
/// tied. `same` says whether two answers are one. `None` when a problem has fewer than k samples.
pub fn maj_at_k(votes: &[Vec<Vote>], k: usize, same: impl Fn(&str, &str) -> bool) -> Option<Estimate> {
    if k == 0 {
        return None;
    }
    let per_problem: Option<Vec<f64>> = votes
        .iter()
        .map(|samples| {
            let runs = samples.chunks_exact(k);
            let count = runs.len();
            (count > 0).then(|| runs.map(|run| majority_is_right(run, &same)).sum::<f64>() / count as f64)
        })
        .collect();
    mean(&per_problem?)
}

fn majority_is_right(run: &[Vote], same: &impl Fn(&str, &str) -> bool) -> f64 {
    // Classes of answers: representative, votes, whether right.
    let mut classes: Vec<(&str, usize, bool)> = Vec::new();
    for vote in run {
        let Some(answer) = vote.answer.as_deref() else { continue };
        match classes.iter_mut().find(|(other, _, _)| same(other, answer)) {
            Some(class) => class.1 += 1,
            None => classes.push((answer, 1, vote.correct)),
        }
    }
    let most = classes.iter().map(|(_, votes, _)| *votes).max().unwrap_or(0);
    let tied: Vec<bool> =
        classes.iter().filter(|(_, votes, _)| *votes == most).map(|(_, _, right)| *right).collect();
    if tied.is_empty() {
        return 0.0;
    }
    tied.iter().filter(|right| **right).count() as f64 / tied.len() as f64
}
