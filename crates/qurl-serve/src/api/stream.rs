//! Answers that are sent while they grow, as server-sent events.
//!
//! What is ready when a reader can take more goes to him in one piece, so that one who is slower than the
//! engine costs less, not more.

use super::App;
use super::call::Call;
use super::error::ApiError;
use crate::http::pieces;
use crate::service::News;
use axum::body::Bytes;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::sync::Arc;
use tokio::time::{sleep_until, timeout_at};

/// Pieces of a stream that wait for a slow reader; beyond that his tokens wait in the engine's channel.
const HELD_PIECES: usize = 16;
/// Bytes of a piece from which on no more is added to it.
const LONG_PIECE: usize = 32 << 10;
/// Readers that are not told the encoding take ISO 8859-1, as HTTP once had it for texts.
const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";
/// What all streams end with.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// A dialect's way of telling news.
pub trait Events: Send + 'static {
    /// Takes note of what is new of a prompt, and writes the events that every news has.
    fn take(&mut self, prompt: usize, news: News, to: &mut Vec<u8>);

    /// Writes the events that need not be sent for every news, once all has been taken that is there.
    fn catch_up(&mut self, _to: &mut Vec<u8>) {}

    /// Writes what comes after the end.
    fn end(&mut self, _to: &mut Vec<u8>) {}
}

/// Writes an event.
pub fn event(to: &mut Vec<u8>, event: &impl Serialize) {
    to.extend_from_slice(b"data: ");
    // Into memory, and of maps whose keys are texts: it cannot fail.
    _ = serde_json::to_writer(&mut *to, event);
    to.extend_from_slice(b"\n\n");
}

impl App {
    /// Submits a call and tells its answer as server-sent events. What is wrong with a call is said before the
    /// stream begins.
    pub async fn stream<E: Events>(
        self: Arc<Self>,
        call: Call,
        events: impl FnOnce(Arc<Self>, Call) -> E,
    ) -> Result<Response, ApiError> {
        let mut answers = self.submit(&call, true)?;
        let mut events = events(self.clone(), call);
        let deadline = self.deadline();
        let mut next = match timeout_at(deadline, answers.next()).await {
            Err(_) => return Err(self.too_slow()),
            Ok(Some((_, News::Failed(failure)))) => return Err(failure.into()),
            Ok(first) => first,
        };
        let (sender, body) = pieces(HELD_PIECES);
        tokio::spawn(async move {
            // Dropping the answers, whenever that is, cancels what is left of them.
            loop {
                let mut piece = Vec::new();
                let ended = loop {
                    match next {
                        Some((_, News::Failed(failure))) => {
                            event(&mut piece, &ApiError::from(failure).to_json());
                            break true;
                        }
                        Some((prompt, news)) => events.take(prompt, news, &mut piece),
                        None => {
                            events.catch_up(&mut piece);
                            events.end(&mut piece);
                            break true;
                        }
                    }
                    let ready = if piece.len() < LONG_PIECE { answers.ready() } else { None };
                    match ready {
                        Some(ready) => next = ready,
                        None => {
                            events.catch_up(&mut piece);
                            break false;
                        }
                    }
                };
                if ended {
                    piece.extend_from_slice(DONE);
                }
                // In slices, of which so many wait: not so many pieces, each as long as all that has come.
                let mut piece = Bytes::from(piece);
                while !piece.is_empty() {
                    let slice = piece.split_to(piece.len().min(LONG_PIECE));
                    if sender.send(slice).await.is_err() {
                        return;
                    }
                }
                if ended {
                    return;
                }
                next = tokio::select! {
                    () = sender.closed() => return,
                    () = sleep_until(deadline) => {
                        let mut late = Vec::new();
                        event(&mut late, &self.too_slow().to_json());
                        _ = sender.send(Bytes::from(late)).await;
                        return;
                    }
                    news = answers.next() => news,
                };
            }
        });
        let headers = [(CONTENT_TYPE, EVENT_STREAM), (CACHE_CONTROL, "no-cache")];
        Ok((headers, body).into_response())
    }
}
