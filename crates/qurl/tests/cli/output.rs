//! Commands whose output is closed or full: a quiet end with status 0 where the reader has gone, a message
//! and status 1 where nothing can be written, and never a panic.

use crate::common::{closed, full, qurl_to};
use crate::models::{TempDir, saved};
use qurl_model::Family;
use std::fs::File;

/// Runs a command with this standard output; its status and what it said.
fn run(dir: &TempDir, args: &[&str], stdout: impl Into<std::process::Stdio>) -> (i32, String) {
    let file = dir.path().join("stderr.txt");
    let status = qurl_to(dir.path(), args, stdout, File::create(&file).expect("a file"));
    (status, std::fs::read_to_string(file).expect("text"))
}

#[test]
fn commands_that_print_end_quietly_with_their_reader() {
    let (model, place) = (saved(Family::Qwen2), TempDir::new());
    let full = full();
    let generate = ["generate", "--model", model.text(), "--max-new", "4"];
    let quantize = ["quantize", "--model", model.text(), "--format", "int8", "--force"];
    for command in [
        vec!["completions", "bash"],
        vec!["completions", "bash", "--json"],
        vec!["inspect", model.text()],
        vec!["inspect", model.text(), "--json"],
        [&generate[..], &["a"]].concat(),
        [&generate[..], &["--n", "300", "a"]].concat(),
        [&generate[..], &["--json", "a"]].concat(),
        [&quantize[..], &["q"]].concat(),
        [&quantize[..], &["--json", "q"]].concat(),
        vec!["--help"],
        vec!["train", "--help"],
        vec!["-V"],
    ] {
        let (status, said) = run(&place, &command, closed());
        assert_eq!(status, 0, "{command:?}: {said}");
        assert!(!said.contains("panicked") && !said.contains("qurl:"), "{command:?}: {said}");
        let Some(full) = full.as_ref() else { continue };
        let (status, said) = run(&place, &command, full.try_clone().expect("a handle"));
        assert_eq!(status, 1, "{command:?}: {said}");
        assert!(said.contains("qurl: standard output cannot be written"), "{command:?}: {said}");
    }
}

/// What the libraries have to say where `RUST_LOG` asks for it is a remark, too.
#[test]
fn a_full_standard_error_is_ignored() {
    let Some(full) = full() else { return };
    let model = saved(Family::Qwen2);
    let file = model.path().join("stdout.txt");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_qurl"));
    command.args(["generate", "--model", model.text(), "--max-new", "4", "a"]).env("RUST_LOG", "trace");
    let status =
        command.stdout(File::create(&file).expect("a file")).stderr(full).status().expect("a status");
    assert_eq!(status.code(), Some(0));
    assert!(!std::fs::read_to_string(file).expect("text").is_empty());
}
