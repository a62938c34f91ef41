//! A server: the engine's thread, the routes, and an address.

use crate::api::{App, Counters, ModelFacts, Parsers, Telling, Texts, Turns, WeightSource, routes};
use crate::http::{BodyBudget, Limits, Listener, runtime};
use crate::service::Service;
use qurl_kernels::Device;
use qurl_rollout::Engine;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// How often the server asks whether it is to stop.
const STOP_EVERY: Duration = Duration::from_millis(40);
/// Bytes of all bodies that are being read, in units of the longest one.
const BODIES_TOGETHER: usize = 16;

/// How a server serves.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// What requests must show.
    pub key: Option<String>,
    /// Sequences that may wait beyond those that run.
    pub max_waiting: usize,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// How long a body may take.
    pub body_time: Duration,
    /// Longest time of an answer.
    pub time: Option<Duration>,
    /// Where new weights may come from.
    pub weight_source: WeightSource,
    /// What is looked for in the answers of chats.
    pub parsers: Parsers,
    /// Seed of requests that name none.
    pub seed: u64,
    /// What connections may take.
    pub limits: Limits,
    /// Threads of the connections.
    pub threads: usize,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            key: None,
            max_waiting: 1024,
            body_bytes: 8 << 20,
            body_time: Duration::from_secs(30),
            time: None,
            weight_source: WeightSource::Nowhere,
            parsers: Parsers::default(),
            seed: 0,
            limits: Limits::default(),
            threads: 2,
        }
    }
}

/// Why a server ended.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Its sockets or threads failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The engine failed, and cannot compute anything any more.
    #[error("the engine failed: {0}")]
    Engine(String),
}

/// Serves an engine at an address until `stop` says so, and then finishes what is in progress.
pub fn serve<D: Device>(
    listener: Listener,
    queue: D::Queue,
    mut engine: Engine<D>,
    (texts, model): (Texts, ModelFacts),
    options: ServerOptions,
    stop: impl Fn() -> bool,
) -> Result<(), ServerError> {
    if let Some(decoder) = texts.decoder() {
        engine.set_text_decoder(decoder);
    }
    let ServerOptions {
        key, body_bytes, body_time, time, weight_source, parsers, seed, limits, threads, ..
    } = options;
    let (service, running) = Service::start(queue, engine, options.max_waiting)?;
    let app = App {
        service,
        texts,
        parsers,
        model,
        address: listener.address(),
        key,
        bodies: BodyBudget::new(body_bytes, body_bytes * BODIES_TOGETHER, body_time),
        time,
        weight_source,
        seed,
        counters: Counters::default(),
        telling: Telling::default(),
        turns: Turns::start()?,
    };
    let runtime = runtime(threads)?;
    let stopped = async {
        while !stop() && !running.has_ended() {
            sleep(STOP_EVERY).await;
        }
    };
    let served = runtime.block_on(listener.serve(routes(Arc::new(app)), limits, stopped));
    // Answers that were not taken in time are cancelled with their connections.
    runtime.shutdown_background();
    running.stop().map_err(ServerError::Engine)?;
    Ok(served?)
}
