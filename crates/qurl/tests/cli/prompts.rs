//! `qurl generate --prompts` and `qurl chat`: many prompts, in order and in any company, and conversations.

use crate::common::Run;
use crate::models::{TempDir, saved};
use qurl_model::Family;
use serde_json::{Value, json};

/// A model with a chat template that its small alphabet can write.
fn talking() -> TempDir {
    let dir = saved(Family::Qwen2);
    let path = dir.path().join("tokenizer_config.json");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|_| "{}".to_string());
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    config["chat_template"] = json!(
        "{% for m in messages %}{{ m['role'] }} + {{ m['content'] }} = {% endfor %}\
         {% if add_generation_prompt %}assistant + {% endif %}"
    );
    std::fs::write(&path, config.to_string()).expect("written");
    dir
}

fn lines(run: &Run) -> Vec<Value> {
    assert_eq!(run.status, 0, "{}", run.stderr);
    run.stdout.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

fn generate(dir: &TempDir, more: &[&str], stdin: &str) -> Run {
    let base = ["generate", "--model", dir.text(), "--format", "int8", "--max-new", "12", "--seed", "3"];
    crate::common::qurl(&[&base, more].concat(), stdin)
}

#[test]
fn prompts_are_answered_in_order_whatever_their_company() {
    let dir = talking();
    let prompts = ["1+1=", "a long question about numbers 1 2 3 4 5 6 7 8 9", "x"];
    let mut file: String = prompts.iter().map(|p| format!("{}\n", json!({ "prompt": p }))).collect();
    file += "\n"; // blank lines are passed over
    file += &format!(
        "{}\n{}\n",
        json!({"prompt_ids": [5, 6, 7]}),
        json!({"messages": [{"role": "user", "content": "2"}]})
    );
    let all = lines(&generate(&dir, &["--n", "2", "--prompts", "-"], &file));
    assert_eq!(all.len(), 5);
    assert!(
        all.iter().all(|document| document["samples"].as_array().is_some_and(|s| s.len() == 2)),
        "{all:?}"
    );
    assert_eq!(all[3]["samples"][0]["prompt_ids"], json!([5, 6, 7]));
    for batch in ["1", "2"] {
        assert_eq!(
            lines(&generate(&dir, &["--n", "2", "--prompts", "-", "--batch", batch], &file)),
            all,
            "{batch}"
        );
    }
    let path = dir.path().join("prompts.jsonl");
    std::fs::write(&path, &file).expect("written");
    let path = path.display().to_string();
    assert_eq!(lines(&generate(&dir, &["--n", "2", "--prompts", &path], "")), all, "from a file");
    // The first is what the prompt alone gives.
    assert_eq!(generate(&dir, &["--n", "2", "--json", prompts[0]], "").json(), all[0]);
}

#[test]
fn bad_lines_and_files_are_named() {
    let dir = talking();
    let good = json!({"prompt": "1"}).to_string();
    for (bad, texts) in [
        ("{", vec!["standard input, line 2"]),
        (r#"{"prompt":"1","prompt_ids":[1]}"#, vec!["line 2", "expected {\"prompt\""]),
        (r#"{"text":"1"}"#, vec!["line 2", "text"]),
        (r#"{"prompt":""}"#, vec!["line 2", "prompt is empty"]),
        (r#"{"prompt_ids":[99999]}"#, vec!["line 2", "99999", "vocabulary"]),
    ] {
        let run = generate(&dir, &["--prompts", "-"], &format!("{good}\n{bad}\n"));
        run.assert_bad(&texts);
        assert_eq!(run.stdout.lines().count(), 1, "what came before is answered");
    }
    generate(&dir, &["--prompts", "no/such/file"], "").assert_bad(&["--prompts no/such/file"]);
    let bare = saved(Family::Qwen2);
    let messages = json!({"messages": [{"role": "user", "content": "2"}]}).to_string();
    generate(&bare, &["--prompts", "-"], &messages).assert_bad(&["line 1", "chat template"]);
}

#[test]
fn a_conversation_remembers_and_forgets() {
    let dir = talking();
    let chat = |stdin: &str| {
        let args = ["chat", "--model", dir.text(), "--max-new", "6", "--temperature", "0", "--json"];
        lines(&crate::common::qurl(&args, stdin))
    };
    let once = chat("1 + 2\n");
    let said = once[0]["text"].as_str().expect("text");
    let first = json!({"role": "user", "content": "1 + 2"});
    let second = [
        first.clone(),
        json!({"role": "assistant", "content": said}),
        json!({"role": "user", "content": "3"}),
    ];
    let expected = |messages: &[Value]| {
        let base =
            ["generate", "--model", dir.text(), "--max-new", "6", "--temperature", "0", "--prompts", "-"];
        let line = json!({ "messages": messages }).to_string();
        lines(&crate::common::qurl(&base, &line))[0]["samples"][0]["text"].clone()
    };
    let both = chat("1 + 2\n\n3\n/reset\n1 + 2\n");
    assert_eq!(both.len(), 3);
    assert_eq!(both[0]["text"], expected(&[first]));
    assert_eq!(both[1]["text"], expected(&second), "the whole conversation is given");
    assert_eq!(both[2], both[0], "forgotten");
    // On a terminal, or without --json, it is text.
    let text = crate::common::qurl(
        &["chat", "--model", dir.text(), "--max-new", "6", "--temperature", "0"],
        "1 + 2\n",
    );
    assert_eq!(text.stdout, format!("{said}\n"));
    let bare = saved(Family::Qwen2);
    crate::common::qurl(&["chat", "--model", bare.text()], "1\n").assert_bad(&["chat template"]);
}
