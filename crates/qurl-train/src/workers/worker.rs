//! A worker: joins a trainer, takes over weights, samples prompts, and comes back when it was cut off.
//!
//! It learns all that it needs from the trainer: the model's sizes, number formats, weights, prompts as ids.
//! It has no tokenizer and judges nothing. A prompt that it cannot sample is given back with the reason.

use super::delta::{self, DeltaError};
use super::pool::{Pool, Refused};
use super::protocol::{Answer, Ask, Hello, Report, VersionName, Welcome, Work};
use qurl_kernels::{Device, DeviceError};
use qurl_model::compute::Network;
use qurl_model::{ConfigError, ModelConfig};
use qurl_rollout::{Engine, EngineOptions, RequestId, RolloutError, SampleKey, WeightVersion};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a worker that cannot reach its trainer tries again.
const RETRY: Duration = Duration::from_millis(500);
/// How often a worker with something to do asks for more.
const MORE: Duration = Duration::from_millis(100);

/// Why a message did not arrive or was not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The trainer refuses.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// It is not the secret of the trainer.
    #[error("the trainer does not take this worker's secret")]
    Secret,
    /// It cannot be reached, for now.
    #[error("the trainer cannot be reached: {0}")]
    Away(String),
    /// What answers is no trainer, or not of this version.
    #[error("what answers is no trainer of this version: {0}")]
    Foreign(String),
}

/// Brings messages to a trainer.
pub trait Link {
    /// [`Pool::join`]
    fn join(&mut self, hello: &Hello) -> Result<Welcome, LinkError>;
    /// [`Pool::work`]
    fn work(&mut self, ask: &Ask) -> Result<Work, LinkError>;
    /// [`Pool::weights`]
    fn weights(&mut self, worker: u64, version: u64, have: Option<(u64, u128)>)
    -> Result<Vec<u8>, LinkError>;
    /// [`Pool::report`]
    fn report(&mut self, report: Report) -> Result<(), LinkError>;
    /// [`Pool::goodbye`]
    fn goodbye(&mut self, worker: u64) -> Result<(), LinkError>;
}

/// In the same process.
impl Link for Arc<Pool> {
    fn join(&mut self, hello: &Hello) -> Result<Welcome, LinkError> {
        Ok(Pool::join(self, hello)?)
    }

    fn work(&mut self, ask: &Ask) -> Result<Work, LinkError> {
        Ok(Pool::work(self, ask)?)
    }

    fn weights(
        &mut self,
        worker: u64,
        version: u64,
        have: Option<(u64, u128)>,
    ) -> Result<Vec<u8>, LinkError> {
        Ok(Pool::weights(self, worker, version, have)?.to_vec())
    }

    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        Ok(Pool::report(self, report)?)
    }

    fn goodbye(&mut self, worker: u64) -> Result<(), LinkError> {
        Pool::goodbye(self, worker);
        Ok(())
    }
}

/// Settings of a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerOptions {
    /// Program and version.
    pub program: String,
    /// A name for people.
    pub name: String,
    /// Memory for keys and values, where it is not what the trainer has.
    pub kv_bytes: Option<usize>,
    /// Sequences at a time, likewise.
    pub max_num_seqs: Option<usize>,
    /// How long to try to reach a trainer.
    pub patience: Duration,
    /// Threads that read weights.
    pub threads: usize,
}

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The trainer wants nothing of it, or is none.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// No trainer came.
    #[error("{why}, for {seconds} s: does a trainer listen there (rollout.workers.listen)?")]
    NoTrainer {
        /// Why it could not be reached.
        why: LinkError,
        /// How long that was tried.
        seconds: u64,
    },
    /// The trainer went away and did not come back.
    #[error(
        "{why}; it did not come back within {seconds} s: its run has ended, or it is to be resumed (prompts \
         sampled for it: {prompts})"
    )]
    Left {
        /// Why it could not be reached.
        why: LinkError,
        /// How long that was tried.
        seconds: u64,
        /// Prompts that the worker has sampled.
        prompts: u64,
    },
    /// The model's sizes.
    #[error("the trainer's model: {0}")]
    Config(#[from] ConfigError),
    /// The engine.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Weights came that are not those announced, and again when they were asked for whole.
    #[error("weights of version {version}: {source}")]
    Weights {
        /// Which.
        version: u64,
        /// What is wrong.
        source: DeltaError,
    },
}

/// What a worker has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Done {
    /// Prompts that it has sampled.
    pub prompts: u64,
    /// Tokens of their responses.
    pub tokens: u64,
    /// Versions that came whole.
    pub whole_versions: u64,
    /// Versions that came as changes.
    pub changed_versions: u64,
    /// Bytes of both.
    pub bytes: u64,
}

