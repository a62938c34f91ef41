//! Where the examples of supervised training come from: files, or a task's worked solutions; and which of
//! their tokens are learned.
//!
//! Only what the model is to say counts: the response and the end token after it, or of a conversation the
//! assistant's turns as the chat template writes them. Everything else is read, and has no loss.

use super::rows::Row;
use crate::recipe::Sft;
use crate::solve::held_out;
use crate::start::{Start, StartError};
use qurl_files::available_memory;
use qurl_model::chat::Message;
use qurl_model::rng::{CounterRng, permutation, text_key};
use qurl_tasks::data::{self, DataError};
use qurl_tasks::task::{Problem, Prompt, Split, Task, split_of};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Bytes of a token and of whether it is learned.
const BYTES_OF_A_TOKEN: u64 = 5;

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
    /// A file that is not what it should be.
    #[error("key `{key}`: {source}")]
    Data {
        /// The key that names it.
        key: &'static str,
        /// What is wrong with it.
        source: DataError,
    },
    /// The file is not there.
    #[error("key `{key}` names {}, which does not exist; {}", file.display(), crate::recipe::RELATIVE_TO)]
    Missing {
        /// The key that names it.
        key: &'static str,
        /// The file.
        file: PathBuf,
    },
    /// A row is not what it should be.
    #[error("key `{key}`: {}, {} {row}: {reason}", file.display(), data::unit(file))]
    Row {
        /// The key that names the file.
        key: &'static str,
        /// The file.
        file: PathBuf,
        /// Counted from 1.
        row: usize,
        /// What is wrong.
        reason: String,
    },
    /// No example is left.
    #[error("key `{key}` leaves no example to {what}: {why}")]
    Empty {
        /// The key.
        key: &'static str,
        /// What the examples would be for.
        what: &'static str,
        /// What took them away.
        why: String,
    },
    /// There is nothing to learn from.
    #[error("there is nothing to learn from: give `sft.files`, or a [task] with worked solutions")]
    NoSource,
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

/// Examples that are in the files and are not used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Longer than `sft.max_length`, of those to learn.
    pub too_long: usize,
    /// The same of those to validate on.
    pub too_long_to_validate: usize,
    /// To learn, but among those of `sft.validation_files`.
    pub overlaps: usize,
}

/// All examples of a run.
pub struct Examples<'a> {
    source: Source<'a>,
    validation: Vec<Example>,
    left_out: LeftOut,
    seed: u64,
}

enum Source<'a> {
    /// Read from files, in their order; shuffled anew in every epoch.
    Files(Vec<Example>),
    /// Worked solutions of generated problems, without end.
    Task { task: &'a dyn Task, start: &'a Start, max_length: usize },
}

/// The order of the examples in one epoch, kept because every step asks for it.
#[derive(Default)]
pub struct EpochOrder(Option<(u64, Vec<usize>)>);

