//! Chromium and its driver, for the tests that open the report and the live page. Where they are missing and
//! this is root on a Debian-like system they are installed; elsewhere those tests skip with a message, so
//! nothing here is an error.

use std::path::Path;
use std::process::{Command, Stdio};

/// The programs that the tests need, and the packages that bring them.
const PROGRAMS: &[&str] = &["chromium", "chromedriver"];
const PACKAGES: &[&str] = &["chromium", "chromium-driver"];

/// Installs what is missing, as far as that is possible.
pub fn complete() {
    if PROGRAMS.iter().all(|name| is_there(name)) {
        return;
    }
    if !is_there("apt-get") || !is_root() {
        println!(
            "== no Chromium: the tests of the report and the live page will skip (Debian: {})",
            PACKAGES.join(", ")
        );
        return;
    }
    println!("== installing {} for the tests of the report and the live page", PACKAGES.join(" and "));
    let done = apt_get(&["update", "-q"])
        && apt_get(&[&["install", "-q", "-y", "--no-install-recommends"], PACKAGES].concat());
    if !done || !PROGRAMS.iter().all(|name| is_there(name)) {
        println!("== that did not work: those tests will skip");
    }
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn is_root() -> bool {
    let told = Command::new("id").arg("-u").stderr(Stdio::null()).output();
    told.is_ok_and(|output| output.stdout.trim_ascii() == b"0") && Path::new("/etc/apt").is_dir()
}

fn apt_get(arguments: &[&str]) -> bool {
    let status = Command::new("apt-get")
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdout(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_is_told_from_absence() {
        assert!(is_there("cargo"));
        assert!(!is_there("no-such-program-anywhere"));
    }
}
