//! Reward commands: scores come back in order; silence, death and nonsense are errors that say so.
#![cfg(unix)]

use std::time::Duration;

use qurl_tasks::external::{ExternalError, ExternalReward};
use qurl_tasks::{Problem, Prompt};

fn start(script: &str, limit_ms: u64) -> ExternalReward {
    let command = ["sh", "-c", script].map(String::from);
    ExternalReward::start(&command, Duration::from_millis(limit_ms)).unwrap()
}

fn problem() -> Problem {
    Problem { id: "p".into(), prompt: Prompt::Text("2+2=".into()), answer: "4".into(), extra: serde_json::Value::Null }
}

#[test]
fn scores_come_back_in_order_and_the_command_stays() {
    let script = r#"n=0; while read -r line; do n=$((n+1)); case "$line" in *'"response":"4"'*) echo 1;; *) echo "{\"score\": 0.$n}";; esac; done"#;
    let mut reward = start(script, 30_000);
    let p = problem();
    assert_eq!(reward.score(&[(&p, "4"), (&p, "5"), (&p, "4")]).unwrap(), [1.0, 0.2, 1.0]);
    // The counter goes on: it is the same process.
    assert_eq!(reward.score(&[(&p, "5")]).unwrap(), [0.4]);
    assert_eq!(reward.score(&[]).unwrap(), Vec::<f64>::new());
}

#[test]
fn large_batches_do_not_block() {
    let mut reward = start("while read -r line; do echo 0.5; done", 60_000);
    let p = problem();
    let long = "x".repeat(2000);
    let batch: Vec<(&Problem, &str)> = (0..500).map(|_| (&p, long.as_str())).collect();
    assert_eq!(reward.score(&batch).unwrap(), vec![0.5; 500]);
}

#[test]
fn death_is_reported_with_its_status() {
    let mut reward = start("read -r line; echo 1; exit 3", 30_000);
    let p = problem();
    let error = reward.score(&[(&p, "a"), (&p, "b")]).unwrap_err();
    assert!(matches!(error, ExternalError::Died { answered: 1, expected: 2, .. }), "{error}");
    assert!(error.to_string().contains('3'), "{error}");
    assert!(matches!(reward.score(&[(&p, "a")]), Err(ExternalError::Died { .. })));
}

#[test]
fn nonsense_and_bad_numbers_are_reported() {
    for line in ["hello", "1.5", "-0.1", "NaN", "{\"points\": 1}", "\"1\""] {
        let mut reward = start(&format!("while read -r x; do echo '{line}'; done"), 30_000);
        let error = reward.score(&[(&problem(), "a")]).unwrap_err();
        assert!(matches!(&error, ExternalError::NotAScore { line: shown, .. } if shown == line), "{error}");
    }
}

#[test]
fn silence_runs_into_the_time_limit() {
    let mut reward = start("exec sleep 600", 200);
    let error = reward.score(&[(&problem(), "a")]).unwrap_err();
    assert!(matches!(error, ExternalError::TimeLimit { answered: 0, expected: 1, .. }), "{error}");
}

#[test]
fn a_missing_program_is_named() {
    let command = ["no-such-program-here".to_string()];
    let Err(error) = ExternalReward::start(&command, Duration::from_secs(1)) else { panic!("started") };
    assert!(error.to_string().contains("no-such-program-here"));
    assert!(matches!(ExternalReward::start(&[], Duration::from_secs(1)), Err(ExternalError::Empty)));
}