impl<'a> Examples<'a> {
    /// Reads the recipe's files, or takes the task's worked solutions.
    pub fn open(
        sft: &Sft,
        seed: u64,
        start: &'a Start,
        task: Option<&'a dyn Task>,
    ) -> Result<Examples<'a>, ExampleError> {
        let max_length = sft.max_length.min(start.config.max_position_embeddings);
        if !sft.files.is_empty() {
            return Examples::of_files(sft, seed, start, max_length);
        }
        let task = task.ok_or(ExampleError::NoSource)?;
        let (mut validation, mut left_out) = (Vec::new(), LeftOut::default());
        for index in 0..held_out(task, sft.test_problems) {
            let Some(problem) = task.draw(Split::Test, seed, index) else { break };
            match worked(task, start, &problem)? {
                Some(example) if example.ids.len() <= max_length => validation.push(example),
                Some(_) => left_out.too_long_to_validate += 1,
                None => {}
            }
        }
        Ok(Examples { source: Source::Task { task, start, max_length }, validation, left_out, seed })
    }

    fn of_files(
        sft: &Sft,
        seed: u64,
        start: &Start,
        max_length: usize,
    ) -> Result<Examples<'a>, ExampleError> {
        let (mut examples, too_long) = read("sft.files", &sft.files, start, max_length)?;
        let (mut validation, too_long_to_validate) =
            read("sft.validation_files", &sft.validation_files, start, max_length)?;
        let long = |count: usize| format!("{count} have more than sft.max_length = {max_length} tokens");
        if validation.is_empty() && !sft.validation_files.is_empty() {
            let (key, what) = ("sft.validation_files", "validate on");
            return Err(ExampleError::Empty { key, what, why: long(too_long_to_validate) });
        }
        let found = examples.len();
        let known: HashSet<&[u32]> = validation.iter().map(|example| example.ids.as_slice()).collect();
        examples.retain(|example| !known.contains(example.ids.as_slice()));
        let overlaps = found - examples.len();
        if sft.held_out > 0.0 {
            // By what an example says: equal ones are on the same side.
            let side = |example: &Example| split_of(&format!("{:?}", example.ids), sft.held_out);
            let (test, train): (Vec<_>, Vec<_>) =
                examples.into_iter().partition(|example| side(example) == Split::Test);
            (examples, validation) = (train, test);
            if validation.is_empty() && found > 0 {
                let why = format!("{} of {found} is none", sft.held_out);
                return Err(ExampleError::Empty { key: "sft.held_out", what: "validate on", why });
            }
        }
        if examples.is_empty() {
            let mut why = Vec::new();
            if too_long > 0 {
                why.push(long(too_long));
            }
            if overlaps > 0 {
                why.push(format!("{overlaps} are among those of sft.validation_files"));
            }
            if !validation.is_empty() && sft.held_out > 0.0 {
                why.push(format!("sft.held_out = {} holds out the others", sft.held_out));
            }
            return Err(ExampleError::Empty { key: "sft.files", what: "learn", why: why.join(", ") });
        }
        let left_out = LeftOut { too_long, too_long_to_validate, overlaps };
        Ok(Examples { source: Source::Files(examples), validation, left_out, seed })
    }

    /// Examples to learn; none where they are generated without end.
    pub fn count(&self) -> Option<usize> {
        match &self.source {
            Source::Files(examples) => Some(examples.len()),
            Source::Task { .. } => None,
        }
    }

    /// Examples that the validation loss is taken on.
    pub fn validation(&self) -> &[Example] {
        &self.validation
    }

    /// Examples that are not used.
    pub fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// A number that tells these examples from others.
    pub fn fingerprint(&self) -> u64 {
        let of = |examples: &[Example]| {
            examples.iter().fold(examples.len() as u64, |sum, example| {
                text_key(&format!("{sum} {:?} {:?}", example.ids, example.loss))
            })
        };
        let learned = match &self.source {
            Source::Files(examples) => of(examples),
            Source::Task { task, .. } => task.fingerprint(),
        };
        text_key(&format!("{learned} {}", of(&self.validation)))
    }

    /// Example number `index` of the run.
    pub fn get(&self, order: &mut EpochOrder, index: u64) -> Result<Example, ExampleError> {
        match &self.source {
            Source::Files(examples) => {
                let (epoch, place) = (index / examples.len() as u64, index % examples.len() as u64);
                let order = order.of(self.seed, epoch, examples.len());
                Ok(examples[order[place as usize]].clone())
            }
            Source::Task { task, start, max_length } => {
                let none = || ExampleError::NoSolutions(task.name().to_string());
                let problem = task.draw(Split::Train, self.seed, index).ok_or_else(none)?;
                let example = worked(*task, start, &problem)?.ok_or_else(none)?;
                match example.ids.len() {
                    found if found > *max_length => Err(ExampleError::TooLong { found, max: *max_length }),
                    _ => Ok(example),
                }
            }
        }
    }
}

impl EpochOrder {
    fn of(&mut self, seed: u64, epoch: u64, count: usize) -> &[usize] {
        if self.0.as_ref().is_none_or(|(known, _)| *known != epoch) {
            self.0 = Some((epoch, permutation(&CounterRng::new(&[seed, 0x5f7, epoch]), count)));
        }
        self.0.as_ref().map_or(&[], |(_, order)| order)
    }
}

