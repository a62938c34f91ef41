//! The memory of what is `unsafe`, under instruments that need a nightly toolchain: Miri over the pool
//! and the pages, where it also tells data races and tries schedules that a processor seldom takes, and
//! AddressSanitizer over the kernels' tests, which Miri is too slow for and whose vector instructions it does
//! not know. A GPU has its own (`benches/gpu/sanitize.sh`).

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
const CHECKS: &[Check] = &[
    Check {
        name: "Miri: pool",
        arguments: &["miri", "test", "-p", "qurl-kernels", "--lib", "--", "cpu::pool"],
        environment: MIRI,
    },
    Check {
        name: "Miri: pages",
        arguments: &["miri", "test", "-p", "qurl-rollout", "--lib", "--", "pages"],
        environment: MIRI,
    },
    Check {
        name: "AddressSanitizer: kernels",
        arguments: &["test", "-p", "qurl-kernels", "--lib", "--test", "kernels", "--target", TARGET],
        environment: &[("RUSTFLAGS", "-Zsanitizer=address"), ("ASAN_OPTIONS", "detect_leaks=0")],
    },
];

/// Runs all checks; the error names those that failed.
pub fn run(root: &Path) -> Result<(), String> {
    let mut failed = Vec::new();
    for check in CHECKS {
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
