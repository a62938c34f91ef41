//! `qurl completions`: scripts that complete the command line in a shell.

use crate::output::{self, out};
use clap::Command;
use clap_complete::Shell;

/// Options of `qurl completions`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl completions bash > ~/.local/share/bash-completion/completions/qurl")]
pub struct Args {
    /// The shell to write for
    shell: Shell,
    /// Print one JSON document with the script in it
    #[arg(long)]
    json: bool,
}

/// Writes the script for `command` to standard output.
pub fn run(args: Args, mut command: Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "qurl", &mut script);
    let script = String::from_utf8(script)?;
    if args.json {
        out!("{}", serde_json::json!({"shell": args.shell.to_string(), "script": script}))?;
    } else {
        output::text(&script)?;
    }
    Ok(())
}
