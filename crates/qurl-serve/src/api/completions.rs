//! OpenAI's `/v1/completions`, with vLLM's further keys: ids as prompts, `return_token_ids`,
//! `prompt_logprobs`, `return_tokens_as_token_ids`.

use super::call::{Call, Outcome, usage};
use super::error::ApiError;
use super::fields::{Fields, ids, is_empty};
use super::logprobs::Naming;
use super::sampling::{Dialect, Wanted, top};
use super::{App, answer, fingerprint, now};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::WeightVersion;
use serde_json::{Value, json};
use std::sync::Arc;

/// New tokens where a request does not say, as OpenAI has it.
const DEFAULT_MAX_TOKENS: usize = 16;

/// What is told beside the text.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    token_ids: bool,
    as_ids: bool,
    prompt_logprobs: bool,
    echo: bool,
    /// No new token is wanted: the prompt is only scored.
    none_new: bool,
}

/// `POST /v1/completions`
pub async fn complete(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = app.json(body).await?;
    let fields = Fields::of(&body)?;
    app.check_model(fields)?;
    fields.refuse("suffix", is_empty)?;
    let mut wanted = Wanted::read(fields, Dialect::OpenAi)?;
    let none_new = wanted.max_new == Some(0);
    wanted.max_new = wanted.max_new.or(Some(DEFAULT_MAX_TOKENS));
    let asked = top(fields, "logprobs")?;
    let prompt_logprobs = top(fields, "prompt_logprobs")?;
    let shown = Shown {
        logprobs: asked.is_some(),
        token_ids: fields.is("return_token_ids")?,
        as_ids: fields.is("return_tokens_as_token_ids")?,
        prompt_logprobs: prompt_logprobs.is_some(),
        echo: fields.is("echo")?,
        none_new,
    };
    let own =
        fields.text("request_id")?.or_else(|| headers.get("x-request-id").and_then(|id| id.to_str().ok()));
    let echoed = asked.filter(|_| shown.echo);
    let call = Call {
        id: app.name("cmpl", own),
        prompts: prompts(&app, fields)?,
        wanted,
        top: asked.unwrap_or(0),
        prompt_top: prompt_logprobs.max(echoed),
    };
    let stream = fields.is("stream")?;
    if stream && (shown.echo || shown.none_new) {
        return Err(ApiError::invalid("stream", "stream with echo, or without new tokens, is not supported"));
    }
    if stream { streamed(app, fields, call, shown).await } else { whole(&app, &call, shown).await }
}

/// The prompts: a text, some texts, ids, or some lists of ids.
fn prompts(app: &App, fields: Fields<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
    const EXPECTED: &str = "a text, a list of texts, a list of token ids or a list of such lists";
    let prompt = fields.get("prompt").ok_or_else(|| fields.wrong("prompt", EXPECTED))?;
    let encode = |text: &str| app.texts.encode("prompt", text, fields.is_or("add_special_tokens", true)?);
    let wrong = || fields.wrong("prompt", EXPECTED);
    let prompts = match prompt {
        Value::String(text) => vec![encode(text)?],
        Value::Array(list) if list.first().is_some_and(Value::is_string) => list
            .iter()
            .map(|text| encode(text.as_str().ok_or_else(wrong)?))
            .collect::<Result<_, ApiError>>()?,
        Value::Array(list) if list.first().is_some_and(Value::is_array) => {
            list.iter().map(ids).collect::<Option<_>>().ok_or_else(wrong)?
        }
        other => vec![ids(other).ok_or_else(wrong)?],
    };
    Ok(prompts)
}

fn head(app: &App, id: &str, created: u64, weights: WeightVersion) -> Value {
    json!({
        "id": id,
        "object": "text_completion",
        "created": created,
        "model": app.model_name(),
        "system_fingerprint": fingerprint(weights),
        "weight_version": app.version_name(weights),
    })
}

async fn whole(app: &App, call: &Call, shown: Shown) -> Result<Response, ApiError> {
    let outcomes = app.collect(call).await?;
    let mut choices = Vec::new();
    for (prompt, outcome) in call.prompts.iter().zip(&outcomes) {
        for sample in 0..outcome.samples.len() {
            choices.push(choice(app, call, shown, choices.len(), (prompt, outcome, sample))?);
        }
    }
    let new = if shown.none_new { 0 } else { outcomes.iter().map(Outcome::new_tokens).sum() };
    let weights = outcomes.first().map(|outcome| outcome.weights).unwrap_or_default();
    let mut body = head(app, &call.id, now(), weights);
    body["choices"] = json!(choices);
    body["usage"] = usage(call.prompts.iter().map(Vec::len).sum(), new);
    Ok(answer(body))
}

