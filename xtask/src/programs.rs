//! Runs the test programs: two at a time, the longest first. Cargo itself runs them one after the other, and
//! then whatever waits (for ranks to time out, for a killed run, for the last long test of a program) leaves
//! processors idle. A program's output is shown where it fails; else one line says what it did.
//!
//! The test harness tells the time of each test for nightly toolchains only, unless `RUSTC_BOOTSTRAP` is set:
//! it is set for the programs alone, compilation never sees it.

use crate::slowest;
use crate::stages::{cargo, under_clippy};
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Programs that run at a time.
const AT_A_TIME: usize = 2;
/// What takes longest, longest first; these start before all others.
const LONGEST: [&str; 4] = ["cli", "train", "kernels", "ranks"];

/// A test program that cargo has built.
#[derive(Debug, PartialEq)]
pub struct Program {
    /// Of the target, with its package for unit tests.
    name: String,
    executable: PathBuf,
    /// Its package's folder, in which it runs.
    folder: PathBuf,
}

/// The test programs in the messages of `cargo test --no-run --message-format json`.
pub fn from_messages(messages: &str) -> Vec<Program> {
    let program = |line: &str| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let executable = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_path_buf();
        let target = &message["target"];
        let mut name = target["name"].as_str()?.to_string();
        if target["kind"][0] != "test" {
            name.push_str(" (unit tests)");
        }
        Some(Program { name, executable: executable.into(), folder })
    };
    messages.lines().filter_map(program).collect()
}

/// Tests by their fate.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Count {
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Count {
    /// Adds what a line such as `test result: ok. 5 passed; 0 failed; 1 ignored; ...` says.
    fn add_line(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        for part in result.split([';', '.']) {
            if let Some((number, what)) = part.trim().split_once(' ') {
                let number = number.parse().unwrap_or(0);
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.ignored += number,
                    _ => {}
                }
            }
        }
    }

    fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.ignored += other.ignored;
    }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.ignored > 0 {
            write!(f, ", {} ignored", self.ignored)?;
        }
        Ok(())
    }
}

/// What is to be run: a program with the name that its line has.
struct Job {
    name: String,
    command: Command,
}

/// The programs, and the doc tests of the workspace, as jobs in the order in which they start.
fn jobs(root: &Path, mut programs: Vec<Program>, path: Option<&OsStr>) -> VecDeque<Job> {
    let place = |name: &str| LONGEST.iter().position(|long| *long == name).unwrap_or(LONGEST.len());
    programs.sort_by_key(|program| place(&program.name));
    let started = |program: Program| {
        let mut command = Command::new(&program.executable);
        command.args(["-Zunstable-options", "--report-time"]).env("RUSTC_BOOTSTRAP", "1");
        command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
        Job { name: program.name, command }
    };
    let mut jobs: VecDeque<Job> = programs.into_iter().map(started).collect();
    let mut docs = cargo(root);
    under_clippy(&mut docs); // the libraries that are there already
    docs.args(["test", "--locked", "--workspace", "--doc"]);
    // Between the long programs and the short ones, which fill what is left.
    jobs.insert(jobs.len().min(LONGEST.len()), Job { name: "doc tests".to_string(), command: docs });
    for job in &mut jobs {
        job.command.envs(path.map(|path| ("PATH", path)));
    }
    jobs
}

/// Runs the programs and the doc tests, and adds the time of each test to `times`. After a failure no other
/// program is started.
pub fn run(
    root: &Path,
    programs: Vec<Program>,
    path: Option<&OsStr>,
    times: &mut Vec<(f64, String)>,
) -> Result<(), String> {
    let total = run_jobs(jobs(root, programs, path), times)?;
    println!("{total}");
    Ok(())
}

