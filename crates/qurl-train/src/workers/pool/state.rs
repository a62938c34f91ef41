//! What a pool knows: versions, batches of prompts with who has each, workers. Plain data; what waits and
//! what travels is elsewhere.

use super::super::protocol::{Ask, VersionName, Work};
use super::super::spot::Spot;
use super::{PoolError, Refused};
use qurl_rollout::{Group, Request, RequestId, Sample};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A version of the weights as it is sent.
pub struct Version {
    pub name: VersionName,
    pub bytes: Arc<Vec<u8>>,
}

/// Who has a prompt.
pub enum Place {
    Open,
    /// A worker has it until then.
    Leased(u64, Instant),
    /// The trainer has it.
    Own,
    /// A worker has answered; the flags are the samples that are still to be computed again.
    Answered(u64, Vec<Sample>, BTreeSet<u32>),
    Done(Vec<Sample>),
}

/// A prompt to be sampled.
pub struct Prompt {
    pub request: Request,
    pub place: Place,
    /// The worker that answered, where not all of it was computed again.
    pub unchecked: Option<u64>,
    /// Only the trainer takes it.
    pub own_only: bool,
}

/// The prompts of a batch.
pub struct Batch {
    pub version: u64,
    pub prompts: Vec<Prompt>,
}

/// A worker.
pub struct Peer {
    pub name: String,
    pub seen: Instant,
    pub sent_away: Option<String>,
    /// When it was first told that the run is over.
    pub told_end: Option<Instant>,
    /// Whether it has heard that.
    pub has_left: bool,
    /// Steps that used rollouts of it which were not computed again.
    pub unchecked: BTreeSet<u64>,
}

/// All of it, behind one lock.
#[derive(Default)]
pub struct State {
    pub versions: BTreeMap<u64, Version>,
    /// Changes between versions, made when they are asked for.
    pub deltas: BTreeMap<(u64, u64), Arc<Vec<u8>>>,
    /// By the step of the random numbers' key.
    pub batches: BTreeMap<u64, Batch>,
    pub peers: BTreeMap<u64, Peer>,
    pub notes: Vec<String>,
    pub ended: bool,
}

impl Prompt {
    pub fn is_leased_to(&self, worker: u64) -> bool {
        matches!(self.place, Place::Leased(holder, _) if holder == worker)
    }
}

impl Batch {
    pub fn is(&self, version: u64, requests: &[Request]) -> bool {
        let same = |(prompt, request): (&Prompt, &Request)| prompt.request == *request;
        self.version == version
            && self.prompts.len() == requests.len()
            && self.prompts.iter().zip(requests).all(same)
    }
}

impl State {
    pub fn present(&self, lease: Duration) -> usize {
        let here = |peer: &&Peer| peer.sent_away.is_none() && peer.seen.elapsed() < lease;
        self.peers.values().filter(here).count()
    }

    pub fn name(&self, worker: u64) -> String {
        self.peers.get(&worker).map_or(String::new(), |peer| peer.name.clone())
    }

    pub fn prompt(&mut self, batch: u64, prompt: u64) -> Option<&mut Prompt> {
        self.batches.get_mut(&batch)?.prompts.get_mut(usize::try_from(prompt).ok()?)
    }

    /// A sign of life.
    pub fn touch(&mut self, worker: u64, lease: Duration) -> Result<(), Refused> {
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
    pub fn expire(&mut self) {
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

    pub fn renew(&mut self, worker: u64, lease: Duration) {
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
    pub fn hand_out(&mut self, ask: &Ask, lease: Duration) -> Option<Work> {
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
    pub fn take_own(&mut self, key: u64, alone: bool, at_once: usize) -> Vec<Request> {
        let Some(batch) = self.batches.get_mut(&key) else { return Vec::new() };
        let open = |prompt: &&mut Prompt| matches!(prompt.place, Place::Open) && (alone || prompt.own_only);
        let taken = batch.prompts.iter_mut().filter(open).take(at_once).map(|prompt| {
            prompt.place = Place::Own;
            prompt.request.clone()
        });
        taken.collect()
    }

    /// Samples of a batch that are to be computed again; `drawn` is a random number for prompt and sample.
    pub fn spots(&self, key: u64, drawn: impl Fn(u64, u32) -> u64) -> Vec<Spot> {
        let mut spots = Vec::new();
        for prompt in self.batches.get(&key).into_iter().flat_map(|batch| &batch.prompts) {
            let Place::Answered(_, samples, left) = &prompt.place else { continue };
            for &number in left {
                let sample = samples[number as usize].clone();
                // What follows from the sample is known to its sender, who could lie elsewhere.
                let place = drawn(prompt.request.key.prompt, number) % sample.tokens.len() as u64;
                let again = place as usize;
                spots.push(Spot { request: prompt.request.clone(), number, sample, again });
            }
        }
        spots
    }

    /// Answers of which nothing is left to be computed again are done.
    pub fn settle(&mut self, key: u64) {
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
    pub fn send_away(&mut self, worker: u64, what: String) -> Result<(), PoolError> {
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
    pub fn take(&mut self, key: u64) -> Vec<Group> {
        let batch = self.batches.remove(&key);
        let prompts = batch.into_iter().flat_map(|batch| batch.prompts);
        let groups = prompts.map(|Prompt { request, place, unchecked, .. }| {
            if let Some(peer) = unchecked.and_then(|worker| self.peers.get_mut(&worker)) {
                peer.unchecked.insert(key);
            }
            let samples = if let Place::Done(samples) = place { samples } else { Vec::new() };
            let Request { key, prompt, .. } = request;
            let (prompt_logprobs, prompt_top) = (Vec::new(), Vec::new());
            Group {
                request: RequestId(key.prompt),
                key,
                prompt,
                prompt_logprobs,
                prompt_top,
                cached_tokens: 0, // who sampled it kept its pages
                samples,
            }
        });
        groups.collect()
    }

    /// Keeps the newest versions and those that prompts still need.
    pub fn forget_versions(&mut self, keep: usize) {
        let newest: BTreeSet<u64> = self.versions.keys().rev().take(keep.max(1)).copied().collect();
        let needed: BTreeSet<u64> = self.batches.values().map(|batch| batch.version).collect();
        self.versions.retain(|version, _| newest.contains(version) || needed.contains(version));
        let there = &self.versions;
        self.deltas.retain(|(from, to), _| there.contains_key(from) && there.contains_key(to));
    }
}
