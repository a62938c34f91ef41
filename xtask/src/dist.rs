//! `cargo xtask dist`: what one installs where there is no Rust, in `target/dist`.
//!
//! A tarball laid out like `/usr/local` (binary, manual pages, completions, recipes, licences) and a
//! container file beside it. The binary runs with glibc 2.28 or newer, whatever is newer here ([`glibc`]);
//! that is checked on the binary itself ([`elf`]) before anything is packed. CPU levels and CUDA are found at
//! run time, so one binary serves all nodes.

mod elf;
mod glibc;
mod licences;

use crate::stages::cargo;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the names of the files say the binary is for.
const PLATFORM: &str = "x86_64-linux";
/// The same, as cargo calls it.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Where each shell looks for completions below a prefix.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "share/bash-completion/completions/qurl"),
    ("zsh", "share/zsh/site-functions/_qurl"),
    ("fish", "share/fish/vendor_completions.d/qurl.fish"),
];

/// Builds and packs.
pub fn run(root: &Path) -> Result<(), String> {
    let dist = root.join("target/dist");
    let binary = build(root, &dist)?;
    check(&binary)?;
    let name = format!("qurl-{}-{PLATFORM}", env!("CARGO_PKG_VERSION"));
    let staged = dist.join(&name);
    if staged.exists() {
        std::fs::remove_dir_all(&staged).map_err(|e| format!("{}: {e}", staged.display()))?;
    }
    stage(root, &binary, &staged)?;
    let tarball = dist.join(format!("{name}.tar.gz"));
    pack(&dist, &name, &tarball)?;
    let container = dist.join("Containerfile");
    write(&container, containerfile(&name).as_bytes())?;
    let size = std::fs::metadata(&tarball).map_err(|e| format!("{}: {e}", tarball.display()))?.len();
    println!("{} ({:.1} MB)\n{}", tarball.display(), size as f64 / 1e6, container.display());
    Ok(())
}

/// The release binary, linked for older systems. Dependencies are those of a plain release build.
fn build(root: &Path, dist: &Path) -> Result<PathBuf, String> {
    let link = glibc::link_arguments(&dist.join("link"))?;
    let status = cargo(root)
        .args(["rustc", "--release", "--locked", "--package", "qurl", "--bin", "qurl", "--"])
        .args(["-C", "strip=symbols"])
        .args(link)
        .env("QURL_COMMIT", commit(root))
        // Flags for this machine's CPU would make a binary for this machine.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR")
        .status()
        .map_err(|e| format!("cargo does not start: {e}"))?;
    match status.success() {
        true => Ok(root.join("target/release/qurl")),
        false => Err(format!("`cargo rustc` ended with {status}")),
    }
}

/// The commit, and whether the working tree differs from it.
fn commit(root: &Path) -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").current_dir(root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    match (git(&["rev-parse", "--short=12", "HEAD"]), git(&["status", "--porcelain"])) {
        (Some(commit), Some(changes)) if changes.is_empty() => commit,
        (Some(commit), _) => format!("{commit}, modified"),
        (None, _) => "unknown".to_string(),
    }
}

/// Refuses a binary that an older system could not load, and names what it would miss.
fn check(binary: &Path) -> Result<(), String> {
    let name = binary.display();
    let bytes = std::fs::read(binary).map_err(|e| format!("{name}: {e}"))?;
    let needs = elf::needs(&bytes).map_err(|e| format!("{name}: {e}"))?;
    let newer = elf::newer_than(&needs, glibc::OLDEST);
    if newer.is_empty() {
        return Ok(());
    }
    let (major, minor) = glibc::OLDEST;
    let missing: Vec<String> = newer.into_iter().map(elf::described).collect();
    Err(format!(
        "{name} does not run with glibc {major}.{minor}: it needs {}; expected an entry for it in \
         xtask/src/dist/glibc.rs or glibc.S",
        missing.join("; ")
    ))
}

/// Everything that goes into the tarball, below `staged`.
fn stage(root: &Path, binary: &Path, staged: &Path) -> Result<(), String> {
    copy(binary, &staged.join("bin/qurl"))?;
    let qurl = staged.join("bin/qurl");
    let pages = staged.join("share/man/man1");
    output(Command::new(&qurl).arg("man").arg(&pages))?;
    for (shell, place) in COMPLETIONS {
        write(&staged.join(place), &output(Command::new(&qurl).args(["completions", shell]))?)?;
    }
    copy_folder(&root.join("recipes"), &staged.join("share/qurl/recipes"))?;
    let documents = staged.join("share/doc/qurl");
    for file in
        ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE", "docs/guide.md", "docs/recipe.md"]
    {
        let source = root.join(file);
        copy(&source, &documents.join(source.file_name().unwrap_or_default()))?;
    }
    let licences = licences::of_dependencies(root, TARGET)?;
    write(&documents.join("LICENSES-OF-DEPENDENCIES"), licences.as_bytes())
}

