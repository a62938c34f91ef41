//! SGLang's `/generate`: one prompt or several, `sampling_params`, and log-probs as
//! `[log-prob, id, text or null]`.

use super::App;
use super::call::{Call, Told};
use super::error::ApiError;
use super::fields::{Fields, ids, is_empty};
use super::logprobs::List;
use super::outcome::Outcome;
use super::sampling::{Dialect, MAX_TOP, Wanted};
use super::stream::{Events, event};
use super::telling::LONG;
use super::texts::Texts;
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::FinishReason;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::task::block_in_place;

/// How many times its log-probs a stream may take: of an event, with those that wait to be sent.
const STREAMED: usize = 16;
/// New tokens where a request does not say, as SGLang has it.
const DEFAULT_MAX_NEW: usize = 128;

/// Keys of what is not done here.
const UNKNOWN: [&str; 19] = [
    "image_data",
    "audio_data",
    "video_data",
    "input_embeds",
    "positional_embed_overrides",
    "mm_hashes",
    "lora_path",
    "lora_id",
    "session_params",
    "custom_logit_processor",
    "max_thinking_tokens",
    "extra_key",
    "token_ids_logprob",
    "return_sampling_mask",
    "return_entropy",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_flat_raw_top_logprobs",
];

/// What is told beside the text.
struct Shown {
    texts: bool,
    /// Whether the answer is a list: several prompts were given, or several samples asked for.
    many: bool,
    prompt_ids: bool,
    /// The rest, which prompts may differ in.
    each: Vec<Scored>,
}

/// What is told of a prompt and its samples.
#[derive(Clone, Copy)]
struct Scored {
    logprobs: bool,
    /// From which token of the prompt on its log-probs are wanted.
    from: Option<usize>,
    /// How many of the most probable tokens are wanted at each place.
    best: usize,
    /// No new token is wanted: the prompt is only scored.
    none_new: bool,
}

/// `POST /generate`
pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (call, shown, stream) = app.read(body, move |app, fields| wanted(app, &headers, fields)).await?;
    if stream {
        let changes = |app: Arc<App>, call| {
            let (outcomes, changed) = (Outcome::all(&call, &app.texts), BTreeSet::new());
            Changes { app, call, shown, outcomes, changed }
        };
        return app.stream(call, changes).await;
    }
    let (outcomes, share) = app.collect(&call).await?;
    let told = (0..call.prompts.len()).flat_map(|prompt| {
        let (app, call, outcome) = (&app, &call, &outcomes[prompt]);
        let shown = &shown;
        let of = move |number| told(app, call, shown, (prompt, number), outcome);
        (0..call.wanted.n).map(of)
    });
    let document = || {
        Ok(match shown.many {
            true => Answer::Many(told.collect()),
            false => Answer::One(told.take(1).collect()),
        })
    };
    app.tell((&call, share), &outcomes, document).await
}

/// What a body asks for, and whether for a stream.
fn wanted(app: &App, headers: &HeaderMap, fields: Fields<'_>) -> Result<(Call, Shown, bool), ApiError> {
    for key in UNKNOWN {
        fields.refuse(key, is_empty)?;
    }
    let params = params(app, fields)?;
    let n = params[0].n;
    if params.iter().any(|own| own.n != n) {
        return Err(ApiError::invalid(
            "sampling_params",
            "sampling_params: expected the same n for all prompts",
        ));
    }
    let (prompts, several) = prompts(app, fields, n)?;
    let count = prompts.len();
    if params.len() != 1 && params.len() != count {
        let found = params.len();
        let message =
            format!("sampling_params: {found} objects: expected one, or one for each of {count} prompts");
        return Err(ApiError::invalid("sampling_params", message));
    }
    let logprobs = each(fields, "return_logprob", count, "true or false", Value::as_bool)?;
    let from = each(fields, "logprob_start_len", count, "a whole number", Value::as_i64)?;
    let few = |value: &Value| value.as_u64().and_then(|k| usize::try_from(k).ok()).filter(|k| *k <= MAX_TOP);
    let best = each(fields, "top_logprobs_num", count, &format!("a number up to {MAX_TOP}"), few)?;
    let scored = (0..count).map(|i| {
        let logprobs = logprobs[i].unwrap_or(false);
        let from = usize::try_from(from[i].unwrap_or(-1)).ok();
        Scored {
            logprobs,
            from: from.filter(|_| logprobs),
            best: best[i].filter(|_| logprobs).unwrap_or(0),
            none_new: params[i % params.len()].max_new == Some(0),
        }
    });
    let shown = Shown {
        texts: fields.is("return_text_in_logprobs")?,
        many: several || n > 1,
        prompt_ids: fields.is("return_prompt_token_ids")?,
        each: scored.collect(),
    };
    let (own, ids) = match fields.get("rid") {
        Some(Value::Array(_)) => (None, fields.texts("rid")?),
        _ => (fields.text("rid")?, Vec::new()),
    };
    if !ids.is_empty() && ids.len() != prompts.len() {
        return Err(fields.wrong("rid", &format!("a text, or one for each of the {} prompts", prompts.len())));
    }
    let own = own.or(ids.first().map(String::as_str));
    let own = own.or_else(|| headers.get("x-request-id").and_then(|id| id.to_str().ok()));
    let stream = fields.is("stream")?;
    // Every event of a stream has all so far, and some events wait for their reader.
    let often = if stream { STREAMED } else { 1 };
    let scores_prompts = shown.each.iter().any(|own| own.from.is_some());
    let told = Told {
        new: if shown.each.iter().any(|own| own.logprobs) { often } else { 0 },
        prompt: if scores_prompts { often * n } else { 0 },
        plain: if shown.prompt_ids { often * n } else { 0 },
    };
    let best = shown.each.iter().map(|own| own.best).max().unwrap_or(0);
    let call = Call {
        id: app.name("gen", own),
        ids,
        prompts,
        wanted: params[0].clone(),
        each: if params.len() > 1 { params } else { Vec::new() },
        salt: fields.salt()?,
        top: best,
        prompt_top: scores_prompts.then_some(best),
        told,
    };
    Ok((call, shown, stream))
}

