//! Chat templates: a list of messages becomes the text the model was tuned on.
//!
//! Templates are Jinja programs written for Hugging Face's Python; `minijinja` runs them with the same
//! settings (trimmed blocks, Python's string methods) and the same extra functions: `raise_exception`,
//! `strftime_now`, a `tojson` that spaces like Python's, and `generation` blocks, which only mark text.
//! They come with models that nobody vouches for: `bounds` says what they may use up.

mod bounds;
mod clock;
mod process;
mod tojson;

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use qurl_files::watched;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use crate::tokenizer::{Special, TOKENIZER_CONFIG, Tokenizer};
use bounds::{Output, PATIENCE};
use clock::Clock;
pub use process::{RENDERER_MEMORY, Renderer, answer};

const NAME: &str = "chat_template";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A turn by `role`.
    pub fn new(role: &str, content: &str) -> Message {
        Message { role: role.to_string(), content: content.to_string() }
    }
}

/// Why a conversation could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The file that should hold the template is malformed.
    #[error("{file}: {found}, expected {expected}")]
    Contents {
        /// The file.
        file: String,
        /// What is there.
        found: String,
        /// What should be.
        expected: &'static str,
    },
    /// The template is not valid Jinja.
    #[error("{file}: line {line} of the chat template: {reason}")]
    Syntax {
        /// Where the template came from.
        file: String,
        /// The line in the template.
        line: usize,
        /// What the parser said.
        reason: String,
    },
    /// The template refused these messages or failed on them.
    #[error("{file}: the chat template failed at line {line}: {reason}")]
    Render {
        /// Where the template came from.
        file: String,
        /// The line in the template.
        line: usize,
        /// What the template said.
        reason: String,
    },
    /// The template took more than a rendering may take.
    #[error("{file}: the chat template was given up: {why}")]
    GaveUp {
        /// Where the template came from.
        file: String,
        /// What it took, or how its process ended.
        why: String,
    },
}

/// A compiled chat template with the special tokens it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    origin: Origin,
}

/// What a template is made of: another process can compile it from that.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Origin {
    source: String,
    file: String,
    bos: Option<String>,
    eos: Option<String>,
    pad: Option<String>,
}

impl ChatTemplate {
    /// The template of a tokenizer: `chat_template.jinja`, `chat_template.json` or the key
    /// `chat_template` of `tokenizer_config.json`; `None` where there is none.
    pub fn of(tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>, ChatError> {
        let Some((source, file)) = find_source(tokenizer)? else {
            return Ok(None);
        };
        let specials = tokenizer.specials();
        let text = |token: &Option<Special>| token.as_ref().map(|token| token.content.clone());
        let (bos, eos, pad) = (text(&specials.bos), text(&specials.eos), text(&specials.pad));
        Self::compile(Origin { source, file, bos, eos, pad }).map(Some)
    }

    /// Compiles a template without special tokens; `file` names its origin in messages.
    pub fn new(source: &str, file: &str) -> Result<ChatTemplate, ChatError> {
        let (source, file) = (source.to_string(), file.to_string());
        Self::compile(Origin { source, file, bos: None, eos: None, pad: None })
    }

    fn compile(origin: Origin) -> Result<ChatTemplate, ChatError> {
        let error = |line, reason| ChatError::Syntax { file: origin.file.clone(), line, reason };
        bounds::check_source(&origin.source).map_err(|(line, reason)| error(line, reason))?;
        let source = plain_generation_blocks(&origin.source).into_owned();
        let compiled = watched(PATIENCE, move || compile(source));
        let environment = compiled.map_err(|why| error(0, why.to_string()))?;
        let environment = environment.map_err(|e| error(e.line().unwrap_or(0), reason(&e)))?;
        Ok(ChatTemplate { environment: Arc::new(environment), origin })
    }

    /// Fixes the time that `strftime_now` sees (seconds since 1970, UTC), so that prompts can be
    /// reproduced.
    pub fn with_time(mut self, unix_seconds: u64) -> ChatTemplate {
        let mut environment = Environment::clone(&self.environment);
        set_clock(&mut environment, Clock::Fixed(unix_seconds));
        self.environment = Arc::new(environment);
        self
    }

    /// The text of a conversation; with `add_generation_prompt` it ends where the assistant begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let bytes = messages.iter().map(|message| message.role.len() + message.content.len()).sum();
        self.render_with(Value::from(Serde(messages)), bytes, add_generation_prompt, &Map::new())
    }

