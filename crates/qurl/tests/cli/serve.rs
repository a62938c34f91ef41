//! `qurl serve` over real connections: answers, log-probs beside `qurl score`, new weights, public clients,
//! and callers who mean no good.

use crate::models::{TempDir, model, save, saved};
use qurl_model::{Family, params};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server that ends with the test.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Server {
    fn start(model: &str, options: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_qurl"));
        command.args(["serve", "--model", model, "--port", "0", "--device", "cpu", "--json"]);
        command.args(["--served-model-name", "tiny"]).args(options).env("QURL_THREADS", "2");
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("the command starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let told: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            let mut said = String::new();
            _ = child.stderr.take().expect("a pipe").read_to_string(&mut said);
            panic!("no address: {line:?} {said}")
        });
        let address = told["url"].as_str().and_then(|url| url.strip_prefix("http://"));
        Server { child, address: address.expect("an address").parse().expect("an address") }
    }

    /// The whole answer to some bytes, which close the connection.
    fn raw(&self, request: &[u8]) -> String {
        let mut stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
        _ = stream.write_all(request); // a server that refuses may close before it has read all
        let mut answer = Vec::new();
        _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    fn call(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let (address, length) = (self.address, body.len());
        let answer = self.raw(
            format!(
                "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}Content-Length: \
                 {length}\r\n\r\n{body}"
            )
            .as_bytes(),
        );
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, body.to_string())
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.call("GET", path, "", "")
    }

    /// The answer to JSON, which must be of this status.
    fn post(&self, path: &str, body: Value, expected: u16) -> Value {
        let (status, answer) = self.call("POST", path, "", &body.to_string());
        assert_eq!(status, expected, "{path} {body}: {answer}");
        serde_json::from_str(&answer).unwrap_or(Value::String(answer))
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let line = text.lines().find(|line| line.starts_with(&format!("qurl_{name} ")));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{name}: {text}"))
    }

    /// Waits until a metric is as wanted.
    fn until(&self, name: &str, wanted: impl Fn(f64) -> bool) {
        let began = Instant::now();
        while !wanted(self.metric(name)) {
            assert!(began.elapsed() < Duration::from_secs(60), "{name} stays {}", self.metric(name));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// Bits of numbers as a reader in f32 gets them.
fn bits(value: &Value) -> Vec<u32> {
    let numbers = value.as_array().expect("an array").iter();
    numbers.map(|x| x.to_string().parse::<f32>().expect("a number").to_bits()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|x| x.as_u64().expect("an id") as u32).collect()
}

/// The events of a stream.
fn events(body: &str) -> Vec<Value> {
    // Chunks of the transfer are cut anywhere; the lengths between them are no events.
    let joined: String =
        body.split("\r\n").enumerate().filter(|(i, _)| i % 2 == 1).map(|(_, part)| part).collect();
    let data = joined.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    let mut events: Vec<&str> = data.collect();
    assert_eq!(events.pop(), Some("[DONE]"), "{body}");
    events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

/// What `qurl score` says of sequences.
fn scores(model: &str, format: &str, sequences: &[Vec<u32>]) -> Vec<Value> {
    let lines: Vec<String> = sequences.iter().map(|ids| json!({ "ids": ids }).to_string()).collect();
    let run = crate::common::qurl(&["score", "--model", model, "--format", format], &lines.join("\n"));
    assert_eq!(run.status, 0, "{}", run.stderr);
    run.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Alone, among sixty-four that begin alike, in every dialect and as a stream: the same tokens with the same
/// log-probs, which are those that scoring gives.
#[test]
fn log_probs_are_those_of_scoring_alone_and_among_many() {
    let model = saved(Family::Qwen3);
    let server = Server::start(model.text(), &["--format", "int8", "--max-num-seqs", "48"]);
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
    let alone: Vec<_> = (0..64).step_by(9).map(ask).collect();
    let many: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..64).map(|seed| scope.spawn(move || ask(seed))).collect();
        asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
    });
    for (alone, among) in alone.iter().zip(many.iter().step_by(9)) {
        assert_eq!(alone, among);
    }
    let whole: Vec<Vec<u32>> =
        many.iter().map(|(prompt, choice)| [&prompt[..], &ids(&choice["token_ids"])].concat()).collect();
    for ((prompt, choice), scored) in many.iter().zip(scores(model.text(), "int8", &whole)) {
        let tail = Value::Array(scored["logprobs"].as_array().expect("log-probs")[prompt.len()..].to_vec());
        assert_eq!(bits(&choice["logprobs"]["token_logprobs"]), bits(&tail));
    }
    assert!(server.metric("shared_tokens_total") > 0.0, "what they have in common is shared");

    // The other dialects, and the prompt's own log-probs.
    let (prompt, choice) = &many[3];
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
    let scored = scores(model.text(), "int8", std::slice::from_ref(prompt)).remove(0);
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
        (json!({"logit_bias": {"5": 1}}), "logit_bias"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"n": 0}), "n"),
        (json!({"logprobs": 65}), "logprobs"),
        (json!({"response_format": {"type": "json_object"}}), "response_format"),
        (json!({"prompt": [[1, 2], [99999]]}), "99999"),
        (json!({"prompt": [1, -1]}), "prompt"),
        (json!({"prompt": "ÄÖ"}), "prompt"),
        (json!({"prompt": vec![5; 96]}), "maximum context length is 96"),
        (json!({"n": 8}), "n"),
    ] {
        let answer = server.post("/v1/completions", complete(extra.clone()), 400);
        let error = &answer["error"];
        let said = format!("{} {}", error["message"], error["param"]);
        assert!(said.contains(key) && error["type"] == "invalid_request_error", "{extra}: {answer}");
    }
    server.post("/v1/completions", complete(json!({"model": "another"})), 404);
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
        let body = json!({"prompt": "1+1=", "max_tokens": 4});
        let (status, refused) = server.call("POST", "/v1/completions", "", &body.to_string());
        assert_eq!(status, 429, "{refused}");
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

    // A client who leaves takes his request with him.
    server.post("/pause?mode=wait", json!({}), 200);
    let body = json!({"prompt": "1+1=", "max_tokens": 9}).to_string();
    let mut leaving = TcpStream::connect(server.address).expect("connected");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n",
        server.address,
        body.len()
    );
    leaving.write_all((head + &body).as_bytes()).expect("sent");
    server.until("sequences_waiting", |waiting| waiting == 1.0);
    drop(leaving);
    server.until("sequences_waiting", |waiting| waiting == 0.0);
    server.post("/resume", json!({}), 200);
    assert_eq!(ask()["weight_version"], "second");
}

