//! New weights, pauses, aborts, a full queue, clients who leave.

use super::{Server, bits, events, ids};
use crate::models::{TempDir, model, save, saved};
use qurl_model::{Family, params};
use serde_json::json;
use std::io::Read;

/// Requests keep their weights; new ones get the new; pauses hold; a full queue refuses.
#[test]
fn weights_change_between_requests_and_queues_have_an_end() {
    let model_dir = saved(Family::Qwen2);
    let (config, _) = model(Family::Qwen2);
    let root = TempDir::new();
    let other = root.path().join("other");
    std::fs::create_dir(&other).expect("made");
    save(&other, &config, &params::init(&config, 8, false));
    let server = Server::start(
        model_dir.text(),
        &["--format", "int8", "--max-num-seqs", "2", "--max-queue", "1", "--weights-from", root.text()],
    );
    let ask = || {
        let body = json!({"prompt": "1+1=", "max_tokens": 60, "seed": 4, "ignore_eos": true});
        server.post("/v1/completions", body, 200)
    };
    let before = ask();
    assert_eq!(ask()["choices"], before["choices"]);

    // Frozen in the middle, an update lets it end with the weights that it began with.
    server.post("/pause?mode=wait", json!({}), 200);
    std::thread::scope(|scope| {
        let held: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
        server.until("sequences_waiting", |waiting| waiting == 3.0);
        let body = json!({"prompt": "1+1=", "max_tokens": 4}).to_string();
        let mut refused = String::new();
        server.begin("/v1/completions", &body).read_to_string(&mut refused).expect("an answer");
        assert!(
            refused.starts_with("HTTP/1.1 429") && refused.contains("\r\nRetry-After: 1\r\n"),
            "{refused}"
        );
        assert!(refused.contains("\"type\":\"rate_limit_error\""), "{refused}");
        let dir = json!({"weight_dir": other, "version": "second"});
        let updated = server.post("/update_weights", dir, 200);
        assert_eq!(updated["weight_version"], "second");
        server.post("/resume", json!({}), 200);
        for held in held {
            let after = held.join().expect("an answer");
            assert_eq!(after["weight_version"], "second");
            assert_ne!(after["choices"], before["choices"]);
        }
    });
    let expected = crate::models::qurl(&[
        "generate",
        "--model",
        other.to_str().expect("UTF-8"),
        "--format",
        "int8",
        "--max-new",
        "20",
        "--seed",
        "4",
        "--json",
        "1+1=",
    ])
    .json();
    let body = json!({"prompt": "1+1=", "max_tokens": 20, "seed": 4, "return_token_ids": true});
    let served = server.post("/v1/completions", body, 200);
    assert_eq!(served["choices"][0]["token_ids"], expected["samples"][0]["ids"]);

    // What is no such model, or lies elsewhere, changes nothing.
    let (status, told) = server.call(
        "POST",
        "/update_weights_from_disk",
        "",
        &json!({"model_path": model_dir.text()}).to_string(),
    );
    assert!(status == 400 && told.contains("\"success\":false"), "{told}");
    for (dir, status) in [("/", 403), ("/nowhere", 403), (root.text(), 400)] {
        server.post("/update_weights", json!({"weight_dir": dir}), status);
    }
    let climbing = format!("{}/other/../..", root.text());
    server.post("/update_weights", json!({"weight_dir": climbing}), 403);
    assert_eq!(server.post("/get_weight_version", json!({}), 200)["weight_version"], "second");

    // An abort gives what there is.
    server.post("/pause?mode=keep", json!({}), 200);
    std::thread::scope(|scope| {
        let held = scope.spawn(|| {
            let body = json!({"prompt": "1+1=", "max_tokens": 9, "request_id": "mine"});
            server.post("/v1/completions", body, 200)
        });
        server.until("sequences_waiting", |waiting| waiting == 1.0);
        assert_eq!(server.post("/abort_request", json!({"rid": "another"}), 200)["aborted"], 0);
        assert_eq!(server.post("/abort_request", json!({"rid": "mine"}), 200)["aborted"], 1);
        let answer = held.join().expect("an answer");
        assert_eq!(answer["choices"][0]["finish_reason"], "abort");
    });
    server.post("/continue_generation", json!({}), 200);

    // In flight or not by the time of the update, what there is of it was made with the old weights.
    let body = json!({
        "prompt": "1+1=", "max_tokens": 90, "n": 3, "seed": 9, "ignore_eos": true, "logprobs": 0,
        "return_token_ids": true,
    });
    let whole = server.post("/v1/completions", body.clone(), 200);
    let mut asked = body;
    asked["stream"] = json!(true);
    let mut stream = server.begin("/v1/completions", &asked.to_string());
    let mut first = [0; 1];
    stream.read_exact(&mut first).expect("it begins");
    let update = json!({"weight_dir": other, "version": 3, "mode": "abort"});
    assert_eq!(server.post("/update_weights", update, 200)["weight_version"], "3");
    let mut told = String::new();
    stream.read_to_string(&mut told).expect("the rest");
    let (_, told) = told.split_once("\r\n\r\n").expect("a body");
    let mut samples = vec![(Vec::new(), Vec::new(), String::new()); 3];
    for event in events(told) {
        assert_eq!(event["weight_version"], "second");
        let choice = &event["choices"][0];
        let (own, logprobs, reason) = &mut samples[choice["index"].as_u64().expect("a number") as usize];
        own.extend(ids(&choice["token_ids"]));
        logprobs.extend(bits(&choice["logprobs"]["token_logprobs"]));
        *reason = choice["finish_reason"].as_str().unwrap_or_default().to_string();
    }
    for ((own, logprobs, reason), whole) in samples.iter().zip(whole["choices"].as_array().expect("choices"))
    {
        let all = (ids(&whole["token_ids"]), bits(&whole["logprobs"]["token_logprobs"]));
        assert!(all.0.starts_with(own) && all.1.starts_with(logprobs), "{own:?} of {all:?}");
        let expected = if own.len() == 90 { "length" } else { "abort" };
        assert_eq!(reason, expected, "{} tokens", own.len());
    }
    assert_eq!(ask()["weight_version"], "3");

    // A client who leaves takes his request with him.
    server.post("/pause?mode=wait", json!({}), 200);
    let leaving = server.begin("/v1/completions", &json!({"prompt": "1+1=", "max_tokens": 9}).to_string());
    server.until("sequences_waiting", |waiting| waiting == 1.0);
    drop(leaving);
    server.until("sequences_waiting", |waiting| waiting == 0.0);
    server.post("/resume", json!({}), 200);
    assert_eq!(ask()["weight_version"], "3");
}