    /// As [`ChatTemplate::render`] for messages with other fields (tool calls, parts), and with further
    /// variables such as `tools` or `enable_thinking`.
    pub fn render_json(
        &self,
        messages: &serde_json::Value,
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String, ChatError> {
        let bytes = text_bytes(messages) + variables.values().map(text_bytes).sum::<usize>();
        let messages = Value::from(Serde(messages));
        self.render_with(messages, bytes, add_generation_prompt, variables)
    }

    fn render_with(
        &self,
        messages: Value,
        bytes: usize,
        add_generation_prompt: bool,
        variables: &Map<String, serde_json::Value>,
    ) -> Result<String, ChatError> {
        let mut context: Vec<(String, Value)> = vec![
            ("messages".to_string(), messages),
            ("tools".to_string(), Value::from(())),
            ("documents".to_string(), Value::from(())),
            ("add_generation_prompt".to_string(), Value::from(add_generation_prompt)),
        ];
        let Origin { bos, eos, pad, .. } = &self.origin;
        let tokens = [("bos_token", bos), ("eos_token", eos), ("pad_token", pad)];
        for (name, token) in tokens {
            if let Some(token) = token {
                context.push((name.to_string(), Value::from(token.as_str())));
            }
        }
        for (name, value) in variables {
            context.retain(|(existing, _)| existing != name);
            context.push((name.clone(), Value::from(Serde(value))));
        }
        let mut environment = Environment::clone(&self.environment);
        let rendered = watched(PATIENCE, move || render(&mut environment, context, bytes));
        let file = || self.origin.file.clone();
        let rendered = rendered.map_err(|why| ChatError::GaveUp { file: file(), why: why.to_string() })?;
        rendered.map_err(|error| ChatError::Render {
            file: file(),
            line: error.line().unwrap_or(0),
            reason: reason(&error),
        })
    }
}

/// An environment with this template alone.
fn compile(source: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax?);
    bounds::set(&mut environment);
    environment.add_filter("tojson", tojson::tojson);
    environment.add_function("raise_exception", raise_exception);
    set_clock(&mut environment, Clock::System);
    environment.add_template_owned(NAME, source)?;
    Ok(environment)
}

fn render(
    environment: &mut Environment,
    context: Vec<(String, Value)>,
    bytes: usize,
) -> Result<String, Error> {
    environment.set_fuel(Some(bounds::fuel(bytes)));
    let mut output = Output::new(bytes);
    let template = environment.get_template(NAME)?;
    template.render_captured_to(Value::from_pairs(context), &mut output)?;
    Ok(output.into_text())
}

/// Bytes of all texts in a JSON value.
fn text_bytes(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::String(text) => text.len(),
        serde_json::Value::Array(items) => items.iter().map(text_bytes).sum(),
        serde_json::Value::Object(map) => map.iter().map(|(key, item)| key.len() + text_bytes(item)).sum(),
        _ => 0,
    }
}

fn reason(error: &Error) -> String {
    match (error.detail(), std::error::Error::source(error)) {
        (_, Some(source)) if error.kind() == ErrorKind::WriteFailure => source.to_string(),
        (Some(detail), _) => detail.to_string(),
        (None, _) => error.kind().to_string(),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn set_clock(environment: &mut Environment, clock: Clock) {
    environment.add_function("strftime_now", move |format: String| {
        clock.format(&format).map_err(|reason| Error::new(ErrorKind::InvalidOperation, reason))
    });
}

/// The template's text and the file it came from.
fn find_source(tokenizer: &Tokenizer) -> Result<Option<(String, String)>, ChatError> {
    const JINJA: &str = "chat_template.jinja";
    if let Some(bytes) = tokenizer.file(JINJA) {
        return Ok(Some((String::from_utf8_lossy(bytes).into_owned(), tokenizer.place_of(JINJA))));
    }
    for name in ["chat_template.json", TOKENIZER_CONFIG] {
        let Some(bytes) = tokenizer.file(name) else {
            continue;
        };
        let file = tokenizer.place_of(name);
        let wrong = |found: String, expected| ChatError::Contents { file: file.clone(), found, expected };
        let settings: serde_json::Value = serde_json::from_slice(bytes)
            .map_err(|error| wrong(format!("invalid JSON ({error})"), "a JSON object"))?;
        match settings.get("chat_template") {
            None | Some(serde_json::Value::Null) => {}
            Some(serde_json::Value::String(source)) => return Ok(Some((source.clone(), file))),
            // Several templates by name: the one called `default` is for conversations.
            Some(serde_json::Value::Array(list)) => {
                let default = list
                    .iter()
                    .find(|entry| entry["name"].as_str() == Some("default"))
                    .and_then(|entry| entry["template"].as_str());
                let Some(source) = default else {
                    let found = format!("`chat_template` with {} entries", list.len());
                    return Err(wrong(found, "one that is named `default`"));
                };
                return Ok(Some((source.to_string(), file)));
            }
            Some(other) => {
                let found = format!("`chat_template` is {other}");
                return Err(wrong(found, "a text or a list of named templates"));
            }
        }
    }
    Ok(None)
}

/// Turns `{% generation %} .. {% endgeneration %}`, which only mark the assistant's text for Hugging
/// Face, into blocks that are always rendered.
fn plain_generation_blocks(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}") else {
            break;
        };
        let (tag, after) = (&rest[open..open + length], &rest[open + length..]);
        plain.push_str(&rest[..open]);
        match tag.trim_matches(['{', '%', '-', '+', ' ', '\t', '\r', '\n']) {
            "generation" => plain.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => plain.push_str(&tag.replace("endgeneration", "endif")),
            _ => plain.push_str(tag),
        }
        rest = after;
    }
    plain.push_str(rest);
    Cow::Owned(plain)
}