/// The `sampling_params`: of all prompts, or of each of them; never none.
fn params(app: &App, fields: Fields<'_>) -> Result<Vec<Wanted>, ApiError> {
    let read = |params: Fields<'_>| {
        let wanted = Wanted::read(params, Dialect::Sglang)?;
        Ok(Wanted { max_new: wanted.max_new.or(Some(DEFAULT_MAX_NEW)), ..wanted })
    };
    match fields.get("sampling_params") {
        Some(Value::Array(list)) if !list.is_empty() => {
            app.service.could_hold(list.len(), 1)?; // before anything is made of them
            let object =
                |own| Fields::of(own).map_err(|_| fields.wrong("sampling_params", "a list of objects"));
            list.iter().map(|own| read(object(own)?)).collect()
        }
        _ => match fields.object("sampling_params")? {
            Some(params) => Ok(vec![read(params)?]),
            None => Ok(vec![read(Fields::of(&Value::Object(Map::new()))?)?]),
        },
    }
}

/// A value of each prompt: the same for all, or out of a list of as many.
fn each<'a, T>(
    fields: Fields<'a>,
    key: &str,
    count: usize,
    expected: &str,
    convert: impl Fn(&'a Value) -> Option<T>,
) -> Result<Vec<Option<T>>, ApiError> {
    let wrong = || fields.wrong(key, &format!("{expected}, or a list of {count} such, one for each prompt"));
    let one = |value: &'a Value| match value {
        Value::Null => Ok(None),
        value => convert(value).map(Some).ok_or_else(wrong),
    };
    match fields.get(key) {
        Some(Value::Array(list)) if list.len() == count => list.iter().map(one).collect(),
        Some(value) => (0..count).map(|_| one(value)).collect(),
        None => Ok((0..count).map(|_| None).collect()),
    }
}

/// The prompts, and whether they came as a list.
fn prompts(app: &App, fields: Fields<'_>, n: usize) -> Result<(Vec<Vec<u32>>, bool), ApiError> {
    if let Some(list) = fields.read("input_ids", "a list of token ids or of such lists", Value::as_array)? {
        let wrong = || fields.wrong("input_ids", "a list of token ids or of such lists");
        let several = list.first().is_some_and(Value::is_array);
        app.service.could_hold(if several { list.len() } else { 1 }, n)?; // before anything is made of them
        return match several {
            true => Ok((list.iter().map(ids).collect::<Option<_>>().ok_or_else(wrong)?, true)),
            false => Ok((vec![fields.ids("input_ids")?.unwrap_or_default()], false)),
        };
    }
    let texts = fields.texts("text")?;
    if texts.is_empty() {
        return Err(ApiError::invalid("text", "neither text nor input_ids is given"));
    }
    app.service.could_hold(texts.len(), n)?;
    let several = fields.get("text").is_some_and(Value::is_array);
    let prompts = texts.iter().map(|text| app.encode("text", text, true));
    Ok((prompts.collect::<Result<_, _>>()?, several))
}

/// An answer, or several as a list.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer<'a> {
    Many(Vec<Sample<'a>>),
    #[serde(serialize_with = "only")]
    One(Vec<Sample<'a>>),
}

fn only<S: Serializer>(list: &[Sample<'_>], serializer: S) -> Result<S::Ok, S::Error> {
    list.first().serialize(serializer)
}

/// What is told of a sample, so far.
#[derive(Serialize)]
struct Sample<'a> {
    text: &'a str,
    output_ids: &'a [u32],
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    meta_info: Meta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

#[derive(Serialize)]
struct Meta<'a> {
    id: &'a str,
    finish_reason: Value,
    prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: usize,
    weight_version: String,
    weight_checksum: String,
    #[serde(flatten)]
    logprobs: Option<Logprobs<'a>>,
}

#[derive(Serialize)]
struct Logprobs<'a> {
    output_token_logprobs: Places<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<Tops<'a>>,
    input_token_logprobs: Places<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_top_logprobs: Option<Tops<'a>>,
}

