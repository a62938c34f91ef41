//! Log-probs over HTTP beside those of `qurl score`.

use super::{Server, bits, events, ids, scores};
use crate::models::saved;
use qurl_model::Family;
use serde_json::{Value, json};

/// A prompt, and the one choice of the answer to it.
type Asked = (Vec<u32>, Value);

/// Completions of 64 prompts that begin alike: some of them alone, then all of them at once.
fn alone_and_among_many(server: &Server) -> (Vec<Asked>, Vec<Asked>) {
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 7 % 37).collect();
    let ask = |seed: usize| {
        let prompt = [&prompt[..20 + seed % 20], &[5, seed as u32 % 30 + 4]].concat();
        let body = json!({
            "prompt": prompt, "max_tokens": 12, "seed": seed, "logprobs": 1, "return_token_ids": true,
            "ignore_eos": true,
        });
        let answer = server.post("/v1/completions", body, 200);
        (prompt, answer["choices"][0].clone())
    };
    let alone = (0..64).step_by(9).map(ask).collect();
    // Held until all are there: what they are computed among does not depend on how fast they come.
    server.post("/pause?mode=wait", json!({}), 200);
    let many = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..64).map(|seed| scope.spawn(move || ask(seed))).collect();
        server.until("sequences_waiting", |waiting| waiting == 64.0);
        server.post("/resume", json!({}), 200);
        asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
    });
    (alone, many)
}

/// Whether the log-probs of answers are those that scoring gives for the same ids.
fn assert_scored(model: &str, format: &str, asked: &[Asked]) {
    let whole: Vec<Vec<u32>> =
        asked.iter().map(|(prompt, choice)| [&prompt[..], &ids(&choice["token_ids"])].concat()).collect();
    for ((prompt, choice), scored) in asked.iter().zip(scores(model, format, &whole)) {
        let tail = Value::Array(scored["logprobs"].as_array().expect("log-probs")[prompt.len()..].to_vec());
        assert_eq!(bits(&choice["logprobs"]["token_logprobs"]), bits(&tail), "{format}");
    }
}

/// Alone, and among 64 at once, of which 48 run together and the others take the places of those that end.
#[test]
fn log_probs_are_those_of_scoring_alone_and_among_many() {
    let model = saved(Family::Qwen3);
    for format in ["bf16", "int8", "fp8"] {
        let server = Server::start(model.text(), &["--format", format, "--max-num-seqs", "48"]);
        let (alone, many) = alone_and_among_many(&server);
        let same: Vec<Asked> = many.iter().step_by(9).cloned().collect();
        assert_eq!(alone, same, "{format}");
        assert_scored(model.text(), format, &many);
        assert!(server.metric("shared_tokens_total") > 0.0, "what they have in common is shared");
    }
}

/// In every dialect and as a stream the same tokens with the same log-probs; and those of the prompt.
#[test]
fn log_probs_are_the_same_in_all_dialects() {
    let model = saved(Family::Qwen3);
    let server = Server::start(model.text(), &["--format", "int8"]);
    let prompt: Vec<u32> = (0..23).map(|i| 3 + i * 7 % 37).collect();
    let body = json!({
        "prompt": prompt, "max_tokens": 12, "seed": 3, "logprobs": 1, "return_token_ids": true,
        "ignore_eos": true,
    });
    let choice = &server.post("/v1/completions", body, 200)["choices"][0];
    assert_scored(model.text(), "int8", &[(prompt.clone(), choice.clone())]);
    let expected = bits(&choice["logprobs"]["token_logprobs"]);
    let params =
        json!({"max_tokens": 12, "seed": 3, "logprobs": 2, "prompt_logprobs": 0, "ignore_eos": true});
    let body = json!({"token_ids": prompt, "sampling_params": params});
    let vllm = server.post("/inference/v1/generate", body, 200);
    assert_eq!(vllm["choices"][0]["token_ids"], choice["token_ids"]);
    let content = vllm["choices"][0]["logprobs"]["content"].as_array().expect("tokens");
    assert_eq!(bits(&content.iter().map(|token| token["logprob"].clone()).collect()), expected);
    assert!(content.iter().all(|token| token["top_logprobs"].as_array().map(Vec::len) == Some(2)));
    let params = json!({"max_new_tokens": 12, "sampling_seed": 3, "ignore_eos": true});
    let body = json!({"input_ids": prompt, "sampling_params": params, "return_logprob": true, "logprob_start_len": 0});
    let sglang = server.post("/generate", body, 200);
    let logprobs = |key: &str| -> Value {
        let triples = sglang["meta_info"][key].as_array().expect("log-probs").iter();
        triples.map(|triple| triple[0].clone()).filter(|logp| !logp.is_null()).collect()
    };
    assert_eq!(
        (ids(&sglang["output_ids"]), bits(&logprobs("output_token_logprobs"))),
        (ids(&choice["token_ids"]), expected.clone())
    );
    let scored = scores(model.text(), "int8", std::slice::from_ref(&prompt)).remove(0);
    let scored = Value::Array(scored["logprobs"].as_array().expect("log-probs")[1..].to_vec());
    assert_eq!(bits(&logprobs("input_token_logprobs")), bits(&scored));
    let of_prompt = vllm["prompt_logprobs"].as_array().expect("log-probs")[1..].iter().zip(&prompt[1..]);
    let of_prompt: Value = of_prompt.map(|(place, id)| place[id.to_string()]["logprob"].clone()).collect();
    assert_eq!(bits(&of_prompt), bits(&scored));

    let body = json!({
        "prompt": prompt, "max_tokens": 12, "seed": 3, "logprobs": 1, "return_token_ids": true, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let (_, stream) = server.call("POST", "/v1/completions", "", &body.to_string());
    let mut events = events(&stream);
    let last = events.pop().expect("the usage");
    assert_eq!(last["usage"]["completion_tokens"], 12);
    let streamed: Value = events
        .iter()
        .flat_map(|event| {
            event["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("log-probs").clone()
        })
        .collect();
    assert_eq!(bits(&streamed), expected);
    let text: String =
        events.iter().map(|event| event["choices"][0]["text"].as_str().expect("text")).collect();
    assert_eq!(json!(text), choice["text"]);
}
