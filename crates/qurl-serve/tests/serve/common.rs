//! A small random model behind a server, and a caller.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Device, Format};
use qurl_model::compute::{Base, BaseLeaves, Network, NetworkOptions};
use qurl_model::hf::LoadedModel;
use qurl_model::tokenizer::{CharacterSpecials, Tokenizer};
use qurl_model::{Dims, Family, GenerationConfig, ModelConfig, Params, params};
use qurl_rollout::{Engine, EngineOptions, WeightVersion};
use qurl_serve::api::{ModelFacts, Texts};
use qurl_serve::http::Listener;
use qurl_serve::{ServerError, ServerOptions, serve};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Longest sequence.
pub const CONTEXT: usize = 2048;
/// How long an answer is waited for: where nothing is wrong it comes at once.
const PATIENCE: Duration = Duration::from_secs(60);

fn tokenizer() -> Tokenizer {
    let characters = "0123456789abcdefghijklmnopqrstuvwxyz +-=.?";
    Tokenizer::characters(characters, &CharacterSpecials::default()).expect("a tokenizer of characters")
}

/// An engine with its queue, and the model that it computes.
pub type Ready = (<Cpu as Device>::Queue, Engine<Cpu>, LoadedModel);

/// An engine for the tokenizer of characters.
pub fn engine() -> Ready {
    let (config, params) = model(tokenizer().vocab_size(), 32);
    engine_of(config, params)
}

/// A random model of one block.
pub fn model(vocab_size: usize, hidden_size: usize) -> (ModelConfig, Params<Vec<f32>>) {
    let dims =
        Dims { vocab_size, hidden_size, intermediate_size: 64, num_layers: 1, num_heads: 2, num_kv_heads: 1 };
    let mut config = ModelConfig::from_dims(Family::Qwen2, dims).expect("sizes that fit together");
    (config.initializer_range, config.max_position_embeddings) = (0.15, CONTEXT);
    config.tie_word_embeddings = false;
    let params = params::init(&config, 7, false);
    (config, params)
}

/// An engine for a model.
pub fn engine_of(config: ModelConfig, params: Params<Vec<f32>>) -> Ready {
    let level = *Level::available().last().expect("every machine has a level");
    let device = Arc::new(Cpu::new(level, 1));
    let mut queue = device.queue().expect("a queue");
    let options = NetworkOptions::inference(&config, Format::F32);
    let mut leaves = BaseLeaves::new(Base::Host(&params));
    let network = Network::of_leaves(&mut queue, &config, false, &mut leaves, options);
    let options = EngineOptions {
        kv_bytes: 64 << 20,
        max_num_seqs: 64,
        share_prefixes: true,
        ..EngineOptions::default()
    };
    let version = WeightVersion { version: 0, checksum: 1 };
    let engine = Engine::new(device, network.expect("a network"), version, options).expect("an engine");
    let generation = GenerationConfig::default();
    (queue, engine, LoadedModel { config, params, generation, unused_tensors: Vec::new() })
}

/// A server that ends with the test.
pub struct Server {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    serving: Option<JoinHandle<Result<(), ServerError>>>,
}

impl Server {
    /// With a tokenizer of characters.
    pub fn start(options: ServerOptions) -> Server {
        Server::of(options, true)
    }

    /// With a tokenizer or without.
    pub fn of(options: ServerOptions, with_text: bool) -> Server {
        let ready = engine();
        let texts = match with_text {
            true => Texts::new(&ready.2.config, &ready.2.generation, Some(tokenizer()), Vec::new())
                .expect("no template to be wrong"),
            false => Texts::none(),
        };
        Server::run(ready, texts, options)
    }

    /// With an engine and its texts.
    pub fn run((queue, engine, model): Ready, texts: Texts, options: ServerOptions) -> Server {
        let facts = ModelFacts {
            names: vec!["tiny".to_string()],
            dir: None,
            max_model_len: CONTEXT,
            config: model.config,
            format: "f32".to_string(),
            lora: None,
        };
        let listener = Listener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).expect("a port");
        let (address, stop) = (listener.address(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let serving = std::thread::spawn(move || {
            serve(listener, queue, engine, (texts, facts), options, || stopped.load(Ordering::Relaxed))
        });
        Server { address, stop, serving: Some(serving) }
    }

    /// Asks the server to stop, which takes as long as its answers in progress.
    pub fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
        stream
    }

    /// Posts a body and leaves the answer to be read, after which the connection is closed.
    pub fn begin(&self, path: &str, body: &Value) -> TcpStream {
        let (address, body) = (self.address, body.to_string());
        let mut stream = self.connect();
        let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).expect("sent");
        stream
    }

    /// The answer to JSON, which must be of this status; a text where it is no JSON.
    pub fn post(&self, path: &str, body: Value, expected: u16) -> Value {
        let (status, answer) = whole(self.begin(path, &body));
        assert_eq!(status, expected, "{path} {:.200}: {answer:.1000}", body.to_string());
        serde_json::from_str(&answer).unwrap_or(Value::String(answer))
    }

    /// Status and body of the answer to a request without a body, with these lines in its head.
    pub fn ask(&self, method: &str, path: &str, lines: &str) -> (u16, String) {
        let mut stream = self.connect();
        let host = self.address;
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{lines}Connection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("sent");
        whole(stream)
    }

    pub fn get(&self, path: &str) -> Value {
        let (status, answer) = self.ask("GET", path, "");
        assert_eq!(status, 200, "{path}: {answer}");
        serde_json::from_str(&answer).unwrap_or(Value::String(answer))
    }

    /// The events of a stream.
    pub fn events(&self, path: &str, body: Value) -> Vec<Value> {
        let answer = self.post(path, body, 200);
        let answer = answer.as_str().expect("a stream");
        let data = answer.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        let mut events: Vec<&str> = data.collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{answer}");
        events.iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ask_to_stop();
        if let Some(serving) = self.serving.take() {
            _ = serving.join();
        }
    }
}

/// Status and body of an answer that ends with its connection.
pub fn whole(mut stream: TcpStream) -> (u16, String) {
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer in time");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    (status, if is_chunked { unchunked(body) } else { body.to_string() })
}

/// A body without the lengths of its chunks.
fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).expect("the length of a chunk");
        text.push_str(&rest[..length]);
        body = rest[length..].strip_prefix("\r\n").unwrap_or_default();
    }
    text
}
