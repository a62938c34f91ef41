//! The stages of the gate: each one cargo command, timed, the first failure ends the run. Compiling the tests
//! is a stage of its own, so that the times tell building from testing; the slowest tests are named at the
//! end ([`crate::slowest`]).

use crate::slowest;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// One cargo command of the gate.
pub struct Stage {
    /// What the summary calls it.
    pub name: &'static str,
    /// The arguments after `cargo`.
    pub arguments: &'static [&'static str],
}

/// Cheapest first, so that a stray space is told at once and not after the tests.
pub const GATE: &[Stage] = &[
    Stage { name: "format", arguments: &["fmt", "--all", "--check"] },
    Stage { name: "clippy", arguments: &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"] },
    Stage { name: "building the tests", arguments: &["test", "--workspace", "--no-run"] },
    Stage { name: "tests and doc tests", arguments: &["test", "--workspace"] },
];

/// Runs the stages in order in `root`, with another `PATH` where one is given, and prints how long each took.
/// The error names the stage that failed.
pub fn run_all(root: &Path, stages: &[Stage], path: Option<&OsStr>) -> Result<(), String> {
    slowest::forget(root)?;
    let mut done: Vec<(&str, Duration)> = Vec::new();
    let mut failure = None;
    for stage in stages {
        println!("== {}: cargo {}", stage.name, stage.arguments.join(" "));
        let start = Instant::now();
        let outcome = run(root, stage, path);
        done.push((stage.name, start.elapsed()));
        if let Err(reason) = outcome {
            failure = Some(format!("{}: {reason}", stage.name));
            break;
        }
    }
    print!("{}{}", slowest::list(root), summary(&done, stages, failure.is_some()));
    failure.map_or(Ok(()), Err)
}

fn run(root: &Path, stage: &Stage, path: Option<&OsStr>) -> Result<(), String> {
    let mut command = cargo(root);
    command.envs(path.map(|path| ("PATH", path)));
    slowest::record_times(&mut command, root);
    let status =
        command.args(stage.arguments).status().map_err(|error| format!("cargo did not start: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`cargo {}` ended with {status}", stage.arguments.join(" ")))
    }
}

/// The cargo that started us, in `root`, without what it told us about our own package: build
/// scripts that watch these variables would otherwise run again after every direct call.
pub fn cargo(root: &Path) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

/// One line per stage, with its time and fate, and a last line with the total.
fn summary(done: &[(&str, Duration)], stages: &[Stage], failed: bool) -> String {
    let mut text = String::from("\n");
    for (index, stage) in stages.iter().enumerate() {
        let line = match done.get(index) {
            Some((_, time)) => {
                let fate = if failed && index + 1 == done.len() { "FAILED" } else { "ok" };
                format!("{:<22}{:>7.1} s  {fate}\n", stage.name, time.as_secs_f64())
            }
            None => format!("{:<22}{:>9}  not run\n", stage.name, "-"),
        };
        text.push_str(&line);
    }
    let total: f64 = done.iter().map(|(_, time)| time.as_secs_f64()).sum();
    text.push_str(&format!("{:<22}{total:>7.1} s\n", "total"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &[Stage] = &[
        Stage { name: "first", arguments: &["no-such-subcommand-of-cargo"] },
        Stage { name: "second", arguments: &["--version"] },
    ];

    #[test]
    fn a_failing_stage_stops_the_run_and_is_named() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let error = run_all(here, TWO, None).unwrap_err();
        assert!(error.starts_with("first: `cargo no-such-subcommand-of-cargo`"));
        run_all(here, &TWO[1..], None).unwrap();
    }

    #[test]
    fn the_summary_tells_ok_failed_and_not_run_apart() {
        let text = summary(&[("first", Duration::from_millis(1500))], TWO, true);
        let lines: Vec<&str> = text.trim().lines().collect();
        assert!(lines[0].contains("1.5 s") && lines[0].ends_with("FAILED"));
        assert!(lines[1].ends_with("not run"));
        assert!(lines[2].starts_with("total"));
        let all = [("first", Duration::from_secs(1)), ("second", Duration::from_secs(2))];
        let text = summary(&all, TWO, false);
        assert!(!text.contains("FAILED") && text.contains("3.0 s"));
    }
}
