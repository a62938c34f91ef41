//! MPI, for the tests that start ranks with `mpirun`. Where it is missing it is installed: on a Debian-like
//! system by root as a package, elsewhere with Python's installer into a folder of the target directory.
//! Where neither works those tests skip with a message, so nothing here is an error.

use crate::system::{apt_install, is_root_on_debian, is_there};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PROGRAM: &str = "mpirun";
/// What brings it: the package of Debian, and that of Python.
const PACKAGE: &str = "openmpi-bin";
const PYTHON_PACKAGE: &str = "mpich";

/// Installs what is missing, as far as that is possible; the path on which the tests find it.
pub fn complete(root: &Path) -> Option<OsString> {
    if is_there(PROGRAM) {
        return None;
    }
    if is_root_on_debian() {
        println!("== installing {PACKAGE} for the tests of several ranks");
        if apt_install(&[PACKAGE]) && is_there(PROGRAM) {
            return None;
        }
    }
    let folder = root.join("target").join("mpi");
    let programs = folder.join("bin");
    if !programs.join(PROGRAM).is_file() {
        println!("== installing {PYTHON_PACKAGE} into {} for the tests of several ranks", folder.display());
        if !pip_install(&folder) || !programs.join(PROGRAM).is_file() {
            println!("== that did not work: those tests will skip (Debian: {PACKAGE})");
            return None;
        }
    }
    Some(path_with(programs))
}

fn pip_install(folder: &Path) -> bool {
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--prefix"])
        .arg(folder)
        .arg(PYTHON_PACKAGE)
        // The folder is ours, whoever manages the system's Python.
        .env("PIP_BREAK_SYSTEM_PACKAGES", "1")
        .stdout(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}

/// The path with one more folder, at its end.
fn path_with(folder: PathBuf) -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([folder]);
    std::env::join_paths(folders).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_added_at_the_end() {
        let path = path_with(PathBuf::from("/somewhere/bin"));
        assert_eq!(std::env::split_paths(&path).last(), Some(PathBuf::from("/somewhere/bin")));
        assert!(std::env::split_paths(&path).count() > 1);
    }
}
