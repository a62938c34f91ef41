//! A reward from a server: one POST of all responses of a batch, one list of replies.
//!
//! The body is `{"requests": [..]}`, the answer `{"replies": [..]}`, both of what a command would read and
//! write as lines. Plain HTTP only, for a server on the same machine or in the same network: HTTP/1.0 without
//! keeping the connection, so that an answer ends where its length says or the connection does. A batch is
//! asked for once; whatever goes wrong ends it, and the step that needed it changes nothing.

use super::protocol::{self, Replies, Reply, Style};
use super::{ExternalError, Launch, Slip, TICK, shown};
use crate::setting::BadSetting;
use crate::task::Attempt;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest answer in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// A server that is asked for rewards.
pub struct HttpReward {
    url: String,
    address: Address,
    style: Option<Style>,
    /// The number of the next request.
    next_request: u64,
    limit: Duration,
    cancel: Arc<AtomicBool>,
}

/// `http://host:port/path`, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Address {
    /// Without the brackets of IPv6.
    host: String,
    port: u16,
    path: String,
}

/// Why there is no answer.
enum Trouble {
    Cancelled,
    Other(String),
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Trouble {
        Trouble::Other(error.to_string())
    }
}

impl HttpReward {
    /// A server by its address; nothing is sent before there is something to judge. `limit` bounds one batch.
    pub fn new(url: &str, limit: Duration, launch: &Launch) -> Result<HttpReward, BadSetting> {
        let address = address(url).map_err(|expected| BadSetting::text("url", url, expected))?;
        let cancel = launch.cancel.clone();
        Ok(HttpReward { url: url.into(), address, style: None, next_request: 0, limit, cancel })
    }

    /// Judges a batch of responses, in order.
    pub fn score(&mut self, batch: &[Attempt]) -> Result<Vec<Reply>, ExternalError> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let failed = |reason: String| ExternalError::Server { url: self.url.clone(), reason };
        let mut replies = Replies::new(self.next_request, batch.len());
        let numbered = (self.next_request..).zip(batch);
        let requests: Vec<Value> = numbered.map(|(number, a)| protocol::request(number, a)).collect();
        self.next_request += batch.len() as u64;
        let answer = match self.post(&json!({ "requests": requests }).to_string()) {
            Ok(answer) => answer,
            Err(Trouble::Cancelled) => return Err(ExternalError::Cancelled { command: self.url.clone() }),
            Err(Trouble::Other(reason)) => return Err(failed(reason)),
        };
        let wrong = |text: &str, why: String| failed(format!("answered {:?}: {why}", shown(text)));
        let no_list = || wrong(&answer, "expected an object with a list under `replies`".into());
        let mut value = protocol::parse(&answer).map_err(|slip| match slip {
            Slip::NotAScore => no_list(),
            slip => wrong(&answer, slip.to_string()),
        })?;
        let Some(Value::Array(list)) = value.get_mut("replies").map(Value::take) else {
            return Err(no_list());
        };
        let count = list.len();
        if count != batch.len() {
            return Err(wrong(&answer, format!("expected {} replies, found {count}", batch.len())));
        }
        for reply in list {
            let text = reply.to_string();
            replies.take(reply, &mut self.style).map_err(|slip| wrong(&text, slip.to_string()))?;
        }
        Ok(replies.all())
    }

    /// Sends a body and reads the body of the answer.
    fn post(&self, body: &str) -> Result<String, Trouble> {
        let deadline = Instant::now() + self.limit;
        let Address { host, port, path } = &self.address;
        let mut stream = self.connect(deadline)?;
        stream.set_write_timeout(Some(TICK))?;
        stream.set_read_timeout(Some(TICK))?;
        let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let head = format!(
            "POST {path} HTTP/1.0\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        for part in [head.as_bytes(), body.as_bytes()] {
            let mut sent = 0;
            while sent < part.len() {
                sent += self.patiently(deadline, || stream.write(&part[sent..]))?;
            }
        }
        let (mut bytes, mut buffer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let read = self.patiently(deadline, || stream.read(&mut buffer))?;
            bytes.extend_from_slice(&buffer[..read]);
            if read == 0 || is_complete(&bytes) {
                return body_of(&bytes).map_err(Trouble::Other);
            }
            if bytes.len() > MAX_ANSWER {
                return Err(Trouble::Other(format!("answered more than {MAX_ANSWER} bytes")));
            }
        }
    }

    fn connect(&self, deadline: Instant) -> Result<TcpStream, Trouble> {
        let mut last = "its name has no address".to_string();
        for address in (self.address.host.as_str(), self.address.port).to_socket_addrs()? {
            let left = deadline.saturating_duration_since(Instant::now()).max(TICK);
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = error.to_string(),
            }
        }
        Err(Trouble::Other(last))
    }

    /// Repeats what would take longer than a moment, until the deadline or the end of the run.
    fn patiently<T>(
        &self,
        deadline: Instant,
        mut act: impl FnMut() -> std::io::Result<T>,
    ) -> Result<T, Trouble> {
        loop {
            if self.cancel.load(Ordering::SeqCst) {
                return Err(Trouble::Cancelled);
            }
            match act() {
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                done => return Ok(done?),
            }
            if Instant::now() >= deadline {
                let seconds = self.limit.as_secs_f64();
                return Err(Trouble::Other(format!("gave no answer within {seconds} s")));
            }
        }
    }
}

