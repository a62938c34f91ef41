//! Thoughts and calls of tools, written by a model that says what it was made to say.

use super::common::{Server, engine_of, model};
use qurl_model::tokenizer::{BytePattern, Tokenizer};
use qurl_model::{GenerationConfig, MlpParams};
use qurl_serve::ServerOptions;
use qurl_serve::api::{Parsers, ReasoningParser, Texts, ToolParser};
use serde_json::{Map, Value, json};
use std::process::Command;

/// What the model says after a prompt that ends with the first of these, a token a piece: each piece once,
/// since what follows depends on the last token alone.
const SAID: [(&str, &[&str]); 3] = [
    (
        "=",
        &[
            "<think>\nI",
            " must add",
            ".\n</think>",
            "\n\n",
            "<tool_",
            "call>\n{\"name\": \"ad",
            "d\", \"arg",
            "uments\": {\"b\": 2, \"a\": \"z",
            "wölf\"}}\n</tool",
            "_call>",
            "\n<tool_call>{\"name\": \"now\"}</tool_call>",
        ],
    ),
    (">", &["so\n</thi", "nk>", "Twe", "lve."]),
    ("?", &["<tool_call>", "twelve", "</tool_call>"]),
];

/// The letter of a byte in vocabularies of bytes.
fn letter(byte: u8) -> char {
    let visible = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let place = (0..byte).filter(|before| !visible(*before)).count() as u32;
    if visible(byte) { char::from(byte) } else { char::from_u32(256 + place).expect("a letter") }
}

fn spelled(text: &str) -> String {
    text.bytes().map(letter).collect()
}

/// A server with a model whose every token has one that follows it. Its prompts are the last message, and
/// whether there are tools.
fn reciter(parsers: Parsers) -> Server {
    let bytes = (0..=255).map(|byte| letter(byte).to_string());
    let pieces = SAID.iter().flat_map(|(_, pieces)| pieces.iter().map(|piece| spelled(piece)));
    let vocab: Map<String, Value> = bytes.chain(pieces).zip((0..).map(Value::from)).collect();
    let size = vocab.len();
    let merges = "#version: 0.2\n";
    let pattern = BytePattern::Qwen2;
    let plain = Tokenizer::byte_level_bpe(&Value::Object(vocab).to_string(), merges, pattern, &[])
        .expect("a tokenizer");
    let mut files = plain.files().to_vec();
    let template = "{% if tools %}tools {% endif %}{{ messages[-1].content }}";
    files.push(("chat_template.jinja".to_string(), template.as_bytes().to_vec()));
    let tokenizer = Tokenizer::from_files(files, "reciter").expect("a tokenizer");

    let end = 0u32;
    let (mut config, mut params) = model(size, 64);
    config.eos_token_ids = vec![end];
    // Only the embedding is left: what a token is followed by has its direction in the head.
    let block = &mut params.layers[0];
    block.o.fill(0.0);
    let MlpParams::Dense(mlp) = &mut block.mlp;
    mlp.down.fill(0.0);
    let mut follows = vec![end; size];
    let mut piece = 256;
    for (before, pieces) in SAID {
        let mut last = plain.encode(before, false).expect("a byte")[0];
        for _ in pieces {
            follows[last as usize] = piece;
            (last, piece) = (piece, piece + 1);
        }
    }
    let d = config.hidden_size;
    let head = params.head.as_mut().expect("a head of its own");
    head.fill(0.0);
    for (token, next) in follows.iter().enumerate().filter(|(token, next)| **next != end || *token >= 256) {
        let from = &params.embed[token * d..][..d];
        head[*next as usize * d..][..d].iter_mut().zip(from).for_each(|(to, from)| *to += from);
    }
    let (queue, engine, mut model) = engine_of(config, params);
    model.generation = GenerationConfig { eos_token_ids: vec![end], ..GenerationConfig::default() };
    let texts =
        Texts::new(&model.config, &model.generation, Some(tokenizer), Vec::new()).expect("a template");
    let options = ServerOptions { parsers, ..ServerOptions::default() };
    Server::run((queue, engine, model), texts, options)
}

fn both() -> Parsers {
    Parsers { tools: Some(ToolParser::Hermes), reasoning: Some(ReasoningParser::Think) }
}

fn asked(ends_with: &str, tools: bool) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": format!("10+2{ends_with}")}], "temperature": 0,
        "max_tokens": 40,
    });
    if tools {
        let parameters = json!({"type": "object", "properties": {"a": {}, "b": {}}});
        body["tools"] = json!([{"type": "function", "function": {"name": "add", "parameters": parameters}}]);
    }
    body
}

