//! Which tests take longest.
//!
//! Cargo starts every test binary through a runner, which is this program ([`run_test`]): it asks the test
//! harness for the time of each test and adds them to a file. The harness has that option for nightly
//! toolchains only, unless
//! `RUSTC_BOOTSTRAP` is set, which is set for the test binary alone: compilation never sees it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Tests that are named.
const NAMED: usize = 12;
/// The command of [`run_test`].
pub const RUN_TEST: &str = "run-test";
/// Where the runner writes: this variable names the file.
const TIMES: &str = "QURL_XTASK_TIMES";

fn file(root: &Path) -> PathBuf {
    root.join("target/test-times")
}

/// Starts with no times.
pub fn forget(root: &Path) -> Result<(), String> {
    match std::fs::remove_file(file(root)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("{}: {error}", file(root).display()))
        }
        _ => Ok(()),
    }
}

/// Lets a cargo command run its tests through [`run_test`].
pub fn record_times(cargo: &mut Command, root: &Path) {
    if let Ok(program) = std::env::current_exe() {
        cargo
            .env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", format!("{} {RUN_TEST}", program.display()));
        cargo.env(TIMES, file(root));
    }
}

/// Runs a program in the runner's place; a test binary reports the time of each of its tests. The result is
/// the exit status.
pub fn run_test(arguments: &[String]) -> Result<u8, String> {
    let [program, rest @ ..] = arguments else {
        return Err(format!("{RUN_TEST}: a program is missing"));
    };
    let mut command = Command::new(program);
    command.args(rest);
    // Doc tests and `cargo run` have no test harness of their own.
    let times = std::env::var_os(TIMES).filter(|_| program.contains("/deps/"));
    let Some(times) = times else {
        let status = command.status().map_err(|error| format!("{program}: {error}"))?;
        return Ok(status.code().unwrap_or(101) as u8);
    };
    command.args(["-Zunstable-options", "--report-time"]).env("RUSTC_BOOTSTRAP", "1").stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("{program}: {error}"))?;
    let mut kept = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(&times)
        .map_err(|error| format!("{}: {error}", times.display()))?;
    let binary = Path::new(program).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let binary = binary.rsplit_once('-').map_or(binary.as_str(), |(name, _)| name);
    for line in BufReader::new(child.stdout.take().ok_or("no output")?).lines() {
        let line = line.map_err(|error| format!("{program}: {error}"))?;
        println!("{line}");
        if let Some((name, seconds)) = timed(&line) {
            writeln!(kept, "{seconds} {binary} {name}")
                .map_err(|error| format!("{}: {error}", times.display()))?;
        }
    }
    let status = child.wait().map_err(|error| format!("{program}: {error}"))?;
    Ok(status.code().unwrap_or(101) as u8)
}

/// Name and seconds in a line such as `test grader::half ... ok <0.012s>`.
fn timed(line: &str) -> Option<(&str, f64)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (_, time) = rest.rsplit_once('<')?;
    Some((name, time.strip_suffix("s>")?.parse().ok()?))
}

/// The slowest tests, the slowest first; nothing where no times are known.
pub fn list(root: &Path) -> String {
    slowest(&std::fs::read_to_string(file(root)).unwrap_or_default())
}

fn slowest(times: &str) -> String {
    let entry = |line: &str| {
        let (seconds, name) = line.split_once(' ')?;
        Some((seconds.parse::<f64>().ok()?, name.to_string()))
    };
    let mut all: Vec<(f64, String)> = times.lines().filter_map(entry).collect();
    if all.is_empty() {
        return String::new();
    }
    all.sort_by(|a, b| b.0.total_cmp(&a.0));
    let lines: String = all.iter().take(NAMED).map(|(s, name)| format!("{s:>9.1} s  {name}\n")).collect();
    format!("\nslowest of {} tests\n{lines}", all.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_from_the_lines_of_the_harness() {
        assert_eq!(timed("test grader::half ... ok <0.012s>"), Some(("grader::half", 0.012)));
        assert_eq!(timed("test a ... FAILED <1.500s>"), Some(("a", 1.5)));
        for other in ["test a ... ignored", "running 2 tests", "test result: ok. 2 passed <x>", ""] {
            assert_eq!(timed(other), None, "{other}");
        }
    }

    #[test]
    fn the_slowest_come_first() {
        let list = slowest("0.5 a b\n12.25 runs killed\nnonsense\n3 x y\n");
        assert_eq!(
            list,
            "\nslowest of 3 tests\n     12.2 s  runs killed\n      3.0 s  x y\n      0.5 s  a b\n"
        );
        assert_eq!(slowest(""), "");
    }

    #[test]
    fn the_status_of_the_program_is_kept() {
        let words = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
        assert_eq!(run_test(&words(&["sh", "-c", "exit 7"])), Ok(7));
        assert!(run_test(&[]).unwrap_err().contains("missing"));
        assert!(run_test(&words(&["no-such-program-anywhere"])).unwrap_err().contains("no-such-program"));
    }
}
