//! `qurl export`: runs for other programs that track experiments.

use crate::input::bad;
use crate::mlflow::{Store, write_run};
use crate::output::{err, out};
use crate::report::read_runs;
use serde_json::json;
use std::path::PathBuf;

/// Options of `qurl export`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl export runs/train-1 --to mlflow --out mlruns")]
pub struct Args {
    /// Directories of runs or of comparisons
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// The program that is to read them
    #[arg(long)]
    to: Target,
    /// Directory of its files (default: mlruns)
    #[arg(long, default_value = "mlruns")]
    out: PathBuf,
    /// Name of the experiment that the runs belong to
    #[arg(long, default_value = "qurl")]
    experiment: String,
    /// Print one JSON document: where the runs are
    #[arg(long)]
    json: bool,
}

/// A program that tracks experiments. (TensorBoard's files are in every run directory anyway.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Target {
    /// MLflow, by its store of plain files
    Mlflow,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<()> {
    let Target::Mlflow = args.to;
    if args.experiment.trim().is_empty() {
        return Err(bad("--experiment: is empty, expected a name"));
    }
    let runs = read_runs(&args.runs)?;
    for warning in runs.iter().flat_map(|run| &run.warnings) {
        err!("qurl: {warning}");
    }
    let store = Store::open(&args.out, &args.experiment)?;
    let mut written = Vec::new();
    for run in &runs {
        written.push((run, write_run(&store, run)?));
    }
    if args.json {
        let runs: Vec<_> = written
            .iter()
            .map(|(run, id)| json!({"run": run.dir, "name": run.label, "run_id": id}))
            .collect();
        let document = json!({"out": args.out, "experiment_id": store.experiment_id(), "runs": runs});
        return Ok(out!("{document}")?);
    }
    for (run, id) in &written {
        out!("{}: run {id} of experiment {}", run.dir.display(), args.experiment)?;
    }
    let out = args.out.display();
    Ok(out!("MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {out} shows them")?)
}
