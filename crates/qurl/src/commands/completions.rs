//! `qurl completions`: scripts that complete the command line in a shell.

use clap::Command;
use clap_complete::Shell;

/// Options of `qurl completions`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl completions bash > ~/.local/share/bash-completion/completions/qurl")]
pub struct Args {
    /// The shell to write for
    shell: Shell,
}

/// Writes the script for `command` to standard output.
pub fn run(args: Args, mut command: Command) -> anyhow::Result<()> {
    clap_complete::generate(args.shell, &mut command, "qurl", &mut std::io::stdout());
    Ok(())
}
