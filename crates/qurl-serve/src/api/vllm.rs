//! vLLM's own addresses: token in, token out, and the tokenizer.

use super::call::{Call, Told, Usage};
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use super::logprobs::{Chat, List, Naming, Prompt};
use super::sampling::{Dialect, Wanted, top};
use super::{App, answer};
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    logprobs: Option<Chat<'a>>,
    finish_reason: &'static str,
    stop_reason: Value,
    token_ids: &'a [u32],
}

#[derive(Serialize)]
#[serde(bound = "List<C>: Serialize")]
struct Generated<'a, C> {
    request_id: &'a str,
    choices: List<C>,
    prompt_logprobs: Option<Prompt<'a>>,
    prompt_token_ids: Option<&'a [u32]>,
    usage: Usage,
    kv_transfer_params: Option<()>,
    weight_version: String,
    weight_checksum: String,
}

/// `POST /inference/v1/generate`: `token_ids` and `sampling_params` in; ids, log-probs and reasons out,
/// tokens named by their ids.
pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let wanted = app.read(body, move |app, fields| {
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
        if wanted.max_new == Some(0) {
            return Err(params.wrong("max_tokens", "at least 1"));
        }
        let best = top(params, "logprobs")?;
        let prompt_top = top(params, "prompt_logprobs")?;
        let prompt_ids = fields.is("return_token_ids")?;
        let told = Told {
            new: usize::from(best.is_some()),
            prompt: usize::from(prompt_top.is_some()),
            plain: usize::from(prompt_ids),
        };
        let prompt = fields.ids("token_ids")?;
        let call = Call {
            id: app.name_of("gen", &headers, fields)?,
            ids: Vec::new(),
            prompts: vec![prompt.ok_or_else(|| fields.wrong("token_ids", "a list of token ids"))?],
            salt: fields.salt()?,
            wanted,
            top: best.unwrap_or(0),
            prompt_top,
            told,
        };
        Ok((call, best.is_some(), prompt_ids))
    });
    let (call, logprobs, prompt_ids) = wanted.await?;
    let (outcomes, share) = app.collect(&call).await?;
    let (Some(outcome), Some(prompt)) = (outcomes.first(), call.prompts.first()) else {
        return Err(ApiError::broken("no answer"));
    };
    let naming = Naming { texts: &app.texts, as_ids: true };
    let choices = outcome.samples.iter().enumerate().map(|(index, sample)| Choice {
        index,
        logprobs: logprobs.then_some(Chat { naming, sample, range: 0..sample.ids.len() }),
        finish_reason: sample.finish_reason(),
        stop_reason: sample.stop_reason(&call.wanted),
        token_ids: &sample.ids,
    });
    let document = || {
        Ok(Generated {
            request_id: &call.id,
            choices: List(choices),
            prompt_logprobs: call.prompt_top.map(|_| Prompt { texts: &app.texts, prompt, outcome }),
            prompt_token_ids: prompt_ids.then_some(prompt),
            usage: Usage::of(prompt.len(), outcome.new_tokens()),
            kv_transfer_params: None,
            weight_version: app.version_name(outcome.weights),
            weight_checksum: format!("{:016x}", outcome.weights.checksum),
        })
    };
    app.tell((&call, share), &outcomes, document).await
}

/// `POST /tokenize`: a `prompt`, or `messages` through the chat template.
pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let ids = app.read(body, |app, fields| {
        app.check_model(fields)?;
        let ids = match fields.text("prompt")? {
            Some(text) => app.encode("prompt", text, fields.is_or("add_special_tokens", true)?)?,
            None if fields.get("messages").is_some() => super::chat::prompt(app, fields)?,
            None => return Err(fields.wrong("prompt", "a text, or messages in its place")),
        };
        Ok((ids, fields.is("return_token_strs")?))
    });
    let (ids, spelled) = ids.await?;
    let spelled = spelled.then(|| ids.iter().map(|&id| app.texts.spelling(id)).collect::<Vec<_>>());
    let (count, max_model_len) = (ids.len(), app.model.max_model_len);
    Ok(answer(json!({
        "count": count, "max_model_len": max_model_len, "tokens": ids, "token_strs": spelled,
    })))
}

/// `POST /detokenize`: `tokens` to text.
pub async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let text = app.read(body, |app, fields| {
        app.check_model(fields)?;
        let ids = fields.ids("tokens")?.ok_or_else(|| fields.wrong("tokens", "a list of token ids"))?;
        app.texts.decode(&ids, false)
    });
    Ok(answer(json!({"prompt": text.await?})))
}
