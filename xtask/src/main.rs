//! `cargo xtask`: the chores of the project in plain Rust, so that a machine with a Rust
//! toolchain needs nothing else to run them.
//!
//! `cargo xtask test` is the one gate: a change that passes it is fit to be committed, and `.ci/run` does
//! nothing but call it. It first brings in what a minimal toolchain lacks ([`toolchain`]), a browser
//! ([`browser`]) and MPI ([`mpi`]), then runs the stages of [`stages::GATE`] in order and stops at the first
//! that fails.
//! `cargo xtask dist` makes what one installs ([`dist`]). `nightly` ([`nightly`]), `fuzz`, `sanitize` and
//! `deny` with advisories take longer than a gate may, or need what it may not ask for.
#![forbid(unsafe_code)]

mod browser;
mod deny;
mod dist;
mod mpi;
mod nightly;
mod programs;
mod sanitize;
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
  nightly
         what takes too long for every change: a loss of power and a failing call at
         every moment of a run, 100 kills, reference runs at every level of
         instructions of this machine.
  dist   a tarball to install where there is no Rust, with a binary for glibc 2.28
         or newer, and a container file beside it, in target/dist.
  deny [FOLDER]
         licences, versions and sources of dependencies against deny.toml, and
         advisories where FOLDER is a checkout of RustSec's database.
  fuzz [TARGET...] [--inputs N] [--from N] [--seed N]
         hostile input for what reads files, requests and answers; with --help
         the targets. What fails is kept in target/fuzz.
  sanitize [NAME]
         the tests of kernels, pool and pages under AddressSanitizer, ThreadSanitizer
         and Miri, or what has NAME in its name; needs a nightly toolchain with miri
         and rust-src.
  help   this text

Exit status: 0 when all is well, 1 when a stage failed, 2 on bad usage.";

/// What the command line asks for.
#[derive(Debug, PartialEq)]
enum Command {
    Test,
    Nightly,
    Dist,
    Deny(Option<PathBuf>),
    Fuzz(Vec<String>),
    Sanitize(Option<String>),
    Help,
}

fn parse(arguments: &[String]) -> Result<Command, String> {
    match arguments {
        [] => Err("a command is missing".to_string()),
        [name, rest @ ..] if name == "fuzz" => Ok(Command::Fuzz(rest.to_vec())),
        [name, part] if name == "sanitize" => Ok(Command::Sanitize(Some(part.clone()))),
        [name, folder] if name == "deny" => Ok(Command::Deny(Some(folder.into()))),
        [name] => match name.as_str() {
            "test" => Ok(Command::Test),
            "nightly" => Ok(Command::Nightly),
            "dist" => Ok(Command::Dist),
            "deny" => Ok(Command::Deny(None)),
            "sanitize" => Ok(Command::Sanitize(None)),
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

fn at_night() -> Result<(), String> {
    nightly::run(&workspace_root()?)
}

/// Builds the program, optimised and with the checks of the tests, and runs it.
fn fuzz(arguments: &[String]) -> Result<(), String> {
    let mut command = stages::cargo(&workspace_root()?);
    command
        .args(["run", "--quiet", "--locked", "--profile", "fuzz", "-p", "qurl-fuzz", "--"])
        .args(arguments);
    let status = command.status().map_err(|error| format!("cargo did not start: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("fuzz: {status}")) }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match parse(&arguments) {
        Ok(Command::Help) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Ok(Command::Test) => test(),
        Ok(Command::Nightly) => at_night(),
        Ok(Command::Dist) => workspace_root().and_then(|root| dist::run(&root)),
        Ok(Command::Deny(folder)) => workspace_root().and_then(|root| deny::run(&root, folder.as_deref())),
        Ok(Command::Fuzz(arguments)) => fuzz(&arguments),
        Ok(Command::Sanitize(part)) => {
            workspace_root().and_then(|root| sanitize::run(&root, part.as_deref()))
        }
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
        assert_eq!(parse_words(&["nightly"]), Ok(Command::Nightly));
        assert_eq!(parse_words(&["dist"]), Ok(Command::Dist));
        assert_eq!(parse_words(&["--help"]), Ok(Command::Help));
        let pool = Command::Sanitize(Some("pool".to_string()));
        assert_eq!(parse_words(&["sanitize", "pool"]), Ok(pool));
        assert_eq!(parse_words(&["deny", "db"]), Ok(Command::Deny(Some("db".into()))));
        let inputs = ["--inputs", "7"].map(String::from).to_vec();
        assert_eq!(parse_words(&["fuzz", "--inputs", "7"]), Ok(Command::Fuzz(inputs)));
        assert!(parse_words(&[]).unwrap_err().contains("missing"));
        assert!(parse_words(&["tset"]).unwrap_err().contains("'tset'"));
        assert!(parse_words(&["test", "now"]).unwrap_err().contains("'now'"));
    }

    /// Every crate but the one of the kernels forbids `unsafe`, and no file elsewhere has any: programs of
    /// tests and build scripts are crates of their own.
    #[test]
    fn unsafe_code_is_in_the_kernels_alone() {
        fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                match path.is_dir() {
                    true if path.ends_with("target") || path.ends_with("qurl-kernels") => {}
                    true => collect(&path, files),
                    false if path.extension().is_some_and(|extension| extension == "rs") => files.push(path),
                    false => {}
                }
            }
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut files = Vec::new();
        ["crates", "examples", "fuzz", "xtask"].iter().for_each(|part| collect(&root.join(part), &mut files));
        let mut roots = 0;
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let is_root = file.ends_with("src/lib.rs")
                || file.ends_with("src/main.rs")
                || file.parent().is_some_and(|folder| folder.ends_with("examples"));
            roots += usize::from(is_root);
            assert!(
                !is_root || text.contains("#![forbid(unsafe_code)]"),
                "{} does not forbid it",
                file.display()
            );
            let word = "unsafe";
            let has = [" {", " fn", " impl", " trait", " extern", "(no_mangle"]
                .iter()
                .any(|after| text.contains(&format!("{word}{after}")));
            assert!(!has, "{} has unsafe code", file.display());
        }
        assert!(roots >= 14, "{roots} crates");
    }
}
