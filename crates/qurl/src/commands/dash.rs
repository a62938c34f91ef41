//! `qurl dash`: the page of a run while it goes on.

use crate::dash::Server;
use crate::output::{err, even_if_closed, out};
use crate::report::Follower;
use serde_json::json;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Options of `qurl dash`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl dash runs/train-1 --port 7878")]
pub struct Args {
    /// Directory of the run
    run: PathBuf,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 7878)]
    port: u16,
    /// Address to listen on; anything but a loopback address lets others on the network read the run
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// Print the address as one JSON document
    #[arg(long)]
    json: bool,
}

/// Runs the command until Ctrl-C.
pub fn run(args: Args) -> anyhow::Result<()> {
    let server = Server::bind(args.host, args.port, Follower::open(&args.run)?)?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let url = format!("http://{}/", server.address());
    let run = args.run.display();
    even_if_closed(match args.json {
        true => out!("{}", json!({"url": url, "run": run.to_string()})),
        false => out!("{run} is shown at {url}; Ctrl-C stops"),
    })?;
    if !args.host.is_loopback() {
        err!("qurl: {} is not a loopback address: whoever reaches it can read the run", args.host);
    }
    server.serve(&stop)
}
