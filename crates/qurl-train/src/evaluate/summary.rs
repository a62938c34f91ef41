//! Figures of an evaluation: Avg@1 of the greedy responses; Avg@k, pass@k and maj@k of the samples.

use super::record::{ProblemRecord, ResponseRecord};
use qurl_tasks::grader::equivalent;
use qurl_tasks::metrics::{Estimate, Vote, avg_at_k, maj_at_k, mean_over_sets, pass_at_k};
use serde::Serialize;

/// A response with at least this much of `correct` counts as right where only yes or no will do.
const RIGHT: f64 = 0.5;

/// pass@k for one k.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PassAt {
    /// How many samples one may try.
    pub k: usize,
    /// Share of problems with a right one among them.
    #[serde(flatten)]
    pub estimate: Estimate,
}

/// Figures of one set, or of all.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Name of the set.
    pub name: String,
    /// Problems.
    pub problems: usize,
    /// Accuracy of the greedy responses.
    pub avg_at_1: Option<Estimate>,
    /// Mean accuracy of the samples.
    pub avg_at_k: Option<Estimate>,
    /// Share of problems with a right sample.
    pub pass_at_k: Option<Estimate>,
    /// Share of problems whose most frequent answer is right.
    pub maj_at_k: Option<Estimate>,
    /// pass@1, 2, 4, ... and k.
    pub pass: Vec<PassAt>,
    /// Mean length of all responses in tokens.
    pub mean_tokens: f64,
    /// Share of all responses that were cut off.
    pub truncated: f64,
}

/// Unweighted means of the sets' figures: the Avg of published tables, where a set of 30 problems counts as
/// much as one of 675. The total over problems beside it counts each problem alike.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeanOverSets {
    /// Sets.
    pub sets: usize,
    /// Accuracy of the greedy responses.
    pub avg_at_1: Option<Estimate>,
    /// Mean accuracy of the samples.
    pub avg_at_k: Option<Estimate>,
    /// Share of problems with a right sample.
    pub pass_at_k: Option<Estimate>,
    /// Share of problems whose most frequent answer is right.
    pub maj_at_k: Option<Estimate>,
}

impl MeanOverSets {
    /// The means of some sets; of each figure only where every set has it.
    pub fn of(sets: &[Summary]) -> MeanOverSets {
        let mean = |figure: fn(&Summary) -> Option<Estimate>| {
            let figures: Option<Vec<Estimate>> = sets.iter().map(figure).collect();
            mean_over_sets(&figures?)
        };
        MeanOverSets {
            sets: sets.len(),
            avg_at_1: mean(|s| s.avg_at_1),
            avg_at_k: mean(|s| s.avg_at_k),
            pass_at_k: mean(|s| s.pass_at_k),
            maj_at_k: mean(|s| s.maj_at_k),
        }
    }
}

/// Makes figures of the records of a set.
pub fn summarize<'a>(name: &str, records: impl IntoIterator<Item = &'a ProblemRecord>, k: usize) -> Summary {
    let records: Vec<&ProblemRecord> = records.into_iter().collect();
    let greedy: Vec<Vec<f64>> =
        records.iter().map(|r| r.greedy.iter().map(|g| g.correct).collect()).collect();
    let sampled: Vec<Vec<f64>> =
        records.iter().map(|r| r.samples.iter().map(|s| s.correct).collect()).collect();
    let right: Vec<Vec<bool>> = sampled.iter().map(|s| s.iter().map(|c| *c >= RIGHT).collect()).collect();
    let votes: Vec<Vec<Vote>> = records.iter().map(|r| votes(&r.samples)).collect();
    let ks = (0..usize::BITS).map(|e| 1usize << e).take_while(|power| *power < k).chain((k > 0).then_some(k));
    let pass = ks.filter_map(|k| Some(PassAt { k, estimate: pass_at_k(&right, k)? })).collect();
    let all: Vec<&ResponseRecord> = records.iter().flat_map(|r| r.greedy.iter().chain(&r.samples)).collect();
    let count = all.len().max(1) as f64;
    Summary {
        name: name.to_string(),
        problems: records.len(),
        avg_at_1: avg_at_k(&greedy),
        avg_at_k: avg_at_k(&sampled),
        pass_at_k: pass_at_k(&right, k),
        maj_at_k: maj_at_k(&votes, k, |a, b| a == b),
        pass,
        mean_tokens: all.iter().map(|r| r.tokens).sum::<usize>() as f64 / count,
        truncated: all.iter().filter(|r| r.truncated).count() as f64 / count,
    }
}