/// Calls and thoughts of a whole answer, and of a stream whose tokens cut the tags in pieces.
#[test]
fn calls_and_thoughts_are_told_apart() {
    let server = reciter(both());
    let answer = server.post("/v1/chat/completions", asked("=", true), 200);
    let (choice, message) = (&answer["choices"][0], &answer["choices"][0]["message"]);
    assert_eq!(
        (&choice["finish_reason"], &message["content"]),
        (&json!("tool_calls"), &Value::Null),
        "{answer}"
    );
    assert_eq!(message["reasoning_content"], "\nI must add.\n");
    let calls = message["tool_calls"].as_array().expect("calls");
    let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
    let add = json!({"name": "add", "arguments": "{\"b\":2,\"a\":\"zwölf\"}"});
    let now = json!({"name": "now", "arguments": "{}"});
    assert_eq!(functions, [&add, &now]);
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let mut streamed = asked("=", true);
    streamed["stream"] = json!(true);
    let events = server.events("/v1/chat/completions", streamed);
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let of = |key: &str| deltas.iter().filter_map(|delta| delta[key].as_str()).collect::<String>();
    assert_eq!((of("reasoning_content"), of("content")), ("\nI must add.\n".to_string(), String::new()));
    let told: Vec<&Value> =
        deltas.iter().flat_map(|delta| delta["tool_calls"].as_array()).flatten().collect();
    let told: Vec<(&Value, &Value)> = told.iter().map(|call| (&call["index"], &call["function"])).collect();
    assert_eq!(told, [(&json!(0), &add), (&json!(1), &now)]);
    assert_eq!(events.last().expect("the end")["choices"][0]["finish_reason"], "tool_calls");
}

/// A prompt that opens the thought, a call that is none, a request without tools, a server without parsers.
#[test]
fn what_is_no_call_is_told_as_it_is() {
    let server = reciter(both());
    let content = |server: &Server, body: Value| {
        let answer = server.post("/v1/chat/completions", body, 200);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let message = &answer["choices"][0]["message"];
        assert!(message.get("tool_calls").is_none(), "{answer}");
        (message["reasoning_content"].clone(), message["content"].clone())
    };
    assert_eq!(content(&server, asked("?", true)), (Value::Null, json!("<tool_call>twelve</tool_call>")));
    let (_, untold) = content(&server, asked("=", false));
    assert!(untold.as_str().is_some_and(|text| text.starts_with("\n\n<tool_call>")), "{untold}");
    assert_eq!(content(&server, asked("<think>", false)), (json!("so\n"), json!("Twelve.")));
    let plain = reciter(Parsers::default());
    let (none, all) = content(&plain, asked("=", true));
    assert!(none.is_null() && all.as_str().is_some_and(|text| text.starts_with("<think>\nI must")), "{all}");
}

/// The `openai` package reads calls and thoughts, whole and as a stream.
#[test]
fn openai_reads_calls() {
    let python = std::env::var("QURL_PYTHON").unwrap_or_else(|_| "python3".to_string());
    let there = Command::new(&python).args(["-c", "import openai"]).output();
    if !there.is_ok_and(|output| output.status.success()) {
        println!("skipped: {python} has no openai");
        return;
    }
    const SCRIPT: &str = r#"
import json, sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
body = json.loads(sys.argv[2])
message = client.chat.completions.create(model="tiny", **body).choices[0].message
names = [call.function.name for call in message.tool_calls]
arguments = json.loads(message.tool_calls[0].function.arguments)
assert (names, arguments) == (["add", "now"], {"b": 2, "a": "zw\u00f6lf"}), message
assert message.content is None and message.reasoning_content == "\nI must add.\n", message
told, reason = {}, None
for chunk in client.chat.completions.create(model="tiny", stream=True, **body):
    reason = chunk.choices[0].finish_reason or reason
    for call in chunk.choices[0].delta.tool_calls or []:
        own = told.setdefault(call.index, [call.function.name, ""])
        own[1] += call.function.arguments
assert reason == "tool_calls" and [own[0] for own in told.values()] == names, told
assert json.loads(told[0][1]) == arguments, told
# The next turn, as a client that has called the tool sends it.
turn = body["messages"] + [message.model_dump(exclude_none=True)]
turn += [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12?"}]
answer = client.chat.completions.create(model="tiny", **{**body, "messages": turn})
assert answer.choices[0].message.content == "<tool_call>twelve</tool_call>", answer
"#;
    let server = reciter(both());
    let url = format!("http://{}/v1", server.address);
    let output = Command::new(&python).args(["-c", SCRIPT, &url, &asked("=", true).to_string()]).output();
    let output = output.expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
