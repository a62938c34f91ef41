//! Prompts of one's own: templates for the system's and the user's message, and worked examples before the
//! problem.
//!
//! Templates are minijinja, as chat templates are. They know `problem`, `id`, and by its name every other
//! field of the row; what they name and the row does not have is an error, not an empty text. The answer is
//! none of their business and not there. All prompts are rendered when the data is read, so that whatever is
//! wrong is said before a run starts.

use crate::data::Row;
use crate::presets::Template;
use crate::setting::BadSetting;
use crate::task::{Message, Prompt};
use minijinja::value::Serde;
use minijinja::{Environment, Error, UndefinedBehavior, Value};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Between worked examples of a prompt that is text to continue.
const BETWEEN: &str = "\n\n";

/// How a problem becomes a prompt, where a recipe says it itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PromptRule {
    /// Template of the user's message, such as `{{ problem }} Think step by step.` Every field of a row but
    /// its answer can be named. By default as `task.template` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Template of the system's message. By default that of `task.template` or of the row, if they have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// Whether the prompt is chat messages, for the tokenizer's chat template, rather than text to continue.
    #[serde(default = "yes")]
    pub chat: bool,
    /// Worked examples before the problem (few-shot), rendered like it: as turns of a chat, or as text with
    /// an empty line after each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub examples: Vec<Example>,
}

/// A problem with a response as it should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Example {
    /// The problem, as a row would have it.
    pub problem: String,
    /// The response, word by word.
    pub response: String,
}

fn yes() -> bool {
    true
}

/// A row that a template cannot be applied to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}, line {line} of the template: {reason} ({place})")]
pub struct PromptError {
    /// The key of the template, from its section on.
    pub key: String,
    /// The line in it.
    pub line: usize,
    /// What went wrong.
    pub reason: String,
    /// The row or the example.
    pub place: String,
}

/// A rule that is ready to be applied.
#[derive(Clone, Debug)]
pub struct PromptTemplate {
    environment: Environment<'static>,
    user: bool,
    system: bool,
    chat: bool,
    examples: Vec<Example>,
    /// What is not said is as it says.
    template: Template,
}

impl PromptRule {
    /// Checks the rule; `template` has what it does not say.
    pub fn compile(&self, template: Template) -> Result<PromptTemplate, BadSetting> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        // As chat templates: a line with a block alone leaves no empty line. What ends the text stays.
        let mut syntax = environment.syntax().to_builder();
        let syntax = syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build();
        environment.set_syntax(syntax.map_err(|error| BadSetting::text("user", "", reason(&error)))?);
        for (key, text) in [("user", &self.user), ("system", &self.system)] {
            let Some(text) = text else { continue };
            let wrong = |expected: String| BadSetting::text(key, text, expected);
            environment.add_template_owned(key, text.clone()).map_err(|error| {
                wrong(format!("a template; line {}: {}", error.line().unwrap_or(1), reason(&error)))
            })?;
            let named = environment.get_template(key).map(|t| t.undeclared_variables(false));
            if named.as_ref().is_ok_and(|names| names.contains("answer")) {
                return Err(wrong("a template without {{ answer }}: it would give the answer away".into()));
            }
            if key == "user" && named.is_ok_and(|names| names.is_empty()) {
                return Err(wrong("a template with {{ problem }} in it, or all prompts are the same".into()));
            }
        }
        if let Some(system) = self.system.as_ref().filter(|_| !self.chat) {
            return Err(BadSetting::text("system", system, "nothing where `chat` is false"));
        }
        for (i, example) in self.examples.iter().enumerate() {
            for (key, text) in [("problem", &example.problem), ("response", &example.response)] {
                if text.trim().is_empty() {
                    return Err(BadSetting::text(&format!("examples[{i}].{key}"), text, "a text"));
                }
            }
        }
        let (user, system) = (self.user.is_some(), self.system.is_some());
        let made = PromptTemplate {
            environment,
            user,
            system,
            chat: self.chat,
            examples: self.examples.clone(),
            template,
        };
        Ok(made)
    }
}