/// A log-prob, the token's id, and its text where wanted.
type Triple = (Option<f32>, u32, Option<String>);

/// Texts of tokens, where they are told.
#[derive(Clone, Copy)]
struct Names<'a>(Option<&'a Texts>);

impl Names<'_> {
    fn triple(self, id: u32, logp: Option<f32>) -> Triple {
        (logp, id, self.0.map(|texts| texts.token(id)))
    }
}

/// Tokens with their log-probs; of a prompt's first token there is none, nor of any before it is computed.
struct Places<'a> {
    names: Names<'a>,
    ids: &'a [u32],
    logprobs: &'a [f32],
    /// The token that the first log-prob is of.
    first: usize,
    from: usize,
}

impl Serialize for Places<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let logp = |i: usize| i.checked_sub(self.first).and_then(|i| self.logprobs.get(i)).copied();
        serializer.collect_seq((self.from..self.ids.len()).map(|i| self.names.triple(self.ids[i], logp(i))))
    }
}

/// The most probable tokens at some places, null where there are none yet.
struct Tops<'a> {
    names: Names<'a>,
    tops: Vec<Option<&'a [(u32, f32)]>>,
}

impl Serialize for Tops<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tops = self
            .tops
            .iter()
            .map(|top| top.map(|top| List(top.iter().map(|&(id, logp)| self.names.triple(id, Some(logp))))));
        serializer.collect_seq(tops)
    }
}

/// What is told of a prompt's sample, so far.
fn told<'a>(
    app: &'a App,
    call: &'a Call,
    shown: &Shown,
    (prompt, number): (usize, usize),
    outcome: &'a Outcome,
) -> Sample<'a> {
    let (sample, ids) = (&outcome.samples[number], &call.prompts[prompt]);
    let Scored { logprobs, from, best, none_new } = shown.each[prompt];
    let new = if none_new { 0 } else { sample.ids.len() };
    let finish = match sample.finish {
        Some(_) if none_new => json!({"type": "length", "length": 0}),
        Some(FinishReason::StopId(id)) => json!({"type": "stop", "matched": id}),
        Some(FinishReason::StopString(i)) => {
            json!({"type": "stop", "matched": call.wanted_of(prompt).stop.get(i)})
        }
        Some(_) => json!({"type": "length", "length": new}),
        None if sample.aborted => json!({"type": "abort", "message": "aborted"}),
        None => Value::Null,
    };
    let names = Names(shown.texts.then_some(&app.texts));
    let logprobs = logprobs.then(|| {
        let (scores_prompt, from) = (from.is_some(), from.unwrap_or(ids.len()));
        let scores = &outcome.prompt;
        let few = |top: &'a [(u32, f32)]| &top[..best.min(top.len())];
        let output = Places { names, ids: &sample.ids[..new], logprobs: &sample.logprobs, first: 0, from: 0 };
        let of_prompt = |i: usize| i.checked_sub(1).and_then(|i| scores.top.get(i)).map(|top| few(top));
        Logprobs {
            output_token_logprobs: output,
            output_top_logprobs: (best > 0)
                .then(|| Tops { names, tops: (0..new).map(|i| Some(few(sample.top(i)))).collect() }),
            input_token_logprobs: Places { names, ids, logprobs: &scores.logprobs, first: 1, from },
            input_top_logprobs: (best > 0 && scores_prompt && !scores.top.is_empty())
                .then(|| Tops { names, tops: (from..ids.len()).map(of_prompt).collect() }),
        }
    });
    Sample {
        text: if none_new { "" } else { &sample.text },
        output_ids: &sample.ids[..new],
        prompt_token_ids: shown.prompt_ids.then_some(ids),
        meta_info: Meta {
            id: call.id_of(prompt),
            finish_reason: finish,
            prompt_tokens: ids.len(),
            completion_tokens: new,
            cached_tokens: outcome.prompt.cached,
            weight_version: app.version_name(outcome.weights),
            weight_checksum: format!("{:016x}", outcome.weights.checksum),
            logprobs,
        },
        index: None,
    }
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
            News::Done(scores) => {
                // The last tokens may have been told before.
                if !scores.logprobs.is_empty() || scores.cached > 0 {
                    self.changed.extend((0..outcome.samples.len()).map(|i| (prompt, i)));
                }
                outcome.prompt = scores;
            }
            News::Failed(_) => {}
        }
    }

    fn catch_up(&mut self, to: &mut Vec<u8>) {
        let Changes { app, call, shown, outcomes, .. } = self;
        let changed = std::mem::take(&mut self.changed);
        let tell = || {
            for (prompt, number) in changed {
                let index = shown.many.then_some(prompt * call.wanted.n + number);
                event(to, &Sample { index, ..told(app, call, shown, (prompt, number), &outcomes[prompt]) });
            }
        };
        match call.log_probs(|prompt| outcomes[prompt].new_tokens()) {
            few if few < LONG * STREAMED => tell(),
            _ => block_in_place(tell),
        }
    }
}
