//! Another task's problems with the reward of a command (see [`crate::external`]).
//!
//! The command's score says how right a response is: it is the part `correct`, and the reward unless the recipe has
//! other values for wrong and right. The source's own rules still find the answer in the response, so that majority
//! votes work, and their verdict is kept as the part `rules`.

use crate::external::{ExternalError, ExternalReward};
use crate::task::{Dropped, Problem, RewardValues, Split, Task, Verdict};
use std::sync::{Mutex, PoisonError};

/// A task whose reward comes from a running command.
pub struct CommandTask {
    source: Box<dyn Task>,
    reward: Mutex<ExternalReward>,
    values: RewardValues,
}

impl CommandTask {
    /// Problems of `source`, judged by `reward`.
    pub fn new(source: Box<dyn Task>, reward: ExternalReward) -> CommandTask {
        CommandTask { source, reward: Mutex::new(reward), values: RewardValues::default() }
    }

    /// Rewards a score of 1 and of 0 with these values, and what is between them at its share of the way.
    pub fn with_reward(mut self, values: RewardValues) -> CommandTask {
        self.values = values;
        self
    }
}

impl Task for CommandTask {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem> {
        self.source.draw(split, seed, index)
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        self.source.verify(problem, response)
    }

    fn judge(&self, batch: &[(&Problem, &str)]) -> Result<Vec<Verdict>, ExternalError> {
        // A panic elsewhere does not harm the command's pipes.
        let scores = self.reward.lock().unwrap_or_else(PoisonError::into_inner).score(batch)?;
        let verdict = |(&(problem, response), score): (&(&Problem, &str), f64)| {
            let by_rules = self.source.verify(problem, response);
            let parts = vec![("correct".into(), score), ("rules".into(), by_rules.correct())];
            Verdict { reward: self.values.of(score), parts, extracted: by_rules.extracted }
        };
        Ok(batch.iter().zip(scores).map(verdict).collect())
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.source.len(split)
    }

    fn overlaps(&self) -> u64 {
        self.source.overlaps()
    }

    fn retain(&mut self, keep: &mut dyn FnMut(&Problem) -> bool) -> Dropped {
        self.source.retain(keep)
    }

    fn fingerprint(&self) -> u64 {
        self.source.fingerprint()
    }

    fn worked_solution(&self, problem: &Problem) -> Option<String> {
        self.source.worked_solution(problem)
    }

    fn alphabet(&self) -> Option<&'static str> {
        self.source.alphabet()
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::external::Launch;
    use crate::tasks::{Kind, Synthetic};
    use std::time::Duration;

    fn task(script: &str) -> CommandTask {
        let command = ["sh", "-c", script].map(String::from);
        let reward =
            ExternalReward::start(&command, Duration::from_secs(30), &Launch::default()).expect("a shell");
        CommandTask::new(Box::new(Synthetic::new(Kind::Addition, 2).expect("a level")), reward)
    }

    #[test]
    fn the_score_says_how_right_and_the_rules_are_kept() {
        let task = task("while read -r line; do echo 0.25; done");
        let problem = task.draw(Split::Train, 1, 0).expect("a problem");
        let solution = task.worked_solution(&problem).expect("a solution");
        let verdicts = task.judge(&[(&problem, &solution), (&problem, "no")]).expect("scores");
        let summary: Vec<_> =
            verdicts.iter().map(|v| (v.reward, v.part("rules"), v.part("correct"))).collect();
        assert_eq!(summary, [(0.25, Some(1.0), Some(0.25)), (0.25, Some(0.0), Some(0.25))]);
        assert_eq!(verdicts[0].extracted.as_deref(), Some(problem.answer.as_str()));
    }

    #[test]
    fn other_values_change_the_reward_and_not_how_right_it_is() {
        let task = task("while read -r line; do echo 0.25; done");
        let task = task.with_reward(RewardValues { right: 1.0, wrong: -1.0 });
        let problem = task.draw(Split::Train, 1, 0).expect("a problem");
        let verdicts = task.judge(&[(&problem, "no")]).expect("scores");
        assert_eq!((verdicts[0].reward, verdicts[0].correct()), (-0.5, 0.25));
    }

    #[test]
    fn a_dead_command_is_an_error() {
        let task = task("exit 7");
        let problem = task.draw(Split::Train, 1, 0).expect("a problem");
        let error = task.judge(&[(&problem, "1")]).expect_err("no scores").to_string();
        assert!(error.contains("exit 7"), "{error}");
    }
}
