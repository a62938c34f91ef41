//! The engine: requests in, one step after the other, finished groups out.
//!
//! A step is launched (schedule, forward, sample) and committed (its tokens are read). On a device that
//! computes while the host does something else, the next step is launched before the last one is committed,
//! so that the device never waits for the host: tokens that are not known yet are named by the rows that
//! sample them. What is computed for a sequence that turns out to have ended is dropped. Samples do not
//! depend on it, as they do not depend on anything else around them.
//!
//! The buffers of a step are kept and filled again, so a decode step costs the kernels and little else.
//! Weights change only between requests, and every sample carries the version it was made with.

mod check;
mod commit;
mod context;
mod options;
mod rehearse;
mod scores;
mod stats;
mod weights;

pub use options::EngineOptions;
pub use stats::{EngineStats, FullBatches};

use crate::error::RolloutError;
use crate::pages::PagePool;
use crate::request::{FinishReason, Group, Request, RequestId, Sample, TopTokens, WeightVersion};
use crate::rows::StepRows;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceId};
use qurl_kernels::{Device, Queue};
use qurl_model::compute::{Inference, Network};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Turns tokens into text, for stop strings.
pub type TextDecoder = Arc<dyn Fn(&[u32]) -> String + Send + Sync>;

/// Engines so far.
static ENGINES: AtomicU32 = AtomicU32::new(0);

/// A token that the last step sampled.
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
    request: Arc<Request>,
    prompt_logprobs: Vec<f32>,
    prompt_top: Vec<TopTokens>,
    /// Tokens of the prompt that its first sample found computed.
    cached: usize,
    samples: Vec<Option<Sample>>,
}

/// A step that has been launched.
struct Flight<D: Device> {
    /// Its sampled tokens on their way, if it samples any.
    pending: Option<D::Pending>,
    /// The sequences that they are for.
    sampling: Vec<SequenceId>,
    /// The most probable tokens for those of them that want to know, by their place.
    top: Vec<(usize, TopTokens)>,
    /// Whether every place decodes.
    full: bool,
}

/// Generates samples with one network.
pub struct Engine<D: Device> {
    device: Arc<D>,
    /// Names the buffers that its steps use: unlike that of any other engine, or of other pages of this one.
    identity: u32,
    network: Network<D>,
    /// `None` after a load that failed half-way.
    weights: Option<WeightVersion>,
    options: EngineOptions,
    page_bytes: usize,
    kv: Vec<D::Kv>,
    work: Inference<D>,
    scheduler: Scheduler,
    decoder: Option<TextDecoder>,
    pending: BTreeMap<RequestId, Pending>,
    /// Whether a request in flight may have asked for the log-probs of its prompt.
    prompts_are_scored: bool,
    /// Whether a request in flight may want the most probable tokens.
    wants_top: bool,
    next_request: u64,
    steps: u64,
    full: FullBatches,
    /// When the last step ended, if it was full.
    full_since: Option<Instant>,
    /// Whether the device computes while the host does something else.
    asynchronous: bool,
    /// Whether a step is launched before the last one is committed.
    ahead: bool,
    /// Launched steps, the oldest first: between calls none, or one where the engine runs ahead.
    flights: VecDeque<Flight<D>>,
    // Buffers of a step.
    rows: StepRows,
    ended: Vec<Sequence>,
    emitted: Vec<Emitted>,
    top: Vec<(RequestId, u32, TopTokens)>,
    finished: Vec<Group>,
    /// Requests that failed beside another one, and why; the next steps say so.
    failed: VecDeque<(RequestId, RolloutError)>,
}

