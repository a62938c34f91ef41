//! `qurl grade`: whether given answers are right.
//!
//! Input lines are `{"gold":..,"pred":..}`, output lines `{"equal":true}`. A line may name its own `policy`
//! unless `--policy` or `--recipe` is given.

use super::eval::dataset_of;
use crate::input::OrBad;
use crate::lines::answer_stdin;
use qurl_tasks::grade_lines::{GradeRules, grade_line};
use qurl_tasks::grader::{ExtractRule, Policy};
use serde::Serialize;
use std::path::PathBuf;

/// Options of `qurl grade`.
#[derive(clap::Args)]
#[command(after_help = r#"Example: echo '{"gold":"1/2","pred":"The answer is \\boxed{0.5}"}' | qurl grade"#)]
pub struct Args {
    /// What counts as an answer and when it is right: equivalence, strict_box, answer_line, think_split, ...
    #[arg(long)]
    policy: Option<String>,
    /// Grade as the [task] of this recipe does: its policy and its `extract`
    #[arg(long, value_name = "FILE", conflicts_with = "policy")]
    recipe: Option<PathBuf>,
    /// Show the answer that was found in each response, under `extracted`
    #[arg(long)]
    extracted: bool,
    /// Accepted for uniformity: the output is JSON lines always
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Verdict {
    equal: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    extracted: Option<Option<String>>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let rules = match &args.recipe {
        Some(file) => {
            let source = dataset_of(file)?;
            let extract = source.extract.as_ref().map(ExtractRule::compile).transpose().or_bad()?;
            GradeRules { policy: Some(source.policy().or_bad()?), extract }
        }
        None => {
            let policy = args.policy.as_deref().map(|name| name.parse::<Policy>().or_bad()).transpose()?;
            GradeRules { policy, extract: None }
        }
    };
    answer_stdin(|number, text| {
        let graded = grade_line(number, text, &rules)?;
        let extracted = args.extracted.then_some(graded.extracted);
        Ok::<_, qurl_tasks::grade_lines::GradeLineError>(Verdict { equal: graded.equal, extracted })
    })
}
