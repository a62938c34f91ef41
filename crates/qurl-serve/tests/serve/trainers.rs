//! What trainers send, as their own code writes it, and what they read of the answer.

use super::common::Server;
use qurl_serve::ServerOptions;
use serde_json::json;
use std::io::Read;

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
    for (key, value) in [("top_k", json!(-2)), ("temperature", json!(-0.5)), ("stop_token_ids", json!([-1]))] {
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
