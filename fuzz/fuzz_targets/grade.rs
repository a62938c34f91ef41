//! Any two texts under any policy: the grader must end within its budget and must not panic.
//!
//! `cargo +nightly fuzz run grade`
#![no_main]

use libfuzzer_sys::fuzz_target;
use qurl_tasks::grader::budget::FUEL;
use qurl_tasks::grader::{Policy, grade};

fuzz_target!(|input: (&str, &str, u8)| {
    let (gold, response, choice) = input;
    let (_, policy) = Policy::ALL[usize::from(choice) % Policy::ALL.len()];
    let first = grade(gold, response, policy);
    assert!(first.fuel <= FUEL);
    assert_eq!(first, grade(gold, response, policy), "a verdict depends on nothing but its input");
});
