//! OpenAI's `/v1/chat/completions`, with vLLM's further keys. Tools and further variables go through the
//! model's own chat template; what it answers is given as it is, unless the server was told how the model
//! writes calls and thoughts.

use super::App;
use super::call::{Call, Told, Usage};
use super::conversation;
use super::document::{Document, Head, StreamUsage};
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use super::logprobs::{Chat, Naming, Prompt};
use super::outcome::{Growth, Outcome};
use super::parts::{Parts, Reader, Reading, ToolCall};
use super::sampling::{Dialect, Wanted, top};
use super::stream::{Events, event};
use crate::service::News;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use qurl_rollout::WeightVersion;
use serde::Serialize;
use serde_json::{Value, json};
use std::slice::from_ref;
use std::sync::Arc;

const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// What is told beside the text.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    token_ids: bool,
    as_ids: bool,
    prompt_logprobs: bool,
    /// How the text of an answer is read.
    reading: Reading,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    refusal: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Called>,
}

/// A call as OpenAI tells it; the number is told in streams.
#[derive(Serialize)]
struct Called {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    id: String,
    r#type: &'static str,
    function: ToolCall,
}

/// Calls of a sample of a call of ours, from a number on.
fn called(call: &Call, sample: usize, from: usize, calls: Vec<ToolCall>, streamed: bool) -> Vec<Called> {
    let of = |(number, function): (usize, ToolCall)| Called {
        index: streamed.then_some(number),
        id: format!("call-{}-{sample}-{number}", call.id),
        r#type: "function",
        function,
    };
    (from..).zip(calls).map(of).collect()
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: Message,
    logprobs: Option<Chat<'a>>,
    finish_reason: &'static str,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize, Default)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Called>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta,
    logprobs: Option<Chat<'a>>,
    finish_reason: Option<&'static str>,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

/// `POST /v1/chat/completions`
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
    for key in ["functions", "function_call", "audio", "echo", "web_search_options"] {
        fields.refuse(key, is_empty)?;
    }
    fields.refuse("modalities", |modalities| modalities == &json!(["text"]))?;
    fields.refuse("tool_choice", |choice| choice == "auto" || choice == "none")?;
    let wanted = Wanted::read(fields, Dialect::OpenAi)?;
    if wanted.max_new == Some(0) {
        return Err(ApiError::invalid("max_tokens", "max_tokens = 0: expected at least 1"));
    }
    let logprobs = fields.is("logprobs")?;
    let best = top(fields, "top_logprobs", vocabulary)?;
    if best.is_some_and(|best| best > 0) && !logprobs {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs without logprobs: true"));
    }
    let prompt_logprobs = top(fields, "prompt_logprobs", vocabulary)?;
    let (text, ids) = conversation::rendered(app, fields)?;
    let shown = Shown {
        logprobs,
        token_ids: fields.is("return_token_ids")?,
        as_ids: fields.is("return_tokens_as_token_ids")?,
        prompt_logprobs: prompt_logprobs.is_some(),
        reading: Reading::of(app.parsers, conversation::tools(fields)?.is_some(), &text),
    };
    let told = Told {
        new: usize::from(logprobs),
        prompt: usize::from(shown.prompt_logprobs),
        plain: usize::from(shown.token_ids),
    };
    let call = Call {
        told,
        id: app.name_of("chatcmpl", headers, fields)?,
        ids: Vec::new(),
        prompts: vec![ids],
        each: Vec::new(),
        salt: fields.salt()?,
        wanted,
        top: best.unwrap_or(0),
        prompt_top: prompt_logprobs,
    };
    let stream = fields.stream()?;
    if stream.is_some() && shown.prompt_logprobs {
        return Err(ApiError::invalid("prompt_logprobs", "prompt_logprobs with stream is not supported"));
    }
    Ok((call, shown, stream))
}

/// Why a sample ended: where it calls tools and ends by itself, it is for that.
fn finish_reason(sample: &Growth, has_called: bool) -> &'static str {
    match sample.finish_reason() {
        "stop" if has_called => "tool_calls",
        reason => reason,
    }
}

async fn whole(app: &App, call: &Call, shown: Shown) -> Result<Response, ApiError> {
    let (outcomes, share) = app.collect(call).await?;
    let (Some(outcome), Some(prompt)) = (outcomes.first(), call.prompts.first()) else {
        return Err(ApiError::broken("no answer"));
    };
    let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
    let choices: Vec<Choice<'_>> = outcome
        .samples
        .iter()
        .enumerate()
        .map(|(index, sample)| {
            let Parts { reasoning, content, calls } = shown.reading.parts(&sample.text);
            let tool_calls = called(call, index, 0, calls, false);
            Choice {
                index,
                finish_reason: finish_reason(sample, !tool_calls.is_empty()),
                message: Message {
                    role: "assistant",
                    content: Some(content).filter(|content| tool_calls.is_empty() || !content.is_empty()),
                    refusal: None,
                    reasoning_content: Some(reasoning).filter(|reasoning| !reasoning.is_empty()),
                    tool_calls,
                },
                logprobs: shown.logprobs.then_some(Chat { naming, sample, range: 0..sample.ids.len() }),
                stop_reason: sample.stop_reason(&call.wanted),
                token_ids: shown.token_ids.then_some(&sample.ids),
            }
        })
        .collect();
    let head = Head::of(app, &call.id, OBJECT, outcome.weights);
    let document = || {
        Ok(Document {
            usage: Some(Usage::of(prompt.len(), outcome.new_tokens()).ended(&outcomes)),
            prompt_token_ids: shown.token_ids.then_some(prompt),
            prompt_logprobs: shown.prompt_logprobs.then_some(Prompt { texts: &app.texts, prompt, outcome }),
            ..Document::new(&head, &choices)
        })
    };
    app.tell((call, share), &outcomes, document).await
}

