//! What the gate needs beyond a minimal Rust toolchain: the `rustfmt` and `clippy` components.
//! Where they are missing and rustup is there, they are added; otherwise the message says what
//! to install. (A C linker cannot be checked here: without one this program would not exist.
//! `.ci/run` sees to it.)

use std::path::Path;
use std::process::{Command, Stdio};

use crate::stages::cargo;

/// Components by the cargo subcommand that shows whether they are installed.
const COMPONENTS: &[(&str, &str)] = &[("fmt", "rustfmt"), ("clippy", "clippy")];

/// Adds the missing components, or says what is missing and how to get it.
pub fn complete(root: &Path) -> Result<(), String> {
    for (subcommand, component) in COMPONENTS {
        if succeeds(root, &[subcommand, "--version"]) {
            continue;
        }
        println!("== adding the missing component {component}");
        let added = Command::new("rustup")
            .current_dir(root)
            .args(["component", "add", component])
            .status()
            .is_ok_and(|status| status.success());
        if !added || !succeeds(root, &[subcommand, "--version"]) {
            return Err(format!(
                "`cargo {subcommand}` is missing and `rustup component add {component}` did not \
                 bring it: install {component} for this toolchain (Debian's own Rust: \
                 `apt-get install {}`)",
                debian_package(component)
            ));
        }
    }
    Ok(())
}

/// Whether cargo, called quietly with these arguments, ends well.
fn succeeds(root: &Path, arguments: &[&str]) -> bool {
    cargo(root)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn debian_package(component: &str) -> &str {
    match component {
        "clippy" => "rust-clippy",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presence_is_told_from_absence() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(succeeds(here, &["version"]));
        assert!(!succeeds(here, &["no-such-subcommand-of-cargo", "--version"]));
    }
}
