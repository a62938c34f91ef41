//! How much an answer may tell, and how one that is told whole is written.
//!
//! With the most probable tokens at every place an answer is a thousand times as long as its request. What a
//! call can ask for is known before it is computed: one that could have more than [`MOST`] log-probs is
//! refused, and one for which there is no room beside those in flight is told to come again. A long answer is
//! written off the threads of the connections into pieces that go as they are sent, and waits for room among
//! the answers that have been written and not yet been read.

use super::App;
use super::answer;
use super::call::Call;
use super::error::ApiError;
use super::outcome::Outcome;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::block_in_place;
use tokio::time::timeout_at;

/// Most log-probs that an answer may have; each takes 20 to 100 bytes of text and 8 bytes before that.
const MOST: usize = 1 << 20;
/// Most of all calls in flight, and of all answers that are written and not yet sent.
const PROMISED: usize = 16 * MOST;
const WRITTEN: usize = 4 * MOST;
/// From here on an answer is long.
pub const LONG: usize = 1 << 12;
/// Bytes of a piece of an answer.
const PIECE: usize = 256 << 10;

/// What answers may take of the server's memory, counted in log-probs.
pub struct Telling {
    promised: Arc<Semaphore>,
    written: Arc<Semaphore>,
}

impl Default for Telling {
    fn default() -> Telling {
        let places = |count| Arc::new(Semaphore::new(count));
        Telling { promised: places(PROMISED), written: places(WRITTEN) }
    }
}

/// A call's share; given back when dropped.
pub type Share = OwnedSemaphorePermit;

fn permits(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl Telling {
    /// A share for a call that may have so many log-probs.
    pub fn promise(&self, count: usize) -> Result<Share, ApiError> {
        if count > MOST {
            let message = format!(
                "this answer could have {count} log-probs (of samples x new tokens x most probable tokens, \
                 and of the prompts, as often as they are told), more than the {MOST} that an answer may \
                 have: ask for less at a time"
            );
            return Err(ApiError::bad(message));
        }
        let share = self.promised.clone().try_acquire_many_owned(permits(count));
        share.map_err(|_| ApiError::busy("the log-probs of others fill the memory that there is for them"))
    }
}

impl App {
    /// The whole answer as JSON, made by `document` of what has come of the call.
    pub async fn tell<T: Serialize>(
        &self,
        (call, share): (&Call, Share),
        outcomes: &[Outcome],
        document: impl FnOnce() -> Result<T, ApiError>,
    ) -> Result<Response, ApiError> {
        let count = call.log_probs(|prompt| outcomes[prompt].new_tokens());
        if count < LONG {
            return Ok(answer(document()?));
        }
        let room = self.telling.written.clone().acquire_many_owned(permits(count.min(WRITTEN)));
        let room = timeout_at(self.deadline(), room).await.map_err(|_| self.too_slow())?;
        let room = room.map_err(|_| ApiError::broken("no answer"))?;
        let pieces = block_in_place(|| {
            let mut pieces = Pieces::default();
            let written = serde_json::to_writer(&mut pieces, &document()?);
            written.map_err(|error| ApiError::broken(error.to_string()))?;
            Ok::<_, ApiError>(pieces.done())
        })?;
        drop(share);
        Ok(([(CONTENT_TYPE, "application/json")], Body::new(Told { pieces, _room: room })).into_response())
    }
}

/// Text that is written piece by piece, none of which is ever moved for the next.
#[derive(Default)]
struct Pieces {
    full: VecDeque<Bytes>,
    last: Vec<u8>,
}

impl Pieces {
    fn done(mut self) -> VecDeque<Bytes> {
        self.full.push_back(self.last.into());
        self.full
    }
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.last.capacity() == 0 {
            self.last.reserve_exact(PIECE);
        }
        let fits = bytes.len().min(PIECE - self.last.len());
        self.last.extend_from_slice(&bytes[..fits]);
        if self.last.len() == PIECE {
            self.full.push_back(std::mem::take(&mut self.last).into());
        }
        Ok(fits)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An answer that is being sent.
struct Told {
    pieces: VecDeque<Bytes>,
    _room: OwnedSemaphorePermit,
}

impl HttpBody for Told {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.pieces.pop_front().map(|piece| Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.pieces.iter().map(|piece| piece.len() as u64).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_full_and_lose_nothing() {
        let text: Vec<u8> = (0..2 * PIECE + 77).map(|i| (i % 251) as u8).collect();
        let mut pieces = Pieces::default();
        text.chunks(10_007).for_each(|part| pieces.write_all(part).expect("memory"));
        let pieces = pieces.done();
        assert_eq!(pieces.iter().map(Bytes::len).collect::<Vec<_>>(), [PIECE, PIECE, 77]);
        assert_eq!(pieces.into_iter().flatten().collect::<Vec<u8>>(), text);
    }

    #[test]
    fn a_call_takes_its_share_until_it_ends() {
        let telling = Telling::default();
        let message = telling.promise(MOST + 1).expect_err("too much").message().to_string();
        assert!(message.contains("1048577 log-probs"), "{message}");
        let shares: Vec<Share> = (0..16).map(|_| telling.promise(MOST).expect("room")).collect();
        assert!(telling.promise(0).is_ok());
        let message = telling.promise(1).expect_err("full").message().to_string();
        assert!(message.contains("of others"), "{message}");
        drop(shares);
        assert!(telling.promise(MOST).is_ok());
    }
}
