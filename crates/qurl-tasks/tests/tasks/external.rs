//! External reward commands: scores that go where they belong, lines that do not belong anywhere, errors,
//! time limits, and ends. Every command is a shell script.
#![cfg(unix)]

use qurl_tasks::external::{ExternalError, ExternalReward, Launch, MAX_LINE, Reply, Slip};
use qurl_tasks::{Attempt, Problem, Prompt};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn start_with(script: &str, limit_ms: u64, launch: &Launch) -> ExternalReward {
    let command = ["sh", "-c", script].map(String::from);
    ExternalReward::start(&command, Duration::from_millis(limit_ms), launch).unwrap()
}

fn start(script: &str) -> ExternalReward {
    start_with(script, 30_000, &Launch::default())
}

fn problem() -> Problem {
    Problem {
        id: "p".into(),
        prompt: Prompt::Text("2+2=".into()),
        answer: "4".into(),
        extra: serde_json::Value::Null,
    }
}

/// The scores of a batch of responses.
fn score(reward: &mut ExternalReward, responses: &[&str]) -> Result<Vec<f64>, ExternalError> {
    Ok(replies(reward, responses)?.into_iter().map(|reply| reply.score).collect())
}

/// All that is said of a batch of responses.
fn replies(reward: &mut ExternalReward, responses: &[&str]) -> Result<Vec<Reply>, ExternalError> {
    let problem = problem();
    let attempt = |&response| Attempt { problem: &problem, response, tokens: 7, truncated: false };
    reward.score(&responses.iter().map(attempt).collect::<Vec<_>>())
}

/// The line that is complained about, and why.
fn slip(outcome: Result<Vec<f64>, ExternalError>) -> (String, Slip) {
    match outcome {
        Err(ExternalError::Line { line, slip, .. }) => (line, slip),
        other => panic!("{other:?}"),
    }
}

/// A script that runs `body` for every request, with its number in `$n`.
fn by_request(body: &str) -> String {
    format!(r#"while read -r line; do n=${{line#*\"request\":}}; n=${{n%%[,\}}]*}}; {body}; done"#)
}

#[test]
fn scores_without_requests_come_in_order_and_the_command_stays() {
    let script = r#"n=0; while read -r line; do n=$((n+1))
        case "$line" in *'"response":"4"'*) echo 1;; *) echo "{\"score\": 0.$n}";; esac
    done"#;
    let mut reward = start(script);
    assert_eq!(score(&mut reward, &["4", "5", "4"]).unwrap(), [1.0, 0.2, 1.0]);
    // The counter continues: it is the same process.
    assert_eq!(score(&mut reward, &["5"]).unwrap(), [0.4]);
    assert_eq!(score(&mut reward, &[]).unwrap(), Vec::<f64>::new());
}

