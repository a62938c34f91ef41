//! The engine: requests in, one step after the other, finished groups out.
//!
//! A step is schedule, forward, commit. The buffers of a step (token ids, positions, page numbers, draws) are kept and
//! filled again, so a decode step costs the kernels and little else. Weights change only between requests, and every
//! sample carries the version it was made with.

use crate::error::RolloutError;
use crate::pages::PagePool;
use crate::request::{FinishReason, Group, Request, RequestId, Sample, WeightVersion};
use crate::scheduler::{Limits, Scheduler};
use crate::sequence::{Sequence, SequenceId};
use qurl_kernels::backend::{SampleRow, Span};
use qurl_kernels::{Backend, BackendError};
use qurl_model::Params;
use qurl_model::compute::infer::page_store;
use qurl_model::compute::{Batch, Inference, Network, Targets};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Turns tokens into text, for stop strings.
pub type TextDecoder = Arc<dyn Fn(&[u32]) -> String + Send + Sync>;

/// Tokens before the longest possible stop string that are decoded with it: a character may span several.
const TEXT_MARGIN: usize = 8;

/// Engines so far.
static ENGINES: AtomicU64 = AtomicU64::new(0);

/// Most samples of one request.
const MAX_SAMPLES: usize = 1 << 20;

/// Size of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// Memory for keys and values of all layers, in bytes.
    pub kv_bytes: usize,
    /// Tokens of a page, a multiple of 16.
    pub page_size: usize,
    /// Most sequences that are computed at the same time.
    pub max_num_seqs: usize,
    /// Most tokens of a step; longer prompts are computed in chunks.
    pub max_num_batched_tokens: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions { kv_bytes: 1 << 30, page_size: 16, max_num_seqs: 256, max_num_batched_tokens: 1024 }
    }
}

/// What an engine has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Tokens computed only for their keys and values: prompts (all but their last token), and what was preempted.
    pub prefill_tokens: u64,
    /// Tokens computed to draw the next one.
    pub decode_tokens: u64,
    /// How often a sequence gave back its pages and was computed again.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
    /// Most pages in use at the same time.
    pub peak_pages: usize,
}

/// A token that the last step drew.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Emitted {
    /// The request.
    pub request: RequestId,
    /// Its sample.
    pub sample: u32,
    /// The token.
    pub token: u32,
    /// Its log-probability.
    pub logp: f32,
    /// Set if this is the sample's last token.
    pub finish: Option<FinishReason>,
}

/// A request in flight.
struct Pending {
    request: Request,
    /// Longest stop string in bytes, hence at most so many tokens.
    stop_bytes: usize,
    prompt_logprobs: Vec<f32>,
    samples: Vec<Option<Sample>>,
}

/// Generates samples with one network.
pub struct Engine<B: Backend> {
    backend: Arc<B>,
    /// Unlike that of any other engine: whose steps a backend has seen.
    identity: u64,
    network: Network<B>,
    /// `None` after a load that failed half-way.
    weights: Option<WeightVersion>,
    page_bytes: usize,
    kv: Vec<B::Kv>,
    work: Inference<B>,
    scheduler: Scheduler,
    decoder: Option<TextDecoder>,
    pending: BTreeMap<RequestId, Pending>,
    /// Whether a request in flight may have asked for the log-probs of its prompt.
    prompts_are_scored: bool,
    next_request: u64,
    steps: u64,
    // Buffers of a step.
    batch: Batch,
    draw_rows: Vec<u32>,
    draws: Vec<SampleRow>,
    /// Draws that are sequences'; the rest fills up the step.
    drawing: usize,
    ended: Vec<Sequence>,
    emitted: Vec<Emitted>,
    finished: Vec<Group>,
}