impl<D: Device> Engine<D> {
    /// Takes all memory that the engine will use.
    pub fn new(
        device: Arc<D>,
        network: Network<D>,
        weights: WeightVersion,
        options: EngineOptions,
    ) -> Result<Self, RolloutError> {
        let in_range = |key, value: usize, ok: bool, expected: &str| match ok {
            true => Ok(()),
            false => Err(RolloutError::OutOfRange {
                key,
                found: value.to_string(),
                expected: expected.to_string(),
            }),
        };
        let EngineOptions { page_size, max_num_seqs, max_num_batched_tokens, .. } = options;
        let whole_blocks = page_size > 0 && page_size.is_multiple_of(16) && page_size <= 1 << 16;
        in_range("page_size", page_size, whole_blocks, "a multiple of 16, at most 65536")?;
        in_range("max_num_seqs", max_num_seqs, max_num_seqs > 0, "at least 1")?;
        in_range("max_num_batched_tokens", max_num_batched_tokens, max_num_batched_tokens > 0, "at least 1")?;
        let (page_bytes, pages) = options.pages(&*device, &network)?;
        let asynchronous = device.info().asynchronous;
        let largest = max_num_batched_tokens.max(padded_rows(asynchronous, max_num_seqs));
        Ok(Engine {
            options,
            page_bytes,
            identity: ENGINES.fetch_add(1, Ordering::Relaxed),
            kv: options.page_store(&*device, &network, pages)?,
            work: Inference::new(&*device, &network, largest)?,
            scheduler: options.scheduler(pages),
            asynchronous,
            ahead: asynchronous,
            flights: VecDeque::new(),
            device,
            network,
            weights: Some(weights),
            decoder: None,
            pending: BTreeMap::new(),
            prompts_are_scored: false,
            wants_top: false,
            next_request: 0,
            steps: 0,
            full: FullBatches::default(),
            full_since: None,
            rows: StepRows::default(),
            ended: Vec::new(),
            emitted: Vec::new(),
            top: Vec::new(),
            finished: Vec::new(),
            failed: VecDeque::new(),
        })
    }

    /// Gives the engine a way to make text, which requests with stop strings need.
    pub fn set_text_decoder(&mut self, decoder: TextDecoder) {
        self.decoder = Some(decoder);
    }

    /// Whether the engine launches a step before it has read the tokens of the last one; at first as suits
    /// the device. It changes when tokens come out, not which.
    pub fn set_ahead(&mut self, ahead: bool) {
        self.ahead = ahead;
    }

