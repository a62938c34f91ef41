//! Orders: new weights, pause and resume, aborts; in vLLM's and SGLang's words.
//!
//! Requests in flight keep their weights. An update lets them finish first, those too that a pause has
//! frozen, or aborts them where it is asked to; what arrives meanwhile waits for the new weights.
//!
//! Orders that need nothing of a body read it all the same: a connection over which bytes are left unread
//! cannot be used again.

use super::error::ApiError;
use super::fields::Fields;
use super::{App, ModelFacts, WeightSource, answer};
use crate::service::{InFlight, LoadError, NewParams, NewWeights};
use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use qurl_model::hf::{self, HfError, peft};
use qurl_rollout::WeightVersion;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What happens to requests in flight, in vLLM's words.
fn mode(name: Option<&str>, absent: InFlight) -> Result<InFlight, ApiError> {
    match name {
        None => Ok(absent),
        Some("wait") => Ok(InFlight::Wait),
        Some("abort") => Ok(InFlight::Abort),
        Some("keep" | "in_place" | "retract") => Ok(InFlight::Keep),
        Some(other) => {
            Err(ApiError::invalid("mode", format!("mode = {other:?}: expected keep, wait or abort")))
        }
    }
}

/// A directory that weights may come from.
fn allowed(app: &App, asked: &Path) -> Result<PathBuf, ApiError> {
    let no = |why: &str| Err(ApiError::forbidden(format!("{}: {why}", asked.display())));
    match &app.weight_source {
        WeightSource::Nowhere => no("this server takes no new weights (see --weights-from)"),
        WeightSource::Anywhere => Ok(asked.to_path_buf()),
        // One answer, whether it is there or not: what lies outside is nobody's business.
        WeightSource::Inside(root) => match (asked.canonicalize(), root.canonicalize()) {
            (Ok(asked), Ok(root)) if asked.starts_with(&root) => Ok(asked),
            _ => no("is no directory that this server takes weights from"),
        },
    }
}

/// Loads a directory and gives it to the engine.
async fn update(
    app: &Arc<App>,
    dir: &Path,
    name: Option<&str>,
    in_flight: InFlight,
) -> Result<WeightVersion, ApiError> {
    let dir = allowed(app, dir)?;
    // Weights of one update at a time are read, to the end even where its caller leaves; versions are in the
    // order in which the engine gets them, and the newest one that it has not begun with replaces the others.
    let turn = app.turns.loading.clone().lock_owned().await;
    let (reading, reader) = (dir.clone(), app.clone());
    let read =
        tokio::task::spawn_blocking(move || read_weights(&reading, &reader.model).map(|read| (read, turn)));
    let ((params, checksum), turn) =
        read.await.map_err(|_| ApiError::broken("reading the weights failed"))??;
    let version = app.counters.version.fetch_add(1, Ordering::Relaxed) + 1;
    let version = WeightVersion { version, checksum };
    if let Some(name) = name {
        app.label(version.version, name);
    }
    let loading = app.service.load(NewWeights { params, version, in_flight });
    drop(turn);
    loading.await?.map_err(|error| match error {
        LoadError::Superseded => ApiError::conflict(format!("{}: {error}", dir.display())),
        LoadError::Failed(reason) => ApiError::broken(format!("{}: {reason}", dir.display())),
    })
}

/// The weights of a directory that can replace those that are served, and their checksum: of the whole model,
/// or of the adapters beside it. A model is opened and all of it read once, leaf by leaf: what could be wrong
/// with it is known before the engine changes anything.
fn read_weights(dir: &Path, served: &ModelFacts) -> Result<(NewParams, u64), ApiError> {
    let bad = |error: HfError| ApiError::bad(error.to_string());
    let other = |what: &str| Err(ApiError::bad(format!("{}: {what}", dir.display())));
    if let Some(lora) = served.lora {
        let adapter = peft::load(dir, &served.config).map_err(bad)?;
        if adapter.lora != lora {
            return other(&format!("adapters with {}, expected those served, with {lora}", adapter.lora));
        }
        let checksum = qurl_quant::checksum::host_params(&adapter.params);
        return Ok((NewParams::Host(adapter.params), checksum));
    }
    let model = hf::open_update(dir, &served.config).map_err(bad)?;
    if !same_shape(&model.config, &served.config) || model.has_value_head() {
        return other("weights of another model than the one that is served");
    }
    let checksum = qurl_quant::checksum::files(&model).map_err(bad)?;
    Ok((NewParams::Files(Box::new(model)), checksum))
}

/// Whether both have the same weights in the same places, whatever their stop tokens.
fn same_shape(new: &qurl_model::ModelConfig, old: &qurl_model::ModelConfig) -> bool {
    let mut new = new.clone();
    new.dtype = old.dtype;
    new.eos_token_ids.clone_from(&old.eos_token_ids);
    (new.bos_token_id, new.pad_token_id) = (old.bos_token_id, old.pad_token_id);
    (new.initializer_range, new.uaq) = (old.initializer_range, old.uaq);
    new == *old
}

