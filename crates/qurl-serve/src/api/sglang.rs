//! SGLang's `/generate`: one prompt or several, `sampling_params`, and log-probs as
//! `[log-prob, id, text or null]`.

use super::call::{Call, Growth, Outcome, number};
use super::error::ApiError;
use super::fields::{Fields, ids, is_empty};
use super::sampling::{Dialect, Wanted, top};
use super::{App, answer};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::FinishReason;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What is told beside the text.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    /// From which token of the prompt on its log-probs are wanted.
    from: Option<usize>,
    texts: bool,
    /// Whether the answer is a list: several prompts were given, or several samples asked for.
    many: bool,
}

/// `POST /generate`
pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let body = app.json(body).await?;
    let fields = Fields::of(&body)?;
    for key in
        ["image_data", "audio_data", "input_embeds", "lora_path", "return_hidden_states", "session_params"]
    {
        fields.refuse(key, is_empty)?;
    }
    fields.refuse("token_ids_logprob", is_empty)?;
    let empty = Value::Object(Map::new());
    let params = match fields.object("sampling_params")? {
        Some(params) => params,
        None => Fields::of(&empty)?,
    };
    let wanted = Wanted::read(params, Dialect::Sglang)?;
    let none_new = wanted.max_new == Some(0);
    let wanted = Wanted { max_new: wanted.max_new.or(Some(128)), ..wanted };
    let (prompts, several) = prompts(&app, fields)?;
    let logprobs = fields.is("return_logprob")?;
    let from = fields.i64("logprob_start_len")?.unwrap_or(-1);
    let best = if logprobs { top(fields, "top_logprobs_num")?.unwrap_or(0) } else { 0 };
    let shown = Shown {
        logprobs,
        from: usize::try_from(from).ok().filter(|_| logprobs),
        texts: fields.is("return_text_in_logprobs")?,
        many: several || wanted.n > 1,
    };
    let own = match fields.get("rid") {
        Some(Value::Array(list)) => list.first().and_then(Value::as_str),
        _ => fields.text("rid")?,
    };
    let own = own.or_else(|| headers.get("x-request-id").and_then(|id| id.to_str().ok()));
    let call =
        Call { id: app.name("gen", own), prompts, wanted, top: best, prompt_top: shown.from.map(|_| best) };
    if fields.is("stream")? {
        return streamed(app, call, shown).await;
    }
    let outcomes = app.collect(&call).await?;
    let mut answers: Vec<Value> = Vec::new();
    for (prompt, outcome) in call.prompts.iter().zip(&outcomes) {
        for sample in &outcome.samples {
            let mut one = told(&app, (&call.id, &call.wanted), shown, prompt, outcome, sample);
            if none_new {
                // Only the prompt was to be scored.
                (one["text"], one["output_ids"]) = (json!(""), json!([]));
                one["meta_info"]["completion_tokens"] = json!(0);
                one["meta_info"]["finish_reason"] = json!({"type": "length", "length": 0});
                for key in ["output_token_logprobs", "output_top_logprobs"] {
                    if one["meta_info"].get(key).is_some() {
                        one["meta_info"][key] = json!([]);
                    }
                }
            }
            answers.push(one);
        }
    }
    Ok(match shown.many {
        true => answer(json!(answers)),
        false => answer(answers.pop().unwrap_or_default()),
    })
}

/// The prompts, and whether they came as a list.
fn prompts(app: &App, fields: Fields<'_>) -> Result<(Vec<Vec<u32>>, bool), ApiError> {
    if let Some(list) = fields.read("input_ids", "a list of token ids or of such lists", Value::as_array)? {
        let wrong = || fields.wrong("input_ids", "a list of token ids or of such lists");
        let several = list.first().is_some_and(Value::is_array);
        return match several {
            true => Ok((list.iter().map(ids).collect::<Option<_>>().ok_or_else(wrong)?, true)),
            false => Ok((vec![fields.ids("input_ids")?.unwrap_or_default()], false)),
        };
    }
    let texts = fields.texts("text")?;
    if texts.is_empty() {
        return Err(ApiError::invalid("text", "neither text nor input_ids is given"));
    }
    let several = fields.get("text").is_some_and(Value::is_array);
    let prompts = texts.iter().map(|text| app.texts.encode("text", text, true));
    Ok((prompts.collect::<Result<_, _>>()?, several))
}

