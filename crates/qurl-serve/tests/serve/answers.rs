//! What answers tell: as much as they may, all of it, and the same in every way of asking.

use super::common::Server;
use qurl_serve::ServerOptions;
use serde_json::{Value, json};

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
    let body = json!({"text": "12+34=", "sampling_params": {"ignore_eos": true}, "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 40});
    let told = server.post("/generate", body, 200);
    let lists = |key: &str| told["meta_info"][key].as_array().map(Vec::len);
    assert_eq!((lists("output_top_logprobs"), lists("input_top_logprobs")), (Some(128), Some(6)));
    assert_eq!(told["meta_info"]["input_top_logprobs"][1].as_array().map(Vec::len), Some(40));
}