/// A worker.
pub struct Worker<D: Device, L: Link> {
    device: Arc<D>,
    link: L,
    options: WorkerOptions,
    done: Done,
    has_joined: bool,
    /// The version that it has, with its bytes: changes are to these.
    have: Option<(VersionName, Vec<u8>)>,
}

/// How a stay with a trainer ended.
enum Left {
    /// The run is over.
    Over,
    /// The user wants it.
    Stopped,
    /// The trainer does not know it any more: another process, perhaps.
    Forgotten,
}

/// Prompts that are being sampled, with one engine.
struct Stay<D: Device> {
    number: u64,
    engine: Engine<D>,
    queue: D::Queue,
    most: usize,
    sign_of_life: Duration,
    keys: BTreeMap<RequestId, SampleKey>,
    /// When it was last heard of, and when it last asked.
    heard: Instant,
    asked: Option<Instant>,
}

impl<D: Device, L: Link> Worker<D, L> {
    /// A worker on a device.
    pub fn new(device: Arc<D>, link: L, options: WorkerOptions) -> Self {
        Worker { device, link, options, done: Done::default(), has_joined: false, have: None }
    }

    /// Works until the run is over or `stop` says so; `note` is told what people should know.
    pub fn run(
        &mut self,
        stop: impl Fn() -> bool,
        mut note: impl FnMut(String),
    ) -> Result<Done, WorkerError> {
        let mut away_since = None;
        while !stop() {
            let stayed = self.stay(&stop, &mut note, &mut away_since);
            match stayed {
                Ok(Left::Over) => {
                    note("the run is over".to_string());
                    break;
                }
                Ok(Left::Stopped) => break,
                Ok(Left::Forgotten) => {
                    note("the trainer has forgotten this worker: joining again".to_string())
                }
                Err(WorkerError::Link(why @ LinkError::Away(_))) => {
                    let seconds = self.options.patience.as_secs();
                    let since = *away_since.get_or_insert_with(|| {
                        note(format!("{why}: trying again for {seconds} s"));
                        Instant::now()
                    });
                    if since.elapsed() > self.options.patience {
                        let prompts = self.done.prompts;
                        return Err(match self.has_joined {
                            true => WorkerError::Left { why, seconds, prompts },
                            false => WorkerError::NoTrainer { why, seconds },
                        });
                    }
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(self.done)
    }

    /// From joining to leaving.
    fn stay(
        &mut self,
        stop: &impl Fn() -> bool,
        note: &mut impl FnMut(String),
        away_since: &mut Option<Instant>,
    ) -> Result<Left, WorkerError> {
        let WorkerOptions { program, name, .. } = &self.options;
        let hello = Hello { program: program.clone(), kind: self.device.info().kind, name: name.clone() };
        let welcome = match self.link.join(&hello) {
            Err(LinkError::Refused(Refused::Gone(_))) => return Ok(Left::Over),
            joined => joined?,
        };
        (*away_since, self.has_joined) = (None, true);
        note(format!("joined; {} weights", welcome.network.format));
        let mut stay = self.settle(welcome)?;
        loop {
            if stop() {
                return Ok(Left::Stopped);
            }
            match self.turn(&mut stay) {
                Ok(true) => {}
                Ok(false) => return Ok(Left::Over),
                Err(WorkerError::Link(LinkError::Refused(Refused::Unknown))) => return Ok(Left::Forgotten),
                Err(error) => return Err(error),
            }
        }
    }

    /// Makes the engine that the trainer asks for.
    fn settle(&self, welcome: Welcome) -> Result<Stay<D>, WorkerError> {
        let Welcome { worker, config, network, engine, lease_s } = welcome;
        let config = ModelConfig::from_json(&config, "the trainer's config.json")?;
        let mut queue = self.device.queue()?;
        let network = Network::random(&mut queue, &config, network, 0)?;
        let [kv_bytes, page_size, max_num_seqs, max_num_batched_tokens] = engine;
        let most = self.options.max_num_seqs.unwrap_or(max_num_seqs);
        let options = EngineOptions {
            kv_bytes: self.options.kv_bytes.unwrap_or(kv_bytes),
            page_size,
            max_num_seqs: most,
            max_num_batched_tokens,
            share_prefixes: false,
        };
        let engine = Engine::new(self.device.clone(), network, WeightVersion::default(), options)?;
        Ok(Stay {
            number: worker,
            engine,
            queue,
            most,
            sign_of_life: Duration::from_millis(250 * lease_s),
            keys: BTreeMap::new(),
            heard: Instant::now(),
            asked: None,
        })
    }

    /// Asks for work where there is room, samples until something is worth saying, says it. False where the
    /// run is over.
    fn turn(&mut self, stay: &mut Stay<D>) -> Result<bool, WorkerError> {
        let unfinished = stay.engine.unfinished();
        let (busy, room) = (unfinished > 0, stay.most.saturating_sub(unfinished));
        let due = stay.asked.is_none_or(|at| at.elapsed() >= MORE);
        if !busy || (due && 4 * room >= stay.most) {
            // An engine that was made anew has random weights, whatever is in memory here.
            let loaded = stay.engine.weights().is_some_and(|weights| weights != WeightVersion::default());
            let has = self.have.as_ref().filter(|_| loaded).map(|(name, _)| *name);
            let work = self.link.work(&Ask { worker: stay.number, samples: room.max(1), has, busy })?;
            (stay.heard, stay.asked) = (Instant::now(), Some(Instant::now()));
            match work {
                Work::End => {
                    // It is only that the trainer need not wait, and it does not wait for long.
                    _ = self.link.goodbye(stay.number);
                    return Ok(false);
                }
                Work::Weights(name) => match self.take_over(stay, name) {
                    // It came too late for them: others have done what they were for.
                    Err(WorkerError::Link(LinkError::Refused(Refused::Gone(_)))) => {}
                    taken => taken?,
                },
                Work::Prompts(requests) => {
                    for request in requests {
                        let key = request.key;
                        match stay.engine.submit(request) {
                            Ok(id) => _ = stay.keys.insert(id, key),
                            Err(error) => self.give_back(stay, key, &error)?,
                        }
                    }
                }
                Work::Nothing => {}
            }
        }
        self.sample(stay)
    }

    /// Steps of the engine, until prompts are complete or it is time for a sign of life.
    fn sample(&mut self, stay: &mut Stay<D>) -> Result<bool, WorkerError> {
        let began = Instant::now();
        while stay.engine.unfinished() > 0 {
            match stay.engine.step(&mut stay.queue) {
                Ok(_) => {}
                Err(error @ RolloutError::BadLogits { request, .. }) => {
                    if let Some(key) = stay.keys.remove(&request) {
                        self.give_back(stay, key, &error)?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
            let groups = stay.engine.finished();
            let mut answers = Vec::with_capacity(groups.len());
            for group in groups {
                stay.keys.remove(&group.request);
                self.done.prompts += 1;
                self.done.tokens += group.samples.iter().map(|s| s.tokens.len() as u64).sum::<u64>();
                answers.push(Answer { key: group.key, samples: group.samples });
            }
            if !answers.is_empty() || stay.heard.elapsed() >= stay.sign_of_life {
                self.report(stay, answers, None)?;
            }
            if began.elapsed() >= MORE {
                break;
            }
        }
        Ok(true)
    }

    /// Says what is complete, or that a prompt cannot be sampled.
    fn report(
        &mut self,
        stay: &mut Stay<D>,
        answers: Vec<Answer>,
        failed: Option<(SampleKey, String)>,
    ) -> Result<(), WorkerError> {
        let Some((version, _)) = &self.have else { return Ok(()) };
        self.link.report(Report { worker: stay.number, version: *version, answers, failed })?;
        stay.heard = Instant::now();
        Ok(())
    }

    fn give_back(
        &mut self,
        stay: &mut Stay<D>,
        key: SampleKey,
        error: &RolloutError,
    ) -> Result<(), WorkerError> {
        self.report(stay, Vec::new(), Some((key, error.to_string())))
    }

    /// Takes over a version: as changes to the one that it has, or whole.
    fn take_over(&mut self, stay: &mut Stay<D>, name: VersionName) -> Result<(), WorkerError> {
        let version = name.weights.version;
        // It may be there, for another engine.
        if self.have.as_ref().is_none_or(|(own, _)| *own != name) {
            let bytes = self.fetch(stay.number, name)?;
            self.have = Some((name, bytes));
        }
        let Some((_, bytes)) = &self.have else { return Ok(()) };
        stay.engine.load_with(name.weights, |network| network.import(&mut stay.queue, bytes))?;
        tracing::debug!(version, bytes = bytes.len(), "weights taken over");
        Ok(())
    }

    fn fetch(&mut self, worker: u64, name: VersionName) -> Result<Vec<u8>, WorkerError> {
        let version = name.weights.version;
        loop {
            let base = self.have.as_ref().map(|(own, _)| (own.weights.version, own.hash()));
            let sent = self.link.weights(worker, version, base)?;
            self.done.bytes += sent.len() as u64;
            let is_delta = delta::is_delta(&sent);
            let own = self.have.take().filter(|_| is_delta).map(|(_, bytes)| bytes);
            match delta::decode(own, &sent, name.hash(), self.options.threads) {
                Ok(bytes) => {
                    let count = if is_delta {
                        &mut self.done.changed_versions
                    } else {
                        &mut self.done.whole_versions
                    };
                    *count += 1;
                    return Ok(bytes);
                }
                // Then whole.
                Err(_) if is_delta => {}
                Err(source) => return Err(WorkerError::Weights { version, source }),
            }
        }
    }
}
