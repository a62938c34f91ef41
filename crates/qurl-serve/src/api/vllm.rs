//! vLLM's own addresses: token in, token out, and the tokenizer.

use super::call::{Call, Told, Usage};
use super::document::StreamUsage;
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use super::logprobs::{Chat, List, Naming, Prompt};
use super::outcome::Outcome;
use super::sampling::{Dialect, Wanted, top};
use super::stream::{Events, event};
use super::{App, answer, now};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::WeightVersion;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::slice::from_ref;
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
    model: &'a str,
    created: u64,
    choices: List<C>,
    prompt_logprobs: Option<Prompt<'a>>,
    prompt_token_ids: Option<&'a [u32]>,
    usage: Usage,
    kv_transfer_params: Option<()>,
    weight_version: String,
    weight_checksum: String,
}

/// A piece of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    request_id: &'a str,
    choices: &'a [ChunkChoice<'a>],
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    weight_version: &'a str,
    weight_checksum: &'a str,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    logprobs: Option<Chat<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    token_ids: &'a [u32],
}

/// What is told beside the tokens.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    prompt_ids: bool,
}

/// `POST /inference/v1/generate`: `token_ids` and `sampling_params` in; ids, log-probs and reasons out,
/// tokens named by their ids.
pub async fn generate(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let (call, shown, stream) = app.read(body, move |app, fields| wanted(app, &headers, fields)).await?;
    match stream {
        None => whole(&app, &call, shown).await,
        Some(usage) => app.stream(call, |app, call| Chunks::new(app, call, shown, usage)).await,
    }
}

