//! Bodies: of requests, read within limits; of answers, sent piece by piece.

use axum::body::{Body, Bytes};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

/// Bytes that a permit of the budget stands for.
const PERMIT: usize = 1 << 10;

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// It is longer than allowed.
    #[error("the body is longer than the {0} bytes that are read at most")]
    TooLong(usize),
    /// Its sender takes too long.
    #[error("the body took longer than {0:?}")]
    TooSlow(Duration),
    /// Bodies of others fill the memory that there is for them.
    #[error("too many bodies are being read")]
    Busy,
    /// The sender has gone, or it is no body.
    #[error("the body could not be read")]
    Broken,
}

/// What a body takes of the budget; given back when dropped.
pub type BodyShare = OwnedSemaphorePermit;

/// How bodies are read: one at most so long, within a time, and all that are being read together out of one
/// budget.
#[derive(Clone, Debug)]
pub struct BodyBudget {
    longest: usize,
    time: Duration,
    left: Arc<Semaphore>,
}

impl BodyBudget {
    /// At most `longest` bytes each, `together` bytes for all that are read at the same time.
    pub fn new(longest: usize, together: usize, time: Duration) -> BodyBudget {
        let permits = (together.max(longest) / PERMIT + 1).min(Semaphore::MAX_PERMITS);
        BodyBudget { longest, time, left: Arc::new(Semaphore::new(permits)) }
    }

    /// Reads a body whole. What has come of it counts against the budget until `consume` has made of the
    /// bytes what is wanted; a sender who announces much and sends little takes little.
    pub async fn read<T>(&self, body: Body, consume: impl FnOnce(Vec<u8>) -> T) -> Result<T, BodyError> {
        let (bytes, share) = self.whole(body).await?;
        let made = consume(bytes);
        drop(share);
        Ok(made)
    }

    /// The same for who needs more time with the bytes: they count until their share is dropped.
    pub async fn whole(&self, body: Body) -> Result<(Vec<u8>, BodyShare), BodyError> {
        let announced = body.size_hint().lower();
        if announced > self.longest as u64 {
            return Err(BodyError::TooLong(self.longest));
        }
        let read = timeout(self.time, self.gather(body)).await;
        read.map_err(|_| BodyError::TooSlow(self.time))?
    }

    async fn gather(&self, mut body: Body) -> Result<(Vec<u8>, BodyShare), BodyError> {
        let take = |permits: usize| {
            let permits = u32::try_from(permits).unwrap_or(u32::MAX);
            self.left.clone().try_acquire_many_owned(permits).map_err(|_| BodyError::Busy)
        };
        let (mut bytes, mut share) = (Vec::new(), take(1)?);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| BodyError::Broken)?;
            let Some(data) = frame.data_ref() else { continue };
            if bytes.len() + data.len() > self.longest {
                return Err(BodyError::TooLong(self.longest));
            }
            bytes.extend_from_slice(data);
            let need = bytes.len() / PERMIT + 1;
            if need > share.num_permits() {
                share.merge(take(need - share.num_permits())?);
            }
        }
        Ok((bytes, share))
    }
}

/// A body that is sent piece by piece as they come through the channel. At most `held` pieces wait for a
/// reader; sending fails once he has gone.
pub fn pieces(held: usize) -> (mpsc::Sender<Bytes>, Body) {
    let (sender, receiver) = mpsc::channel(held.max(1));
    (sender, Body::new(Pieces(receiver)))
}

struct Pieces(mpsc::Receiver<Bytes>);

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
