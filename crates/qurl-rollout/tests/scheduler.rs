//! Scheduler and pages driven by random arrivals, ends, cancellations and preemptions, with a stand-in for the model that
//! writes into every slot which tokens led there: any page that is lost, shared wrongly or overwritten shows.

use qurl_kernels::backend::Sampled;
use qurl_rollout::pages::PagePool;
use qurl_rollout::scheduler::{Limits, Scheduler};
use qurl_rollout::sequence::{Sequence, SequenceId};
use qurl_rollout::{RequestId, SampleKey, Sampling};
use std::collections::{BTreeMap, BTreeSet};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// What the keys and values of a position depend on: the tokens up to it.
fn content(sequence: &Sequence, position: usize) -> u64 {
    let mut tokens = Vec::new();
    sequence.copy_tokens(0..position + 1, &mut tokens);
    tokens.iter().fold(position as u64, |hash, &t| (hash ^ u64::from(t)).wrapping_mul(0x0000_0100_0000_01B3))
}

struct Case {
    scheduler: Scheduler,
    limits: Limits,
    pages: usize,
    /// What every slot of the page store holds.
    store: Vec<u64>,
    /// Lengths at which the sequences end.
    ends: BTreeMap<SequenceId, usize>,
    finished: BTreeSet<SequenceId>,
    requests: u64,
}

impl Case {
    fn new(random: &mut Random) -> Case {
        let limits = Limits { max_num_seqs: 1 + random.below(8), max_num_batched_tokens: 1 + random.below(40) };
        let (pages, page_size) = (3 + random.below(20), 1 + random.below(6));
        Case {
            scheduler: Scheduler::new(limits, PagePool::new(pages, page_size)),
            limits,
            pages,
            store: vec![0; pages * page_size],
            ends: BTreeMap::new(),
            finished: BTreeSet::new(),
            requests: 0,
        }
    }

    /// A request whose every sequence fits into the pool alone.
    fn submit(&mut self, random: &mut Random) {
        let most = self.pages * self.scheduler.pool().page_size();
        let len = 1 + random.below(most);
        // Few different tokens, so that wrongly shared pages could go unnoticed only if prefixes are really equal.
        let prompt: Vec<u32> = (0..len).map(|_| random.below(3) as u32).collect();
        let request = RequestId(self.requests);
        self.requests += 1;
        for sample in 0..1 + random.below(5) as u32 {
            let id = SequenceId { request, sample };
            let pages = self.scheduler.pool().empty();
            let key = SampleKey::default();
            self.scheduler.add(Sequence::new(id, prompt.as_slice().into(), Sampling::default(), key, pages));
            self.ends.insert(id, len + 1 + random.below(most + 1 - len));
        }
    }

    fn step(&mut self, random: &mut Random) {
        self.scheduler.schedule();
        for copy in self.scheduler.copies() {
            let size = self.store.len() / self.pages;
            let from = copy.from as usize * size;
            self.store.copy_within(from..from + size, copy.to as usize * size);
        }
        self.check_plan();
        for sequence in self.scheduler.running() {
            for position in sequence.rows() {
                self.store[sequence.pages().slot(position) as usize] = content(sequence, position);
            }
        }
        // Attention reads every position up to the last row.
        for sequence in self.scheduler.running().iter().filter(|s| !s.rows().is_empty()) {
            for position in 0..sequence.rows().end {
                let slot = sequence.pages().slot(position) as usize;
                assert_eq!(self.store[slot], content(sequence, position), "{:?} position {position}", sequence.id());
            }
        }
        let ends = &self.ends;
        let mut ended = Vec::new();
        let drawn = |sequence: &mut Sequence| {
            sequence.push(Sampled { token: random.below(3) as u32, logp: -1.0, entropy: 1.0 });
            sequence.len() >= ends[&sequence.id()]
        };
        self.scheduler.commit(drawn, &mut ended);
        for sequence in ended {
            assert_eq!(sequence.len(), self.ends[&sequence.id()]);
            assert!(self.finished.insert(sequence.id()), "{:?} ends twice", sequence.id());
        }
    }

