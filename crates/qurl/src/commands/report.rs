//! `qurl report`: runs as one HTML file.

use crate::input::{OrBad, bad};
use crate::output::{err, out};
use crate::report::{figures, read_runs, render};
use crate::target;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Options of `qurl report`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl report runs/train-1 runs/train-2 --out compare.html")]
pub struct Args {
    /// Directories of runs or of comparisons; several runs are drawn over each other, seeds of one recipe as
    /// mean and band
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// File to write (default: report.html in the directory; for several directories, in the current one)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON document: the file and the figures of each run
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let runs = read_runs(&args.runs)?;
    for warning in runs.iter().flat_map(|run| &run.warnings) {
        err!("qurl: {warning}");
    }
    let out = match (&args.out, args.runs.as_slice()) {
        (Some(out), _) => out.clone(),
        (None, [dir]) => dir.join("report.html"),
        (None, _) => PathBuf::from("report.html"),
    };
    if out.is_dir() {
        return Err(bad(format!("--out {}: is a directory, expected the name of a file", out.display())));
    }
    let page = render(&runs);
    target::write(&out, &page).or_bad()?;
    if args.json {
        let figures: Vec<Value> =
            runs.iter().map(|run| json!({"run": run.label, "figures": figures(run)})).collect();
        out!("{}", json!({"report": out.display().to_string(), "bytes": page.len(), "runs": figures}))?;
        return Ok(());
    }
    out!("{} ({:.0} kB)", out.display(), page.len() as f64 / 1e3)?;
    Ok(())
}
