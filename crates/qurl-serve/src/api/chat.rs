//! OpenAI's `/v1/chat/completions`, with vLLM's further keys. Tools and further variables go through the
//! model's own chat template; what it answers is given as it is.

use super::call::{Call, Outcome, usage};
use super::completions::stream_options;
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use super::logprobs::Naming;
use super::sampling::{Dialect, Wanted, top};
use super::{App, answer, fingerprint, now};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::WeightVersion;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What is told beside the text.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    token_ids: bool,
    as_ids: bool,
    prompt_logprobs: bool,
}

/// `POST /v1/chat/completions`
pub async fn complete(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = app.json(body).await?;
    let fields = Fields::of(&body)?;
    app.check_model(fields)?;
    for key in ["functions", "function_call", "audio", "echo", "continue_final_message", "web_search_options"]
    {
        fields.refuse(key, is_empty)?;
    }
    fields.refuse("modalities", |modalities| modalities == &json!(["text"]))?;
    fields.refuse("tool_choice", |choice| choice == "auto" || choice == "none")?;
    let wanted = Wanted::read(fields, Dialect::OpenAi)?;
    if wanted.max_new == Some(0) {
        return Err(ApiError::invalid("max_tokens", "max_tokens = 0: expected at least 1"));
    }
    let logprobs = fields.is("logprobs")?;
    let best = top(fields, "top_logprobs")?;
    if best.is_some_and(|best| best > 0) && !logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs without logprobs: true"));
    }
    let prompt_logprobs = top(fields, "prompt_logprobs")?;
    let shown = Shown {
        logprobs,
        token_ids: fields.is("return_token_ids")?,
        as_ids: fields.is("return_tokens_as_token_ids")?,
        prompt_logprobs: prompt_logprobs.is_some(),
    };
    let own =
        fields.text("request_id")?.or_else(|| headers.get("x-request-id").and_then(|id| id.to_str().ok()));
    let call = Call {
        id: app.name("chatcmpl", own),
        prompts: vec![prompt(&app, fields)?],
        wanted,
        top: best.unwrap_or(0),
        prompt_top: prompt_logprobs,
    };
    if fields.is("stream")? {
        streamed(app, fields, call, shown).await
    } else {
        whole(&app, &call, shown).await
    }
}

/// Tokens of the conversation.
pub fn prompt(app: &App, fields: Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let list = fields.read("messages", "a list of messages", Value::as_array)?;
    let list = list.filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| fields.wrong("messages", "a list of at least one message"))?;
    let messages = list.iter().map(message).collect::<Result<Vec<Value>, ApiError>>()?;
    let mut variables: Map<String, Value> = match fields.get("chat_template_kwargs") {
        Some(Value::Object(map)) => map.clone(),
        None => Map::new(),
        Some(_) => return Err(fields.wrong("chat_template_kwargs", "an object")),
    };
    fields.refuse("chat_template", is_empty)?;
    for key in ["documents", "reasoning_effort"] {
        if let Some(value) = fields.get(key) {
            variables.insert(key.to_string(), value.clone());
        }
    }
    if let Some(tools) = fields.read("tools", "a list of tools", Value::as_array)?
        && !tools.is_empty()
        && fields.get("tool_choice").is_none_or(|choice| choice != "none")
    {
        variables.insert("tools".to_string(), json!(tools));
    }
    let open = fields.is_or("add_generation_prompt", true)?;
    let text = app.texts.render(&json!(messages), open, &variables)?;
    // The template has put special tokens where they belong.
    app.texts.encode("messages", &text, fields.is("add_special_tokens")?)
}

/// A message as templates expect it: parts of text as one text, arguments of tool calls as objects.
fn message(message: &Value) -> Result<Value, ApiError> {
    let wrong = |expected: &str| ApiError::invalid("messages", format!("a message: expected {expected}"));
    let mut message = message.as_object().ok_or_else(|| wrong("an object"))?.clone();
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("a role that is a text"));
    }
    match message.get("content") {
        None | Some(Value::Null) => _ = message.insert("content".to_string(), json!("")),
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let text = |part: &Value| match part["type"].as_str() {
                Some("text" | "input_text" | "output_text" | "refusal") | None => {
                    let text = part["text"].as_str().or(part["refusal"].as_str()).or(part.as_str());
                    text.map(str::to_string).ok_or_else(|| wrong("parts with a text"))
                }
                Some(other) => {
                    Err(ApiError::invalid("messages", format!("content of type {other} is not supported")))
                }
            };
            let texts = parts.iter().map(text).collect::<Result<Vec<_>, _>>()?;
            message.insert("content".to_string(), json!(texts.join("\n")));
        }
        Some(_) => return Err(wrong("content that is a text or a list of parts")),
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        for call in calls {
            let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
            if let Some(arguments) = arguments
                && let Some(Ok(parsed)) = arguments.as_str().map(serde_json::from_str::<Value>)
            {
                *arguments = parsed;
            }
        }
    }
    Ok(Value::Object(message))
}

fn head(app: &App, id: &str, object: &str, created: u64, weights: WeightVersion) -> Value {
    json!({
        "id": id,
        "object": object,
        "created": created,
        "model": app.model_name(),
        "system_fingerprint": fingerprint(weights),
        "weight_version": app.version_name(weights),
    })
}

