//! As much HTTP/1.1 as the live page needs: one request a connection, a few kinds of answer.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest request that is read.
const MAX_BYTES: usize = 8 << 10;
/// How long a reader may take to send a request or to take an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Headers of every answer. Scripts and styles come from this server alone, and no other page may frame it.
const GUARD: &str = "Content-Security-Policy: default-src 'none'; img-src data:; style-src 'self'; \
                     script-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
     X-Content-Type-Options: nosniff\r\n\
     Referrer-Policy: no-referrer\r\n\
     Cross-Origin-Resource-Policy: same-origin\r\n\
     Cache-Control: no-store\r\n";

/// A request that may be answered.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// The path, without what follows a question mark.
    pub path: String,
    /// HEAD: the answer without its body.
    pub head_only: bool,
}

/// Why a request is not answered as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Not HTTP.
    Malformed,
    /// Anything but GET and HEAD.
    ReadOnly,
    /// A name that is not this machine's.
    WrongHost,
    /// No such address.
    NotFound,
    /// The request is too long.
    TooLong,
    /// The request comes too slowly.
    TooSlow,
    /// Too many readers.
    Busy,
}

impl Refusal {
    /// What is sent back.
    pub fn answer(self) -> Answer {
        let (status, text) = match self {
            Refusal::Malformed => ("400 Bad Request", "not an HTTP/1.1 request"),
            Refusal::ReadOnly => ("405 Method Not Allowed", "only GET and HEAD"),
            Refusal::WrongHost => ("403 Forbidden", "this server answers to loopback names only"),
            Refusal::NotFound => ("404 Not Found", "there is nothing here"),
            Refusal::TooLong => ("431 Request Header Fields Too Large", "the request is too long"),
            Refusal::TooSlow => ("408 Request Timeout", "the request took too long"),
            Refusal::Busy => ("503 Service Unavailable", "too many readers"),
        };
        Answer { status, kind: "text/plain", body: format!("{text}\n") }
    }
}

/// An answer with its body.
pub struct Answer {
    status: &'static str,
    kind: &'static str,
    body: String,
}

impl Answer {
    /// A text of this kind.
    pub fn text(kind: &'static str, body: String) -> Answer {
        Answer { status: "200 OK", kind, body }
    }
}

/// Sets limits of patience, so that a silent caller does not hold a thread for ever.
pub fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)
}

impl Request {
    /// Reads a request for the server at `address`.
    pub fn read(mut stream: impl Read, address: SocketAddr) -> Result<Request, Refusal> {
        let began = Instant::now();
        let mut bytes = Vec::new();
        let mut piece = [0; 1024];
        while !bytes.windows(4).any(|end| end == b"\r\n\r\n") {
            if bytes.len() > MAX_BYTES {
                return Err(Refusal::TooLong);
            }
            if began.elapsed() > PATIENCE {
                return Err(Refusal::TooSlow);
            }
            match stream.read(&mut piece) {
                Ok(0) => return Err(Refusal::Malformed),
                Ok(n) => bytes.extend_from_slice(&piece[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(Refusal::TooSlow);
                }
                Err(_) => return Err(Refusal::Malformed),
            }
        }
        Request::parse(std::str::from_utf8(&bytes).map_err(|_| Refusal::Malformed)?, address)
    }

    fn parse(text: &str, address: SocketAddr) -> Result<Request, Refusal> {
        let mut lines = text.split("\r\n");
        let mut words = lines.next().unwrap_or_default().split(' ');
        let (Some(method), Some(target), Some(version), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Refusal::Malformed);
        };
        if !version.starts_with("HTTP/1.") {
            return Err(Refusal::Malformed);
        }
        let hosts: Vec<&str> = lines
            .filter_map(|line| line.split_once(':'))
            .filter(|(name, _)| name.eq_ignore_ascii_case("host"))
            .map(|(_, value)| value.trim())
            .collect();
        let [host] = hosts.as_slice() else { return Err(Refusal::Malformed) };
        if address.ip().is_loopback() && !names_loopback(host, address) {
            return Err(Refusal::WrongHost);
        }
        if !matches!(method, "GET" | "HEAD") {
            return Err(Refusal::ReadOnly);
        }
        let path = target.split(['?', '#']).next().unwrap_or_default().to_string();
        Ok(Request { path, head_only: method == "HEAD" })
    }
}

/// Whether a Host header names this machine by a loopback name, and this port.
fn names_loopback(host: &str, address: SocketAddr) -> bool {
    let name = host.strip_suffix(&format!(":{}", address.port())).unwrap_or(host);
    let ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.is_loopback())
}

/// Sends an answer; the connection ends with it.
pub fn respond(mut stream: impl Write, head_only: bool, answer: &Answer) -> std::io::Result<()> {
    let Answer { status, kind, body } = answer;
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: \
         {length}\r\n{GUARD}Connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    if !head_only {
        stream.write_all(body.as_bytes())?;
    }
    stream.flush()
}

/// Begins a stream of events.
pub fn begin_events(mut stream: impl Write) -> std::io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{GUARD}Connection: close\r\n\r\nretry: \
         1000\n\n"
    );
    stream.write_all(head.as_bytes())?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(head: &str) -> Result<Request, Refusal> {
        let address: SocketAddr = "127.0.0.1:7878".parse().expect("an address");
        Request::read(head.as_bytes(), address)
    }

    #[test]
    fn only_reading_by_loopback_names() {
        let get =
            |target: &str, host: &str| ask(&format!("GET {target} HTTP/1.1\r\nhost: {host}\r\nX: y\r\n\r\n"));
        let page = Request { path: "/".to_string(), head_only: false };
        for host in ["127.0.0.1:7878", "localhost:7878", "LOCALHOST", "[::1]:7878", "127.0.0.1"] {
            assert_eq!(get("/?x=1", host).as_ref(), Ok(&page));
        }
        for host in ["evil.example", "127.0.0.1.evil.example:7878", "localhost:99", "10.0.0.1:7878", ""] {
            assert_eq!(get("/", host), Err(Refusal::WrongHost), "{host}");
        }
        let open: SocketAddr = "0.0.0.0:7878".parse().expect("an address");
        assert_eq!(Request::read(&b"GET / HTTP/1.1\r\nHost: box.lan\r\n\r\n"[..], open), Ok(page));
        assert_eq!(ask("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"), Err(Refusal::ReadOnly));
        assert_eq!(ask("HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n").map(|r| r.head_only), Ok(true));
    }

    #[test]
    fn what_is_not_a_request_is_refused() {
        for text in
            ["", "GET /\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nHost: localhost", "\r\n\r\n"]
        {
            assert_eq!(ask(text), Err(Refusal::Malformed), "{text:?}");
        }
        assert_eq!(ask("GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n"), Err(Refusal::Malformed));
        assert_eq!(ask(&format!("GET /{} HTTP/1.1\r\n", "a".repeat(20_000))), Err(Refusal::TooLong));
    }
}
