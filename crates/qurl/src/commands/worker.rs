//! `qurl worker`: samples for a trainer elsewhere.

use crate::device::{DeviceArg, on_device};
use crate::output::{err, out};
use crate::stop::Stop;
use crate::workers::{HttpLink, program, secret};
use qurl_kernels::Device;
use qurl_train::workers::{Worker, WorkerOptions};
use std::sync::Arc;
use std::time::Duration;

/// Options of `qurl worker`.
#[derive(clap::Args)]
#[command(
    after_help = "Example: QURL_WORKER_SECRET=... qurl worker --join http://trainer:7979\nNothing but the \
                  trainer's address and the secret is needed: no model, no data, no shared disk."
)]
pub struct Args {
    /// Where the trainer listens (`rollout.workers.listen`), as in http://HOST:PORT
    #[arg(long, value_name = "URL")]
    join: String,
    /// A name for people (default: the host's name and the process id)
    #[arg(long)]
    name: Option<String>,
    /// Memory for keys and values in MiB, in place of the trainer's rollout.kv_cache_mb
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..))]
    kv_cache_mb: Option<u32>,
    /// Most responses at the same time, in place of the trainer's rollout.max_num_seqs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: Option<u32>,
    /// Seconds for which a trainer that cannot be reached is tried again
    #[arg(long, default_value_t = 600)]
    patience: u64,
    #[command(flatten)]
    device: DeviceArg,
    /// Print one JSON document at the end
    #[arg(long)]
    json: bool,
}

/// Runs the command until the run is over.
pub fn run(args: Args) -> anyhow::Result<()> {
    let link = HttpLink::new(&args.join, secret()?)?;
    let stop = Stop::watch()?;
    on_device!(args.device.get(), device => work(device, link, args, &stop))
}

fn work<D: Device>(device: Arc<D>, link: HttpLink, args: Args, stop: &Stop) -> anyhow::Result<()> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "worker".to_string());
    let options = WorkerOptions {
        program: program(),
        name: args.name.unwrap_or_else(|| format!("{}-{}", host.trim(), std::process::id())),
        kv_bytes: args.kv_cache_mb.map(|mib| (mib as usize) << 20),
        max_num_seqs: args.max_num_seqs.map(|count| count as usize),
        patience: Duration::from_secs(args.patience),
        threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
    };
    err!("worker {} on {}", options.name, device.info().description);
    let done = Worker::new(device, link, options).run(|| stop.requested(), |note| err!("{note}"))?;
    if stop.requested() {
        return Err(stop.error(format!("stopped after {} prompts", done.prompts)));
    }
    match args.json {
        true => out!("{}", serde_json::to_string(&done)?),
        false => out!(
            "{} prompts, {} tokens; weights: {} whole and {} changed versions, {} bytes",
            done.prompts,
            done.tokens,
            done.whole_versions,
            done.changed_versions,
            done.bytes
        ),
    }?;
    Ok(())
}
