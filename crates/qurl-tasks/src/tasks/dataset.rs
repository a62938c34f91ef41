//! A data set as a task: rows, a prompt template and a grading policy.
//!
//! Rows are drawn in a seeded order without repetition: an epoch is a permutation that is computed row by
//! row, so that any index can be drawn by itself.

use super::countdown;
use super::overlap::{problem_keys, without_overlap};
use crate::data::Row;
use crate::grader::{Extract, Policy, grade, grade_by_rule};
use crate::presets::{self, Template};
use crate::prompt::{PromptError, PromptTemplate};
use crate::rng::{mix, mix_text};
use crate::task::{Dropped, Problem, Prompt, RewardValues, Split, Task, Verdict, split_of};
use serde_json::json;

/// A data set with a template and a policy.
#[derive(Clone, Debug)]
pub struct DatasetTask {
    name: String,
    rows: Vec<Row>,
    train: Vec<usize>,
    test: Vec<usize>,
    template: Template,
    policy: Policy,
    extract: Option<Extract>,
    format_weight: f64,
    /// Training rows that were left out because they are test problems.
    overlaps: u64,
    reward: RewardValues,
}

impl DatasetTask {
    /// Makes a task of rows; a share of `held_out` goes to the test split, by the hash of the problem's text.
    pub fn new(name: &str, rows: Vec<Row>, template: Template, policy: Policy, held_out: f64) -> DatasetTask {
        let splits: Vec<Split> = problem_keys(&rows).iter().map(|key| split_of(key, held_out)).collect();
        let of = |split: Split| (0..rows.len()).filter(|&row| splits[row] == split).collect();
        DatasetTask {
            name: name.into(),
            train: of(Split::Train),
            test: of(Split::Test),
            rows,
            template,
            policy,
            extract: None,
            format_weight: 0.0,
            overlaps: 0,
            reward: RewardValues::default(),
        }
    }

    /// Holds out these rows instead of a share: all others are for training, less those whose problem is held
    /// out too.
    pub fn with_test_rows(mut self, test: Vec<Row>) -> DatasetTask {
        let before = self.rows.len();
        let mut rows = without_overlap(self.rows, &test);
        self.overlaps = (before - rows.len()) as u64;
        self.train = (0..rows.len()).collect();
        self.test = (rows.len()..rows.len() + test.len()).collect();
        rows.extend(test);
        self.rows = rows;
        self
    }

    /// Gives this share of the way from wrong to right to responses with an answer in the wanted form that is
    /// wrong.
    pub fn with_format_weight(mut self, weight: f64) -> DatasetTask {
        self.format_weight = weight.clamp(0.0, 1.0);
        self
    }

    /// Rewards right and wrong responses with these values instead of 1 and 0.
    pub fn with_reward(mut self, values: RewardValues) -> DatasetTask {
        self.reward = values;
        self
    }

    /// Looks for answers by this rule; the policy then only compares. Countdown problems keep their own
    /// rules.
    pub fn with_extract(mut self, rule: Extract) -> DatasetTask {
        self.extract = Some(rule);
        self
    }

    /// Gives problems these prompts instead of those of the template: call it when all rows are there.
    pub fn with_prompt(mut self, template: &PromptTemplate) -> Result<DatasetTask, PromptError> {
        for row in &mut self.rows {
            row.problem = template.apply(row)?;
        }
        self.template = presets::PLAIN;
        Ok(self)
    }

    /// The rows of the data set.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// The problem of a row.
    pub fn problem(&self, row: &Row) -> Problem {
        let prompt = match &row.problem {
            Prompt::Text(text) => self.template.apply(text),
            // Chat messages were stored with their template.
            Prompt::Chat(messages) => Prompt::Chat(messages.clone()),
        };
        let mut extra = row.extra.clone();
        if !extra.is_object() {
            extra = json!({});
        }
        // verl keeps Countdown's numbers inside the ground truth.
        if let Some(truth) = row.extra.get("reward_model").and_then(|r| r.get("ground_truth"))
            && let (Some(numbers), Some(target)) = (truth.get("numbers"), truth.get("target"))
        {
            extra["nums"] = numbers.clone();
            extra["target"] = target.clone();
        }
        if let Some(source) = &row.source {
            extra["data_source"] = json!(source);
        }
        Problem { id: row.id.clone(), prompt, answer: row.answer.clone(), extra }
    }
}

