//! Log-probs in the shapes of the dialects. Numbers are printed so that the f32 survives.

use super::call::number;
use super::outcome::{Growth, Outcome};
use super::texts::Texts;
use serde_json::{Map, Value, json};
use std::ops::Range;

/// How tokens are named.
#[derive(Clone, Copy)]
pub struct Naming<'a> {
    /// Where their texts come from.
    pub texts: &'a Texts,
    /// `token_id:17` in place of the text.
    pub as_ids: bool,
}

impl Naming<'_> {
    fn name(self, id: u32) -> String {
        if self.as_ids { format!("token_id:{id}") } else { self.texts.token(id) }
    }

    /// A token with its log-prob and the bytes of its text, which a part of a character has not.
    fn entry(self, id: u32, logp: f32) -> Map<String, Value> {
        let name = self.name(id);
        let bytes = (!name.contains('\u{FFFD}')).then_some(name.as_bytes());
        let mut entry = Map::new();
        entry.insert("token".to_string(), json!(name));
        entry.insert("logprob".to_string(), number(logp));
        entry.insert("bytes".to_string(), json!(bytes));
        entry
    }

    /// `logprobs` of a choice of a chat, for some of its tokens.
    pub fn chat(self, sample: &Growth, range: Range<usize>) -> Value {
        let content: Vec<Value> = range
            .map(|i| {
                let mut entry = self.entry(sample.ids[i], sample.logprobs[i]);
                let top: Vec<Value> =
                    sample.top(i).iter().map(|&(id, logp)| Value::Object(self.entry(id, logp))).collect();
                entry.insert("top_logprobs".to_string(), json!(top));
                Value::Object(entry)
            })
            .collect();
        json!({"content": content, "refusal": null})
    }

    /// `logprobs` of a completion: tokens with their log-probs, where they begin in the text, and the most
    /// probable tokens, the one that is there included.
    pub fn completion<'a>(
        self,
        tokens: impl Iterator<Item = (u32, Option<f32>, &'a [(u32, f32)])>,
        offset: &mut usize,
    ) -> Value {
        let (mut names, mut logprobs, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
        for (id, logp, top) in tokens {
            let name = self.name(id);
            offsets.push(*offset);
            *offset += name.chars().count();
            let best = logp.map(|logp| {
                let all = top.iter().copied().chain([(id, logp)]);
                all.map(|(id, logp)| (self.name(id), number(logp))).collect::<Map<String, Value>>()
            });
            tops.push(json!(best));
            logprobs.push(logp.map_or(Value::Null, number));
            names.push(name);
        }
        json!({"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets})
    }

    /// vLLM's `prompt_logprobs`: for each token of the prompt but the first, the log-probs of it and of the
    /// most probable ones, by id.
    pub fn prompt(self, prompt: &[u32], outcome: &Outcome) -> Value {
        let scores = &outcome.prompt;
        let place = |(i, &id): (usize, &u32)| {
            let Some(&logp) = i.checked_sub(1).and_then(|i| scores.logprobs.get(i)) else {
                return Value::Null;
            };
            let top = scores.top.get(i - 1).map_or(&[][..], Vec::as_slice);
            let mut entries = Map::new();
            let mut add = |id: u32, logp: f32, rank: Option<usize>| {
                let entry =
                    json!({"logprob": number(logp), "rank": rank, "decoded_token": self.texts.token(id)});
                entries.insert(id.to_string(), entry);
            };
            add(id, logp, top.iter().position(|(best, _)| *best == id).map(|at| at + 1));
            for (at, &(best, logp)) in top.iter().enumerate().filter(|(_, (best, _))| *best != id) {
                add(best, logp, Some(at + 1));
            }
            Value::Object(entries)
        };
        prompt.iter().enumerate().map(place).collect()
    }
}
