//! Scheduler and pages driven by random arrivals, ends, cancellations and preemptions, with a stand-in for
//! the model that writes into every slot which tokens led there: any page that is lost, shared wrongly or
//! overwritten shows. Steps are launched one after the other, or before the last one is committed.

use qurl_kernels::types::{Sampled, Token};
use qurl_model::rng::CounterRng;
use qurl_rollout::pages::PagePool;
use qurl_rollout::scheduler::{Limits, Scheduler};
use qurl_rollout::sequence::{Sequence, SequenceId};
use qurl_rollout::{Request, RequestId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// What the keys and values of a position depend on: the tokens up to it.
fn content(tokens: &[u32], position: usize) -> u64 {
    let hash = |hash: u64, &t: &u32| (hash ^ u64::from(t)).wrapping_mul(0x0000_0100_0000_01B3);
    tokens[..position + 1].iter().fold(position as u64, hash)
}

/// The token that a sequence samples at a position, whenever and however often it does. Few different ones,
/// so that wrongly shared pages could go unnoticed only if prefixes are really equal.
fn token(id: SequenceId, position: usize) -> u32 {
    Random(id.request.0 * 1000 + u64::from(id.sample) * 100_000 + position as u64).below(3) as u32
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
    /// Percentage of steps that are launched before the last one is committed.
    ahead: usize,
    /// Launched steps: who samples what.
    flights: VecDeque<Vec<(SequenceId, u32)>>,
    /// What the last launched step has sampled.
    sampled: Vec<u32>,
    taken: u64,
    void: u64,
    copies: usize,
    /// The prompts so far, where requests share what they have in common: then many begin as one of them.
    prompts: Option<Vec<Vec<u32>>>,
}

impl Case {
    fn new(limits: Limits, pages: usize, page_size: usize, ahead: usize) -> Case {
        Case {
            scheduler: Scheduler::new(limits, PagePool::new(pages, page_size)),
            limits,
            pages,
            store: vec![0; pages * page_size],
            ends: BTreeMap::new(),
            finished: BTreeSet::new(),
            requests: 0,
            ahead,
            flights: VecDeque::new(),
            sampled: Vec::new(),
            taken: 0,
            void: 0,
            copies: 0,
            prompts: None,
        }
    }

    fn random(random: &mut Random, ahead: usize) -> Case {
        let limits =
            Limits { max_num_seqs: 1 + random.below(8), max_num_batched_tokens: 1 + random.below(40) };
        Case::new(limits, 3 + random.below(20), 1 + random.below(6), ahead)
    }

    /// A sequence that ends at a length, which it knows beforehand or not.
    fn add(&mut self, id: SequenceId, prompt: &[u32], end: usize, known: bool) {
        let max_new = if known { end - prompt.len() } else { usize::MAX };
        let request = Arc::new(Request::new(prompt.to_vec(), max_new));
        let pages = self.scheduler.pool().empty();
        self.scheduler.add(Sequence::new(id, request, usize::MAX, pages));
        self.ends.insert(id, end);
    }

    /// A request whose every sequence fits into the pool alone.
    fn submit(&mut self, random: &mut Random) {
        let most = self.pages * self.scheduler.pool().page_size();
        let len = 1 + random.below(most);
        let mut prompt: Vec<u32> = (0..len).map(|_| random.below(3) as u32).collect();
        if let Some(prompts) = &mut self.prompts {
            if !prompts.is_empty() && random.below(4) > 0 {
                let other = &prompts[random.below(prompts.len())];
                let common = random.below(other.len().min(len) + 1);
                prompt[..common].copy_from_slice(&other[..common]);
            }
            prompts.push(prompt.clone());
        }
        let request = RequestId(self.requests);
        self.requests += 1;
        for sample in 0..1 + random.below(5) as u32 {
            let (end, known) = (len + 1 + random.below(most + 1 - len), random.below(2) == 0);
            self.add(SequenceId { request, sample }, &prompt, end, known);
        }
    }

    fn step(&mut self, random: &mut Random) {
        if self.flights.is_empty() {
            assert!(self.launch(), "nothing is scheduled");
        }
        if random.below(100) < self.ahead {
            self.launch();
        }
        self.commit();
        if self.scheduler.unfinished() == 0 {
            self.flights.clear();
        }
    }

    /// All tokens of a sequence up to its last row.
    fn tokens(&self, sequence: &Sequence) -> Vec<u32> {
        let mut tokens = Vec::new();
        sequence.copy_tokens(0..sequence.rows().end, &mut tokens);
        assert_eq!(tokens.len(), sequence.rows().end);
        let known = |(position, t): (usize, Token)| {
            let id = match t {
                Token::Id(id) => id,
                Token::Sampled(row) => self.sampled[row as usize],
            };
            let sampled = position >= sequence.prompt().len();
            assert!(
                !sampled || id == token(sequence.id(), position),
                "{:?} position {position}",
                sequence.id()
            );
            id
        };
        tokens.into_iter().enumerate().map(known).collect()
    }

    fn launch(&mut self) -> bool {
        self.scheduler.schedule();
        let rows: usize = self.scheduler.running().iter().map(|s| s.rows().len()).sum();
        if rows == 0 {
            return false;
        }
        for copy in self.scheduler.copies() {
            let size = self.store.len() / self.pages;
            let from = copy.from as usize * size;
            self.store.copy_within(from..from + size, copy.to as usize * size);
        }
        self.copies += self.scheduler.copies().len();
        self.check_plan();
        let scheduled = || self.scheduler.running().iter().filter(|s| !s.rows().is_empty());
        let tokens: Vec<Vec<u32>> = scheduled().map(|s| self.tokens(s)).collect();
        for (sequence, tokens) in scheduled().zip(&tokens) {
            for position in sequence.rows() {
                self.store[sequence.pages().slot(position) as usize] = content(tokens, position);
            }
        }
        // Attention reads every position up to the last row.
        for (sequence, tokens) in scheduled().zip(&tokens) {
            for position in 0..sequence.rows().end {
                let slot = sequence.pages().slot(position) as usize;
                assert_eq!(
                    self.store[slot],
                    content(tokens, position),
                    "{:?} position {position}",
                    sequence.id()
                );
            }
        }
        let samples = scheduled().filter(|s| s.samples()).map(|s| (s.id(), token(s.id(), s.len())));
        let samples: Vec<(SequenceId, u32)> = samples.collect();
        let mut sampling = Vec::new();
        self.scheduler.launch(&mut sampling);
        assert!(sampling.iter().eq(samples.iter().map(|(id, _)| id)));
        self.sampled = samples.iter().map(|&(_, token)| token).collect();
        self.flights.push_back(samples);
        true
    }

    fn commit(&mut self) {
        let flight = self.flights.pop_front().expect("a launched step");
        let sampling: Vec<SequenceId> = flight.iter().map(|&(id, _)| id).collect();
        let (ends, mut taken, mut ended) = (&self.ends, 0, Vec::new());
        let sampled = |sequence: &mut Sequence, place: usize| {
            assert_eq!(flight[place].0, sequence.id());
            sequence.push(Sampled { token: flight[place].1, logp: -1.0, entropy: 1.0 });
            taken += 1;
            sequence.known_len() >= ends[&sequence.id()]
        };
        self.scheduler.commit(&sampling, sampled, &mut ended);
        self.taken += taken;
        self.void += sampling.len() as u64 - taken;
        for sequence in ended {
            assert_eq!(sequence.known_len(), self.ends[&sequence.id()]);
            assert!(self.finished.insert(sequence.id()), "{:?} ends twice", sequence.id());
        }
    }

    fn check_plan(&self) {
        let running = self.scheduler.running();
        let rows: usize = running.iter().map(|s| s.rows().len()).sum();
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
        let held = held.chain(self.scheduler.shared());
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
    hold_pages([(0, false), (70, false), (100, false)]);
}

#[test]
fn no_page_leaks_or_is_shared_wrongly_between_requests() {
    hold_pages([(0, true), (70, true), (100, true)]);
}

/// Miri, which is a thousand times slower, sees some of the cases.
const SEEDS: u64 = if cfg!(miri) { 4 } else { 400 };

fn hold_pages(cases: [(usize, bool); 3]) {
    for (ahead, share) in cases {
        let (mut preemptions, mut copies, mut void, mut shared) = (0, 0, 0, 0);
        for seed in 0..SEEDS {
            let case = drive(seed, ahead, share);
            let counts = case.scheduler.counts();
            assert_eq!(counts.decode_tokens, case.taken, "seed {seed}");
            preemptions += counts.preemptions;
            copies += case.copies;
            void += case.void;
            shared += counts.shared_tokens;
        }
        if cfg!(miri) {
            continue; // too few to have seen everything
        }
        assert!(if share { shared > 10_000 } else { shared == 0 }, "{shared} tokens were shared");
        assert!(
            preemptions > 1000 && copies > 1000,
            "the test saw {preemptions} preemptions and {copies} copies"
        );
        // Cancelled sequences leave void rows only where a step is in flight between calls.
        assert!(if ahead == 0 { void == 0 } else { void > 1000 }, "ahead {ahead}: {void} void rows");
    }
}

/// Serves random requests until the last has ended.
fn drive(seed: u64, ahead: usize, share: bool) -> Case {
    let mut random = Random(seed);
    let mut case = Case::random(&mut random, ahead);
    if share {
        case.prompts = Some(Vec::new());
        case.scheduler.share_prefixes();
    }
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
        match case.scheduler.unfinished() {
            0 => case.flights.clear(),
            _ => case.step(&mut random),
        }
        case.check_pages();
        if share && random.below(200) == 0 {
            case.scheduler.forget_prefixes();
        }
        steps += 1;
        assert!(steps < 200_000, "seed {seed}: no end");
    }
    assert!(case.finished.iter().eq(case.ends.keys()), "seed {seed}: some sequence never ended");
    case.scheduler.forget_prefixes();
    assert_eq!(case.scheduler.pool().free(), case.pages, "seed {seed}: pages leaked");
    case
}

/// With enough memory a prompt is computed once for all of its samples, whatever the number of places.
#[test]
fn one_prefill_for_all_samples() {
    for (places, ahead) in [1, 2, 3, 8, 20].into_iter().flat_map(|places| [(places, 0), (places, 100)]) {
        for len in [1, 4, 5, 8, 9, 40] {
            let mut random = Random(places as u64);
            let limits = Limits { max_num_seqs: places, max_num_batched_tokens: 7 };
            let mut case = Case::new(limits, 300, 4, ahead);
            let prompt: Vec<u32> = (0..len).map(|i| i as u32 % 3).collect();
            for sample in 0..9 {
                let id = SequenceId { request: RequestId(0), sample };
                case.add(id, &prompt, len + 1 + sample as usize % 4, sample % 3 == 0);
            }
            while case.scheduler.unfinished() > 0 {
                case.step(&mut random);
                case.check_pages();
            }
            let counts = case.scheduler.counts();
            assert_eq!(
                counts.prefill_tokens,
                len as u64 - 1,
                "{places} places, prompt of {len}, ahead {ahead}"
            );
            assert_eq!(counts.decode_tokens, (0..9).map(|sample| 1 + sample % 4).sum::<u64>());
        }
    }
}

/// A pool of just as many pages as a sequence needs. The page that holds the end of the prompt is kept for
/// the next sample and for requests that begin alike, so the sample may not write to it, and there is none
/// for a copy: it begins with the whole pages before.
#[test]
fn a_sample_does_not_wait_for_a_copy_of_what_is_kept_for_it() {
    for ahead in [0, 100] {
        let limits = Limits { max_num_seqs: 1, max_num_batched_tokens: 20 };
        let (mut case, mut random) = (Case::new(limits, 2, 4, ahead), Random(1));
        case.scheduler.share_prefixes();
        for sample in 0..3 {
            case.add(SequenceId { request: RequestId(0), sample }, &[0, 1, 2, 0, 1, 2, 0, 1], 9, true);
        }
        while case.scheduler.unfinished() > 0 {
            case.step(&mut random);
            case.check_pages();
        }
        let counts = case.scheduler.counts();
        assert_eq!((counts.prefill_tokens, counts.shared_tokens), (7 + 3 + 3, 4 + 4), "ahead {ahead}");
    }
}

/// Lognormal lengths of 4k tokens in the mean in pages for about two thirds of the places. Admission counts
/// free pages, not the longest that a response may become: the places are used. And enough pages stay free
/// for those that run that few are preempted: computing again what was preempted stays small.
#[test]
fn long_responses_in_a_small_pool_are_seldom_computed_again() {
    let limits = Limits { max_num_seqs: 128, max_num_batched_tokens: 8192 };
    let (pages, page_size, prompt, most) = (6000, 64, 512, 16384);
    let mut scheduler = Scheduler::new(limits, PagePool::new(pages, page_size));
    let (mut ends, random) = (BTreeMap::new(), CounterRng::new(&[3]));
    for request in 0..64 {
        let asked = Arc::new(Request { n: 8, ..Request::new(vec![1; prompt], most) });
        for sample in 0..8 {
            let id = SequenceId { request: RequestId(request), sample };
            let normal = random.normal_at(request * 8 + u64::from(sample));
            let length = (4096f64.ln() - 0.5 + normal).exp().round() as usize;
            ends.insert(id, prompt + length.clamp(1, most));
            let pages = scheduler.pool().empty();
            scheduler.add(Sequence::new(id, asked.clone(), usize::MAX, pages));
        }
    }
    // Before the tail: as long as some wait.
    let (mut ended, mut steps, mut rows) = (Vec::new(), 0, 0);
    while scheduler.unfinished() > 0 {
        scheduler.schedule();
        let mut sampling = Vec::new();
        scheduler.launch(&mut sampling);
        if scheduler.unfinished() > limits.max_num_seqs {
            (steps, rows) = (steps + 1, rows + sampling.len());
        }
        let sampled = |sequence: &mut Sequence, _: usize| {
            sequence.push(Sampled { token: 1, logp: -1.0, entropy: 1.0 });
            sequence.known_len() >= ends[&sequence.id()]
        };
        scheduler.commit(&sampling, sampled, &mut ended);
        ended.clear();
    }
    let counts = scheduler.counts();
    let worst_case = pages * page_size / (prompt + most);
    assert!(rows / steps > 3 * worst_case, "{rows} rows in {steps} steps");
    let again = counts.prefill_tokens - 64 * (prompt as u64 - 1);
    assert!(again < counts.decode_tokens / 16, "{again} computed again of {counts:?}");
    assert!(counts.preemptions > 0, "the pool is not small: {counts:?}");
}
