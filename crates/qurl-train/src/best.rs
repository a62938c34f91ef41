//! What "best" means, everywhere: the highest score of all evaluations of a run, the one before its first
//! step included. The score is Avg@k where `run.test_k` asks for it, else the accuracy of greedy responses;
//! of equal scores the newest counts. Kept checkpoints, summaries, comparisons and pages all go by this.

use serde_json::Value;

/// The best evaluation of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BestSeen {
    /// Its score, from 0 to 1.
    pub score: f64,
    /// The step after which it was made; 0 for the start.
    pub step: u64,
}

impl BestSeen {
    /// Of evaluations as (step, score), in their order; nothing where there is none.
    pub fn of(evaluations: impl IntoIterator<Item = (u64, f64)>) -> Option<BestSeen> {
        evaluations.into_iter().fold(None, |best, (step, score)| Some(BestSeen::or(best, step, score)))
    }

    /// The better of the best so far and a newer evaluation.
    pub fn or(best: Option<BestSeen>, step: u64, score: f64) -> BestSeen {
        best.filter(|best| best.score > score).unwrap_or(BestSeen { score, step })
    }

    /// Whether `last`, a newer score on as many problems, has collapsed from this one: it lost more than a
    /// fifth of it, and more than three standard errors of the difference of two such evaluations.
    pub fn collapsed_to(&self, last: f64, problems: u64) -> bool {
        let (lost, both) = (self.score - last, (self.score + last) / 2.0);
        let error = (2.0 * both * (1.0 - both) / problems.max(1) as f64).sqrt();
        last < 0.8 * self.score && lost > 3.0 * error
    }
}

/// The score in a line of `metrics.jsonl`, where the step was evaluated.
pub fn score_of(record: &Value) -> Option<f64> {
    let number = |key: &str| record.get(key).and_then(Value::as_f64);
    number("test_avg_at_k").or(number("test_accuracy"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_highest_counts_and_of_equal_ones_the_newest() {
        assert_eq!(BestSeen::of([]), None);
        let best =
            |scores: &[f64]| BestSeen::of((0..).zip(scores.iter().copied())).map(|b| (b.step, b.score));
        assert_eq!(best(&[0.5, 0.25]), Some((0, 0.5)), "the start is among them");
        assert_eq!(best(&[0.5, 0.75, 0.75, 0.5]), Some((2, 0.75)));
    }

    #[test]
    fn avg_at_k_comes_before_greedy_accuracy() {
        assert_eq!(score_of(&json!({"test_accuracy": 0.5, "test_avg_at_k": 0.25})), Some(0.25));
        assert_eq!(score_of(&json!({"test_accuracy": 0.5, "test_avg_at_k": null})), Some(0.5));
        assert_eq!(score_of(&json!({"accuracy": 0.5})), None);
    }

    #[test]
    fn a_collapse_is_more_than_noise() {
        let best = BestSeen { score: 0.9, step: 3 };
        assert!(best.collapsed_to(0.5, 100) && !best.collapsed_to(0.8, 100_000));
        assert!(!best.collapsed_to(0.5, 8), "of eight problems three are chance");
        assert!(!BestSeen { score: 0.04, step: 1 }.collapsed_to(0.0, 100), "there was nothing to lose");
    }
}
