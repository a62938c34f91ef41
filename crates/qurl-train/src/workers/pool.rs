//! The trainer's side: which versions there are, which prompts are to be sampled, who has them, what came
//! back.
//!
//! A prompt is open, leased to a worker until a time, taken by the trainer itself, or answered. A worker that
//! says nothing for longer than a lease loses its prompts, which are open again; whoever answers first
//! answers, and what comes later is dropped. A worker whose answer cannot be one, or is found to be another
//! than the trainer computes, is told nothing more, and what it has sent since the last step is sampled again.
//! If rollouts of his were used before unchecked, the run's bits are not what they should be: that ends the
//! run ([`PoolError::Lied`]).

use super::check::check;
use super::delta;
use super::protocol::{Answer, Ask, Hello, Report, VersionName, Welcome, Work};
use super::spot::Spot;
use qurl_model::ModelConfig;
use qurl_model::compute::NetworkOptions;
use qurl_rollout::{EngineOptions, Group, Request, RequestId, Sample, WeightVersion};
use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a worker that asks for work is kept waiting for some.
const LONG_POLL: Duration = Duration::from_secs(2);
/// How often the trainer looks whether leases have run out or it was told to stop.
const LOOK: Duration = Duration::from_millis(100);

/// What happens where no worker is there.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Without {
    /// The trainer samples by itself.
    #[default]
    Trainer,
    /// It waits for one.
    Wait,
}

/// Settings of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolOptions {
    /// Program and version, which workers must have, too.
    pub program: String,
    /// What the trainer computes with.
    pub kind: String,
    /// Whether workers may compute with something else: samples are then not the same bits.
    pub any_device: bool,
    /// How long a worker may be silent.
    pub lease: Duration,
    /// The share of samples that are computed again.
    pub spot_check: f64,
    /// What happens where no worker is there.
    pub without: Without,
    /// Versions that are kept for workers to be behind by.
    pub versions: usize,
    /// Threads that compress weights.
    pub threads: usize,
}

/// Why a worker is not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It cannot join this run, or has been sent away.
    #[error("{0}")]
    Unfit(String),
    /// It is not known (any more): it may join again.
    #[error("unknown worker: join again")]
    Unknown,
    /// What it wants is not there (any more).
    #[error("{0}")]
    Gone(String),
}

/// Why rollouts could not be collected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// A worker's rollouts are not what its weights sample, and others of his were used.
    #[error(
        "worker {name} lied: {what}; rollouts of it that were not computed again were used in steps {steps:?}: \
         resume from a checkpoint before them"
    )]
    Lied {
        /// Its name.
        name: String,
        /// What was found.
        what: String,
        /// The steps' random-number keys.
        steps: Vec<u64>,
    },
    /// The run was told to end.
    #[error("stopped while waiting for rollout workers")]
    Stopped,
}

struct Version {
    name: VersionName,
    bytes: Arc<Vec<u8>>,
}

enum Place {
    Open,
    /// A worker has it until then.
    Leased(u64, Instant),
    /// The trainer has it.
    Own,
    /// A worker has answered; the flags are the samples that are still to be computed again.
    Answered(u64, Vec<Sample>, BTreeSet<u32>),
    Done(Vec<Sample>),
}

struct Prompt {
    request: Request,
    place: Place,
    /// The worker that answered, where not all of it was computed again.
    unchecked: Option<u64>,
    /// Only the trainer takes it.
    own_only: bool,
}

struct Batch {
    version: u64,
    prompts: Vec<Prompt>,
}

struct Peer {
    name: String,
    seen: Instant,
    sent_away: Option<String>,
    /// Whether it knows that the run is over.
    told_end: bool,
    /// Steps that used rollouts of it which were not computed again.
    unchecked: BTreeSet<u64>,
}

#[derive(Default)]
struct State {
    versions: BTreeMap<u64, Version>,
    /// Changes between versions, made when they are asked for.
    deltas: BTreeMap<(u64, u64), Arc<Vec<u8>>>,
    /// By the step of the random numbers' key.
    batches: BTreeMap<u64, Batch>,
    peers: BTreeMap<u64, Peer>,
    notes: Vec<String>,
    ended: bool,
}

