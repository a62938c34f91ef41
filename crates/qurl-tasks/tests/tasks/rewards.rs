//! Several weighted rewards in one: their sum, their parts, who says what is right, and what is refused. A
//! server is asked over a socket of its own.
#![cfg(unix)]

use qurl_tasks::external::Launch;
use qurl_tasks::reward::{RewardError, RewardRule};
use qurl_tasks::tasks::{Kind, RewardedTask, Synthetic};
use qurl_tasks::{Attempt, Problem, Prompt, RewardValues, Task, Verdict};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Rules as a recipe would write them.
fn rules(list: serde_json::Value) -> Vec<RewardRule> {
    serde_json::from_value(list).expect("rules")
}

fn task_with(list: serde_json::Value, launch: &Launch) -> RewardedTask {
    let rewards = rules(list).iter().map(|rule| rule.start(launch).expect("a reward")).collect();
    RewardedTask::new(Box::new(Synthetic::new(Kind::Addition, 2).expect("a level")), rewards)
}

fn task(list: serde_json::Value) -> RewardedTask {
    task_with(list, &Launch::default())
}

fn problem() -> Problem {
    let prompt = Prompt::Text("2+2=".into());
    Problem { id: "p".into(), prompt, answer: "4".into(), extra: serde_json::Value::Null }
}

/// Judges responses of as many tokens as they have characters.
fn judge(task: &RewardedTask, responses: &[&str]) -> Result<Vec<Verdict>, RewardError> {
    let problem = problem();
    let tokens = |response: &str| response.chars().count();
    let attempt =
        |&response| Attempt { problem: &problem, response, tokens: tokens(response), truncated: false };
    task.judge(&responses.iter().map(attempt).collect::<Vec<_>>())
}

/// A command that writes this line for every request.
fn always(line: &str) -> serde_json::Value {
    serde_json::json!(["sh", "-c", format!("while read -r x; do echo '{line}'; done")])
}

