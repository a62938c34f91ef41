//! What answers tell: as much as they may, all of it, and the same in every way of asking.

use super::common::Server;
use qurl_serve::ServerOptions;
use serde_json::{Value, json};
use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// What an answer could hold is known before it is computed: too much is refused, whole and as a stream.
#[test]
fn an_answer_that_could_fill_the_memory_is_refused() {
    let server = Server::start(ServerOptions::default());
    let long = "1".repeat(1500);
    let (prompts, ids) = (vec![long.as_str(); 64], vec![vec![5; 1500]; 64]);
    for stream in [false, true] {
        for (path, body) in [
            ("/v1/completions", json!({"prompt": "1", "n": 64, "max_tokens": 2000, "logprobs": 64})),
            ("/v1/completions", json!({"prompt": prompts, "max_tokens": 1, "logprobs": 64, "echo": true})),
            ("/v1/completions", json!({"prompt": long, "n": 1000, "max_tokens": 1, "prompt_logprobs": 0})),
            (
                "/generate",
                json!({
                    "input_ids": ids, "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 64,
                }),
            ),
        ] {
            let mut body = body;
            body["stream"] = json!(stream);
            let answer = server.post(path, body.clone(), 400);
            let message = answer["error"]["message"].as_str().expect("a message");
            let other = stream && (body.get("echo").is_some() || body.get("prompt_logprobs").is_some());
            assert!(message.contains("log-probs") || other, "{path}: {message}");
        }
    }
    let params = json!({"n": 64, "max_tokens": 2000, "logprobs": 64});
    server.post("/inference/v1/generate", json!({"token_ids": [5], "sampling_params": params}), 400);
    // An event of SGLang's streams holds all so far, so there is less room for it.
    let params = json!({"max_new_tokens": 2000, "n": 2});
    let mut body =
        json!({"text": "1", "sampling_params": params, "return_logprob": true, "top_logprobs_num": 64});
    body["stream"] = json!(true);
    server.post("/generate", body, 400);
    assert_eq!(
        server.post("/v1/completions", json!({"prompt": "1", "max_tokens": 2}), 200)["object"],
        "text_completion"
    );
}

/// An answer that is written in pieces says what the events of a stream say.
#[test]
fn a_long_answer_is_whole() {
    let server = Server::start(ServerOptions::default());
    let mut body = json!({
        "prompt": "12+34=", "n": 3, "max_tokens": 200, "seed": 3, "ignore_eos": true, "logprobs": 40,
    });
    let whole = server.post("/v1/completions", body.clone(), 200);
    body["stream"] = json!(true);
    let events = server.events("/v1/completions", body);
    for (index, choice) in whole["choices"].as_array().expect("choices").iter().enumerate() {
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let own = events.iter().map(|event| &event["choices"][0]).filter(|own| own["index"] == index);
            let streamed: Vec<Value> =
                own.flat_map(|own| own["logprobs"][list].as_array().expect("a list").clone()).collect();
            assert_eq!(streamed.len(), 200);
            assert_eq!(choice["logprobs"][list], json!(streamed), "{list} of {index}");
        }
        let best = choice["logprobs"]["top_logprobs"][7].as_object().expect("the best");
        assert!(best.len() == 40 || best.len() == 41, "{best:?}");
        let own = choice["logprobs"]["tokens"][7].as_str().expect("a token");
        assert_eq!(best[own], choice["logprobs"]["token_logprobs"][7]);
    }
    let body = json!({
        "text": "12+34=", "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 40,
        "sampling_params": {"ignore_eos": true},
    });
    let told = server.post("/generate", body, 200);
    let lists = |key: &str| told["meta_info"][key].as_array().map(Vec::len);
    assert_eq!((lists("output_top_logprobs"), lists("input_top_logprobs")), (Some(128), Some(6)));
    assert_eq!(told["meta_info"]["input_top_logprobs"][1].as_array().map(Vec::len), Some(40));
}

/// A stream of SGLang's tells the prompt's log-probs at the latest in its last event, and no token where none
/// is wanted, as the whole answer does.
#[test]
fn streams_tell_what_whole_answers_tell() {
    let server = Server::start(ServerOptions::default());
    let mut body = json!({
        "text": "12+34=", "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2,
        "sampling_params": {"max_new_tokens": 5, "sampling_seed": 4, "n": 2, "ignore_eos": true},
    });
    for new in [5, 0] {
        body["sampling_params"]["max_new_tokens"] = json!(new);
        body["stream"] = json!(false);
        let whole = server.post("/generate", body.clone(), 200);
        body["stream"] = json!(true);
        let events = server.events("/generate", body.clone());
        for (index, whole) in whole.as_array().expect("two samples").iter().enumerate() {
            let last = events.iter().rfind(|event| event["index"] == index).expect("an event");
            for key in ["finish_reason", "completion_tokens", "output_token_logprobs", "input_token_logprobs"]
            {
                assert_eq!(last["meta_info"][key], whole["meta_info"][key], "{key} of {new} tokens");
            }
            assert_eq!(whole["meta_info"]["completion_tokens"], new);
            assert!(last["meta_info"]["input_token_logprobs"][5][0].is_number(), "{last}");
            assert!(last["meta_info"]["input_top_logprobs"][5].is_array(), "{last}");
            assert_eq!((&last["text"], &last["output_ids"]), (&whole["text"], &whole["output_ids"]));
        }
    }
}

