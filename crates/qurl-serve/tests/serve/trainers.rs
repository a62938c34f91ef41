//! What trainers send, as their own code writes it, and what they read of the answer.

use super::common::{Server, whole};
use qurl_serve::ServerOptions;
use serde_json::{Value, json};
use std::io::Read;
use std::time::{Duration, Instant};

/// AReaL has 100000000 for no limit of `top_k`, tokenizers without a padding token a null among the stop
/// tokens, and 1e-6 stands for greedy.
#[test]
fn areal_samples() {
    let server = Server::start(ServerOptions::default());
    // `SGLangBackend.build_generation_request` with the defaults of `GenerationHyperparameters`.
    let params = json!({
        "top_p": 1.0, "top_k": 100_000_000, "max_new_tokens": 6, "temperature": 1.0,
        "stop_token_ids": [1, null], "ignore_eos": false, "skip_special_tokens": true,
        "frequency_penalty": 0.0, "sampling_seed": 5,
    });
    let body = json!({
        "input_ids": [5, 6, 7], "image_data": null, "sampling_params": params, "return_logprob": true,
        "stream": false,
    });
    let answer = server.post("/generate", body.clone(), 200);
    let mut all = body;
    all["sampling_params"]["top_k"] = json!(-1);
    assert_eq!(server.post("/generate", all, 200)["output_ids"], answer["output_ids"]);
    // `VLLMBackend.build_generation_request`.
    let body = json!({
        "top_p": 1.0, "top_k": 100_000_000, "max_tokens": 6, "temperature": 1e-6, "stop_token_ids": [1, null],
        "ignore_eos": true, "skip_special_tokens": true, "return_tokens_as_token_ids": true, "logprobs": 0,
        "use_beam_search": false, "stream": false, "prompt": [5, 6, 7], "return_token_ids": true,
    });
    let tiny = server.post("/v1/completions", body.clone(), 200);
    let mut greedy = body;
    greedy["temperature"] = json!(0.0);
    let greedy = server.post("/v1/completions", greedy, 200);
    assert_eq!(tiny["choices"], greedy["choices"]);
    for (key, value) in [("top_k", json!(-2)), ("temperature", json!(-0.5)), ("stop_token_ids", json!([-1]))]
    {
        let mut wrong = json!({"prompt": [5], "max_tokens": 1});
        wrong[key] = value;
        let answer = server.post("/v1/completions", wrong, 400);
        assert!(answer["error"]["message"].as_str().expect("a message").contains(key), "{answer}");
    }
}

/// Who does not say how many tokens he wants gets as many as the context has room for, as prime-rl counts on.
#[test]
fn prime_rl_gets_the_rest_of_the_context() {
    let server = Server::start(ServerOptions::default());
    for absent in [json!({}), json!({"max_tokens": null})] {
        let mut params = absent;
        params["ignore_eos"] = json!(true);
        params["logprobs"] = json!(1);
        let body = json!({"model": "tiny", "token_ids": vec![5; 2000], "sampling_params": params});
        let answer = server.post("/inference/v1/generate", body, 200);
        let choice = &answer["choices"][0];
        assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(48), "{answer}");
        assert_eq!(choice["finish_reason"], "length");
    }
}

/// What prime-rl's dispatcher and the renderer client of verifiers send: every version of the weights has a
/// salt, and nothing is shared with what has another one.
#[test]
fn salts_set_prompts_apart() {
    let server = Server::start(ServerOptions::default());
    let ask = |salt: Value| {
        let params = json!({"max_tokens": 1, "logprobs": 1, "seed": 2});
        let body = json!({
            "model": "tiny", "token_ids": vec![5; 64], "sampling_params": params, "cache_salt": salt,
        });
        let answer = server.post("/inference/v1/generate", body, 200);
        server.get("/liveness"); // whose answer comes after what was counted
        let metrics = server.get("/metrics");
        let shared = metrics.as_str().and_then(|text| text.split("\nqurl_shared_tokens_total ").nth(1));
        let shared = shared.and_then(|rest| rest.lines().next()).expect("the metric").parse::<u64>();
        (answer["choices"].clone(), shared.expect("a number"))
    };
    let (first, none) = ask(json!("3"));
    assert_eq!(none, 0);
    let (other, none) = ask(json!("4"));
    assert_eq!((none, &other), (0, &first), "the same bits, computed again");
    assert_eq!(ask(Value::Null).1, 0);
    let (again, some) = ask(json!("3"));
    assert_eq!(again, first);
    assert!(some > 0, "whole pages of the same salt are shared");
    let body = json!({"prompt": "1", "max_tokens": 1, "cache_salt": "x".repeat(513)});
    assert_eq!(server.post("/v1/completions", body, 400)["error"]["param"], "cache_salt");
}

/// A client without a rule of its own takes a text for ISO 8859-1 where it is not told.
#[test]
fn streams_name_their_encoding() {
    let server = Server::start(ServerOptions::default());
    for path in ["/v1/completions", "/generate"] {
        let body = json!({"prompt": "1", "text": "1", "max_tokens": 1, "stream": true});
        let mut answer = String::new();
        server.begin(path, &body).read_to_string(&mut answer).expect("an answer");
        assert!(answer.to_lowercase().contains("\r\ncontent-type: text/event-stream; charset=utf-8\r\n"));
    }
}

