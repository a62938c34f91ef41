//! OpenAI's `/v1/chat/completions`, with vLLM's further keys. Tools and further variables go through the
//! model's own chat template; what it answers is given as it is.

use super::App;
use super::call::{Call, Told, Usage};
use super::document::{Document, Head, StreamUsage};
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use super::logprobs::{Chat, Naming, Prompt};
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
use serde_json::{Map, Value, json};
use std::slice::from_ref;
use std::sync::Arc;

const OBJECT: &str = "chat.completion";
const CHUNK: &str = "chat.completion.chunk";

/// What a template is given by the request's own keys, not by `chat_template_kwargs`.
const RESERVED: [&str; 5] = ["messages", "conversation", "tools", "documents", "chat_template"];

/// What is told beside the text.
#[derive(Clone, Copy)]
struct Shown {
    logprobs: bool,
    token_ids: bool,
    as_ids: bool,
    prompt_logprobs: bool,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'static str>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<Chat<'a>>,
    finish_reason: &'static str,
    stop_reason: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    content: &'a str,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
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
        Some(usage) => {
            let answers = app.submit(&call, true)?;
            let chunks = Chunks::new(app.clone(), call, shown, usage);
            app.stream(answers, chunks).await
        }
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
    let shown = Shown {
        logprobs,
        token_ids: fields.is("return_token_ids")?,
        as_ids: fields.is("return_tokens_as_token_ids")?,
        prompt_logprobs: prompt_logprobs.is_some(),
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
        prompts: vec![prompt(app, fields)?],
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

/// Tokens of the conversation.
pub fn prompt(app: &App, fields: Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let list = fields.read("messages", "a list of messages", Value::as_array)?;
    let list = list.filter(|list| !list.is_empty());
    let list = list.ok_or_else(|| fields.wrong("messages", "a list of at least one message"))?;
    let messages = list.iter().map(message).collect::<Result<Vec<Value>, ApiError>>()?;
    let mut variables: Map<String, Value> = match fields.get("chat_template_kwargs") {
        Some(Value::Object(map)) => {
            if let Some(key) = map.keys().find(|key| RESERVED.contains(&key.as_str())) {
                let why =
                    format!("chat_template_kwargs: `{key}` is a key of the request, not of the template");
                return Err(ApiError::invalid("chat_template_kwargs", why));
            }
            map.clone()
        }
        None => Map::new(),
        Some(_) => return Err(fields.wrong("chat_template_kwargs", "an object")),
    };
    for key in ["chat_template", "continue_final_message"] {
        fields.refuse(key, is_empty)?;
    }
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
    app.encode("messages", &text, fields.is("add_special_tokens")?)
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
        .map(|(index, sample)| Choice {
            index,
            message: Message { role: "assistant", content: &sample.text, refusal: None },
            logprobs: shown.logprobs.then_some(Chat { naming, sample, range: 0..sample.ids.len() }),
            finish_reason: sample.finish_reason(),
            stop_reason: sample.stop_reason(&call.wanted),
            token_ids: shown.token_ids.then_some(&sample.ids),
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
}

impl Chunks {
    fn new(app: Arc<App>, call: Call, shown: Shown, usage: StreamUsage) -> Chunks {
        let outcome = Outcome::new(&call.wanted, &app.texts);
        let head = Head::of(&app, &call.id, CHUNK, WeightVersion::default());
        Chunks { app, call, shown, usage, head, outcome, new_tokens: 0 }
    }

    fn usage(&self) -> Usage {
        Usage::of(self.call.prompts[0].len(), self.new_tokens)
    }

    /// That an answer begins, for each sample.
    fn begin(&self, to: &mut Vec<u8>) {
        for index in 0..self.outcome.samples.len() {
            let choice = ChunkChoice {
                index,
                delta: Delta { role: Some("assistant"), content: "" },
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
    fn chunk(&self, index: usize, text: &str, from: usize, to: &mut Vec<u8>) {
        let Chunks { app, call, shown, .. } = self;
        let sample = &self.outcome.samples[index];
        let range = from..sample.ids.len();
        let ended = sample.has_ended();
        if text.is_empty() && !ended && !shown.logprobs && !shown.token_ids {
            return;
        }
        let naming = Naming { texts: &app.texts, as_ids: shown.as_ids };
        let choice = ChunkChoice {
            index,
            delta: Delta { role: None, content: text },
            logprobs: shown.logprobs.then(|| Chat { naming, sample, range: range.clone() }),
            finish_reason: ended.then(|| sample.finish_reason()),
            stop_reason: sample.stop_reason(&call.wanted),
            token_ids: shown.token_ids.then_some(&sample.ids[range]),
        };
        let usage = self.usage.always.then(|| self.usage());
        event(to, &Document { usage, ..Document::new(&self.head, &[choice]) });
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
