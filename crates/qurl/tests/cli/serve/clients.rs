//! Public packages as their users run them, unchanged: OpenAI's client, a load generator, and the rollout
//! client of an RL framework.

use super::{Server, bits, ids, scores};
use crate::common::python::python;
use crate::models::{TempDir, saved};
use qurl_model::Family;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const KEY: &str = "k3y";

/// A server with a chat template.
fn served() -> (TempDir, Server) {
    let model = saved(Family::Qwen2);
    let template =
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("written");
    let server = Server::start(model.text(), &["--api-key", KEY, "--format", "int8"]);
    (model, server)
}

/// What a package sees of the server, told by our script.
fn seen(python: &str, package: &str, server: &Server, model: &TempDir) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/serve_clients.py");
    let url = format!("http://{}", server.address);
    let mut command = Command::new(python);
    command.arg(script).args([package, &url, KEY, model.text()]).env("QURL_TEST_KEY", KEY);
    let output = command.output().expect("python starts");
    assert!(output.status.success(), "{package}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Log-probs of samples of a prompt, [[ids], [log-probs]] each, are those of scoring, to the bit.
fn assert_scored(model: &TempDir, prompt: &Value, samples: &Value) {
    let samples = samples.as_array().expect("samples");
    let whole: Vec<Vec<u32>> =
        samples.iter().map(|sample| [ids(prompt), ids(&sample["ids"])].concat()).collect();
    for (sample, scored) in samples.iter().zip(scores(model.text(), "int8", &whole)) {
        let tail = &scored["logprobs"].as_array().expect("log-probs")[ids(prompt).len()..];
        assert_eq!(bits(&sample["logprobs"]), bits(&Value::Array(tail.to_vec())));
    }
}

#[test]
fn openai_is_served_unchanged() {
    let Some(python) = python(&["openai"]) else { return };
    let (model, server) = served();
    let seen = seen(&python, "openai", &server, &model);
    assert_eq!((&seen["model"], &seen["max_model_len"]), (&json!("tiny"), &json!(96)));
    for (prompt, samples, count) in [
        (&seen["completion_prompt"], &seen["completions"], 1),
        (&seen["completion_prompt"], &seen["many_completions"], 64),
        (&seen["chat_prompt"], &seen["chats"], 2),
        (&seen["chat_prompt"], &seen["many_chats"], 64),
    ] {
        assert_eq!(samples.as_array().map(Vec::len), Some(count));
        assert_scored(&model, prompt, samples);
    }
    assert_eq!(seen["many_completions"][3], seen["completions"][0], "one of many is as alone");
    assert_eq!(seen["many_chats"][5], seen["chats"][0], "one of many is as alone");
}

#[test]
fn guidellm_is_served_unchanged() {
    let Some(python) = python(&["guidellm"]) else { return };
    let (model, server) = served();
    let seen = seen(&python, "guidellm", &server, &model);
    assert_eq!(seen, json!({"successful": 8, "errored": 0}));
}

#[test]
fn verifiers_is_served_unchanged() {
    let Some(python) = python(&["verifiers.v1.clients"]) else { return };
    let (model, server) = served();
    let seen = seen(&python, "verifiers", &server, &model);
    assert_eq!(seen["samples"].as_array().map(Vec::len), Some(8));
    assert_scored(&model, &seen["prompt"], &seen["samples"]);
}
