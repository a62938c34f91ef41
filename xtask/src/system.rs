//! What the system has, and what can be added to it.

use std::path::Path;
use std::process::{Command, Stdio};

/// Whether a program is on the path.
pub fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// Whether packages of a Debian-like system can be installed.
pub fn is_root_on_debian() -> bool {
    let told = Command::new("id").arg("-u").stderr(Stdio::null()).output();
    let root = told.is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    root && Path::new("/etc/apt").is_dir() && is_there("apt-get")
}

/// Installs packages of a Debian-like system.
pub fn apt_install(packages: &[&str]) -> bool {
    apt_get(&["update", "-q"])
        && apt_get(&[&["install", "-q", "-y", "--no-install-recommends"], packages].concat())
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
