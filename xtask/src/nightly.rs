//! What takes too long for every change: tests that the gate makes in a shorter form, and whole here, where
//! the variable `QURL_NIGHTLY` tells them so.

use crate::stages::cargo;
use std::path::Path;

/// What is run, and the arguments after `cargo`.
const RUNS: [(&str, &[&str]); 5] = [
    (
        "a loss of power and a failing call at every moment of a run",
        &["test", "-p", "qurl-train", "--test", "train", "disk::", "--", "--nocapture"],
    ),
    ("the default learns", &["test", "-p", "qurl-train", "--test", "train", "learns::", "--", "--nocapture"]),
    (
        "100 kills, reference runs at every level of this machine",
        &["test", "-p", "qurl", "--test", "cli", "--", "--nocapture", "killed::", "references::"],
    ),
    (
        "whole runs on emulated GPUs, one at a time",
        &["test", "-p", "qurl", "--test", "cli", "--", "--nocapture", "--test-threads", "1", "emulated::"],
    ),
    (
        "GEMMs and steps of the CUDA backend on emulated GPUs",
        &["test", "-p", "qurl-kernels", "--test", "kernels", "--", "--nocapture", "emulated::"],
    ),
];

/// Runs all of it; the error names what failed.
pub fn run(root: &Path) -> Result<(), String> {
    let mut failed = Vec::new();
    for (name, arguments) in RUNS {
        println!("== {name}: cargo {}", arguments.join(" "));
        let status = cargo(root).args(arguments).env("QURL_NIGHTLY", "1").status();
        if !status.map_err(|error| format!("cargo did not start: {error}"))?.success() {
            failed.push(name);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}