/// The worked solution of a problem, if it has one.
fn worked(task: &dyn Task, start: &Start, problem: &Problem) -> Result<Option<Example>, StartError> {
    task.worked_solution(problem).map(|solution| pair(start, &problem.prompt, &solution)).transpose()
}

/// A prompt that is read and a response that is learned, with the end token.
fn pair(start: &Start, prompt: &Prompt, response: &str) -> Result<Example, StartError> {
    let mut ids = start.encode(prompt)?;
    let learned_from = ids.len().max(1);
    ids.extend(start.encode_text(response, false)?);
    ids.extend(start.stop_ids().first());
    let loss = (0..ids.len()).map(|i| i >= learned_from).collect();
    Ok(Example { ids, loss })
}

/// A conversation of which the assistant's turns from `learned_from` on are learned. Turns that the template
/// shows differently once more follow (some drop earlier thoughts) are read only.
fn conversation(start: &Start, messages: &[Message], learned_from: usize) -> Result<Example, StartError> {
    let template = start.template.as_ref().ok_or(StartError::NoTemplate)?;
    let encode = |messages: &[Message], open: bool| -> Result<Vec<u32>, StartError> {
        start.encode_text(&template.render(messages, open)?, false)
    };
    let ids = encode(messages, false)?;
    let mut loss = vec![false; ids.len()];
    let learned = messages.iter().enumerate().skip(learned_from).filter(|(_, m)| m.role == "assistant");
    for (i, _) in learned {
        let (before, after) = (encode(&messages[..i], true)?, encode(&messages[..=i], false)?);
        if ids.starts_with(&before) && ids.starts_with(&after) {
            loss[before.len().max(1)..after.len()].fill(true);
        }
    }
    Ok(Example { ids, loss })
}

/// The examples of files that are not too long, and how many are.
fn read(
    key: &'static str,
    files: &[PathBuf],
    start: &Start,
    max_length: usize,
) -> Result<(Vec<Example>, usize), ExampleError> {
    let (mut examples, mut too_long) = (Vec::new(), 0);
    let (mut held, most) = (0, available_memory().map_or(u64::MAX, |bytes| bytes / 2));
    for file in files {
        if !file.exists() {
            return Err(ExampleError::Missing { key, file: file.clone() });
        }
        each_example(key, file, start, |row, example| {
            match example.filter(|example| example.ids.len() <= max_length) {
                Some(example) => {
                    held += size_of::<Example>() as u64 + BYTES_OF_A_TOKEN * example.ids.len() as u64;
                    examples.push(example);
                }
                None => too_long += 1,
            }
            if held > most {
                let (found, path) = (held, file.clone());
                return Err(DataError::Memory { path, row, found, most });
            }
            Ok::<_, DataError>(())
        })?;
    }
    Ok((examples, too_long))
}

/// Hands on the examples of a file with the number of their row; none where a text is too long for the model,
/// whatever its tokens are.
fn each_example(
    key: &'static str,
    file: &Path,
    start: &Start,
    mut take: impl FnMut(usize, Option<Example>) -> Result<(), DataError>,
) -> Result<(), ExampleError> {
    /// What ends the reading of a file.
    enum End {
        Data(DataError),
        Row(usize, String),
    }
    impl From<DataError> for End {
        fn from(error: DataError) -> End {
            End::Data(error)
        }
    }
    let read = data::each_record(file, |row, fields| {
        let wrong = |reason: String| End::Row(row, reason);
        let example = match Row::of(&fields, start.template.is_some()).map_err(wrong)? {
            Row::Text { prompt, response } => pair(start, &Prompt::Text(prompt), &response),
            Row::Chat { messages, learned_from } => conversation(start, &messages, learned_from),
        };
        let example = match example {
            Err(StartError::TooLong { .. }) => None,
            Err(error) => return Err(wrong(error.to_string())),
            Ok(example) if example.scored() == 0 => {
                let reason = "there is nothing to learn: no response and no turn of the assistant";
                return Err(wrong(reason.to_string()));
            }
            Ok(example) => Some(example),
        };
        Ok(take(row, example)?)
    });
    read.map_err(|end| match end {
        End::Data(source) => ExampleError::Data { key, source },
        End::Row(row, reason) => ExampleError::Row { key, file: file.to_path_buf(), row, reason },
    })
}
