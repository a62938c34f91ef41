//! What the server says of itself: models, health, versions, metrics.

use super::call::{Call, Told};
use super::error::ApiError;
use super::sampling::{Dialect, Wanted};
use super::{App, answer, fields::Fields, now};
use crate::service::{Histogram, Snapshot};
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::fmt::Write;
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

/// `GET /metrics`, for Prometheus.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = exposition(&app.service.snapshot());
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// The metrics as text.
fn exposition(now: &Snapshot) -> String {
    let mut text = String::new();
    let mut one = |name: &str, kind: &str, help: &str, values: &[(&str, f64)]| {
        // Writing to a String cannot fail.
        _ = writeln!(text, "# HELP qurl_{name} {help}\n# TYPE qurl_{name} {kind}");
        for (labels, value) in values {
            _ = writeln!(text, "qurl_{name}{labels} {value}");
        }
    };
    let (stats, plain) = (&now.stats, "");
    let ended = [
        ("{outcome=\"done\"}", now.done as f64),
        ("{outcome=\"failed\"}", now.failed as f64),
        ("{outcome=\"aborted\"}", now.aborted as f64),
        ("{outcome=\"gone\"}", now.gone as f64),
        ("{outcome=\"refused\"}", now.refused as f64),
    ];
    one("sequences_running", "gauge", "Sequences that hold pages", &[(plain, now.running as f64)]);
    one("sequences_waiting", "gauge", "Sequences that wait", &[(plain, now.waiting as f64)]);
    one("paused", "gauge", "Whether requests wait for a resume", &[(plain, f64::from(u8::from(now.paused)))]);
    one("healthy", "gauge", "Whether requests can be computed", &[(plain, f64::from(u8::from(now.healthy)))]);
    one("requests_total", "counter", "Requests by how they ended", &ended);
    one("prompt_tokens_total", "counter", "Tokens of prompts", &[(plain, now.prompt_tokens as f64)]);
    one("generated_tokens_total", "counter", "Sampled tokens", &[(plain, stats.decode_tokens as f64)]);
    one(
        "prefill_tokens_total",
        "counter",
        "Tokens computed for their keys and values",
        &[(plain, stats.prefill_tokens as f64)],
    );
    one(
        "shared_tokens_total",
        "counter",
        "Tokens of prompts whose pages another request had computed",
        &[(plain, stats.shared_tokens as f64)],
    );
    one("preemptions_total", "counter", "Sequences computed again", &[(plain, stats.preemptions as f64)]);
    one("steps_total", "counter", "Steps of the engine", &[(plain, stats.steps as f64)]);
    one("pages", "gauge", "Pages for keys and values", &[(plain, now.pages as f64)]);
    one("pages_used", "gauge", "Pages in use or kept", &[(plain, now.pages_used as f64)]);
    one("weight_version", "gauge", "Version of the weights", &[(plain, now.weights.version as f64)]);
    for (name, help, histogram) in [
        ("first_token_seconds", "From arrival to the first token", &now.first_token),
        ("between_tokens_seconds", "Between tokens of a sample", &now.between_tokens),
        ("request_seconds", "From arrival to the end", &now.whole),
    ] {
        write_histogram(&mut text, name, help, histogram);
    }
    text
}

fn write_histogram(text: &mut String, name: &str, help: &str, histogram: &Histogram) {
    let (buckets, sum) = histogram.cumulative();
    _ = writeln!(text, "# HELP qurl_{name} {help}\n# TYPE qurl_{name} histogram");
    let mut count = 0;
    for (bound, cumulative) in buckets {
        let bound = bound.map_or("+Inf".to_string(), |bound| bound.to_string());
        _ = writeln!(text, "qurl_{name}_bucket{{le=\"{bound}\"}} {cumulative}");
        count = cumulative;
    }
    _ = writeln!(text, "qurl_{name}_sum {sum}\nqurl_{name}_count {count}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn metrics_are_whole_lines_with_rising_buckets() {
        let mut now = Snapshot { done: 3, ..Snapshot::default() };
        for milliseconds in [1, 3, 3, 700_000] {
            now.first_token.add(Duration::from_millis(milliseconds));
        }
        let text = exposition(&now);
        assert!(text.contains("qurl_requests_total{outcome=\"done\"} 3\n"), "{text}");
        assert!(text.contains("qurl_first_token_seconds_bucket{le=\"0.002\"} 1\n"));
        assert!(text.contains("qurl_first_token_seconds_bucket{le=\"0.005\"} 3\n"));
        assert!(text.contains("qurl_first_token_seconds_bucket{le=\"+Inf\"} 4\n"));
        assert!(text.contains("qurl_first_token_seconds_count 4\n"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.split_once(' ').expect("a name and a value");
            assert!(name.starts_with("qurl_") && value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
