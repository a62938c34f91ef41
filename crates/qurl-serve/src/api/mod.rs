//! The engine in the words of others: OpenAI's, vLLM's and SGLang's.
//!
//! Every dialect turns a body into a [`call::Call`] and an outcome into its own shape; the engine does not
//! know which one asked. What all share is here: who may ask, how bodies are read, and the routes.

mod call;
mod chat;
mod completions;
mod control;
mod conversation;
mod document;
mod error;
mod external;
mod fields;
mod info;
mod logprobs;
mod metrics;
mod outcome;
mod parts;
mod reading;
mod sampling;
mod sglang;
mod stream;
mod telling;
mod texts;
mod vllm;

pub use error::ApiError;
pub use parts::{Parsers, ReasoningParser, ToolParser};
pub use telling::Telling;
pub use texts::Texts;

use crate::http::{BodyBudget, guard};
use crate::service::Service;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use fields::Fields;
use qurl_model::{Lora, ModelConfig};
use qurl_rollout::WeightVersion;
use reading::Readers;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of a body from which on it is parsed off the threads of the connections, since a tokenizer or a
/// template takes its time; and from which on one at a time: JSON takes many times the memory of its text.
const SHORT: usize = 8 << 10;
const LONG: usize = 256 << 10;
/// Threads that parse those in between.
const READERS: usize = 2;
/// Most values of a body, which take up to 200 bytes each.
const MAX_VALUES: usize = 1 << 20;
/// Most names of versions that are remembered.
const MAX_LABELS: usize = 64;

/// The model that is served.
pub struct ModelFacts {
    /// Names that requests may use; the first is the one that answers give.
    pub names: Vec<String>,
    /// Where its weights came from at first; nothing for random ones.
    pub dir: Option<PathBuf>,
    /// Longest sequence, prompt and new tokens.
    pub max_model_len: usize,
    /// Its configuration, which new weights must share.
    pub config: ModelConfig,
    /// Number format of the weights.
    pub format: String,
    /// Adapters beside its weights, which new weights replace in place of these.
    pub lora: Option<Lora>,
}

/// Where new weights may come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WeightSource {
    /// Nowhere.
    Nowhere,
    /// Any directory.
    Anywhere,
    /// Directories inside of this one.
    Inside(PathBuf),
}

/// Everything that a request may need.
pub struct App {
    /// The way to the engine.
    pub service: Service,
    /// Text to tokens and back.
    pub texts: Texts,
    /// What is looked for in the answers of chats.
    pub parsers: Parsers,
    /// What is served.
    pub model: ModelFacts,
    /// Where the server listens.
    pub address: SocketAddr,
    /// What requests must show.
    pub key: Option<String>,
    /// How bodies are read.
    pub bodies: BodyBudget,
    /// Longest time of an answer.
    pub time: Option<Duration>,
    /// Where new weights may come from.
    pub weight_source: WeightSource,
    /// Seed of requests that name none.
    pub seed: u64,
    /// What was counted since the start.
    pub counters: Counters,
    /// What answers may take.
    pub telling: Telling,
    /// Who reads bodies, and who loads weights: one at a time.
    pub turns: Turns,
}

/// What few requests at a time do.
pub struct Turns {
    reading: Readers,
    reading_long: Readers,
    loading: Arc<tokio::sync::Mutex<()>>,
}

impl Turns {
    /// Starts the threads that read bodies.
    pub fn start() -> io::Result<Turns> {
        let (reading, reading_long) = (Readers::start(READERS)?, Readers::start(1)?);
        Ok(Turns { reading, reading_long, loading: Arc::default() })
    }
}

/// Numbers that rise while the server runs, and names of weights.
#[derive(Default)]
pub struct Counters {
    unseeded: AtomicU64,
    calls: AtomicU64,
    version: AtomicU64,
    labels: Mutex<BTreeMap<u64, String>>,
}

impl App {
    /// Sets requests without a seed apart.
    fn next_unseeded(&self) -> u64 {
        self.counters.unseeded.fetch_add(1, Ordering::Relaxed)
    }

    /// A name for a call: the client's own, or a new one.
    fn name(&self, prefix: &str, own: Option<&str>) -> String {
        let number = self.counters.calls.fetch_add(1, Ordering::Relaxed);
        own.map_or_else(|| format!("{prefix}-{:016x}{number:08x}", self.seed), str::to_string)
    }

    /// The same, where the client may have named it in the body or in a header.
    fn name_of(&self, prefix: &str, headers: &HeaderMap, fields: Fields<'_>) -> Result<String, ApiError> {
        let own = fields.text("request_id")?;
        Ok(self.name(prefix, own.or_else(|| headers.get("x-request-id")?.to_str().ok())))
    }

    fn labels(&self) -> MutexGuard<'_, BTreeMap<u64, String>> {
        self.counters.labels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a version of the weights by a name of the client's.
    fn label(&self, version: u64, name: &str) {
        let mut labels = self.labels();
        labels.insert(version, name.to_string());
        while labels.len() > MAX_LABELS {
            labels.pop_first();
        }
    }

    /// What a version of the weights is called: by its number where nobody named it.
    fn version_name(&self, weights: WeightVersion) -> String {
        self.labels().get(&weights.version).cloned().unwrap_or_else(|| weights.version.to_string())
    }