    /// The network.
    pub fn network(&self) -> &Network<D> {
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
            shared_tokens: counts.shared_tokens,
            steps: self.steps,
            peak_pages: self.scheduler.pool().peak(),
            full: self.full,
        }
    }

    /// Its size.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Sequences that hold pages.
    pub fn running(&self) -> usize {
        self.scheduler.running().len()
    }

    /// Forgets what is kept for requests that begin alike.
    pub fn forget_prefixes(&mut self) {
        self.scheduler.forget_prefixes();
    }

    /// The tokens of the last step, after an error, too.
    pub fn emitted(&self) -> &[Emitted] {
        &self.emitted
    }

    /// The most probable tokens where tokens of the last step were sampled, by request and sample, for the
    /// requests that want them.
    pub fn top(&self) -> &[(RequestId, u32, TopTokens)] {
        &self.top
    }

    /// The pages for keys and values.
    pub fn pages(&self) -> &PagePool {
        self.scheduler.pool()
    }

    /// Pages that unfinished requests hold: what is kept for requests to come is not among them.
    pub fn pages_in_use(&self) -> usize {
        self.scheduler.pages_in_use()
    }

    /// Bytes that a page takes in all layers together.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Sequences that have not ended, and requests whose failure has not been told.
    pub fn unfinished(&self) -> usize {
        self.scheduler.unfinished() + self.failed.len()
    }

    /// Queues a request.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RolloutError> {
        self.enqueue(request, false)
    }

    /// Queues a request, with its prompt as computed where it is `at_context`.
    fn enqueue(&mut self, mut request: Request, at_context: bool) -> Result<RequestId, RolloutError> {
        self.check(&request)?;
        if request.sampling.top_k as usize >= self.network.config().vocab_size {
            request.sampling.top_k = 0; // keeps all
        }
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let request = Arc::new(request);
        let context = self.network.options().positions;
        for sample in 0..request.n as u32 {
            let id = SequenceId { request: id, sample };
            let pages = self.scheduler.pool().empty();
            let mut sequence = Sequence::new(id, request.clone(), context, pages);
            sequence.at_context = at_context;
            self.scheduler.add(sequence);
        }
        let samples = (0..request.n).map(|_| None).collect();
        let (prompt_logprobs, prompt_top) = (Vec::new(), Vec::new());
        let pending = Pending { request, prompt_logprobs, prompt_top, cached: 0, samples };
        self.prompts_are_scored &= !self.pending.is_empty();
        self.prompts_are_scored |= pending.request.prompt_logprobs;
        self.wants_top &= !self.pending.is_empty();
        self.wants_top |= pending.request.top_logprobs > 0;
        self.pending.insert(id, pending);
        Ok(id)
    }

    /// Drops a request and what was sampled for it. Unknown or finished requests are left alone.
    pub fn cancel(&mut self, request: RequestId) {
        self.scheduler.cancel(request);
        self.pending.remove(&request);
        self.failed.retain(|(failed, _)| *failed != request);
        self.forget_void();
    }

    /// Where no sequence is left, nobody waits for what has been launched.
    fn forget_void(&mut self) {
        if self.scheduler.unfinished() == 0 {
            self.flights.clear();
        }
    }

    /// One step: every scheduled sequence computes some tokens, and those that have computed all of theirs
    /// sample one more. Returns the sampled tokens; none if nothing is in flight. After
    /// [`RolloutError::BadLogits`] the request that it names is gone and the others continue.
    pub fn step(&mut self, queue: &mut D::Queue) -> Result<&[Emitted], RolloutError> {
        self.emitted.clear();
        self.top.clear();
        if let Some((_, error)) = self.failed.pop_front() {
            return Err(error);
        }
        if self.unfinished() == 0 {
            return Ok(&self.emitted);
        }
        if self.flights.is_empty() && !self.launch(queue)? {
            return Err(RolloutError::Stuck { unfinished: self.unfinished() });
        }
        if self.ahead && self.flights.len() == 1 {
            self.launch(queue)?;
        }
        if let Some(flight) = self.flights.pop_front() {
            let full = flight.full;
            let committed = self.commit(queue, flight);
            self.forget_void();
            committed?;
            self.clock(full);
        }
        Ok(&self.emitted)
    }

    /// Takes the time of a step that has been committed.
    fn clock(&mut self, full: bool) {
        let now = full.then(Instant::now);
        if let (Some(before), Some(now)) = (self.full_since, now) {
            self.full.time += now - before;
            self.full.tokens += self.emitted.len() as u64;
        }
        self.full_since = now.filter(|_| self.unfinished() > 0);
    }

    /// Plans a step and issues it; false where there is nothing to compute as long as tokens are coming.
    fn launch(&mut self, queue: &mut D::Queue) -> Result<bool, RolloutError> {
        self.scheduler.schedule();
        let asynchronous = self.asynchronous;
        self.rows
            .fill(self.scheduler.running(), self.scheduler.pool(), |rows| padded_rows(asynchronous, rows));
        if self.rows.batch.rows() == 0 {
            return Ok(false);
        }
        for copy in self.scheduler.copies() {
            for kv in &mut self.kv {
                queue.copy_page(kv, copy.from as usize, copy.to as usize);
            }
        }
        let Engine { work, network, kv, rows, .. } = self;
        // Steps of nothing but decoding are alike: padded to few sizes, they can be replayed.
        let buffers = u64::from(self.identity) << 32 | u64::from(network.id());
        let key = (asynchronous && rows.decodes()).then_some(buffers);
        work.step(queue, network, &rows.batch, kv, key);
        self.steps += 1;
        let pending = match self.rows.sampling {
            0 => None,
            sampling => Some(self.work.fetch(queue, sampling)?),
        };
        self.score_prompts(queue)?;
        let top = self.top_tokens(queue)?;
        let mut sampling = Vec::with_capacity(self.rows.sampling);
        self.scheduler.launch(&mut sampling);
        let full = self.rows.decodes() && sampling.len() == self.options.max_num_seqs;
        self.flights.push_back(Flight { pending, sampling, top, full });
        Ok(true)
    }

    /// The groups that have finished since the last call, in the order of finishing.
    pub fn finished(&mut self) -> Vec<Group> {
        std::mem::take(&mut self.finished)
    }

    /// Returns groups that were taken too early.
    pub(crate) fn put_back(&mut self, groups: Vec<Group>) {
        self.finished.extend(groups);
    }
}

/// The number of rows that a decode step of `rows` rows is padded to: where steps are replayed, few sizes are
/// kept.
fn padded_rows(replayed: bool, rows: usize) -> usize {
    match rows {
        _ if !replayed => rows,
        0..=2 => rows,
        3..=64 => rows.next_multiple_of(4),
        65..=256 => rows.next_multiple_of(16),
        _ => rows.next_multiple_of(64),
    }
}
