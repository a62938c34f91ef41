//! `qurl man`: manual pages of all commands, from the same table as the command line.

use crate::input::OrBad;
use crate::output::out;
use crate::target::NewDir;
use anyhow::Context;
use clap::Command;
use std::path::{Path, PathBuf};

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
    let _new = NewDir::make(&args.out).with_context(|| unwritten(&args.out)).or_bad()?;
    write(command, &args.out).with_context(|| unwritten(&args.out)).or_bad()?;
    match args.json {
        true => out!("{}", serde_json::json!({"out": name.to_string()}))?,
        false => out!("manual pages in {name}")?,
    }
    Ok(())
}

fn unwritten(dir: &Path) -> String {
    format!("{}: manual pages cannot be written there", dir.display())
}

/// All pages or none: they are written aside and moved to their names.
fn write(command: Command, dir: &Path) -> std::io::Result<()> {
    let aside = dir.join(format!(".pages.{}.part", std::process::id()));
    let written = std::fs::create_dir(&aside).and_then(|()| {
        clap_mangen::generate_to(command, &aside)?;
        let pages: Vec<_> = std::fs::read_dir(&aside)?.collect::<Result<_, _>>()?;
        for page in pages {
            std::fs::rename(page.path(), dir.join(page.file_name()))?;
        }
        Ok(())
    });
    let _ = std::fs::remove_dir_all(&aside);
    written
}
