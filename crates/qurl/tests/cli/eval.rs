//! `qurl eval` on a tiny random model.

use crate::common::{directory, qurl_in, shared_data, tiny_model};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A model and a data set whose answers random digits hit now and then.
fn setup(name: &str) -> PathBuf {
    let dir = directory(name);
    tiny_model(&dir.join("model"), "0123456789+=; #\n");
    let row = |i: u64| {
        json!({"problem": format!("{i}+{}=", i % 3), "answer": (i % 10).to_string()}).to_string() + "\n"
    };
    std::fs::write(dir.join("sums.jsonl"), (0..12).map(row).collect::<String>()).expect("written");
    dir
}

const BASE: [&str; 10] =
    ["eval", "--model", "model", "--data", "sums.jsonl", "--k", "8", "--max-new", "12", "--json"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    BASE.iter().chain(more).copied().collect()
}

fn records(file: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(file).expect("responses");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn figures(document: &Value) -> (Value, Value) {
    (document["sets"].clone(), document["total"].clone())
}

#[test]
fn figures_follow_from_the_saved_responses() {
    let dir = setup("eval-figures");
    let document = qurl_in(&dir, &with(&["--out", "out"]), "").json();
    let records = records(&dir.join("out/responses.jsonl"));
    assert_eq!(records.len(), 12);
    let correct = |r: &Value| r["correct"].as_f64().expect("a number");
    let samples: Vec<Vec<f64>> = records
        .iter()
        .map(|r| r["samples"].as_array().expect("a list").iter().map(correct).collect())
        .collect();
    assert!(samples.iter().all(|s| s.len() == 8));
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let (greedy, all) = (records.iter().map(|r| correct(&r["greedy"])).collect(), samples.concat());
    assert!(all.contains(&0.0) && all.contains(&1.0), "the test needs right and wrong responses");
    let any = samples.iter().map(|s| f64::from(u8::from(s.contains(&1.0)))).collect();
    let set = &document["sets"][0];
    for (figure, expected) in [("avg_at_1", mean(greedy)), ("avg_at_k", mean(all)), ("pass_at_k", mean(any))]
    {
        let estimate = &set[figure];
        let number = |key: &str| estimate[key].as_f64().unwrap_or_else(|| panic!("{figure}.{key}: {set}"));
        assert!((number("value") - expected).abs() < 1e-9, "{figure}: {estimate} {expected}");
        assert!(number("low") <= expected && expected <= number("high"), "{figure}: {estimate}");
    }
    let majority = set["maj_at_k"]["value"].as_f64().expect("maj@k");
    assert!((0.0..=set["pass_at_k"]["value"].as_f64().expect("pass@k")).contains(&majority));
    assert_eq!((&set["name"], &set["problems"]), (&json!("sums"), &json!(12)));
    assert_eq!(document["total"]["avg_at_k"], set["avg_at_k"]);
    let mean = &document["mean_over_sets"];
    assert_eq!((&mean["sets"], &mean["avg_at_k"]), (&json!(1), &set["avg_at_k"]), "of one set");
    assert_eq!((&document["k"], &document["format"]), (&json!(8), &json!("f32")));
    let saved: Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("out/summary.json")).expect("saved"))
            .expect("JSON");
    assert_eq!(figures(&saved), figures(&document));
}

/// A recipe with a prompt and an answer of its own, and data sets that are its test files.
const RECIPE: &str = r#"
[model]
path = "model"

[task]
type = "dataset"
files = ["train.jsonl"]
test_files = ["sums.jsonl"]
extract = { type = "last-number" }
prompt = { user = "0; {{ problem }}" }
"#;