#[test]
fn the_reward_is_the_weighted_sum_of_all_kinds() {
    let task = task(serde_json::json!([
        {"type": "correct", "weight": 2},
        {"type": "format", "weight": 0.5},
        {"type": "grader", "policy": "strict_box", "weight": 0.25},
        {"type": "pattern", "pattern": "(?s)^so.*\\d$", "weight": -1},
        {"type": "tags", "tags": ["a"], "name": "a tag", "weight": 8},
        {"type": "length", "full_at": 0, "zero_at": 20, "weight": 10},
        {"type": "command", "command": always(r#"{"score": -3, "parts": {"style": 0.5}}"#), "weight": 0.1},
    ]));
    let names: Vec<&str> =
        vec!["correct", "format", "grader", "pattern", "a tag", "length", "command", "command/style"];
    let verdicts = judge(&task, &["so\n#### 4", "\\boxed{4}", "<a>5</a>"]).expect("rewards");
    let parts = |verdict: &Verdict| -> Vec<f64> {
        assert_eq!(verdict.parts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), names);
        verdict.parts.iter().map(|(_, value)| *value).collect()
    };
    assert_eq!(parts(&verdicts[0]), [1.0, 1.0, 0.0, 1.0, 0.0, 0.55, -3.0, 0.5]);
    assert_eq!(parts(&verdicts[1]), [0.0, 0.0, 1.0, 0.0, 0.0, 0.55, -3.0, 0.5]);
    assert_eq!(parts(&verdicts[2]), [0.0, 0.0, 0.0, 0.0, 1.0, 0.6, -3.0, 0.5]);
    let sums: Vec<f64> = verdicts.iter().map(|v| v.reward).collect();
    let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
    assert!(near(sums[0], 2.0 + 0.5 - 1.0 + 5.5 - 0.3), "{sums:?}");
    assert!(near(sums[1], 0.25 + 5.5 - 0.3) && near(sums[2], 8.0 + 6.0 - 0.3), "{sums:?}");
    // The task's own rules say what is right, whatever the rewards are.
    assert_eq!(verdicts.iter().map(|v| v.correct).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(verdicts[0].extracted.as_deref(), Some("4"));
}

#[test]
fn a_command_that_knows_says_what_is_right() {
    let line = r#"{"score": -1.5, "correct": true}"#;
    let list = serde_json::json!([
        {"type": "command", "name": "judge", "command": always(line)},
        {"type": "correct", "weight": 10},
        {"type": "length", "full_at": 1, "zero_at": 2, "weight": 0},
    ]);
    let verdict = judge(&task(list), &["wrong by the rules"]).expect("rewards").remove(0);
    assert_eq!((verdict.correct, verdict.reward), (true, 8.5), "the reward of right responses follows it");
    let one = || serde_json::json!({"type": "command", "command": always(line)});
    let (mut first, mut second) = (one(), one());
    (first["name"], second["name"]) = ("first".into(), "second".into());
    let error = judge(&task(serde_json::json!([first, second])), &["x"]).expect_err("two judges").to_string();
    assert_eq!(
        error,
        "the rewards `first` and `second` both reply `correct`; expected one that says what is right"
    );
}

/// `task.type = "command"` has values for the scores 0 and 1.
#[test]
fn values_are_a_straight_line_through_scores() {
    for (line, reward) in [("1", 1.0), ("0", -1.0), ("0.25", -0.5), ("2", 3.0), ("-1", -3.0)] {
        let list = serde_json::json!([{"type": "command", "command": always(line)}]);
        let task = task(list).with_reward(RewardValues { right: 1.0, wrong: -1.0 });
        let verdict = judge(&task, &["#### 4"]).expect("rewards").remove(0);
        assert_eq!((verdict.reward, verdict.correct), (reward, true), "{line}");
    }
}

#[test]
fn what_fails_is_named() {
    let list = |line: &str| {
        serde_json::json!([
            {"type": "correct"},
            {"type": "command", "name": "style", "command": always(line), "weight": 1e6},
        ])
    };
    let error = judge(&task(list(r#"{"score": NaN}"#)), &["x"]).expect_err("NaN").to_string();
    assert!(error.starts_with("reward `style`: the reward command \"sh -c"), "{error}");
    assert!(
        error.ends_with("wrote \"{\\\"score\\\": NaN}\": `score` is NaN, expected a finite number"),
        "{error}"
    );
    let error = judge(&task(list("1e35")), &["x"]).expect_err("too large").to_string();
    assert_eq!(
        error,
        "the reward of a response to problem \"p\" is 1e41, expected a number from -3.4e38 to 3.4e38 \
         (rewards are 32-bit floating-point numbers): 1 * `correct` = 1 * 0e0, 1000000 * `style` = 1000000 * \
         1e35; smaller weights may help"
    );
    let start = |rule: serde_json::Value| {
        let rule: RewardRule = serde_json::from_value(rule).expect("a rule");
        let error = rule.start(&Launch::default()).err().expect("an error").to_string();
        match &rule {
            RewardRule::Command { .. } => {}
            _ => assert_eq!(rule.check().expect_err("an error").to_string(), error),
        }
        error
    };
    let missing = start(serde_json::json!({"type": "command", "command": ["no-such-program"]}));
    assert!(missing.starts_with("reward `command`: could not start the reward command"), "{missing}");
    for (rule, message) in [
        (
            serde_json::json!({"type": "pattern", "pattern": "(a"}),
            "key `pattern` is \"(a\", expected a regular expression: unclosed group",
        ),
        (
            serde_json::json!({"type": "grader", "policy": "strictbox"}),
            "key `policy` is \"strictbox\", expected one of equivalence, strict_box, answer_line, \
             think_split, dapo_normalize, \
             dapo_tail300, bracket_answer, answer_tags, percent_as_ratio, reduced_fraction, gsm8k_strict",
        ),
        (
            serde_json::json!({"type": "grader", "policy": "strict_box", "extract": {"type": "whole"}}),
            "key `policy` is \"strict_box\", expected one that compares only, since `extract` says what \
             counts as the answer: \
             equivalence, dapo_normalize, percent_as_ratio, reduced_fraction, gsm8k_strict",
        ),
        (
            serde_json::json!({"type": "grader", "extract": {"type": "pattern", "pattern": "x"}}),
            "key `extract.pattern` is \"x\", expected one group in round brackets, the answer; there are 0",
        ),
        (
            serde_json::json!({"type": "tags", "tags": ["<a>"]}),
            "key `tags[0]` is \"<a>\", expected a name without angle brackets, such as answer",
        ),
        (
            serde_json::json!({"type": "length", "full_at": 3, "zero_at": 3}),
            "key `zero_at` is 3, expected another number than `full_at` = 3",
        ),
        (
            serde_json::json!({"type": "http", "url": "https://judge/"}),
            "key `url` is \"https://judge/\", expected http://host:port/path, perhaps of a tunnel: https \
             is not spoken",
        ),
    ] {
        assert_eq!(start(rule), message);
    }
}

/// A server that gives one answer after another, and what it was asked.
fn serve(answers: Vec<String>) -> (String, std::thread::JoinHandle<Vec<String>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/score", listener.local_addr().expect("an address"));
    let thread = std::thread::spawn(move || {
        let mut asked = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().expect("a connection");
            let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
            // A whole request ends where the JSON does.
            while !text.ends_with(b"]}") {
                let read = stream.read(&mut buffer).expect("a request");
                text.extend_from_slice(&buffer[..read]);
            }
            asked.push(String::from_utf8(text).expect("text"));
            stream.write_all(answer.as_bytes()).expect("an answer");
        }
        asked
    });
    (url, thread)
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

#[test]
fn a_server_is_asked_once_a_batch() {
    let (url, thread) = serve(vec![
        ok(r#"{"replies": [{"request": 1, "score": -2}, {"request": 0, "score": 0.5}]}"#),
        ok(r#"{"replies": [{"request": 2, "score": 7}]}"#),
        ok(r#"{"replies": []}"#),
    ]);
    let task = task(serde_json::json!([{"type": "http", "url": url}]));
    let rewards =
        |responses: &[&str]| judge(&task, responses).map(|v| v.iter().map(|v| v.reward).collect::<Vec<_>>());
    assert_eq!(rewards(&["a", "b"]).expect("rewards"), [0.5, -2.0]);
    assert_eq!(rewards(&["c"]).expect("rewards"), [7.0]);
    let error = rewards(&["d"]).expect_err("no replies").to_string();
    assert!(error.ends_with("answered \"{\\\"replies\\\": []}\": expected 1 replies, found 0"), "{error}");
    let asked = thread.join().expect("the server");
    assert!(asked[0].starts_with("POST /score HTTP/1.0\r\nHost: 127.0.0.1:"), "{}", asked[0]);
    let body = asked[0].split("\r\n\r\n").nth(1).expect("a body");
    let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
    assert_eq!(body["requests"][1]["response"], "b");
    assert_eq!(body["requests"].as_array().map(Vec::len), Some(2));
}

#[test]
fn a_server_that_fails_is_named() {
    let (url, thread) = serve(vec![
        "HTTP/1.0 500 Oops\r\n\r\nstack".into(),
        ok("hello"),
        ok(r#"{"replies": [{"score": NaN}]}"#),
        ok(r#"{"replies": [{"points": 1}]}"#),
    ]);
    let task = task(serde_json::json!([{"type": "http", "url": url, "name": "far"}]));
    let error = || judge(&task, &["a"]).expect_err("no rewards").to_string();
    let begin = format!("reward `far`: the reward server {url:?}: answered ");
    for end in [
        "\"HTTP/1.0 500 Oops\", expected status 200: \"stack\"",
        "\"hello\": expected an object with a list under `replies`",
        "\"{\\\"replies\\\": [{\\\"score\\\": NaN}]}\": there is NaN, expected a finite number",
        "\"{\\\"points\\\":1}\": expected a number, or an object with one under `score`",
    ] {
        assert_eq!(error(), format!("{begin}{end}"));
    }
    thread.join().expect("the server");
    // Nobody is there any more.
    let gone = error();
    assert!(gone.starts_with("reward `far`: the reward server") && gone.contains("refused"), "{gone}");
}

#[test]
fn a_silent_server_is_not_waited_for_without_end() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let silent = |limit: f64, launch: &Launch| {
        let list = serde_json::json!([{"type": "http", "url": url, "time_limit_s": limit}]);
        judge(&task_with(list, launch), &["a"]).expect_err("no answer")
    };
    let error = silent(0.2, &Launch::default()).to_string();
    assert!(error.ends_with("gave no answer within 0.2 s"), "{error}");
    let launch = Launch::default();
    let cancel = launch.cancel.clone();
    let waiting = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        cancel.store(true, Ordering::SeqCst);
    });
    let began = Instant::now();
    assert!(silent(3000.0, &launch).is_cancelled() && began.elapsed() < Duration::from_secs(60));
    waiting.join().expect("ended");
}

/// The example server, in Python.
#[test]
fn the_example_server_works() {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/reward_server.py");
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rewards.md"));
    let example = std::fs::read_to_string(file).expect("the example");
    assert!(page.expect("a page").contains(&example), "docs/rewards.md shows examples/reward_server.py");
    let started =
        Command::new("python3").args([file, "0"]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let Ok(mut child) = started else {
        println!("skipped: there is no python3");
        return;
    };
    let mut port = String::new();
    let out = child.stdout.take().expect("a pipe");
    BufReader::new(out).read_line(&mut port).expect("a port");
    let url = format!("http://127.0.0.1:{}/", port.trim());
    let verdicts = judge(&task(serde_json::json!([{"type": "http", "url": url}])), &["abc", "é"]);
    child.kill().expect("ended");
    child.wait().expect("a status");
    let rewards: Vec<f64> = verdicts.expect("rewards").iter().map(|v| v.reward).collect();
    assert_eq!(rewards, [-3.0, -1.0]);
}
