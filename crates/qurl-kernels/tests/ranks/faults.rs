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

/// An exchange that all begin, in which everyone waits for another one.
pub fn stuck(ranks: Collective) {
    let root = if ranks.rank() == 0 { 1 } else { 0 };
    println!("never reached: {:?}", ranks.broadcast_bytes(root, Vec::new()));
}

/// An exchange of a GPU that does not end.
pub fn waiting(ranks: Collective) {
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
fn an_exchange_that_all_have_begun_and_that_does_not_end_ends_all() {
    let expected = "an exchange that all ranks have begun has not ended at ranks 0, 1, 2 of 3 for 3 s";
    fails_with("stuck", &[("QURL_TEST_STALL", "3")], expected);
}

/// NCCL as far as joining goes. The second group of messages never ends, or nobody ever joins; the links are
/// lost then, or nothing is said.
const NCCL: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int groups, lost;
static int is(const char* what) { return !strcmp(getenv("TEST_NCCL"), what); }
static int wait_for_ever(void) { lost = is("lost links"); for (;;) sleep(1); }
int ncclGetVersion(int* version) { *version = 21805; return 0; }
int ncclGetUniqueId(void* id) { memset(id, 7, 128); return 0; }
typedef struct { char bytes[128]; } Id;
int ncclCommInitRank(void** comm, int size, Id id, int rank) {
    if (is("nobody joins")) wait_for_ever();
    *comm = &groups; return 0;
}
int ncclCommDestroy(void* comm) { return 0; }
int ncclCommGetAsyncError(void* comm, int* status) { *status = lost ? 6 : 0; return 0; }
const char* ncclGetErrorString(int status) { return "remote process exited or there was a network error"; }
const char* ncclGetLastError(void* comm) { return ""; }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { if (++groups > 1) wait_for_ever(); return 0; }
int ncclSend(void) { return 0; }
int ncclRecv(void) { return 0; }
int ncclAllGather(void) { return 0; }
int ncclBroadcast(void) { return 0; }
"#;

/// Builds it with the compiler that Rust links with, in a folder that goes afterwards.
fn with_nccl(run: impl FnOnce(&str)) {
    struct Folder(std::path::PathBuf);
    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).expect("its own folder");
        }
    }
    static COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("qurl-nccl-{}-{count}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let folder = Folder(folder);
    let [source, library] = ["nccl.c", "libnccl.so"].map(|name| folder.0.join(name));
    std::fs::write(&source, NCCL).expect("written");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).args([&library, &source]).status();
    assert!(built.expect("cc, with which Rust links").success(), "the NCCL of the tests does not build");
    run(library.to_str().expect("a path in UTF-8"));
}

/// The call that waits for a GPU never returns: what NCCL says of its links is asked nevertheless.
#[test]
fn links_that_are_lost_end_all() {
    with_nccl(|library| {
        let expected = "failed: NCCL: remote process exited or there was a network error (6)";
        fails_with("a gpu that waits", &[("QURL_NCCL", library), ("TEST_NCCL", "lost links")], expected);
    });
}

#[test]
fn a_gpu_that_does_not_answer_ends_all() {
    for trouble in ["silence", "nobody joins"] {
        with_nccl(|library| {
            let expected =
                "an exchange that all ranks have begun has not ended at ranks 0, 1, 2 of 3 for 3 s";
            let variables = [("QURL_NCCL", library), ("TEST_NCCL", trouble), ("QURL_TEST_STALL", "3")];
            fails_with("a gpu that waits", &variables, expected);
        });
    }
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
