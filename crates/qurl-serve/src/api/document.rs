//! The shape that OpenAI's answers have in common, whole or as an event of a stream.

use super::call::Usage;
use super::logprobs::Prompt;
use super::{App, fingerprint, now};
use qurl_rollout::WeightVersion;
use serde::Serialize;

/// What every answer of a call begins with.
#[derive(Serialize)]
pub struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    weight_version: String,
}

impl Head {
    /// For an answer that was made with these weights.
    pub fn of(app: &App, id: &str, object: &'static str, weights: WeightVersion) -> Head {
        Head {
            id: id.to_string(),
            object,
            created: now(),
            model: app.model_name().to_string(),
            system_fingerprint: fingerprint(weights),
            weight_version: app.version_name(weights),
        }
    }

    /// The same answer, after it is known what it is made with.
    pub fn is_of(&mut self, app: &App, weights: WeightVersion) {
        (self.system_fingerprint, self.weight_version) = (fingerprint(weights), app.version_name(weights));
    }
}

/// An answer, or a piece of one.
#[derive(Serialize)]
pub struct Document<'a, C> {
    #[serde(flatten)]
    pub head: &'a Head,
    pub choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Prompt<'a>>,
}

impl<'a, C> Document<'a, C> {
    /// One with these choices and nothing else.
    pub fn new(head: &'a Head, choices: &'a [C]) -> Document<'a, C> {
        Document { head, choices, usage: None, prompt_token_ids: None, prompt_logprobs: None }
    }
}

/// Whether a stream tells what it used: at its end, and with every piece.
#[derive(Clone, Copy, Default)]
pub struct StreamUsage {
    pub at_end: bool,
    pub always: bool,
}
