//! Advantages that need no critic: the other answers to the same prompt are the baseline.
//!
//! One score per sequence comes in, one advantage per sequence goes out; `groups[i]` is the prompt of
//! sequence `i`. A group of one has nothing to compare with and keeps its raw score.

use crate::error::{RlError, same_length};
use crate::stats;
use std::collections::BTreeMap;

/// Keeps the division by the spread finite; part of the known semantics of GRPO.
const STD_EPSILON: f64 = 1e-6;

/// Mean, unbiased standard deviation and size of every group.
struct Group {
    mean: f64,
    std: f64,
    size: usize,
}

/// GRPO: (score − mean) / (std + 1e-6) in the group; without `norm_by_std` the mean only (Dr. GRPO).
pub fn grpo<F: Copy + Into<f64>>(
    scores: &[F],
    groups: &[u32],
    norm_by_std: bool,
) -> Result<Vec<f64>, RlError> {
    per_group(scores, groups, |score, group| match (group.size, norm_by_std) {
        (1, false) => score,
        (1, true) => score / (1.0 + STD_EPSILON),
        (_, false) => score - group.mean,
        (_, true) => (score - group.mean) / (group.std + STD_EPSILON),
    })
}

/// RLOO: the baseline of a sequence is the mean of the others, which is n/(n−1)·(score − mean).
pub fn rloo<F: Copy + Into<f64>>(scores: &[F], groups: &[u32]) -> Result<Vec<f64>, RlError> {
    per_group(scores, groups, |score, group| match group.size {
        1 => score,
        n => n as f64 / (n - 1) as f64 * (score - group.mean),
    })
}

/// Which sequences are worth training on: those whose group has more than one score in it. DAPO's dynamic
/// sampling drops the others, because their advantages are all zero.
pub fn in_mixed_group<F: Copy + Into<f64>>(scores: &[F], groups: &[u32]) -> Result<Vec<bool>, RlError> {
    same_length("groups", groups.len(), "scores", scores.len())?;
    let mut range: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for (&g, &s) in groups.iter().zip(scores) {
        let s = s.into();
        let (low, high) = range.entry(g).or_insert((s, s));
        (*low, *high) = (low.min(s), high.max(s));
    }
    Ok(groups.iter().map(|g| range[g].0 < range[g].1).collect())
}

/// Applies `advantage` to every score and the statistics of its group.
fn per_group<F: Copy + Into<f64>>(
    scores: &[F],
    groups: &[u32],
    advantage: impl Fn(f64, &Group) -> f64,
) -> Result<Vec<f64>, RlError> {
    same_length("groups", groups.len(), "scores", scores.len())?;
    let mut members: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for (&g, &s) in groups.iter().zip(scores) {
        members.entry(g).or_default().push(s.into());
    }
    let statistics: BTreeMap<u32, Group> = members
        .into_iter()
        .map(|(g, scores)| {
            let mean = stats::mean(&scores);
            let std = stats::variance(&scores, mean).sqrt();
            (g, Group { mean, std, size: scores.len() })
        })
        .collect();
    Ok(groups.iter().zip(scores).map(|(g, &s)| advantage(s.into(), &statistics[g])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_groups_have_exactly_no_advantage() {
        let scores = [0.1f32, 0.1, 0.1, 1.0, 0.0];
        let groups = [7, 7, 7, 2, 2];
        assert_eq!(grpo(&scores, &groups, true).unwrap()[..3], [0.0; 3]);
        assert_eq!(rloo(&scores, &groups).unwrap()[..3], [0.0; 3]);
        assert_eq!(in_mixed_group(&scores, &groups).unwrap(), [false, false, false, true, true]);
    }

    #[test]
    fn two_answers_by_hand() {
        // mean 0.5, unbiased std sqrt(0.5)
        let std = 0.5f64.sqrt();
        let a = grpo(&[1.0f64, 0.0], &[0, 0], true).unwrap();
        assert_eq!(a, [0.5 / (std + 1e-6), -0.5 / (std + 1e-6)]);
        assert_eq!(grpo(&[1.0f64, 0.0], &[0, 0], false).unwrap(), [0.5, -0.5]);
        // leave one out: 1 - 0 and 0 - 1
        assert_eq!(rloo(&[1.0f64, 0.0], &[0, 0]).unwrap(), [1.0, -1.0]);
    }

    #[test]
    fn a_group_of_one_keeps_its_score() {
        assert_eq!(grpo(&[0.7f64], &[3], false).unwrap(), [0.7]);
        assert_eq!(grpo(&[0.7f64], &[3], true).unwrap(), [0.7 / (1.0 + 1e-6)]);
        assert_eq!(rloo(&[0.7f64], &[3]).unwrap(), [0.7]);
        assert_eq!(in_mixed_group(&[0.7f64], &[3]).unwrap(), [false]);
    }

    #[test]
    fn lengths_are_checked() {
        assert!(grpo(&[1.0f32], &[0, 0], true).is_err());
        assert!(rloo(&[1.0f32], &[]).is_err());
        assert!(in_mixed_group(&[1.0f32], &[]).is_err());
    }
}
