//! Files that nobody vouches for, as a user meets them: an error that names the file, and nothing else on
//! standard error. What makes each of them hostile is tested where it is read.
#![cfg(unix)]

use crate::models::{TempDir, qurl, saved};
use qurl_model::Family;
use std::path::Path;
use std::process::Command;

fn fifo(path: &Path) {
    let _ = std::fs::remove_file(path);
    assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo").success());
}

#[test]
fn a_fifo_is_no_file_and_nothing_waits_for_it() {
    for name in ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"] {
        let model = saved(Family::Qwen2);
        fifo(&model.path().join(name));
        let refused = qurl(&["generate", "--model", model.text(), "1+1="]);
        refused.assert_bad(&[name, "a FIFO, expected a regular file"]);
    }
    let (model, place) = (saved(Family::Qwen2), TempDir::new());
    let data = place.path().join("data.jsonl");
    fifo(&data);
    let data = data.to_str().expect("UTF-8");
    qurl(&["eval", "--model", model.text(), "--data", data]).assert_bad(&["data.jsonl", "a FIFO"]);
    qurl(&["generate", "--model", model.text(), "--prompts", data]).assert_bad(&["data.jsonl", "a FIFO"]);
    qurl(&["study", data]).assert_bad(&["data.jsonl", "a FIFO"]);
    fifo(&place.path().join("adapter_config.json"));
    let adapter = place.text();
    qurl(&["generate", "--model", model.text(), "--adapter", adapter, "1+1="])
        .assert_bad(&["adapter_config.json", "a FIFO, expected a regular file"]);
    qurl(&["train", data]).assert_bad(&["data.jsonl", "a FIFO"]);
    qurl(&["train", "/dev/zero"]).assert_bad(&["/dev/zero", "a device"]);
}

#[test]
fn a_tokenizer_that_makes_its_reader_panic() {
    let model = saved(Family::Qwen2);
    let path = model.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).expect("a tokenizer");
    let mut json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    json["normalizer"] = serde_json::json!({"type": "Precompiled", "precompiled_charsmap": "é"});
    std::fs::write(&path, json.to_string()).expect("written");
    let refused = qurl(&["generate", "--model", model.text(), "1+1="]);
    refused.assert_bad(&["tokenizer.json", "something that its reader fails on"]);
}

/// What files say reaches a terminal as text: no colours, no titles, no turned writing.
#[test]
fn nothing_of_a_file_steers_a_terminal() {
    let model = saved(Family::Qwen2);
    let template = "{{ raise_exception('\u{1b}[31mHI\u{7}\u{202e}') }}";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("written");
    let refused = qurl(&["generate", "--model", model.text(), "--chat", "1+1="]);
    refused.assert_bad(&["chat_template.jinja", "\\u{1b}[31mHI\\u{7}\\u{202e}"]);
    let place = TempDir::new();
    let data = place.path().join("rows.jsonl");
    std::fs::write(&data, "{\"problem\":\"1\",\"ans\\u001b[31mwer\":3}\n").expect("written");
    let data = data.to_str().expect("UTF-8");
    let refused = qurl(&["eval", "--model", model.text(), "--data", data]);
    refused.assert_bad(&["rows.jsonl"]);
    assert!(!refused.stderr.contains(|c: char| c.is_control() && c != '\n'), "{:?}", refused.stderr);
}
