//! `cargo xtask`: the chores of the project in plain Rust, so that a machine with a Rust
//! toolchain needs nothing else to run them.
//!
//! `cargo xtask test` is the one gate: a change that passes it is fit to be committed, and `.ci/run` does
//! nothing but call it. It first brings in what a minimal toolchain lacks ([`toolchain`]), a browser
//! ([`browser`]) and MPI ([`mpi`]), then runs the stages of [`stages::GATE`] in order and stops at the first
//! that fails.
//! `cargo xtask dist` makes what one installs ([`dist`]).

mod browser;
mod dist;
mod mpi;
mod slowest;
mod stages;
mod system;
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
Usage: cargo xtask COMMAND

Commands:
  test   formatting, clippy, all tests and doc tests; stops at the first failure.
         Adds rustfmt and clippy to the toolchain where they are missing, and
         Chromium and MPI to the system where they are missing and can be installed.
  dist   a tarball to install where there is no Rust, with a binary for glibc 2.28
         or newer, and a container file beside it, in target/dist.
  help   this text

Exit status: 0 when all is well, 1 when a stage failed, 2 on bad usage.";

/// What the command line asks for.
#[derive(Debug, PartialEq)]
enum Command {
    Test,
    Dist,
    Help,
}

fn parse(arguments: &[String]) -> Result<Command, String> {
    match arguments {
        [] => Err("a command is missing".to_string()),
        [name] => match name.as_str() {
            "test" => Ok(Command::Test),
            "dist" => Ok(Command::Dist),
            "help" | "-h" | "--help" => Ok(Command::Help),
            other => Err(format!("no command '{other}'")),
        },
        [_, extra, ..] => Err(format!("unexpected argument '{extra}'")),
    }
}

/// The workspace root: the folder above this package, which cargo names at run time.
fn workspace_root() -> Result<PathBuf, String> {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .as_deref()
        .and_then(|package| Path::new(package).parent())
        .map(Path::to_path_buf)
        .ok_or_else(|| "CARGO_MANIFEST_DIR is not set: call this as `cargo xtask`".to_string())
}

fn test() -> Result<(), String> {
    let root = workspace_root()?;
    toolchain::complete(&root)?;
    browser::complete();
    let path = mpi::complete(&root);
    stages::run_all(&root, stages::GATE, path.as_deref())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Cargo calls it so, not a person: the arguments after it are the program's.
    if let [first, program @ ..] = arguments.as_slice()
        && first == slowest::RUN_TEST
    {
        return slowest::run_test(program).map_or_else(
            |message| {
                eprintln!("xtask: {message}");
                ExitCode::FAILURE
            },
            ExitCode::from,
        );
    }
    let outcome = match parse(&arguments) {
        Ok(Command::Help) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Ok(Command::Test) => test(),
        Ok(Command::Dist) => workspace_root().and_then(|root| dist::run(&root)),
        Err(message) => {
            eprintln!("xtask: {message}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<Command, String> {
        parse(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn commands_are_recognised_and_mistakes_named() {
        assert_eq!(parse_words(&["test"]), Ok(Command::Test));
        assert_eq!(parse_words(&["dist"]), Ok(Command::Dist));
        assert_eq!(parse_words(&["--help"]), Ok(Command::Help));
        assert!(parse_words(&[]).unwrap_err().contains("missing"));
        assert!(parse_words(&["tset"]).unwrap_err().contains("'tset'"));
        assert!(parse_words(&["test", "now"]).unwrap_err().contains("'now'"));
    }
}
