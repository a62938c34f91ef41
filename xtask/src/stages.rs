//! The stages of the gate, timed; the first failure ends the run. Most are one cargo command; the tests
//! themselves are run by [`crate::programs`]. Compiling the tests, which clippy checks on the way, is a stage
//! of its own, so that the times tell building from testing. Beside the time stands the processor's, which
//! says more where a machine is shared.

use crate::deny;
use crate::programs::{self, Program};
use crate::slowest;
use crate::system::cpu_seconds;
use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// One stage of the gate.
pub struct Stage {
    /// What the summary calls it.
    pub name: &'static str,
    pub work: Work,
}

/// What a stage does.
pub enum Work {
    /// A cargo command: the arguments after `cargo`.
    Cargo(&'static [&'static str]),
    /// Holds the dependencies against `deny.toml`.
    Deny,
    /// Compiles all test programs under clippy and notes them.
    BuildTests,
    /// Runs the noted programs, and the doc tests.
    RunTests,
}

/// Cheapest first, so that a stray space is told at once and not after the tests.
pub const GATE: &[Stage] = &[
    Stage { name: "format", work: Work::Cargo(&["fmt", "--all", "--check"]) },
    Stage { name: "dependencies", work: Work::Deny },
    Stage { name: "clippy and building", work: Work::BuildTests },
    Stage { name: "tests and doc tests", work: Work::RunTests },
];

const BUILD_TESTS: &[&str] =
    &["test", "--locked", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"];

/// Makes cargo compile our packages with clippy's compiler, and warnings errors, as
/// `cargo clippy -- -D warnings` does. That compiler is rustc with lints: it checks and generates code in one
/// pass over each package, where `cargo clippy` and then `cargo test` read all of them and all dependencies
/// twice.
pub fn under_clippy(command: &mut Command) {
    const DRIVER: &str = "clippy-driver";
    let beside_cargo = std::env::var_os("CARGO").map(|cargo| Path::new(&cargo).with_file_name(DRIVER));
    let driver = beside_cargo.filter(|path| path.is_file()).unwrap_or_else(|| DRIVER.into());
    command.env("RUSTC_WORKSPACE_WRAPPER", driver);
    // Arguments, each with this mark after it: how `cargo clippy` hands them over.
    command.env("CLIPPY_ARGS", "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__");
}

/// A stage that was run.
struct Done {
    seconds: f64,
    cpu_seconds: Option<f64>,
}

/// Runs the stages in order in `root`, with another `PATH` where one is given, and prints how long each took.
/// The error names the stage that failed.
pub fn run_all(root: &Path, stages: &[Stage], path: Option<&OsStr>) -> Result<(), String> {
    let mut done: Vec<Done> = Vec::new();
    let mut failure = None;
    let mut gate = Gate { root, path, programs: Vec::new(), times: Vec::new() };
    for stage in stages {
        let (start, cpu) = (Instant::now(), cpu_seconds());
        println!("== {}", stage.name);
        let outcome = gate.run(&stage.work);
        let cpu_seconds = cpu.zip(cpu_seconds()).map(|(before, after)| after - before);
        done.push(Done { seconds: start.elapsed().as_secs_f64(), cpu_seconds });
        if let Err(reason) = outcome {
            failure = Some(format!("{}: {reason}", stage.name));
            break;
        }
    }
    print!("{}{}", slowest::list(&mut gate.times), summary(&done, stages, failure.is_some()));
    failure.map_or(Ok(()), Err)
}

/// What one stage leaves to the next.
struct Gate<'a> {
    root: &'a Path,
    path: Option<&'a OsStr>,
    programs: Vec<Program>,
    /// Seconds and names of tests.
    times: Vec<(f64, String)>,
}

