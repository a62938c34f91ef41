//! `docs/guide.md` is true: its files are written and its commands run, in order, in a directory that holds a
//! small model and nothing else.
#![cfg(unix)]

use crate::common::{directory, tiny_model};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// A fenced block: the words after the fence, and its lines.
struct Block {
    words: Vec<String>,
    text: String,
}

fn blocks(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(words), None) => {
                let words = words.split_whitespace().map(String::from).collect();
                open = Some(Block { words, text: String::new() });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a fence is not closed");
    blocks
}

/// The program under test is the one that the shell finds.
fn shell(dir: &Path, script: &str) -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_qurl"));
    let mut path = vec![program.parent().expect("a folder").to_path_buf()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let mut shell = Command::new("sh");
    shell.args(["-euc", script]).current_dir(dir).stdin(Stdio::null());
    shell.env("PATH", std::env::join_paths(path).expect("a path"));
    shell
}

fn run(dir: &Path, script: &str) {
    let output = shell(dir, script).output().expect("sh starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}\n{}{said}", String::from_utf8_lossy(&output.stdout));
}

/// A command that serves until it is ended: it says where, and answers there.
fn serve(dir: &Path, script: &str) {
    let mut child = shell(dir, &format!("exec {script} 2>&1")).stdout(Stdio::piped()).spawn().expect("sh");
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let address = lines
        .map_while(Result::ok)
        .find_map(|line| Some(line.split_once("http://")?.1.split('/').next()?.to_string()));
    let reached = address.as_ref().map(std::net::TcpStream::connect);
    child.kill().expect("ended");
    child.wait().expect("ended");
    assert!(matches!(reached, Some(Ok(_))), "{script}: {address:?}");
}

#[test]
fn every_command_of_the_guide_works() {
    let page = include_str!("../../../../docs/guide.md");
    let blocks = blocks(page);
    let scripts = blocks.iter().filter(|b| b.words[0] == "sh").count();
    assert!(scripts >= 6 && blocks.iter().all(|b| !b.words.is_empty()), "{scripts} blocks of commands");
    if Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3 for the reward");
        return;
    }
    let dir = directory("guide");
    let alphabet: String = (' '..='~').chain(['\n']).collect();
    tiny_model(&dir.join("model"), &alphabet);
    let mut commands = 0;
    for Block { words, text } in &blocks {
        match &words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
            ["sh"] => {
                commands += text.lines().count();
                run(&dir, text);
                if commands == text.lines().count() {
                    running_grpo(&dir, text);
                }
            }
            ["sh", "background"] => serve(&dir, text.trim()),
            [_, file] => std::fs::write(dir.join(file), text).expect("written"),
            other => panic!("a block that is neither commands nor a file: {other:?}"),
        }
    }
    for made in ["first.html", "both.html", "mlruns", "runs/weighted/model", "runs/third/model", "first-int8"]
    {
        assert!(dir.join(made).exists(), "{made}");
    }
}

/// The first block is the promise of the page: three commands, and GRPO has run on the reward of ten lines.
fn running_grpo(dir: &Path, script: &str) {
    assert_eq!(script.lines().count(), 3, "{script}");
    assert_eq!(std::fs::read_to_string(dir.join("reward.py")).expect("a reward").lines().count(), 10);
    let example = include_str!("../../../../examples/reward.py");
    assert_eq!(std::fs::read_to_string(dir.join("reward.py")).expect("a reward"), example);
    let metrics = std::fs::read_to_string(dir.join("runs/first/metrics.jsonl")).expect("metrics");
    assert_eq!(metrics.lines().count(), 20);
    for line in metrics.lines() {
        let record: serde_json::Value = serde_json::from_str(line).expect("a record");
        assert!(record["reward_parts"]["command/right"].is_f64(), "{line}");
    }
    let recipe = std::fs::read_to_string(dir.join("runs/first/recipe.toml")).expect("a recipe");
    assert!(recipe.contains("grpo") && recipe.contains("reward.py"), "{recipe}");
}
