//! Who computes what in the next step: continuous batching with chunked prefill, shared prompts and
//! preemption.
//!
//! Sequences are served in the order of their arrival, running ones first; a step has a budget of rows, and a
//! long prompt is computed in chunks of what is left of it. When pages run out, the latest arrived running
//! sequence gives all of its pages back and waits to be computed again from its tokens. So the earliest
//! unfinished sequence always gets on, and as one sequence alone fits into the budget (checked when it is
//! submitted), all finish.
//!
//! **Sharing.** The first sample of a request computes the prompt; its siblings wait (their places are kept)
//! and then share its pages. Where all running siblings have ended before, the pages of the prompt are kept
//! for the next one. A preempted sample shares again if it can. Pages kept for nobody running are the first
//! to go when pages run out.
//!
//! Requests can share, too ([`Scheduler::share_prefixes`]): whole pages at the beginning of a prompt that
//! were computed for another one are used again ([`Prefixes`]), and a request waits for a page that a running
//! one is just computing. They go before anybody is preempted.
//!
//! **Running ahead.** A step is planned, launched and, when its tokens have been read, committed; one more
//! may be planned and launched before that. Everything is computed in the order of launching, so what a
//! launched step writes can be planned with: a sibling shares a prompt that is still being computed, and a
//! page that a commit frees while a launched step writes to it is only given to later steps. Rows of
//! sequences that turn out to have ended are void: their tokens find nobody at the commit. As long as tokens
//! are coming, sequences may be about to end, so nobody is preempted then: a step that would need it is not
//! planned before the tokens have been read. So what is preempted has no tokens coming.

use crate::pages::{PageCopy, PagePool, Pages};
use crate::prefixes::Prefixes;
use crate::request::RequestId;
use crate::sequence::{Sequence, SequenceId};
use std::collections::{BTreeMap, HashSet, VecDeque};

/// Tokens that every running sequence can grow by, or half of what it may grow at most, before somebody has
/// to be preempted: pages for so many stay free when another sequence is admitted, but no more than a
/// sixteenth of all.
const GROWTH: usize = 256;

/// The size of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most running sequences.
    pub max_num_seqs: usize,
    /// Most rows of a step.
    pub max_num_batched_tokens: usize,
}

/// What was scheduled so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rows that only filled the cache.
    pub prefill_tokens: u64,
    /// Rows that a token was sampled from.
    pub decode_tokens: u64,
    /// How often a running sequence had to give back its pages.
    pub preemptions: u64,
    /// Tokens whose keys and values were found in pages of other requests.
    pub shared_tokens: u64,
}

/// All unfinished sequences.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: PagePool,
    /// Both in the order of arrival.
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    /// Prompts of requests without a running sample, kept for the waiting ones.
    kept: BTreeMap<RequestId, Pages>,
    /// Pages that requests may share, where they do.
    prefixes: Option<Prefixes>,
    copies: Vec<PageCopy>,
    counts: Counts,
}

/// Whole pages that a sequence can begin with.
enum Shared {
    /// These nodes; maybe none.
    Nodes(Vec<u64>),
    /// A running sequence of another request is computing one more.
    Coming,
}

/// Where a waiting sequence can get the beginning of its prompt from.
enum Prefix {
    /// From this running sibling.
    Running(usize),
    /// A running sibling is still computing it.
    Coming,
    /// From the kept pages.
    Kept,
    /// It must compute it itself.
    Absent,
}

/// Whether a running sequence can compute its rows.
enum Reservation {
    /// Its pages are there.
    Made,
    /// It had to be preempted itself.
    Preempted,
    /// Somebody would have to be preempted, but tokens are coming.
    NotYet,
}

impl Scheduler {
    /// No sequences yet; both limits are at least 1.
    pub fn new(limits: Limits, pool: PagePool) -> Scheduler {
        Scheduler {
            limits,
            pool,
            waiting: VecDeque::new(),
            running: Vec::new(),
            kept: BTreeMap::new(),
            prefixes: None,
            copies: Vec::new(),
            counts: Counts::default(),
        }
    }

    /// Lets requests share whole pages of prompts that begin alike, now and later.
    pub fn share_prefixes(&mut self) {
        self.prefixes = Some(Prefixes::default());
    }

