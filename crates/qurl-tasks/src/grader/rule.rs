//! What counts as the answer, where a recipe says it itself (`task.extract`).
//!
//! A rule finds one text in the response, always the last one there is, and takes it as it stands; a policy
//! then only compares. Nothing else of the response is looked at: where the rule finds nothing, the response
//! is wrong.

use super::compare::{self, Comparison};
use super::policy::{self, Grade, Policy, SEARCHED_BYTES};
use super::{extract, normalize};
use crate::setting::{BadSetting, pattern};
use regex::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where the answer stands in a response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum ExtractRule {
    /// The content of the last `\boxed{}`, or of the last run of boxes.
    Boxed {},
    /// What follows the last marker on its line, or on the next line that has anything.
    After {
        /// The marker.
        #[serde(default = "hashes")]
        marker: String,
    },
    /// The content of the last element `<tag>..</tag>`.
    Tag {
        /// The name between the angle brackets.
        #[serde(default = "answer")]
        tag: String,
    },
    /// What the one capture group of a regular expression caught in its last match.
    Pattern {
        /// The regular expression, with one group such as `Answer: (\d+)`; `(?s)` lets `.` match line breaks.
        pattern: String,
    },
    /// The last number that stands by itself.
    LastNumber {},
    /// The whole response.
    Whole {},
}

fn hashes() -> String {
    "####".into()
}

fn answer() -> String {
    "answer".into()
}

/// A rule that is ready to be applied.
#[derive(Clone, Debug)]
pub enum Extract {
    /// See [`ExtractRule::Boxed`].
    Boxed,
    /// See [`ExtractRule::After`].
    After(String),
    /// The beginning and the end of an element.
    Tag(String, String),
    /// See [`ExtractRule::Pattern`].
    Pattern(Regex),
    /// See [`ExtractRule::LastNumber`].
    LastNumber,
    /// See [`ExtractRule::Whole`].
    Whole,
}

impl ExtractRule {
    /// Checks the rule.
    pub fn compile(&self) -> Result<Extract, BadSetting> {
        Ok(match self {
            ExtractRule::Boxed {} => Extract::Boxed,
            ExtractRule::After { marker } if marker.trim().is_empty() => {
                return Err(BadSetting::text("marker", marker, "a text such as ####"));
            }
            ExtractRule::After { marker } => Extract::After(marker.clone()),
            ExtractRule::Tag { tag } => {
                let [open, close] = element("tag", tag)?;
                Extract::Tag(open, close)
            }
            ExtractRule::Pattern { pattern: text } => {
                let regex = pattern("pattern", text)?;
                let groups = regex.captures_len() - 1;
                if groups != 1 {
                    let expected = format!("one group in round brackets, the answer; there are {groups}");
                    return Err(BadSetting::text("pattern", text, expected));
                }
                Extract::Pattern(regex)
            }
            ExtractRule::LastNumber {} => Extract::LastNumber,
            ExtractRule::Whole {} => Extract::Whole,
        })
    }
}

/// `<name>` and `</name>`.
pub fn element(key: &str, name: &str) -> Result<[String; 2], BadSetting> {
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-');
    match !name.is_empty() && name.chars().all(plain) {
        true => Ok([format!("<{name}>"), format!("</{name}>")]),
        false => Err(BadSetting::text(key, name, "a name without angle brackets, such as answer")),
    }
}

impl Extract {
    /// The answer in a response, without spaces around it; none where there is none.
    pub fn find(&self, response: &str) -> Option<String> {
        let response = extract::tail(response, SEARCHED_BYTES);
        let found = match self {
            Extract::Boxed => extract::boxed(response).map(|(_, content)| content),
            Extract::After(marker) => {
                let rest = &response[response.rfind(marker.as_str())? + marker.len()..];
                rest.lines().find(|line| !line.trim().is_empty()).map(str::to_string)
            }
            Extract::Tag(open, close) => {
                let end = response.rfind(close.as_str())?;
                let start = response[..end].rfind(open.as_str())? + open.len();
                Some(response[start..end].to_string())
            }
            Extract::Pattern(regex) => {
                let last = regex.captures_iter(response).last()?;
                last.get(1).map(|group| group.as_str().to_string())
            }
            Extract::LastNumber => extract::last_number(response).map(|(_, number)| number.to_string()),
            Extract::Whole => Some(response.to_string()),
        };
        found.map(|text| text.trim().to_string()).filter(|text| !text.is_empty())
    }
}

/// Grades the answer that a rule finds: the policy compares, and does not search.
pub fn grade_by_rule(gold: &str, response: &str, rule: &Extract, policy: Policy) -> Grade {
    let Some(answer) = rule.find(response) else { return Grade::missing() };
    let stored = extract::tail(gold, SEARCHED_BYTES);
    let gold = policy::gold_answer(stored);
    let text = |equal: bool| Comparison { equal, fuel: 0 };
    let comparison = match policy {
        Policy::DapoNormalize => text(normalize::final_answer(&answer) == normalize::final_answer(&gold)),
        Policy::Gsm8kStrict => {
            let plain = |number: &str| number.replace([',', '$'], "");
            text(plain(&answer) == plain(extract::hash_number(stored).unwrap_or(stored).trim()))
        }
        _ => compare::compare(&gold, &answer, policy.options()),
    };
    let mut grade = Grade::of(&answer, comparison);
    if policy == Policy::ReducedFraction {
        grade.equal &= policy::fractions_are_reduced(&answer);
    }
    grade
}