impl PromptTemplate {
    /// The prompt of a row. A row of chat messages has its problem in the one message of the user.
    pub fn apply(&self, row: &Row) -> Result<Prompt, PromptError> {
        let place = format!("row {}", row.id);
        let (problem, own_system) = match &row.problem {
            Prompt::Text(text) => (text.as_str(), None),
            Prompt::Chat(messages) => match &messages[..] {
                [user] if user.role == "user" => (user.content.as_str(), None),
                [system, user] if system.role == "system" && user.role == "user" => {
                    (user.content.as_str(), Some(system.content.as_str()))
                }
                _ => {
                    let roles: Vec<&str> = messages.iter().map(|m| m.role.as_str()).collect();
                    let reason = format!(
                        "the row is a chat of {}; expected one message of the user, perhaps after one of \
                         the system",
                        roles.join(", ")
                    );
                    return Err(PromptError { key: "user".into(), line: 1, reason, place });
                }
            },
        };
        let mut fields = fields(problem, &row.id);
        if let Some(extra) = row.extra.as_object() {
            for (key, value) in extra.iter().filter(|(key, _)| *key != "answer") {
                fields.entry(key.clone()).or_insert_with(|| Value::from(Serde(value)));
            }
        }
        let system = match (self.system, own_system.or(self.template.system)) {
            (true, _) => Some(self.render("system", &fields, &place)?),
            (false, system) => system.map(str::to_string),
        };
        let user = self.user_text(problem, &fields, &place)?;
        let mut shown = Vec::with_capacity(self.examples.len());
        for (i, example) in self.examples.iter().enumerate() {
            let place = format!("task.prompt.examples[{i}]");
            let fields = self::fields(&example.problem, &place);
            shown.push((self.user_text(&example.problem, &fields, &place)?, example.response.clone()));
        }
        if !self.chat {
            let shown = shown.iter().map(|(user, response)| format!("{user}{response}{BETWEEN}"));
            return Ok(Prompt::Text(shown.collect::<String>() + &user));
        }
        let message = |role: &str, content: String| Message { role: role.into(), content };
        let mut messages: Vec<Message> =
            system.map(|content| message("system", content)).into_iter().collect();
        for (user, response) in shown {
            messages.extend([message("user", user), message("assistant", response)]);
        }
        messages.push(message("user", user));
        Ok(Prompt::Chat(messages))
    }

    fn user_text(
        &self,
        problem: &str,
        fields: &BTreeMap<String, Value>,
        place: &str,
    ) -> Result<String, PromptError> {
        match self.user {
            true => self.render("user", fields, place),
            false => Ok(self.template.user_text(problem)),
        }
    }

    fn render(
        &self,
        key: &str,
        fields: &BTreeMap<String, Value>,
        place: &str,
    ) -> Result<String, PromptError> {
        let context = || Value::from_pairs(fields.iter().map(|(key, value)| (key.clone(), value.clone())));
        let rendered = self.environment.get_template(key).and_then(|template| template.render(context()));
        rendered.map_err(|error| {
            let mut reason = reason(&error);
            if let Some(name) = self.undefined(key, fields) {
                reason = format!("there is no {name:?}; there are {}", names(fields));
            }
            PromptError { key: key.into(), line: error.line().unwrap_or(1), reason, place: place.into() }
        })
    }

    /// The first name of a template that there is nothing for.
    fn undefined(&self, key: &str, fields: &BTreeMap<String, Value>) -> Option<String> {
        let named = self.environment.get_template(key).ok()?.undeclared_variables(false);
        let globals: Vec<&str> = self.environment.globals().map(|(name, _)| name).collect();
        let missing = |name: &String| !fields.contains_key(name) && !globals.contains(&name.as_str());
        named.into_iter().filter(missing).min()
    }
}

fn fields(problem: &str, id: &str) -> BTreeMap<String, Value> {
    [("problem", problem), ("id", id)].map(|(key, text)| (key.to_string(), Value::from(text))).into()
}

fn names(fields: &BTreeMap<String, Value>) -> String {
    fields.keys().cloned().collect::<Vec<_>>().join(", ")
}

fn reason(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}