async fn whole(app: &App, call: &Call, shown: Shown) -> Result<Response, ApiError> {
    let outcomes = app.collect(call).await?;
    let (Some(outcome), Some(prompt)) = (outcomes.first(), call.prompts.first()) else {
        return Err(ApiError::broken("no answer"));
    };
    let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
    let choices: Vec<Value> = outcome
        .samples
        .iter()
        .enumerate()
        .map(|(index, sample)| {
            let mut choice = json!({
                "index": index,
                "message": {"role": "assistant", "content": sample.text, "refusal": null},
                "logprobs": shown.logprobs.then(|| naming.chat(sample, 0..sample.ids.len())),
                "finish_reason": sample.finish_reason(),
                "stop_reason": sample.stop_reason(&call.wanted),
            });
            if shown.token_ids {
                choice["token_ids"] = json!(sample.ids);
            }
            choice
        })
        .collect();
    let mut body = head(app, &call.id, "chat.completion", now(), outcome.weights);
    body["choices"] = json!(choices);
    body["usage"] = usage(prompt.len(), outcome.new_tokens());
    if shown.token_ids {
        body["prompt_token_ids"] = json!(prompt);
    }
    if shown.prompt_logprobs {
        body["prompt_logprobs"] = naming.prompt(prompt, outcome);
    }
    Ok(answer(body))
}

async fn streamed(app: Arc<App>, fields: Fields<'_>, call: Call, shown: Shown) -> Result<Response, ApiError> {
    const CHUNK: &str = "chat.completion.chunk";
    let (with_usage, always_usage) = stream_options(fields)?;
    let mut outcome = Outcome::new(&call, &app.texts);
    let (created, id, wanted, prompt) =
        (now(), call.id.clone(), call.wanted.clone(), call.prompts[0].clone());
    let prompt_tokens = prompt.len();
    let counted = Arc::new(std::sync::Mutex::new((0, WeightVersion::default())));
    let (state, last) = (app.clone(), (app.clone(), call.id.clone(), counted.clone()));
    let chunks = move |_: usize, news: News| {
        let mut chunks = Vec::new();
        let mut chunk = |outcome: &Outcome, choice: Value| {
            let mut body = head(&state, &id, CHUNK, created, outcome.weights);
            body["choices"] = json!([choice]);
            chunks.push(body);
        };
        let piece = |outcome: &Outcome, index: usize, text: String, from: usize| {
            let sample = &outcome.samples[index];
            let range = from..sample.ids.len();
            let ended = sample.finish.is_some() || sample.aborted;
            if text.is_empty() && !ended && !shown.logprobs && !shown.token_ids {
                return None;
            }
            let naming = Naming { texts: &state.texts, as_ids: shown.as_ids };
            let mut choice = json!({
                "index": index,
                "delta": {"content": text},
                "logprobs": shown.logprobs.then(|| naming.chat(sample, range.clone())),
                "finish_reason": ended.then(|| sample.finish_reason()),
                "stop_reason": sample.stop_reason(&wanted),
            });
            if shown.token_ids {
                choice["token_ids"] = json!(sample.ids[range]);
            }
            Some(choice)
        };
        match news {
            News::Began(weights) => {
                outcome.weights = weights;
                for index in 0..outcome.samples.len() {
                    let delta = json!({"role": "assistant", "content": ""});
                    let choice =
                        json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
                    chunk(&outcome, choice);
                }
                if shown.token_ids
                    && let Some(first) = chunks.first_mut()
                {
                    first["prompt_token_ids"] = json!(prompt);
                }
            }
            News::Tokens(tokens) => {
                let new = tokens.len();
                for token in tokens {
                    let index = token.sample as usize;
                    let text = outcome.grow(token);
                    let from = outcome.samples[index].ids.len() - 1;
                    if let Some(choice) = piece(&outcome, index, text, from) {
                        chunk(&outcome, choice);
                    }
                }
                if let Ok(mut counted) = counted.lock() {
                    *counted = (counted.0 + new, outcome.weights);
                }
            }
            News::Aborted => {
                let open: Vec<(usize, usize)> = outcome
                    .samples
                    .iter()
                    .enumerate()
                    .filter(|(_, sample)| sample.finish.is_none())
                    .map(|(index, sample)| (index, sample.text.len()))
                    .collect();
                outcome.abort();
                for (index, before) in open {
                    let text = outcome.samples[index].text[before..].to_string();
                    if let Some(choice) = piece(&outcome, index, text, outcome.samples[index].ids.len()) {
                        chunk(&outcome, choice);
                    }
                }
            }
            other => _ = outcome.take(other),
        }
        if always_usage {
            let new = counted.lock().map_or(0, |counted| counted.0);
            chunks.iter_mut().for_each(|chunk| chunk["usage"] = usage(prompt_tokens, new));
        }
        chunks
    };
    let finish = move |events: &mut Vec<Value>| {
        if with_usage {
            let (app, id, counted) = last;
            let (new, weights) = counted.lock().map_or_else(|_| Default::default(), |counted| *counted);
            let mut body = head(&app, &id, CHUNK, created, weights);
            body["choices"] = json!([]);
            body["usage"] = usage(prompt_tokens, new);
            events.push(body);
        }
    };
    app.stream(&call, chunks, finish, "data: [DONE]\n\n").await
}