impl Gate<'_> {
    fn run(&mut self, work: &Work) -> Result<(), String> {
        match work {
            Work::Cargo(arguments) => self.cargo(cargo(self.root), arguments, Stdio::inherit()).map(|_| ()),
            Work::Deny => deny::run(self.root, None),
            Work::BuildTests => {
                let mut command = cargo(self.root);
                under_clippy(&mut command);
                let messages = self.cargo(command, BUILD_TESTS, Stdio::piped())?;
                self.programs = programs::from_messages(&messages);
                println!("{} test programs", self.programs.len());
                Ok(())
            }
            Work::RunTests => {
                let programs = std::mem::take(&mut self.programs);
                programs::run(self.root, programs, self.path, &mut self.times)
            }
        }
    }

    /// Runs cargo; the result is its output where that is piped.
    fn cargo(&self, mut command: Command, arguments: &[&str], stdout: Stdio) -> Result<String, String> {
        println!("cargo {}", arguments.join(" "));
        command.envs(self.path.map(|path| ("PATH", path))).args(arguments).stdout(stdout);
        let unstarted = |error| format!("cargo did not start: {error}");
        let mut child = command.spawn().map_err(unstarted)?;
        let mut output = String::new();
        if let Some(mut pipe) = child.stdout.take() {
            pipe.read_to_string(&mut output).map_err(|error| format!("the output of cargo: {error}"))?;
        }
        let status = child.wait().map_err(unstarted)?;
        if status.success() {
            Ok(output)
        } else {
            Err(format!("`cargo {}` ended with {status}", arguments.join(" ")))
        }
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
fn summary(done: &[Done], stages: &[Stage], failed: bool) -> String {
    let mut text = format!("\n{:<22}{:>9}{:>13}\n", "", "time", "processors");
    let times = |done: &Done| {
        let cpu = done.cpu_seconds.map_or_else(|| "-".to_string(), |seconds| format!("{seconds:.1} s"));
        format!("{:>7.1} s{cpu:>13}", done.seconds)
    };
    for (index, stage) in stages.iter().enumerate() {
        let line = match done.get(index) {
            Some(stage_done) => {
                let fate = if failed && index + 1 == done.len() { "FAILED" } else { "ok" };
                format!("{:<22}{}  {fate}\n", stage.name, times(stage_done))
            }
            None => format!("{:<22}{:>9}{:>13}  not run\n", stage.name, "-", "-"),
        };
        text.push_str(&line);
    }
    let total = Done {
        seconds: done.iter().map(|done| done.seconds).sum(),
        cpu_seconds: done.iter().map(|done| done.cpu_seconds).sum(),
    };
    text.push_str(&format!("{:<22}{}\n", "total", times(&total)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever changes how clippy gets its arguments would silence it here: a warning must be an error.
    #[test]
    fn a_warning_of_clippy_is_an_error() {
        let root = std::env::temp_dir().join(format!("qurl-xtask-clippy-{}", std::process::id()));
        std::fs::create_dir_all(root.join("src")).unwrap();
        std::fs::write(root.join("Cargo.toml"), "[package]\nname = \"one\"\n[workspace]\n").unwrap();
        let build = |body: &str| {
            std::fs::write(root.join("src/lib.rs"), format!("//! One.\n{body}\n")).unwrap();
            let mut command = cargo(&root);
            under_clippy(&mut command);
            let output = command.args(["build", "--offline", "--target-dir", "target"]).output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (built, said) = build("pub fn f(x: &str) -> bool { x.is_empty() }");
        assert!(built, "{said}");
        let (built, said) = build("pub fn f(x: &str) -> bool { x.len() == 0 }");
        std::fs::remove_dir_all(&root).unwrap();
        assert!(!built && said.contains("clippy::len-zero"), "{said}");
    }

    const TWO: &[Stage] = &[
        Stage { name: "first", work: Work::Cargo(&["no-such-subcommand-of-cargo"]) },
        Stage { name: "second", work: Work::Cargo(&["--version"]) },
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
        let done = |seconds, cpu_seconds| Done { seconds, cpu_seconds };
        let text = summary(&[done(1.5, None)], TWO, true);
        let lines: Vec<&str> = text.trim_matches('\n').lines().collect();
        assert!(lines[1].contains("1.5 s") && lines[1].ends_with("FAILED"));
        assert!(lines[2].ends_with("not run"));
        assert!(lines[3].starts_with("total") && lines[3].ends_with('-'));
        let text = summary(&[done(1.0, Some(0.5)), done(2.0, Some(3.25))], TWO, false);
        assert!(!text.contains("FAILED") && text.contains("3.0 s        3.8 s"), "{text}");
    }
}
