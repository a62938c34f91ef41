//! The parts of what a model writes: what it thinks (`<think>`), what it says, and what it calls
//! (`<tool_call>`, in the way of Hermes and Qwen).
//!
//! A plain machine over a text that comes in pieces. What may turn out to be the beginning of a tag is held
//! back until it is certain, so where the text is cut changes nothing. A call is told when it is complete;
//! one that is no JSON with a name is part of the text, as it was written.

use serde::Serialize;
use serde_json::Value;
use std::mem::take;

const THINK: [&str; 2] = ["<think>", "</think>"];
const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// How a model writes calls of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolParser {
    /// `<tool_call>{"name", "arguments"}</tool_call>`
    Hermes,
}

/// How a model writes what it thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningParser {
    /// `<think>..</think>` before the answer; a prompt that ends with the first tag begins inside.
    Think,
}

impl ToolParser {
    /// By vLLM's and SGLang's names.
    pub fn named(name: &str) -> Result<ToolParser, String> {
        match name {
            "hermes" | "qwen25" => Ok(ToolParser::Hermes),
            _ => Err("expected hermes (or qwen25, which is the same)".to_string()),
        }
    }
}

impl ReasoningParser {
    /// By vLLM's and SGLang's names.
    pub fn named(name: &str) -> Result<ReasoningParser, String> {
        match name {
            "think" | "qwen3" | "deepseek_r1" | "deepseek-r1" => Ok(ReasoningParser::Think),
            _ => Err("expected think (or qwen3 or deepseek_r1, which are the same)".to_string()),
        }
    }

    /// Whether an answer to this prompt begins inside of what is thought.
    pub fn begins_inside(self, prompt: &str) -> bool {
        match self {
            ReasoningParser::Think => prompt.trim_end().ends_with(THINK[0]),
        }
    }
}

/// What is looked for in answers; nothing where nobody said how the model writes it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parsers {
    /// Calls, in answers to requests with tools.
    pub tools: Option<ToolParser>,
    /// What is thought.
    pub reasoning: Option<ReasoningParser>,
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    pub name: String,
    /// JSON as a text, as OpenAI has it.
    pub arguments: String,
}

/// What a piece of text turned out to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parts {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<ToolCall>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far; whether what follows is thought without a tag.
    Start {
        inside: bool,
    },
    Reasoning,
    Content,
    Call,
}

/// How the answers to a prompt are read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    tools: Option<ToolParser>,
    begin: State,
}

impl Reading {
    /// With these parsers: whether the request has tools, and the text of its prompt.
    pub fn of(parsers: Parsers, has_tools: bool, prompt: &str) -> Reading {
        let inside = |reasoning: ReasoningParser| State::Start { inside: reasoning.begins_inside(prompt) };
        Reading {
            tools: parsers.tools.filter(|_| has_tools),
            begin: parsers.reasoning.map_or(State::Content, inside),
        }
    }

    /// For an answer that is about to begin.
    pub fn reader(&self) -> Reader {
        Reader {
            reads_tools: self.tools.is_some(),
            state: self.begin,
            held: String::new(),
            gap: String::new(),
            has_called: false,
        }
    }

    /// The parts of a whole answer.
    pub fn parts(&self, text: &str) -> Parts {
        let mut reader = self.reader();
        let mut parts = reader.push(text);
        parts.add(reader.end());
        parts
    }
}

impl Parts {
    /// The same with what came after.
    pub fn add(&mut self, more: Parts) {
        self.reasoning.push_str(&more.reasoning);
        self.content.push_str(&more.content);
        self.calls.extend(more.calls);
    }
}

/// Reads an answer piece by piece.
pub struct Reader {
    reads_tools: bool,
    state: State,
    /// What is not certain yet.
    held: String,
    /// White space before a call, which is no content where the call is one.
    gap: String,
    /// Whether there was a call: white space that nothing follows is no content then, either.
    has_called: bool,
}

/// Bytes at the end of a text that a tag begins with.
fn may_be(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    (1..=longest).rev().find(|len| text.ends_with(&tag[..*len])).unwrap_or(0)
}

