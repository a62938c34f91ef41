//! Several rewards in one: each has a name and a weight, and the reward of a response is their weighted sum.
//!
//! A rule says where a reward comes from: the task's own verdict, a grader, the form or length of the text, a
//! command or a server. Which responses are right is another matter: the task's own rules decide, or the one
//! command or server that replies `correct`, and no weight changes that.

mod checks;

use crate::external::http::HttpReward;
use crate::external::{ExternalError, ExternalReward, Launch, Reply, is_name};
use crate::grader::{Extract, ExtractRule, Policy, grade, grade_by_rule};
use crate::setting::{BadSetting, pattern};
use crate::task::{Attempt, Verdict};
pub use checks::{Length, Tags};
use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Where one of several rewards comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum RewardRule {
    /// 1 for a right response, 0 for a wrong one.
    Correct {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
    },
    /// 1 where the response has an answer in the form that the task wants, right or wrong.
    Format {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
    },
    /// 1 where another grading policy calls the response right.
    Grader {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
        /// How the response is graded (docs/graders.md).
        #[serde(default = "equivalence")]
        #[schemars(schema_with = "policies")]
        policy: String,
        /// What counts as the answer, in place of what the policy looks for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        extract: Option<ExtractRule>,
    },
    /// 1 where a regular expression matches somewhere in the response.
    Pattern {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
        /// The regular expression; `(?s)` lets `.` match line breaks, `^` and `$` are the ends of the
        /// response.
        pattern: String,
    },
    /// 1 where the response is these elements, one after the other, each once and with something in it.
    Tags {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
        /// Names of the elements: `<think>..</think><answer>..</answer>` by default.
        #[serde(default = "think_answer")]
        tags: Vec<String>,
        /// Whether the prompt ends with the first opening tag, so that the response begins inside it.
        #[serde(default)]
        opened: bool,
    },
    /// 1 at one length of the response, 0 at another, on a straight line between them and flat beyond.
    Length {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
        /// Tokens of a response that is given 1.
        full_at: u64,
        /// Tokens of a response that is given 0: more than `full_at` to favour short ones, less to favour
        /// long ones.
        zero_at: u64,
    },
    /// The score of a program of yours: any finite number.
    Command {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
        /// Program and arguments. It reads JSON lines and writes one reply a line (docs/rewards.md).
        command: Vec<String>,
        /// Directory that the command runs in; by default the one that `qurl` was started in. The recipe of a
        /// run has it written down, so that a run that resumes from elsewhere runs the same program.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        directory: Option<PathBuf>,
        /// Seconds that the replies to one batch may take.
        #[serde(default = "time_limit")]
        time_limit_s: f64,
    },
    /// The score of a server of yours, asked once a batch: any finite number.
    Http {
        /// Its name in metrics, report and TensorBoard; by default its type.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// What it is multiplied with; negative for a penalty, 0 to be shown only.
        #[serde(default = "one")]
        weight: f64,
        /// Where to POST to, `http://host:port/path`; https is not spoken.
        url: String,
        /// Seconds that the replies to one batch may take.
        #[serde(default = "time_limit")]
        time_limit_s: f64,
    },
}

fn one() -> f64 {
    1.0
}

fn equivalence() -> String {
    Policy::default().name().into()
}

fn think_answer() -> Vec<String> {
    ["think", "answer"].map(String::from).to_vec()
}

/// Seconds for one batch, unless a recipe says otherwise.
pub fn time_limit() -> f64 {
    300.0
}

fn policies(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "type": "string", "enum": Policy::ALL.map(|(name, _)| name) })
}

/// Why a batch has no rewards.
#[derive(Debug, thiserror::Error)]
pub enum RewardError {
    /// A command or a server.
    #[error("reward `{name}`: {source}")]
    External {
        /// The name of the reward.
        name: String,
        /// What went wrong.
        source: ExternalError,
    },
    /// Two judges of what is right.
    #[error(
        "the rewards `{first}` and `{second}` both reply `correct`; expected one that says what is right"
    )]
    TwoJudges {
        /// The name of one reward.
        first: String,
        /// The name of the other.
        second: String,
    },
    /// A sum that cannot be trained on.
    #[error(
        "the reward of a response to problem {id:?} is {found:e}, expected a number from -3.4e38 to 3.4e38 \
         (rewards are 32-bit floating-point numbers): {weighted}; smaller weights may help"
    )]
    NotFinite {
        /// The problem.
        id: String,
        /// The sum.
        found: f64,
        /// Its parts with their weights.
        weighted: String,
    },
}

impl RewardError {
    /// Whether the run was told to end, which is nobody's failure.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, RewardError::External { source, .. } if source.is_cancelled())
    }
}

/// A reward that is ready to judge.
pub struct Reward {
    /// Its name in metrics.
    pub name: String,
    /// What it is multiplied with.
    pub weight: f64,
    kind: Kind,
}

enum Kind {
    Correct,
    Format,
    Grader(Policy, Option<Extract>),
    Pattern(Regex),
    Tags(Tags),
    Length(Length),
    Command(Mutex<ExternalReward>),
    Http(Mutex<HttpReward>),
}

impl RewardRule {
    /// The name, and what its type is called.
    pub fn name(&self) -> &str {
        let (name, otherwise) = match self {
            RewardRule::Correct { name, .. } => (name, "correct"),
            RewardRule::Format { name, .. } => (name, "format"),
            RewardRule::Grader { name, .. } => (name, "grader"),
            RewardRule::Pattern { name, .. } => (name, "pattern"),
            RewardRule::Tags { name, .. } => (name, "tags"),
            RewardRule::Length { name, .. } => (name, "length"),
            RewardRule::Command { name, .. } => (name, "command"),
            RewardRule::Http { name, .. } => (name, "http"),
        };
        name.as_deref().unwrap_or(otherwise)
    }