impl<B: Backend> Engine<B> {
    /// Takes all memory that the engine will use.
    pub fn new(
        backend: Arc<B>,
        network: Network<B>,
        weights: WeightVersion,
        options: EngineOptions,
    ) -> Result<Self, RolloutError> {
        let in_range = |key, value: usize, ok: bool, expected: &str| match ok {
            true => Ok(()),
            false => Err(RolloutError::OutOfRange { key, found: value.to_string(), expected: expected.to_string() }),
        };
        let EngineOptions { kv_bytes, page_size, max_num_seqs, max_num_batched_tokens } = options;
        let whole_blocks = page_size > 0 && page_size.is_multiple_of(16) && page_size <= 1 << 16;
        in_range("page_size", page_size, whole_blocks, "a multiple of 16, at most 65536")?;
        in_range("max_num_seqs", max_num_seqs, max_num_seqs > 0, "at least 1")?;
        in_range("max_num_batched_tokens", max_num_batched_tokens, max_num_batched_tokens > 0, "at least 1")?;
        let c = network.config();
        let layer_bytes = backend.kv_page_bytes(network.options().kv_format, page_size, c.num_kv_heads, c.head_dim);
        let page_bytes = layer_bytes * c.num_layers;
        // Slots are numbered with 32 bits, and no more pages are taken than all sequences can fill (twice, for prompts
        // that wait for their samples).
        let useful = max_num_seqs.saturating_mul(2 * network.options().positions.div_ceil(page_size));
        let pages = (kv_bytes / page_bytes.max(1)).min(u32::MAX as usize / page_size - 1).min(useful);
        in_range("kv_bytes", kv_bytes, pages > 0, &format!("at least the {page_bytes} bytes of one page"))?;
        let limits = Limits { max_num_seqs, max_num_batched_tokens };
        Ok(Engine {
            page_bytes,
            identity: ENGINES.fetch_add(1, Ordering::Relaxed),
            // One page more, for the rows that fill up a step.
            kv: page_store(&*backend, &network, pages + 1, page_size)?,
            work: Inference::new(&*backend, &network, max_num_batched_tokens.max(backend.bucket(max_num_seqs)))?,
            scheduler: Scheduler::new(limits, PagePool::new(pages, page_size)),
            backend,
            network,
            weights: Some(weights),
            decoder: None,
            pending: BTreeMap::new(),
            prompts_are_scored: false,
            next_request: 0,
            steps: 0,
            batch: Batch::default(),
            draw_rows: Vec::new(),
            draws: Vec::new(),
            drawing: 0,
            ended: Vec::new(),
            emitted: Vec::new(),
            finished: Vec::new(),
        })
    }

    /// Gives the engine a way to make text, which requests with stop strings need.
    pub fn set_text_decoder(&mut self, decoder: TextDecoder) {
        self.decoder = Some(decoder);
    }

    /// The backend.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// The network.
    pub fn network(&self) -> &Network<B> {
        &self.network
    }

    /// The weights in use; `None` after a load that failed half-way.
    pub fn weights(&self) -> Option<WeightVersion> {
        self.weights
    }

    /// What was done so far.
    pub fn stats(&self) -> EngineStats {
        let counts = self.scheduler.counts();
        EngineStats {
            prefill_tokens: counts.prefill_tokens,
            decode_tokens: counts.decode_tokens,
            preemptions: counts.preemptions,
            steps: self.steps,
            peak_pages: self.scheduler.pool().peak(),
        }
    }

    /// The pages for keys and values.
    pub fn pages(&self) -> &PagePool {
        self.scheduler.pool()
    }

    /// Bytes that a page takes in all layers together.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Sequences that have not ended.
    pub fn unfinished(&self) -> usize {
        self.scheduler.unfinished()
    }

    /// Takes over changed parameters. Refused while requests are in flight.
    pub fn load(&mut self, params: &Params<B::Tensor>, weights: WeightVersion) -> Result<(), RolloutError> {
        self.load_with(weights, |backend, network| network.refresh(backend, params))
    }