/// What cannot be done is refused, not left out.
#[test]
fn nothing_is_silently_left_out() {
    let server = Server::start(ServerOptions::default());
    let refused = |path: &str, body: Value, key: &str| {
        let answer = server.post(path, body, 400);
        assert_eq!(answer["error"]["param"], key, "{answer}");
    };
    let params = json!({"max_tokens": 0});
    refused("/inference/v1/generate", json!({"token_ids": [5], "sampling_params": params}), "max_tokens");
    let body = json!({"prompt": "1", "stream": true, "prompt_logprobs": 1, "max_tokens": 1});
    refused("/v1/completions", body, "prompt_logprobs");
    let two = json!({"text": ["1", "2"], "rid": ["a", "b"], "sampling_params": {"max_new_tokens": 1}});
    let told = server.post("/generate", two.clone(), 200);
    assert_eq!((&told[0]["meta_info"]["id"], &told[1]["meta_info"]["id"]), (&json!("a"), &json!("b")));
    let mut three = two;
    three["rid"] = json!(["a", "b", "c"]);
    refused("/generate", three, "rid");

    let server = Server::of(ServerOptions::default(), false);
    let body = json!({"prompt": [5, 6], "max_tokens": 3, "logprobs": 4, "seed": 1, "ignore_eos": true});
    let told = server.post("/v1/completions", body.clone(), 200);
    let logprobs = &told["choices"][0]["logprobs"];
    let own = logprobs["tokens"][1].as_str().expect("a name");
    let best = logprobs["top_logprobs"][1].as_object().expect("the best");
    assert!(own.starts_with("token_id:") && best.contains_key(own) && best.len() >= 4, "{logprobs}");
    let mut stopped = body;
    stopped["stop"] = json!(["x"]);
    assert_eq!(server.post("/v1/completions", stopped, 400)["error"]["param"], "stop");
}

/// What SkyRL sends with every request; biases; and minimal lengths in both dialects.
#[test]
fn biases_and_minimal_lengths() {
    let server = Server::start(ServerOptions::default());
    let params = json!({
        "min_tokens": 1, "skip_special_tokens": true, "include_stop_str_in_output": true, "max_tokens": 9,
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": null, "seed": 2,
    });
    let body = json!({"token_ids": [5, 6], "sampling_params": params});
    let told = server.post("/inference/v1/generate", body.clone(), 200);
    assert!(told["choices"][0]["logprobs"]["content"][0]["logprob"].is_number(), "{told}");
    // Token 7 would be the first of each.
    for min in [0, 1, 4] {
        let mut body = body.clone();
        let own = json!({"min_tokens": min, "logit_bias": {"7": 100}, "stop_token_ids": [7]});
        let own = own.as_object().expect("an object").clone();
        body["sampling_params"].as_object_mut().expect("an object").extend(own);
        let told = server.post("/inference/v1/generate", body, 200);
        let ids = told["choices"][0]["token_ids"].as_array().expect("ids");
        let at = ids.iter().position(|id| *id == 7);
        assert_eq!((ids.len(), at), (min + 1, Some(min)), "{told}");
        let sampling = json!({
            "max_new_tokens": 9, "min_new_tokens": min, "stop_token_ids": [7], "logit_bias": {"7": 100},
        });
        let told = server.post("/generate", json!({"input_ids": [5, 6], "sampling_params": sampling}), 200);
        assert_eq!(told["meta_info"]["completion_tokens"], min + 1, "{told}");
    }
    let many: serde_json::Map<String, Value> = (0..1025).map(|id| (id.to_string(), json!(1))).collect();
    for biases in [json!({"7": 101}), json!({"7": "1"}), json!({"x": 1}), json!([7]), json!(many)] {
        let body = json!({"prompt": "1", "max_tokens": 2, "logit_bias": biases});
        assert_eq!(server.post("/v1/completions", body, 400)["error"]["param"], "logit_bias");
    }
}

/// While answers in progress end, who comes new is refused by the system, and does not wait.
#[test]
fn a_server_that_stops_is_closed() {
    let server = Server::start(ServerOptions::default());
    let body = json!({"prompt": "1", "n": 60, "max_tokens": 2000, "ignore_eos": true, "stream": true});
    let mut stream = server.begin("/v1/completions", &body);
    stream.read_exact(&mut [0; 1]).expect("it begins");
    server.ask_to_stop();
    let began = Instant::now();
    while TcpStream::connect(server.address).is_ok() {
        assert!(began.elapsed() < Duration::from_secs(20), "callers are still accepted");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(stream);
}
