//! What is known about one sample: its tokens, where its keys and values are, and how far they have been computed.
//!
//! There is no prefill state and no decode state. A sequence has tokens, of which the first `computed` have their keys
//! and values in its pages; a step computes some more, and when all are computed the next token is drawn. A fresh
//! prompt, a prompt shared with a sibling, a sequence that was preempted and plain decoding differ in that number alone.

use crate::pages::Pages;
use crate::request::{FinishReason, RequestId, SampleKey, Sampling};
use qurl_kernels::backend::{SampleRow, Sampled};
use qurl_model::rng::{CounterRng, text_key};
use std::sync::Arc;

/// Names a sequence. The order of names is the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    /// The request it belongs to.
    pub request: RequestId,
    /// Its number among the request's samples.
    pub sample: u32,
}

/// One sample on its way.
#[derive(Debug)]
pub struct Sequence {
    id: SequenceId,
    prompt: Arc<[u32]>,
    sampling: Sampling,
    random: CounterRng,
    /// Tokens drawn so far.
    pub tokens: Vec<u32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
    /// Entropies of the distributions they were drawn from.
    pub entropies: Vec<f32>,
    /// Why the sequence ended, once it has.
    pub finish: Option<FinishReason>,
    /// Where its keys and values are.
    pub(crate) pages: Pages,
    /// Tokens whose keys and values are in the pages.
    pub(crate) computed: usize,
    /// Tokens that are computed in this step.
    pub(crate) scheduled: usize,
}

impl Sequence {
    /// A sequence that has nothing but its prompt.
    pub fn new(id: SequenceId, prompt: Arc<[u32]>, sampling: Sampling, key: SampleKey, pages: Pages) -> Sequence {
        let SampleKey { seed, step, prompt: prompt_key } = key;
        let random = CounterRng::new(&[seed, text_key("sample"), step, prompt_key, u64::from(id.sample)]);
        Sequence {
            id,
            prompt,
            sampling,
            random,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            entropies: Vec::new(),
            finish: None,
            pages,
            computed: 0,
            scheduled: 0,
        }
    }

    /// Its name.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// Tokens of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.prompt
    }

    /// Its pages.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Tokens so far, those of the prompt included.
    pub fn len(&self) -> usize {
        self.prompt.len() + self.tokens.len()
    }

    /// Whether there are no tokens; never, the prompt has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The positions that are computed in this step.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.computed..self.computed + self.scheduled
    }

    /// Whether this step ends with a drawn token.
    pub fn draws(&self) -> bool {
        self.scheduled > 0 && self.computed + self.scheduled == self.len()
    }

    /// Tokens that the samples of a request share: all of the prompt but its last token, whose row each sample runs
    /// itself to draw its first token.
    pub fn shareable(&self) -> usize {
        self.prompt.len() - 1
    }

    /// Appends the tokens of some positions.
    pub fn copy_tokens(&self, positions: std::ops::Range<usize>, to: &mut Vec<u32>) {
        let split = self.prompt.len();
        let clamp = |position: usize| position.min(split);
        to.extend_from_slice(&self.prompt[clamp(positions.start)..clamp(positions.end)]);
        let behind = |position: usize| position.saturating_sub(split);
        to.extend_from_slice(&self.tokens[behind(positions.start)..behind(positions.end)]);
    }

    /// How the next token is drawn: the random number depends on the key and the position alone.
    pub fn draw(&self) -> SampleRow {
        let Sampling { temperature, top_p, top_k, min_p } = self.sampling;
        SampleRow { temperature, top_p, top_k, min_p, uniform: self.random.uniform_f64_at(self.len() as u64) }
    }

    /// Takes the drawn token.
    pub fn push(&mut self, sampled: Sampled) {
        self.tokens.push(sampled.token);
        self.logprobs.push(sampled.logp);
        self.entropies.push(sampled.entropy);
    }
}
