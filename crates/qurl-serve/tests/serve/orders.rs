//! Pauses and new weights while requests are in flight.

use super::common::{CONTEXT, Server, engine};
use qurl_rollout::{Request, WeightVersion};
use qurl_serve::ServerOptions;
use qurl_serve::http::runtime;
use qurl_serve::service::{InFlight, LoadError, NewParams, NewWeights, Service};
use serde_json::Value;
use std::io::{Read, Write};
use std::iter::once;
use std::time::Duration;
use tokio::time::timeout;

/// Who waits for the requests in flight is told when they have ended, though nobody says anything more.
#[test]
fn an_order_that_waits_ends_with_the_last_request() {
    let patience = Duration::from_secs(60);
    for in_flight in [InFlight::Wait, InFlight::Keep] {
        let (queue, engine, model) = engine();
        let (service, _running) = Service::start(queue, engine, 8).expect("a thread");
        let request = Request::new(vec![5; 3], CONTEXT - 8);
        let begin =
            || service.submit(once("a".to_string()), (1, 1), once(request.clone()), false).expect("taken");
        runtime(1).expect("a runtime").block_on(async {
            let ticket = begin();
            let version = WeightVersion { version: 5, checksum: 2 };
            let load = service.load(NewWeights { params: NewParams::Host(model.params), version, in_flight });
            let loaded = timeout(patience, load).await.expect("the update ends");
            assert_eq!(loaded.expect("an engine"), Ok(version));
            drop(ticket);
            let ticket = begin();
            let paused = timeout(patience, service.pause(InFlight::Wait)).await;
            paused.expect("the pause begins").expect("an engine");
            // What has come of an order can be seen as soon as it was answered.
            let now = service.snapshot();
            assert!(now.paused && now.running == 0 && now.weights == version, "{now:?}");
            drop(ticket);
            service.resume().await.expect("an engine");
            assert!(!service.snapshot().paused);
        });
    }
}

/// New weights that nobody waits for any longer are not loaded, nor are those that newer ones came after.
#[test]
fn only_the_newest_weights_that_somebody_waits_for_are_loaded() {
    let patience = Duration::from_secs(60);
    let (queue, engine, model) = engine();
    let (service, _running) = Service::start(queue, engine, 8).expect("a thread");
    let load = |version| {
        let version = WeightVersion { version, checksum: 2 };
        let params = NewParams::Host(model.params.clone());
        service.load(NewWeights { params, version, in_flight: InFlight::Wait })
    };
    runtime(1).expect("a runtime").block_on(async {
        // In flight until the ticket is dropped: 64 long samples.
        let request = Request { n: 64, ..Request::new(vec![5; 3], CONTEXT - 8) };
        let mut tickets =
            service.submit(once("a".to_string()), (1, 64), once(request), false).expect("taken");
        (1..=3).for_each(|version| drop(load(version)));
        let (older, newer) = (load(4), load(5));
        let older = timeout(patience, older).await.expect("told while requests are in flight");
        assert_eq!(older.expect("an engine"), Err(LoadError::Superseded));
        assert_eq!(service.snapshot().weights.version, 0);
        tickets.clear();
        let newer = timeout(patience, newer).await.expect("loaded").expect("an engine");
        assert_eq!(newer, Ok(WeightVersion { version: 5, checksum: 2 }));
        assert_eq!(service.snapshot().loads, 1);
    });
}

/// A connection is good for the next request whatever an order does with its body, which may come later than
/// its head.
#[test]
fn orders_read_their_bodies() {
    let server = Server::start(ServerOptions::default());
    for path in [
        "/pause?mode=keep",
        "/resume",
        "/continue_generation",
        "/flush_cache",
        "/reset_prefix_cache",
        "/get_weight_version",
        "/ping",
    ] {
        let mut stream = server.connect();
        let host = format!("Host: {}\r\n", server.address);
        let body = "{\"of\": \"no interest\"}";
        let head = format!("POST {path} HTTP/1.1\r\n{host}Content-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).expect("sent");
        std::thread::sleep(Duration::from_millis(50));
        let last = format!("{body}GET /is_paused HTTP/1.1\r\n{host}Connection: close\r\n\r\n");
        stream.write_all(last.as_bytes()).expect("the connection is open");
        let mut answers = String::new();
        stream.read_to_string(&mut answers).expect("two answers");
        assert_eq!(answers.matches("HTTP/1.1 200").count(), 2, "{path}: {answers}");
    }
    assert_eq!(server.post("/resume", Value::Null, 200)["status"], "resumed");
    assert_eq!(server.get("/is_paused")["is_paused"], false);
}
