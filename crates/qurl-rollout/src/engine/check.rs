//! What the engine refuses to serve, before anything is changed.

use super::Engine;
use crate::error::RolloutError;
use crate::request::Request;
use qurl_kernels::Device;
use std::collections::BTreeSet;

/// Most samples of one request.
const MAX_SAMPLES: usize = 1 << 20;

impl<D: Device> Engine<D> {
    /// Whether a request can be served; changes nothing.
    pub fn check(&self, request: &Request) -> Result<(), RolloutError> {
        if self.weights.is_none() {
            return Err(RolloutError::NoWeights);
        }
        let vocabulary = self.network.config().vocab_size;
        let inside = |what: &dyn Fn() -> String, token: u32| match (token as usize) < vocabulary {
            true => Ok(()),
            false => Err(RolloutError::TokenOutsideVocabulary { what: what(), token, vocabulary }),
        };
        if request.prompt.is_empty() {
            return Err(RolloutError::EmptyPrompt);
        }
        let context = self.network.options().positions;
        let len = request.prompt.len();
        if len >= context {
            return Err(RolloutError::PromptTooLong { len, context });
        }
        for (position, &token) in request.prompt.iter().enumerate() {
            inside(&|| format!("prompt token at position {position},"), token)?;
        }
        for &token in &request.stop_ids {
            inside(&|| "stop token".to_string(), token)?;
        }
        for &(token, _) in &request.logit_bias {
            inside(&|| "biased token".to_string(), token)?;
        }
        check_biases(request, vocabulary)?;
        let count = |key, value: usize, limit: usize| match (1..=limit).contains(&value) {
            true => Ok(()),
            false => {
                let expected = if value == 0 { "at least 1".to_string() } else { format!("at most {limit}") };
                Err(RolloutError::OutOfRange { key, found: value.to_string(), expected })
            }
        };
        count("n", request.n, MAX_SAMPLES)?;
        count("max_new", request.max_new, usize::MAX)?;
        if !request.max_new_of.is_empty() {
            count("max_new_of", request.max_new_of.len(), request.n)?;
            count("n", request.n, request.max_new_of.len())?;
        }
        for &limit in &request.max_new_of {
            count("max_new_of", limit, request.max_new)?;
        }
        for (key, value) in
            [("top_logprobs", request.top_logprobs), ("prompt_top_logprobs", request.prompt_top_logprobs)]
        {
            if value > vocabulary {
                count(key, value, vocabulary)?;
            }
        }
        request.sampling.check(vocabulary)?;
        if let Some(empty) = request.stop_strings.iter().find(|s| s.is_empty()) {
            let found = format!("{empty:?}");
            return Err(RolloutError::OutOfRange {
                key: "stop string",
                found,
                expected: "some text".to_string(),
            });
        }
        if !request.stop_strings.is_empty() && self.decoder.is_none() {
            return Err(RolloutError::NoTextDecoder);
        }
        // The last new token is sampled, but never computed.
        let tokens = len + request.max_new.min(context - len);
        let (pool, bytes) = (self.scheduler.pool(), self.page_bytes);
        let (need_pages, have_pages) = (pool.pages_for(tokens - 1), pool.total());
        if need_pages > have_pages {
            let (need, have) = (need_pages.saturating_mul(bytes), have_pages * bytes);
            return Err(RolloutError::BudgetTooSmall { tokens, need, need_pages, have, have_pages });
        }
        Ok(())
    }
}

/// Biases are numbers, one for each token, and leave something to sample.
fn check_biases(request: &Request, vocabulary: usize) -> Result<(), RolloutError> {
    let wrong = |key, found: String, expected: &str| {
        Err(RolloutError::OutOfRange { key, found, expected: expected.to_string() })
    };
    let mut biased = BTreeSet::new();
    let mut banned: BTreeSet<u32> = match request.min_new {
        0 => BTreeSet::new(),
        _ => request.stop_ids.iter().copied().collect(),
    };
    for &(token, add) in &request.logit_bias {
        if add == f32::NEG_INFINITY {
            banned.insert(token);
        } else if !(-100.0..=100.0).contains(&add) {
            let found = format!("{add} for token {token}");
            return wrong("logit_bias", found, "a number from -100 to 100, or minus infinity");
        }
        if !biased.insert(token) {
            return wrong("logit_bias", format!("two numbers for token {token}"), "one for each token");
        }
    }
    let min_new = request.min_new;
    match () {
        () if banned.len() >= vocabulary => {
            let expected = "at least one token that may be sampled";
            wrong("logit_bias", format!("{} tokens that may not be sampled", banned.len()), expected)
        }
        () if min_new > request.max_new => {
            wrong("min_new", min_new.to_string(), &format!("at most max_new = {}", request.max_new))
        }
        () => Ok(()),
    }
}
