//! What comes of a prompt: its samples as they grow, token by token.

use super::call::Call;
use super::error::ApiError;
use super::sampling::Wanted;
use super::texts::{Growing, Texts};
use crate::service::{News, PromptScores, Token};
use qurl_rollout::{FinishReason, WeightVersion};
use serde_json::{Value, json};

/// A sample as it grows.
pub struct Growth {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Their log-probs.
    pub logprobs: Vec<f32>,
    /// The most probable tokens at their places; nothing where nobody wants to know.
    top: Vec<Vec<(u32, f32)>>,
    /// Its text.
    pub text: String,
    /// Why it ended; nothing before, and where it was aborted.
    pub finish: Option<FinishReason>,
    /// Whether somebody ended it.
    pub aborted: bool,
    growing: Growing,
}

/// What has come of a prompt.
pub struct Outcome {
    /// What it was computed with.
    pub weights: WeightVersion,
    /// Its samples.
    pub samples: Vec<Growth>,
    /// What the model says of the prompt itself.
    pub prompt: PromptScores,
}

impl Outcome {
    /// Nothing yet, for every prompt of a call that the engine has taken.
    pub fn all(call: &Call, texts: &Texts) -> Vec<Outcome> {
        (0..call.prompts.len()).map(|prompt| Outcome::new(call.wanted_of(prompt), texts)).collect()
    }

    /// Nothing yet, for one prompt.
    pub fn new(wanted: &Wanted, texts: &Texts) -> Outcome {
        let Wanted { stop, skip_special, keep_stop, n, .. } = wanted;
        let growth = || Growth {
            ids: Vec::new(),
            logprobs: Vec::new(),
            top: Vec::new(),
            text: String::new(),
            finish: None,
            aborted: false,
            growing: texts.grow(stop, *skip_special, *keep_stop),
        };
        Outcome {
            weights: WeightVersion::default(),
            samples: (0..*n).map(|_| growth()).collect(),
            prompt: PromptScores::default(),
        }
    }

    /// Takes note of what is new.
    pub fn take(&mut self, news: News) -> Result<(), ApiError> {
        match news {
            News::Began(weights) => self.weights = weights,
            News::Tokens(tokens) => {
                for token in tokens {
                    self.grow(token);
                }
            }
            News::Done(prompt) => self.prompt = prompt,
            News::Aborted => _ = self.abort(),
            News::Failed(failure) => return Err(failure.into()),
        }
        Ok(())
    }

    /// Adds a token to its sample; gives the text that is now certain.
    pub fn grow(&mut self, token: Token) -> String {
        let sample = &mut self.samples[token.sample as usize];
        let text = sample.growing.push(token.id, token.finish);
        sample.ids.push(token.id);
        sample.logprobs.push(token.logp);
        if !token.top.is_empty() {
            sample.top.resize_with(sample.ids.len() - 1, Vec::new);
            sample.top.push(token.top);
        }
        sample.text.push_str(&text);
        sample.finish = token.finish;
        text
    }

    /// Ends the samples that have not ended; gives their numbers with the text that was held back.
    pub fn abort(&mut self) -> Vec<(usize, String)> {
        let open = self.samples.iter_mut().enumerate().filter(|(_, sample)| sample.finish.is_none());
        open.map(|(number, sample)| {
            let rest = sample.growing.end(None);
            sample.text.push_str(&rest);
            sample.aborted = true;
            (number, rest)
        })
        .collect()
    }

    /// New tokens of all samples.
    pub fn new_tokens(&self) -> usize {
        self.samples.iter().map(|sample| sample.ids.len()).sum()
    }
}

impl Growth {
    /// The most probable tokens at the place of a token.
    pub fn top(&self, at: usize) -> &[(u32, f32)] {
        self.top.get(at).map_or(&[], Vec::as_slice)
    }

    /// Whether it grows no more.
    pub fn has_ended(&self) -> bool {
        self.finish.is_some() || self.aborted
    }

    /// The word for why it ended.
    pub fn finish_reason(&self) -> &'static str {
        self.finish.map_or("abort", FinishReason::name)
    }

    /// What ended it, in vLLM's words: a stop string, or a stop token that the request itself named.
    pub fn stop_reason(&self, wanted: &Wanted) -> Value {
        match self.finish {
            Some(FinishReason::StopString(i)) => json!(wanted.stop.get(i)),
            Some(FinishReason::StopId(id)) if wanted.stop_ids.contains(&id) => json!(id),
            _ => Value::Null,
        }
    }
}
