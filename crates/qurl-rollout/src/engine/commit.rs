//! The end of a step: its tokens are read, and the sequences that they end become samples.

use super::{Emitted, Engine, Flight, Pending, TextDecoder};
use crate::error::RolloutError;
use crate::request::{FinishReason, Group, Sample, SampleKey};
use crate::sequence::{Sequence, SequenceId};
use qurl_kernels::{Device, Queue};

/// Tokens before the longest possible stop string that are decoded with it: a character may span several.
const TEXT_MARGIN: usize = 8;
/// Most replacement characters that a character whose last byte is missing becomes.
const UNFINISHED: usize = 3;

impl<D: Device> Engine<D> {
    /// Reads the sampled tokens of a step and takes note of the sequences that end.
    pub(super) fn commit(&mut self, queue: &mut D::Queue, flight: Flight<D>) -> Result<(), RolloutError> {
        let Flight { pending: Some(pending), sampling, top, .. } = flight else { return Ok(()) };
        let tokens = queue.wait(pending)?;
        self.top.extend(top.into_iter().map(|(place, top)| {
            let SequenceId { request, sample } = sampling[place];
            (request, sample, top)
        }));
        let (decoder, emitted) = (self.decoder.as_ref(), &mut self.emitted);
        let context = self.network.options().positions;
        let mut failed: Vec<(SequenceId, usize)> = Vec::new();
        let commit = |sequence: &mut Sequence, place: usize| {
            let sampled = tokens[place];
            if sampled.logp.is_nan() {
                // One error a request; its samples stand side by side.
                if failed.last().is_none_or(|(id, _)| id.request != sequence.id().request) {
                    failed.push((sequence.id(), sequence.known_len()));
                }
                return true;
            }
            sequence.push(sampled);
            sequence.finish = finish(sequence, decoder, context);
            let SequenceId { request, sample } = sequence.id();
            let finish = sequence.finish;
            emitted.push(Emitted { request, sample, token: sampled.token, logp: sampled.logp, finish });
            finish.is_some()
        };
        self.scheduler.commit(&sampling, commit, &mut self.ended);

        let weights = self.weights.unwrap_or_default();
        for sequence in self.ended.drain(..) {
            let SequenceId { request, sample } = sequence.id();
            let Sequence { tokens, logprobs, entropies, finish: Some(finish), cached, .. } = sequence else {
                continue;
            };
            let Some(pending) = self.pending.get_mut(&request) else { continue };
            pending.cached = pending.cached.max(cached);
            pending.samples[sample as usize] = Some(Sample { tokens, logprobs, entropies, finish, weights });
            if pending.samples.iter().all(Option::is_some)
                && let Some(Pending { request: asked, prompt_logprobs, prompt_top, cached, samples }) =
                    self.pending.remove(&request)
            {
                self.finished.push(Group {
                    request,
                    key: asked.key,
                    prompt: asked.prompt.clone(),
                    prompt_logprobs,
                    prompt_top,
                    cached_tokens: cached,
                    samples: samples.into_iter().flatten().collect(),
                });
            }
        }
        for (SequenceId { request, sample }, position) in failed {
            let SampleKey { seed, step, prompt } =
                self.pending.get(&request).map(|p| p.request.key).unwrap_or_default();
            self.cancel(request);
            let error = RolloutError::BadLogits { request, sample, position, seed, step, prompt };
            self.failed.push_back((request, error));
        }
        self.failed.pop_front().map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// The stop string that a text has; `cut` where a longer one ends with it. Replacement characters at its ends
/// may be parts of characters, of one that began before it or whose other bytes are yet to come: they are not
/// looked at. What they are is certain when more has come.
///
/// One that ends within the first `early` bytes is not looked at either.
fn stop_in(text: &str, cut: bool, early: usize, stops: &[String]) -> Option<usize> {
    const REPLACED: char = char::REPLACEMENT_CHARACTER;
    let mut certain = if cut { text.trim_start_matches(REPLACED) } else { text };
    let early = early.saturating_sub(text.len() - certain.len());
    for _ in 0..UNFINISHED {
        certain = certain.strip_suffix(REPLACED).unwrap_or(certain);
    }
    stops.iter().position(|stop| {
        let from = (early + 1).saturating_sub(stop.len()).min(certain.len());
        certain[certain.ceil_char_boundary(from)..].contains(stop)
    })
}

/// Whether a sequence ends with the token it has just got.
fn finish(sequence: &Sequence, decoder: Option<&TextDecoder>, context: usize) -> Option<FinishReason> {
    let (request, tokens) = (sequence.request(), &sequence.tokens);
    if let Some(&token) = tokens.last().filter(|token| request.stop_ids.contains(token)) {
        return Some(FinishReason::StopId(token));
    }
    let looked_for = !request.stop_strings.is_empty() && tokens.len() > request.min_new;
    if let Some(decode) = decoder.filter(|_| looked_for) {
        // A stop string that the newest token completes lies in the last few tokens: a token is a byte or
        // more.
        let longest = request.stop_strings.iter().map(String::len).max().unwrap_or(0);
        let first = tokens.len().saturating_sub(longest + TEXT_MARGIN);
        let text = decode(&tokens[first..]);
        let early = if first < request.min_new { decode(&tokens[first..request.min_new]).len() } else { 0 };
        if let Some(index) = stop_in(&text, first > 0, early, &request.stop_strings) {
            return Some(FinishReason::StopString(index));
        }
    }
    match () {
        () if tokens.len() >= request.limit_of(sequence.id().sample) => Some(FinishReason::Length),
        () if sequence.known_len() >= context => Some(FinishReason::Context),
        () => None,
    }
}

#[cfg(test)]
mod tests {
    use super::stop_in;

    /// Bytes that may still become a character are no replacement characters yet.
    #[test]
    fn half_a_character_is_no_stop_string() {
        let found = |text, cut, stop: &str| stop_in(text, cut, 0, &["never".to_string(), stop.to_string()]);
        assert_eq!(found("ab\u{FFFD}", false, "\u{FFFD}"), None);
        assert_eq!(found("ab\u{FFFD}\u{FFFD}\u{FFFD}", false, "\u{FFFD}"), None);
        assert_eq!(found("ab\u{1F600}", false, "\u{FFFD}"), None);
        assert_eq!(found("ab\u{FFFD}c", false, "\u{FFFD}"), Some(1));
        assert_eq!(found("ab\u{FFFD}\u{FFFD}\u{FFFD}\u{FFFD}", false, "b\u{FFFD}"), Some(1));
        // The other half of a character that began before what is looked at.
        assert_eq!(found("\u{FFFD}c", true, "\u{FFFD}"), None);
        assert_eq!(found("\u{FFFD}c", false, "\u{FFFD}"), Some(1));
        assert_eq!(found("\u{FFFD}cd\u{FFFD}", true, "cd"), Some(1));
    }

    #[test]
    fn a_stop_string_ends_after_the_text_that_comes_too_early() {
        let found = |text, early| stop_in(text, false, early, &["ab".to_string()]).is_some();
        let cut = |text, early| stop_in(text, true, early, &["ab".to_string()]).is_some();
        assert_eq!([0, 1, 2, 3].map(|early| found("abc", early)), [true, true, false, false]);
        assert_eq!([2, 3, 4, 9].map(|early| found("abab", early)), [true, true, false, false]);
        // A place inside of a character, and bytes of one that are not looked at.
        assert!(found("\u{1F600}ab", 3) && !found("ab\u{1F600}", 3));
        assert!(cut("\u{FFFD}ab", 3) && cut("\u{FFFD}ab", 4) && !cut("\u{FFFD}ab", 5));
    }
}
