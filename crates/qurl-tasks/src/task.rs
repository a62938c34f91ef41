//! What a task is: problems drawn by key, and a verdict on a response.
//!
//! A problem is a pure function of (split, seed, index): the same key gives the same problem in any order, on
//! any number of workers. The split of a problem is decided by a hash of its text, so that training and
//! held-out problems can never meet.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::reward::RewardError;
use crate::rng::mix_text;

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// What the model is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Prompt {
    /// Text to continue.
    Text(String),
    /// Messages for a chat template.
    Chat(Vec<Message>),
}

impl Prompt {
    /// The text without roles, for hashing and for models without a chat template.
    pub fn plain(&self) -> String {
        match self {
            Prompt::Text(text) => text.clone(),
            Prompt::Chat(messages) => {
                let contents: Vec<&str> = messages.iter().map(|m| m.content.as_str()).collect();
                contents.join("\n")
            }
        }
    }
}

/// A problem with its right answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Unique within the task.
    pub id: String,
    /// What the model is given.
    pub prompt: Prompt,
    /// The right answer.
    pub answer: String,
    /// What else the task needs to verify a response.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub extra: Value,
}

/// Training or held-out problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// To learn from.
    Train,
    /// To measure on; never drawn for training.
    Test,
}

/// Problems that were dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Of those to learn from.
    pub train: u64,
    /// Of those to measure on.
    pub test: u64,
}

/// What right and wrong responses are rewarded with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RewardValues {
    /// Reward of a right response.
    pub right: f64,
    /// Reward of a wrong response; less than `right`.
    pub wrong: f64,
}

impl Default for RewardValues {
    fn default() -> Self {
        RewardValues { right: 1.0, wrong: 0.0 }
    }
}

impl RewardValues {
    /// The reward of a response that earned this share, from 0 (wrong) to 1 (right); exact at both ends, and
    /// on the same line beyond them.
    pub fn of(self, share: f64) -> f64 {
        share * self.right + (1.0 - share) * self.wrong
    }
}

/// The verdict on one response. Whether it is right and what it is rewarded with are two facts: accuracy is
/// the share of `correct`, and no reward has a part in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether the response is right.
    pub correct: bool,
    /// What the model is rewarded with: any number that is finite as f32.
    pub reward: f64,
    /// Named parts of the reward before their weights, the same ones for all responses of a task: `format`,
    /// ...
    pub parts: Vec<(String, f64)>,
    /// The answer that was found in the response.
    pub extracted: Option<String>,
}

impl Verdict {
    /// A verdict with the part `format`, rewarded from 0 to 1: `format_weight` is for the form alone.
    pub fn new(correct: bool, format: bool, format_weight: f64, extracted: Option<String>) -> Verdict {
        let format = f64::from(format);
        let reward = if correct { 1.0 } else { format_weight * format };
        Verdict { correct, reward, parts: vec![("format".into(), format)], extracted }
    }

    /// The same verdict with other rewards for wrong and right: a reward of 0 becomes the one, of 1 the
    /// other, and what is between them stays at its share of the way. Nothing else changes.
    pub fn valued(self, values: RewardValues) -> Verdict {
        Verdict { reward: values.of(self.reward), ..self }
    }

    /// A named part.
    pub fn part(&self, name: &str) -> Option<f64> {
        self.parts.iter().find(|(n, _)| n == name).map(|(_, value)| *value)
    }
}

/// One response to a problem, as it is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attempt<'a> {
    /// The problem.
    pub problem: &'a Problem,
    /// What the model wrote.
    pub response: &'a str,
    /// Its length in tokens.
    pub tokens: usize,
    /// Whether it was cut off at the longest length.
    pub truncated: bool,
}

/// A source of problems with a verifiable reward.
///
/// ```
/// use qurl_tasks::tasks::{Kind, Synthetic};
/// use qurl_tasks::{Split, Task};
///
/// let task = Synthetic::new(Kind::Addition, 2)?;
/// let problem = task.draw(Split::Train, 1, 0).expect("addition has endless problems");
/// assert_eq!(task.draw(Split::Train, 1, 0), Some(problem.clone()), "a problem follows from its key");
/// assert!(task.verify(&problem, &format!("so it is #### {}", problem.answer)).correct);
/// assert!(!task.verify(&problem, "no idea").correct);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Task: Send + Sync {
    /// The name in recipes and reports.
    fn name(&self) -> &str;

    /// The problem of a key; `None` when the split has no problems.
    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem>;

    /// Judges a response by the task's own rules.
    fn verify(&self, problem: &Problem, response: &str) -> Verdict;

    /// Judges responses as a run rewards them: by the task's own rules, unless the reward comes from outside.
    fn judge(&self, batch: &[Attempt]) -> Result<Vec<Verdict>, RewardError> {
        Ok(batch.iter().map(|attempt| self.verify(attempt.problem, attempt.response)).collect())
    }

    /// How many different problems a split has; `None` when they are generated.
    fn len(&self, split: Split) -> Option<u64>;

    /// Whether a split has no problems.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == Some(0)
    }

    /// How many training problems of data sets are left out because they are test problems.
    fn overlaps(&self) -> u64 {
        0
    }

    /// Drops the problems of data sets that are not to be kept; how many of each split. Generated ones stay.
    fn retain(&mut self, _keep: &mut dyn FnMut(&Problem) -> bool) -> Dropped {
        Dropped::default()
    }

    /// A number that tells this task's problems from others.
    fn fingerprint(&self) -> u64 {
        mix_text(self.name())
    }

    /// A right response with its steps, for a supervised warm start.
    fn worked_solution(&self, _problem: &Problem) -> Option<String> {
        None
    }

    /// All characters of prompts and worked solutions, where they are few enough for a tokenizer of
    /// characters.
    fn alphabet(&self) -> Option<&'static str> {
        None
    }
}

/// The split that a text belongs to, when a share of `held_out` is kept from training.
pub fn split_of(text: &str, held_out: f64) -> Split {
    let unit = (mix_text(text) >> 11) as f64 / (1u64 << 53) as f64;
    if unit < held_out { Split::Test } else { Split::Train }
}
