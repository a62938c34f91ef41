//! Reward commands of real runs: nothing that they started outlives the run, however it ends; signals that
//! are in a hurry do not wait for scores; lines that do not belong end the run.
#![cfg(unix)]

use super::data_sets::{RECIPE, write_sums};
use super::support::{place, signal, wait_for};
use crate::common::{qurl_in, tiny_model};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts children of every kind, notes who they are, and once the file `go` is there, scores with request
/// numbers. `daemon` left its process group and its session, and its parent has ended.
const REWARD: &str = r#"
echo $$ > command.pid
sleep 1000 & echo $! > child.pid
setsid sh -c 'sleep 1000 & echo $! > daemon.pid'
sh -c 'trap "" TERM; while :; do sleep 1; done' & echo $! > stubborn.pid
read -r line
: > asked
while [ ! -e go ]; do sleep 0.02; done
while :; do
    n=${line#*\"request\":}
    echo "{\"request\": ${n%%[,\}]*}, \"score\": 0.5}"
    read -r line || exit 0
done
"#;
const FAMILY: [&str; 4] = ["command", "child", "daemon", "stubborn"];

/// A directory with a model, problems and a recipe whose reward is `sh reward.sh`.
fn place_with_reward(name: &str, script: &str) -> PathBuf {
    let dir = place(name);
    tiny_model(&dir.join("model"), "0123456789+=");
    let task = "[task]\ntype = \"command\"\ncommand = [\"sh\", \"reward.sh\"]\ntime_limit_s = \
                3000\n\n[task.source]\n";
    let recipe = RECIPE.replace("[task]\n", task).replace("test_problems = 50", "test_problems = 1");
    std::fs::write(dir.join("data.toml"), recipe).expect("written");
    std::fs::write(dir.join("reward.sh"), script).expect("written");
    write_sums(&dir.join("train.jsonl"), 0, 12, false);
    write_sums(&dir.join("test.jsonl"), 20, 5, false);
    dir
}

/// The command is named by a path that is relative to where the run began.
#[test]
fn a_run_that_resumes_from_elsewhere_runs_the_same_command() {
    let script = r#"while read -r line; do
    n=${line#*\"request\":}
    echo "{\"request\": ${n%%[,\}]*}, \"score\": 0.5}"
done"#;
    let dir = place_with_reward("rewards-elsewhere", script);
    let begun = qurl_in(&dir, &["train", "data.toml", "--run", "run", "--steps", "1"], "");
    assert_eq!(begun.status, 0, "{}", begun.stderr);
    let elsewhere = dir.join("elsewhere");
    std::fs::create_dir(&elsewhere).expect("created");
    std::fs::write(elsewhere.join("reward.sh"), "echo another program; exit 1").expect("written");
    for more in [&["--steps", "2"][..], &["../data.toml", "--steps", "3"]] {
        let resumed = qurl_in(&elsewhere, &[&["train", "--run", "../run", "--resume"], more].concat(), "");
        assert_eq!(resumed.status, 0, "{}", resumed.stderr);
    }
    let recipe = std::fs::read_to_string(dir.join("run/recipe.toml")).expect("a recipe");
    let written = format!("directory = {:?}", dir.canonicalize().expect("a path").display().to_string());
    assert!(recipe.contains(&written), "{recipe}");
    // A directory of its own is relative to the recipe, and one that is not there is named.
    let set = ["--set", "task.directory=elsewhere", "--run", "other", "--steps", "1"];
    let other = qurl_in(&dir, &[&["train", "data.toml"], &set[..]].concat(), "");
    assert!(other.status == 1 && other.stderr.contains("another program"), "{}", other.stderr);
    qurl_in(&dir, &["train", "data.toml", "--set", "task.directory=nowhere", "--run", "none"], "")
        .assert_bad(&["its directory", "nowhere is not there"]);
}

/// A run in the background that has asked for its first scores. What it says goes to a file: a child that
/// outlives it must not keep a test waiting.
fn asking(dir: &Path, program: &mut Command) -> Child {
    let said = std::fs::File::create(dir.join("said")).expect("a file");
    let quiet = program.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut child = quiet.spawn().expect("the command starts");
    let asked = wait_for(&mut child, || dir.join("asked").exists());
    assert!(asked, "{}", std::fs::read_to_string(dir.join("said")).expect("text"));
    child
}

fn train() -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_qurl"));
    program.args(["train", "data.toml", "--run", "run"]);
    program
}

/// Status and what was said.
fn end(mut child: Child, dir: &Path) -> (Option<i32>, String) {
    assert!(!wait_for(&mut child, || false));
    (child.wait().expect("ended").code(), std::fs::read_to_string(dir.join("said")).expect("text"))
}

/// Whether these tests themselves run under `nohup`: then so do their runs.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or_default();
    u64::from_str_radix(mask.trim(), 16).is_ok_and(|mask| mask & 1 == 1)
}

fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// The numbers of the command and its children.
fn family(dir: &Path) -> Vec<(&'static str, String)> {
    let pid = |name: &'static str| {
        let text = std::fs::read_to_string(dir.join(format!("{name}.pid"))).expect("a number");
        (name, text.trim().to_string())
    };
    FAMILY.map(pid).to_vec()
}

