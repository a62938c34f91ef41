//! SGLang's `/generate`: one prompt or several, `sampling_params`, and log-probs as
//! `[log-prob, id, text or null]`.

use super::call::{Call, number};
use super::error::ApiError;
use super::fields::{Fields, ids, is_empty};
use super::outcome::{Growth, Outcome};
use super::sampling::{Dialect, Wanted, top};
use super::stream::{Events, event};
use super::{App, answer};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::FinishReason;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

/// What is told beside the text.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    /// From which token of the prompt on its log-probs are wanted.
    from: Option<usize>,
    texts: bool,
    /// How many of the most probable tokens are wanted at each place.
    best: usize,
    /// Whether the answer is a list: several prompts were given, or several samples asked for.
    many: bool,
}

/// `POST /generate`
pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (call, shown, none_new, stream) = app.read(body, |fields| wanted(&app, &headers, fields)).await?;
    if stream {
        let answers = app.submit(&call, true)?;
        let (outcomes, changed) = (Outcome::all(&call, &app.texts), BTreeSet::new());
        return app.clone().stream(answers, Changes { app, call, shown, outcomes, changed }).await;
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

/// What a body asks for, whether for no new token, and whether for a stream.
fn wanted(app: &App, headers: &HeaderMap, fields: Fields<'_>) -> Result<(Call, Shown, bool, bool), ApiError> {
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
    let (prompts, several) = prompts(app, fields)?;
    let logprobs = fields.is("return_logprob")?;
    let from = fields.i64("logprob_start_len")?.unwrap_or(-1);
    let best = if logprobs { top(fields, "top_logprobs_num")?.unwrap_or(0) } else { 0 };
    let shown = Shown {
        logprobs,
        from: usize::try_from(from).ok().filter(|_| logprobs),
        texts: fields.is("return_text_in_logprobs")?,
        best,
        many: several || wanted.n > 1,
    };
    let own = match fields.get("rid") {
        Some(Value::Array(list)) => list.first().and_then(Value::as_str),
        _ => fields.text("rid")?,
    };
    let own = own.or_else(|| headers.get("x-request-id").and_then(|id| id.to_str().ok()));
    let call =
        Call { id: app.name("gen", own), prompts, wanted, top: best, prompt_top: shown.from.map(|_| best) };
    Ok((call, shown, none_new, fields.is("stream")?))
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
    let prompts = texts.iter().map(|text| app.encode("text", text, true));
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
        "weight_version": app.version_name(outcome.weights),
        "weight_checksum": format!("{:016x}", outcome.weights.checksum),
    });
    if shown.logprobs {
        let triples = sample.ids.iter().zip(&sample.logprobs).map(|(&id, &logp)| triple(id, Some(logp)));
        meta["output_token_logprobs"] = triples.collect();
        if shown.best > 0 {
            meta["output_top_logprobs"] = (0..new).map(|i| json!(best(sample.top(i)))).collect();
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

/// A stream: every event has all that has come of a sample so far, as SGLang has it. What is overtaken before
/// it could be sent is left out.
struct Changes {
    app: Arc<App>,
    call: Call,
    shown: Shown,
    outcomes: Vec<Outcome>,
    /// Prompts and samples of which there is more to tell.
    changed: BTreeSet<(usize, usize)>,
}

impl Events for Changes {
    fn take(&mut self, prompt: usize, news: News, _: &mut Vec<u8>) {
        let outcome = &mut self.outcomes[prompt];
        match news {
            News::Began(weights) => outcome.weights = weights,
            News::Tokens(tokens) => {
                for token in tokens {
                    self.changed.insert((prompt, token.sample as usize));
                    outcome.grow(token);
                }
            }
            News::Aborted => self.changed.extend(outcome.abort().into_iter().map(|(i, _)| (prompt, i))),
            News::Done(scores) => outcome.prompt = scores,
            News::Failed(_) => {}
        }
    }

    fn catch_up(&mut self, to: &mut Vec<u8>) {
        let Changes { app, call, shown, .. } = self;
        for (prompt, number) in std::mem::take(&mut self.changed) {
            let (outcome, ids) = (&self.outcomes[prompt], &call.prompts[prompt]);
            let mut so_far =
                told(app, (&call.id, &call.wanted), *shown, ids, outcome, &outcome.samples[number]);
            if shown.many {
                so_far["index"] = json!(prompt * call.wanted.n + number);
            }
            event(to, &so_far);
        }
    }
}
