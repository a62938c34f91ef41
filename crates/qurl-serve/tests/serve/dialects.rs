//! What the dialects have beside plain requests: lists, streams, counts of what was cached.

use super::common::Server;
use qurl_serve::ServerOptions;
use serde_json::{Value, json};

fn without_id(mut answer: Value) -> Value {
    for key in ["id", "weight_version", "cached_tokens"] {
        answer["meta_info"].as_object_mut().expect("an object").remove(key);
    }
    answer
}

/// SGLang takes a list wherever prompts may differ: each is as if it were asked alone.
#[test]
fn sglang_prompts_have_settings_of_their_own() {
    let server = Server::start(ServerOptions::default());
    let first = json!({"max_new_tokens": 3, "sampling_seed": 4, "ignore_eos": true});
    let second = json!({"max_new_tokens": 5, "temperature": 0, "ignore_eos": true, "stop_token_ids": [null]});
    let (one, two) = (json!([5, 6, 7]), json!([8, 9]));
    let both = json!({
        "input_ids": [one, two], "sampling_params": [first, second], "return_logprob": [true, false],
        "logprob_start_len": [0, -1], "top_logprobs_num": [2, 0], "lora_path": [null, null],
        "return_prompt_token_ids": true, "image_data": [null, null], "token_ids_logprob": [null, null],
    });
    let answers = server.post("/generate", both.clone(), 200);
    let alone = json!({
        "input_ids": one, "sampling_params": first, "return_logprob": true, "logprob_start_len": 0,
        "top_logprobs_num": 2, "return_prompt_token_ids": true,
    });
    assert_eq!(without_id(answers[0].clone()), without_id(server.post("/generate", alone, 200)));
    let alone = json!({"input_ids": two, "sampling_params": second, "return_prompt_token_ids": true});
    assert_eq!(without_id(answers[1].clone()), without_id(server.post("/generate", alone, 200)));
    assert_eq!(answers[1]["prompt_token_ids"], two);
    assert!(answers[1]["meta_info"]["output_token_logprobs"].is_null(), "{answers}");
    let mut streamed = both.clone();
    streamed["stream"] = json!(true);
    let events = server.events("/generate", streamed);
    let last = events.iter().rfind(|event| event["index"] == 1).expect("an event");
    assert_eq!(last["output_ids"], answers[1]["output_ids"]);
    for (key, wrong) in [
        ("sampling_params", json!([first])),
        ("sampling_params", json!([first, {"n": 2}])),
        ("sampling_params", json!([first, 3])),
        ("return_logprob", json!([true])),
        ("logprob_start_len", json!([0, 1, 2])),
        ("top_logprobs_num", json!([65, 0])),
    ] {
        let mut body = both.clone();
        body[key] = wrong.clone();
        let fails = wrong != json!([first]);
        let status = if fails { 400 } else { 200 };
        let answer = server.post("/generate", body, status);
        assert!(!fails || answer["error"]["param"] == key, "{key} {wrong}: {answer}");
    }
}

/// What SGLang and vLLM do and this server does not is refused by its name.
#[test]
fn what_is_not_done_is_named() {
    let server = Server::start(ServerOptions::default());
    for (key, value) in [
        ("custom_logit_processor", json!("{}")),
        ("video_data", json!(["data:video/mp4;base64,"])),
        ("return_sampling_mask", json!(true)),
        ("return_entropy", json!(true)),
        ("return_routed_experts", json!(true)),
        ("token_ids_logprob", json!([5])),
        ("lora_path", json!(["adapter"])),
        ("extra_key", json!("tenant")),
    ] {
        let mut body = json!({"text": "1", "sampling_params": {"max_new_tokens": 1}});
        body[key] = value;
        assert_eq!(server.post("/generate", body, 400)["error"]["param"], key);
    }
    let params = json!({"max_new_tokens": 1, "custom_params": {"return_top_p_token_ids": true}});
    let answer = server.post("/generate", json!({"text": "1", "sampling_params": params}), 400);
    assert_eq!(answer["error"]["param"], "return_top_p_token_ids");
    for (key, value) in [("logprob_token_ids", json!([5])), ("thinking_token_budget", json!(9))] {
        let mut params = json!({"max_tokens": 1});
        params[key] = value;
        let body = json!({"token_ids": [5], "sampling_params": params});
        assert_eq!(server.post("/inference/v1/generate", body, 400)["error"]["param"], key);
    }
}