#[test]
fn prompts_and_answers_are_those_of_the_recipe() {
    let dir = setup("eval-recipe");
    std::fs::write(dir.join("mine.toml"), RECIPE).expect("written");
    let base = ["eval", "--model", "model", "--k", "2", "--max-new", "12", "--json"];
    let run = |more: &[&str]| qurl_in(&dir, &[&base, more].concat(), "");
    let document = run(&["--recipe", "mine.toml", "--out", "own"]).json();
    assert_eq!(document["extract"], json!({"type": "last-number"}), "{document}");
    assert_eq!(document["sets"][0]["problems"], 12, "the recipe's test files: {document}");
    let plain = run(&["--data", "sums.jsonl", "--out", "plain"]).json();
    assert_eq!(plain["extract"], Value::Null);
    let prompts = |out: &str| -> Vec<Value> {
        records(&dir.join(out).join("responses.jsonl")).iter().map(|r| r["prompt"].clone()).collect()
    };
    assert_eq!(prompts("own")[1], json!([{"role": "user", "content": "0; 1+1="}]));
    assert_eq!(prompts("plain")[1], "1+1=");
    // Another rule for answers is another evaluation.
    std::fs::write(dir.join("other.toml"), RECIPE.replace("last-number", "whole")).expect("written");
    run(&["--recipe", "other.toml", "--out", "own", "--resume"]).assert_bad(&["`extract`"]);
    run(&["--recipe", "mine.toml", "--preset", "dapo"]).assert_bad(&["--preset"]);
    let generated = RECIPE.split("[task]").next().expect("a model").to_string()
        + "[task]\ntype = \"synthetic\"\nkind = \"addition\"\nlevel = 1\n";
    std::fs::write(dir.join("generated.toml"), generated).expect("written");
    run(&["--recipe", "generated.toml"]).assert_bad(&[
        "--recipe generated.toml: expected a [task] of the type dataset; generated problems are `qurl eval --task KIND:LEVEL`",
    ]);
    run(&[]).assert_bad(&[
        "nothing to evaluate on: give --data FILE.., --task KIND:LEVEL or a --recipe with test files",
    ]);
}

#[test]
fn an_interrupted_evaluation_continues() {
    let dir = setup("eval-resume");
    let whole = qurl_in(&dir, &with(&["--out", "whole"]), "").json();
    let text = std::fs::read_to_string(dir.join("whole/responses.jsonl")).expect("responses");
    // The last lines first, and half a line at the end: as if interrupted while it was written.
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let torn = [lines[9], lines[2], lines[5], &lines[7][..lines[7].len() / 2]].concat();
    std::fs::create_dir(dir.join("torn")).expect("created");
    std::fs::write(dir.join("torn/responses.jsonl"), torn).expect("written");
    std::fs::copy(dir.join("whole/settings.json"), dir.join("torn/settings.json")).expect("copied");

    let resumed = qurl_in(&dir, &with(&["--out", "torn", "--resume", "--max-num-seqs", "3"]), "");
    assert!(resumed.stderr.contains("3 of 12 problems are done already"), "{}", resumed.stderr);
    assert_eq!(figures(&resumed.json()), figures(&whole));
    assert_eq!(std::fs::read_to_string(dir.join("torn/responses.jsonl")).expect("responses"), text);
    // All done: the figures once more.
    let again = qurl_in(&dir, &with(&["--out", "whole", "--resume"]), "");
    assert_eq!(figures(&again.json()), figures(&whole));
    // Nothing to resume: a new evaluation.
    let fresh = qurl_in(&dir, &with(&["--out", "fresh", "--resume"]), "");
    assert_eq!(figures(&fresh.json()), figures(&whole));

    qurl_in(&dir, &with(&["--out", "whole"]), "").assert_bad(&["--out whole", "--resume"]);
    let other = ["--out", "whole", "--resume"];
    qurl_in(&dir, &with(&[&other[..], &["--seed", "2"]].concat()), "").assert_bad(&[
        "settings.json",
        "`seed` = 1",
        "2",
    ]);
    qurl_in(&dir, &with(&[&other[..], &["--limit", "3"]].concat()), "").assert_bad(&["`problems`"]);
    qurl_in(&dir, &with(&[&other[..], &["--format", "int8"]].concat()), "").assert_bad(&["`format`", "int8"]);
    qurl_in(&dir, &with(&["--resume"]), "").assert_bad(&["--resume needs --out"]);
    std::fs::write(dir.join("torn/responses.jsonl"), format!("{{}}\n{text}")).expect("written");
    qurl_in(&dir, &with(&["--out", "torn", "--resume"]), "").assert_bad(&["responses.jsonl, line 1"]);
}

