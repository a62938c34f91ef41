//! `qurl man`: manual pages of all commands, from the same table as the command line.

use crate::input::bad;
use crate::output::out;
use clap::Command;
use std::path::PathBuf;

/// Options of `qurl man`.
#[derive(clap::Args)]
#[command(after_help = "Example: qurl man ~/.local/share/man/man1")]
pub struct Args {
    /// Print one JSON document
    #[arg(long)]
    json: bool,
    /// Directory for the pages `qurl.1`, `qurl-train.1` and so on; those that are there are replaced
    out: PathBuf,
}

/// Writes a page for `command` and one for each command below it that is shown in the help.
pub fn run(args: Args, command: Command) -> anyhow::Result<()> {
    let name = args.out.display();
    let written =
        std::fs::create_dir_all(&args.out).and_then(|()| clap_mangen::generate_to(command, &args.out));
    written.map_err(|e| bad(format!("{name}: manual pages cannot be written there: {e}")))?;
    match args.json {
        true => out!("{}", serde_json::json!({"out": name.to_string()}))?,
        false => out!("manual pages in {name}")?,
    }
    Ok(())
}
