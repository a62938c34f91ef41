//! Listening: connections in, each with its limits, until a stop; then a goodbye.

use super::patient::Patient;
use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::SockRef;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tokio::time::{sleep, timeout};

/// Callers who wait to be accepted, as far as the system allows. Who finds the queue full tries again after a
/// second: with the 128 of the standard library 192 clients that came at once took a second longer.
const BACKLOG: i32 = 4096;
/// How long nothing is accepted after the system refused to (no file descriptors, say).
const AFTER_REFUSAL: Duration = Duration::from_millis(50);
/// How long a caller is given to take his last answer.
const LINGER: Duration = Duration::from_secs(1);
/// Bytes that are thrown away meanwhile.
const MAX_THROWN: usize = 4 << 20;
/// What a caller too many gets.
const TOO_MANY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Type: text/plain\r\n\
                          Content-Length: 21\r\nConnection: close\r\n\r\ntoo many connections\n";

/// What a connection may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at the same time; callers beyond are refused at once.
    pub connections: usize,
    /// Bytes of a request's line and headers.
    pub head_bytes: usize,
    /// Headers of a request.
    pub headers: usize,
    /// How long a caller may take for them, which is also how long a connection may be idle.
    pub head_time: Duration,
    /// How long an answer may stand still because its reader takes nothing.
    pub write_time: Duration,
    /// Whether a connection serves more than one request.
    pub keep_alive: bool,
    /// How long answers in progress have after a stop.
    pub goodbye: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 2048,
            head_bytes: 32 << 10,
            headers: 96,
            head_time: Duration::from_secs(30),
            write_time: Duration::from_secs(30),
            keep_alive: true,
            goodbye: Duration::from_secs(30),
        }
    }
}

/// A runtime for the connections: this many threads that never compute.
pub fn runtime(threads: usize) -> io::Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(threads.max(1)).thread_name("qurl-http").enable_io().enable_time().build()
}

/// An address that is bound but not yet served.
pub struct Listener {
    inner: std::net::TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Binds the address; port 0 takes a free one.
    pub fn bind(host: IpAddr, port: u16) -> io::Result<Listener> {
        let inner = std::net::TcpListener::bind((host, port))?;
        SockRef::from(&inner).listen(BACKLOG)?;
        inner.set_nonblocking(true)?;
        let address = inner.local_addr()?;
        Ok(Listener { inner, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves the routes until `stop` is ready, closes the address, and waits for the answers in progress as
    /// long as the limits say. Within a [`runtime`].
    pub async fn serve(
        self,
        routes: Router,
        limits: Limits,
        stop: impl Future<Output = ()>,
    ) -> io::Result<()> {
        let listener = TcpListener::from_std(self.inner)?;
        let places = Arc::new(Semaphore::new(limits.connections.max(1)));
        let (stopping, stopped) = watch::channel(false);
        let mut stop = pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => break,
                accepted = listener.accept() => accepted,
            };
            let Ok((stream, _)) = accepted else {
                sleep(AFTER_REFUSAL).await; // a caller who left at once, or no file descriptors
                continue;
            };
            let Ok(place) = places.clone().try_acquire_owned() else {
                tokio::spawn(refuse(stream));
                continue;
            };
            let (routes, stopped) = (routes.clone(), stopped.clone());
            tokio::spawn(async move {
                converse(stream, routes, limits, stopped).await;
                drop(place);
            });
        }
        drop(listener); // whoever comes now is refused by the system, not left to wait
        stopping.send_replace(true);
        let everyone = u32::try_from(limits.connections.max(1)).unwrap_or(u32::MAX);
        _ = timeout(limits.goodbye, places.acquire_many(everyone)).await;
        Ok(())
    }
}

async fn refuse(mut stream: TcpStream) {
    if let Ok(Ok(())) = timeout(LINGER, stream.write_all(TOO_MANY)).await {
        linger(stream).await;
    }
}

/// Closes a connection after its last answer. What the caller still sends is thrown away for a moment: closed
/// over unread bytes, the connection would be reset, and the caller might never see the answer.
async fn linger(mut stream: TcpStream) {
    let drain = async {
        stream.shutdown().await?;
        let (mut thrown, mut piece) = (0, [0; 4096]);
        while thrown < MAX_THROWN {
            match stream.read(&mut piece).await? {
                0 => break,
                n => thrown += n,
            }
        }
        Ok::<(), io::Error>(())
    };
    _ = timeout(LINGER, drain).await;
}

/// All requests of a connection. A caller who goes away in the middle is no failure of the server.
async fn converse(stream: TcpStream, routes: Router, limits: Limits, mut stopped: watch::Receiver<bool>) {
    _ = stream.set_nodelay(true);
    let service = TowerToHyperService::new(routes);
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_buf_size(limits.head_bytes.max(8 << 10))
        .max_headers(limits.headers)
        .keep_alive(limits.keep_alive)
        .title_case_headers(true) // as people read them
        .serve_connection(
            TokioIo::new(Patient::new(stream, limits.write_time)),
            service_fn(move |request| Box::pin(service.call(request))),
        );
    // Without shutting the socket down, which is done below.
    let ended = tokio::select! {
        _ = poll_fn(|cx| connection.poll_without_shutdown(cx)) => true,
        _ = stopped.wait_for(|stopped| *stopped) => false,
    };
    if !ended {
        Pin::new(&mut connection).graceful_shutdown();
        _ = poll_fn(|cx| connection.poll_without_shutdown(cx)).await;
    }
    linger(connection.into_parts().io.into_inner().into_inner()).await;
}