/// Votes of the samples, with one text for all answers that mean the same. A right and a wrong answer are
/// never the same, whatever they look like.
fn votes(samples: &[ResponseRecord]) -> Vec<Vote> {
    let mut classes: Vec<(&str, bool)> = Vec::new();
    let vote = |sample| {
        let ResponseRecord { extracted, correct, .. }: &ResponseRecord = sample;
        let correct = *correct >= RIGHT;
        let answer = extracted.as_deref().map(|answer| {
            let same = |class: &(&str, bool)| {
                class.1 == correct && (class.0 == answer || equivalent(class.0, answer))
            };
            let place = classes.iter().position(same).unwrap_or_else(|| {
                classes.push((answer, correct));
                classes.len() - 1
            });
            place.to_string()
        });
        Vote { answer, correct }
    };
    samples.iter().map(vote).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_tasks::task::Prompt;

    fn response(extracted: Option<&str>, correct: f64) -> ResponseRecord {
        let extracted = extracted.map(str::to_string);
        ResponseRecord {
            text: String::new(),
            correct,
            reward: correct,
            extracted,
            tokens: 4,
            truncated: correct == 0.0,
        }
    }

    fn record(index: u64, greedy: f64, samples: Vec<ResponseRecord>) -> ProblemRecord {
        ProblemRecord {
            set: "s".into(),
            index,
            id: index.to_string(),
            prompt: Prompt::Text("p".into()),
            answer: "1/2".into(),
            greedy: Some(response(Some("1/2"), greedy)),
            samples,
        }
    }

    #[test]
    fn figures_of_two_problems() {
        let (half, point_five) = (response(Some("1/2"), 1.0), response(Some("0.5"), 1.0));
        let (three, none) = (response(Some("3"), 0.0), response(None, 0.0));
        let records = [
            // Two ways to write one answer outvote the other.
            record(0, 1.0, vec![half, three.clone(), point_five, none.clone()]),
            record(1, 0.0, vec![three.clone(), three, none.clone(), none]),
        ];
        let summary = summarize("s", &records, 4);
        let value = |e: Option<Estimate>| e.expect("an estimate").value;
        assert_eq!(value(summary.avg_at_1), 0.5);
        assert_eq!(value(summary.avg_at_k), 0.25);
        assert_eq!(value(summary.pass_at_k), 0.5);
        assert_eq!(value(summary.maj_at_k), 0.5);
        let pass: Vec<(usize, f64)> = summary.pass.iter().map(|p| (p.k, p.estimate.value)).collect();
        assert_eq!(pass.iter().map(|p| p.0).collect::<Vec<_>>(), [1, 2, 4]);
        // One of four right twice: 1 - C(2,2)/C(4,2) = 5/6 for two tries.
        assert!((pass[0].1 - 0.25).abs() < 1e-12 && (pass[1].1 - 5.0 / 12.0).abs() < 1e-12, "{pass:?}");
        assert_eq!((summary.problems, summary.mean_tokens, summary.truncated), (2, 4.0, 0.7));
        assert_eq!(summarize("none", [], 4).avg_at_1, None);
    }

    #[test]
    fn sets_count_alike_in_their_mean() {
        let large: Vec<ProblemRecord> = (0..9).map(|i| record(i, 1.0, vec![response(None, 1.0)])).collect();
        let small = [record(0, 0.0, vec![response(None, 0.0)])];
        let sets = [summarize("large", &large, 1), summarize("small", &small, 1)];
        let mean = MeanOverSets::of(&sets);
        let total = summarize("total", large.iter().chain(&small), 1);
        assert_eq!(total.avg_at_1.map(|e| e.value), Some(0.9));
        assert_eq!((mean.sets, mean.avg_at_1.map(|e| e.value)), (2, Some(0.5)));
        assert_eq!(mean.avg_at_k.map(|e| (e.value, e.problems)), Some((0.5, 10)));
        // A figure that one set lacks has no mean.
        let without = [sets[0].clone(), summarize("empty", [], 1)];
        assert_eq!(MeanOverSets::of(&without).avg_at_1, None);
        assert_eq!(MeanOverSets::of(&[]).avg_at_k, None);
    }

    #[test]
    fn right_and_wrong_answers_never_share_a_class() {
        let votes = votes(&[response(Some("1 2 3"), 1.0), response(Some("1 2 3"), 0.0)]);
        assert_ne!(votes[0].answer, votes[1].answer);
    }
}
