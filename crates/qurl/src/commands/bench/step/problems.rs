//! The problems of `qurl bench step`: prompts of one length, judged by the real grader, with rewards that
//! alternate, since random weights answer nothing and a step without advantages is no step.

use qurl_model::rng::CounterRng;
use qurl_tasks::grader::{Policy, grade};
use qurl_tasks::reward::RewardError;
use qurl_tasks::task::{Attempt, Problem, Prompt, Split, Task, Verdict};
use serde_json::Value;

/// Digits, as many as a prompt shall have.
pub struct Digits {
    /// Characters of a prompt.
    pub characters: usize,
}

impl Digits {
    /// All characters of prompts.
    pub const ALPHABET: &'static str = "0123456789";
}

impl Task for Digits {
    fn name(&self) -> &str {
        "digits"
    }

    fn draw(&self, _split: Split, seed: u64, index: u64) -> Option<Problem> {
        let random = CounterRng::new(&[seed, index]);
        let digit = |i: usize| char::from(b'0' + random.below_at(i as u64, 10) as u8);
        let text: String = (0..self.characters).map(digit).collect();
        let answer = random.below_at(self.characters as u64, 1000).to_string();
        Some(Problem { id: index.to_string(), prompt: Prompt::Text(text), answer, extra: Value::Null })
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        Verdict::new(grade(&problem.answer, response, Policy::Equivalence).equal, true, 0.0, None)
    }

    fn judge(&self, batch: &[Attempt]) -> Result<Vec<Verdict>, RewardError> {
        let judged = batch.iter().map(|attempt| self.verify(attempt.problem, attempt.response));
        Ok(judged.enumerate().map(|(i, verdict)| Verdict { reward: (i % 2) as f64, ..verdict }).collect())
    }

    fn len(&self, _split: Split) -> Option<u64> {
        None
    }
}
