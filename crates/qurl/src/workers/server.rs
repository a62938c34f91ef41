//! The trainer's side of the five routes.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use qurl_serve::http::{BodyBudget, BodyError, Limits, Listener, guard, runtime};
use qurl_train::wire::Wire;
use qurl_train::workers::protocol::read;
use qurl_train::workers::{Pool, Refused};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// What a worker may take.
const LIMITS: Limits = Limits {
    connections: 1024,
    head_bytes: 8 << 10,
    headers: 32,
    head_time: Duration::from_secs(30),
    write_time: Duration::from_secs(60),
    keep_alive: false,
    goodbye: Duration::from_secs(3),
};
/// Longest message, how much of all of them is in memory, and how long one may take.
const LONGEST: usize = 256 << 20;
const TOGETHER: usize = 1 << 30;
const BODY_TIME: Duration = Duration::from_secs(300);
/// How long workers are told that a run is over, those that have been heard of within a lease. They ask every
/// two seconds, on a loaded machine less often.
const GOODBYE: Duration = Duration::from_secs(30);
/// How long the last answers have to leave.
const LAST_ANSWERS: Duration = Duration::from_millis(300);

/// The header of a refusal that comes from a trainer.
pub const MARK: &str = "qurl-trainer";

/// A server in the background.
pub struct Server {
    runtime: Runtime,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    pool: Arc<Pool>,
}

#[derive(Clone)]
struct Shared {
    pool: Arc<Pool>,
    address: SocketAddr,
    secret: Arc<str>,
    bodies: BodyBudget,
}

impl Server {
    /// Listens and answers from now on.
    pub fn start(pool: Arc<Pool>, address: SocketAddr, secret: String) -> io::Result<Server> {
        let listener = Listener::bind(address.ip(), address.port())?;
        let address = listener.address();
        let bodies = BodyBudget::new(LONGEST, TOGETHER, BODY_TIME);
        let shared = Shared { pool: pool.clone(), address, secret: secret.into(), bodies };
        let (stop, mut stopped) = watch::channel(false);
        let runtime = runtime(1)?;
        runtime.spawn(async move {
            let stopped = async { _ = stopped.wait_for(|stopped| *stopped).await };
            if let Err(error) = listener.serve(routes(shared), LIMITS, stopped).await {
                tracing::error!(%error, "listening for workers ended");
            }
        });
        Ok(Server { runtime, address, stop, pool })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers a moment longer, until workers have said that they know that the run is over.
    pub fn goodbye(self) {
        let until = std::time::Instant::now() + GOODBYE;
        while self.pool.waiting() > 0 && std::time::Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        // Those who come to join now say no goodbye; and the runtime drops what has not left when it ends.
        std::thread::sleep(LAST_ANSWERS);
        self.stop.send_replace(true);
        self.runtime.shutdown_timeout(Duration::from_millis(500));
    }
}

fn routes(shared: Shared) -> Router {
    Router::new()
        .route("/workers/v1/join", post(join))
        .route("/workers/v1/work", post(work))
        .route("/workers/v1/weights", post(weights))
        .route("/workers/v1/report", post(report))
        .route("/workers/v1/goodbye", post(goodbye))
        .layer(middleware::from_fn_with_state(shared.clone(), admit))
        .with_state(shared)
}

/// Lets nobody in without the secret.
async fn admit(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let headers: &HeaderMap = request.headers();
    let admitted = guard::check_host(headers, shared.address)
        .and_then(|()| guard::check_origin(headers))
        .and_then(|()| guard::check_key(headers, &shared.secret));
    match admitted {
        Ok(()) => next.run(request).await,
        Err(refusal) => {
            let (status, why) = refusal.answer();
            said(StatusCode::from_u16(status).unwrap_or(StatusCode::FORBIDDEN), why)
        }
    }
}

async fn join(State(shared): State<Shared>, body: Body) -> Response {
    answer(shared, body, |pool, hello| pool.join(&hello).map(|welcome| welcome.bytes().into())).await
}

async fn work(State(shared): State<Shared>, body: Body) -> Response {
    answer(shared, body, |pool, ask| pool.work(&ask).map(|work| work.bytes().into())).await
}

/// (worker, version), then the version that the worker has with both halves of its hash.
pub type WantedWeights = ((u64, u64), Option<(u64, (u64, u64))>);

async fn weights(State(shared): State<Shared>, body: Body) -> Response {
    answer(shared, body, |pool, ((worker, version), have): WantedWeights| {
        let have = have.map(|(own, (low, high))| (own, u128::from(low) | u128::from(high) << 64));
        pool.weights(worker, version, have).map(|bytes| Bytes::from_owner(Shareable(bytes)))
    })
    .await
}

async fn report(State(shared): State<Shared>, body: Body) -> Response {
    answer(shared, body, |pool, report| pool.report(report).map(|()| Bytes::new())).await
}

async fn goodbye(State(shared): State<Shared>, body: Body) -> Response {
    let heard = |pool: &Pool, worker: u64| {
        pool.goodbye(worker);
        Ok(Bytes::new())
    };
    answer(shared, body, heard).await
}

/// Weights that are sent to several workers without a copy for each.
struct Shareable(Arc<Vec<u8>>);

impl AsRef<[u8]> for Shareable {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// Reads a message and answers it, off the threads that move bytes: the pool may wait or compress.
async fn answer<T: Wire + Send + 'static>(
    shared: Shared,
    body: Body,
    answer: impl FnOnce(&Pool, T) -> Result<Bytes, Refused> + Send + 'static,
) -> Response {
    let message = match shared.bodies.read(body, |bytes| read::<T>(&bytes)).await {
        Ok(Some(message)) => message,
        Ok(None) => return said(StatusCode::BAD_REQUEST, "not a message of this route"),
        Err(error) => {
            let status = match error {
                BodyError::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
                BodyError::TooSlow(_) => StatusCode::REQUEST_TIMEOUT,
                BodyError::Busy => StatusCode::SERVICE_UNAVAILABLE,
                BodyError::Broken => StatusCode::BAD_REQUEST,
            };
            return said(status, &error.to_string());
        }
    };
    let pool = shared.pool;
    match tokio::task::spawn_blocking(move || answer(&pool, message)).await {
        Ok(Ok(bytes)) => bytes.into_response(),
        Ok(Err(refused)) => {
            let status = match refused {
                Refused::Unfit(_) => StatusCode::CONFLICT,
                Refused::Unknown => StatusCode::GONE,
                Refused::Gone(_) => StatusCode::NOT_FOUND,
            };
            let marked = [(MARK, "1")]; // a 404 of anything else on the way has no such header
            (marked, said(status, &refused.to_string())).into_response()
        }
        Err(_) => said(StatusCode::INTERNAL_SERVER_ERROR, "the trainer failed on this message"),
    }
}

fn said(status: StatusCode, why: &str) -> Response {
    (status, format!("{why}\n")).into_response()
}
