//! What is `unsafe`, what threads share and what counts pages, under instruments that need a nightly
//! toolchain: Miri over the pool, the pages and the scheduler, where it also tells data races and tries
//! schedules that a processor seldom takes; ThreadSanitizer over the pool and the kernels that are shared out
//! by it, at full speed; AddressSanitizer over the kernels' tests, which Miri is too slow for and whose
//! vector instructions it does not know. A GPU has its own (`benches/gpu/sanitize.sh`).

use std::path::Path;
use std::process::Command;

const TARGET: &str = "x86_64-unknown-linux-gnu";

/// One run of tests under an instrument.
struct Check {
    name: &'static str,
    arguments: &'static [&'static str],
    environment: &'static [(&'static str, &'static str)],
}

/// Schedules of threads that Miri tries.
const MIRI: &[(&str, &str)] = &[("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-many-seeds=0..8")];
/// What has no threads of its own needs no schedules.
const MIRI_ALONE: &[(&str, &str)] = &[("MIRIFLAGS", "-Zmiri-disable-isolation")];
const CHECKS: &[Check] = &[
    Check {
        name: "Miri: pool",
        arguments: &["miri", "test", "-p", "qurl-kernels", "--lib", "--", "cpu::pool"],
        environment: MIRI,
    },
    Check {
        name: "Miri: pages and shared prefixes",
        arguments: &["miri", "test", "-p", "qurl-rollout", "--lib", "--", "pages", "prefixes"],
        environment: MIRI_ALONE,
    },
    Check {
        name: "Miri: scheduler",
        arguments: &["miri", "test", "-p", "qurl-rollout", "--test", "rollout", "--", "no_page_leaks"],
        environment: MIRI_ALONE,
    },
    Check {
        name: "ThreadSanitizer: pool",
        arguments: &[
            "test",
            "-Zbuild-std",
            "--target",
            TARGET,
            "-p",
            "qurl-kernels",
            "--lib",
            "--",
            "cpu::pool",
        ],
        environment: &[("RUSTFLAGS", "-Zsanitizer=thread"), ("TSAN_OPTIONS", "halt_on_error=1")],
    },
    Check {
        name: "AddressSanitizer: kernels",
        arguments: &[
            "test",
            "--target",
            TARGET,
            "-p",
            "qurl-kernels",
            "--lib",
            "--test",
            "kernels",
            "--",
            "--skip",
            "cuda",
        ],
        environment: &[("RUSTFLAGS", "-Zsanitizer=address"), ("ASAN_OPTIONS", "detect_leaks=0")],
    },
];

/// Runs the checks whose name has `part` in it, all where none is given; the error names those that failed.
pub fn run(root: &Path, part: Option<&str>) -> Result<(), String> {
    let chosen = |check: &&Check| part.is_none_or(|part| check.name.contains(part));
    if !CHECKS.iter().any(|check| chosen(&check)) {
        let names: Vec<&str> = CHECKS.iter().map(|check| check.name).collect();
        return Err(format!("no check '{}'; there are: {}", part.unwrap_or_default(), names.join(", ")));
    }
    let mut failed = Vec::new();
    for check in CHECKS.iter().filter(chosen) {
        println!("== {}", check.name);
        let mut command = Command::new("cargo");
        // The toolchain that built this program is named by these, and would win over `+nightly`.
        command.current_dir(root).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO").arg("+nightly");
        command.args(check.arguments.iter().take_while(|argument| **argument != "--"));
        command.args(["--locked", "--target-dir", "target/sanitize"]);
        command.args(check.arguments.iter().skip_while(|argument| **argument != "--"));
        command.envs(check.environment.iter().copied());
        let status = command.status().map_err(|error| format!("cargo did not start: {error}"))?;
        if !status.success() {
            failed.push(check.name);
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(format!("{}; needed: rustup toolchain install nightly --component miri rust-src", failed.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_check_is_refused() {
        let error = run(Path::new("."), Some("valgrind")).unwrap_err();
        assert!(error.starts_with("no check 'valgrind'; there are: Miri: pool, "), "{error}");
    }
}
