//! Bodies are parsed by a few threads that last: a thread that is new to an allocator gets memory of its own,
//! and what it gives back stays there, so that with a thread for each body a server would hold many times
//! what one of them takes.

use super::error::ApiError;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that do one thing after the other; they end with it.
pub struct Readers(Sender<Job>);

impl Readers {
    /// So many threads.
    pub fn start(threads: usize) -> io::Result<Readers> {
        let (jobs, inbox) = channel::<Job>();
        let inbox = Arc::new(Mutex::new(inbox));
        for _ in 0..threads {
            let inbox = inbox.clone();
            thread::Builder::new().name("qurl-reader".to_string()).spawn(move || work(&inbox))?;
        }
        Ok(Readers(jobs))
    }

    /// Does something there, unless whoever wants it has gone before its turn comes.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let failed = || ApiError::broken("the body could not be parsed");
        let (reply, done) = oneshot::channel();
        let job = move || {
            if !reply.is_closed() {
                _ = reply.send(work());
            }
        };
        self.0.send(Box::new(job)).map_err(|_| failed())?;
        done.await.map_err(|_| failed())
    }
}

fn work(inbox: &Mutex<Receiver<Job>>) {
    loop {
        let next = inbox.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        // Who waits for a job that panics finds its end of the channel closed.
        _ = catch_unwind(AssertUnwindSafe(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::runtime;

    #[test]
    fn the_same_thread_does_it_all_whatever_fails() {
        runtime(1).expect("a runtime").block_on(async {
            let readers = Readers::start(1).expect("a thread");
            let own = || thread::current().id();
            let first = readers.run(own).await.expect("an id");
            assert!(readers.run(|| -> () { panic!("on purpose") }).await.is_err());
            assert_eq!(readers.run(own).await, Ok(first));
        });
    }
}
