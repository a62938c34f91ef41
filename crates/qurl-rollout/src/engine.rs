//! The engine: requests in, one step after the other, finished groups out.
//!
//! A step is launched (schedule, forward, draw) and committed (its tokens are read). On a device that computes while the
//! host does something else, the next step is launched before the last one is committed, so that the device never waits for
//! the host: tokens that are not known yet are named by the rows that draw them. What is computed for a sequence that turns
//! out to have ended is dropped. Samples do not depend on it, as they do not depend on anything else around them.
//!
//! The buffers of a step are kept and filled again, so a decode step costs the kernels and little else. Weights change only
//! between requests, and every sample carries the version it was made with.

mod check;
mod commit;
mod options;

pub use options::EngineOptions;

use crate::error::RolloutError;
use crate::pages::PagePool;
use crate::request::{FinishReason, Group, Request, RequestId, Sample, WeightVersion};
use crate::rows::StepRows;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceId};
use qurl_kernels::{Backend, BackendError};
use qurl_model::Params;
use qurl_model::compute::{Inference, Network, Targets};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Turns tokens into text, for stop strings.
pub type TextDecoder = Arc<dyn Fn(&[u32]) -> String + Send + Sync>;

/// Engines so far.
static ENGINES: AtomicU64 = AtomicU64::new(0);

/// What an engine has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Tokens computed only for their keys and values: prompts (all but their last token), and what was preempted.
    pub prefill_tokens: u64,
    /// Tokens computed to draw the next one, which was taken.
    pub decode_tokens: u64,
    /// How often a sequence gave back its pages and was computed again.
    pub preemptions: u64,
    /// Steps launched.
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
    request: Arc<Request>,
    prompt_logprobs: Vec<f32>,
    samples: Vec<Option<Sample>>,
}

/// A step that has been launched.
struct Flight<B: Backend> {
    /// Its drawn tokens on their way, if it draws any.
    asked: Option<B::Asked>,
    /// The sequences that they are for.
    drawing: Vec<SequenceId>,
}