/// slime finds the sizes of an engine that it did not start in `/server_info`, refuses it where it differs
/// from its own options, and aborts until the loads are zero.
#[test]
fn slime_takes_an_external_engine() {
    let server = Server::start(ServerOptions::default());
    for path in ["/server_info", "/get_server_info"] {
        let info = server.get(path);
        assert_eq!(info["enable_memory_saver"], false, "{info}");
        assert!(info["disaggregation_mode"].is_null() && info["encoder_only"].is_null());
        for size in ["tp_size", "pp_size", "dp_size", "ep_size"] {
            assert_eq!(info[size], 1, "{size}");
        }
        assert_eq!((&info["num_gpus"], &info["dtype"]), (&json!(0), &json!("float32")));
        assert_eq!(info["max_running_requests"], 64);
        assert!(info["max_total_tokens"].as_u64().is_some_and(|tokens| tokens >= 2048), "{info}");
    }
    // In the middle of a request the load is one.
    let body = json!({"text": "1", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": true}});
    server.post("/pause?mode=keep", json!({}), 200);
    let open = server.begin("/generate", &body);
    let load = || server.get("/v1/loads?include=core")["loads"][0].clone();
    let requests = |load: &Value| {
        let counts =
            ["num_running_reqs", "num_waiting_reqs"].map(|key| load[key].as_u64().expect("a number"));
        counts.iter().sum::<u64>()
    };
    let until = |wanted: u64| {
        let began = Instant::now();
        while requests(&load()) != wanted {
            assert!(began.elapsed() < Duration::from_secs(60), "{}", load());
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    until(1);
    assert_eq!(server.get("/get_load")[0]["num_reqs"], 1);
    server.post("/abort_request", json!({"abort_all": true}), 200);
    until(0);
    assert_eq!(whole(open).0, 200);
    server.post("/continue_generation", json!({}), 200);
    assert_eq!((&load()["max_running_requests"], &load()["token_usage"]), (&json!(64), &json!(0.0)));
    for wrong in ["include=memory", "format=prometheus", "dp_rank=1"] {
        let (status, answer) = server.ask("GET", &format!("/v1/loads?{wrong}"), "");
        assert_eq!(status, 400, "{answer}");
    }
    // Weights keep their bits under another name.
    let before = server.get("/weight_version");
    let body = json!({"new_version": "step-7", "abort_all_requests": false});
    let named = server.post("/update_weight_version", body, 200);
    assert_eq!((&named["success"], &named["new_version"]), (&json!(true), &json!("step-7")));
    let after = server.get("/get_weight_version");
    assert_eq!(after["weight_version"], "step-7");
    assert_eq!((&after["checksum"], &after["version"]), (&before["checksum"], &before["version"]));
    server.post("/update_weight_version", json!({}), 400);
}

/// Addresses of prime-rl and SkyRL, with and without a slash at the end.
#[test]
fn probes_are_answered() {
    let server = Server::start(ServerOptions { key: Some("k3y".to_string()), ..ServerOptions::default() });
    let key = "Authorization: Bearer k3y\r\n";
    for path in ["/health", "/health/"] {
        assert_eq!(server.ask("GET", path, "").0, 200, "{path}");
    }
    for path in ["/ping", "/ping/", "/liveness", "/get_world_size", "/v1/models/", "/v1/models/tiny/"] {
        assert_eq!(server.ask("GET", path, "").0, 401, "{path}");
        assert_eq!(server.ask("GET", path, key).0, 200, "{path}");
    }
    assert_eq!(server.ask("GET", "/get_world_size", key).1, r#"{"world_size":1}"#);
    assert_eq!(server.ask("GET", "/liveness", key).1, r#"{"status":"ok"}"#);
}

/// Orders in vLLM's words.
#[test]
fn vllm_resets_aborts_and_tokenizes() {
    let server = Server::start(ServerOptions::default());
    assert_eq!(server.post("/reset_prefix_cache", json!({}), 200), json!({"success": true}));
    for all in [json!({"request_ids": []}), json!({}), json!({"request_ids": null})] {
        server.post("/pause?mode=keep", json!({}), 200);
        let open = server.begin("/v1/completions", &json!({"prompt": "1", "max_tokens": 9}));
        let began = Instant::now();
        while server.get("/server_info")["waiting"] != 1 {
            assert!(began.elapsed() < Duration::from_secs(60), "nobody waits");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(server.post("/abort_requests", all, 200), json!({"status": "aborted", "aborted": 1}));
        assert!(whole(open).1.contains("\"finish_reason\":\"abort\""));
        server.post("/resume", json!({}), 200);
    }
    let plain = server.post("/tokenize", json!({"prompt": "1+1"}), 200);
    assert!(plain["token_strs"].is_null(), "{plain}");
    let spelled = server.post("/tokenize", json!({"prompt": "1+1", "return_token_strs": true}), 200);
    assert_eq!((&spelled["tokens"], &spelled["token_strs"]), (&plain["tokens"], &json!(["1", "+", "1"])));
    let messages = json!([{"role": "assistant", "content": "1"}]);
    for path in ["/tokenize", "/v1/chat/completions"] {
        let body = json!({"messages": messages, "continue_final_message": true, "max_tokens": 1});
        assert_eq!(server.post(path, body, 400)["error"]["param"], "continue_final_message", "{path}");
    }
}