fn run_jobs(jobs: VecDeque<Job>, times: &mut Vec<(f64, String)>) -> Result<Count, String> {
    let (queue, failed) = (Mutex::new(jobs), AtomicBool::new(false));
    let total = Mutex::new((Count::default(), times, Vec::new()));
    let next = || queue.lock().ok()?.pop_front().filter(|_| !failed.load(Ordering::Relaxed));
    let worker = || {
        while let Some(mut job) = next() {
            let start = Instant::now();
            let output = job.command.output();
            let Ok(mut total) = total.lock() else { return };
            let (count, times, failures) = &mut *total;
            let fault = match output {
                Ok(output) => {
                    let text = String::from_utf8_lossy(&output.stdout);
                    let mut own = Count::default();
                    for line in text.lines() {
                        own.add_line(line);
                        times.extend(
                            slowest::timed(line).map(|(test, s)| (s, format!("{} {test}", job.name))),
                        );
                    }
                    count.add(own);
                    let fault = (!output.status.success()).then(|| output.status.to_string());
                    if fault.is_some() {
                        println!("{text}{}", String::from_utf8_lossy(&output.stderr));
                    }
                    println!("{:<28}{:>7.1} s  {own}", job.name, start.elapsed().as_secs_f64());
                    fault
                }
                Err(error) => Some(format!("did not start: {error}")),
            };
            if let Some(fault) = fault {
                failed.store(true, Ordering::Relaxed);
                failures.push(format!("{} ({fault})", job.name));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(worker);
        }
    });
    let (count, _, failures) = total.into_inner().map_err(|_| "a thread of the runner panicked")?;
    if failures.is_empty() { Ok(count) } else { Err(format!("{count}; {}", failures.join(", "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_read_from_the_messages_of_cargo() {
        let artifact = |kind: &str, test: bool, executable: &str| {
            let target = format!(r#""target":{{"kind":["{kind}"],"name":"a"}},"profile":{{"test":{test}}}"#);
            format!(r#"{{"manifest_path":"/w/crates/a/Cargo.toml",{target},"executable":{executable}}}"#)
        };
        let messages = [
            artifact("lib", false, "null"),
            artifact("bin", false, r#""/w/target/a""#),
            artifact("lib", true, r#""/w/target/deps/a-1""#),
            artifact("test", true, r#""/w/target/deps/a-2""#),
            r#"{"reason":"build-finished","success":true}"#.to_string(),
            "not JSON".to_string(),
        ];
        let program = |name: &str, executable: &str| Program {
            name: name.to_string(),
            executable: executable.into(),
            folder: "/w/crates/a".into(),
        };
        let expected = [program("a (unit tests)", "/w/target/deps/a-1"), program("a", "/w/target/deps/a-2")];
        assert_eq!(from_messages(&messages.join("\n")), expected);
    }

    #[test]
    fn results_are_added_up() {
        let mut count = Count::default();
        count
            .add_line("test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished");
        count.add_line("test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out");
        count.add_line("test a ... ok <1.0s>");
        assert_eq!(count, Count { passed: 7, failed: 3, ignored: 1 });
        assert_eq!(count.to_string(), "7 passed, 3 failed, 1 ignored");
    }

    fn shell(name: &str, script: &str) -> Job {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Job { name: name.to_string(), command }
    }

    #[test]
    fn a_failing_program_is_named_and_ends_the_run() {
        let good = "echo 'test a ... ok <0.5s>'; echo 'test result: ok. 1 passed; 0 failed; 0 ignored'";
        let mut times = Vec::new();
        let total = run_jobs([shell("x", good), shell("y", good)].into(), &mut times);
        assert_eq!(total, Ok(Count { passed: 2, failed: 0, ignored: 0 }));
        times.sort_by(|a, b| a.1.cmp(&b.1));
        assert_eq!(times, [(0.5, "x a".to_string()), (0.5, "y a".to_string())]);

        let mark = std::env::temp_dir().join(format!("qurl-xtask-programs-{}", std::process::id()));
        let late = format!("touch {}", mark.display());
        let jobs = [shell("bad", "exit 7"), shell("bad too", "exit 8"), shell("late", &late)];
        let error = run_jobs(jobs.into(), &mut times).unwrap_err();
        assert!(error.contains("bad (exit status: 7)"), "{error}");
        assert!(!mark.exists(), "a program was started after a failure");
        let mut missing = shell("missing", "");
        missing.command = Command::new("/no/such/program");
        assert!(run_jobs([missing].into(), &mut times).unwrap_err().contains("missing (did not start"));
    }

    #[test]
    fn the_longest_start_first_and_the_doc_tests_before_the_short_ones() {
        let program =
            |name: &str| Program { name: name.to_string(), executable: "x".into(), folder: "y".into() };
        let programs = ["rl", "kernels", "train", "model", "cli", "ranks"].map(program).into();
        let names: Vec<String> =
            jobs(Path::new("."), programs, None).into_iter().map(|job| job.name).collect();
        assert_eq!(names, ["cli", "train", "kernels", "ranks", "doc tests", "rl", "model"]);
    }
}
