//! Log-probs in the shapes of the dialects, written straight from the engine's numbers: an answer may have a
//! million of them, and a tree of JSON would take ten times the memory of its text. Numbers are printed so
//! that the f32 survives.

use super::outcome::{Growth, Outcome};
use super::texts::Texts;
use serde::ser::{SerializeMap, SerializeStruct};
use serde::{Serialize, Serializer};
use std::borrow::Cow;
use std::ops::Range;

/// The most probable tokens at a place.
type Top<'a> = &'a [(u32, f32)];

/// How tokens are named.
#[derive(Clone, Copy)]
pub struct Naming<'a> {
    /// Where their texts come from.
    pub texts: &'a Texts,
    /// `token_id:17` in place of the text, as it is where there is none.
    pub as_ids: bool,
}

fn id_name(id: u32) -> String {
    format!("token_id:{id}")
}

impl Naming<'_> {
    fn name(self, id: u32) -> String {
        if self.as_ids || !self.texts.has_tokenizer() { id_name(id) } else { self.texts.token(id) }
    }
}

/// A list that is made while it is written.
pub struct List<I>(pub I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for List<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

/// A token with its log-prob and the bytes of its text, which a part of a character has, too.
struct Entry<'a> {
    naming: Naming<'a>,
    token: (u32, f32),
    /// The most probable ones at its place, where it is not one of them.
    top: Option<Top<'a>>,
}

impl Serialize for Entry<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Entry { naming, token: (id, logp), top } = *self;
        let name = naming.name(id);
        let bytes = match name.contains('\u{FFFD}') {
            true => naming.texts.bytes(id, &name).map(Cow::Owned),
            false => Some(Cow::Borrowed(name.as_bytes())),
        };
        let mut entry = serializer.serialize_struct("Entry", 3 + usize::from(top.is_some()))?;
        entry.serialize_field("token", &name)?;
        entry.serialize_field("logprob", &logp)?;
        entry.serialize_field("bytes", &bytes)?;
        if let Some(top) = top {
            let best = top.iter().map(|&token| Entry { naming, token, top: None });
            entry.serialize_field("top_logprobs", &List(best))?;
        }
        entry.end()
    }
}

/// `logprobs` of a choice of a chat, for some of its tokens.
pub struct Chat<'a> {
    pub naming: Naming<'a>,
    pub sample: &'a Growth,
    pub range: Range<usize>,
}

impl Serialize for Chat<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Chat { naming, sample, range } = self;
        let content = range.clone().map(|i| Entry {
            naming: *naming,
            token: (sample.ids[i], sample.logprobs[i]),
            top: Some(sample.top(i)),
        });
        let mut of_choice = serializer.serialize_struct("Chat", 2)?;
        of_choice.serialize_field("content", &List(content))?;
        of_choice.serialize_field("refusal", &None::<&str>)?;
        of_choice.end()
    }
}

/// A token of a completion: its name, where it begins in the text, its log-prob, the best at its place.
struct Named<'a> {
    id: u32,
    name: String,
    offset: usize,
    logp: Option<f32>,
    top: Top<'a>,
}

/// `logprobs` of a completion.
pub struct Completion<'a> {
    naming: Naming<'a>,
    tokens: Vec<Named<'a>>,
}

impl<'a> Completion<'a> {
    /// For some tokens, of which the first begins at `offset` in the text, which is moved to their end.
    pub fn new(
        naming: Naming<'a>,
        tokens: impl Iterator<Item = (u32, Option<f32>, Top<'a>)>,
        offset: &mut usize,
    ) -> Completion<'a> {
        let tokens = tokens.map(|(id, logp, top)| {
            let (name, begin) = (naming.name(id), *offset);
            *offset += name.chars().count();
            Named { id, name, offset: begin, logp, top }
        });
        Completion { naming, tokens: tokens.collect() }
    }
}

impl Serialize for Completion<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Completion { naming, tokens } = self;
        let best = tokens.iter().map(|of| of.logp.map(|logp| Best { naming: *naming, of, logp }));
        let mut lists = serializer.serialize_struct("Completion", 4)?;
        lists.serialize_field("tokens", &List(tokens.iter().map(|token| &token.name)))?;
        lists.serialize_field("token_logprobs", &List(tokens.iter().map(|token| token.logp)))?;
        lists.serialize_field("top_logprobs", &List(best))?;
        lists.serialize_field("text_offset", &List(tokens.iter().map(|token| token.offset)))?;
        lists.end()
    }
}

/// The most probable tokens by their names, the one that is there included. Where two have one name (parts of
/// characters are all alike) the later is named by its id: a reader sees every key once.
struct Best<'a> {
    naming: Naming<'a>,
    of: &'a Named<'a>,
    logp: f32,
}

impl Serialize for Best<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Best { naming, of, logp } = self;
        let mut names: Vec<Cow<'_, str>> = Vec::with_capacity(of.top.len() + 1);
        let mut map = serializer.serialize_map(None)?;
        let mut own = Some(*logp);
        for &(id, logp) in of.top {
            let name = match id == of.id {
                true => Cow::Borrowed(of.name.as_str()),
                false => Cow::Owned(naming.name(id)),
            };
            let taken = id != of.id && (name == of.name.as_str() || names.contains(&name));
            match taken {
                true => map.serialize_entry(&id_name(id), &logp)?,
                false => map.serialize_entry(&name, if id == of.id { &self.logp } else { &logp })?,
            }
            own = own.filter(|_| id != of.id);
            names.push(name);
        }
        if let Some(logp) = own {
            map.serialize_entry(&of.name, &logp)?;
        }
        map.end()
    }
}

/// vLLM's `prompt_logprobs`: for each token of the prompt but the first, the log-probs of it and of the most
/// probable ones, by id.
pub struct Prompt<'a> {
    pub texts: &'a Texts,
    pub prompt: &'a [u32],
    pub outcome: &'a Outcome,
}

impl Serialize for Prompt<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Prompt { texts, prompt, outcome } = self;
        let scores = &outcome.prompt;
        serializer.collect_seq(prompt.iter().enumerate().map(|(i, &id)| {
            let at = i.checked_sub(1)?;
            let top = scores.top.get(at).map_or(&[][..], Vec::as_slice);
            Some(Place { texts, own: (id, *scores.logprobs.get(at)?), top })
        }))
    }
}

/// A place of a prompt.
struct Place<'a> {
    texts: &'a Texts,
    own: (u32, f32),
    top: Top<'a>,
}

#[derive(Serialize)]
struct Ranked {
    logprob: f32,
    rank: Option<usize>,
    decoded_token: String,
}

impl Serialize for Place<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Place { texts, own, top } = self;
        let ranked =
            |(id, logprob): (u32, f32), rank| Ranked { logprob, rank, decoded_token: texts.token(id) };
        let rank = top.iter().position(|(best, _)| *best == own.0).map(|at| at + 1);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(&own.0, &ranked(*own, rank))?;
        for (at, &best) in top.iter().enumerate().filter(|(_, (best, _))| *best != own.0) {
            map.serialize_entry(&best.0, &ranked(best, Some(at + 1)))?;
        }
        map.end()
    }
}
