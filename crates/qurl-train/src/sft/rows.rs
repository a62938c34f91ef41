//! Rows of supervised data: which fields make an example.
//!
//! The layouts of the field are told apart by their names, in this order: chat `messages`; `prompt` with
//! `response`, or as TRL has it with `completion`, both texts or both lists of messages; alpaca's
//! `instruction`, `input` and `output`. Other fields (ids, sources) are passed over, and so is one that is
//! null, as columns of parquet files are.

use qurl_model::chat::Message;
use serde_json::{Map, Value};

/// A row before it is turned into tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Row {
    /// A text that is read, and one that is learned after it.
    Text {
        /// Read.
        prompt: String,
        /// Learned, with the end token.
        response: String,
    },
    /// A conversation, of which the assistant's turns from `learned_from` on are learned.
    Chat {
        /// All turns.
        messages: Vec<Message>,
        /// Turns before this one are read only.
        learned_from: usize,
    },
}

impl Row {
    /// Understands the fields of a row; the error says what was expected. Alpaca's rows become a conversation
    /// of two turns where the model has a chat template.
    pub fn of(fields: &Map<String, Value>, has_template: bool) -> Result<Row, String> {
        let get = |key: &str| fields.get(key).filter(|value| !value.is_null());
        if let Some(value) = get("messages") {
            return Ok(Row::Chat { messages: messages("messages", value)?, learned_from: 0 });
        }
        if let Some(prompt) = get("prompt") {
            return match (get("response"), get("completion")) {
                (Some(_), Some(_)) => {
                    Err("expected `response` or `completion` beside `prompt`, found both".into())
                }
                (Some(response), None) => pair(prompt, "response", response),
                (None, Some(completion)) => pair(prompt, "completion", completion),
                (None, None) => Err(expected("`response` or `completion` beside `prompt`", fields)),
            };
        }
        if let Some(instruction) = get("instruction") {
            let Some(output) = get("output") else {
                return Err(expected("`output` beside `instruction`", fields));
            };
            let empty =
                |value: &Value| value.as_str() == Some("") || value.as_array().is_some_and(Vec::is_empty);
            if let Some(key) =
                ["system", "history"].into_iter().find(|key| get(key).is_some_and(|v| !empty(v)))
            {
                return Err(format!(
                    "`{key}` beside `instruction` cannot be used; give the turns as `messages`"
                ));
            }
            let input = get("input").map_or(Ok(""), |input| text("input", input))?;
            return Ok(alpaca(
                text("instruction", instruction)?,
                input,
                text("output", output)?,
                has_template,
            ));
        }
        Err(expected(
            "`messages`, or `prompt` and `response` (or `completion`), or `instruction` and `output`",
            fields,
        ))
    }
}

fn expected(what: &str, fields: &Map<String, Value>) -> String {
    format!("expected {what}, found the keys {:?}", fields.keys().collect::<Vec<_>>())
}

fn text<'a>(key: &str, value: &'a Value) -> Result<&'a str, String> {
    value.as_str().ok_or_else(|| format!("`{key}` is {}, expected a text", kind(value)))
}

/// Two texts, or turns that are read and turns that are learned.
fn pair(prompt: &Value, key: &str, response: &Value) -> Result<Row, String> {
    let Value::Array(_) = prompt else {
        let (prompt, response) = (text("prompt", prompt)?.to_string(), text(key, response)?.to_string());
        return Ok(Row::Text { prompt, response });
    };
    let mut all = messages("prompt", prompt)?;
    let learned_from = all.len();
    match response {
        Value::String(text) => all.push(Message::new("assistant", text)),
        response => all.extend(messages(key, response)?),
    }
    Ok(Row::Chat { messages: all, learned_from })
}

fn messages(key: &str, value: &Value) -> Result<Vec<Message>, String> {
    let Some(turns) = value.as_array().filter(|turns| !turns.is_empty()) else {
        return Err(format!(
            "`{key}` is {}, expected a list of turns with `role` and `content`",
            kind(value)
        ));
    };
    let turn = |(i, turn): (usize, &Value)| {
        let of = |name: &str| turn.get(name).and_then(Value::as_str);
        let message = of("role").zip(of("content")).map(|(role, content)| Message::new(role, content));
        message.ok_or_else(|| format!("`{key}`, turn {}: expected texts under `role` and `content`", i + 1))
    };
    turns.iter().enumerate().map(turn).collect()
}

/// What alpaca's authors wrote before an instruction, with and without an input.
const ALPACA_TASK: &str = "Below is an instruction that describes a task";
const ALPACA_REQUEST: &str = "Write a response that appropriately completes the request.";

