//! Grading JSON lines, as `qurl grade` does: `{"gold": ..., "pred": ...}` in, `{"equal": ...}` out, one line
//! per line.

use std::io::BufRead;

use serde::{Deserialize, Serialize};

use crate::grader::{Extract, Policy, grade, grade_by_rule};

/// How lines are graded.
#[derive(Clone, Debug, Default)]
pub struct GradeRules {
    /// The policy, also where a line names its own; without one the line's, else `equivalence`.
    pub policy: Option<Policy>,
    /// What counts as the answer, where it is not what the policy looks for.
    pub extract: Option<Extract>,
}

/// A line to grade. Other fields are ignored.
#[derive(Debug, Deserialize)]
struct Case {
    gold: String,
    pred: String,
    policy: Option<String>,
}

/// A verdict line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GradedLine {
    /// Whether the prediction is right.
    pub equal: bool,
    /// The answer that was found in the prediction.
    pub extracted: Option<String>,
}

/// A line that could not be graded.
#[derive(Debug, thiserror::Error)]
pub enum GradeLineError {
    /// The input could not be read.
    #[error("line {line}: {source}")]
    Io {
        /// Line number, from 1.
        line: usize,
        /// What went wrong.
        source: std::io::Error,
    },
    /// The line is not a case.
    #[error(
        "line {line}, column {}: expected an object with the texts `gold` and `pred`: {}",
        source.column(),
        source.to_string().split(" at line ").next().unwrap_or_default()
    )]
    Json {
        /// Line number, from 1.
        line: usize,
        /// What went wrong.
        source: serde_json::Error,
    },
    /// The line names an unknown policy.
    #[error("line {line}: {source}")]
    Policy {
        /// Line number, from 1.
        line: usize,
        /// What went wrong.
        source: crate::grader::UnknownPolicy,
    },
}

/// Grades line number `line` (from 1). It may name its own policy under `policy` unless the rules have one.
pub fn grade_line(line: usize, text: &str, rules: &GradeRules) -> Result<GradedLine, GradeLineError> {
    let case: Case = serde_json::from_str(text).map_err(|source| GradeLineError::Json { line, source })?;
    let named = match (rules.policy, &case.policy) {
        (Some(policy), _) => policy,
        (None, Some(name)) => name.parse().map_err(|source| GradeLineError::Policy { line, source })?,
        (None, None) => Policy::default(),
    };
    let graded = match &rules.extract {
        Some(rule) => grade_by_rule(&case.gold, &case.pred, rule, named),
        None => grade(&case.gold, &case.pred, named),
    };
    Ok(GradedLine { equal: graded.equal, extracted: graded.extracted })
}

/// Grades every line, as [`grade_line`] does.
pub fn grade_lines<R: BufRead>(
    input: R,
    rules: GradeRules,
) -> impl Iterator<Item = Result<GradedLine, GradeLineError>> {
    input.lines().enumerate().map(move |(index, text)| {
        let line = index + 1;
        let text = text.map_err(|source| GradeLineError::Io { line, source })?;
        grade_line(line, &text, &rules)
    })
}