#[test]
fn scores_with_requests_come_in_any_order() {
    // Pairs are answered the wrong way round.
    let reply = |n: &str| format!(r#"echo "{{\"score\": 0.{n}, \"request\": {n}, \"seconds\": 3}}""#);
    let script = by_request(&format!(
        "if [ $((n % 2)) = 0 ]; then kept=$n; else {}; {}; fi",
        reply("$n"),
        reply("$kept")
    ));
    let mut reward = start(&script);
    assert_eq!(score(&mut reward, &["a", "b", "c", "d"]).unwrap(), [0.0, 0.1, 0.2, 0.3]);
    assert_eq!(score(&mut reward, &["e", "f"]).unwrap(), [0.4, 0.5]);
}

/// The example of the documentation, as it stands there.
#[test]
fn the_documented_example_works() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: there is no python3");
        return;
    }
    let read =
        |file: &str| std::fs::read_to_string(format!("{}/../../{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (page, example) = (read("docs/rewards.md"), read("examples/reward.py"));
    assert!(page.contains(&format!("```python\n{example}```")), "docs/rewards.md shows examples/reward.py");
    assert!(example.lines().count() <= 10, "ten lines");
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/reward.py");
    let command = ["python3", file].map(String::from);
    let mut reward = ExternalReward::start(&command, Duration::from_secs(120), &Launch::default()).unwrap();
    let said = replies(&mut reward, &["2+2=4", "2+2=5", "4"]).unwrap();
    let facts: Vec<_> = said.iter().map(|reply| (reply.score, reply.correct)).collect();
    assert_eq!(facts, [(1.0, Some(true)), (0.0, Some(false)), (1.0, Some(true))]);
    assert_eq!(said[1].parts, [("right".to_string(), 0.0), ("long".to_string(), 0.0)]);
    let problem = problem();
    let long = Attempt { problem: &problem, response: "\u{1f642} -4 ", tokens: 201, truncated: true };
    assert_eq!(reward.score(&[long]).unwrap()[0].score, -0.5, "negative scores are rewards too");
}

#[test]
fn requests_that_were_not_made_or_have_a_score_are_reported() {
    let reply = |n: &str| format!(r#"echo "{{\"request\": {n}, \"score\": 1}}""#);
    let twice = |body: &str| {
        slip({
            let mut reward = start(&by_request(body));
            score(&mut reward, &["a", "b"]).and_then(|_| score(&mut reward, &["c", "d"]))
        })
    };
    let shown = |n: &str| format!(r#"{{"request": {n}, "score": 1}}"#);
    let unknown = Slip::UnknownRequest { first: 0, last: 1 };
    assert_eq!(twice(&reply("$((n + 5))")), (shown("5"), unknown.clone()));
    assert_eq!(twice(&reply("-1")), (shown("-1"), unknown.clone()));
    assert_eq!(twice(&reply("\\\"$n\\\"")), (shown("\"0\""), unknown.clone()));
    // A request of the batch, twice; one of the batch before; and one that is not made yet, which is not
    // waited for.
    assert_eq!(twice(&reply("$((n - n % 2))")), (shown("0"), Slip::Doubled(0)));
    assert_eq!(twice(&reply("$((n % 2))")), (shown("0"), Slip::Doubled(0)));
    assert_eq!(twice(&reply("$((n + 1))")), (shown("2"), unknown));
    // A line too many, seen before the next batch at the latest.
    let (line, slip) = twice(&format!("{}; {}", reply("$n"), reply("$n")));
    assert!((line == shown("0") && slip == Slip::Doubled(0)) || slip == Slip::Unasked, "{line} {slip}");
}

#[test]
fn a_request_without_a_score_is_named() {
    let script = by_request(r#"[ $n = 2 ] || echo "{\"request\": $n, \"score\": 1}""#);
    let error = score(&mut start_with(&script, 500, &Launch::default()), &["a", "b", "c", "d"]).unwrap_err();
    assert!(
        matches!(error, ExternalError::TimeLimit { answered: 3, expected: 4, missing: 2, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("request 2"), "{error}");
    let error = score(
        &mut start_with("while read -r x; do [ $x ] && sleep 60; done", 200, &Launch::default()),
        &["a"],
    );
    assert!(
        matches!(error, Err(ExternalError::TimeLimit { answered: 0, expected: 1, missing: 0, .. })),
        "{error:?}"
    );
}

#[test]
fn the_first_reply_decides_how_requests_are_named() {
    let named = r#"echo "{\"request\": $n, \"score\": 1}""#;
    let (line, why) =
        slip(score(&mut start(&by_request(&format!("[ $n = 0 ] && {named} || echo 0.5"))), &["a", "b"]));
    assert_eq!((line.as_str(), why), ("0.5", Slip::NoRequest));
    let (line, why) =
        slip(score(&mut start(&by_request(&format!("[ $n = 0 ] && echo 1 || {named}"))), &["a", "b"]));
    assert_eq!((line.as_str(), why), (r#"{"request": 1, "score": 1}"#, Slip::Request));
}

/// A file that a script writes when it is so far; removed at the end.
struct Mark(PathBuf);

impl Mark {
    fn new(name: &str) -> Mark {
        Mark(std::env::temp_dir().join(format!("qurl-reward-{name}-{}", std::process::id())))
    }

    /// Waits for it, and for what was written before it to be read.
    fn wait(&self) {
        while !self.0.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

#[test]
fn a_stray_line_is_reported_wherever_it_comes() {
    // Before the first batch; and once it was sent, where it moves all scores by one.
    let mark = Mark::new("early");
    let mut reward = start(&format!("echo 0.25; : > {}; while read -r x; do echo 1; done", mark.0.display()));
    mark.wait();
    assert_eq!(slip(score(&mut reward, &["a", "b"])), ("0.25".into(), Slip::Unasked));
    let mut reward = start("read -r x; printf '0.25\\n1\\n'; while read -r x; do echo 1; done");
    assert_eq!(slip(score(&mut reward, &["a", "b"])), ("1".into(), Slip::Extra(2)));
    // The same where every score takes long: the one too many comes as late.
    let mut reward =
        start("read -r x; echo 0.25; sleep 0.3; echo 0.5; while read -r x; do sleep 0.3; echo 0.5; done");
    assert_eq!(slip(score(&mut reward, &["a", "b", "c"])), ("0.5".into(), Slip::Extra(3)));
    // Right after a batch, and between two.
    let mut reward = start("read -r x; echo 1; read -r x; printf '1\\n0.75\\n'; cat > /dev/null");
    assert_eq!(slip(score(&mut reward, &["a", "b"])), ("0.75".into(), Slip::Extra(2)));
    let mark = Mark::new("between");
    let script = "read -r x; echo 1; sleep 1; echo hello";
    let mut reward = start(&format!("{script}; : > {}; while read -r x; do echo 1; done", mark.0.display()));
    assert_eq!(score(&mut reward, &["a"]).unwrap(), [1.0]);
    mark.wait();
    assert_eq!(slip(score(&mut reward, &["b"])), ("hello".into(), Slip::Unasked));
    // Inside of a batch.
    let mut reward = start("while read -r x; do echo 1; echo '# scored'; done");
    assert_eq!(slip(score(&mut reward, &["a", "b"])), ("# scored".into(), Slip::NotAScore));
    let mut reward = start("while read -r x; do printf '1\\n1\\n'; done");
    assert_eq!(slip(score(&mut reward, &["a", "b", "c"])), ("1".into(), Slip::Extra(3)));
    // It is over: no later batch gets scores.
    assert!(matches!(score(&mut reward, &["a"]), Err(ExternalError::Died { answered: 0, .. })));
}

#[test]
fn scores_without_end_are_reported() {
    // Whether they are there before the requests or not: the command never reads one.
    let mark = Mark::new("endless");
    let mut reward = start(&format!("echo 1; : > {}; while :; do echo 1; done", mark.0.display()));
    mark.wait();
    assert_eq!(slip(score(&mut reward, &["a", "b", "c"])), ("1".into(), Slip::Unasked));
    let mut reward = start("read -r x; while :; do echo 1; done");
    assert_eq!(slip(score(&mut reward, &["a", "b", "c"])), ("1".into(), Slip::Extra(3)));
}

#[test]
fn a_line_without_end_is_reported() {
    let mut reward = start("read -r x; while :; do printf 11111111111111111111111111111111; done");
    let (line, why) = slip(score(&mut reward, &["a"]));
    assert_eq!((line, why), ("1".repeat(200), Slip::TooLong));
    // The longest line that is taken.
    let spaces = MAX_LINE - 1;
    let mut reward = start(&format!("while read -r x; do printf '%{spaces}s1\\n' ''; done"));
    assert_eq!(score(&mut reward, &["a"]).unwrap(), [1.0]);
    let mut reward = start(&format!("while read -r x; do printf '%{MAX_LINE}s1\\n' ''; done"));
    assert_eq!(slip(score(&mut reward, &["a"])).1, Slip::TooLong);
}

#[test]
fn half_a_line_is_not_a_score() {
    let mut reward = start("read -r x; printf 0.1");
    assert_eq!(slip(score(&mut reward, &["a"])), ("0.1".into(), Slip::Unfinished));
    let mut reward = start("read -r x; printf '\\377\\n'");
    assert_eq!(slip(score(&mut reward, &["a"])), ("\u{fffd}".into(), Slip::NotText));
}

#[test]
fn nonsense_and_bad_numbers_are_reported() {
    let said = |line: &str| {
        let mut reward = start(&format!("while read -r x; do echo '{line}'; done"));
        let (shown, slip) = slip(score(&mut reward, &["a"]));
        assert_eq!(shown, line);
        slip.to_string()
    };
    let no_score = "expected a number, or an object with one under `score`";
    for line in
        ["hello", "{\"points\": 1}", "\"1\"", "", "{\"request\": 0}", "{\"score\": \"NaN\"}", "[1]", "true"]
    {
        assert_eq!(said(line), no_score, "{line}");
    }
    for (line, why) in [
        ("NaN", "`score` is NaN, expected a finite number"),
        ("-inf", "`score` is -inf, expected a finite number"),
        (r#"{"request": 0, "score": NaN}"#, "`score` is NaN, expected a finite number"),
        (r#"{"score":-Infinity}"#, "`score` is -Infinity, expected a finite number"),
        (
            r#"{"score": 1, "parts": {"a": 2, "style": NaN}}"#,
            "`parts.style` is NaN, expected a finite number",
        ),
        (
            r#"{"score": 1e39}"#,
            "`score` is 1e39, expected a number from -3.4e38 to 3.4e38: rewards are 32-bit floating-point \
             numbers",
        ),
        (r#"{"score": 1e999}"#, "there is a number beyond all floating-point ones, expected a finite number"),
        (
            r#"{"score": 1, "correct": 0.5}"#,
            "expected true or false under `correct`; how good a response is says `score`",
        ),
        (
            r#"{"score": 1, "parts": {"a/b": 2}}"#,
            "expected numbers under `parts`, with names of letters, digits, `_`, `-` and spaces",
        ),
        (
            r#"{"score": 1, "parts": [2]}"#,
            "expected numbers under `parts`, with names of letters, digits, `_`, `-` and spaces",
        ),
    ] {
        assert_eq!(said(line), why, "{line}");
    }
}

/// A score is the reward: any finite number.
#[test]
fn scores_have_any_range() {
    for (line, score_) in [("-3.5", -3.5), ("1e30", 1e30), ("0", 0.0), (r#"{"score": -7}"#, -7.0)] {
        let mut reward = start(&format!("while read -r x; do echo '{line}'; done"));
        assert_eq!(score(&mut reward, &["a", "b"]).unwrap(), [score_, score_]);
    }
}

/// What the first reply says, all say: a mean over some of the responses would be another figure.
#[test]
fn replies_that_differ_in_kind_are_reported() {
    for (first, second, why) in [
        (r#"{"score": 1, "correct": true}"#, r#"{"score": 1}"#, "expected `correct`, as in earlier replies"),
        (r#"{"score": 1}"#, r#"{"score": 1, "correct": 0}"#, "expected no `correct`, as in earlier replies"),
        (
            r#"{"score": 1, "parts": {"b": 1, "a": true}}"#,
            r#"{"score": 1, "parts": {"a": 1}}"#,
            "expected the parts a, b, as in earlier replies",
        ),
        ("1", r#"{"score": 1, "parts": {"a": 1}}"#, "expected no `parts`, as in earlier replies"),
    ] {
        let script = format!("read -r x; echo '{first}'; while read -r x; do echo '{second}'; done");
        let (line, slip) = slip(score(&mut start(&script), &["a", "b"]));
        assert_eq!((line.as_str(), slip.to_string().as_str()), (second, why));
    }
    // In another order they are the same parts.
    let script = r#"read -r x; echo '{"score": 1, "parts": {"a": 1, "b": 2}}'
        while read -r x; do echo '{"score": 1, "parts": {"b": 2, "a": 1}}'; done"#;
    assert_eq!(score(&mut start(script), &["a", "b"]).unwrap(), [1.0, 1.0]);
}

/// A command that repeats what it read.
#[test]
fn requests_have_what_a_judge_needs() {
    let file = std::env::temp_dir().join(format!("qurl-requests-{}", std::process::id()));
    let script = format!("while read -r x; do printf '%s\n' \"$x\" > {}; echo 1; done", file.display());
    score(&mut start(&script), &["say \"4\"\nthen stop"]).unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(file).unwrap();
    let expected = serde_json::json!({
        "request": 0, "id": "p", "prompt": "2+2=", "answer": "4", "response": "say \"4\"\nthen stop",
        "tokens": 7, "truncated": false,
    });
    assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), expected);
}

#[test]
fn large_batches_do_not_block() {
    let long = "x".repeat(2000);
    for script in
        ["while read -r line; do echo 0.5; done", &by_request(r#"echo "{\"request\":$n,\"score\":0.5}""#)]
    {
        let mut reward = start_with(script, 60_000, &Launch::default());
        assert_eq!(score(&mut reward, &vec![long.as_str(); 500]).unwrap(), vec![0.5; 500]);
    }
}

#[test]
fn death_is_reported_with_its_status() {
    let mut reward = start("read -r line; echo 1; exit 3");
    let error = score(&mut reward, &["a", "b"]).unwrap_err();
    assert!(matches!(error, ExternalError::Died { answered: 1, expected: 2, .. }), "{error}");
    assert!(error.to_string().contains('3'), "{error}");
    assert!(matches!(score(&mut reward, &["a"]), Err(ExternalError::Died { .. })));
}

#[test]
fn nothing_waits_once_the_run_is_told_to_end() {
    let launch = Launch::default();
    let mut reward = start_with("exec sleep 600", 600_000, &launch);
    let cancel = launch.cancel.clone();
    let told = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        cancel.store(true, Ordering::SeqCst);
    });
    let began = Instant::now();
    let error = score(&mut reward, &["a"]).unwrap_err();
    assert!(error.is_cancelled() && began.elapsed() < Duration::from_secs(60), "{error}");
    told.join().unwrap();
}

#[test]
fn a_missing_program_is_named() {
    let command = ["no-such-program-here".to_string()];
    for guard in [vec![], vec!["/bin/sh".to_string()]] {
        let launch = Launch { guard, ..Launch::default() };
        let Err(error) = ExternalReward::start(&command, Duration::from_secs(1), &launch) else {
            panic!("started")
        };
        assert!(error.to_string().contains("no-such-program-here"), "{error}");
        let empty = ExternalReward::start(&[], Duration::from_secs(1), &launch);
        assert!(matches!(empty, Err(ExternalError::Empty)));
    }
}

/// Without a guard the process group ends: children that stayed in it do not outlive the command.
#[test]
fn children_end_with_the_command() {
    for end_of_command in ["", "; exit 0"] {
        let file =
            std::env::temp_dir().join(format!("qurl-child-{}{}", std::process::id(), end_of_command.len()));
        let script = format!(
            "sleep 1000 & echo $! > {0}.part; mv {0}.part {0}; read -r x; echo 1{end_of_command}; cat",
            file.display()
        );
        let mut reward = start(&script);
        assert_eq!(score(&mut reward, &["a"]).unwrap(), [1.0]);
        let pid = std::fs::read_to_string(&file).unwrap().trim().to_string();
        std::fs::remove_file(&file).unwrap();
        let alive =
            || std::process::Command::new("kill").args(["-0", &pid]).output().unwrap().status.success();
        assert!(alive());
        drop(reward);
        // Whoever adopted it may take a moment to notice.
        let began = Instant::now();
        while alive()
            && std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
        {
            assert!(began.elapsed() < Duration::from_secs(30), "{pid} outlives its command");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
