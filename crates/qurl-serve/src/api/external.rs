//! What trainers ask of a server that they did not start themselves: how large it is, how busy, and which
//! weights it has; in the words of SGLang (slime), vLLM (SkyRL) and prime-rl.

use super::error::ApiError;
use super::{App, answer};
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::Response;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// How long the engine may take from one step to the next before it counts as hung.
const ALIVE_WITHIN: Duration = Duration::from_secs(30);

type Asked = Result<Query<BTreeMap<String, String>>, QueryRejection>;

/// PyTorch's name of a number format, where it has one.
fn dtype(format: &str) -> &str {
    match format {
        "bf16" => "bfloat16",
        "f32" => "float32",
        other => other,
    }
}

/// `GET /server_info`: one process that computes all of the model by itself.
pub async fn server_info(State(app): State<Arc<App>>) -> Response {
    let (now, sizes) = (app.service.snapshot(), app.service.sizes());
    answer(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model_path": app.model.dir,
        "served_model_name": app.model.names[0],
        "context_length": app.model.max_model_len,
        "vocab_size": app.model.config.vocab_size,
        "format": app.model.format,
        "dtype": dtype(&app.model.format),
        "weight_version": app.version_name(now.weights),
        "running": now.running,
        "waiting": now.waiting,
        "paused": now.paused,
        "num_gpus": sizes.accelerators,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "max_running_requests": sizes.max_running,
        "max_total_tokens": sizes.max_tokens(),
        "max_total_num_tokens": sizes.max_tokens(),
        "page_size": sizes.page_size,
        "enable_memory_saver": false,
        "disaggregation_mode": null,
    }))
}

/// The load of the one rank that there is; SGLang's requests are our sequences.
fn load(app: &App) -> Value {
    let (now, sizes) = (app.service.snapshot(), app.service.sizes());
    let used = now.pages_in_use * sizes.page_size;
    json!({
        "dp_rank": 0,
        "num_running_reqs": now.running,
        "num_waiting_reqs": now.waiting,
        "num_used_tokens": used,
        "max_total_num_tokens": sizes.max_tokens(),
        "max_running_requests": sizes.max_running,
        "token_usage": used as f64 / sizes.max_tokens().max(1) as f64,
    })
}

/// `GET /v1/loads`: SGLang's section `core`, the one that it has here.
pub async fn loads(State(app): State<Arc<App>>, asked: Asked) -> Result<Response, ApiError> {
    let Query(asked) = asked.map_err(|error| ApiError::bad(error.to_string()))?;
    if let Some(format) = asked.get("format").filter(|format| *format != "json") {
        return Err(ApiError::invalid("format", format!("format = {format}: expected json; see /metrics")));
    }
    if let Some(rank) = asked.get("dp_rank").filter(|rank| *rank != "0") {
        return Err(ApiError::invalid("dp_rank", format!("dp_rank = {rank}: expected 0, there is one rank")));
    }
    let sections = asked.get("include").map_or("core", String::as_str).split(',').map(str::trim);
    if let Some(other) = sections.into_iter().find(|section| !matches!(*section, "core" | "all")) {
        return Err(ApiError::invalid("include", format!("include = {other}: expected core or all")));
    }
    Ok(answer(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "num_accelerators": app.service.sizes().accelerators,
        "loads": [load(&app)],
    })))
}

/// `GET /get_load`: the same as SGLang had it before.
pub async fn old_loads(State(app): State<Arc<App>>) -> Response {
    let (now, sizes) = (app.service.snapshot(), app.service.sizes());
    answer(json!([{
        "dp_rank": 0,
        "num_reqs": now.running + now.waiting,
        "num_waiting_reqs": now.waiting,
        "num_tokens": now.pages_in_use * sizes.page_size,
    }]))
}

/// `GET /get_world_size`: ranks that share the model.
pub async fn world_size() -> Response {
    answer(json!({"world_size": 1}))
}

/// `GET /liveness`: whether the engine still takes orders, which it does between two steps.
pub async fn liveness(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    match timeout(ALIVE_WITHIN, app.service.abort(Some(BTreeSet::new()))).await {
        Ok(nobody) => nobody?,
        Err(_) => return Err(ApiError::unavailable(format!("no step has ended in {ALIVE_WITHIN:?}"))),
    };
    Ok(answer(json!({"status": "ok"})))
}

/// `GET /get_weight_version`, `GET /weight_version`
pub async fn weight_version(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    app.bodies.read(body, drop).await?;
    let weights = app.service.snapshot().weights;
    Ok(answer(json!({
        "weight_version": app.version_name(weights),
        "version": weights.version,
        "checksum": format!("{:016x}", weights.checksum),
    })))
}

/// `POST /update_weight_version {"new_version", "abort_all_requests"?}`: the weights stay, and are called
/// otherwise from now on.
pub async fn update_weight_version(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let wanted = app.read(body, |_, fields| {
        let name = fields.text("new_version")?.filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| fields.wrong("new_version", "a name"))?;
        Ok((name.to_string(), fields.is_or("abort_all_requests", true)?))
    });
    let (name, abort) = wanted.await?;
    if abort {
        app.service.abort(None).await?;
    }
    app.label(app.service.snapshot().weights.version, &name);
    let message = format!("Weight version updated to {name}");
    Ok(answer(json!({"success": true, "message": message, "new_version": name})))
}
