//! One rank goes wrong: the others end in time, with an error that names it.

use super::job;
use qurl_kernels::Collective;
use std::process::Command;
use std::time::Duration;

pub fn never_reached(_: Collective) {
    println!("never reached");
}

pub fn other_recipe(ranks: Collective) {
    let recipe = if ranks.rank() == 2 { "5678" } else { "1234" };
    let facts = [("the program", "qurl 1".to_string()), ("the recipe", recipe.to_string())];
    println!("agreed: {}", ranks.agree(&facts[..1]).is_ok());
    println!("error: {}", ranks.agree(&facts).expect_err("a difference"));
    ranks.close().expect("closed");
}

pub fn killed(ranks: Collective) {
    if ranks.rank() == 1 {
        signal("KILL");
    }
    wait(ranks)
}

pub fn stopped(ranks: Collective) {
    if ranks.rank() == 1 {
        signal("STOP");
    }
    wait(ranks)
}

pub fn hanging(ranks: Collective) {
    if ranks.rank() == 1 {
        std::thread::sleep(Duration::from_secs(3600));
    }
    wait(ranks)
}

pub fn failing(ranks: Collective) {
    if ranks.rank() == 1 {
        ranks.fail("the disk is full");
        std::process::exit(1);
    }
    wait(ranks)
}

/// Waits for the rank that never comes, inside of an exchange.
fn wait(ranks: Collective) {
    let outcome = ranks.barrier();
    println!("never reached: {outcome:?}");
}

fn signal(name: &str) {
    let kill = Command::new("kill").args([format!("-{name}"), std::process::id().to_string()]).status();
    assert!(kill.expect("kill").success());
    std::thread::sleep(Duration::from_secs(3600));
}

fn fails_with(case: &str, variables: &[(&str, &str)], expected: &str) {
    let Some(outcome) = job::run(case, 3, variables) else { return };
    assert!(!outcome.success, "{}", outcome.text);
    // MPICH 4 kills all ranks as soon as one has died, sometimes before they can say why.
    let killed = case == "killed" && outcome.text.contains("BAD TERMINATION OF ONE");
    assert!(outcome.text.contains(expected) || killed, "{}", outcome.text);
    assert!(!outcome.text.contains("never reached"), "{}", outcome.text);
    assert!(!outcome.text.contains("took longer"), "{}", outcome.text);
}

#[test]
fn a_rank_that_dies_ends_the_others() {
    fails_with("killed", &[], "rank 1 of 3 is lost: its process has ended");
}

#[test]
fn a_rank_that_is_stopped_ends_the_others() {
    let expected = "rank 1 of 3 is lost: no sign of life for 1 s";
    fails_with("stopped", &[("QURL_TEST_SILENCE", "1")], expected);
}

#[test]
fn a_rank_that_hangs_ends_the_others() {
    fails_with("hanging", &[("QURL_TEST_STALL", "1")], "rank 1 of 3 is lost: it hangs: rank ");
}

#[test]
fn a_rank_that_fails_ends_the_others_with_its_reason() {
    fails_with("failing", &[], "rank 1 of 3 failed: the disk is full");
}

#[test]
fn another_program_is_found_at_the_start() {
    fails_with("other version", &[], "rank 2 runs qurl 1, rank 0 runs qurl 0");
}

#[test]
fn another_recipe_is_found_and_named_by_all() {
    let Some(outcome) = job::run("other recipe", 3, &[]) else { return };
    assert!(outcome.success, "{}", outcome.text);
    assert_eq!(outcome.text.matches("agreed: true").count(), 3);
    let expected = "error: the ranks differ in the recipe: 5678 on rank 2, 1234 on rank 0";
    assert_eq!(outcome.text.matches(expected).count(), 3, "{}", outcome.text);
}
