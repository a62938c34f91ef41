//! The engine as something that many may ask at once.
//!
//! Queue, network and engine live on one thread of their own ([`worker`]), which does nothing but step: no
//! request ever locks them, and no future runs there. Whoever asks sends a [`Job`] through a channel and
//! listens to its news. Requests of all clients are one continuous batch. A [`Ticket`] that is dropped (its
//! client has gone) cancels its request.
//!
//! **Weights** change between requests only. A request keeps the version that it began with: an update lets
//! the requests in flight finish first, or aborts them, as it is asked to; requests that arrive meanwhile
//! wait for the new weights.

mod shared;
mod worker;

pub use shared::{Histogram, Refused, Snapshot};

use qurl_kernels::Device;
use qurl_model::Params;
use qurl_model::hf::OpenModel;
use qurl_rollout::{Engine, FinishReason, Request, WeightVersion};
use shared::{Place, Shared};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, ready};
use std::thread::JoinHandle;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The request's sample.
    pub sample: u32,
    /// The token.
    pub id: u32,
    /// Its log-probability under the distribution it was sampled from.
    pub logp: f32,
    /// The most probable tokens, the best first; as many as were asked for.
    pub top: Vec<(u32, f32)>,
    /// Set on a sample's last token.
    pub finish: Option<FinishReason>,
}

/// What a request's owner is told, in this order.
#[derive(Clone, Debug)]
pub enum News {
    /// It was taken up, and this is what it will be computed with to its end.
    Began(WeightVersion),
    /// Tokens of its samples: those of a step where they are streamed, else all of them.
    Tokens(Vec<Token>),
    /// All samples have ended. Log-probs of the prompt's tokens but the first, and the best tokens at their
    /// places, where asked for.
    Done(PromptScores),
    /// Somebody aborted it: what has come of it so far stands.
    Aborted,
    /// It cannot be computed.
    Failed(Failure),
}

/// Why a request was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It asks for what cannot be.
    Refused(String),
    /// The engine failed.
    Broken(String),
}

/// What the model says of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptScores {
    /// Log-probs of its tokens but the first.
    pub logprobs: Vec<f32>,
    /// The most probable tokens at each of these places.
    pub top: Vec<Vec<(u32, f32)>>,
}

/// A request on its way to the engine.
struct Job {
    number: u64,
    /// What its owner calls it.
    name: String,
    request: Request,
    streamed: bool,
    arrived: Instant,
    news: mpsc::UnboundedSender<News>,
    /// Given back when the job is dropped.
    _place: Place,
}

/// What happens to the requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFlight {
    /// They are finished first.
    Wait,
    /// They are aborted.
    Abort,
    /// They stand still, and continue after a resume (an update lets them finish, with their own weights,
    /// before it changes anything).
    Keep,
}

/// Where new weights are.
pub enum NewParams {
    /// On the host, in f32.
    Host(Params<Vec<f32>>),
    /// In files, from which they are read leaf by leaf: never are all of them on the host in full.
    Files(Box<OpenModel>),
}

/// New weights.
pub struct NewWeights {
    /// All of them.
    pub params: NewParams,
    /// What they are called.
    pub version: WeightVersion,
    /// What happens to the requests in flight.
    pub in_flight: InFlight,
}

/// Why weights are not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// Newer ones came before these were begun with.
    #[error("superseded: newer weights came before these were loaded")]
    Superseded,
    /// They cannot be loaded.
    #[error("{0}")]
    Failed(String),
}

/// What has come of new weights.
pub type Loaded = Result<WeightVersion, LoadError>;

/// What the worker is told.
enum Command {
    /// Jobs that begin together, and so with the same weights.
    Jobs(Vec<Job>),
    /// The owner of a job has gone.
    Gone(u64),
    /// Aborts the jobs of these names, or all; says how many they were.
    Abort(Option<BTreeSet<String>>, oneshot::Sender<usize>),
    Pause(InFlight, oneshot::Sender<()>),
    Resume(oneshot::Sender<()>),
    Load(Box<NewWeights>, oneshot::Sender<Loaded>),
    /// Forgets the pages that are kept for requests to come.
    Flush(oneshot::Sender<()>),
    /// Takes nothing more, finishes what is there.
    Stop,
}

/// The way to the engine. Clones speak with the same one.
#[derive(Clone)]
pub struct Service {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    jobs: Arc<AtomicU64>,
}

/// A request in the engine's hands.
pub struct Ticket {
    number: u64,
    commands: Sender<Command>,
    news: mpsc::UnboundedReceiver<News>,
    /// Whether its end has been told.
    ended: bool,
}

impl Ticket {
    /// What is new; nothing after the end. An engine that has ended before is told as a failure.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<News>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let gone = || News::Failed(Failure::Broken(Refused::Ended.to_string()));
        let news = ready!(self.news.poll_recv(cx)).unwrap_or_else(gone);
        self.ended = matches!(news, News::Done(_) | News::Aborted | News::Failed(_));
        Poll::Ready(Some(news))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.ended {
            _ = self.commands.send(Command::Gone(self.number));
        }
    }
}

/// The worker's thread.
pub struct Running {
    thread: JoinHandle<Result<(), String>>,
    service: Service,
}

