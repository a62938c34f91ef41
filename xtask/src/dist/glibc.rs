//! A binary for older C libraries than the one at hand.
//!
//! A linker takes the newest version of every symbol that the C library at hand has, so a binary that is
//! linked on a new system asks for that system's glibc, though nothing in it needs one. So `cargo xtask dist`
//! links against
//! - stand-ins of `libpthread` and `libdl`, which became parts of libc in 2.34: shared libraries with the
//!   names, symbols and versions that the real ones had in glibc 2.28, and nothing in them. They are linked
//!   first, so their versions are taken; the real ones are what is loaded. Newer libraries keep these
//!   versions, for programs linked long ago.
//! - `glibc.S`: the few functions of libc and libm that are newer, in terms of older ones.
//!
//! What is not covered here is found by [`super::elf::newer_than`] and named.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The newest glibc that may be needed: that of the distributions that clusters still run.
pub const OLDEST: (u32, u32) = (2, 28);

/// A library of glibc 2.28 with the symbols of it that are newer in later versions.
struct StandIn {
    /// What the loader looks for.
    soname: &'static str,
    /// Versions, each with its symbols.
    versions: &'static [(&'static str, &'static [&'static str])],
}

const STAND_INS: &[StandIn] = &[
    StandIn {
        soname: "libpthread.so.0",
        versions: &[
            (
                "GLIBC_2.2.5",
                &[
                    "pthread_attr_getguardsize",
                    "pthread_attr_getstack",
                    "pthread_attr_setstacksize",
                    "pthread_create",
                    "pthread_detach",
                    "pthread_getattr_np",
                    "pthread_join",
                    "pthread_key_create",
                    "pthread_key_delete",
                    "pthread_setspecific",
                    "pthread_sigmask",
                ],
            ),
            ("GLIBC_2.12", &["pthread_setname_np"]),
        ],
    },
    StandIn {
        soname: "libdl.so.2",
        versions: &[("GLIBC_2.2.5", &["dladdr", "dlclose", "dlerror", "dlopen", "dlsym"])],
    },
];

/// Makes the stand-ins and the object of `glibc.S` in `dir`, and gives the arguments with which rustc links
/// them.
pub fn link_arguments(dir: &Path) -> Result<Vec<String>, String> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")) {
        let here = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
        return Err(format!(
            "this is {here}; a binary for older systems is made on x86_64-linux with glibc only"
        ));
    }
    std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut arguments = vec!["-L".to_string(), format!("native={}", dir.display())];
    for library in STAND_INS {
        let stem = library.soname.trim_start_matches("lib").split('.').next().unwrap_or_default();
        make_stand_in(dir, library, &dir.join(format!("libqurl_{stem}.so")))?;
        arguments.extend(["-l".to_string(), format!("dylib=qurl_{stem}")]);
    }
    let (source, object) = (dir.join("glibc.S"), dir.join("glibc.o"));
    write(&source, include_str!("glibc.S"))?;
    cc(&["-c".into(), "-o".into(), object.clone(), source])?;
    arguments.extend(["-C".to_string(), format!("link-arg={}", object.display())]);
    Ok(arguments)
}

fn make_stand_in(dir: &Path, library: &StandIn, file: &Path) -> Result<(), String> {
    let (source, map) = (dir.join("stand_in.s"), dir.join("stand_in.map"));
    let mut assembly = String::from("    .text\n");
    let mut versions = String::new();
    for (version, symbols) in library.versions {
        for symbol in *symbols {
            assembly
                .push_str(&format!("    .globl {symbol}\n    .type {symbol}, @function\n{symbol}: ret\n"));
        }
        versions.push_str(&format!("{version} {{ {}; }};\n", symbols.join("; ")));
    }
    assembly.push_str("    .section .note.GNU-stack, \"\", @progbits\n");
    write(&source, &assembly)?;
    write(&map, &versions)?;
    let linker = format!("-Wl,-soname,{},--version-script={}", library.soname, map.display());
    cc(&["-shared".into(), "-nostdlib".into(), linker.into(), "-o".into(), file.into(), source])
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    std::fs::write(file, text).map_err(|e| format!("{}: {e}", file.display()))
}

/// The compiler driver with which Rust links.
fn cc(arguments: &[PathBuf]) -> Result<(), String> {
    let output =
        Command::new("cc").args(arguments).output().map_err(|e| format!("cc does not start: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("cc {arguments:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}
