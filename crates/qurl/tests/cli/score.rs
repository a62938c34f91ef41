//! `qurl score` as its callers use it: line by line, in conversation.

use crate::models::saved;
use qurl_model::Family;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// A running `qurl score`, whose answers come through a channel so that a missing one fails the test.
struct Scorer {
    child: Child,
    input: ChildStdin,
    answers: Receiver<String>,
}

impl Scorer {
    fn start(model: &str) -> Scorer {
        let mut command = Command::new(env!("CARGO_BIN_EXE_qurl"));
        command
            .args(["score", "--model", model])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the command starts");
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Scorer { child, input, answers }
    }

    fn answer(&mut self) -> Value {
        let line = self.answers.recv_timeout(Duration::from_secs(60));
        let line = line.unwrap_or_else(|e| {
            self.child.kill().expect("killed");
            panic!("no answer: {e}")
        });
        serde_json::from_str(&line).expect("a JSON document")
    }
}

#[test]
fn a_caller_may_wait_for_each_answer() {
    let model = saved(Family::Qwen2);
    let mut scorer = Scorer::start(model.text());
    for ids in ["[3,9,14]", "[3]", "[20,7,11,30]"] {
        writeln!(scorer.input, "{{\"ids\":{ids}}}").expect("written");
        let answer = scorer.answer();
        let asked: Vec<u32> = serde_json::from_str(ids).expect("ids");
        assert_eq!(answer["logprobs"].as_array().map(Vec::len), Some(asked.len()));
    }
    // What came before a line that is no text has been answered; the line is named.
    scorer.input.write_all(b"\n{\"ids\":[5,6]}\n\xff\xfe\n").expect("written");
    assert_eq!(scorer.answer()["logprobs"].as_array().map(Vec::len), Some(2));
    drop(scorer.input);
    let ended = scorer.child.wait_with_output().expect("the command ends");
    let said = String::from_utf8(ended.stderr).expect("text");
    assert_eq!(ended.status.code(), Some(2), "{said}");
    assert!(said.contains("standard input, line 6: not UTF-8"), "{said}");
}

#[test]
fn lines_scored_together_have_the_bits_of_lines_alone() {
    let model = saved(Family::Qwen3);
    let lines: String = (1..40u32)
        .map(|n| {
            let ids: Vec<u32> = (0..1 + n * 7 % 31).map(|i| (i * n + 5) % 40).collect();
            format!("{{\"ids\":{ids:?}}}\n")
        })
        .collect();
    let scored = |batch: &str| {
        let run = crate::common::qurl(
            &["score", "--model", model.text(), "--format", "bf16", "--batch", batch],
            &lines,
        );
        assert_eq!((run.status, run.stdout.lines().count()), (0, 39), "{}", run.stderr);
        run.stdout
    };
    let alone = scored("1");
    assert_eq!(scored("16"), alone);
    assert_eq!(scored("1000"), alone);

    let bad =
        crate::common::qurl(&["score", "--model", model.text()], &format!("{lines}{{\"ids\":[999999]}}\n"));
    bad.assert_bad(&["standard input, line 40", "999999"]);
    assert_eq!(bad.stdout.lines().count(), 39, "the answers before a bad line are given");
}

/// Weights that are finite and overflow: an answer without a number would be no answer.
#[test]
fn a_log_prob_that_is_no_number_is_named() {
    let (config, weights) = crate::models::model(Family::Qwen2);
    let model = crate::models::TempDir::new();
    crate::models::save(model.path(), &config, &weights.map(|leaf| leaf.iter().map(|w| w * 1e37).collect()));
    let scored =
        crate::common::qurl(&["score", "--model", model.text()], "{\"ids\":[5]}\n{\"ids\":[5,6,7]}\n");
    assert_eq!(scored.status, 1, "{}{}", scored.stdout, scored.stderr);
    assert!(scored.stderr.contains("standard input, line 2: the log-prob of token 6"), "{}", scored.stderr);
}
