//! Names the commit that the binary is built from, for `qurl --version`: `QURL_COMMIT` where it is set
//! (`cargo xtask dist` sets it, and says whether the working tree differs from it), else what git says, else
//! nothing.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=QURL_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let commit = match std::env::var("QURL_COMMIT") {
        Ok(commit) if !commit.is_empty() => Some(commit),
        _ => {
            // Every commit and every change of branch adds a line to this file.
            if let Some(log) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"]) {
                println!("cargo::rerun-if-changed={log}");
            }
            git(&["rev-parse", "--short=12", "HEAD"])
        }
    };
    println!("cargo::rustc-env=QURL_COMMIT={}", commit.as_deref().unwrap_or("unknown"));
}

/// What git prints, if there is a git and this is its repository.
fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_string()).filter(|text| !text.is_empty())
}
