//! The examples do what they say.

use std::process::Command;

/// The last line of what a program prints.
fn last_line(program: &str) -> String {
    let output = Command::new(program).output().expect("the example starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8").lines().last().expect("a line").to_string()
}

/// The numbers of `... A -> B`.
fn change(line: &str) -> (f64, f64) {
    let (before, after) = line.split_once(" -> ").expect(line);
    let number = |text: &str| text.split(' ').next_back().and_then(|word| word.parse().ok()).expect(line);
    (number(before), number(after))
}

#[test]
fn a_task_of_ones_own_is_learned() {
    let (before, after) = change(&last_line(env!("CARGO_BIN_EXE_own_task")));
    assert!(before < 0.5 && after > 0.9, "{before} -> {after}");
}

#[test]
fn an_objective_of_ones_own_is_reached() {
    let (before, after) = change(&last_line(env!("CARGO_BIN_EXE_own_objective")));
    assert!(before < 0.3 && after > 0.9, "{before} -> {after}");
}

#[test]
fn the_engine_alone_samples_what_the_trainer_would_score() {
    assert_eq!(last_line(env!("CARGO_BIN_EXE_engine")), "scored again: the same bits");
}