    /// Lets `change` write new weights into the network. Refused while requests are in flight; if it fails, the engine
    /// refuses requests until another load succeeds.
    pub fn load_with(
        &mut self,
        weights: WeightVersion,
        change: impl FnOnce(&B, &mut Network<B>) -> Result<(), BackendError>,
    ) -> Result<(), RolloutError> {
        if self.unfinished() > 0 {
            return Err(RolloutError::Busy { unfinished: self.unfinished() });
        }
        self.weights = None;
        change(&self.backend, &mut self.network)?;
        self.weights = Some(weights);
        Ok(())
    }

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
        let count = |key, value: usize, limit: usize| match (1..=limit).contains(&value) {
            true => Ok(()),
            false => {
                let expected = if value == 0 { "at least 1".to_string() } else { format!("at most {limit}") };
                Err(RolloutError::OutOfRange { key, found: value.to_string(), expected })
            }
        };
        count("n", request.n, MAX_SAMPLES)?;
        count("max_new", request.max_new, usize::MAX)?;
        request.sampling.check(vocabulary)?;
        if let Some(empty) = request.stop_strings.iter().find(|s| s.is_empty()) {
            let found = format!("{empty:?}");
            return Err(RolloutError::OutOfRange { key: "stop string", found, expected: "some text".to_string() });
        }
        if !request.stop_strings.is_empty() && self.decoder.is_none() {
            return Err(RolloutError::NoTextDecoder);
        }
        // The last new token is drawn, but never computed.
        let tokens = len + request.max_new.min(context - len);
        let (pool, bytes) = (self.scheduler.pool(), self.page_bytes);
        let (need_pages, have_pages) = (pool.pages_for(tokens - 1), pool.total());
        if need_pages > have_pages {
            let (need, have) = (need_pages.saturating_mul(bytes), have_pages * bytes);
            return Err(RolloutError::BudgetTooSmall { tokens, need, need_pages, have, have_pages });
        }
        Ok(())
    }

    /// Queues a request.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RolloutError> {
        self.check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let prompt: Arc<[u32]> = request.prompt.as_slice().into();
        for sample in 0..request.n as u32 {
            let id = SequenceId { request: id, sample };
            let pages = self.scheduler.pool().empty();
            self.scheduler.add(Sequence::new(id, prompt.clone(), request.sampling, request.key, pages));
        }
        let pending = Pending {
            stop_bytes: request.stop_strings.iter().map(String::len).max().unwrap_or(0),
            prompt_logprobs: Vec::new(),
            samples: (0..request.n).map(|_| None).collect(),
            request,
        };
        self.prompts_are_scored &= !self.pending.is_empty();
        self.prompts_are_scored |= pending.request.prompt_logprobs;
        self.pending.insert(id, pending);
        Ok(id)
    }

    /// Drops a request and what was drawn for it. Unknown or finished requests are left alone.
    pub fn cancel(&mut self, request: RequestId) {
        self.scheduler.cancel(request);
        self.pending.remove(&request);
    }

    /// One step: every scheduled sequence computes some tokens, and those that have computed all of theirs draw one
    /// more. Returns the drawn tokens; none if nothing is in flight. After [`RolloutError::BadLogits`] the request that
    /// it names is gone and the others go on.
    pub fn step(&mut self) -> Result<&[Emitted], RolloutError> {
        self.emitted.clear();
        if self.unfinished() == 0 {
            return Ok(&self.emitted);
        }
        self.scheduler.schedule();
        self.fill_batch();
        if self.batch.rows() == 0 {
            return Err(RolloutError::Stuck { unfinished: self.unfinished() });
        }
        let backend = &*self.backend.clone();
        for copy in self.scheduler.copies() {
            for kv in &mut self.kv {
                backend.kv_copy_page(kv, copy.from as usize, copy.to as usize);
            }
        }
        let Engine { work, network, batch, kv, draw_rows, draws, .. } = self;
        backend.step(self.identity, &mut |extent| {
            work.forward_part(backend, network, batch, kv, extent);
            if !draws.is_empty() {
                work.draw(backend, network, draw_rows, draws);
            }
        });
        self.steps += 1;
        self.commit()?;
        Ok(&self.emitted)
    }

    /// The groups that have finished since the last call, in the order of finishing.
    pub fn finished(&mut self) -> Vec<Group> {
        std::mem::take(&mut self.finished)
    }

    /// Returns groups that were taken too early.
    pub(crate) fn put_back(&mut self, groups: Vec<Group>) {
        self.finished.extend(groups);
    }

    /// Lays out the scheduled rows.
    fn fill_batch(&mut self) {
        let Batch { ids, positions, slots, spans, pages } = &mut self.batch;
        for buffer in [&mut *ids, positions, slots, pages, &mut self.draw_rows] {
            buffer.clear();
        }
        spans.clear();
        self.draws.clear();
        let page_size = self.scheduler.pool().page_size();
        for sequence in self.scheduler.running() {
            let rows = sequence.rows();
            if rows.is_empty() {
                continue;
            }
            spans.push(Span { row: ids.len(), rows: rows.len(), position: rows.start, pages: pages.len() });
            pages.extend_from_slice(&sequence.pages().ids()[..rows.end.div_ceil(page_size)]);
            sequence.copy_tokens(rows.clone(), ids);
            positions.extend(rows.clone().map(|position| position as u32));
            slots.extend(rows.map(|position| sequence.pages().slot(position)));
            if sequence.draws() {
                self.draw_rows.push(ids.len() as u32 - 1);
                self.draws.push(sequence.draw());
            }
        }
        self.drawing = self.draws.len();
        // A step of nothing but decoding is filled up to a size that the backend may have recorded.
        if !ids.is_empty() && self.draws.len() == ids.len() {
            let spare = self.scheduler.pool().total();
            let table = pages.len();
            for row in ids.len()..self.backend.bucket(ids.len()) {
                ids.push(0);
                positions.push(0);
                slots.push((spare * page_size) as u32);
                spans.push(Span { row, rows: 1, position: 0, pages: table });
                self.draw_rows.push(row as u32);
                self.draws.push(SampleRow::greedy());
            }
            if ids.len() > self.drawing {
                pages.push(spare as u32);
            }
        }
    }

    /// Log-probs of the prompts that asked for them, as far as this step has computed them for the first time.
    fn score_prompts(&mut self) -> Result<(), RolloutError> {
        if !self.prompts_are_scored {
            return Ok(());
        }
        let scheduled = self.scheduler.running().iter().filter(|s| !s.rows().is_empty());
        for (sequence, span) in scheduled.zip(&self.batch.spans) {
            let Some(pending) = self.pending.get_mut(&sequence.id().request) else { continue };
            let (prompt, done) = (sequence.prompt(), pending.prompt_logprobs.len());
            let rows = done..sequence.rows().end.min(prompt.len() - 1);
            if !pending.request.prompt_logprobs || rows.is_empty() || rows.start < span.position {
                continue;
            }
            let first = (span.row + rows.start - span.position) as u32;
            let targets = Targets {
                rows: (first..first + rows.len() as u32).collect(),
                tokens: prompt[rows.start + 1..rows.end + 1].to_vec(),
            };
            let temperature = pending.request.sampling.logp_temperature();
            let out = self.work.head(&self.backend, &self.network, &targets, temperature)?;
            pending.prompt_logprobs.extend(out.logp);
        }
        Ok(())
    }

    /// Reads the drawn tokens and takes note of the sequences that end.
    fn commit(&mut self) -> Result<(), RolloutError> {
        let sampled = match self.drawing {
            0 => Vec::new(),
            drawing => self.work.drawn(&self.backend, drawing)?,
        };
        self.score_prompts()?;
        let (pending, decoder, emitted) = (&self.pending, self.decoder.as_ref(), &mut self.emitted);
        let context = self.network.options().positions;
        let mut sampled = sampled.into_iter();
        let mut failed = None;
        let commit = |sequence: &mut Sequence| {
            let (Some(drawn), Some(pending)) = (sampled.next(), pending.get(&sequence.id().request)) else {
                return false;
            };
            if drawn.logp.is_nan() {
                failed.get_or_insert((sequence.id(), sequence.len()));
                return true;
            }
            sequence.push(drawn);
            sequence.finish = finish(sequence, pending, decoder, context);
            let SequenceId { request, sample } = sequence.id();
            let finish = sequence.finish;
            emitted.push(Emitted { request, sample, token: drawn.token, logp: drawn.logp, finish });
            finish.is_some()
        };
        self.scheduler.commit(commit, &mut self.ended);

        let weights = self.weights.unwrap_or_default();
        for sequence in self.ended.drain(..) {
            let SequenceId { request, sample } = sequence.id();
            let Sequence { tokens, logprobs, entropies, finish: Some(finish), .. } = sequence else { continue };
            let Some(pending) = self.pending.get_mut(&request) else { continue };
            pending.samples[sample as usize] = Some(Sample { tokens, logprobs, entropies, finish, weights });
            if pending.samples.iter().all(Option::is_some)
                && let Some(Pending { request: Request { prompt, key, .. }, prompt_logprobs, samples, .. }) =
                    self.pending.remove(&request)
            {
                let samples = samples.into_iter().flatten().collect();
                self.finished.push(Group { request, key, prompt, prompt_logprobs, samples });
            }
        }
        let Some((SequenceId { request, sample }, position)) = failed else { return Ok(()) };
        let key = self.pending.get(&request).map(|p| p.request.key).unwrap_or_default();
        self.cancel(request);
        let (seed, step, prompt) = (key.seed, key.step, key.prompt);
        Err(RolloutError::BadLogits { request, sample, position, seed, step, prompt })
    }
}

/// Whether a sequence ends with the token it has just got.
fn finish(
    sequence: &Sequence,
    pending: &Pending,
    decoder: Option<&TextDecoder>,
    context: usize,
) -> Option<FinishReason> {
    let request = &pending.request;
    let tokens = &sequence.tokens;
    if let Some(&token) = tokens.last().filter(|token| request.stop_ids.contains(token)) {
        return Some(FinishReason::StopId(token));
    }
    if let Some(decode) = decoder.filter(|_| !request.stop_strings.is_empty()) {
        // A stop string that the newest token completes lies in the last few tokens: a token is a byte or more.
        let tail = &tokens[tokens.len().saturating_sub(pending.stop_bytes + TEXT_MARGIN)..];
        let text = decode(tail);
        if let Some(index) = request.stop_strings.iter().position(|stop| text.contains(stop)) {
            return Some(FinishReason::StopString(index));
        }
    }
    match () {
        () if tokens.len() >= request.max_new => Some(FinishReason::Length),
        () if sequence.len() >= context => Some(FinishReason::Context),
        () => None,
    }
}