/// Silence, floods, garbage and tricks: others are served, and memory does not grow with them.
#[test]
fn it_keeps_serving_whoever_else_calls() {
    let model = saved(Family::Qwen2);
    let server = Server::start(model.text(), &["--api-key", "secret", "--max-body-mb", "1"]);
    let key = "Authorization: Bearer secret\r\n";
    let works = || {
        let body = json!({"prompt": "1+1=", "max_tokens": 3}).to_string();
        let (status, answer) = server.call("POST", "/v1/completions", key, &body);
        assert_eq!(status, 200, "{answer}");
    };
    let memory = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
    };
    works();
    let before = memory();

    // Some say nothing, some half of their headers, some half of a body. Fewer where files are few.
    let silent: Vec<TcpStream> = (0..1000)
        .map_while(|i| {
            let mut stream = TcpStream::connect(server.address).ok()?;
            match i % 3 {
                0 => {}
                1 => stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: loc").ok()?,
                _ => {
                    let head = format!("Host: {}\r\nContent-Length: 1000000\r\n{key}\r\n{{", server.address);
                    stream.write_all(format!("POST /v1/completions HTTP/1.1\r\n{head}").as_bytes()).ok()?;
                }
            }
            Some(stream)
        })
        .collect();
    assert!(silent.len() > 200, "{} connections", silent.len());
    let (status, _) = server.call("GET", "/health", "", "");
    assert_eq!(status, 200, "beside {} silent callers", silent.len());
    works();
    drop(silent);

    let host = format!("Host: {}\r\n", server.address);
    for (request, statuses) in [
        (format!("GET / HTTP/1.1\r\n{host}X: {}\r\n\r\n", "a".repeat(1 << 20)), &["431"][..]),
        (format!("GET / HTTP/1.1\r\n{host}{}\r\n", "X: y\r\n".repeat(5000)), &["431"]),
        (
            format!("POST /v1/completions HTTP/1.1\r\n{host}{key}Content-Length: 99999999999\r\n\r\n"),
            &["413"],
        ),
        (format!("POST /v1/completions HTTP/1.1\r\n{host}{key}Content-Length: x\r\n\r\n"), &["400"]),
        (format!("GET /../../etc/passwd HTTP/1.1\r\n{host}{key}Connection: close\r\n\r\n"), &["404"]),
        (format!("GET /v1/%2e%2e/%00 HTTP/1.1\r\n{host}{key}Connection: close\r\n\r\n"), &["404"]),
        (
            format!("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n{key}Connection: close\r\n\r\n"),
            &["403"],
        ),
        ("\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}\u{0}\r\n\r\n".to_string(), &["400"]),
        ("nonsense\r\n\r\n".repeat(100), &["400"]),
    ] {
        let answer = server.raw(request.as_bytes());
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(statuses.contains(&status), "{:.80}: {answer:.300}", request);
    }
    let huge = format!("{{\"prompt\": \"{}\"}}", "1".repeat(2 << 20));
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\n{host}{key}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{huge}\r\n0\r\n\r\n",
        huge.len()
    );
    assert!(server.raw(chunked.as_bytes()).starts_with("HTTP/1.1 413"));
    for body in ["{", "[1,2", "null", "\u{0}", &"[".repeat(100_000), "{\"prompt\": 1e999}", "{\"prompt\":{}}"]
    {
        let (status, answer) = server.call("POST", "/v1/completions", key, body);
        assert_eq!(status, 400, "{body:.40}: {answer}");
    }
    for (path, authorization) in [
        ("/v1/models", ""),
        ("/v1/models", "Authorization: Bearer secre\r\n"),
        ("/metrics", "Authorization: Basic secret\r\n"),
        ("/pause", "Authorization: Bearer secretsecret\r\n"),
    ] {
        let (status, answer) = server.call("GET", path, authorization, "");
        assert_eq!(status, 401, "{answer}");
    }
    works();
    if let (Some(before), Some(after)) = (before, memory()) {
        assert!(after < before + (200 << 10), "{before} kB became {after} kB");
    }
}

