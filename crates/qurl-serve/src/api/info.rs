//! What the server says of itself: models, health, versions.

use super::call::{Call, Told};
use super::error::ApiError;
use super::sampling::{Dialect, Wanted};
use super::{App, answer, fields::Fields, now};
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

fn card(app: &App, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": now(),
        "owned_by": "qurl",
        "root": app.model.dir,
        "parent": null,
        "max_model_len": app.model.max_model_len,
    })
}

/// `GET /v1/models`
pub async fn models(State(app): State<Arc<App>>) -> Response {
    let cards: Vec<Value> = app.model.names.iter().map(|name| card(&app, name)).collect();
    answer(json!({"object": "list", "data": cards}))
}

/// `GET /v1/models/NAME`
pub async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Ok(Path(name)) = name else { return Err(ApiError::not_found("no model has such a name")) };
    let name = name.strip_suffix('/').unwrap_or(&name).to_string();
    match app.model.names.contains(&name) {
        true => Ok(answer(card(&app, &name))),
        false => Err(ApiError::not_found(format!("the model `{name}` is not here"))),
    }
}

/// `GET /health`: whether requests can be computed.
pub async fn health(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    app.bodies.read(body, drop).await?;
    Ok(match app.service.is_healthy() {
        true => answer(json!({"status": "ok"})),
        false => {
            (StatusCode::SERVICE_UNAVAILABLE, "the engine has no weights, or has failed\n").into_response()
        }
    })
}

/// `GET /health_generate`: computes a token.
pub async fn health_generate(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let params = json!({"max_tokens": 1, "temperature": 0, "ignore_eos": true});
    let call = Call {
        id: app.name("health", None),
        ids: Vec::new(),
        prompts: vec![vec![0]],
        wanted: Wanted::read(Fields::of(&params)?, Dialect::OpenAi)?,
        each: Vec::new(),
        salt: Vec::new(),
        top: 0,
        prompt_top: None,
        told: Told::default(),
    };
    app.collect(&call).await.map(drop)?;
    Ok(answer(json!({"status": "ok"})))
}

/// `GET /version`
pub async fn version() -> Response {
    answer(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /model_info`
pub async fn model_info(State(app): State<Arc<App>>) -> Response {
    answer(json!({
        "model_path": app.model.dir,
        "served_model_name": app.model.names[0],
        "is_generation": true,
        "weight_version": app.version_name(app.service.snapshot().weights),
    }))
}
