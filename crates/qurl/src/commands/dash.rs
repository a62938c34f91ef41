//! `qurl dash`: the page of runs while they run.

use crate::dash::Server;
use crate::output::{err, even_if_closed, out};
use crate::stop::is_ignored;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Options of `qurl dash`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl dash runs/train-1 runs/train-2 --port 7878")]
pub struct Args {
    /// Directories of runs or of comparisons; those that are not there yet are waited for
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 7878)]
    port: u16,
    /// Address to listen on; anything but a loopback address lets others on the network read the runs
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Print the address as one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the command until Ctrl-C.
pub fn run(args: Args) -> anyhow::Result<()> {
    let server = Server::bind(args.host, args.port, args.runs.clone())?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        if signal != SIGHUP || !is_ignored(signal) {
            signal_hook::flag::register(signal, stop.clone())?;
        }
    }
    let url = format!("http://{}/", server.address());
    let runs: Vec<String> = args.runs.iter().map(|run| run.display().to_string()).collect();
    for run in args.runs.iter().filter(|run| !run.exists()) {
        err!("qurl: {} is not there yet: waiting for a run to begin there", run.display());
    }
    even_if_closed(match (args.json, runs.len()) {
        (true, _) => out!("{}", json!({"url": url, "runs": runs})),
        (false, 1) => out!("{} is shown at {url}; Ctrl-C stops", runs[0]),
        (false, count) => out!("{count} runs are shown at {url}; Ctrl-C stops"),
    })?;
    if !args.host.is_loopback() {
        err!("qurl: {} is not a loopback address: whoever reaches it can read the runs", args.host);
    }
    server.serve(&stop)
}
