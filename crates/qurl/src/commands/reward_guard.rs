//! `qurl reward-guard`: what a run starts its reward command with, so that nothing of it outlives the run.
//!
//! Not for people, and not in the help: the run gives the command as arguments, and the pipes of the command
//! as standard input and output. [`qurl_tasks::external::guard`] does the work.

use anyhow::Context;
use qurl_tasks::external::{Launch, guard};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Arguments of `qurl reward-guard`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl reward-guard python3 reward.py")]
pub struct Args {
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
}

/// Runs the command and ends what it started; its status is the command's.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let end = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, end.clone()).context("watching for signals")?;
    }
    let status = guard::run(&args.command, &end);
    Ok(status
        .with_context(|| format!("could not start the reward command {:?}", args.command.join(" ")))?
        .into())
}

/// How this program starts reward commands; setting `cancel` gives up waiting for them.
pub fn launch(cancel: Arc<AtomicBool>) -> anyhow::Result<Launch> {
    Ok(Launch { guard: vec![this_program()?, "reward-guard".into()], cancel, directory: None })
}

/// How this program is started once more. On Linux that is the running program even where its file has been
/// replaced since.
pub fn this_program() -> anyhow::Result<String> {
    Ok(match cfg!(target_os = "linux") {
        true => "/proc/self/exe".into(),
        false => std::env::current_exe().context("the path of this program")?.display().to_string(),
    })
}
