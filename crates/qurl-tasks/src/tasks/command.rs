//! Another task's problems with the reward of a command (see [`crate::external`]).
//!
//! The command's score is the reward; the source's own rules still find the answer in the response, so that majority
//! votes work, and their verdict is kept as the part `rules`.

use crate::external::{ExternalError, ExternalReward};
use crate::task::{Problem, Split, Task, Verdict};
use std::sync::{Mutex, PoisonError};

/// A task whose reward comes from a running command.
pub struct CommandTask {
    source: Box<dyn Task>,
    reward: Mutex<ExternalReward>,
}

impl CommandTask {
    /// Problems of `source`, judged by `reward`.
    pub fn new(source: Box<dyn Task>, reward: ExternalReward) -> CommandTask {
        CommandTask { source, reward: Mutex::new(reward) }
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
        let verdict = |(&(problem, response), reward): (&(&Problem, &str), f64)| {
            let by_rules = self.source.verify(problem, response);
            let rules = by_rules.part("correct").unwrap_or(by_rules.reward);
            Verdict { reward, parts: vec![("rules".into(), rules)], extracted: by_rules.extracted }
        };
        Ok(batch.iter().zip(scores).map(verdict).collect())
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.source.len(split)
    }

    fn worked_solution(&self, problem: &Problem) -> Option<String> {
        self.source.worked_solution(problem)
    }

    fn alphabet(&self) -> Option<&'static str> {
        self.source.alphabet()
    }
}
