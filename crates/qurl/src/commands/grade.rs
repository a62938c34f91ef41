//! `qurl grade`: whether given answers are right.
//!
//! Input lines are `{"gold":..,"pred":..}`, output lines `{"equal":true}`. A line may name its own `policy`
//! unless `--policy` is given.

use crate::input::OrBad;
use crate::lines::answer_stdin;
use qurl_tasks::grade_lines::grade_line;
use qurl_tasks::grader::Policy;
use serde::Serialize;

/// Options of `qurl grade`.
#[derive(clap::Args)]
#[command(after_help = r#"Example: echo '{"gold":"1/2","pred":"The answer is \\boxed{0.5}"}' | qurl grade"#)]
pub struct Args {
    /// What counts as an answer and when it is right: equivalence, strict_box, answer_line, think_split, ...
    #[arg(long)]
    policy: Option<String>,
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
    let policy = args.policy.as_deref().map(|name| name.parse::<Policy>().or_bad()).transpose()?;
    answer_stdin(|number, text| {
        let graded = grade_line(number, text, policy)?;
        let extracted = args.extracted.then_some(graded.extracted);
        Ok::<_, qurl_tasks::grade_lines::GradeLineError>(Verdict { equal: graded.equal, extracted })
    })
}