/// What a body asks for, and how it is streamed if it is.
fn wanted(
    app: &App,
    headers: &HeaderMap,
    fields: Fields<'_>,
) -> Result<(Call, Shown, Option<StreamUsage>), ApiError> {
    app.check_model(fields)?;
    for key in ["features", "content_parts", "kv_transfer_params", "ec_transfer_params"] {
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
    let vocabulary = app.model.config.vocab_size;
    let best = top(params, "logprobs", vocabulary)?;
    let prompt_top = top(params, "prompt_logprobs", vocabulary)?;
    let shown = Shown { logprobs: best.is_some(), prompt_ids: fields.is("return_token_ids")? };
    let told = Told {
        new: usize::from(shown.logprobs),
        prompt: usize::from(prompt_top.is_some()),
        plain: usize::from(shown.prompt_ids),
    };
    let stream = fields.stream()?;
    if stream.is_some() && prompt_top.is_some() {
        return Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs with stream is not supported"));
    }
    let prompt = fields.ids("token_ids")?;
    let call = Call {
        id: app.name_of("gen", headers, fields)?,
        ids: Vec::new(),
        prompts: vec![prompt.ok_or_else(|| fields.wrong("token_ids", "a list of token ids"))?],
        wanted,
        each: Vec::new(),
        salt: fields.salt()?,
        top: best.unwrap_or(0),
        prompt_top,
        told,
    };
    Ok((call, shown, stream))
}

async fn whole(app: &App, call: &Call, shown: Shown) -> Result<Response, ApiError> {
    let (outcomes, share) = app.collect(call).await?;
    let (Some(outcome), Some(prompt)) = (outcomes.first(), call.prompts.first()) else {
        return Err(ApiError::broken("no answer"));
    };
    let naming = Naming { texts: &app.texts, as_ids: true };
    let choices = outcome.samples.iter().enumerate().map(|(index, sample)| Choice {
        index,
        logprobs: shown.logprobs.then_some(Chat { naming, sample, range: 0..sample.ids.len() }),
        finish_reason: sample.finish_reason(),
        stop_reason: sample.stop_reason(&call.wanted),
        token_ids: &sample.ids,
    });
    let document = || {
        Ok(Generated {
            request_id: &call.id,
            model: app.model_name(),
            created: now(),
            choices: List(choices),
            prompt_logprobs: call.prompt_top.map(|_| Prompt { texts: &app.texts, prompt, outcome }),
            prompt_token_ids: shown.prompt_ids.then_some(prompt),
            usage: Usage::of(prompt.len(), outcome.new_tokens()).ended(&outcomes),
            kv_transfer_params: None,
            weight_version: app.version_name(outcome.weights),
            weight_checksum: checksum(outcome.weights),
        })
    };
    app.tell((call, share), &outcomes, document).await
}

fn checksum(weights: WeightVersion) -> String {
    format!("{:016x}", weights.checksum)
}

/// The answer as a stream: an event for every token.
struct Chunks {
    app: Arc<App>,
    call: Call,
    shown: Shown,
    usage: StreamUsage,
    outcome: Outcome,
    /// What the weights are called, as long as the answer lasts.
    weights: (String, String),
}

impl Chunks {
    fn new(app: Arc<App>, call: Call, shown: Shown, usage: StreamUsage) -> Chunks {
        let outcome = Outcome::new(&call.wanted, &app.texts);
        Chunks { app, call, shown, usage, outcome, weights: Default::default() }
    }

    fn usage(&self) -> Usage {
        Usage::of(self.call.prompts[0].len(), self.outcome.new_tokens())
    }

    fn write(&self, choices: &[ChunkChoice<'_>], usage: Option<Usage>, first: bool, to: &mut Vec<u8>) {
        let chunk = Chunk {
            request_id: &self.call.id,
            choices,
            usage,
            prompt_token_ids: (self.shown.prompt_ids && first).then_some(self.call.prompts[0].as_slice()),
            weight_version: &self.weights.0,
            weight_checksum: &self.weights.1,
        };
        event(to, &chunk);
    }

    /// What a sample has from a token on.
    fn chunk(&self, index: usize, from: usize, to: &mut Vec<u8>) {
        let sample = &self.outcome.samples[index];
        let range = from..sample.ids.len();
        let naming = Naming { texts: &self.app.texts, as_ids: true };
        let choice = ChunkChoice {
            index,
            logprobs: self.shown.logprobs.then(|| Chat { naming, sample, range: range.clone() }),
            finish_reason: sample.has_ended().then(|| sample.finish_reason()),
            stop_reason: sample.stop_reason(&self.call.wanted),
            token_ids: &sample.ids[range],
        };
        let usage = self.usage.always.then(|| self.usage());
        self.write(&[choice], usage, index == 0 && from == 0, to);
    }
}

impl Events for Chunks {
    fn take(&mut self, _: usize, news: News, to: &mut Vec<u8>) {
        match news {
            News::Began(weights) => {
                self.outcome.weights = weights;
                self.weights = (self.app.version_name(weights), checksum(weights));
            }
            News::Tokens(tokens) => {
                for token in tokens {
                    let index = token.sample as usize;
                    self.outcome.grow(token);
                    self.chunk(index, self.outcome.samples[index].ids.len() - 1, to);
                }
            }
            News::Aborted => {
                for (index, _) in self.outcome.abort() {
                    self.chunk(index, self.outcome.samples[index].ids.len(), to);
                }
            }
            News::Done(scores) => self.outcome.prompt = scores,
            News::Failed(_) => {}
        }
    }

    fn end(&mut self, to: &mut Vec<u8>) {
        if self.usage.at_end {
            self.write(&[], Some(self.usage().ended(from_ref(&self.outcome))), false, to);
        }
    }
}

/// `POST /tokenize`: a `prompt`, or `messages` through the chat template.
pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let ids = app.read(body, |app, fields| {
        app.check_model(fields)?;
        let ids = match fields.text("prompt")? {
            Some(text) => app.encode("prompt", text, fields.is_or("add_special_tokens", true)?)?,
            None if fields.get("messages").is_some() => super::conversation::prompt(app, fields)?,
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