#[test]
fn generated_problems_sets_and_formats() {
    let dir = setup("eval-tasks");
    let task = ["eval", "--model", "model", "--task", "addition:1", "sorting:1", "--k", "2", "--limit", "5"];
    let table = qurl_in(&dir, &[&task[..], &["--max-new", "8", "--format", "int8"]].concat(), "");
    assert_eq!(table.status, 2, "sorting has characters that the tokenizer lacks: {}", table.stdout);
    assert!(table.stderr.contains("sorting"), "{}", table.stderr);
    assert!(!dir.join("runs").exists(), "nothing is written");

    let mut task = task.to_vec();
    task[5] = "addition:2";
    for format in ["bf16", "int8", "fp8", "int4"] {
        let run = qurl_in(&dir, &[&task[..], &["--max-new", "8", "--format", format]].concat(), "");
        assert_eq!(run.status, 0, "{}", run.stderr);
        for text in
            ["Avg@1", "Avg@2", "pass@2", "maj@2", "addition:1", "addition:2", "total", "mean over 2 sets"]
        {
            assert!(run.stdout.contains(text), "{text}: {}", run.stdout);
        }
    }
    assert!(dir.join("runs/eval-4/responses.jsonl").exists(), "every evaluation has its own directory");
    // Sets of different sizes count alike in their mean, and by their problems in the total.
    let unequal =
        ["eval", "--model", "model", "--data", "sums.jsonl", "few.jsonl", "--k", "8", "--max-new", "12"];
    let text = std::fs::read_to_string(dir.join("sums.jsonl")).expect("problems");
    let few: String = text.split_inclusive('\n').take(3).collect();
    std::fs::write(dir.join("few.jsonl"), few).expect("written");
    let document = qurl_in(&dir, &[&unequal[..], &["--json", "--out", "unequal"]].concat(), "").json();
    let value = |of: &Value| of["avg_at_k"]["value"].as_f64().expect("a number");
    let (sums, few) = (value(&document["sets"][0]), value(&document["sets"][1]));
    assert!(sums != few, "the test needs sets that differ: {sums} {few}");
    assert!((value(&document["mean_over_sets"]) - (sums + few) / 2.0).abs() < 1e-12);
    assert!((value(&document["total"]) - (12.0 * sums + 3.0 * few) / 15.0).abs() < 1e-12);
    // A set's samples do not depend on the other sets.
    let both = records(&dir.join("runs/eval-1/responses.jsonl"));
    let alone =
        ["eval", "--model", "model", "--task", "addition:2", "--k", "2", "--limit", "5", "--max-new", "8"];
    assert_eq!(qurl_in(&dir, &[&alone[..], &["--format", "bf16", "--out", "alone"]].concat(), "").status, 0);
    assert_eq!(records(&dir.join("alone/responses.jsonl")), both[5..]);
}

#[test]
fn files_of_several_data_sources_are_several_sets() {
    let dir = setup("eval-sources");
    let row = |source: &str, i: u32| {
        let prompt = json!([{"role": "user", "content": format!("{i}+{i}=")}]);
        let truth = json!({"ground_truth": (2 * i).to_string()});
        json!({"data_source": source, "prompt": prompt, "reward_model": truth}).to_string()
    };
    let rows = [row("a", 1), row("b", 2), row("a", 3)].join("\n");
    std::fs::write(dir.join("mixed.jsonl"), rows).expect("written");
    let args = [
        "eval",
        "--model",
        "model",
        "--data",
        "mixed.jsonl",
        "--k",
        "1",
        "--max-new",
        "4",
        "--json",
        "--out",
        "o",
    ];
    let run = qurl_in(&dir, &args, "");
    assert!(run.stderr.contains("no chat template"), "{}", run.stderr);
    let sets = run.json()["sets"].clone();
    let names: Vec<(&Value, &Value)> =
        sets.as_array().expect("a list").iter().map(|s| (&s["name"], &s["problems"])).collect();
    assert_eq!(names, [(&json!("mixed:a"), &json!(2)), (&json!("mixed:b"), &json!(1))]);
}