/// vLLM's stream of ids: pieces that make the whole answer.
#[test]
fn vllm_streams_ids() {
    let server = Server::start(ServerOptions::default());
    let params = json!({"max_tokens": 7, "seed": 3, "n": 2, "logprobs": -1, "ignore_eos": true});
    let mut body = json!({
        "model": "tiny", "token_ids": [5, 6, 7], "sampling_params": params, "request_id": "r",
        "stream_options": {"include_usage": true},
    });
    let whole = server.post("/inference/v1/generate", body.clone(), 200);
    assert_eq!((&whole["model"], &whole["request_id"]), (&json!("tiny"), &json!("r")));
    body["stream"] = json!(true);
    let mut events = server.events("/inference/v1/generate", body.clone());
    let last = events.pop().expect("the usage");
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(14)));
    for (index, choice) in whole["choices"].as_array().expect("choices").iter().enumerate() {
        let own = || events.iter().map(|event| &event["choices"][0]).filter(move |own| own["index"] == index);
        let list = |of: fn(&Value) -> &Value| -> Vec<Value> {
            own().flat_map(|own| of(own).as_array().expect("a list").clone()).collect()
        };
        assert_eq!(json!(list(|own| &own["token_ids"])), choice["token_ids"]);
        assert_eq!(json!(list(|own| &own["logprobs"]["content"])), choice["logprobs"]["content"]);
        let reasons: Vec<&Value> = own().map(|own| &own["finish_reason"]).collect();
        assert!(reasons[..6].iter().all(|reason| reason.is_null()) && *reasons[6] == "length", "{reasons:?}");
        let best = choice["logprobs"]["content"][0]["top_logprobs"].as_array().map(Vec::len);
        assert!(best.is_some_and(|best| (40..=64).contains(&best)), "-1 is the whole vocabulary: {best:?}");
    }
    body["sampling_params"]["logprobs"] = json!(-2);
    assert_eq!(server.post("/inference/v1/generate", body, 400)["error"]["param"], "logprobs");
}

/// What of a prompt was there already is told in the words of each dialect, and counted in vLLM's.
#[test]
fn cached_tokens_are_told() {
    let server = Server::start(ServerOptions::default());
    let prompt = vec![7; 100];
    let params = json!({"max_new_tokens": 1});
    let generate = json!({"input_ids": prompt, "sampling_params": params});
    assert_eq!(server.post("/generate", generate.clone(), 200)["meta_info"]["cached_tokens"], 0);
    let cached = server.post("/generate", generate.clone(), 200)["meta_info"]["cached_tokens"].clone();
    let count = cached.as_u64().expect("a number");
    assert!((64..100).contains(&count) && count.is_multiple_of(16), "{count}: whole pages, and not all");
    let mut stream = generate;
    stream["stream"] = json!(true);
    let events = server.events("/generate", stream);
    assert_eq!(events.last().expect("an event")["meta_info"]["cached_tokens"], cached);
    let body = json!({"prompt": prompt, "max_tokens": 1});
    let details = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(details(&server.post("/v1/completions", body, 200)), cached);
    let body = json!({
        "prompt": [prompt, prompt], "max_tokens": 1, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let events = server.events("/v1/completions", body);
    assert_eq!(details(events.last().expect("the usage")), json!(2 * count));
    server.post("/flush_cache", json!({}), 200); // whose answer comes after what was counted
    let text = server.get("/metrics");
    let metric = |name: &str| {
        let line = text.as_str().and_then(|text| text.lines().find(|line| line.starts_with(name)));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).expect("a metric")
    };
    assert_eq!(metric("vllm:prefix_cache_hits_total"), 5.0 * count as f64);
    assert_eq!(metric("vllm:prompt_tokens_total"), 600.0);
    assert_eq!(metric("vllm:num_requests_running"), 0.0);
    assert_eq!(metric("vllm:kv_cache_usage_perc"), 0.0);
    assert_eq!(metric("vllm:time_to_first_token_seconds_count"), 6.0);
}
