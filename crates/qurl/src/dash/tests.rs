//! The server over real connections.

use super::*;
use crate::scratch::Scratch;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

fn write_steps(dir: &Path, steps: u64) {
    let lines: String = (1..=steps).map(|step| format!("{{\"step\":{step},\"reward\":{step}}}\n")).collect();
    std::fs::write(dir.join("metrics.jsonl"), lines).expect("written");
}

/// Serves `dir` while `visit` runs, then stops.
fn serving(dir: &Path, visit: impl FnOnce(SocketAddr)) {
    let follower = Follower::open(dir).expect("a directory");
    let server = Server::bind(IpAddr::from([127, 0, 0, 1]), 0, follower).expect("bound");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| server.serve(&stop));
        visit(server.address());
        stop.store(true, Ordering::Relaxed);
        serving.join().expect("no panic").expect("served");
    });
}

fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("UTF-8");
    answer
}

#[test]
fn fixed_addresses_and_nothing_else() {
    let dir = Scratch::new("dash-routes");
    write_steps(&dir, 2);
    serving(&dir, |address| {
        let get = |path: &str| ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        let page = get("/");
        assert!(page.starts_with("HTTP/1.1 200 OK") && page.contains("id=\"data\""), "{page}");
        assert!(page.contains("Content-Security-Policy: default-src 'none'"));
        assert!(get("/page.js").contains("EventSource") && get("/page.css").contains("color-scheme"));
        for path in [
            "/metrics.jsonl",
            "/../metrics.jsonl",
            "/%2e%2e/metrics.jsonl",
            "//etc/passwd",
            "/page.js/..",
            "metrics.jsonl",
        ] {
            assert!(get(path).starts_with("HTTP/1.1 404"), "{path}");
        }
        let head = ask(address, &format!("HEAD / HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        assert!(head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"));
        assert!(
            ask(address, &format!("DELETE / HTTP/1.1\r\nHost: {address}\r\n\r\n"))
                .starts_with("HTTP/1.1 405")
        );
        assert!(ask(address, "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").starts_with("HTTP/1.1 403"));
    });
}

#[test]
fn events_bring_the_run_then_what_is_new_then_goodbye() {
    let dir = Scratch::new("dash-events");
    write_steps(&dir, 2);
    let mut after = None;
    serving(&dir, |address| {
        let mut stream = TcpStream::connect(address).expect("connected");
        write!(stream, "GET /events HTTP/1.1\r\nHost: {address}\r\n\r\n").expect("sent");
        let mut lines = BufReader::new(stream).lines().map(|line| line.expect("a line"));
        let mut next = |event: &str| -> Value {
            let name = lines.find(|line| line.starts_with("event: ")).expect("an event");
            assert_eq!(name, format!("event: {event}"));
            let data = lines.next().expect("its data");
            serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON")
        };
        assert_eq!(next("run")["series"]["step"], serde_json::json!([1, 2]));
        write_steps(&dir, 3);
        let more = next("more");
        assert_eq!(
            (&more["from"], &more["series"]["step"]),
            (&serde_json::json!(2), &serde_json::json!([3]))
        );
        write_steps(&dir, 1); // resumed from an earlier step
        assert_eq!(next("run")["series"]["step"], serde_json::json!([1]));
        after = Some(lines);
    });
    let mut lines = after.expect("the stream");
    assert!(lines.any(|line| line == "event: bye"), "the stream ends with a goodbye");
}