fn alpaca(instruction: &str, input: &str, output: &str, has_template: bool) -> Row {
    if has_template {
        let said =
            if input.is_empty() { instruction.to_string() } else { format!("{instruction}\n\n{input}") };
        let messages = vec![Message::new("user", &said), Message::new("assistant", output)];
        return Row::Chat { messages, learned_from: 0 };
    }
    let prompt = match input.is_empty() {
        true => {
            format!("{ALPACA_TASK}. {ALPACA_REQUEST}\n\n### Instruction:\n{instruction}\n\n### Response:")
        }
        false => format!(
            "{ALPACA_TASK}, paired with an input that provides further context. {ALPACA_REQUEST}\n\n\
             ### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
        ),
    };
    Row::Text { prompt, response: output.to_string() }
}

/// A value in words.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(items) if items.is_empty() => "an empty list",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(value: Value, has_template: bool) -> Result<Row, String> {
        Row::of(value.as_object().expect("an object"), has_template)
    }

    fn chat(turns: &[(&str, &str)], learned_from: usize) -> Row {
        let messages = turns.iter().map(|(role, content)| Message::new(role, content)).collect();
        Row::Chat { messages, learned_from }
    }

    #[test]
    fn every_layout_is_understood() {
        let text = |prompt: &str, response: &str| {
            Ok(Row::Text { prompt: prompt.to_string(), response: response.to_string() })
        };
        assert_eq!(row(json!({"prompt": "1+1=", "response": "2", "id": 7}), true), text("1+1=", "2"));
        assert_eq!(
            row(json!({"prompt": "1+1=", "completion": "2", "response": null}), true),
            text("1+1=", "2")
        );
        let turns = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        let both = [("user", "a"), ("assistant", "b")];
        assert_eq!(row(json!({"messages": turns, "prompt": "a"}), true), Ok(chat(&both, 0)));
        assert_eq!(row(json!({"prompt": [turns[0]], "completion": [turns[1]]}), true), Ok(chat(&both, 1)));
        assert_eq!(row(json!({"prompt": [turns[0]], "response": "b"}), true), Ok(chat(&both, 1)));

        let alpaca = json!({"instruction": "Add {input}.", "input": "1 1", "output": "2"});
        assert_eq!(
            row(alpaca.clone(), true),
            Ok(chat(&[("user", "Add {input}.\n\n1 1"), ("assistant", "2")], 0))
        );
        assert_eq!(
            row(alpaca, false),
            text(
                "Below is an instruction that describes a task, paired with an input that provides further \
                 context. Write a response that appropriately completes the request.\n\n\
                 ### Instruction:\nAdd {input}.\n\n### Input:\n1 1\n\n### Response:",
                "2"
            )
        );
        let alone = json!({"instruction": "Say 2.", "input": "", "output": "2", "history": []});
        assert_eq!(row(alone.clone(), true), Ok(chat(&[("user", "Say 2."), ("assistant", "2")], 0)));
        assert_eq!(
            row(alone, false),
            text(
                "Below is an instruction that describes a task. Write a response that appropriately \
                 completes the request.\n\n### Instruction:\nSay 2.\n\n### Response:",
                "2"
            )
        );
    }

    #[test]
    fn a_row_that_is_none_of_them_is_told_what_was_expected() {
        for (value, message) in [
            (
                json!({"question": "1+1", "answer": "2"}),
                "expected `messages`, or `prompt` and `response` (or `completion`), or `instruction` and \
                 `output`, found the keys [\"question\", \"answer\"]",
            ),
            (
                json!({"prompt": "1+1"}),
                "expected `response` or `completion` beside `prompt`, found the keys [\"prompt\"]",
            ),
            (
                json!({"prompt": "1", "response": "2", "completion": "2"}),
                "expected `response` or `completion` beside `prompt`, found both",
            ),
            (json!({"prompt": 3, "response": "2"}), "`prompt` is a number, expected a text"),
            (json!({"prompt": "3", "completion": [1]}), "`completion` is a list, expected a text"),
            (
                json!({"messages": []}),
                "`messages` is an empty list, expected a list of turns with `role` and `content`",
            ),
            (
                json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": null}]}),
                "`messages`, turn 2: expected texts under `role` and `content`",
            ),
            (
                json!({"instruction": "a"}),
                "expected `output` beside `instruction`, found the keys [\"instruction\"]",
            ),
            (
                json!({"instruction": "a", "output": "b", "history": [["c", "d"]]}),
                "`history` beside `instruction` cannot be used; give the turns as `messages`",
            ),
        ] {
            assert_eq!(row(value, true), Err(message.to_string()));
        }
    }
}
