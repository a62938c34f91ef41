//! What requests ask for: chats with n, stop strings, templates; what cannot be done is refused by name.

use super::{Server, events};
use crate::models::saved;
use qurl_model::Family;
use serde_json::{Value, json};

/// Chats with n, stop strings and templates; what cannot be done is refused by name.
#[test]
fn what_is_asked_for_is_done_or_refused() {
    let model = saved(Family::Qwen2);
    let template = "{% for m in messages %}{{ m.role[:1] }}={{ m.content }} {% endfor %}{% if tools %}t{{ \
                    tools|length }} {% endif %}{% if add_generation_prompt %}a={% endif %}";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("written");
    let server = Server::start(model.text(), &["--max-queue", "3", "--max-num-seqs", "4"]);
    let (status, models) = server.get("/v1/models");
    let models: Value = serde_json::from_str(&models).expect("JSON");
    assert_eq!(
        (status, &models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (200, &json!("tiny"), &json!(96))
    );

    let parts = json!([{"type": "text", "text": "what is"}]);
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "user", "content": parts}]);
    let mut chat =
        json!({"messages": messages, "n": 3, "seed": 1, "max_tokens": 20, "return_token_ids": true});
    let plain = server.post("/v1/chat/completions", chat.clone(), 200);
    let choices = plain["choices"].as_array().expect("choices");
    assert_eq!((choices.len(), &plain["weight_version"]), (3, &json!("0")));
    assert_eq!(
        server.post("/detokenize", json!({"tokens": plain["prompt_token_ids"]}), 200)["prompt"],
        "u=hi u=what is a="
    );
    chat["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    let tools = server.post("/v1/chat/completions", chat.clone(), 200);
    assert_eq!(
        server.post("/detokenize", json!({"tokens": tools["prompt_token_ids"]}), 200)["prompt"],
        "u=hi u=what is t1 a="
    );

    // What the request's own keys say is not replaced.
    for reserved in ["messages", "tools", "documents"] {
        let kwargs = json!({reserved: []});
        let body = json!({"messages": messages, "max_tokens": 1, "chat_template_kwargs": kwargs});
        let answer = server.post("/v1/chat/completions", body, 400);
        assert_eq!(answer["error"]["param"], "chat_template_kwargs", "{answer}");
    }
    let body = json!({"messages": messages, "max_tokens": 1, "stream": true, "prompt_logprobs": 1});
    let answer = server.post("/v1/chat/completions", body, 400);
    assert_eq!(answer["error"]["param"], "prompt_logprobs", "{answer}");

    // A stop string ends a sample before it; the tokens are those that it has without.
    let text = choices[0]["message"]["content"].as_str().expect("text").to_string();
    let stop: String = text.chars().skip(4).take(2).collect();
    chat["tools"] = json!(null);
    chat["stop"] = json!([stop]);
    for stream in [false, true] {
        chat["stream"] = json!(stream);
        let (_, body) = server.call("POST", "/v1/chat/completions", "", &chat.to_string());
        let (stopped, reason) = match stream {
            false => {
                let body: Value = serde_json::from_str(&body).expect("JSON");
                let choice = &body["choices"][0];
                (
                    choice["message"]["content"].as_str().expect("text").to_string(),
                    choice["stop_reason"].clone(),
                )
            }
            true => {
                let events = events(&body);
                let own = |event: &&Value| event["choices"][0]["index"] == 0;
                let of = |event: &Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_string);
                let text = events.iter().filter(own).filter_map(of).collect();
                let last = events.iter().rfind(own).expect("events");
                (text, last["choices"][0]["stop_reason"].clone())
            }
        };
        assert_eq!(
            (&stopped, &reason),
            (&text[..text.find(&stop).expect("it is there")].to_string(), &json!(stop))
        );
    }

    let complete = |extra: Value| {
        let mut body = json!({"prompt": "12+34=", "max_tokens": 4});
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        body
    };
    for (extra, key) in [
        (json!({"presence_penalty": 0.5}), "presence_penalty"),
        (json!({"repetition_penalty": 1.1}), "repetition_penalty"),
        (json!({"logit_bias": {"five": 1}}), "logit_bias"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias"),
        (json!({"logit_bias": {"99999": 1}}), "99999"),
        (json!({"min_tokens": 5}), "min_tokens"),
        (json!({"min_new_tokens": 1}), "min_new_tokens"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"n": 0}), "n"),
        (json!({"logprobs": 65}), "logprobs"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"prompt": [[1, 2], [99999]]}), "99999"),
        (json!({"prompt": [1, -1]}), "prompt"),
        (json!({"prompt": "ÄÖ"}), "prompt"),
        (json!({"prompt": "1".repeat(5000)}), "the text has 5000"),
        (json!({"unheard_of": vec![0; 1 << 20]}), "more than 1048576 values"),
        (json!({"prompt": vec![5; 96]}), "maximum context length is 96"),
        (json!({"n": 8}), "n"),
    ] {
        let answer = server.post("/v1/completions", complete(extra.clone()), 400);
        let error = &answer["error"];
        let said = format!("{} {}", error["message"], error["param"]);
        assert!(said.contains(key) && error["type"] == "invalid_request_error", "{extra}: {answer}");
    }
    server.post("/v1/completions", complete(json!({"model": "another"})), 404);
    // However much is asked for, it is refused before memory is taken for it, as a stream, too.
    for stream in [false, true] {
        for (path, many) in [
            ("/v1/completions", complete(json!({"n": 1u64 << 60, "stream": stream}))),
            ("/v1/completions", complete(json!({"prompt": vec![[5]; 100_000], "stream": stream}))),
            ("/v1/completions", complete(json!({"prompt": vec![[5]; 9], "n": u64::MAX, "stream": stream}))),
            ("/v1/completions", complete(json!({"stop": vec!["1"; 65], "stream": stream}))),
            ("/v1/completions", complete(json!({"stop": "1".repeat(5000), "stream": stream}))),
            ("/v1/completions", complete(json!({"stop_token_ids": vec![5; 1025], "stream": stream}))),
            ("/v1/chat/completions", json!({"messages": messages, "n": 1u64 << 60, "stream": stream})),
            ("/generate", json!({"text": "1", "sampling_params": {"n": 1u64 << 60}, "stream": stream})),
        ] {
            let answer = server.post(path, many, 400);
            assert!(answer["error"]["message"].is_string(), "{path}: {answer}");
        }
    }
    for harmless in [
        json!({"user": "me", "presence_penalty": 0, "min_tokens": 0, "logit_bias": {}, "top_k": -1}),
        json!({"response_format": {"type": "text"}, "suffix": "", "unheard_of": [1]}),
    ] {
        server.post("/v1/completions", complete(harmless), 200);
    }
    let echo =
        server.post("/v1/completions", complete(json!({"echo": true, "logprobs": 1, "max_tokens": 0})), 200);
    let (choice, logprobs) = (&echo["choices"][0], &echo["choices"][0]["logprobs"]["token_logprobs"]);
    assert_eq!(
        (&choice["text"], logprobs.as_array().map(Vec::len), &logprobs[0]),
        (&json!("12+34="), Some(6), &Value::Null)
    );
}