impl Running {
    /// Finishes what is in flight, takes nothing more, and waits for the end.
    pub fn stop(self) -> Result<(), String> {
        _ = self.service.commands.send(Command::Stop);
        drop(self.service);
        self.thread.join().unwrap_or_else(|_| Err("the engine's thread panicked".to_string()))
    }

    /// Whether the engine has failed for good.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }
}

impl Service {
    /// Starts the engine on a thread of its own; at most `max_waiting` sequences wait beyond those that run.
    pub fn start<D: Device>(
        queue: D::Queue,
        engine: Engine<D>,
        max_waiting: usize,
    ) -> std::io::Result<(Service, Running)> {
        let shared = Arc::new(Shared::new(engine.options().max_num_seqs, max_waiting));
        let (commands, inbox) = std::sync::mpsc::channel();
        let worker = worker::Worker::new(queue, engine, inbox, shared.clone());
        let thread = std::thread::Builder::new().name("qurl-engine".to_string()).spawn(|| worker.run())?;
        let service = Service { commands, shared, jobs: Arc::default() };
        Ok((service.clone(), Running { thread, service }))
    }

    /// Refuses more sequences than could ever be in flight.
    pub fn could_hold(&self, count: usize, n: usize) -> Result<(), Refused> {
        self.shared.could_hold(count.saturating_mul(n))
    }

    /// Hands requests over, so many of so many samples each, which begin together, and each with its name.
    /// Refused where too much is in flight, or where the engine has ended; none is made then.
    pub fn submit(
        &self,
        names: impl Iterator<Item = String>,
        (count, n): (usize, usize),
        requests: impl Iterator<Item = Request>,
        streamed: bool,
    ) -> Result<Vec<Ticket>, Refused> {
        let mut places = self.shared.clone().enter(count.saturating_mul(n))?;
        let arrived = Instant::now();
        let first = self.jobs.fetch_add(count as u64, Ordering::Relaxed);
        let (mut jobs, mut tickets) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for ((number, name), request) in (first..).zip(names).zip(requests.take(count)) {
            let (sender, news) = mpsc::unbounded_channel();
            let _place = places.split(n);
            jobs.push(Job { number, name, request, streamed, arrived, news: sender, _place });
            tickets.push(Ticket { number, commands: self.commands.clone(), news, ended: false });
        }
        self.commands.send(Command::Jobs(jobs)).map_err(|_| Refused::Ended)?;
        Ok(tickets)
    }

    /// Aborts the requests of some names, or all; how many they were.
    pub async fn abort(&self, names: Option<BTreeSet<String>>) -> Result<usize, Refused> {
        self.ask(|reply| Command::Abort(names, reply)).await
    }

    /// Takes up no more requests; says so when those in flight have been dealt with as asked.
    pub async fn pause(&self, in_flight: InFlight) -> Result<(), Refused> {
        self.ask(|reply| Command::Pause(in_flight, reply)).await
    }

    /// Continues.
    pub async fn resume(&self) -> Result<(), Refused> {
        self.ask(Command::Resume).await
    }

    /// Forgets the pages that are kept for requests to come.
    pub async fn flush(&self) -> Result<(), Refused> {
        self.ask(Command::Flush).await
    }

    /// Changes the weights. They are handed over by the call itself, so that of two calls the second one has
    /// the newer; whoever drops what it returns before they are begun with does not want them any longer.
    pub fn load(&self, weights: NewWeights) -> impl Future<Output = Result<Loaded, Refused>> + use<> {
        let sent = self.order(|reply| Command::Load(Box::new(weights), reply));
        async move { sent?.await.map_err(|_| Refused::Ended) }
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Refused> {
        self.order(command)?.await.map_err(|_| Refused::Ended)
    }

    /// Sends a command, whose reply is to come.
    fn order<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<oneshot::Receiver<T>, Refused> {
        let (sender, reply) = oneshot::channel();
        self.commands.send(command(sender)).map_err(|_| Refused::Ended)?;
        Ok(reply)
    }

    /// What the engine is doing.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.snapshot()
    }

    /// Whether requests can be computed.
    pub fn is_healthy(&self) -> bool {
        self.shared.snapshot().healthy
    }
}

/// Jobs by number, for those who only know that.
type Numbers = BTreeMap<u64, qurl_rollout::RequestId>;

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    /// An engine that has gone before it has told an end is a failure, not an answer that is complete.
    #[test]
    fn an_engine_that_goes_is_told_once() {
        let (commands, inbox) = std::sync::mpsc::channel();
        let (sender, news) = mpsc::unbounded_channel();
        let mut ticket = Ticket { number: 3, commands, news, ended: false };
        let mut cx = Context::from_waker(Waker::noop());
        assert!(ticket.poll_next(&mut cx).is_pending());
        sender.send(News::Tokens(Vec::new())).expect("an open channel");
        drop(sender);
        assert!(matches!(ticket.poll_next(&mut cx), Poll::Ready(Some(News::Tokens(_)))));
        assert!(matches!(ticket.poll_next(&mut cx), Poll::Ready(Some(News::Failed(Failure::Broken(_))))));
        assert!(matches!(ticket.poll_next(&mut cx), Poll::Ready(None)));
        drop(ticket);
        assert!(inbox.try_recv().is_err(), "nothing is left to be cancelled");
    }
}
