//! Requests to a server that stands on the project's HTTP stack: whatever comes, it answers or hangs up, and
//! answers the next caller.

use super::{Run, Target};
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use qurl_serve::http::guard::{check_host, check_origin};
use qurl_serve::http::{BodyBudget, Limits, Listener, runtime};
use std::error::Error;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// How long a caller waits.
const WAIT: Duration = Duration::from_secs(60);
const GOOD: &[u8] = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
const LIMITS: Limits = Limits {
    connections: 16,
    head_bytes: 8 << 10,
    headers: 32,
    head_time: Duration::from_secs(20),
    write_time: Duration::from_secs(20),
    keep_alive: true,
    goodbye: Duration::from_secs(1),
};

pub const HTTP: Target = Target {
    name: "http",
    about: "bytes sent to a server on the HTTP stack",
    words: &[
        "GET ",
        "POST ",
        "HEAD ",
        " HTTP/1.1\r\n",
        " HTTP/1.0\r\n",
        " HTTP/2.0\r\n",
        "\r\n\r\n",
        "\r\n",
        "Host: localhost",
        "Host: evil.example",
        "Content-Length: ",
        "Content-Length: 18446744073709551616\r\n",
        "Transfer-Encoding: chunked\r\n",
        "0\r\n\r\n",
        "ffffffffffffffff\r\n",
        "Expect: 100-continue\r\n",
        "Connection: close\r\n",
        "Origin: http://evil.example",
        "Upgrade: h2c\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "/json",
        "/health",
        "/%00",
        "/../",
        "\u{0}",
        "Cookie: a\r\n",
        "; a=b",
    ],
    made: |_| Ok(Vec::new()),
    open: |_| {
        let runtime = runtime(1)?;
        let listener = Listener::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), 0)?;
        let address = listener.address();
        let budget = BodyBudget::new(1 << 16, 1 << 18, Duration::from_secs(20));
        let routes = Router::new()
            .route("/health", get(|| async { "ok\n" }))
            .route("/json", post(json))
            .with_state(Arc::new((budget, address)));
        runtime.spawn(async move { listener.serve(routes, LIMITS, std::future::pending()).await });
        let run: Run = Box::new(move |input| {
            let _alive = &runtime;
            let answer = call(address, input.bytes("request"), true);
            let health = call(address, GOOD, false);
            let health = String::from_utf8_lossy(health.as_deref().unwrap_or_default()).into_owned();
            assert!(
                health.starts_with("HTTP/1.1 200") && health.ends_with("ok\n"),
                "the next caller got {health:?}"
            );
            answer.is_ok_and(|answer| answer.starts_with(b"HTTP/1.1 200"))
        });
        Ok(run)
    },
};

/// Reads a body within its budget, as JSON.
async fn json(
    State(state): State<Arc<(BodyBudget, SocketAddr)>>,
    headers: HeaderMap,
    body: Body,
) -> Result<String, StatusCode> {
    let (budget, address) = &*state;
    check_host(&headers, *address).map_err(|_| StatusCode::FORBIDDEN)?;
    check_origin(&headers).map_err(|_| StatusCode::FORBIDDEN)?;
    let parsed = budget.read(body, |bytes| serde_json::from_slice::<serde_json::Value>(&bytes)).await;
    let value = parsed.map_err(|_| StatusCode::PAYLOAD_TOO_LARGE)?.map_err(|_| StatusCode::BAD_REQUEST)?;
    Ok(value.to_string())
}

/// Sends bytes, perhaps ends the sending side, and reads what comes. Who has ended it may get nothing: to the
/// server he may have left.
fn call(address: SocketAddr, bytes: &[u8], ends: bool) -> Result<Vec<u8>, Box<dyn Error>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(WAIT))?;
    stream.write_all(bytes)?;
    if ends {
        stream.shutdown(Shutdown::Write)?;
    }
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}
