//! Where the examples of supervised training come from: JSON lines, or a task's worked solutions.

use crate::recipe::Sft;
use crate::start::{Start, StartError};
use qurl_model::chat::Message;
use qurl_model::rng::{CounterRng, permutation};
use qurl_tasks::task::{Prompt, Split, Task};
use serde::Deserialize;
use std::path::Path;

/// What some editors write before the first character of a text; no part of it.
const BYTE_ORDER_MARK: &str = "\u{feff}";

/// A sequence, and which of its tokens are learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Example {
    /// Prompt, response and end token.
    pub ids: Vec<u32>,
    /// Whether the loss counts the token; never the first.
    pub loss: Vec<bool>,
}

impl Example {
    /// Tokens that the loss counts.
    pub fn scored(&self) -> usize {
        self.loss.iter().skip(1).filter(|&&l| l).count()
    }
}

/// Why an example cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExampleError {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}")]
    Io {
        /// The file.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not there.
    #[error("key `sft.files` names {file}, which does not exist; {}", crate::recipe::RELATIVE_TO)]
    Missing {
        /// The file.
        file: String,
    },
    /// A line is not what it should be.
    #[error("{file}, line {line}: {reason}")]
    Line {
        /// The file.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        reason: String,
    },
    /// No example fits.
    #[error("{0}: no example is left of {1}; `sft.max_length` is {2}")]
    Empty(String, usize, usize),
    /// The task has no worked solutions.
    #[error("the task {0:?} has no worked solutions to learn from; give `sft.files`")]
    NoSolutions(String),
    /// A worked solution does not fit.
    #[error("a worked solution of the task has {found} tokens; `sft.max_length` is {max}")]
    TooLong {
        /// Its length.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// The tokenizer or the chat template.
    #[error(transparent)]
    Start(#[from] StartError),
}

/// All examples of a run, by number.
pub enum Examples<'a> {
    /// Read from files; shuffled anew in every epoch.
    Files {
        /// In the order of the files.
        examples: Vec<Example>,
        /// Of the run.
        seed: u64,
        /// Examples left out because they are too long.
        too_long: usize,
    },
    /// Worked solutions of generated problems, without end.
    Task {
        /// The task.
        task: &'a dyn Task,
        /// Tokenizer and template.
        start: &'a Start,
        /// Of the run.
        seed: u64,
        /// Longest sequence.
        max_length: usize,
    },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Pair { prompt: String, response: String },
    Chat { messages: Vec<Message> },
}

impl<'a> Examples<'a> {
    /// Reads the recipe's files, or takes the task's worked solutions.
    pub fn open(
        sft: &Sft,
        seed: u64,
        start: &'a Start,
        task: &'a dyn Task,
    ) -> Result<Examples<'a>, ExampleError> {
        let max_length = sft.max_length.min(start.config.max_position_embeddings);
        if sft.files.is_empty() {
            return Ok(Examples::Task { task, start, seed, max_length });
        }
        let (mut examples, mut too_long) = (Vec::new(), 0);
        for file in &sft.files {
            if !file.exists() {
                return Err(ExampleError::Missing { file: file.display().to_string() });
            }
            for example in read_file(file, start)? {
                if example.ids.len() <= max_length { examples.push(example) } else { too_long += 1 }
            }
        }
        if examples.is_empty() {
            let names: Vec<String> = sft.files.iter().map(|f| f.display().to_string()).collect();
            return Err(ExampleError::Empty(names.join(", "), too_long, max_length));
        }
        Ok(Examples::Files { examples, seed, too_long })
    }

    /// Example number `index`.
    pub fn get(&self, index: u64) -> Result<Example, ExampleError> {
        match self {
            Examples::Files { examples, seed, .. } => {
                let (epoch, place) = (index / examples.len() as u64, index % examples.len() as u64);
                let order = permutation(&CounterRng::new(&[*seed, 0x5f7, epoch]), examples.len());
                Ok(examples[order[place as usize]].clone())
            }
            Examples::Task { task, start, seed, max_length } => {
                let none = || ExampleError::NoSolutions(task.name().to_string());
                let problem = task.draw(Split::Train, *seed, index).ok_or_else(none)?;
                let solution = task.worked_solution(&problem).ok_or_else(none)?;
                let example = pair(start, &problem.prompt, &solution)?;
                match example.ids.len() {
                    found if found > *max_length => Err(ExampleError::TooLong { found, max: *max_length }),
                    _ => Ok(example),
                }
            }
        }
    }
}

/// A prompt that is read and a response that is learned, with the end token.
fn pair(start: &Start, prompt: &Prompt, response: &str) -> Result<Example, StartError> {
    let mut ids = start.encode(prompt)?;
    let learned_from = ids.len().max(1);
    ids.extend(start.tokenizer.encode(response, false)?);
    ids.extend(start.stop_ids().first());
    let loss = (0..ids.len()).map(|i| i >= learned_from).collect();
    Ok(Example { ids, loss })
}

/// A conversation of which the assistant's turns are learned. Turns that the template shows differently once more
/// follow (some drop earlier thoughts) are read only.
fn conversation(start: &Start, messages: &[Message]) -> Result<Example, StartError> {
    let template = start.template.as_ref().ok_or(StartError::NoTemplate)?;
    let encode = |messages: &[Message], open: bool| -> Result<Vec<u32>, StartError> {
        Ok(start.tokenizer.encode(&template.render(messages, open)?, false)?)
    };
    let ids = encode(messages, false)?;
    let mut loss = vec![false; ids.len()];
    for (i, _) in messages.iter().enumerate().filter(|(_, m)| m.role == "assistant") {
        let (before, after) = (encode(&messages[..i], true)?, encode(&messages[..=i], false)?);
        if ids.starts_with(&before) && ids.starts_with(&after) {
            loss[before.len().max(1)..after.len()].fill(true);
        }
    }
    Ok(Example { ids, loss })
}

fn read_file(path: &Path, start: &Start) -> Result<Vec<Example>, ExampleError> {
    let file = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|source| ExampleError::Io { file: file.clone(), source })?;
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK.as_bytes()).unwrap_or(&bytes);
    let mut examples = Vec::new();
    for (i, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        let wrong = |reason: String| ExampleError::Line { file: file.clone(), line: i + 1, reason };
        let line = std::str::from_utf8(line).map_err(|e| wrong(format!("not UTF-8 text: {e}")))?;
        if line.trim().is_empty() {
            continue;
        }
        let parsed: Line = serde_json::from_str(line).map_err(|e| {
            wrong(format!("{e}; expected an object with `prompt` and `response`, or with `messages`"))
        })?;
        let example = match &parsed {
            Line::Pair { prompt, response } => pair(start, &Prompt::Text(prompt.clone()), response),
            Line::Chat { messages } => conversation(start, messages),
        };
        let example = example.map_err(|e| wrong(e.to_string()))?;
        if example.scored() == 0 {
            return Err(wrong(
                "there is nothing to learn: no response and no turn of the assistant".to_string(),
            ));
        }
        examples.push(example);
    }
    Ok(examples)
}
