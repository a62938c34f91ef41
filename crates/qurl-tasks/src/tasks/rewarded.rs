//! Another task's problems with rewards of one's own (see [`crate::reward`]).
//!
//! The task's own rules still find the answer in a response, so that majority votes work, and say whether it
//! is right, unless a command or a server does.

use crate::external::Reply;
use crate::reward::{Reward, RewardError};
use crate::task::{Attempt, Dropped, Problem, RewardValues, Split, Task, Verdict};

/// A task whose reward is a weighted sum.
pub struct RewardedTask {
    source: Box<dyn Task>,
    rewards: Vec<Reward>,
    values: RewardValues,
}

impl RewardedTask {
    /// Problems of `source`, rewarded by the sum of these. Each has a name of its own.
    pub fn new(source: Box<dyn Task>, rewards: Vec<Reward>) -> RewardedTask {
        RewardedTask { source, rewards, values: RewardValues::default() }
    }

    /// Rewards a sum of 1 and of 0 with these values, and others on the straight line through them.
    pub fn with_reward(mut self, values: RewardValues) -> RewardedTask {
        self.values = values;
        self
    }

    /// Asks commands and servers.
    fn ask(&self, batch: &[Attempt]) -> Result<Replies, RewardError> {
        let mut all = Replies { replies: Vec::with_capacity(self.rewards.len()), judge: None };
        for (i, reward) in self.rewards.iter().enumerate() {
            let replies = reward.ask(batch)?;
            if replies.iter().flatten().any(|reply| reply.correct.is_some())
                && let Some(first) = all.judge.replace(i)
            {
                let (first, second) = (self.rewards[first].name.clone(), reward.name.clone());
                return Err(RewardError::TwoJudges { first, second });
            }
            all.replies.push(replies);
        }
        Ok(all)
    }
}

/// What commands and servers said of a batch.
struct Replies {
    /// Of each reward the replies to all responses; none where the text alone decides.
    replies: Vec<Option<Vec<Reply>>>,
    /// The reward that says what is right, if one does.
    judge: Option<usize>,
}

impl Task for RewardedTask {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem> {
        self.source.draw(split, seed, index)
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        self.source.verify(problem, response)
    }

    fn judge(&self, batch: &[Attempt]) -> Result<Vec<Verdict>, RewardError> {
        let all = self.ask(batch)?;
        let mut verdicts = Vec::with_capacity(batch.len());
        for (i, attempt) in batch.iter().enumerate() {
            let by_rules = self.source.verify(attempt.problem, attempt.response);
            let reply = |reward: usize| all.replies[reward].as_ref().and_then(|replies| replies.get(i));
            let said = all.judge.and_then(reply).and_then(|reply| reply.correct);
            let correct = said.unwrap_or(by_rules.correct);
            let (mut sum, mut parts) = (0.0, Vec::new());
            for (r, reward) in self.rewards.iter().enumerate() {
                let reply = reply(r);
                let value = reply.map_or_else(|| reward.value(attempt, &by_rules, correct), |r| r.score);
                sum += reward.weight * value;
                parts.push((reward.name.clone(), value));
                let inner = reply.map_or(&[][..], |reply| &reply.parts);
                parts.extend(inner.iter().map(|(name, x)| (format!("{}/{name}", reward.name), *x)));
            }
            let reward = self.values.of(sum);
            if !(reward as f32).is_finite() {
                let weighted = self.rewards.iter().map(|Reward { name, weight, .. }| {
                    let value = parts.iter().find(|(part, _)| part == name).map_or(0.0, |(_, value)| *value);
                    format!("{weight} * `{name}` = {weight} * {value:e}")
                });
                let weighted = weighted.collect::<Vec<_>>().join(", ");
                let id = attempt.problem.id.clone();
                return Err(RewardError::NotFinite { id, found: reward, weighted });
            }
            verdicts.push(Verdict { correct, reward, parts, extracted: by_rules.extracted });
        }
        Ok(verdicts)
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
