//! A client for measuring a server: posts a body and sees the answer piece by piece.

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use std::net::SocketAddr;
use tokio::net::TcpStream;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The connection failed.
    #[error("{address}: {source}")]
    Io {
        /// Where to.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// What came back is no HTTP, or ended too early.
    #[error(transparent)]
    Http(#[from] hyper::Error),
    /// A header cannot be sent.
    #[error("the request cannot be sent: {0}")]
    Request(#[from] axum::http::Error),
}

/// Posts JSON on a connection of its own and calls `piece` with every piece of the answer; gives the status.
pub async fn post(
    address: SocketAddr,
    path: &str,
    key: Option<&str>,
    body: String,
    mut piece: impl FnMut(&[u8]),
) -> Result<u16, ClientError> {
    let stream = TcpStream::connect(address).await.map_err(|source| ClientError::Io { address, source })?;
    _ = stream.set_nodelay(true);
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut request =
        Request::post(path).header("host", address.to_string()).header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    let mut answer = sender.send_request(request.body(Full::new(Bytes::from(body)))?).await?;
    let status = answer.status().as_u16();
    while let Some(frame) = answer.frame().await {
        if let Some(data) = frame?.data_ref() {
            piece(data);
        }
    }
    Ok(status)
}
