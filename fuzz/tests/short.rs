//! A short run of every target: the seeds, the inputs that once failed, and a few hundred changed ones. The
//! long runs are `cargo xtask fuzz`.

use std::process::Command;

fn nothing_fails(target: &str, inputs: u32) {
    let keep = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz");
    let mut command = Command::new(env!("CARGO_BIN_EXE_qurl-fuzz"));
    let output = command.args([target, "--inputs", &inputs.to_string(), "--keep"]).arg(&keep).output();
    let output = output.expect("the program starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}the inputs are in {}", keep.display());
    let words: Vec<&str> = said.split_whitespace().collect();
    let [name, run, "inputs", accepted, "accepted", "0", "failed", ..] = words[..] else { panic!("{said}") };
    assert_eq!((name, run), (target, inputs.to_string().as_str()));
    assert!(
        accepted.parse::<u32>().expect("a number") > 0,
        "nothing is accepted, not even the seeds: {said}"
    );
}

#[test]
fn tokenizers() {
    nothing_fails("tokenizer", 400);
}

#[test]
fn templates() {
    nothing_fails("template", 400);
}

#[test]
fn models() {
    nothing_fails("model", 300);
}

#[test]
fn recipes() {
    nothing_fails("recipe", 300);
}

#[test]
fn data_sets() {
    nothing_fails("data", 400);
}

#[test]
fn checkpoints() {
    nothing_fails("checkpoint", 100);
}

#[test]
fn requests() {
    nothing_fails("http", 200);
}

#[test]
fn answers() {
    nothing_fails("grader", 400);
}

#[test]
fn what_is_no_target_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_qurl-fuzz")).arg("nothing").output().expect("it starts");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no target 'nothing'; there are tokenizer,"));
}