/// The answer as a stream: the roles, then an event for every token.
struct Chunks {
    app: Arc<App>,
    call: Call,
    shown: Shown,
    usage: StreamUsage,
    head: Head,
    outcome: Outcome,
    new_tokens: usize,
    /// What reads the text of each sample, and how many calls it has found.
    readers: Vec<(Reader, usize)>,
}

impl Chunks {
    fn new(app: Arc<App>, call: Call, shown: Shown, usage: StreamUsage) -> Chunks {
        let outcome = Outcome::new(&call.wanted, &app.texts);
        let head = Head::of(&app, &call.id, CHUNK, WeightVersion::default());
        let readers = (0..call.wanted.n).map(|_| (shown.reading.reader(), 0)).collect();
        Chunks { app, call, shown, usage, head, outcome, new_tokens: 0, readers }
    }

    fn usage(&self) -> Usage {
        Usage::of(self.call.prompts[0].len(), self.new_tokens)
    }

    /// That an answer begins, for each sample.
    fn begin(&self, to: &mut Vec<u8>) {
        for index in 0..self.outcome.samples.len() {
            let choice = ChunkChoice {
                index,
                delta: Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() },
                logprobs: None,
                finish_reason: None,
                stop_reason: Value::Null,
                token_ids: None,
            };
            let prompt = &self.call.prompts[0];
            let prompt_token_ids = (self.shown.token_ids && index == 0).then_some(prompt.as_slice());
            let usage = self.usage.always.then(|| self.usage());
            event(to, &Document { usage, prompt_token_ids, ..Document::new(&self.head, &[choice]) });
        }
    }

    /// What a sample has from a token on.
    fn chunk(&mut self, index: usize, text: &str, from: usize, to: &mut Vec<u8>) {
        let usage = self.usage.always.then(|| self.usage());
        let Chunks { app, call, shown, head, outcome, readers, .. } = self;
        let sample = &outcome.samples[index];
        let range = from..sample.ids.len();
        let ended = sample.has_ended();
        let (reader, calls_before) = &mut readers[index];
        let mut parts = reader.push(text);
        if ended {
            parts.add(reader.end());
        }
        if parts == Parts::default() && !ended && !shown.logprobs && !shown.token_ids {
            return;
        }
        let tool_calls = called(call, index, *calls_before, parts.calls, true);
        *calls_before += tool_calls.len();
        let only_other = parts.content.is_empty() && !(parts.reasoning.is_empty() && tool_calls.is_empty());
        let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
        let choice = ChunkChoice {
            index,
            delta: Delta {
                role: None,
                content: Some(parts.content).filter(|_| !only_other),
                reasoning_content: Some(parts.reasoning).filter(|reasoning| !reasoning.is_empty()),
                tool_calls,
            },
            logprobs: shown.logprobs.then(|| Chat { naming, sample, range: range.clone() }),
            finish_reason: ended.then(|| finish_reason(sample, *calls_before > 0)),
            stop_reason: sample.stop_reason(&call.wanted),
            token_ids: shown.token_ids.then_some(&sample.ids[range]),
        };
        event(to, &Document { usage, ..Document::new(head, &[choice]) });
    }
}

impl Events for Chunks {
    fn take(&mut self, _: usize, news: News, to: &mut Vec<u8>) {
        match news {
            News::Began(weights) => {
                self.head.is_of(&self.app, weights);
                self.begin(to);
            }
            News::Tokens(tokens) => {
                for token in tokens {
                    let index = token.sample as usize;
                    let text = self.outcome.grow(token);
                    self.new_tokens += 1;
                    self.chunk(index, &text, self.outcome.samples[index].ids.len() - 1, to);
                }
            }
            News::Aborted => {
                for (index, rest) in self.outcome.abort() {
                    self.chunk(index, &rest, self.outcome.samples[index].ids.len(), to);
                }
            }
            News::Done(scores) => self.outcome.prompt = scores,
            News::Failed(_) => {}
        }
    }

    fn end(&mut self, to: &mut Vec<u8>) {
        if self.usage.at_end {
            let usage = Some(self.usage().ended(from_ref(&self.outcome)));
            event(to, &Document { usage, ..Document::<ChunkChoice<'_>>::new(&self.head, &[]) });
        }
    }
}
