//! `qurl serve` over real connections: answers, log-probs beside `qurl score`, new weights, public clients,
//! and callers who mean no good.

mod adapters;
mod asked;
mod broadcast;
mod clients;
mod logprobs;
mod stop;
mod strangers;
mod templates;
mod weights;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
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

    /// Posts a body and leaves the answer to be read, after which the connection is closed.
    fn begin(&self, path: &str, body: &str) -> TcpStream {
        let (address, length) = (self.address, body.len());
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
        let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        let request = format!("{head}Content-Length: {length}\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).expect("sent");
        stream
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
