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

/// Seconds that all ended children of this process, and theirs, kept a processor busy. None where the kernel
/// does not say.
pub fn cpu_seconds() -> Option<f64> {
    cpu_seconds_in(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// `cutime` and `cstime` of a line of `/proc/PID/stat`, in hundredths of a second.
fn cpu_seconds_in(stat: &str) -> Option<f64> {
    // The second field is a name in brackets, which may hold anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(13);
    let mut next = || fields.next()?.parse::<f64>().ok();
    Some((next()? + next()?) / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_is_told_from_absence() {
        assert!(is_there("cargo"));
        assert!(!is_there("no-such-program-anywhere"));
    }

    #[test]
    fn the_time_of_children_is_read() {
        let stat = "7 (a ) b) S 1 2 3 4 5 6 7 8 9 10 11 12 350 25 20 0";
        assert_eq!(cpu_seconds_in(stat), Some(3.75));
        assert_eq!(cpu_seconds_in("7 (a) S"), None);
    }
}