/// The first Ctrl-C lets answers in progress end; what a command line gets wrong is told.
#[test]
#[cfg(unix)]
fn a_stop_finishes_what_is_in_progress() {
    let model = saved(Family::Qwen2);
    let mut server = Server::start(model.text(), &[]);
    let body =
        json!({"prompt": "1+1=", "max_tokens": 90, "ignore_eos": true, "n": 60, "stream": true}).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n",
        server.address,
        body.len()
    );
    let mut stream = TcpStream::connect(server.address).expect("connected");
    stream.write_all((head + &body).as_bytes()).expect("sent");
    let mut first = [0; 1];
    stream.read_exact(&mut first).expect("it begins");
    let told = Command::new("kill").args(["-INT", &server.child.id().to_string()]).status();
    assert!(told.is_ok_and(|told| told.success()));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("data: [DONE]"), "the answer ends");
    assert!(server.child.wait().expect("it ends").success());

    let run = |options: &[&str]| {
        crate::models::qurl(&[&["serve", "--model", model.text(), "--device", "cpu"], options].concat())
    };
    run(&["--max-model-len", "97"]).assert_bad(&["--max-model-len 97", "96"]);
    run(&["--weights-from", "/nowhere"]).assert_bad(&["--weights-from /nowhere"]);
    run(&["--host", "192.0.2.1"]).assert_bad(&["192.0.2.1", "cannot be listened on"]);
}

/// The real packages, where a Python has them.
#[test]
fn public_clients_are_served_unchanged() {
    let Ok(python) = std::env::var("QURL_PYTHON") else {
        println!("skipped: QURL_PYTHON does not name a Python with openai, guidellm and verifiers");
        return;
    };
    let model = saved(Family::Qwen2);
    let template =
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}";
    std::fs::write(model.path().join("chat_template.jinja"), template).expect("written");
    let server = Server::start(model.text(), &["--api-key", "k3y", "--format", "int8"]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/serve_clients.py");
    let told = |package: &str| -> Option<Value> {
        let there = Command::new(&python).args(["-c", &format!("import {package}")]).output();
        if !there.is_ok_and(|output| output.status.success()) {
            println!("skipped: {python} (QURL_PYTHON) has no {package}");
            return None;
        }
        let url = format!("http://{}", server.address);
        let mut command = Command::new(&python);
        command.arg(&script).args([package, &url, "k3y", model.text()]).env("QURL_TEST_KEY", "k3y");
        let output = command.output().expect("python starts");
        assert!(output.status.success(), "{package}: {}", String::from_utf8_lossy(&output.stderr));
        Some(serde_json::from_slice(&output.stdout).expect("JSON"))
    };
    let check = |prompt: &Value, sample: &Value, logprobs: &Value| {
        let whole = [ids(prompt), ids(sample)].concat();
        let scored = scores(model.text(), "int8", &[whole]).remove(0);
        let tail = &scored["logprobs"].as_array().expect("log-probs")[ids(prompt).len()..];
        assert_eq!(bits(logprobs), bits(&Value::Array(tail.to_vec())));
    };
    if let Some(seen) = told("openai") {
        assert_eq!((&seen["model"], &seen["max_model_len"]), (&json!("tiny"), &json!(96)));
        check(&seen["prompt_ids"], &seen["completion"]["ids"], &seen["completion"]["logprobs"]);
        assert!(seen["many"].as_u64() > Some(10));
    }
    if let Some(seen) = told("guidellm") {
        assert_eq!(seen, json!({"successful": 8, "errored": 0}));
    }
    if let Some(seen) = told("verifiers") {
        for (ids, logprobs) in seen["ids"]
            .as_array()
            .into_iter()
            .flatten()
            .zip(seen["logprobs"].as_array().into_iter().flatten())
        {
            check(&seen["prompt_ids"], ids, logprobs);
        }
    }
}
