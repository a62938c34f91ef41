//! SGLang's `/generate`: one prompt or several, `sampling_params`, and log-probs as
//! `[log-prob, id, text or null]`.

use super::App;
use super::call::{Call, Told};
use super::error::ApiError;
use super::fields::{Fields, ids, is_empty};
use super::logprobs::List;
use super::outcome::Outcome;
use super::sampling::{Dialect, Wanted, top};
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
        let answers = app.submit(&call, true)?;
        let (outcomes, changed) = (Outcome::all(&call, &app.texts), BTreeSet::new());
        return app.clone().stream(answers, Changes { app, call, shown, outcomes, changed }).await;
    }
    let (outcomes, share) = app.collect(&call).await?;
    let told = (0..call.prompts.len()).flat_map(|prompt| {
        let (app, call, outcome) = (&app, &call, &outcomes[prompt]);
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
    let (prompts, several) = prompts(app, fields, wanted.n)?;
    let logprobs = fields.is("return_logprob")?;
    let from = fields.i64("logprob_start_len")?.unwrap_or(-1);
    let best = if logprobs { top(fields, "top_logprobs_num")?.unwrap_or(0) } else { 0 };
    let shown = Shown {
        logprobs,
        from: usize::try_from(from).ok().filter(|_| logprobs),
        texts: fields.is("return_text_in_logprobs")?,
        best,
        many: several || wanted.n > 1,
        none_new,
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
    let told = Told {
        new: if logprobs { often } else { 0 },
        prompt: if shown.from.is_some() { often * wanted.n } else { 0 },
        plain: 0,
    };
    let (id, prompt_top) = (app.name("gen", own), shown.from.map(|_| best));
    Ok((Call { id, ids, prompts, wanted, salt: fields.salt()?, top: best, prompt_top, told }, shown, stream))
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
    shown: Shown,
    (prompt, number): (usize, usize),
    outcome: &'a Outcome,
) -> Sample<'a> {
    let (sample, ids) = (&outcome.samples[number], &call.prompts[prompt]);
    let new = if shown.none_new { 0 } else { sample.ids.len() };
    let finish = match sample.finish {
        Some(_) if shown.none_new => json!({"type": "length", "length": 0}),
        Some(FinishReason::StopId(id)) => json!({"type": "stop", "matched": id}),
        Some(FinishReason::StopString(i)) => json!({"type": "stop", "matched": call.wanted.stop.get(i)}),
        Some(_) => json!({"type": "length", "length": new}),
        None if sample.aborted => json!({"type": "abort", "message": "aborted"}),
        None => Value::Null,
    };
    let names = Names(shown.texts.then_some(&app.texts));
    let logprobs = shown.logprobs.then(|| {
        let (from, scores) = (shown.from.unwrap_or(ids.len()), &outcome.prompt);
        let output = Places { names, ids: &sample.ids[..new], logprobs: &sample.logprobs, first: 0, from: 0 };
        let of_prompt = |i: usize| i.checked_sub(1).and_then(|i| scores.top.get(i)).map(Vec::as_slice);
        Logprobs {
            output_token_logprobs: output,
            output_top_logprobs: (shown.best > 0)
                .then(|| Tops { names, tops: (0..new).map(|i| Some(sample.top(i))).collect() }),
            input_token_logprobs: Places { names, ids, logprobs: &scores.logprobs, first: 1, from },
            input_top_logprobs: (!scores.top.is_empty())
                .then(|| Tops { names, tops: (from..ids.len()).map(of_prompt).collect() }),
        }
    });
    Sample {
        text: if shown.none_new { "" } else { &sample.text },
        output_ids: &sample.ids[..new],
        meta_info: Meta {
            id: call.id_of(prompt),
            finish_reason: finish,
            prompt_tokens: ids.len(),
            completion_tokens: new,
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
                if !scores.logprobs.is_empty() {
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
                event(to, &Sample { index, ..told(app, call, *shown, (prompt, number), &outcomes[prompt]) });
            }
        };
        match call.log_probs(|prompt| outcomes[prompt].new_tokens()) {
            few if few < LONG * STREAMED => tell(),
            _ => block_in_place(tell),
        }
    }
}
