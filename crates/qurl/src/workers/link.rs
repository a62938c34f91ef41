//! A worker's way to its trainer: one request after the other, a connection for each.

use super::server::MARK;
use crate::input::bad;
use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Uri;
use hyper_util::rt::TokioIo;
use qurl_serve::http::runtime;
use qurl_train::wire::Wire;
use qurl_train::workers::protocol::{Ask, Hello, Report, Welcome, Work, read};
use qurl_train::workers::{Link, LinkError, Refused};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// How long a connection may take, the last message, a small one, and weights.
const CONNECT: Duration = Duration::from_secs(10);
const GOODBYE: Duration = Duration::from_secs(3);
const MESSAGE: Duration = Duration::from_secs(60);
const WEIGHTS: Duration = Duration::from_secs(1800);

/// A trainer's address and the secret that it wants to see.
pub struct HttpLink {
    authority: String,
    prefix: String,
    secret: String,
    /// Whether a trainer has been there.
    joined: bool,
    runtime: Runtime,
}

impl HttpLink {
    /// To the trainer at `http://HOST:PORT`.
    pub fn new(url: &str, secret: String) -> anyhow::Result<HttpLink> {
        let wrong = |why: &str| bad(format!("--join {url}: {why}; expected http://HOST:PORT"));
        let uri: Uri = url.parse().map_err(|_| wrong("not an address"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(wrong("TLS is left to a proxy or a tunnel on this side, too")),
            _ => return Err(wrong("not an address of HTTP")),
        }
        let authority = uri.authority().ok_or_else(|| wrong("no host"))?;
        let port = authority.port_u16().unwrap_or(80);
        let prefix = uri.path().trim_end_matches('/').to_string();
        Ok(HttpLink {
            authority: format!("{}:{port}", authority.host()),
            prefix,
            secret,
            joined: false,
            runtime: runtime(1)?,
        })
    }

    fn call(&self, route: &str, message: &impl Wire, time: Duration) -> Result<Bytes, LinkError> {
        let away = |what: &dyn std::fmt::Display| LinkError::Away(format!("{}: {what}", self.authority));
        let exchange = async {
            let stream = timeout(CONNECT, TcpStream::connect(&self.authority)).await;
            let stream = stream.map_err(|_| away(&"no answer"))?.map_err(|e| away(&e))?;
            _ = stream.set_nodelay(true);
            let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
            let (mut sender, connection) = handshake.map_err(|e| away(&e))?;
            let connection = tokio::spawn(connection);
            let request = hyper::Request::post(format!("{}/workers/v1/{route}", self.prefix))
                .header("host", &self.authority)
                .header("authorization", format!("Bearer {}", self.secret))
                .body(Full::new(Bytes::from(message.bytes())))
                .map_err(|e| LinkError::Foreign(e.to_string()))?;
            let response = sender.send_request(request).await.map_err(|e| away(&e))?;
            let status = response.status().as_u16();
            let from = match (response.headers().contains_key(MARK), self.joined) {
                (true, _) => Refuser::Trainer,
                (false, true) => Refuser::ElsewhereNow,
                (false, false) => Refuser::Elsewhere,
            };
            let body = response.into_body().collect().await.map_err(|e| away(&e))?.to_bytes();
            connection.abort();
            answered(status, from, body)
        };
        self.runtime
            .block_on(async { timeout(time, exchange).await })
            .unwrap_or_else(|_| Err(away(&"no answer")))
    }

    fn ask<T: Wire>(&self, route: &str, message: &impl Wire) -> Result<T, LinkError> {
        let bytes = self.call(route, message, MESSAGE)?;
        read(&bytes).ok_or_else(|| LinkError::Foreign(format!("{} bytes for {route}", bytes.len())))
    }
}

/// Who refuses.
#[derive(Clone, Copy)]
enum Refuser {
    Trainer,
    /// A proxy, or another program.
    Elsewhere,
    /// The same where a trainer has been before: it may be starting again.
    ElsewhereNow,
}

/// What an answer means.
fn answered(status: u16, from: Refuser, body: Bytes) -> Result<Bytes, LinkError> {
    let why = || String::from_utf8_lossy(&body[..body.len().min(1000)]).trim().to_string();
    match status {
        200 => Ok(body),
        401 => Err(LinkError::Secret),
        404 => Err(match from {
            Refuser::Trainer => Refused::Gone(why()).into(),
            Refuser::ElsewhereNow => LinkError::Away(format!("status {status}: {}", why())),
            Refuser::Elsewhere => LinkError::Foreign(format!("status {status}: {}", why())),
        }),
        409 => Err(Refused::Unfit(why()).into()),
        410 => Err(Refused::Unknown.into()),
        408 | 429 | 500..=599 => Err(LinkError::Away(format!("status {status}: {}", why()))),
        _ => Err(LinkError::Foreign(format!("status {status}: {}", why()))),
    }
}

impl Link for HttpLink {
    fn join(&mut self, hello: &Hello) -> Result<Welcome, LinkError> {
        let welcome = self.ask("join", hello)?;
        self.joined = true;
        Ok(welcome)
    }

    fn work(&mut self, ask: &Ask) -> Result<Work, LinkError> {
        self.ask("work", ask)
    }

    fn weights(
        &mut self,
        worker: u64,
        version: u64,
        have: Option<(u64, u128)>,
    ) -> Result<Vec<u8>, LinkError> {
        let have = have.map(|(own, hash)| (own, (hash as u64, (hash >> 64) as u64)));
        Ok(self.call("weights", &((worker, version), have), WEIGHTS)?.into())
    }

    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.call("report", &report, WEIGHTS).map(|_| ())
    }

    fn goodbye(&mut self, worker: u64) -> Result<(), LinkError> {
        self.call("goodbye", &worker, GOODBYE).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A run is over where a trainer says so, not where a proxy finds nothing.
    #[test]
    fn only_a_trainer_ends_a_run() {
        let means = |status, from| answered(status, from, Bytes::from_static(b"why\n")).expect_err("refused");
        assert_eq!(means(404, Refuser::Trainer), Refused::Gone("why".to_string()).into());
        assert_eq!(means(404, Refuser::ElsewhereNow), LinkError::Away("status 404: why".to_string()));
        assert_eq!(means(404, Refuser::Elsewhere), LinkError::Foreign("status 404: why".to_string()));
        for status in [408, 429, 502] {
            assert!(matches!(means(status, Refuser::ElsewhereNow), LinkError::Away(_)), "{status}");
        }
        assert!(matches!(means(418, Refuser::Trainer), LinkError::Foreign(_)));
    }
}