/// What is told of a sample, so far.
fn told(
    app: &App,
    (id, wanted): (&str, &Wanted),
    shown: Shown,
    prompt: &[u32],
    outcome: &Outcome,
    sample: &Growth,
) -> Value {
    let triple = |id: u32, logp: Option<f32>| {
        json!([logp.map_or(Value::Null, number), id, shown.texts.then(|| app.texts.token(id))])
    };
    let best = |top: &[(u32, f32)]| top.iter().map(|&(id, logp)| triple(id, Some(logp))).collect::<Vec<_>>();
    let new = sample.ids.len();
    let finish = match sample.finish {
        Some(FinishReason::StopId(id)) => json!({"type": "stop", "matched": id}),
        Some(FinishReason::StopString(i)) => json!({"type": "stop", "matched": wanted.stop.get(i)}),
        Some(_) => json!({"type": "length", "length": new}),
        None if sample.aborted => json!({"type": "abort", "message": "aborted"}),
        None => Value::Null,
    };
    let mut meta = json!({
        "id": id,
        "finish_reason": finish,
        "prompt_tokens": prompt.len(),
        "completion_tokens": new,
        "cached_tokens": 0,
        "weight_version": app.version_name(outcome.weights),
        "weight_checksum": format!("{:016x}", outcome.weights.checksum),
    });
    if shown.logprobs {
        let triples = sample.ids.iter().zip(&sample.logprobs).map(|(&id, &logp)| triple(id, Some(logp)));
        meta["output_token_logprobs"] = triples.collect();
        if sample.top.iter().any(|top| !top.is_empty()) {
            meta["output_top_logprobs"] = sample.top.iter().map(|top| json!(best(top))).collect();
        }
        let from = shown.from.unwrap_or(prompt.len());
        let scores = &outcome.prompt;
        let place = |i: usize| (i > 0).then(|| scores.logprobs.get(i - 1).copied()).flatten();
        meta["input_token_logprobs"] = (from..prompt.len()).map(|i| triple(prompt[i], place(i))).collect();
        if !scores.top.is_empty() {
            let top = |i: usize| i.checked_sub(1).and_then(|i| scores.top.get(i)).map(|top| best(top));
            meta["input_top_logprobs"] = (from..prompt.len()).map(|i| json!(top(i))).collect();
        }
    }
    json!({"text": sample.text, "output_ids": sample.ids, "meta_info": meta})
}

/// Streams what has come of a sample so far, again and again, as SGLang does.
async fn streamed(app: Arc<App>, call: Call, shown: Shown) -> Result<Response, ApiError> {
    let mut outcomes: Vec<Outcome> = call.prompts.iter().map(|_| Outcome::new(&call, &app.texts)).collect();
    let (state, id, prompts) = (app.clone(), call.id.clone(), call.prompts.clone());
    let (wanted, n) = (call.wanted.clone(), call.wanted.n);
    let chunks = move |prompt: usize, news: News| {
        let outcome = &mut outcomes[prompt];
        let mut changed: Vec<usize> = Vec::new();
        match news {
            News::Tokens(tokens) => {
                for token in tokens {
                    changed.push(token.sample as usize);
                    outcome.grow(token);
                }
                changed.dedup();
            }
            News::Aborted => {
                changed = (0..n).filter(|&i| outcome.samples[i].finish.is_none()).collect();
                outcome.abort();
            }
            other => _ = outcome.take(other),
        }
        let tell = |&sample: &usize| {
            let mut one =
                told(&state, (&id, &wanted), shown, &prompts[prompt], outcome, &outcome.samples[sample]);
            if shown.many {
                one["index"] = json!(prompt * n + sample);
            }
            one
        };
        changed.iter().map(tell).collect()
    };
    app.stream(&call, chunks, |_| {}, "data: [DONE]\n\n").await
}
