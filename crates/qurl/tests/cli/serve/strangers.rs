//! Callers who mean no good.

use super::Server;
use crate::models::saved;
use qurl_model::Family;
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;

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
