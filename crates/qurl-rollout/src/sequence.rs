//! What is known about one sample: its tokens, where its keys and values are, and how far they have been
//! computed.
//!
//! There is no prefill state and no decode state. A sequence has tokens, of which the first `computed` have
//! their keys and values in its pages; a step computes some more, and when all are computed the next token is
//! sampled. A fresh prompt, a prompt shared with a sibling, a sequence that was preempted and plain decoding
//! differ in that number alone.
//!
//! A step may be planned before the tokens of the step before it have been read. Such a token is *coming*: it
//! counts as one of the sequence's tokens, and the row that computes it names the sampled row instead of the
//! token.

use crate::pages::Pages;
use crate::request::{FinishReason, Request, RequestId, SampleKey, Sampling};
use qurl_kernels::types::{Bias, SampleRow, Sampled, Token};
use qurl_model::rng::{CounterRng, text_key};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Names a sequence. The order of names is the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId {
    /// The request it belongs to.
    pub request: RequestId,
    /// Its number among the request's samples.
    pub sample: u32,
}

/// One sample in progress.
#[derive(Debug)]
pub struct Sequence {
    id: SequenceId,
    request: Arc<Request>,
    random: CounterRng,
    /// What is added to logits, by token: as long as it may not end, and after that.
    biases: [Vec<(u32, f32)>; 2],
    /// Most tokens that it can have, those of the prompt included.
    limit: usize,
    /// Tokens sampled so far.
    pub tokens: Vec<u32>,
    /// Their log-probabilities.
    pub logprobs: Vec<f32>,
    /// Entropies of the distributions they were sampled from.
    pub entropies: Vec<f32>,
    /// Why the sequence ended, once it has.
    pub finish: Option<FinishReason>,
    /// Where its keys and values are.
    pub(crate) pages: Pages,
    /// Tokens whose keys and values are in the pages once the launched steps are done.
    pub(crate) computed: usize,
    /// Those of them that another request had computed when the sequence first ran.
    pub(crate) cached: usize,
    /// Whether what its fresh pages hold counts as the keys and values of its prompt: for benchmarks only.
    pub(crate) at_context: bool,
    /// Tokens that are computed in the step that is being planned.
    pub(crate) scheduled: usize,
    /// Tokens that launched steps sample and that have not been read.
    pub(crate) coming: usize,
    /// The sampled row of the last launched step that gives the last of them.
    sampled_row: u32,
}

impl Sequence {
    /// A sequence that has nothing but its prompt, in a context of so many tokens.
    pub fn new(id: SequenceId, request: Arc<Request>, context: usize, pages: Pages) -> Sequence {
        let SampleKey { seed, step, prompt } = request.key;
        let sample = u64::from(request.first_sample) + u64::from(id.sample);
        let random = CounterRng::new(&[seed, text_key("sample"), step, prompt, sample]);
        Sequence {
            id,
            random,
            biases: [true, false].map(|early| biases(&request, early)),
            limit: request.prompt.len().saturating_add(request.limit_of(id.sample)).min(context),
            request,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            entropies: Vec::new(),
            finish: None,
            pages,
            computed: 0,
            cached: 0,
            at_context: false,
            scheduled: 0,
            coming: 0,
            sampled_row: 0,
        }
    }

    /// Its name.
    pub fn id(&self) -> SequenceId {
        self.id
    }

    /// The request it belongs to.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Tokens of the prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.request.prompt
    }

    /// What sets its pages apart from those of requests that begin alike.
    pub fn salt(&self) -> &[u32] {
        &self.request.salt
    }

    /// Its pages.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Tokens so far, those of the prompt and those coming included.
    pub fn len(&self) -> usize {
        self.known_len() + self.coming
    }

    /// Tokens so far that have been read, those of the prompt included.
    pub fn known_len(&self) -> usize {
        self.request.prompt.len() + self.tokens.len()
    }

    /// Whether there are no tokens; never, the prompt has at least one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that can be computed now. The last one that it can have never is, even before it has been read.
    pub(crate) fn uncomputed(&self) -> usize {
        if self.len() < self.limit { self.len() - self.computed } else { 0 }
    }

    /// Tokens that it may be expected to grow by: half of what it can.
    pub(crate) fn growth(&self) -> usize {
        self.limit.saturating_sub(self.len()) / 2
    }

    /// The positions that are computed in this step.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.computed..self.computed + self.scheduled
    }

    /// Whether this step ends with a sampled token.
    pub fn samples(&self) -> bool {
        self.scheduled > 0 && self.computed + self.scheduled == self.len()
    }

    /// Tokens that the samples of a request share: all of the prompt but its last token, whose row each
    /// sample runs itself to sample its first token.
    pub fn shareable(&self) -> usize {
        self.prompt().len() - 1
    }

    /// Appends the tokens of some positions. One that is coming appears as [`Token::Sampled`]; while a step
    /// is planned that is at most the last, and the last launched step samples it.
    pub fn copy_tokens(&self, positions: std::ops::Range<usize>, to: &mut Vec<Token>) {
        let (prompt, tokens) = (self.prompt(), &self.tokens);
        let clamp = |position: usize| position.min(prompt.len());
        let mut known = |ids: &[u32]| to.extend(ids.iter().map(|&id| Token::Id(id)));
        known(&prompt[clamp(positions.start)..clamp(positions.end)]);
        let after = |position: usize| position.saturating_sub(prompt.len()).min(tokens.len());
        known(&tokens[after(positions.start)..after(positions.end)]);
        if positions.end > self.known_len() {
            to.push(Token::Sampled(self.sampled_row));
        }
    }

    /// How the next token is sampled: the random number depends on the key and the position alone.
    pub fn sample_row(&self) -> SampleRow {
        let Sampling { temperature, top_p, top_k, min_p } = self.request.sampling;
        SampleRow { temperature, top_p, top_k, min_p, uniform: self.random.uniform_f64_at(self.len() as u64) }
    }

    /// What is added to the logits of its next token, the `row`-th that is sampled. It depends on how many
    /// tokens there are, not on which, so that it is known before they are.
    pub fn biases(&self, row: u32) -> impl Iterator<Item = Bias> {
        let [early, later] = &self.biases;
        let is_early = self.len() - self.request.prompt.len() < self.request.min_new;
        let biases = if is_early { early } else { later };
        biases.iter().map(move |&(token, add)| Bias { row, token, add })
    }

    /// The step has been launched; its sampled token, if it has one, is the `sampled_row`-th.
    pub(crate) fn launched(&mut self, sampled_row: u32) {
        if self.samples() {
            self.coming += 1;
            self.sampled_row = sampled_row;
        }
        self.computed += self.scheduled;
        self.scheduled = 0;
    }

    /// Takes the sampled token.
    pub fn push(&mut self, sampled: Sampled) {
        self.tokens.push(sampled.token);
        self.logprobs.push(sampled.logp);
        self.entropies.push(sampled.entropy);
    }
}

/// What is added to logits, by token; `early`, tokens that end a sample are not sampled.
fn biases(request: &Request, early: bool) -> Vec<(u32, f32)> {
    let stops = if early && request.min_new > 0 { &request.stop_ids[..] } else { &[] };
    let mut biases: BTreeMap<u32, f32> = request.logit_bias.iter().copied().collect();
    biases.extend(stops.iter().map(|&token| (token, f32::NEG_INFINITY)));
    biases.into_iter().collect()
}
