//! OpenAI's `/v1/completions`, with vLLM's further keys: ids as prompts, `return_token_ids`,
//! `prompt_logprobs`, `return_tokens_as_token_ids`.

use super::App;
use super::call::{Call, Told, Usage};
use super::document::{Document, Head, StreamUsage};
use super::error::ApiError;
use super::fields::{Fields, ids, is_empty};
use super::logprobs::{Completion, Naming, Prompt};
use super::outcome::Outcome;
use super::sampling::{Dialect, Wanted, top};
use super::stream::{Events, event};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::WeightVersion;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

const OBJECT: &str = "text_completion";
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

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: &'a str,
    logprobs: Option<Completion<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Prompt<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

/// `POST /v1/completions`
pub async fn complete(
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
    let vocabulary = app.model.config.vocab_size;
    fields.refuse("suffix", is_empty)?;
    let mut wanted = Wanted::read(fields, Dialect::OpenAi)?;
    let none_new = wanted.max_new == Some(0);
    wanted.max_new = wanted.max_new.or(Some(DEFAULT_MAX_TOKENS));
    let asked = top(fields, "logprobs", vocabulary)?;
    let prompt_logprobs = top(fields, "prompt_logprobs", vocabulary)?;
    let shown = Shown {
        logprobs: asked.is_some(),
        token_ids: fields.is("return_token_ids")?,
        as_ids: fields.is("return_tokens_as_token_ids")?,
        prompt_logprobs: prompt_logprobs.is_some(),
        echo: fields.is("echo")?,
        none_new,
    };
    let echoed = asked.filter(|_| shown.echo);
    let n = wanted.n;
    let as_often = |told: bool| if told { n } else { 0 };
    let told = Told {
        new: usize::from(shown.logprobs),
        prompt: as_often(shown.prompt_logprobs) + as_often(shown.logprobs && shown.echo),
        plain: as_often(shown.token_ids) + as_often(shown.echo),
    };
    let call = Call {
        id: app.name_of("cmpl", headers, fields)?,
        ids: Vec::new(),
        prompts: prompts(app, fields, n)?,
        told,
        each: Vec::new(),
        salt: fields.salt()?,
        wanted,
        top: asked.unwrap_or(0),
        prompt_top: prompt_logprobs.max(echoed),
    };
    let stream = fields.stream()?;
    if stream.is_some() && (shown.echo || shown.none_new) {
        return Err(ApiError::invalid("stream", "stream with echo, or without new tokens, is not supported"));
    }
    if stream.is_some() && shown.prompt_logprobs {
        return Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs with stream is not supported"));
    }
    Ok((call, shown, stream))
}

/// The prompts: a text, some texts, ids, or some lists of ids.
fn prompts(app: &App, fields: Fields<'_>, n: usize) -> Result<Vec<Vec<u32>>, ApiError> {
    const EXPECTED: &str = "a text, a list of texts, a list of token ids or a list of such lists";
    let prompt = fields.get("prompt").ok_or_else(|| fields.wrong("prompt", EXPECTED))?;
    let encode = |text: &str| app.encode("prompt", text, fields.is_or("add_special_tokens", true)?);
    let wrong = || fields.wrong("prompt", EXPECTED);
    if let Value::Array(list) = prompt
        && list.first().is_some_and(|first| !first.is_number())
    {
        app.service.could_hold(list.len(), n)?; // before anything is made of them
    }
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

async fn whole(app: &App, call: &Call, shown: Shown) -> Result<Response, ApiError> {
    let (outcomes, share) = app.collect(call).await?;
    let new = if shown.none_new { 0 } else { outcomes.iter().map(Outcome::new_tokens).sum() };
    let weights = outcomes.first().map(|outcome| outcome.weights).unwrap_or_default();
    let head = Head::of(app, &call.id, OBJECT, weights);
    let usage = Some(Usage::of(call.prompts.iter().map(Vec::len).sum(), new).ended(&outcomes));
    let (mut texts, mut choices) = (Vec::new(), Vec::new());
    app.tell((call, share), &outcomes, || {
        for (prompt, outcome) in call.prompts.iter().zip(&outcomes) {
            let before = match shown.echo {
                true => app.texts.decode(prompt, call.wanted.skip_special)?,
                false => String::new(),
            };
            let new = |text| before.clone() + if shown.none_new { "" } else { text };
            texts.extend(outcome.samples.iter().map(|sample| new(&sample.text)));
        }
        for (prompt, outcome) in call.prompts.iter().zip(&outcomes) {
            for number in 0..outcome.samples.len() {
                let index = choices.len();
                choices.push(choice(app, call, shown, (index, &texts[index]), (prompt, outcome, number)));
            }
        }
        Ok(Document { usage, ..Document::new(&head, &choices) })
    })
    .await
}

fn choice<'a>(
    app: &'a App,
    call: &Call,
    shown: Shown,
    (index, text): (usize, &'a str),
    (prompt, outcome, number): (&'a [u32], &'a Outcome, usize),
) -> Choice<'a> {
    let sample = &outcome.samples[number];
    let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
    let new = if shown.none_new { 0 } else { sample.ids.len() };
    let logprobs = shown.logprobs.then(|| {
        let scores = &outcome.prompt;
        let of_prompt = prompt.iter().enumerate().map(|(i, &id)| {
            let place = i.checked_sub(1);
            let top = place.and_then(|i| scores.top.get(i)).map_or(&[][..], Vec::as_slice);
            (id, place.and_then(|i| scores.logprobs.get(i)).copied(), top)
        });
        let of_prompt = of_prompt.take(if shown.echo { prompt.len() } else { 0 });
        let of_new = (0..new).map(|i| (sample.ids[i], Some(sample.logprobs[i]), sample.top(i)));
        Completion::new(naming, of_prompt.chain(of_new), &mut 0)
    });
    let finish = if shown.none_new { "length" } else { sample.finish_reason() };
    Choice {
        index,
        text,
        logprobs,
        finish_reason: Some(finish),
        stop_reason: sample.stop_reason(&call.wanted),
        prompt_logprobs: shown.prompt_logprobs.then_some(Prompt { texts: &app.texts, prompt, outcome }),
        prompt_token_ids: shown.token_ids.then_some(prompt),
        token_ids: shown.token_ids.then_some(&sample.ids[..new]),
    }
}