impl Task for DatasetTask {
    fn name(&self) -> &str {
        &self.name
    }

    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem> {
        let members = match split {
            Split::Train => &self.train,
            Split::Test => &self.test,
        };
        let count = members.len() as u64;
        if count == 0 {
            return None;
        }
        let place = permuted(index % count, count, &[seed, index / count]);
        let row = self.rows.get(*members.get(place as usize)?)?;
        Some(self.problem(row))
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        if countdown::numbers_and_target(&problem.extra).is_some() {
            return countdown::verify(problem, response, self.format_weight).valued(self.reward);
        }
        let graded = match &self.extract {
            Some(rule) => grade_by_rule(&problem.answer, response, rule, self.policy),
            None => grade(&problem.answer, response, self.policy),
        };
        let format = graded.extracted.is_some();
        Verdict::new(graded.equal, format, self.format_weight, graded.extracted).valued(self.reward)
    }

    fn len(&self, split: Split) -> Option<u64> {
        Some(match split {
            Split::Train => self.train.len() as u64,
            Split::Test => self.test.len() as u64,
        })
    }

    fn overlaps(&self) -> u64 {
        self.overlaps
    }

    fn retain(&mut self, keep: &mut dyn FnMut(&Problem) -> bool) -> Dropped {
        let (mut train, mut test) = (std::mem::take(&mut self.train), std::mem::take(&mut self.test));
        let mut dropped = |members: &mut Vec<usize>| {
            let before = members.len();
            members.retain(|&row| keep(&self.problem(&self.rows[row])));
            (before - members.len()) as u64
        };
        let dropped = Dropped { train: dropped(&mut train), test: dropped(&mut test) };
        (self.train, self.test) = (train, test);
        dropped
    }

    fn fingerprint(&self) -> u64 {
        let of = |members: &[usize]| {
            members.iter().fold(members.len() as u64, |sum, &row| {
                let Problem { id, prompt, answer, extra } = self.problem(&self.rows[row]);
                let words = [id, prompt.plain(), answer, extra.to_string()];
                words.iter().fold(sum, |sum, text| mix(&[sum, mix_text(text)]))
            })
        };
        mix(&[mix_text(&self.name), of(&self.train), of(&self.test)])
    }

    fn worked_solution(&self, problem: &Problem) -> Option<String> {
        problem.extra["solution"].as_str().map(str::to_string)
    }
}

/// Where a keyed permutation of 0..count sends `index`: a Feistel network, walked until it lands inside.
fn permuted(index: u64, count: u64, key: &[u64]) -> u64 {
    let half_bits = (64 - count.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half_bits) - 1;
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half_bits, value & mask);
        for round in 0..4 {
            let mut words = key.to_vec();
            words.extend([round, right]);
            (left, right) = (right, left ^ (mix(&words) & mask));
        }
        value = left << half_bits | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_visits_every_row_once() {
        for count in [1, 2, 3, 7, 64, 100, 1319] {
            let mut seen: Vec<u64> = (0..count).map(|i| permuted(i, count, &[5, 0])).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
        }
        assert_ne!(
            (0..50).map(|i| permuted(i, 50, &[5, 0])).collect::<Vec<_>>(),
            (0..50).map(|i| permuted(i, 50, &[5, 1])).collect::<Vec<_>>()
        );
    }

    #[test]
    fn test_rows_are_never_trained_on() {
        let row = |id: &str, problem: &str| Row {
            id: id.into(),
            problem: Prompt::Text(problem.into()),
            answer: "1".into(),
            source: None,
            extra: serde_json::Value::Null,
        };
        let train = vec![row("a", "One plus two?"), row("b", "Two plus two?"), row("c", "Three?")];
        let test = vec![row("x", "two  PLUS two"), row("y", "Four?")];
        let task =
            DatasetTask::new("t", train, crate::presets::PLAIN, Policy::default(), 0.0).with_test_rows(test);
        let ids = |split: Split| {
            let count = task.len(split).expect("a count");
            let mut ids: Vec<String> = (0..count).filter_map(|i| Some(task.draw(split, 3, i)?.id)).collect();
            ids.sort();
            ids
        };
        assert_eq!(task.overlaps(), 1);
        assert_eq!(ids(Split::Train), ["a", "c"]);
        assert_eq!(ids(Split::Test), ["x", "y"]);
    }
}