    /// Forgets the pages that are kept for requests to come: the weights have changed.
    pub fn forget_prefixes(&mut self) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.clear();
        }
    }

    /// Pages that are kept for requests to come.
    pub fn shared(&self) -> impl Iterator<Item = &Pages> {
        self.prefixes.iter().flat_map(Prefixes::pages)
    }

    /// The pages.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// What was scheduled so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Sequences that have not ended.
    pub fn unfinished(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// Page contents to copy before the step is computed, in this order. A step that was not launched leaves
    /// them to the next one.
    pub fn copies(&self) -> &[PageCopy] {
        &self.copies
    }

    /// The sequences that hold pages, in the order of arrival; [`Sequence::rows`] says what they compute now.
    pub fn running(&self) -> &[Sequence] {
        &self.running
    }

    /// Pages that are kept for sequences to come.
    pub fn kept(&self) -> impl Iterator<Item = &Pages> {
        self.kept.values()
    }

    /// Pages that unfinished sequences hold; those that are kept for requests to come are free for them.
    pub fn pages_in_use(&self) -> usize {
        let own = self.running.iter().map(Sequence::pages).chain(self.kept.values());
        own.flat_map(Pages::ids).collect::<HashSet<_>>().len()
    }

    /// Takes a new sequence; it must be later in the order of arrival than all before.
    pub fn add(&mut self, sequence: Sequence) {
        self.enqueue(sequence);
    }

    fn enqueue(&mut self, sequence: Sequence) {
        let at = self.waiting.partition_point(|s| s.id() < sequence.id());
        self.waiting.insert(at, sequence);
    }

    /// Drops the sequences of a request.
    pub fn cancel(&mut self, request: RequestId) {
        self.waiting.retain(|s| s.id().request != request);
        self.running.retain(|s| s.id().request != request);
        self.kept.remove(&request);
    }

    /// Plans the next step. It may have no rows while tokens are coming, never otherwise.
    pub fn schedule(&mut self) {
        let mut budget = self.limits.max_num_batched_tokens;
        let preemptions = self.counts.preemptions;
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            sequence.scheduled = budget.min(sequence.uncomputed());
            let rows = sequence.rows();
            if rows.is_empty() {
                index += 1;
                continue;
            }
            match self.reserve_pages(index, rows.clone()) {
                Reservation::Made => {
                    budget -= rows.len();
                    index += 1;
                }
                Reservation::Preempted => {}
                Reservation::NotYet => return self.running.iter_mut().for_each(|s| s.scheduled = 0),
            }
        }
        if self.counts.preemptions == preemptions {
            self.admit(budget);
        }
    }

    /// Makes positions of a running sequence writable, at the cost of kept prompts and of later sequences.
    /// Sequences after it have not been scheduled yet.
    fn reserve_pages(&mut self, index: usize, rows: std::ops::Range<usize>) -> Reservation {
        while index < self.running.len() {
            if self.running[index].pages.prepare(rows.start, rows.end, &mut self.copies) {
                return Reservation::Made;
            }
            if self.evict() || self.kept.pop_last().is_some() {
                continue;
            }
            if self.running.iter().any(|s| s.coming > 0) {
                return Reservation::NotYet;
            }
            if let Some(mut victim) = self.running.pop() {
                victim.pages.truncate(0);
                victim.computed = 0;
                victim.scheduled = 0;
                self.counts.preemptions += 1;
                self.enqueue(victim);
            }
        }
        Reservation::Preempted
    }

    /// Gives up a page that is kept for requests to come.
    fn evict(&mut self) -> bool {
        self.prefixes.as_mut().is_some_and(|prefixes| prefixes.evict(&self.pool))
    }

    /// The whole pages of other requests that a sequence can begin with. Its own last token, whose row
    /// samples, is never among them; and a prompt that is to be scored has to be computed.
    fn in_common(&self, sequence: &Sequence) -> Shared {
        let alone = sequence.at_context || sequence.request().prompt_logprobs;
        let Some(prefixes) = self.prefixes.as_ref().filter(|_| !alone) else {
            return Shared::Nodes(Vec::new());
        };
        let (size, tokens) = (self.pool.page_size(), &sequence.prompt()[..sequence.shareable()]);
        let salt = sequence.salt();
        let nodes = prefixes.find(salt, tokens, size);
        let next = (nodes.len() + 1) * size;
        let comes = |other: &Sequence| {
            other.computed < next
                && !other.at_context
                && other.salt() == salt
                && other.prompt().get(..next) == tokens.get(..next)
        };
        match next <= tokens.len() && self.running.iter().any(comes) {
            true => Shared::Coming,
            false => Shared::Nodes(nodes),
        }
    }

    /// Lets waiting sequences run while there are places, rows and pages.
    fn admit(&mut self, mut budget: usize) {
        let mut places = self.limits.max_num_seqs.saturating_sub(self.running.len());
        let mut at = 0;
        while at < self.waiting.len() && places > 0 && budget > 0 {
            let sequence = &self.waiting[at];
            let (request, shared, len) = (sequence.id().request, sequence.shareable(), sequence.len());
            let prefix = self.prefix(sequence.id(), shared);
            // Pages for all of its tokens at once, though they may be computed in several steps; and one
            // where the last page of what it shares is partly filled and not its own.
            let need = self.pool.pages_for(len);
            let partly_filled = !shared.is_multiple_of(self.pool.page_size());
            let rest = need - self.pool.pages_for(shared);
            let need = match prefix {
                Prefix::Coming => {
                    (at, places) = (at + 1, places - 1);
                    continue;
                }
                Prefix::Running(_) => rest + usize::from(partly_filled),
                Prefix::Kept => rest + usize::from(partly_filled && self.is_kept_by_others(request)),
                Prefix::Absent => need,
            };
            // Held before anything is given up for the rest.
            let mut others = self.pool.empty();
            if let Prefix::Absent = prefix {
                match self.in_common(&self.waiting[at]) {
                    Shared::Coming => {
                        (at, places) = (at + 1, places - 1);
                        continue;
                    }
                    Shared::Nodes(nodes) => {
                        if let Some(prefixes) = &mut self.prefixes {
                            others = prefixes.fork(&nodes, &self.pool);
                        }
                    }
                }
            }
            if !self.has_room(need - others.ids().len(), request) {
                // With nobody running, only a copy of a kept page can be too much. Without what is kept for
                // it the sequence begins with whole pages of others, which it never writes to, and all other
                // pages can be given up.
                if self.running.is_empty() && self.kept.remove(&request).is_some() {
                    continue;
                }
                break;
            }
            let Some(mut sequence) = self.waiting.remove(at) else { break };
            match prefix {
                Prefix::Running(sibling) => sequence.pages = self.running[sibling].pages.fork(shared),
                Prefix::Kept => {
                    sequence.pages = self.kept.remove(&request).unwrap_or_else(|| self.pool.empty())
                }
                Prefix::Coming => {}
                Prefix::Absent => sequence.pages = others,
            }
            sequence.computed = match prefix {
                Prefix::Absent if !sequence.at_context => sequence.pages.ids().len() * self.pool.page_size(),
                _ => shared,
            };
            if matches!(prefix, Prefix::Absent) && !sequence.at_context {
                self.counts.shared_tokens += sequence.computed as u64;
                if sequence.tokens.is_empty() {
                    sequence.cached = sequence.computed;
                }
            }
            if !sequence.pages.prepare(sequence.computed, len, &mut self.copies) {
                // Not reached, as there were pages; without pages of its own the sequence simply waits on.
                sequence.pages.truncate(0);
                sequence.computed = 0;
                self.enqueue(sequence);
                break;
            }
            sequence.scheduled = budget.min(len - sequence.computed);
            (budget, places) = (budget - sequence.scheduled, places - 1);
            let place = self.running.partition_point(|s| s.id() < sequence.id());
            self.running.insert(place, sequence);
        }
    }

    /// Whether the last page that is kept for a request is also kept for requests that begin alike: it may
    /// hold all tokens of the prompt, or tokens of a sample that has ended.
    fn is_kept_by_others(&self, request: RequestId) -> bool {
        let last = self.kept.get(&request).and_then(|pages| pages.ids().last().copied());
        last.is_some_and(|page| self.pool.holders(page) > 1)
    }

    fn prefix(&self, id: SequenceId, shared: usize) -> Prefix {
        if shared == 0 {
            return Prefix::Absent;
        }
        let first = self.running.partition_point(|s| s.id().request < id.request);
        let siblings = self.running[first..].iter().take_while(|s| s.id().request == id.request);
        let mut coming = false;
        for (i, sibling) in siblings.enumerate() {
            if sibling.computed >= shared {
                return Prefix::Running(first + i);
            }
            coming = true;
        }
        match () {
            () if coming => Prefix::Coming,
            () if self.kept.contains_key(&id.request) => Prefix::Kept,
            () => Prefix::Absent,
        }
    }

    /// Whether a sequence that needs this many more pages may run. Some pages stay free for those that run
    /// already; where none does, prompts kept for other requests are given up.
    fn has_room(&mut self, need: usize, request: RequestId) -> bool {
        if !self.running.is_empty() {
            let growth = self.running.iter().map(|s| self.pool.pages_for(s.growth().min(GROWTH)));
            let total = self.pool.total();
            let need = need + growth.sum::<usize>().clamp(total / 100, total / 16);
            while need > self.pool.free() && self.evict() {}
            return need <= self.pool.free();
        }
        while need > self.pool.free() {
            if self.evict() {
                continue; // also what a kept prompt has let go
            }
            let Some(other) = self.kept.keys().rev().copied().find(|&other| other != request) else { break };
            self.kept.remove(&other);
        }
        need <= self.pool.free()
    }

    /// Takes note that the planned step has been launched. The sequences that sample in it, which are those
    /// all of whose tokens it computes, are added to `sampling` in the order of [`Scheduler::running`].
    pub fn launch(&mut self, sampling: &mut Vec<SequenceId>) {
        self.copies.clear();
        for sequence in self.running.iter_mut().filter(|s| s.scheduled > 0) {
            let samples = sequence.samples();
            self.counts.prefill_tokens += (sequence.scheduled - usize::from(samples)) as u64;
            let before = sequence.computed;
            sequence.launched(sampling.len() as u32);
            if let Some(prefixes) = self.prefixes.as_mut().filter(|_| !sequence.at_context) {
                // Whoever is planned later is computed later.
                let size = self.pool.page_size();
                let whole = |tokens: usize| tokens.min(sequence.prompt().len()) / size;
                let pages = whole(sequence.computed);
                if pages > whole(before) {
                    let prompt = &sequence.prompt()[..pages * size];
                    prefixes.insert(sequence.salt(), prompt, &sequence.pages, size);
                }
            }
            if samples {
                sampling.push(sequence.id());
            }
        }
    }

    /// Ends the oldest launched step, which `sampling` sampled in: `sampled` is called for every one of them
    /// that is still there, with its place among them, and says whether it has ended; those that have are
    /// moved to `finished`.
    pub fn commit(
        &mut self,
        sampling: &[SequenceId],
        mut sampled: impl FnMut(&mut Sequence, usize) -> bool,
        finished: &mut Vec<Sequence>,
    ) {
        let before = finished.len();
        let mut next = 0;
        // Both are in the order of arrival.
        finished.extend(self.running.extract_if(.., |sequence| {
            while sampling.get(next).is_some_and(|id| *id < sequence.id()) {
                next += 1;
            }
            if sampling.get(next) != Some(&sequence.id()) || sequence.coming == 0 {
                return false;
            }
            sequence.coming -= 1;
            self.counts.decode_tokens += 1;
            sampled(sequence, next)
        }));
        for sequence in &mut finished[before..] {
            let (request, shared) = (sequence.id().request, sequence.shareable());
            let mut pages = std::mem::replace(&mut sequence.pages, self.pool.empty());
            if let Some(prefixes) = self.prefixes.as_mut().filter(|_| !sequence.at_context) {
                // What was sampled may be the beginning of the next turn. The last token is not computed.
                let mut tokens = [sequence.prompt(), &sequence.tokens].concat();
                tokens.truncate(sequence.computed.min(tokens.len() - 1));
                prefixes.insert(sequence.salt(), &tokens, &pages, self.pool.page_size());
            }
            let first = |s: &Sequence| s.id().request < request;
            let belongs = |s: Option<&Sequence>| s.is_some_and(|s| s.id().request == request);
            let waits = belongs(self.waiting.get(self.waiting.partition_point(first)));
            let runs = belongs(self.running.get(self.running.partition_point(first)));
            if shared > 0 && waits && !runs && !self.kept.contains_key(&request) {
                pages.truncate(shared);
                self.kept.insert(request, pages);
            }
        }
    }
}