/// Takes an address apart.
fn address(url: &str) -> Result<Address, &'static str> {
    const EXPECTED: &str = "an address http://host:port/path";
    if url.starts_with("https://") {
        return Err("http://host:port/path, perhaps of a tunnel: https is not spoken");
    }
    let rest = url.strip_prefix("http://").ok_or(EXPECTED)?;
    let (place, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| EXPECTED)?),
        _ => (place, 80),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let plain = |text: &str| text.chars().all(|c| c.is_ascii_graphic());
    match !host.is_empty() && !host.contains('@') && plain(host) && plain(path) {
        true => Ok(Address { host: host.into(), port, path: path.into() }),
        false => Err(EXPECTED),
    }
}

/// Head and body of an answer, once the head is there.
fn split(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let end = bytes.windows(4).position(|w| w == b"\r\n\r\n")?;
    Some((std::str::from_utf8(&bytes[..end]).ok()?, &bytes[end + 4..]))
}

/// The length that a head announces.
fn length_of(head: &str) -> Option<usize> {
    let field = |line: &str| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    };
    head.lines().find_map(field)
}

/// Whether the announced length is there.
fn is_complete(bytes: &[u8]) -> bool {
    split(bytes).is_some_and(|(head, body)| length_of(head).is_some_and(|length| body.len() >= length))
}

/// The body of a whole answer of status 200.
fn body_of(bytes: &[u8]) -> Result<String, String> {
    let Some((head, body)) = split(bytes) else {
        return Err(format!("answered {:?}, expected HTTP", shown(&String::from_utf8_lossy(bytes))));
    };
    let status = head.lines().next().unwrap_or_default();
    let body = match length_of(head) {
        Some(length) if body.len() < length => {
            return Err(format!("ended its answer after {} of {length} bytes", body.len()));
        }
        Some(length) => &body[..length],
        None => body,
    };
    let code = status.split_whitespace().nth(1).filter(|_| status.starts_with("HTTP/"));
    if code != Some("200") {
        let said = shown(&String::from_utf8_lossy(body));
        return Err(format!("answered {status:?}, expected status 200: {said:?}"));
    }
    String::from_utf8(body.to_vec()).map_err(|_| "answered what is not UTF-8 text".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let of = |url: &str| address(url).map(|a| (a.host, a.port, a.path));
        let parts = |host: &str, port, path: &str| Ok((host.to_string(), port, path.to_string()));
        assert_eq!(of("http://localhost:8000/score"), parts("localhost", 8000, "/score"));
        assert_eq!(of("http://judge"), parts("judge", 80, "/"));
        assert_eq!(of("http://[::1]:81/a?b=c"), parts("::1", 81, "/a?b=c"));
        assert_eq!(of("http://[::1]"), parts("::1", 80, "/"));
        for wrong in
            ["", "judge:80", "http://", "http://a:b/", "http://a:99999/", "http://a b/", "http://u@h/"]
        {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        assert!(of("https://judge/").is_err_and(|e| e.contains("https is not spoken")));
    }

    #[test]
    fn answers() {
        let ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]";
        assert!(is_complete(ok) && !is_complete(&ok[..ok.len() - 1]));
        assert_eq!(body_of(ok).as_deref(), Ok("[]"));
        assert_eq!(body_of(b"HTTP/1.0 200 OK\r\n\r\n[]").as_deref(), Ok("[]"), "ends with the connection");
        let said = |bytes: &[u8]| body_of(bytes).expect_err("no answer");
        assert!(said(&ok[..ok.len() - 1]).contains("after 1 of 2 bytes"));
        assert!(said(b"HTTP/1.0 500 Oh\r\n\r\nno").contains("500 Oh\", expected status 200: \"no\""));
        assert!(said(b"nothing").contains("expected HTTP"));
    }
}
