//! A run with rewards, prompts and answers of one's own, from the recipe to metrics, TensorBoard and report.
#![cfg(unix)]

use super::data_sets::{RECIPE, write_sums};
use super::support::place;
use crate::common::{qurl_in, tiny_model};
use qurl_train::runlog::EventReader;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Says of every response what it is, and notes what it was asked. Nothing is ever right by it.
const JUDGE: &str = r#"while read -r line; do
    printf '%s\n' "$line" >> asked.jsonl
    n=${line#*\"request\":}
    echo "{\"request\": ${n%%[,\}]*}, \"score\": -2.5, \"correct\": false, \"parts\": {\"style\": 0.75}}"
done
"#;

/// What a recipe on files says besides: keys of `[task]`, then sections.
const EXTRACT: &str = r#"extract = { type = "pattern", pattern = '(\d+)$' }
"#;
const SECTIONS: &str = r#"
[task.prompt]
user = "{{ problem }}"
chat = false
examples = [{ problem = "1+1=", response = "2" }]

[[task.rewards]]
type = "length"
full_at = 8
zero_at = 0
weight = 0.5

[[task.rewards]]
type = "pattern"
name = "a digit"
pattern = '\d'
weight = 0

[[task.rewards]]
type = "command"
name = "judge"
command = ["sh", "judge.sh"]
weight = 2.0

[data]
"#;

fn prepared(name: &str) -> PathBuf {
    let dir = place(name);
    tiny_model(&dir.join("model"), "0123456789+=\n");
    let recipe = RECIPE
        .replace("[task]\n", &format!("[task]\n{EXTRACT}"))
        .replace("[data]\n", SECTIONS)
        .replace("max_prompt_length = 8", "max_prompt_length = 24");
    std::fs::write(dir.join("data.toml"), recipe).expect("written");
    std::fs::write(dir.join("judge.sh"), JUDGE).expect("written");
    write_sums(&dir.join("train.jsonl"), 10, 12, false);
    write_sums(&dir.join("test.jsonl"), 30, 5, false);
    dir
}

fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).expect("a file");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn rewards_have_names_from_the_recipe_to_the_report() {
    let dir = prepared("runs-own");
    let done = qurl_in(&dir, &["train", "data.toml", "--run", "run", "--set", "run.rollout_log_freq=1"], "");
    assert_eq!(done.status, 0, "{}", done.stderr);
    let records = json_lines(&dir.join("run/metrics.jsonl"));
    assert_eq!(records.len(), 2);
    let number = |value: &Value| value.as_f64().expect("a number");
    for record in &records {
        let parts = record["reward_parts"].as_object().expect("parts");
        let names: Vec<&str> = parts.keys().map(String::as_str).collect();
        assert_eq!(names, ["a digit", "judge", "judge/style", "length"], "{record}");
        assert_eq!((number(&parts["judge"]), number(&parts["judge/style"])), (-2.5, 0.75));
        let length = number(&record["response_length"]);
        assert!((number(&parts["length"]) - length / 8.0).abs() < 1e-9, "{record}");
        // The weighted sum, and it is negative; the command says that nothing is right.
        let sum = 0.5 * number(&parts["length"]) + 2.0 * -2.5;
        assert!((number(&record["reward"]) - sum).abs() < 1e-9, "{record}");
        assert_eq!(number(&record["accuracy"]), 0.0);
    }
    let last = &records[1];
    assert_eq!(number(&last["test_accuracy"]), 0.0);
    assert!(number(&last["test_reward"]) < -4.0, "{last}");

    // What the command reads: the prompt with its example, fields, tokens.
    let asked = json_lines(&dir.join("asked.jsonl"));
    let prompt = asked[0]["prompt"].as_str().expect("text");
    assert!(prompt.starts_with("1+1=2\n\n3") && prompt.ends_with("+1="), "{prompt:?}");
    assert!(asked.iter().all(|line| line["tokens"].is_u64() && line["truncated"].is_boolean()));

    let events = std::fs::read(dir.join("run/tensorboard/events.out.tfevents.qurl")).expect("events");
    let tags: Vec<String> =
        EventReader::new(&events).flat_map(|event| event.scalars.into_iter().map(|(tag, _)| tag)).collect();
    for tag in
        ["reward_parts/judge", "reward_parts/judge/style", "reward_parts/length", "test_reward", "accuracy"]
    {
        assert!(tags.iter().any(|found| found == tag), "{tag} of {tags:?}");
    }

    let sample = &json_lines(&dir.join("run/rollouts/step-000001.jsonl"))[0];
    assert_eq!(
        (&sample["correct"], &sample["reward_parts"]["judge/style"]),
        (&Value::Bool(false), &0.75.into())
    );

    let report = qurl_in(&dir, &["report", "run", "--out", "report.html"], "");
    assert_eq!(report.status, 0, "{}", report.stderr);
    let page = std::fs::read_to_string(dir.join("report.html")).expect("a page");
    for what in [
        "\"reward_parts.judge/style\":[0.75,0.75]",
        "\"reward_parts.judge\":[-2.5,-2.5]",
        "\"test_reward\"",
        "Parts of the reward",
    ] {
        assert!(page.contains(what), "{what}");
    }
    // The line that people read has both, each by its name.
    assert!(done.stderr.contains("accuracy 0.0%") && done.stderr.contains("reward -4."), "{}", done.stderr);
}

#[test]
fn a_score_that_is_no_number_ends_the_run_by_name() {
    let dir = prepared("runs-own-nan");
    let script = "while read -r line; do echo '{\"score\": NaN}'; done";
    std::fs::write(dir.join("judge.sh"), script).expect("written");
    let done = qurl_in(&dir, &["train", "data.toml", "--run", "run"], "");
    assert_eq!(done.status, 1, "{}", done.stderr);
    let why = "reward `judge`: the reward command \"sh judge.sh\" wrote \"{\\\"score\\\": NaN}\": `score` \
     is NaN, expected a \
               finite number";
    assert!(done.stderr.contains(why), "{}", done.stderr);
    // A program that is not there is said by the dry run, with its key.
    let missing = "task.rewards=[{ type = \"command\", command = [\"no-such-program\"] }]";
    let checked = qurl_in(&dir, &["recipe", "check", "data.toml", "--set", missing], "");
    let why = "key `task.rewards[0].command` names the program \"no-such-program\", which is not there";
    let said = format!("{}{}", checked.stdout, checked.stderr);
    assert!(checked.status == 0 && said.contains(why), "{said}");
}