/// The answer as a stream: an event for every token.
struct Chunks {
    app: Arc<App>,
    call: Call,
    shown: Shown,
    usage: StreamUsage,
    head: Head,
    outcomes: Vec<Outcome>,
    /// Where the next token of each choice begins in its text.
    offsets: Vec<usize>,
    prompt_tokens: usize,
    new_tokens: usize,
}

impl Chunks {
    fn new(app: Arc<App>, call: Call, shown: Shown, usage: StreamUsage) -> Chunks {
        Chunks {
            shown,
            usage,
            head: Head::of(&app, &call.id, OBJECT, WeightVersion::default()),
            outcomes: Outcome::all(&call, &app.texts),
            offsets: vec![0; call.prompts.len() * call.wanted.n],
            prompt_tokens: call.prompts.iter().map(Vec::len).sum(),
            new_tokens: 0,
            app,
            call,
        }
    }

    /// What a sample has from a token on.
    fn chunk(&mut self, prompt: usize, sample: usize, text: &str, from: usize, to: &mut Vec<u8>) {
        let Chunks { app, call, shown, .. } = self;
        let growth = &self.outcomes[prompt].samples[sample];
        let index = prompt * call.wanted.n + sample;
        let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
        let range = from..growth.ids.len();
        let tokens = range.clone().map(|i| (growth.ids[i], Some(growth.logprobs[i]), growth.top(i)));
        let logprobs = shown.logprobs.then(|| Completion::new(naming, tokens, &mut self.offsets[index]));
        let ended = growth.has_ended();
        if text.is_empty() && !ended && logprobs.is_none() && !shown.token_ids {
            return;
        }
        let choice = Choice {
            index,
            text,
            logprobs,
            finish_reason: ended.then(|| growth.finish_reason()),
            stop_reason: growth.stop_reason(&call.wanted),
            prompt_logprobs: None,
            prompt_token_ids: (shown.token_ids && from == 0).then_some(&call.prompts[prompt]),
            token_ids: shown.token_ids.then_some(&growth.ids[range]),
        };
        let usage = self.usage.always.then(|| Usage::of(self.prompt_tokens, self.new_tokens));
        event(to, &Document { usage, ..Document::new(&self.head, &[choice]) });
    }
}

impl Events for Chunks {
    fn take(&mut self, prompt: usize, news: News, to: &mut Vec<u8>) {
        match news {
            News::Began(weights) => {
                self.outcomes[prompt].weights = weights;
                self.head.is_of(&self.app, weights);
            }
            News::Tokens(tokens) => {
                for token in tokens {
                    let sample = token.sample as usize;
                    let text = self.outcomes[prompt].grow(token);
                    self.new_tokens += 1;
                    let from = self.outcomes[prompt].samples[sample].ids.len() - 1;
                    self.chunk(prompt, sample, &text, from, to);
                }
            }
            News::Aborted => {
                for (sample, rest) in self.outcomes[prompt].abort() {
                    let from = self.outcomes[prompt].samples[sample].ids.len();
                    self.chunk(prompt, sample, &rest, from, to);
                }
            }
            News::Done(scores) => self.outcomes[prompt].prompt = scores,
            News::Failed(_) => {}
        }
    }

    fn end(&mut self, to: &mut Vec<u8>) {
        if self.usage.at_end {
            let usage = Some(Usage::of(self.prompt_tokens, self.new_tokens).ended(&self.outcomes));
            event(to, &Document { usage, ..Document::<Choice<'_>>::new(&self.head, &[]) });
        }
    }
}