fn assert_gone(family: &[(&str, String)], after: &str) {
    let began = Instant::now();
    for (name, pid) in family {
        while alive(pid) {
            assert!(began.elapsed() < Duration::from_secs(60), "{name} ({pid}) outlives a run after {after}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_outlives_a_run_that_ends_well() {
    let dir = place_with_reward("runs-reward-end", REWARD);
    let child = asking(&dir, &mut train());
    let family = family(&dir);
    assert!(family.iter().all(|(_, pid)| alive(pid)), "{family:?}");
    std::fs::write(dir.join("go"), "").expect("written");
    let (code, said) = end(child, &dir);
    assert_eq!(code, Some(0), "{said}");
    // Everything is gone when the run is, not a moment later.
    let left: Vec<_> = family.iter().filter(|(_, pid)| alive(pid)).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// A reward that hangs: the run does not wait for it, and nothing of it is left.
#[cfg(target_os = "linux")]
#[test]
fn nothing_outlives_a_run_that_a_signal_ends() {
    for (name, status) in [("TERM", Some(143)), ("HUP", Some(129)), ("KILL", None)] {
        if name == "HUP" && hangups_are_ignored() {
            continue;
        }
        let dir = place_with_reward(&format!("runs-reward-{name}"), REWARD);
        let child = asking(&dir, &mut train());
        let family = family(&dir);
        assert!(family.iter().all(|(_, pid)| alive(pid)), "{family:?}");
        signal(&child, name);
        let (code, said) = end(child, &dir);
        assert_eq!(code, status, "{said}");
        if status.is_some() {
            assert!(
                said.contains("stopped while waiting for scores; resume with: qurl train --run run"),
                "{said}"
            );
        }
        assert_gone(&family, name);
    }
}

/// The first Ctrl-C ends the step, for which the scores are needed; the second ends the run at once.
#[cfg(target_os = "linux")]
#[test]
fn nothing_outlives_a_second_ctrl_c() {
    let dir = place_with_reward("runs-reward-twice", REWARD);
    let mut child = asking(&dir, &mut train());
    let family = family(&dir);
    signal(&child, "INT");
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().expect("a child").is_none(), "the first one waits for the scores");
    signal(&child, "INT");
    assert_eq!(end(child, &dir).0, Some(130));
    assert_gone(&family, "Ctrl-C twice");
}

/// `nohup` is a wish that SIGHUP be ignored.
#[cfg(target_os = "linux")]
#[test]
fn a_run_that_ignores_hangups_continues() {
    let dir = place_with_reward("runs-reward-nohup", REWARD);
    let mut program = Command::new("sh");
    program.args([
        "-c",
        "trap '' HUP; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_qurl"),
        "train",
        "data.toml",
        "--run",
        "run",
    ]);
    let child = asking(&dir, &mut program);
    signal(&child, "HUP");
    std::fs::write(dir.join("go"), "").expect("written");
    let (code, said) = end(child, &dir);
    assert_eq!(code, Some(0), "{said}");
}

/// What is written to the command and not read does not hide the end of the input; statuses are the command's
/// own.
#[test]
fn the_guard_by_itself() {
    let guard = |script: &str| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_qurl"));
        let program = program.args(["reward-guard", "sh", "-c", script]).stdin(Stdio::piped());
        program.spawn().expect("the guard starts")
    };
    let mut hanging = guard("exec sleep 1000");
    hanging.stdin.take().expect("a pipe").write_all(&[b'x'; 10_000]).expect("written");
    assert!(!wait_for(&mut hanging, || false));
    assert_eq!(hanging.wait().expect("ended").code(), Some(128 + 15));
    for (script, status) in [("exit 7", 7), ("kill -9 $$", 137), ("read -r line || exit 3", 3)] {
        let mut ended = guard(script);
        if script.starts_with("read") {
            drop(ended.stdin.take());
        }
        assert!(!wait_for(&mut ended, || false));
        assert_eq!(ended.wait().expect("ended").code(), Some(status), "{script}");
    }
}

#[test]
fn lines_that_do_not_belong_end_the_run() {
    let dir = place_with_reward("runs-reward-slip", "while :; do echo 1; done");
    let run = || qurl_in(&dir, &["train", "data.toml", "--run", "run", "--resume"], "");
    let done = run();
    assert_eq!(done.status, 1, "{}", done.stderr);
    assert!(done.stderr.contains("wrote \"1\": expected nothing"), "{}", done.stderr);
    // One line too many in the middle of training: two held-out and four other responses are right before it.
    std::fs::write(
        dir.join("reward.sh"),
        "n=0; while read -r l; do n=$((n+1)); echo 1; [ $n = 6 ] && echo 0.25; done",
    )
    .expect("written");
    let done = run();
    assert_eq!(done.status, 1, "{}", done.stderr);
    assert!(done.stderr.contains("wrote \"") && done.stderr.contains("expected nothing"), "{}", done.stderr);
    // A program that does not exist is said before anything is done.
    let missing = ["train", "data.toml", "--run", "none", "--set", "task.command=['no-such-program']"];
    qurl_in(&dir, &missing, "").assert_bad(&["no-such-program"]);
    // One that ends says how.
    std::fs::write(dir.join("reward.sh"), "read -r line; exit 7").expect("written");
    let done = run();
    assert!(done.status == 1 && done.stderr.contains("exit status: 7"), "{}", done.stderr);
}
