//! The trainer's side: which versions there are, which prompts are to be sampled, who has them, what came
//! back.
//!
//! A prompt is open, leased to a worker until a time, taken by the trainer itself, or answered. A worker that
//! says nothing for longer than a lease loses its prompts, which are open again. Only the holder of a lease
//! answers, or whoever comes while the prompt is open; what else comes is dropped. A worker whose answer
//! cannot be one, or is found to be another than the trainer computes, is told nothing more, and what it has
//! sent since the last step is sampled again. If rollouts of his were used before unchecked, the run's bits
//! are not what they should be: that ends the run ([`PoolError::Lied`]).

mod desk;
mod state;

use super::protocol::VersionName;
use super::spot::Spot;
use qurl_model::ModelConfig;
use qurl_model::compute::NetworkOptions;
use qurl_rollout::{EngineOptions, Group, Request, WeightVersion};
use state::{Batch, Peer, Place, Prompt, State, Version};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often the trainer looks whether leases have run out or it was told to stop.
const LOOK: Duration = Duration::from_millis(100);

/// How long a worker that was told that the run is over has for its goodbye.
const GOODBYE: Duration = Duration::from_secs(3);

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
        "worker {name} lied: {what}; rollouts of it that were not computed again were used in steps \
         {steps:?}: resume from a checkpoint before them"
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
    /// Says which samples are computed again and which of their tokens, and names workers: no worker can know
    /// it, and no bit of the run depends on it.
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

    /// Workers that have not said that they know that the run is over. One that was told and says nothing
    /// is not waited for any longer than a moment.
    pub fn waiting(&self) -> usize {
        let state = self.state();
        let here = |peer: &&Peer| {
            let may_hear = peer.told_end.is_none_or(|told| told.elapsed() < GOODBYE);
            let alive = peer.sent_away.is_none() && peer.seen.elapsed() < self.options.lease;
            !peer.has_left && may_hear && alive
        };
        if state.ended { state.peers.values().filter(here).count() } else { 0 }
    }

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
            let spots =
                state.spots(key, |prompt, number| self.random.hash_one((key, prompt, number, "again")));
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
}