/// Generates samples with one network.
pub struct Engine<B: Backend> {
    backend: Arc<B>,
    /// Unlike that of any other engine: whose steps a backend has seen.
    identity: u64,
    network: Network<B>,
    /// `None` after a load that failed half-way.
    weights: Option<WeightVersion>,
    options: EngineOptions,
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
    /// Whether a step is launched before the last one is committed.
    ahead: bool,
    /// Launched steps, the oldest first: between calls none, or one where the engine runs ahead.
    flights: VecDeque<Flight<B>>,
    // Buffers of a step.
    rows: StepRows,
    ended: Vec<Sequence>,
    emitted: Vec<Emitted>,
    finished: Vec<Group>,
    /// Requests that failed beside another one, and why; the next steps say so.
    failed: VecDeque<(RequestId, RolloutError)>,
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
        let (page_bytes, pages) = options.pages(&*backend, &network)?;
        Ok(Engine {
            options,
            page_bytes,
            identity: ENGINES.fetch_add(1, Ordering::Relaxed),
            kv: options.page_store(&*backend, &network, pages)?,
            work: Inference::new(
                &*backend,
                &network,
                max_num_batched_tokens.max(backend.bucket(max_num_seqs)),
            )?,
            scheduler: options.scheduler(pages),
            ahead: backend.runs_ahead(),
            flights: VecDeque::new(),
            backend,
            network,
            weights: Some(weights),
            decoder: None,
            pending: BTreeMap::new(),
            prompts_are_scored: false,
            next_request: 0,
            steps: 0,
            rows: StepRows::default(),
            ended: Vec::new(),
            emitted: Vec::new(),
            finished: Vec::new(),
            failed: VecDeque::new(),
        })
    }

    /// Gives the engine a way to make text, which requests with stop strings need.
    pub fn set_text_decoder(&mut self, decoder: TextDecoder) {
        self.decoder = Some(decoder);
    }

    /// Whether the engine launches a step before it has read the tokens of the last one; at first as the backend likes it.
    /// It changes when tokens come out, not which.
    pub fn set_ahead(&mut self, ahead: bool) {
        self.ahead = ahead;
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

    /// Sequences that have not ended, and requests whose failure has not been told.
    pub fn unfinished(&self) -> usize {
        self.scheduler.unfinished() + self.failed.len()
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

    /// Lets `work` use the engine, its memory included, with another network of the same model. Requests that `work`
    /// leaves in flight are dropped. Refused while requests are in flight.
    ///
    /// # Panics
    /// If the network is of another model.
    pub fn with_network<T>(
        &mut self,
        network: &mut Network<B>,
        weights: WeightVersion,
        work: impl FnOnce(&mut Engine<B>) -> T,
    ) -> Result<T, RolloutError> {
        let own = self.weights;
        self.swap_network(network, Some(weights))?;
        let result = work(self);
        let left: Vec<RequestId> =
            self.pending.keys().copied().chain(self.failed.iter().map(|(id, _)| *id)).collect();
        left.into_iter().for_each(|id| self.cancel(id));
        self.swap_network(network, own)?;
        Ok(result)
    }

    fn swap_network(
        &mut self,
        other: &mut Network<B>,
        weights: Option<WeightVersion>,
    ) -> Result<(), RolloutError> {
        if self.unfinished() > 0 {
            return Err(RolloutError::Busy { unfinished: self.unfinished() });
        }
        let (old, new) = (*self.network.options(), *other.options());
        assert!(
            self.network.config() == other.config() && old.positions == new.positions,
            "a network of another model"
        );
        self.weights = None;
        std::mem::swap(&mut self.network, other);
        if old.kv_format != new.kv_format {
            // The same bytes as pages of another format. The old ones go first, so that both are never there at once.
            let (page_bytes, pages) = self.options.pages(&*self.backend, &self.network)?;
            self.kv.clear();
            self.kv = self.options.page_store(&*self.backend, &self.network, pages)?;
            self.page_bytes = page_bytes;
            self.scheduler = self.options.scheduler(pages);
            // Recorded steps know the old addresses.
            self.identity = ENGINES.fetch_add(1, Ordering::Relaxed);
        }
        self.weights = weights;
        Ok(())
    }

    /// Queues a request.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RolloutError> {
        self.check(&request)?;
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let request = Arc::new(request);
        let context = self.network.options().positions;
        for sample in 0..request.n as u32 {
            let id = SequenceId { request: id, sample };
            let pages = self.scheduler.pool().empty();
            self.scheduler.add(Sequence::new(id, request.clone(), context, pages));
        }
        let samples = (0..request.n).map(|_| None).collect();
        let pending = Pending { request, prompt_logprobs: Vec::new(), samples };
        self.prompts_are_scored &= !self.pending.is_empty();
        self.prompts_are_scored |= pending.request.prompt_logprobs;
        self.pending.insert(id, pending);
        Ok(id)
    }

    /// Drops a request and what was drawn for it. Unknown or finished requests are left alone.
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

    /// One step: every scheduled sequence computes some tokens, and those that have computed all of theirs draw one
    /// more. Returns the drawn tokens; none if nothing is in flight. After [`RolloutError::BadLogits`] the request that
    /// it names is gone and the others go on.
    pub fn step(&mut self) -> Result<&[Emitted], RolloutError> {
        self.emitted.clear();
        if let Some((_, error)) = self.failed.pop_front() {
            return Err(error);
        }
        if self.unfinished() == 0 {
            return Ok(&self.emitted);
        }
        if self.flights.is_empty() && !self.launch()? {
            return Err(RolloutError::Stuck { unfinished: self.unfinished() });
        }
        if self.ahead && self.flights.len() == 1 {
            self.launch()?;
        }
        if let Some(flight) = self.flights.pop_front() {
            let committed = self.commit(flight);
            self.forget_void();
            committed?;
        }
        Ok(&self.emitted)
    }

    /// Plans a step and issues it; false where there is nothing to compute as long as tokens are coming.
    fn launch(&mut self) -> Result<bool, RolloutError> {
        self.scheduler.schedule();
        let backend = &*self.backend.clone();
        self.rows.fill(self.scheduler.running(), self.scheduler.pool(), |rows| backend.bucket(rows));
        if self.rows.batch.rows() == 0 {
            return Ok(false);
        }
        for copy in self.scheduler.copies() {
            for kv in &mut self.kv {
                backend.kv_copy_page(kv, copy.from as usize, copy.to as usize);
            }
        }
        let Engine { work, network, kv, rows, .. } = self;
        backend.step(self.identity, &mut |extent| {
            work.forward_step(backend, network, &rows.batch, kv, extent);
            if !rows.draws.is_empty() {
                work.draw(backend, network, &rows.draw_rows, &rows.draws);
            }
        });
        self.steps += 1;
        let asked = match self.rows.drawing {
            0 => None,
            drawing => Some(self.work.ask_drawn(backend, drawing)?),
        };
        self.score_prompts()?;
        let mut drawing = Vec::with_capacity(self.rows.drawing);
        self.scheduler.launch(&mut drawing);
        self.flights.push_back(Flight { asked, drawing });
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

    /// Log-probs of the prompts that asked for them, as far as this step has computed them for the first time. They are read
    /// at once, since the next step overwrites its rows.
    fn score_prompts(&mut self) -> Result<(), RolloutError> {
        if !self.prompts_are_scored {
            return Ok(());
        }
        let scheduled = self.scheduler.running().iter().filter(|s| !s.rows().is_empty());
        for (sequence, span) in scheduled.zip(&self.rows.batch.spans) {
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
}
