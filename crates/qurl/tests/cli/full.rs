//! Commands that write a file or a directory where the system has no room for it: status 1, what was there
//! stays as it was, and nothing stands in the way of trying again. The room is taken by a limit on the size
//! of files, which needs no file system of its own.
#![cfg(target_os = "linux")]

use crate::common::{Run, qurl_in};
use crate::models::{TempDir, saved};
use qurl_model::Family;
use std::path::Path;
use std::process::Command;

/// Runs `qurl` where no file may have more than so many blocks of 512 bytes (or of 1024, as shells differ).
fn limited(dir: &Path, blocks: u32, args: &[&str]) -> Run {
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_qurl")]).args(args).current_dir(dir);
    let output = command.output().expect("a shell");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Run {
        status: output.status.code().unwrap_or(-1),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Runs `qurl` without room; it must fail and name this.
fn fails(dir: &Path, blocks: u32, args: &[&str], named: &str) {
    let full = limited(dir, blocks, args);
    assert_eq!(full.status, 1, "{args:?}: {}{}", full.stdout, full.stderr);
    assert!(full.stderr.contains(named) && full.stderr.contains("too large"), "{args:?}: {}", full.stderr);
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).expect("a directory").flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// And the same command where there is room.
fn works(dir: &Path, args: &[&str]) {
    let done = qurl_in(dir, args, "");
    assert_eq!(done.status, 0, "{args:?}: {}", done.stderr);
}

#[test]
fn a_file_is_written_whole_or_not_at_all() {
    let place = TempDir::new();
    let dir = place.path();
    let init = ["recipe", "init", "--out", "mine.toml"];
    fails(dir, 0, &init, "mine.toml");
    assert!(names(dir).is_empty());
    works(dir, &init);

    std::fs::create_dir(dir.join("run")).expect("created");
    let record = "{\"step\":1,\"reward\":0.5,\"timing\":{\"total\":1.0}}\n";
    std::fs::write(dir.join("run/metrics.jsonl"), record).expect("written");
    let report = ["report", "run", "--out", "page.html"];
    works(dir, &report);
    let page = std::fs::read(dir.join("page.html")).expect("a page");
    std::os::unix::fs::symlink("page.html", dir.join("link.html")).expect("a link");
    for name in ["page.html", "link.html"] {
        fails(dir, 8, &["report", "run", "--out", name], name);
        assert!(std::fs::read(dir.join(name)).expect("a page") == page, "the page of before");
    }
    works(dir, &["report", "run", "--out", "link.html"]);
    assert!(dir.join("link.html").is_symlink(), "what it points to is written");
    let shown = qurl_in(dir, &["report", "run", "--out", "/dev/stdout"], "");
    assert!(shown.status == 0 && shown.stdout.contains("</html>"), "{}", shown.stderr);

    let export = ["export", "run", "--to", "mlflow", "--out", "store"];
    fails(dir, 0, &export, "meta.yaml");
    assert_eq!(names(dir), ["link.html", "mine.toml", "page.html", "run"]);
    works(dir, &export);
    fails(dir, 0, &export, "meta.yaml");
    assert!(names(&dir.join("store/.trash")).is_empty(), "nothing is left of what failed");

    fails(dir, 4, &["man", "pages/man1"], "pages/man1: manual pages cannot be written there");
    assert!(!dir.join("pages").exists(), "no pages");
    works(dir, &["man", "pages/man1"]);
    let pages = names(&dir.join("pages/man1"));
    assert!(pages.iter().all(|page| page.starts_with("qurl")), "{pages:?}");
    fails(dir, 4, &["man", "pages/man1"], "pages/man1");
    assert_eq!(names(&dir.join("pages/man1")), pages);
}

#[test]
fn a_model_and_an_evaluation_leave_nothing_that_stops_the_next_attempt() {
    let (model, place) = (saved(Family::Qwen2), TempDir::new());
    let dir = place.path();
    let quantize = ["quantize", "--model", model.text(), "--format", "int8", "new/q"];
    fails(dir, 8, &quantize, "new/q/model.safetensors: cannot be written");
    assert!(names(dir).is_empty());
    works(dir, &quantize);

    let task = ["--task", "addition:1", "--limit", "2", "--k", "1", "--max-new", "4", "--out", "new/e"];
    let eval = [&["eval", "--model", model.text()], &task[..]].concat();
    fails(dir, 0, &eval, "settings.json");
    assert_eq!(names(&dir.join("new")), ["q"]);
    // Room for the settings, and none for the figures.
    fails(dir, 2, &eval, "new/e");
    works(dir, &[&eval[..], &["--resume"]].concat());
    assert_eq!(names(&dir.join("new/e")), ["responses.jsonl", "settings.json", "summary.json"]);
}
