//! The server over real connections.

use super::*;
use crate::scratch::Scratch;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;

fn write_steps(dir: &Path, steps: u64) {
    let lines: String = (1..=steps).map(|step| format!("{{\"step\":{step},\"reward\":{step}}}\n")).collect();
    std::fs::write(dir.join("metrics.jsonl"), lines).expect("written");
}

/// Serves a run or a comparison in `dir` while `visit` runs, then stops.
fn serving(dir: &Path, visit: impl FnOnce(SocketAddr)) {
    let server = Server::bind(IpAddr::from([127, 0, 0, 1]), 0, vec![dir.to_path_buf()]).expect("bound");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (address, stop) = (server.address(), &stop);
        let serving = scope.spawn(move || server.serve(stop));
        visit(address);
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
fn what_is_not_a_request_is_refused() {
    let dir = Scratch::new("dash-refused");
    write_steps(&dir, 2);
    serving(&dir, |address| {
        let host = format!("Host: {address}\r\n");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n".to_string(), "400"),
            (format!("GET / HTTP/1.1\r\n{host}Host: evil\r\n\r\n"), "400"),
            ("GET /\r\n\r\n".to_string(), "400"),
            ("nonsense\r\n\r\n".to_string(), "400"),
            (format!("GET / HTTP/1.1\r\n{host}X: {}\r\n\r\n", "a".repeat(20_000)), "431"),
            (format!("GET / HTTP/1.1\r\n{}{host}\r\n", "X: y\r\n".repeat(100)), "431"),
            (format!("POST / HTTP/1.1\r\n{host}\r\n"), "405"),
        ] {
            let answer = ask(address, &request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request:.60}: {answer}");
        }
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
        assert_eq!(next("runs")[0]["series"]["step"], serde_json::json!([1, 2]));
        write_steps(&dir, 3);
        let more = next("more");
        let found = (&more["run"], &more["from"], &more["series"]["step"]);
        assert_eq!(found, (&json!(0), &json!(2), &json!([3])));
        write_steps(&dir, 1); // resumed from an earlier step
        assert_eq!(next("runs")[0]["series"]["step"], serde_json::json!([1]));
        after = Some(lines);
    });
    let mut lines = after.expect("the stream");
    assert!(lines.any(|line| line == "event: bye"), "the stream ends with a goodbye");
}

#[test]
fn runs_that_begin_later_are_found() {
    let dir = Scratch::new("dash-later");
    let place = dir.join("later");
    let mut board = Board::open(vec![place.clone(), dir.join("never")]).expect("waits");
    assert_eq!(board.runs().len(), 2);
    assert!(!board.look(), "nothing yet");
    let run = |seed: u64| place.join(format!("seed-{seed}/full"));
    let begin = |seed: u64| {
        std::fs::create_dir_all(run(seed)).expect("made");
        let recipe = format!("[trainer]\nseed = {seed}\n");
        std::fs::write(run(seed).join("recipe.toml"), recipe).expect("written");
        write_steps(&run(seed), seed);
    };
    begin(1);
    let before = board.sent();
    assert!(board.look() && board.sent().edition > before.edition, "it turned out to be a comparison");
    let labels = |board: &Board| board.runs().iter().map(|run| run.label.clone()).collect::<Vec<_>>();
    assert_eq!(labels(&board), ["full", "never"]);
    begin(2);
    assert!(board.look());
    assert_eq!(labels(&board), ["full, seed 1", "full, seed 2", "never"]);
    let before = board.sent();
    write_steps(&run(2), 5);
    assert!(board.look());
    let news = board.since(&before);
    assert_eq!((news.len(), &news[0]["run"], &news[0]["series"]["step"]), (1, &json!(1), &json!([3, 4, 5])));
}

#[test]
fn what_is_no_run_is_refused() {
    let dir = Scratch::new("dash-no-run");
    std::fs::write(dir.join("notes.txt"), "").expect("written");
    let error = Board::open(vec![dir.to_path_buf()]).err().expect("no run");
    assert!(error.is::<crate::input::BadInput>() && error.to_string().contains("holds notes.txt"), "{error}");
}