/// A tarball with sorted names and without the owners and times of this machine.
fn pack(dist: &Path, name: &str, tarball: &Path) -> Result<(), String> {
    let settings = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--mode=go-w"];
    let mut tar = Command::new("tar");
    tar.current_dir(dist).args(settings).arg("-czf").arg(tarball).arg(name).env("GZIP", "-n");
    output(&mut tar).map(|_| ())
}

fn containerfile(name: &str) -> String {
    include_str!("dist/Containerfile").replace("{name}", name)
}

/// Runs a program that has to succeed, and gives what it printed.
fn output(command: &mut Command) -> Result<Vec<u8>, String> {
    let output = command.output().map_err(|e| format!("{command:?} does not start: {e}"))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let done = std::fs::create_dir_all(to.parent().unwrap_or(to)).and_then(|()| std::fs::copy(from, to));
    done.map(|_| ()).map_err(|e| format!("{} to {}: {e}", from.display(), to.display()))
}

/// Copies a folder with all that is in it.
fn copy_folder(from: &Path, to: &Path) -> Result<(), String> {
    for entry in std::fs::read_dir(from).map_err(|e| format!("{}: {e}", from.display()))? {
        let from = entry.map_err(|e| format!("{}: {e}", from.display()))?.path();
        let to = to.join(from.file_name().unwrap_or_default());
        if from.is_dir() { copy_folder(&from, &to)? } else { copy(&from, &to)? }
    }
    Ok(())
}

fn write(file: &Path, bytes: &[u8]) -> Result<(), String> {
    let done =
        std::fs::create_dir_all(file.parent().unwrap_or(file)).and_then(|()| std::fs::write(file, bytes));
    done.map_err(|e| format!("{}: {e}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses what changed its version since 2.28: threads, metadata, the loader, libm, children in other
    /// folders.
    const PROGRAM: &str = r#"
        use std::process::Command;
        fn main() {
            let thread = std::thread::Builder::new().name("a thread".to_string());
            let count = thread.spawn(|| std::env::args().count() as f64).unwrap().join().unwrap();
            let numbers = [count.exp(), count.ln(), count.log2(), count.powf(1.5), count.hypot(4.0)];
            let here = Command::new("pwd").current_dir("/usr").output().unwrap();
            let folder = std::fs::metadata("/usr").unwrap().is_dir();
            println!("{numbers:.3?} {folder} {}", String::from_utf8(here.stdout).unwrap().trim());
        }
    "#;

    /// A program linked like the binary of the tarball runs here, and asks for nothing newer than glibc 2.28;
    /// linked plainly it is refused where this system's glibc is newer.
    #[test]
    #[cfg(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu"))]
    fn the_binary_asks_for_no_newer_glibc() {
        let dir = std::env::temp_dir().join(format!("qurl-dist-{}", std::process::id()));
        let source = dir.join("program.rs");
        write(&source, PROGRAM.as_bytes()).expect("written");
        let compile = |name: &str, link: &[String]| {
            let binary = dir.join(name);
            let mut rustc = Command::new("rustc");
            output(rustc.args(["-O", "--edition=2024", "-o"]).arg(&binary).arg(&source).args(link))
                .expect("compiled");
            let said = output(Command::new(&binary).args(["two", "three"])).expect("runs");
            assert_eq!(
                String::from_utf8_lossy(&said).trim(),
                "[20.086, 1.099, 1.585, 5.196, 5.000] true /usr",
                "{name}"
            );
            check(&binary)
        };
        assert_eq!(compile("old", &glibc::link_arguments(&dir.join("link")).expect("made")), Ok(()));
        match compile("plain", &[]) {
            Ok(()) => eprintln!("skipped: this system's glibc is not newer than 2.28"),
            Err(message) => {
                assert!(message.contains("does not run with glibc 2.28: it needs "), "{message}");
                assert!(
                    message.contains("__libc_start_main, which libc.so.6 has since GLIBC_2.34"),
                    "{message}"
                );
            }
        }
        std::fs::remove_dir_all(&dir).expect("removed");
    }

    /// All but the binary: pages and completions are taken from a stand-in.
    #[test]
    fn everything_that_goes_into_the_tarball_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        let dir = std::env::temp_dir().join(format!("qurl-stage-{}", std::process::id()));
        stage(root, Path::new("/bin/true"), &dir).expect("staged");
        for file in [
            "bin/qurl",
            "share/fish/vendor_completions.d/qurl.fish",
            "share/qurl/recipes/default.toml",
            "share/qurl/recipes/studies/claims.toml",
            "share/doc/qurl/LICENSES-OF-DEPENDENCIES",
        ] {
            assert!(dir.join(file).is_file(), "{file}");
        }
        std::fs::remove_dir_all(&dir).expect("removed");
    }

    #[test]
    fn the_container_takes_the_tarball() {
        let text = containerfile("qurl-1.2.3-x86_64-linux");
        assert!(text.contains("\nADD qurl-1.2.3-x86_64-linux.tar.gz /opt\n"), "{text}");
        assert!(
            text.contains("\nENV PATH=/opt/qurl-1.2.3-x86_64-linux/bin:${PATH}\n")
                && !text.contains("{name}")
        );
    }
}
