//! What a pool says to workers: each of their messages, and its answer.

use super::super::check::check;
use super::super::delta;
use super::super::protocol::{Answer, Ask, Hello, Report, Welcome, Work};
use super::state::{Peer, Place};
use super::{LOOK, Pool, Refused};
use qurl_rollout::EngineOptions;
use std::collections::BTreeSet;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a worker that asks for work is kept waiting for some.
const LONG_POLL: Duration = Duration::from_secs(2);

/// Bytes of a worker's name.
const LONGEST_NAME: usize = 128;

/// Whether a worker may be called so: its name goes to the trainer's terminal.
fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-:".contains(&byte);
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(fits)
}

/// What a worker says, as much of it as is fit for a terminal.
fn plain(said: &str) -> String {
    said.chars().filter(|c| !c.is_control()).take(300).collect()
}

impl Pool {
    /// A worker wants to join.
    pub fn join(&self, hello: &Hello) -> Result<Welcome, Refused> {
        let Hello { program, kind, name } = hello;
        if !is_name(name) {
            let wanted = "letters, digits, `.`, `_`, `-` and `:`";
            return Err(Refused::Unfit(format!("a worker's name has 1 to {LONGEST_NAME} of {wanted}")));
        }
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
            told_end: None,
            has_left: false,
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

    /// Prompts for a worker; waits a moment for some where it has nothing to do. One that is at work keeps
    /// what it has: it may ask more often than it reports.
    pub fn work(&self, ask: &Ask) -> Result<Work, Refused> {
        let until = Instant::now() + LONG_POLL;
        let mut state = self.state();
        loop {
            state.touch(ask.worker, self.options.lease)?;
            if ask.busy {
                state.renew(ask.worker, self.options.lease);
            }
            state.expire();
            if state.ended {
                let told = |peer: &mut Peer| _ = peer.told_end.get_or_insert_with(Instant::now);
                state.peers.entry(ask.worker).and_modify(told);
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

    /// A worker has heard that the run is over.
    pub fn goodbye(&self, worker: u64) {
        self.state().peers.entry(worker).and_modify(|peer| peer.has_left = true);
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
        let failed = failed.map(|(key, why)| (key, plain(&why)));
        let mut state = self.state();
        state.touch(worker, self.options.lease)?;
        state.renew(worker, self.options.lease);
        let sizes = (self.config.vocab_size, self.network.positions);
        for Answer { key, samples } in answers {
            let own = state.batches.get(&key.step).map(|batch| batch.version);
            let Some(expected) = own.and_then(|own| Some(state.versions.get(&own)?.name)) else { continue };
            let Some(prompt) = state.prompt(key.step, key.prompt) else { continue };
            if !matches!(prompt.place, Place::Open) && !prompt.is_leased_to(worker) {
                continue; // too late: somebody else has it, or has answered
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
            if let Some(prompt) = state.prompt(key.step, key.prompt).filter(|p| p.is_leased_to(worker)) {
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

#[cfg(test)]
mod tests {
    use super::{LONGEST_NAME, is_name};

    #[test]
    fn names_are_fit_for_a_terminal() {
        for name in ["gpu-7.example.org-1234", "a", "rack_1:3", &"x".repeat(LONGEST_NAME)] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "a b", "\u{1b}[2J", "a\n", "\u{202e}", &"x".repeat(LONGEST_NAME + 1)] {
            assert!(!is_name(name), "{name:?}");
        }
    }
}
