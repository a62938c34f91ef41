//! Rollout workers over HTTP: a trainer that listens for them, and a worker's way to its trainer.
//!
//! Five routes under `/workers/v1/` take a message of `qurl_train::workers::protocol` and answer with one, or
//! with a status and a reason as text. Both sides show the secret of QURL_WORKER_SECRET as a bearer key, on a
//! loopback address, too. There is no TLS: where the network is not trusted, both ends stand behind a proxy
//! or in a tunnel.

mod link;
mod server;

pub use link::HttpLink;

use crate::input::bad;
use crate::stop::Stop;
use crate::version;
use crate::view::TrainView;
use qurl_kernels::Device;
use qurl_train::ranks::Ranks;
use qurl_train::recipe;
use qurl_train::rl::RlTrainer;
use qurl_train::workers::Pool;
use server::Server;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Holds the secret that trainer and workers share.
const SECRET: &str = "QURL_WORKER_SECRET";
/// A shorter one is a mistake.
const MIN_SECRET: usize = 16;

/// The program as trainer and workers compare it.
pub fn program() -> String {
    format!("qurl {}", version::SHORT)
}

/// The secret, from the environment.
pub fn secret() -> anyhow::Result<String> {
    let secret = std::env::var(SECRET).unwrap_or_default();
    match secret.len() {
        MIN_SECRET.. if secret.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(secret),
        0 => Err(bad(format!(
            "{SECRET} is not set: trainer and workers share a secret of at least {MIN_SECRET} characters, as \
             `openssl rand -hex 16` makes one"
        ))),
        found => Err(bad(format!(
            "{SECRET} has {found} bytes: expected at least {MIN_SECRET}, letters, digits and signs without \
             spaces"
        ))),
    }
}

/// What can be known to be wrong before a run begins.
pub fn prepare(ranks: &Ranks) -> anyhow::Result<()> {
    if ranks.size() > 1 {
        let size = ranks.size();
        return Err(bad(format!(
            "rollout.workers: workers are for runs of one rank, and this one has {size}: leave the section \
             out or start one rank"
        )));
    }
    secret().map(|_| ())
}

/// A trainer's workers: the pool, and the server that they come to.
pub struct Workers {
    pool: Arc<Pool>,
    server: Option<Server>,
}

impl Workers {
    /// Listens, and lets the trainer use who comes.
    pub fn listen<D: Device>(
        trainer: &mut RlTrainer<D>,
        settings: &recipe::Workers,
        stop: &Stop,
        view: &TrainView,
    ) -> anyhow::Result<Workers> {
        let address: SocketAddr =
            settings.listen.parse().map_err(|e| bad(format!("rollout.workers.listen: {e}")))?;
        let (requested, at_once) = (stop.flag(), stop.at_once());
        let stop = move |nobody: bool| {
            at_once.load(Ordering::SeqCst) || (nobody && requested.load(Ordering::SeqCst))
        };
        let pool = trainer.open_pool(settings, &program(), stop);
        let server = Server::start(pool.clone(), address, secret()?)
            .map_err(|e| bad(format!("rollout.workers.listen = {address}: cannot be listened on: {e}")))?;
        view.note(&format!("workers join with: qurl worker --join http://{}", server.address()));
        Ok(Workers { pool, server: Some(server) })
    }

    /// Tells workers that the run is over; else they wait for it to be resumed.
    pub fn over(&self) {
        self.pool.end();
    }

    /// What people should know, since the last call.
    pub fn notes(&self) -> Vec<String> {
        self.pool.notes()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.goodbye();
        }
    }
}