    /// Refuses requests for another model.
    fn check_model(&self, body: Fields<'_>) -> Result<(), ApiError> {
        match body.text("model")? {
            Some(name) if !name.is_empty() && !self.model.names.iter().any(|own| own == name) => Err(
                ApiError::not_found(format!("the model `{name}` is not here, `{}` is", self.model.names[0])),
            ),
            _ => Ok(()),
        }
    }

    /// The model's name in answers.
    fn model_name(&self) -> &str {
        &self.model.names[0]
    }

    /// Tokens of a text.
    fn encode(&self, key: &str, text: &str, add_special: bool) -> Result<Vec<u32>, ApiError> {
        self.texts.encode(key, text, add_special, self.model.max_model_len)
    }

    /// Reads a body of JSON, an empty one as an empty object, and makes of its keys what is wanted. What is
    /// not wanted is gone before anyone waits for an answer.
    async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        body: Body,
        wanted: impl FnOnce(&App, Fields<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (bytes, share) = self.bodies.whole(body).await?;
        let (app, length) = (self.clone(), bytes.len());
        let parse = move || {
            let read = app.parse(bytes, wanted);
            drop(share);
            read
        };
        match length {
            ..SHORT => parse(),
            SHORT..LONG => self.turns.reading.run(parse).await?,
            _ => self.turns.reading_long.run(parse).await?,
        }
    }

    fn parse<T>(
        &self,
        bytes: Vec<u8>,
        wanted: impl FnOnce(&App, Fields<'_>) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        if qurl_files::json_size(&bytes).values > MAX_VALUES {
            return Err(ApiError::bad(format!("the body has more than {MAX_VALUES} values")));
        }
        let value = match bytes.is_empty() {
            true => Value::Object(serde_json::Map::new()),
            false => serde_json::from_slice(&bytes)
                .map_err(|error| ApiError::bad(format!("the body is no JSON: {error}")))?,
        };
        drop(bytes);
        wanted(self, Fields::of(&value)?)
    }
}

/// Which weights: `system_fingerprint`.
fn fingerprint(weights: WeightVersion) -> String {
    format!("qurl-{}-{:016x}", weights.version, weights.checksum)
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// All routes, each also with a slash at its end, as some clients make addresses.
pub fn routes(app: Arc<App>) -> Router {
    let of_orders = [
        ("/update_weights", post(control::update_weights)),
        ("/update_weights_from_disk", post(control::update_weights_from_disk)),
        ("/update_weight_version", post(external::update_weight_version)),
        ("/pause", post(control::pause)),
        ("/resume", post(control::resume)),
        ("/is_paused", get(control::is_paused)),
        ("/abort_requests", post(control::abort_requests)),
        ("/pause_generation", post(control::pause_generation)),
        ("/continue_generation", post(control::resume)),
        ("/abort_request", post(control::abort_request)),
        ("/flush_cache", get(control::flush_cache).post(control::flush_cache)),
        ("/reset_prefix_cache", post(control::reset_prefix_cache)),
    ];
    let of_facts = [
        ("/v1/models", get(info::models)),
        ("/health", get(info::health)),
        ("/ping", get(info::health).post(info::health)),
        ("/health_generate", get(info::health_generate)),
        ("/liveness", get(external::liveness)),
        ("/metrics", get(metrics::metrics)),
        ("/version", get(info::version)),
        ("/server_info", get(external::server_info)),
        ("/get_server_info", get(external::server_info)),
        ("/model_info", get(info::model_info)),
        ("/get_model_info", get(info::model_info)),
        ("/get_weight_version", get(external::weight_version).post(external::weight_version)),
        ("/weight_version", get(external::weight_version)),
        ("/get_world_size", get(external::world_size)),
        ("/v1/loads", get(external::loads)),
        ("/get_load", get(external::old_loads)),
    ];
    let of_answers = [
        ("/v1/completions", post(completions::complete)),
        ("/v1/chat/completions", post(chat::complete)),
        ("/inference/v1/generate", post(vllm::generate)),
        ("/tokenize", post(vllm::tokenize)),
        ("/detokenize", post(vllm::detokenize)),
        ("/generate", post(sglang::generate)),
    ];
    let mut router = Router::new().route("/v1/models/{*id}", get(info::model));
    for (path, methods) in of_orders.into_iter().chain(of_facts).chain(of_answers) {
        router = router.route(path, methods.clone()).route(&format!("{path}/"), methods);
    }
    router
        .fallback(async || ApiError::not_found("there is nothing at this address"))
        .method_not_allowed_fallback(async || ApiError::method())
        .layer(from_fn_with_state(app.clone(), guarded))
        .with_state(app)
}

/// Lets in who may ask. Whether the server is well may be asked without a key.
async fn guarded(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let open = matches!(request.uri().path(), "/health" | "/health/");
    let mut may = guard::check_host(headers, app.address);
    if may.is_ok() && !open {
        may = match &app.key {
            Some(key) => guard::check_key(headers, key),
            None => guard::check_origin(headers),
        };
    }
    match may {
        Ok(()) => next.run(request).await,
        Err(refusal) => ApiError::from(refusal).into_response(),
    }
}

/// An answer of JSON.
fn answer(value: impl Serialize) -> Response {
    Json(value).into_response()
}
