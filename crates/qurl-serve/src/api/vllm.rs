//! vLLM's own addresses: token in, token out, and the tokenizer.

use super::call::{Call, Usage};
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use super::logprobs::Naming;
use super::sampling::{Dialect, Wanted, top};
use super::{App, answer};
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST /inference/v1/generate`: `token_ids` and `sampling_params` in; ids, log-probs and reasons out,
/// tokens named by their ids.
pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let wanted = app.read(body, |fields| {
        app.check_model(fields)?;
        for key in ["stream", "features", "content_parts", "kv_transfer_params"] {
            fields.refuse(key, is_empty)?;
        }
        let empty = Value::Object(Map::new());
        let params = match fields.object("sampling_params")? {
            Some(params) => params,
            None => Fields::of(&empty)?,
        };
        let wanted = Wanted::read(params, Dialect::OpenAi)?;
        let wanted = Wanted { max_new: wanted.max_new.or(Some(16)), ..wanted };
        let best = top(params, "logprobs")?;
        let prompt = fields.ids("token_ids")?;
        let call = Call {
            id: app.name_of("gen", &headers, fields)?,
            prompts: vec![prompt.ok_or_else(|| fields.wrong("token_ids", "a list of token ids"))?],
            wanted,
            top: best.unwrap_or(0),
            prompt_top: top(params, "prompt_logprobs")?,
        };
        Ok((call, best.is_some(), fields.is("return_token_ids")?))
    });
    let (call, logprobs, prompt_ids) = wanted.await?;
    let outcomes = app.collect(&call).await?;
    let (Some(outcome), Some(prompt)) = (outcomes.first(), call.prompts.first()) else {
        return Err(ApiError::broken("no answer"));
    };
    let naming = Naming { texts: &app.texts, as_ids: true };
    let choices: Vec<Value> = outcome
        .samples
        .iter()
        .enumerate()
        .map(|(index, sample)| {
            json!({
                "index": index,
                "logprobs": logprobs.then(|| naming.chat(sample, 0..sample.ids.len())),
                "finish_reason": sample.finish_reason(),
                "stop_reason": sample.stop_reason(&call.wanted),
                "token_ids": sample.ids,
            })
        })
        .collect();
    Ok(answer(json!({
        "request_id": call.id,
        "choices": choices,
        "prompt_logprobs": call.prompt_top.map(|_| naming.prompt(prompt, outcome)),
        "prompt_token_ids": prompt_ids.then_some(prompt),
        "usage": Usage::of(prompt.len(), outcome.new_tokens()),
        "kv_transfer_params": null,
        "weight_version": app.version_name(outcome.weights),
        "weight_checksum": format!("{:016x}", outcome.weights.checksum),
    })))
}

/// `POST /tokenize`: a `prompt`, or `messages` through the chat template.
pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let ids = app.read(body, |fields| {
        app.check_model(fields)?;
        match fields.text("prompt")? {
            Some(text) => app.encode("prompt", text, fields.is_or("add_special_tokens", true)?),
            None if fields.get("messages").is_some() => super::chat::prompt(&app, fields),
            None => Err(fields.wrong("prompt", "a text, or messages in its place")),
        }
    });
    let ids = ids.await?;
    Ok(answer(json!({"count": ids.len(), "max_model_len": app.model.max_model_len, "tokens": ids})))
}

/// `POST /detokenize`: `tokens` to text.
pub async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let text = app.read(body, |fields| {
        app.check_model(fields)?;
        let ids = fields.ids("tokens")?.ok_or_else(|| fields.wrong("tokens", "a list of token ids"))?;
        app.texts.decode(&ids, false)
    });
    Ok(answer(json!({"prompt": text.await?})))
}
