//! Full and read-only disks. They need small file systems of their own, which only root can mount; elsewhere
//! the tests say that they are skipped.
#![cfg(target_os = "linux")]

use super::support::{Outcome, lines, place, spawn, train, trained, wait_for};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A file system in memory, gone when dropped.
struct Disk(PathBuf);

impl Disk {
    fn mount(dir: &Path, options: &str) -> Option<Disk> {
        std::fs::create_dir_all(dir).expect("created");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir).stderr(Stdio::null());
        if mount.status().is_ok_and(|status| status.success()) {
            return Some(Disk(dir.to_path_buf()));
        }
        println!("skipped: no file system can be mounted here");
        None
    }

    fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        let status = Command::new("mount").args(["-o", &options]).arg(&self.0).status().expect("mount");
        assert!(status.success());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// Ends mounts that an earlier run of the test was not allowed to end.
fn fresh(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = Command::new("umount").arg(dir.join("disk")).stderr(Stdio::null()).status();
    place(name)
}

#[test]
fn a_full_disk_is_named_and_the_last_checkpoint_stays() {
    let dir = fresh("runs-full");
    let Some(disk) = Disk::mount(&dir.join("disk"), "size=2m") else { return };
    let steps = ["--set", "trainer.keep_last=100"];
    let full = train(&dir, "disk/run", &steps);
    assert_eq!(full.status, 1, "{}", full.stderr);
    for text in ["do not fit", "bytes are free", "keep_last", "--resume"] {
        assert!(full.stderr.contains(text), "expected {text:?} in {}", full.stderr);
    }
    let checkpoints: Vec<_> =
        std::fs::read_dir(dir.join("disk/run/checkpoints")).expect("checkpoints").collect();
    assert!(!checkpoints.is_empty());
    disk.remount("size=64m");
    let done = trained(&dir, "disk/run", &["--resume", "--set", "trainer.keep_last=100"]);
    assert!(
        done.stderr.contains("resumes after step") && !done.stderr.contains("not whole"),
        "{}",
        done.stderr
    );
    trained(&dir, "whole", &steps);
    Outcome::of(&dir.join("disk/run")).assert_same(&Outcome::of(&dir.join("whole")), "a disk that was full");
}

#[test]
fn a_final_model_that_will_not_fit_is_told_before_the_run() {
    let dir = fresh("runs-full-model");
    let Some(_disk) = Disk::mount(&dir.join("disk"), "size=300k") else { return };
    let full = train(&dir, "disk/run", &["--set", "trainer.save_freq=0"]);
    assert_eq!(full.status, 1, "{}", full.stderr);
    assert!(full.stderr.contains("the final model") && full.stderr.contains("do not fit"), "{}", full.stderr);
    assert!(!full.stderr.contains("accuracy before"), "nothing was begun: {}", full.stderr);
}

#[test]
fn a_log_that_does_not_fit_is_named() {
    let dir = fresh("runs-full-log");
    let Some(_disk) = Disk::mount(&dir.join("disk"), "size=1m") else { return };
    let endless = ["--set", "trainer.save_freq=0", "--steps", "100000", "--set", "run.test_freq=0"];
    let mut child = spawn(&dir, "disk/run", &endless);
    wait_for(&mut child, || lines(&dir.join("disk/run")) > 0);
    // Somebody else takes what is left of the disk.
    let filled = std::fs::write(dir.join("disk/other"), vec![1u8; 2 << 20]);
    assert!(filled.is_err(), "the disk is full now");
    let full = child.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&full.stderr);
    assert_eq!(full.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("No space left") && stderr.contains("disk/run/"), "{stderr}");
}

#[test]
fn a_read_only_directory_is_named() {
    let dir = fresh("runs-read-only");
    let Some(disk) = Disk::mount(&dir.join("disk"), "size=64m") else { return };
    trained(&dir, "disk/run", &["--set", "run.total_steps=2"]);
    let before = Outcome::of(&dir.join("disk/run"));
    disk.remount("ro");
    train(&dir, "disk/new", &[]).assert_bad(&["disk/new", "Read-only"]);
    let more = ["--resume", "--set", "run.total_steps=4"];
    train(&dir, "disk/run", &more).assert_bad(&["disk/run", "Read-only"]);
    Outcome::of(&dir.join("disk/run")).assert_same(&before, "a read-only directory");
}