    /// What it is multiplied with.
    pub fn weight(&self) -> f64 {
        match self {
            RewardRule::Correct { weight, .. }
            | RewardRule::Format { weight, .. }
            | RewardRule::Grader { weight, .. }
            | RewardRule::Pattern { weight, .. }
            | RewardRule::Tags { weight, .. }
            | RewardRule::Length { weight, .. }
            | RewardRule::Command { weight, .. }
            | RewardRule::Http { weight, .. } => *weight,
        }
    }

    /// Checks the rule, without starting a command.
    pub fn check(&self) -> Result<(), BadSetting> {
        if !is_name(self.name()) {
            let expected = "letters, digits, `_`, `-` and spaces, at most 64";
            return Err(BadSetting::text("name", self.name(), expected));
        }
        match self {
            RewardRule::Command { command, .. } if command.first().is_none_or(String::is_empty) => {
                let (key, found) = ("command".to_string(), format!("{command:?}"));
                Err(BadSetting { key, found, expected: "a program and its arguments".into() })
            }
            RewardRule::Command { .. } => Ok(()),
            _ => match self.start(&Launch::default()) {
                Err(RewardStartError::Setting(setting)) => Err(setting),
                _ => Ok(()),
            },
        }
    }

    /// Makes the reward ready: starts its command, if it has one.
    pub fn start(&self, launch: &Launch) -> Result<Reward, RewardStartError> {
        let kind = match self {
            RewardRule::Correct { .. } => Kind::Correct,
            RewardRule::Format { .. } => Kind::Format,
            RewardRule::Grader { policy, extract, .. } => {
                let wrong = |comparing| BadSetting::text("policy", policy, one_of_policies(comparing));
                let parsed: Policy = policy.parse().map_err(|_| wrong(false))?;
                if extract.is_some() && !parsed.compares() {
                    return Err(wrong(true).into());
                }
                let inside = |e: BadSetting| BadSetting { key: format!("extract.{}", e.key), ..e };
                Kind::Grader(parsed, extract.as_ref().map(ExtractRule::compile).transpose().map_err(inside)?)
            }
            RewardRule::Pattern { pattern: text, .. } => Kind::Pattern(pattern("pattern", text)?),
            RewardRule::Tags { tags, opened, .. } => Kind::Tags(Tags::new(tags, *opened)?),
            RewardRule::Length { full_at, zero_at, .. } => Kind::Length(Length::new(*full_at, *zero_at)?),
            RewardRule::Command { command, directory, time_limit_s, .. } => {
                let launch = Launch { directory: directory.clone(), ..launch.clone() };
                let started = ExternalReward::start(command, Duration::from_secs_f64(*time_limit_s), &launch);
                let failed = |source| RewardError::External { name: self.name().into(), source };
                Kind::Command(Mutex::new(started.map_err(failed)?))
            }
            RewardRule::Http { url, time_limit_s, .. } => {
                let server = HttpReward::new(url, Duration::from_secs_f64(*time_limit_s), launch)?;
                Kind::Http(Mutex::new(server))
            }
        };
        Ok(Reward { name: self.name().into(), weight: self.weight(), kind })
    }
}

/// Policies that a rule may name: all, or those that compare only.
pub fn one_of_policies(comparing: bool) -> String {
    let names = Policy::ALL.iter().filter(|(_, policy)| !comparing || policy.compares());
    let list = names.map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    match comparing {
        true => format!("one that compares only, since `extract` says what counts as the answer: {list}"),
        false => format!("one of {list}"),
    }
}

/// Why a reward cannot be made ready.
#[derive(Debug, thiserror::Error)]
pub enum RewardStartError {
    /// Its settings.
    #[error(transparent)]
    Setting(#[from] BadSetting),
    /// Its command.
    #[error(transparent)]
    Reward(#[from] RewardError),
}

impl Reward {
    /// What a command or a server replies to a batch; none where the text alone decides.
    pub(crate) fn ask(&self, batch: &[Attempt]) -> Result<Option<Vec<Reply>>, RewardError> {
        // A panic elsewhere does not harm pipes.
        let replies = match &self.kind {
            Kind::Command(command) => command.lock().unwrap_or_else(PoisonError::into_inner).score(batch),
            Kind::Http(server) => server.lock().unwrap_or_else(PoisonError::into_inner).score(batch),
            _ => return Ok(None),
        };
        replies.map(Some).map_err(|source| RewardError::External { name: self.name.clone(), source })
    }

    /// What the text alone is worth, before the weight. `by_rules` is the task's own verdict; 0 for what is
    /// asked for.
    pub(crate) fn value(&self, attempt: &Attempt, by_rules: &Verdict, correct: bool) -> f64 {
        let (gold, response) = (&attempt.problem.answer, attempt.response);
        match &self.kind {
            Kind::Correct => f64::from(correct),
            Kind::Format => by_rules.part("format").unwrap_or(0.0),
            Kind::Grader(policy, None) => f64::from(grade(gold, response, *policy).equal),
            Kind::Grader(policy, Some(rule)) => f64::from(grade_by_rule(gold, response, rule, *policy).equal),
            Kind::Pattern(regex) => f64::from(regex.is_match(response)),
            Kind::Tags(tags) => f64::from(tags.hold(response)),
            Kind::Length(length) => length.value(attempt.tokens),
            Kind::Command(_) | Kind::Http(_) => 0.0,
        }
    }
}