/// The call that stands between the tags.
fn call(text: &str) -> Option<ToolCall> {
    let value: Value = serde_json::from_str(text).ok()?;
    let arguments = match value.get("arguments") {
        None | Some(Value::Null) => "{}".to_string(),
        Some(Value::String(text)) => text.clone(), // JSON in a text already
        Some(arguments) => arguments.to_string(),
    };
    Some(ToolCall { name: value.get("name")?.as_str()?.to_string(), arguments })
}

impl Reader {
    /// Takes more of the text; gives what is now certain.
    pub fn push(&mut self, text: &str) -> Parts {
        self.held.push_str(text);
        let mut parts = Parts::default();
        while self.advance(false, &mut parts) {}
        parts
    }

    /// What is left after the last of the text.
    pub fn end(&mut self) -> Parts {
        let mut parts = Parts::default();
        while self.advance(true, &mut parts) {}
        parts
    }

    /// Up to the next tag; whether there may be more. `last` says that no more text will come.
    fn advance(&mut self, last: bool, parts: &mut Parts) -> bool {
        match self.state {
            State::Start { inside } => {
                let begun = self.held.trim_start();
                if !last && THINK[0].starts_with(begun) && begun != THINK[0] {
                    return false;
                }
                self.state = if inside { State::Reasoning } else { State::Content };
                if let Some(rest) = begun.strip_prefix(THINK[0]) {
                    (self.held, self.state) = (rest.to_string(), State::Reasoning);
                }
                true
            }
            State::Reasoning => match self.held.find(THINK[1]) {
                Some(at) => {
                    parts.reasoning.push_str(&self.held[..at]);
                    self.held.drain(..at + THINK[1].len());
                    self.state = State::Content;
                    true
                }
                None => {
                    let keep = if last { 0 } else { may_be(&self.held, THINK[1]) };
                    parts.reasoning.extend(self.held.drain(..self.held.len() - keep));
                    false
                }
            },
            State::Content if !self.reads_tools => {
                parts.content.push_str(&take(&mut self.held));
                false
            }
            State::Content => match self.held.find(CALL[0]) {
                Some(at) => {
                    let text = self.held[..at].trim_end().len();
                    parts.content.push_str(&self.held[..text]);
                    self.gap = self.held[text..at].to_string();
                    self.held.drain(..at + CALL[0].len());
                    self.state = State::Call;
                    true
                }
                None if last => {
                    let rest = take(&mut self.held);
                    parts.content.push_str(if self.has_called { rest.trim_end() } else { &rest });
                    false
                }
                None => {
                    let certain = self.held.len() - may_be(&self.held, CALL[0]);
                    let certain = self.held[..certain].trim_end().len();
                    parts.content.extend(self.held.drain(..certain));
                    false
                }
            },
            State::Call => {
                let end = self.held.find(CALL[1]);
                if end.is_none() && !last {
                    return false;
                }
                let inner = end.unwrap_or(self.held.len());
                let after = end.map_or(inner, |end| end + CALL[1].len());
                match call(self.held[..inner].trim()) {
                    Some(call) => {
                        parts.calls.push(call);
                        self.gap.clear();
                        self.held.drain(..after);
                        self.has_called = true;
                    }
                    None => {
                        parts.content.push_str(&take(&mut self.gap));
                        parts.content.push_str(CALL[0]);
                        parts.content.extend(self.held.drain(..after));
                    }
                }
                self.state = State::Content;
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(prompt: &str) -> Reading {
        let parsers = Parsers { tools: Some(ToolParser::Hermes), reasoning: Some(ReasoningParser::Think) };
        Reading::of(parsers, true, prompt)
    }

    /// What a text has, which is the same wherever it is cut: in two at every byte that ends a character, and
    /// character by character.
    fn parts(reading: Reading, text: &str) -> (String, String, Vec<(String, String)>) {
        let whole = reading.parts(text);
        let in_pieces = |pieces: Vec<&str>| {
            let (mut reader, mut parts) = (reading.reader(), Parts::default());
            for piece in pieces {
                parts.add(reader.push(piece));
            }
            parts.add(reader.end());
            parts
        };
        for at in (0..=text.len()).filter(|at| text.is_char_boundary(*at)) {
            assert_eq!(in_pieces(vec![&text[..at], &text[at..]]), whole, "{text:?} cut at {at}");
        }
        let characters = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]).collect();
        assert_eq!(in_pieces(characters), whole, "{text:?} character by character");
        let calls = whole.calls.into_iter().map(|call| (call.name, call.arguments)).collect();
        (whole.reasoning, whole.content, calls)
    }

    fn told(
        reasoning: &str,
        content: &str,
        calls: &[(&str, &str)],
    ) -> (String, String, Vec<(String, String)>) {
        let calls = calls.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string()));
        (reasoning.to_string(), content.to_string(), calls.collect())
    }

    #[test]
    fn calls_are_found_wherever_the_text_is_cut() {
        let add =
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 2, \"a\": [1, \"ü<\"]}}\n</tool_call>";
        let added = ("add", r#"{"b":2,"a":[1,"ü<"]}"#);
        for (text, expected) in [
            (add.to_string(), told("", "", &[added])),
            (format!("I add.\n{add}"), told("", "I add.", &[added])),
            (format!("{add}\n{add}\n"), told("", "", &[added, added])),
            (format!("{add} Done."), told("", " Done.", &[added])),
            ("<think>\nso\n</think>\n\n".to_string() + add, told("\nso\n", "", &[added])),
            // Cut off by a stop token before the last tag, but whole.
            (add.replace("\n</tool_call>", ""), told("", "", &[added])),
            ("<tool_call>{\"name\": \"now\"}</tool_call>".to_string(), told("", "", &[("now", "{}")])),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call>".to_string(),
                told("", "", &[("f", r#"{"x": 1}"#)]),
            ),
        ] {
            assert_eq!(parts(reading(""), &text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_call_stays_as_it_was_written() {
        for text in [
            "a < b, <tool_cal of",
            "  <tool_call>no JSON</tool_call> \n",
            "x \n<tool_call>{\"name\": 3}</tool_call>",
            "<tool_call>{\"name\": \"f\", \"argum",
            "<tool_call>",
            " \n ",
            "",
            "zwölf <",
        ] {
            assert_eq!(parts(reading(""), text), told("", text, &[]), "{text}");
        }
        // Without tools, or without a parser, a call is text.
        let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
        let parsers = Parsers { tools: Some(ToolParser::Hermes), reasoning: None };
        for reading in [Reading::of(parsers, false, ""), Reading::of(Parsers::default(), true, "")] {
            assert_eq!(parts(reading, call), told("", call, &[]));
        }
    }

    #[test]
    fn what_is_thought_is_set_apart() {
        for (prompt, text, expected) in [
            ("", "<think>ä</think>b", told("ä", "b", &[])),
            ("", "\n<think>a", told("a", "", &[])),
            ("", "plain <think>", told("", "plain <think>", &[])),
            ("", "<thin", told("", "<thin", &[])),
            // The prompt has opened it, and some models open it again.
            ("assistant\n<think>\n", "a</think>b", told("a", "b", &[])),
            ("assistant\n<think>\n", "<think>a</think>b", told("a", "b", &[])),
            ("assistant\n<think>\n", "never </thin", told("never </thin", "", &[])),
            // It was told not to think.
            ("<think>\n\n</think>\n\n", "b", told("", "b", &[])),
        ] {
            assert_eq!(parts(reading(prompt), text), expected, "{prompt:?} {text:?}");
        }
    }

    #[test]
    fn parsers_have_the_names_of_others() {
        assert_eq!(ToolParser::named("hermes"), Ok(ToolParser::Hermes));
        assert_eq!(ReasoningParser::named("deepseek_r1"), Ok(ReasoningParser::Think));
        assert!(ToolParser::named("pythonic").is_err() && ReasoningParser::named("").is_err());
    }
}