#[test]
fn bad_usage_and_input() {
    let dir = setup("eval-bad");
    std::fs::write(dir.join("empty.jsonl"), "\n").expect("written");
    std::fs::write(dir.join("broken.jsonl"), "{\"problem\":\"1+1=\",\"answer\":\"2\"}\n{\"problem\":\n")
        .expect("written");
    let long = json!({"id": "the-long-one", "problem": "1+".repeat(100), "answer": "1"}).to_string();
    std::fs::write(dir.join("long.jsonl"), long).expect("written");
    let run = |args: &[&str]| qurl_in(&dir, &[&["eval"], args].concat(), "");
    let good = ["--model", "model", "--data", "sums.jsonl"];
    let flag = |more: &[&str]| run(&[&good[..], more].concat());
    run(&["--model", "model", "--data", "nowhere.jsonl"]).assert_bad(&["nowhere.jsonl"]);
    run(&["--model", "model", "--data", "empty.jsonl"]).assert_bad(&["empty.jsonl", "no rows"]);
    run(&["--model", "model", "--data", "broken.jsonl"]).assert_bad(&["broken.jsonl", "line 2"]);
    run(&["--model", "model", "--data", "long.jsonl"]).assert_bad(&["the-long-one", "128"]);
    run(&["--model", "nowhere", "--data", "sums.jsonl"]).assert_bad(&["nowhere"]);
    run(&["--model", "model"]).assert_bad(&["--data", "--task"]);
    run(&["--model", "model", "--task", "addition"]).assert_bad(&["--task addition", "addition:3"]);
    run(&["--model", "model", "--task", "adition:3"]).assert_bad(&["adition", "word_problems"]);
    run(&["--model", "model", "--task", "addition:99"]).assert_bad(&["99", "1 to 12"]);
    run(&["--model", "model", "--data", "sums.jsonl", "sums.jsonl"]).assert_bad(&["\"sums\""]);
    flag(&["--preset", "dapoo"]).assert_bad(&["dapoo", "deepscaler"]);
    flag(&["--policy", "mood"]).assert_bad(&["mood", "strict_box"]);
    flag(&["--k", "0"]).assert_bad(&["--k is 0", "at least 1"]);
    flag(&["--limit", "0"]).assert_bad(&["--limit"]);
    flag(&["--max-new", "0"]).assert_bad(&["--max-new"]);
    flag(&["--temperature=-1"]).assert_bad(&["temperature"]);
    flag(&["--top-p", "1.5"]).assert_bad(&["top_p", "1.5"]);
    flag(&["--format", "int3"]).assert_bad(&["int3"]);
    flag(&["--out", "sums.jsonl"]).assert_bad(&["sums.jsonl"]);
    assert!(!dir.join("runs").exists(), "nothing is written for bad input");
}

#[test]
fn a_published_data_set() {
    let Some(file) = shared_data("aime24/test.jsonl") else { return };
    let dir = directory("eval-aime");
    let text = std::fs::read_to_string(&file).expect("readable");
    let mut alphabet: Vec<char> = (' '..='~').chain(text.chars()).filter(|c| !c.is_control()).collect();
    alphabet.push('\n');
    alphabet.sort_unstable();
    alphabet.dedup();
    tiny_model(&dir.join("model"), &alphabet.into_iter().collect::<String>());
    let config = dir.join("model/config.json");
    let longer = std::fs::read_to_string(&config).expect("a configuration");
    let longer = longer.replace("\"max_position_embeddings\": 128", "\"max_position_embeddings\": 4096");
    std::fs::write(&config, longer).expect("written");
    let file = file.to_str().expect("a path");
    let args = ["eval", "--model", "model", "--data", file, "--preset", "dapo", "--k", "2", "--limit", "3"];
    let document =
        qurl_in(&dir, &[&args[..], &["--max-new", "8", "--out", "o", "--json"]].concat(), "").json();
    assert_eq!((&document["template"], &document["policy"]), (&json!("dapo"), &json!("answer_line")));
    assert!((document["top_p"].as_f64().expect("a number") - 0.7).abs() < 1e-6);
    assert_eq!(
        (&document["sets"][0]["name"], &document["sets"][0]["problems"]),
        (&json!("aime24/test"), &json!(3))
    );
    let prompt = &records(&dir.join("o/responses.jsonl"))[0]["prompt"];
    assert!(prompt.to_string().contains("Answer:"), "{prompt}");
}