/// Versions, prompts, leases and answers.
pub struct Pool {
    options: PoolOptions,
    config: ModelConfig,
    network: NetworkOptions,
    engine: EngineOptions,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether waiting is to end, told whether nobody is there who could end it.
    stop: Box<dyn Fn(bool) -> bool + Send + Sync>,
    /// Says which samples are computed again, and names workers: no worker can know it, and no bit of the run
    /// depends on it.
    random: RandomState,
}

impl Pool {
    /// For workers that sample with networks like this one; `stop` says when waiting is to end, and is told
    /// whether nobody is there who could end it.
    pub fn new(
        options: PoolOptions,
        config: &ModelConfig,
        network: NetworkOptions,
        engine: EngineOptions,
        stop: impl Fn(bool) -> bool + Send + Sync + 'static,
    ) -> Pool {
        Pool {
            options,
            config: config.clone(),
            network,
            engine,
            state: Mutex::default(),
            changed: Condvar::new(),
            stop: Box::new(stop),
            random: RandomState::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Whether devices of workers compute the same bits as the trainer's.
    pub fn same_kind(&self) -> bool {
        !self.options.any_device
    }

    /// What people should know, since the last call.
    pub fn notes(&self) -> Vec<String> {
        std::mem::take(&mut self.state().notes)
    }

    /// Workers that have been heard of within a lease.
    pub fn present(&self) -> usize {
        self.state().present(self.options.lease)
    }

    /// Tells workers that the run is over.
    pub fn end(&self) {
        self.state().ended = true;
        self.changed.notify_all();
    }

    /// Workers that do not know yet that the run is over.
    pub fn waiting(&self) -> usize {
        let state = self.state();
        let here = |peer: &&Peer| {
            !peer.told_end && peer.sent_away.is_none() && peer.seen.elapsed() < self.options.lease
        };
        if state.ended { state.peers.values().filter(here).count() } else { 0 }
    }

    // The trainer.

    /// Whether a version is there.
    pub fn has(&self, version: u64) -> bool {
        self.state().versions.contains_key(&version)
    }

    /// Workers can have this version from now on.
    pub fn publish(&self, weights: WeightVersion, bytes: Vec<u8>) {
        let name = VersionName::of(weights, &bytes);
        let mut state = self.state();
        state.versions.insert(weights.version, Version { name, bytes: Arc::new(bytes) });
        state.forget_versions(self.options.versions);
        drop(state);
        self.changed.notify_all();
    }

    /// Lets workers sample prompts, which [`Pool::collect`] waits for later. The key of their random numbers
    /// names the batch: prompts that are there already stay, unless others are meant.
    pub fn submit(&self, version: u64, requests: &[Request]) {
        let Some(first) = requests.first() else { return };
        let mut state = self.state();
        if state.batches.get(&first.key.step).is_some_and(|batch| batch.is(version, requests)) {
            return;
        }
        let prompt = |request: &Request| Prompt {
            request: request.clone(),
            place: Place::Open,
            unchecked: None,
            own_only: false,
        };
        let batch = Batch { version, prompts: requests.iter().map(prompt).collect() };
        state.batches.insert(first.key.step, batch);
        drop(state);
        self.changed.notify_all();
    }

    /// The samples of prompts, in their order. Where no worker is there (or a prompt failed at one), `own`
    /// samples some; `verify` computes samples again and says what is wrong with each.
    pub fn collect<E: From<PoolError>>(
        &self,
        version: u64,
        requests: &[Request],
        mut own: impl FnMut(&[Request]) -> Result<Vec<Group>, E>,
        mut verify: impl FnMut(&[Spot]) -> Result<Vec<Option<String>>, E>,
    ) -> Result<Vec<Group>, E> {
        let Some(key) = requests.first().map(|first| first.key.step) else { return Ok(Vec::new()) };
        self.submit(version, requests);
        // Enough for the trainer's engine, and no more, so that workers that come find something to do.
        let at_once = (self.engine.max_num_seqs / requests[0].n.max(1)).max(1);
        loop {
            let mut state = self.state();
            state.expire();
            let nobody = state.present(self.options.lease) == 0;
            if (self.stop)(nobody && self.options.without == Without::Wait) {
                return Err(PoolError::Stopped.into());
            }
            let spots = state.spots(key);
            if !spots.is_empty() {
                drop(state);
                let wrong = verify(&spots)?;
                self.judge(key, &spots, wrong)?;
                continue;
            }
            let Some(batch) = state.batches.get_mut(&key) else { return Ok(Vec::new()) };
            if batch.prompts.iter().all(|prompt| matches!(prompt.place, Place::Done(_))) {
                return Ok(state.take(key));
            }
            let alone = nobody && self.options.without == Without::Trainer;
            let taken = state.take_own(key, alone, at_once);
            if taken.is_empty() {
                drop(self.wait(state, LOOK));
                continue;
            }
            drop(state);
            let groups = own(&taken)?;
            let mut state = self.state();
            for group in groups {
                if let Some(prompt) = state.prompt(key, group.key.prompt) {
                    (prompt.place, prompt.unchecked) = (Place::Done(group.samples), None);
                }
            }
        }
    }

    /// Takes note of what computing again has shown.
    fn judge(&self, key: u64, spots: &[Spot], wrong: Vec<Option<String>>) -> Result<(), PoolError> {
        let mut state = self.state();
        for (spot, wrong) in spots.iter().zip(wrong) {
            let number = spot.number;
            let Some(prompt) = state.prompt(key, spot.request.key.prompt) else { continue };
            let Place::Answered(worker, samples, left) = &mut prompt.place else { continue };
            if samples.get(number as usize) != Some(&spot.sample) {
                continue; // another answer meanwhile
            }
            left.remove(&number);
            let worker = *worker;
            if let Some(what) = wrong {
                let at = format!("step {key}, prompt {}, sample {number}: {what}", spot.request.key.prompt);
                state.send_away(worker, at)?;
            }
        }
        state.settle(key);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    // Workers.

    /// A worker wants to join.
    pub fn join(&self, hello: &Hello) -> Result<Welcome, Refused> {
        let Hello { program, kind, name } = hello;
        if *program != self.options.program {
            let own = &self.options.program;
            return Err(Refused::Unfit(format!("the trainer is {own}, the worker {program}: use the same")));
        }
        if *kind != self.options.kind && !self.options.any_device {
            let own = &self.options.kind;
            return Err(Refused::Unfit(format!(
                "the trainer computes on {own}, the worker on {kind}, which need not have the same bits; \
                 rollout.workers.any_device = true allows it"
            )));
        }
        let mut state = self.state();
        if state.ended {
            return Err(Refused::Gone("the run is over".to_string()));
        }
        let mut next = state.peers.len() as u64;
        let number = loop {
            let number = self.random.hash_one(("worker", next));
            if !state.peers.contains_key(&number) {
                break number;
            }
            next += 1;
        };
        state.notes.push(format!("worker {name} has joined"));
        let peer = Peer {
            name: name.clone(),
            seen: Instant::now(),
            sent_away: None,
            told_end: false,
            unchecked: BTreeSet::new(),
        };
        state.peers.insert(number, peer);
        drop(state);
        self.changed.notify_all();
        let EngineOptions { kv_bytes, page_size, max_num_seqs, max_num_batched_tokens, .. } = self.engine;
        Ok(Welcome {
            worker: number,
            config: self.config.to_json().to_string(),
            network: self.network,
            engine: [kv_bytes, page_size, max_num_seqs, max_num_batched_tokens],
            lease_s: self.options.lease.as_secs().max(1),
        })
    }

    /// Prompts for a worker; waits a moment for some where it has nothing to do.
    pub fn work(&self, ask: &Ask) -> Result<Work, Refused> {
        let until = Instant::now() + LONG_POLL;
        let mut state = self.state();
        loop {
            state.touch(ask.worker, self.options.lease)?;
            state.expire();
            if state.ended {
                state.peers.entry(ask.worker).and_modify(|peer| peer.told_end = true);
                return Ok(Work::End);
            }
            if let Some(work) = state.hand_out(ask, self.options.lease) {
                return Ok(work);
            }
            let now = Instant::now();
            if ask.busy || now >= until {
                return Ok(Work::Nothing);
            }
            state = self.wait(state, (until - now).min(LOOK));
        }
    }

    /// The bytes of a version for a worker that has the version `have` (and its hash), or none.
    pub fn weights(
        &self,
        worker: u64,
        version: u64,
        have: Option<(u64, u128)>,
    ) -> Result<Arc<Vec<u8>>, Refused> {
        let mut state = self.state();
        state.touch(worker, self.options.lease)?;
        let gone = || Refused::Gone(format!("version {version} of the weights is not there"));
        let wanted = state.versions.get(&version).ok_or_else(gone)?.bytes.clone();
        let base = have.and_then(|(number, hash)| {
            let base = state.versions.get(&number)?;
            (base.name.hash() == hash).then(|| (number, base.bytes.clone()))
        });
        let pair = (base.as_ref().map_or(0, |(number, _)| *number), version);
        if let Some(there) = state.deltas.get(&pair) {
            return Ok(there.clone());
        }
        drop(state);
        let base = base.as_ref().map(|(_, bytes)| bytes.as_slice());
        let sent = Arc::new(delta::encode(base, &wanted, self.options.threads));
        let mut state = self.state();
        // A whole version is there already; to keep it twice would take memory for a copy.
        if base.is_some() && state.versions.contains_key(&version) {
            state.deltas.insert(pair, sent.clone());
        }
        state.touch(worker, self.options.lease)?;
        Ok(sent)
    }

    /// What a worker has made. Answers that nobody waits for any more are dropped; one that cannot be an
    /// answer is refused with a reason, and its worker sent away.
    pub fn report(&self, report: Report) -> Result<(), Refused> {
        let Report { worker, version, answers, failed } = report;
        let mut state = self.state();
        state.touch(worker, self.options.lease)?;
        state.renew(worker, self.options.lease);
        let sizes = (self.config.vocab_size, self.network.positions);
        for Answer { key, samples } in answers {
            let own = state.batches.get(&key.step).map(|batch| batch.version);
            let Some(expected) = own.and_then(|own| Some(state.versions.get(&own)?.name)) else { continue };
            let Some(prompt) = state.prompt(key.step, key.prompt) else { continue };
            if matches!(prompt.place, Place::Answered(..) | Place::Done(_) | Place::Own) {
                continue; // too late
            }
            let wrong = match () {
                () if key != prompt.request.key => {
                    Err(format!("the key {key:?}, expected {:?}", prompt.request.key))
                }
                () if version != expected => Err(format!(
                    "made with {} of hash {:032x}, expected {} of hash {:032x}",
                    version.weights,
                    version.hash(),
                    expected.weights,
                    expected.hash()
                )),
                () => check(&prompt.request, &samples, expected.weights, sizes),
            };
            if let Err(what) = wrong {
                let what = format!("step {}, prompt {}: {what}", key.step, key.prompt);
                // Nothing of this was used, and a mistake is not yet a lie.
                _ = state.send_away(worker, what.clone());
                self.changed.notify_all();
                return Err(Refused::Unfit(what));
            }
            let chosen = |number: &u32| {
                let drawn = self.random.hash_one((key.step, key.prompt, *number, worker));
                (drawn >> 11) as f64 / (1u64 << 53) as f64 >= 1.0 - self.options.spot_check
            };
            let spots: BTreeSet<u32> = (0..samples.len() as u32).filter(chosen).collect();
            prompt.unchecked = (spots.len() < samples.len()).then_some(worker);
            prompt.place = match spots.is_empty() {
                true => Place::Done(samples),
                false => Place::Answered(worker, samples, spots),
            };
        }
        if let Some((key, why)) = failed {
            let name = state.name(worker);
            if let Some(prompt) = state
                .prompt(key.step, key.prompt)
                .filter(|p| matches!(p.place, Place::Leased(w, _) if w == worker))
            {
                (prompt.place, prompt.own_only) = (Place::Open, true);
                state.notes.push(format!(
                    "worker {name} could not sample prompt {} of step {}: {why}",
                    key.prompt, key.step
                ));
            }
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }
}

impl Batch {
    fn is(&self, version: u64, requests: &[Request]) -> bool {
        let same = |(prompt, request): (&Prompt, &Request)| prompt.request == *request;
        self.version == version
            && self.prompts.len() == requests.len()
            && self.prompts.iter().zip(requests).all(same)
    }
}

impl State {
    fn present(&self, lease: Duration) -> usize {
        let here = |peer: &&Peer| peer.sent_away.is_none() && peer.seen.elapsed() < lease;
        self.peers.values().filter(here).count()
    }

    fn name(&self, worker: u64) -> String {
        self.peers.get(&worker).map_or(String::new(), |peer| peer.name.clone())
    }

    fn prompt(&mut self, batch: u64, prompt: u64) -> Option<&mut Prompt> {
        self.batches.get_mut(&batch)?.prompts.get_mut(usize::try_from(prompt).ok()?)
    }

    /// A sign of life.
    fn touch(&mut self, worker: u64, lease: Duration) -> Result<(), Refused> {
        let peer = self.peers.get_mut(&worker).ok_or(Refused::Unknown)?;
        if let Some(why) = &peer.sent_away {
            return Err(Refused::Unfit(why.clone()));
        }
        if peer.seen.elapsed() >= lease {
            self.notes.push(format!("worker {} is back", peer.name));
        }
        peer.seen = Instant::now();
        Ok(())
    }

    /// Prompts of workers whose lease has run out are open again.
    fn expire(&mut self) {
        let now = Instant::now();
        let mut lost = BTreeMap::<u64, usize>::new();
        for prompt in self.batches.values_mut().flat_map(|batch| &mut batch.prompts) {
            if let Place::Leased(worker, until) = prompt.place
                && until <= now
            {
                prompt.place = Place::Open;
                *lost.entry(worker).or_default() += 1;
            }
        }
        for (worker, count) in lost {
            let name = self.name(worker);
            self.notes.push(format!("worker {name} is silent: {count} prompts are handed out again"));
        }
    }

    fn renew(&mut self, worker: u64, lease: Duration) {
        let until = Instant::now() + lease;
        for prompt in self.batches.values_mut().flat_map(|batch| &mut batch.prompts) {
            if let Place::Leased(holder, end) = &mut prompt.place
                && *holder == worker
            {
                *end = until;
            }
        }
    }

    /// Open prompts of the earliest batch that has some: a share of them, so that every worker gets some.
    fn hand_out(&mut self, ask: &Ask, lease: Duration) -> Option<Work> {
        let present = self.present(lease).max(1);
        let until = Instant::now() + lease;
        let open = |prompt: &Prompt| matches!(prompt.place, Place::Open) && !prompt.own_only;
        let versions = &self.versions;
        let name = |batch: &Batch| versions.get(&batch.version).map(|version| version.name);
        let batch = self.batches.values_mut().find(|batch| {
            let name = name(batch);
            let fits = name.is_some() && (!ask.busy || name == ask.has);
            fits && batch.prompts.iter().any(open)
        })?;
        let name = name(batch)?;
        if ask.has != Some(name) {
            return Some(Work::Weights(name));
        }
        let count = batch.prompts.iter().filter(|prompt| open(prompt)).count().div_ceil(present);
        let mut samples = ask.samples;
        let mut requests = Vec::new();
        for prompt in batch.prompts.iter_mut().filter(|prompt| open(prompt)).take(count) {
            if !requests.is_empty() && prompt.request.n > samples {
                break;
            }
            samples = samples.saturating_sub(prompt.request.n);
            prompt.place = Place::Leased(ask.worker, until);
            requests.push(prompt.request.clone());
        }
        Some(Work::Prompts(requests))
    }

    /// Prompts that the trainer samples itself.
    fn take_own(&mut self, key: u64, alone: bool, at_once: usize) -> Vec<Request> {
        let Some(batch) = self.batches.get_mut(&key) else { return Vec::new() };
        let open = |prompt: &&mut Prompt| matches!(prompt.place, Place::Open) && (alone || prompt.own_only);
        let taken = batch.prompts.iter_mut().filter(open).take(at_once).map(|prompt| {
            prompt.place = Place::Own;
            prompt.request.clone()
        });
        taken.collect()
    }

    /// Samples of a batch that are to be computed again.
    fn spots(&self, key: u64) -> Vec<Spot> {
        let mut spots = Vec::new();
        for prompt in self.batches.get(&key).into_iter().flat_map(|batch| &batch.prompts) {
            let Place::Answered(_, samples, left) = &prompt.place else { continue };
            for &number in left {
                let sample = samples[number as usize].clone();
                // Some place in the middle that depends on what came, and on nothing that its sender can
                // choose without choosing the sample.
                let at = sample.logprobs.iter().fold(number, |sum, x| sum.rotate_left(5) ^ x.to_bits());
                let again = at as usize % sample.tokens.len();
                spots.push(Spot { request: prompt.request.clone(), number, sample, again });
            }
        }
        spots
    }

    /// Answers of which nothing is left to be computed again are done.
    fn settle(&mut self, key: u64) {
        for prompt in self.batches.get_mut(&key).into_iter().flat_map(|batch| &mut batch.prompts) {
            if let Place::Answered(_, samples, left) = &mut prompt.place
                && left.is_empty()
            {
                prompt.place = Place::Done(std::mem::take(samples));
            }
        }
    }

    /// A worker is not to be trusted: what it has sent since is sampled again. An error where some of it was
    /// used before.
    fn send_away(&mut self, worker: u64, what: String) -> Result<(), PoolError> {
        let Some(peer) = self.peers.get_mut(&worker) else { return Ok(()) };
        if peer.sent_away.is_none() {
            self.notes.push(format!("worker {} is sent away: {what}", peer.name));
        }
        peer.sent_away = Some(what.clone());
        let (name, steps) = (peer.name.clone(), peer.unchecked.iter().copied().collect::<Vec<u64>>());
        for prompt in self.batches.values_mut().flat_map(|batch| &mut batch.prompts) {
            let his = match &prompt.place {
                Place::Leased(holder, _) | Place::Answered(holder, ..) => *holder == worker,
                Place::Done(_) => prompt.unchecked == Some(worker),
                Place::Open | Place::Own => false,
            };
            if his {
                (prompt.place, prompt.unchecked) = (Place::Open, None);
            }
        }
        if steps.is_empty() { Ok(()) } else { Err(PoolError::Lied { name, what, steps }) }
    }

    /// The groups of a batch that is done, which is forgotten.
    fn take(&mut self, key: u64) -> Vec<Group> {
        let batch = self.batches.remove(&key);
        let prompts = batch.into_iter().flat_map(|batch| batch.prompts);
        let groups = prompts.map(|Prompt { request, place, unchecked, .. }| {
            if let Some(peer) = unchecked.and_then(|worker| self.peers.get_mut(&worker)) {
                peer.unchecked.insert(key);
            }
            let samples = if let Place::Done(samples) = place { samples } else { Vec::new() };
            let Request { key, prompt, .. } = request;
            let (prompt_logprobs, prompt_top) = (Vec::new(), Vec::new());
            Group { request: RequestId(key.prompt), key, prompt, prompt_logprobs, prompt_top, samples }
        });
        groups.collect()
    }

    /// Keeps the newest versions and those that prompts still need.
    fn forget_versions(&mut self, keep: usize) {
        let newest: BTreeSet<u64> = self.versions.keys().rev().take(keep.max(1)).copied().collect();
        let needed: BTreeSet<u64> = self.batches.values().map(|batch| batch.version).collect();
        self.versions.retain(|version, _| newest.contains(version) || needed.contains(version));
        let there = &self.versions;
        self.deltas.retain(|(from, to), _| there.contains_key(from) && there.contains_key(to));
    }
}
