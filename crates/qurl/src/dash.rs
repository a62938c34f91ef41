//! The live page: a small HTTP/1.1 server for one reader or a few, on the standard library alone.
//!
//! It knows four addresses and opens no file by a name from a request. One thread follows the files of the
//! runs; each connection has a thread of its own, and an event stream waits there until something is new. The
//! server only answers GET and HEAD, and on a loopback address only requests that name it by a loopback name,
//! so that a page from elsewhere cannot reach it by pointing its own name here.

mod board;
mod http;

use crate::report::{SCRIPT, STYLE, live_page};
use board::{Board, Sent};
use http::{Refusal, Request, respond};
use serde_json::{Value, json};
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// How often an event stream says that it is alive, which is how a reader who left is noticed.
const ALIVE_EVERY: Duration = Duration::from_secs(10);
/// How often the stop flag is looked at while nobody calls.
const ACCEPT_EVERY: Duration = Duration::from_millis(40);
/// Connections at the same time.
const MAX_READERS: usize = 32;
/// How long readers are given to take their leave.
const GOODBYE: Duration = Duration::from_secs(2);

/// A server that is bound but not yet serving.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// What the threads share.
struct Shared {
    board: Mutex<Board>,
    news: Condvar,
    readers: AtomicUsize,
}

impl Shared {
    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Binds the address and takes a first look at the runs in these directories, which may begin later.
    pub fn bind(host: IpAddr, port: u16, places: Vec<PathBuf>) -> anyhow::Result<Server> {
        let board = Board::open(places)?;
        let listener = TcpListener::bind((host, port)).map_err(|e| {
            crate::input::bad(format!("--host {host} --port {port}: cannot be listened on: {e}"))
        })?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Shared { board: Mutex::new(board), news: Condvar::new(), readers: AtomicUsize::new(0) };
        Ok(Server { listener, address, shared: Arc::new(shared) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is set, then says goodbye to whoever is connected.
    pub fn serve(&self, stop: &AtomicBool) -> anyhow::Result<()> {
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| self.watch(stop));
            while !stop.load(Ordering::Relaxed) {
                match self.listener.accept() {
                    Ok((stream, _)) => self.welcome(stream),
                    Err(_) => std::thread::sleep(ACCEPT_EVERY), // nobody calls, or a caller who left at once
                }
            }
            self.shared.board().closing = true;
            self.shared.news.notify_all();
            _ = watcher.join();
        });
        let asked = Instant::now();
        while self.shared.readers.load(Ordering::Relaxed) > 0 && asked.elapsed() < GOODBYE {
            std::thread::sleep(ACCEPT_EVERY);
        }
        Ok(())
    }

    fn watch(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            if self.shared.board().look() {
                self.shared.news.notify_all();
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// A thread for the connection, or a refusal where there are too many.
    fn welcome(&self, stream: TcpStream) {
        let (shared, address) = (self.shared.clone(), self.address);
        if shared.readers.fetch_add(1, Ordering::Relaxed) >= MAX_READERS {
            shared.readers.fetch_sub(1, Ordering::Relaxed);
            _ = http::prepare(&stream).and_then(|()| respond(&stream, false, &Refusal::Busy.answer()));
            return;
        }
        std::thread::spawn(move || {
            // A reader who goes away in the middle of an answer is no failure of the server.
            _ = converse(&shared, address, &stream);
            shared.readers.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

/// One request and its answer.
fn converse(shared: &Shared, address: SocketAddr, stream: &TcpStream) -> std::io::Result<()> {
    http::prepare(stream)?;
    let request = match Request::read(stream, address) {
        Ok(request) => request,
        Err(refusal) => return respond(stream, false, &refusal.answer()),
    };
    let answer = match request.path.as_str() {
        "/" => http::Answer::text("text/html", live_page(&shared.board().runs())),
        "/page.css" => http::Answer::text("text/css", STYLE.to_string()),
        "/page.js" => http::Answer::text("text/javascript", SCRIPT.to_string()),
        "/events" if !request.head_only => return events(shared, stream),
        "/events" => http::Answer::text("text/event-stream", String::new()),
        _ => Refusal::NotFound.answer(),
    };
    respond(stream, request.head_only, &answer)
}

/// Sends all runs whole, then whatever is new, until the reader leaves or the server stops.
fn events(shared: &Shared, mut stream: &TcpStream) -> std::io::Result<()> {
    http::begin_events(stream)?;
    let mut sent: Option<Sent> = None;
    loop {
        let mut board = shared.board();
        let known = |board: &Board| board.closing || sent.as_ref() != Some(&board.sent());
        if !known(&board) {
            let wait = shared.news.wait_timeout_while(board, ALIVE_EVERY, |board| !known(board));
            board = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        let now = board.sent();
        let message = match &sent {
            _ if board.closing => message("bye", &Value::Null),
            Some(before) if *before == now => ": alive\n\n".to_string(),
            Some(before) if before.edition == now.edition => {
                board.since(before).iter().map(|more| message("more", more)).collect()
            }
            _ => {
                let runs: Vec<Value> = board.runs().iter().map(|run| run.to_json()).collect();
                message("runs", &json!(runs))
            }
        };
        let closing = board.closing;
        drop(board); // a slow reader holds up nobody
        stream.write_all(message.as_bytes())?;
        stream.flush()?;
        if closing {
            return Ok(());
        }
        sent = Some(now);
    }
}

/// A server-sent event. JSON has no line breaks of its own, so one data line holds it.
fn message(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}

#[cfg(test)]
mod tests;
