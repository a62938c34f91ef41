//! The live page: a small server for one reader or a few.
//!
//! It knows four addresses and opens no file by a name from a request. One thread follows the files of the
//! runs; an event stream waits until something is new. The server only answers GET and HEAD, and what the
//! stack below it (`qurl_serve::http`) lets through: on a loopback address only requests that name it by a
//! loopback name, so that a page from elsewhere cannot reach it by pointing its own name here.

mod board;

use crate::report::{SCRIPT, STYLE, live_page};
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Router, middleware};
use board::{Board, Sent};
use qurl_serve::http::{Limits, Listener, guard, pieces, runtime};
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// How often an event stream says that it is alive, which is how a reader who left is noticed.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
/// How often the stop flag is looked at.
const STOP_EVERY: Duration = Duration::from_millis(40);
/// What readers may take, and how long they are given to take their leave. A connection ends with its answer.
const LIMITS: Limits = Limits {
    connections: 32,
    head_bytes: 8 << 10,
    headers: 64,
    head_time: Duration::from_secs(10),
    write_time: Duration::from_secs(10),
    keep_alive: false,
    goodbye: Duration::from_secs(2),
};
/// Headers of every answer. Scripts and styles come from this server alone, and no other page may frame it.
const GUARD: [(HeaderName, &str); 5] = [
    (
        CONTENT_SECURITY_POLICY,
        "default-src 'none'; img-src data:; style-src 'self'; script-src 'self'; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (CACHE_CONTROL, "no-store"),
];

/// A server that is bound but not yet serving.
pub struct Server {
    listener: Listener,
    shared: Arc<Shared>,
}

/// What the readers share.
struct Shared {
    address: SocketAddr,
    board: Mutex<Board>,
    /// Counts what is new.
    news: watch::Sender<u64>,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        self.news.send_modify(|count| *count += 1);
    }

    fn watch(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            if self.board().look() {
                self.tell();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

impl Server {
    /// Binds the address and takes a first look at the runs in these directories, which may begin later.
    pub fn bind(host: IpAddr, port: u16, places: Vec<PathBuf>) -> anyhow::Result<Server> {
        let board = Mutex::new(Board::open(places)?);
        let listener = Listener::bind(host, port).map_err(|e| {
            crate::input::bad(format!("--host {host} --port {port}: cannot be listened on: {e}"))
        })?;
        let (address, news) = (listener.address(), watch::Sender::new(0));
        Ok(Server { listener, shared: Arc::new(Shared { address, board, news }) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Serves until `stop` is set, then says goodbye to whoever is connected.
    pub fn serve(self, stop: &AtomicBool) -> anyhow::Result<()> {
        let Server { listener, shared } = self;
        let runtime = runtime(1)?;
        std::thread::scope(|scope| {
            scope.spawn(|| shared.watch(stop));
            let stopped = async {
                while !stop.load(Ordering::Relaxed) {
                    sleep(STOP_EVERY).await;
                }
                shared.board().closing = true;
                shared.tell();
            };
            let served = runtime.block_on(listener.serve(routes(&shared), LIMITS, stopped));
            stop.store(true, Ordering::Relaxed); // for the watcher, where serving failed
            served
        })?;
        runtime.shutdown_background();
        Ok(())
    }
}

fn routes(shared: &Arc<Shared>) -> Router {
    let page = |State(shared): State<Arc<Shared>>| async move {
        let page = live_page(&shared.board().runs());
        text("text/html", page)
    };
    Router::new()
        .route("/", get(page))
        .route("/page.css", get(async || text("text/css", STYLE)))
        .route("/page.js", get(async || text("text/javascript", SCRIPT)))
        .route("/events", get(events))
        .fallback(async || (StatusCode::NOT_FOUND, "there is nothing here\n"))
        .method_not_allowed_fallback(async || (StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n"))
        .layer(middleware::from_fn_with_state(shared.clone(), guarded))
        .with_state(shared.clone())
}

/// Lets readers in who may be, and gives every answer its headers.
async fn guarded(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let mut answer = match guard::check_host(request.headers(), shared.address) {
        Ok(()) => next.run(request).await,
        Err(refusal) => {
            let (status, said) = refusal.answer();
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::FORBIDDEN);
            (status, format!("{said}\n")).into_response()
        }
    };
    let guard = GUARD.map(|(name, value)| (name, HeaderValue::from_static(value)));
    answer.headers_mut().extend(HeaderMap::from_iter(guard));
    answer
}

fn text(kind: &'static str, body: impl Into<Body>) -> Response {
    ([(CONTENT_TYPE, format!("{kind}; charset=utf-8"))], body.into()).into_response()
}

/// A stream of all runs whole, then of whatever is new, until the reader leaves or the server stops.
async fn events(State(shared): State<Arc<Shared>>, method: Method) -> Response {
    // One message waits for a slow reader; the next is made when he has taken it.
    let (sender, body) = pieces(1);
    if method == Method::GET {
        tokio::spawn(send_events(shared, sender));
    }
    ([(CONTENT_TYPE, "text/event-stream")], body).into_response()
}

async fn send_events(shared: Arc<Shared>, sender: mpsc::Sender<Bytes>) {
    let mut news = shared.news.subscribe();
    let mut sent: Option<Sent> = None;
    let mut first = "retry: 1000\n\n".to_string();
    loop {
        let closing = {
            news.mark_unchanged();
            let board = shared.board();
            let (now, closing) = (board.sent(), board.closing);
            let message = match &sent {
                _ if closing => message("bye", &Value::Null),
                Some(before) if *before == now => ": alive\n\n".to_string(),
                Some(before) if before.edition == now.edition => {
                    board.since(before).iter().map(|more| message("more", more)).collect()
                }
                _ => {
                    let runs: Vec<Value> = board.runs().iter().map(|run| run.to_json()).collect();
                    message("runs", &json!(runs))
                }
            };
            drop(board); // a slow reader holds up nobody
            first.push_str(&message);
            sent = Some(now);
            closing
        };
        let gone = sender.send(Bytes::from(std::mem::take(&mut first))).await.is_err();
        if gone || closing {
            return;
        }
        tokio::select! {
            () = sender.closed() => return,
            _ = timeout(ALIVE_EVERY, news.changed()) => {}
        }
    }
}

/// A server-sent event. JSON has no line breaks of its own, so one data line holds it.
fn message(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

#[cfg(test)]
mod tests;