    fn check_plan(&self) {
        let running = self.scheduler.running();
        let rows: usize = running.iter().map(|s| s.rows().len()).sum();
        assert!(rows > 0, "nothing is scheduled");
        assert!(rows <= self.limits.max_num_batched_tokens && running.len() <= self.limits.max_num_seqs);
        assert!(running.is_sorted_by_key(Sequence::id));
        let mut written = BTreeSet::new();
        for sequence in running {
            for position in sequence.rows() {
                let slot = sequence.pages().slot(position);
                assert!(written.insert(slot), "slot {slot} is written twice");
                let page = slot as usize / self.scheduler.pool().page_size();
                assert_eq!(self.scheduler.pool().holders(page as u32), 1, "a shared page is written");
            }
        }
    }

    /// Every page is free or held by exactly those that list it.
    fn check_pages(&self) {
        let pool = self.scheduler.pool();
        let mut holders = vec![0; self.pages];
        let held = self.scheduler.running().iter().map(Sequence::pages).chain(self.scheduler.kept());
        for &page in held.flat_map(|pages| pages.ids()) {
            holders[page as usize] += 1;
        }
        for (page, &count) in holders.iter().enumerate() {
            assert_eq!(pool.holders(page as u32), count, "page {page}");
        }
        assert_eq!(pool.free(), holders.iter().filter(|&&count| count == 0).count());
        assert!(pool.peak() <= self.pages);
    }
}

#[test]
fn no_page_leaks_or_is_shared_wrongly() {
    let (mut preemptions, mut copies) = (0, 0);
    for seed in 0..400 {
        let mut random = Random(seed);
        let mut case = Case::new(&mut random);
        let arrivals = 1 + random.below(12);
        let mut steps = 0;
        while case.requests < arrivals as u64 || case.scheduler.unfinished() > 0 {
            if case.requests < arrivals as u64 && (case.scheduler.unfinished() == 0 || random.below(4) == 0) {
                case.submit(&mut random);
            }
            if random.below(60) == 0 {
                let request = RequestId(random.below(case.requests.max(1) as usize) as u64);
                case.scheduler.cancel(request);
                case.ends.retain(|id, _| id.request != request);
                case.finished.retain(|id| id.request != request);
            }
            if case.scheduler.unfinished() > 0 {
                case.step(&mut random);
                copies += case.scheduler.copies().len();
            }
            case.check_pages();
            steps += 1;
            assert!(steps < 200_000, "seed {seed}: no end");
        }
        assert!(case.finished.iter().eq(case.ends.keys()), "seed {seed}: some sequence never ended");
        assert_eq!(case.scheduler.pool().free(), case.pages, "seed {seed}: pages leaked");
        preemptions += case.scheduler.counts().preemptions;
    }
    assert!(preemptions > 1000 && copies > 1000, "the test saw {preemptions} preemptions and {copies} copies");
}

/// With enough memory a prompt is computed once for all of its samples, whatever the number of places.
#[test]
fn one_prefill_for_all_samples() {
    for places in [1, 2, 3, 8, 20] {
        for len in [1, 4, 5, 8, 9, 40] {
            let mut random = Random(places as u64);
            let limits = Limits { max_num_seqs: places, max_num_batched_tokens: 7 };
            let (pages, page_size) = (300, 4);
            let mut case = Case {
                scheduler: Scheduler::new(limits, PagePool::new(pages, page_size)),
                limits,
                pages,
                store: vec![0; pages * page_size],
                ends: BTreeMap::new(),
                finished: BTreeSet::new(),
                requests: 0,
            };
            let prompt: Vec<u32> = (0..len).map(|i| i as u32 % 3).collect();
            for sample in 0..9 {
                let id = SequenceId { request: RequestId(0), sample };
                let pages = case.scheduler.pool().empty();
                let key = SampleKey::default();
                case.scheduler.add(Sequence::new(id, prompt.as_slice().into(), Sampling::default(), key, pages));
                case.ends.insert(id, len + 1 + sample as usize % 4);
            }
            while case.scheduler.unfinished() > 0 {
                case.step(&mut random);
                case.check_pages();
            }
            let counts = case.scheduler.counts();
            assert_eq!(counts.prefill_tokens, len as u64 - 1, "{places} places, prompt of {len}");
            assert_eq!(counts.decode_tokens, (0..9).map(|sample| 1 + sample % 4).sum::<u64>());
        }
    }
}
