//! Conversations: messages, tools and documents through the model's chat template.

use super::App;
use super::error::ApiError;
use super::fields::{Fields, is_empty};
use serde_json::{Map, Value, json};

/// What a template is given by the request's own keys, not by `chat_template_kwargs`.
const RESERVED: [&str; 5] = ["messages", "conversation", "tools", "documents", "chat_template"];

/// The tools that the model is told of.
pub fn tools<'a>(fields: Fields<'a>) -> Result<Option<&'a Vec<Value>>, ApiError> {
    let tools = fields.read("tools", "a list of tools", Value::as_array)?.filter(|tools| !tools.is_empty());
    Ok(tools.filter(|_| fields.get("tool_choice").is_none_or(|choice| choice != "none")))
}

/// Tokens of the conversation.
pub fn prompt(app: &App, fields: Fields<'_>) -> Result<Vec<u32>, ApiError> {
    Ok(rendered(app, fields)?.1)
}

/// The conversation as the model gets it, and its tokens.
pub fn rendered(app: &App, fields: Fields<'_>) -> Result<(String, Vec<u32>), ApiError> {
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
    if let Some(tools) = tools(fields)? {
        variables.insert("tools".to_string(), json!(tools));
    }
    let open = fields.is_or("add_generation_prompt", true)?;
    let text = app.texts.render(&json!(messages), open, &variables)?;
    // The template has put special tokens where they belong.
    let ids = app.encode("messages", &text, fields.is("add_special_tokens")?)?;
    Ok((text, ids))
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