fn choice(
    app: &App,
    call: &Call,
    shown: Shown,
    index: usize,
    (prompt, outcome, number): (&[u32], &Outcome, usize),
) -> Result<Value, ApiError> {
    let sample = &outcome.samples[number];
    let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
    let new = if shown.none_new { 0 } else { sample.ids.len() };
    let text = if shown.none_new { "" } else { &sample.text };
    let text = match shown.echo {
        true => app.texts.decode(prompt, call.wanted.skip_special)? + text,
        false => text.to_string(),
    };
    let logprobs = shown.logprobs.then(|| {
        let scores = &outcome.prompt;
        let of_prompt = prompt.iter().enumerate().map(|(i, &id)| {
            let place = i.checked_sub(1);
            let top = place.and_then(|i| scores.top.get(i)).map_or(&[][..], Vec::as_slice);
            (id, place.and_then(|i| scores.logprobs.get(i)).copied(), top)
        });
        let of_prompt = of_prompt.take(if shown.echo { prompt.len() } else { 0 });
        let of_new = (0..new).map(|i| (sample.ids[i], Some(sample.logprobs[i]), sample.top[i].as_slice()));
        naming.completion(of_prompt.chain(of_new), &mut 0)
    });
    let finish = if shown.none_new { "length" } else { sample.finish_reason() };
    let mut choice = json!({
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": sample.stop_reason(&call.wanted),
    });
    if shown.prompt_logprobs {
        choice["prompt_logprobs"] = naming.prompt(prompt, outcome);
    }
    if shown.token_ids {
        choice["prompt_token_ids"] = json!(prompt);
        choice["token_ids"] = json!(sample.ids[..new]);
    }
    Ok(choice)
}

/// Whether a stream ends with what it used, and whether every piece says so.
pub fn stream_options(fields: Fields<'_>) -> Result<(bool, bool), ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok((false, false)) };
    Ok((options.is("include_usage")?, options.is("continuous_usage_stats")?))
}

async fn streamed(app: Arc<App>, fields: Fields<'_>, call: Call, shown: Shown) -> Result<Response, ApiError> {
    let (with_usage, always_usage) = stream_options(fields)?;
    let mut outcomes: Vec<Outcome> = call.prompts.iter().map(|_| Outcome::new(&call, &app.texts)).collect();
    let (created, id, wanted) = (now(), call.id.clone(), call.wanted.clone());
    let prompts = if shown.token_ids { call.prompts.clone() } else { Vec::new() };
    let prompt_tokens: usize = call.prompts.iter().map(Vec::len).sum();
    let mut offsets = vec![0; call.prompts.len() * wanted.n];
    let (state, counted) = (app.clone(), Arc::new(std::sync::Mutex::new((0, WeightVersion::default()))));
    let last = (app.clone(), call.id.clone(), counted.clone());
    let chunks = move |prompt: usize, news: News| {
        let outcome = &mut outcomes[prompt];
        let mut chunks = Vec::new();
        let mut chunk = |outcome: &Outcome, sample: usize, text: String, from: usize| {
            let growth = &outcome.samples[sample];
            let index = prompt * wanted.n + sample;
            let naming = Naming { texts: &state.texts, as_ids: shown.as_ids };
            let range = from..growth.ids.len();
            let tokens =
                range.clone().map(|i| (growth.ids[i], Some(growth.logprobs[i]), growth.top[i].as_slice()));
            let logprobs = shown.logprobs.then(|| naming.completion(tokens, &mut offsets[index]));
            let ended = growth.finish.is_some() || growth.aborted;
            if text.is_empty() && !ended && logprobs.is_none() && !shown.token_ids {
                return;
            }
            let mut choice = json!({
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": ended.then(|| growth.finish_reason()),
                "stop_reason": growth.stop_reason(&wanted),
            });
            if shown.token_ids {
                if from == 0 {
                    choice["prompt_token_ids"] = json!(prompts[prompt]);
                }
                choice["token_ids"] = json!(growth.ids[range]);
            }
            let mut body = head(&state, &id, created, outcome.weights);
            body["choices"] = json!([choice]);
            chunks.push(body);
        };
        match news {
            News::Tokens(tokens) => {
                let new = tokens.len();
                for token in tokens {
                    let sample = token.sample as usize;
                    let text = outcome.grow(token);
                    chunk(outcome, sample, text, outcome.samples[sample].ids.len() - 1);
                }
                if let Ok(mut counted) = counted.lock() {
                    counted.0 += new;
                    counted.1 = outcome.weights;
                }
            }
            News::Aborted => {
                let open: Vec<usize> =
                    (0..outcome.samples.len()).filter(|&i| outcome.samples[i].finish.is_none()).collect();
                let before: Vec<usize> = outcome.samples.iter().map(|sample| sample.text.len()).collect();
                outcome.abort();
                for sample in open {
                    let text = outcome.samples[sample].text[before[sample]..].to_string();
                    chunk(outcome, sample, text, outcome.samples[sample].ids.len());
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
            let mut body = head(&app, &id, created, weights);
            body["choices"] = json!([]);
            body["usage"] = usage(prompt_tokens, new);
            events.push(body);
        }
    };
    app.stream(&call, chunks, finish, "data: [DONE]\n\n").await
}