/// A version's name: a text, or a number.
fn version_name(fields: Fields<'_>, key: &str) -> Result<Option<String>, ApiError> {
    fields.read(key, "a text or a number", |value| match value {
        Value::String(name) => Some(name.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    })
}

/// `POST /update_weights {"weight_dir", "version"?, "mode"?}`
pub async fn update_weights(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let wanted = app.read(body, |_, fields| {
        let dir = fields.text("weight_dir")?.ok_or_else(|| fields.wrong("weight_dir", "a directory"))?;
        let in_flight = mode(fields.text("mode")?, InFlight::Wait)?;
        Ok((PathBuf::from(dir), version_name(fields, "version")?, in_flight))
    });
    let (dir, name, in_flight) = wanted.await?;
    let weights = update(&app, &dir, name.as_deref(), in_flight).await?;
    let checksum = format!("{:016x}", weights.checksum);
    Ok(answer(json!({"status": "ok", "weight_version": app.version_name(weights), "checksum": checksum})))
}

/// `POST /update_weights_from_disk {"model_path", "weight_version"?, "abort_all_requests"?}`
pub async fn update_weights_from_disk(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let wanted = app.read(body, |_, fields| {
        let dir = fields.text("model_path")?.ok_or_else(|| fields.wrong("model_path", "a directory"))?;
        let in_flight = if fields.is("abort_all_requests")? { InFlight::Abort } else { InFlight::Wait };
        Ok((PathBuf::from(dir), version_name(fields, "weight_version")?, in_flight))
    });
    let (dir, name, in_flight) = wanted.await?;
    Ok(match update(&app, &dir, name.as_deref(), in_flight).await {
        Ok(weights) => {
            let message = format!("the weights are {weights}");
            answer(json!({"success": true, "message": message, "num_paused_requests": 0}))
        }
        Err(error) => (StatusCode::BAD_REQUEST, Json(json!({"success": false, "message": error.message()})))
            .into_response(),
    })
}

/// `POST /pause?mode=keep|wait|abort`
pub async fn pause(
    State(app): State<Arc<App>>,
    query: Result<Query<HashMap<String, String>>, QueryRejection>,
    body: Body,
) -> Result<Response, ApiError> {
    app.bodies.read(body, drop).await?;
    let Query(query) = query.map_err(|error| ApiError::bad(error.to_string()))?;
    app.service.pause(mode(query.get("mode").map(String::as_str), InFlight::Abort)?).await?;
    Ok(answer(json!({"status": "paused"})))
}

/// `POST /pause_generation {"mode"?}`
pub async fn pause_generation(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let mode = app.read(body, |_, fields| mode(fields.text("mode")?, InFlight::Abort)).await?;
    app.service.pause(mode).await?;
    Ok(answer(json!({"status": "paused", "message": "Generation paused successfully."})))
}

/// `POST /resume`, `POST /continue_generation`
pub async fn resume(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    app.bodies.read(body, drop).await?;
    app.service.resume().await?;
    Ok(answer(json!({"status": "resumed"})))
}

/// `GET /is_paused`
pub async fn is_paused(State(app): State<Arc<App>>) -> Response {
    answer(json!({"is_paused": app.service.snapshot().paused}))
}

/// `POST /abort_requests {"request_ids"?}`: those, or all where none is named, as vLLM has it.
pub async fn abort_requests(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let ids = app.read(body, |_, fields| fields.texts("request_ids")).await?;
    let ids = (!ids.is_empty()).then(|| ids.into_iter().collect());
    let aborted = app.service.abort(ids).await?;
    Ok(answer(json!({"status": "aborted", "aborted": aborted})))
}

/// `POST /abort_request {"rid"?, "abort_all"?}`
pub async fn abort_request(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let wanted = app.read(body, |_, fields| match fields.text("rid")?.filter(|id| !id.is_empty()) {
        _ if fields.is("abort_all")? => Ok(None),
        Some(id) => Ok(Some(BTreeSet::from([id.to_string()]))),
        None => Err(ApiError::invalid("rid", "neither rid nor abort_all: true is given")),
    });
    let aborted = app.service.abort(wanted.await?).await?;
    Ok(answer(json!({"status": "ok", "aborted": aborted})))
}

/// `POST /flush_cache`
pub async fn flush_cache(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    app.bodies.read(body, drop).await?;
    app.service.flush().await?;
    Ok(answer(json!({"status": "ok"})))
}

/// `POST /reset_prefix_cache`
pub async fn reset_prefix_cache(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    app.bodies.read(body, drop).await?;
    app.service.flush().await?;
    Ok(answer(json!({"success": true})))
}
