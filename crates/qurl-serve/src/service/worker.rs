//! The thread that owns queue and engine: takes commands, steps, tells the owners of requests.

use super::shared::{Shared, Snapshot};
use super::{Command, Failure, InFlight, Job, LoadError, Loaded, NewParams, NewWeights, News, Numbers};
use super::{PromptScores, Token};
use qurl_kernels::{Device, DeviceError, Rounding};
use qurl_model::compute::{Base, BaseLeaves, Network};
use qurl_quant::checksum::Summed;
use qurl_rollout::{Engine, FinishReason, Group, RequestId, RolloutError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// How often the pages in use are counted, which goes over all pages of all sequences.
const COUNT_EVERY: Duration = Duration::from_millis(200);

/// A job in the engine.
struct Active {
    job: Job,
    /// Tokens that nobody streams: they are told at the end.
    tokens: Vec<Token>,
    /// When each sample got its last token.
    last: Vec<Option<Instant>>,
}

/// Weights to come, and who waits for them.
struct Pending {
    weights: Box<NewWeights>,
    reply: oneshot::Sender<Loaded>,
}

pub(super) struct Worker<D: Device> {
    queue: D::Queue,
    engine: Engine<D>,
    inbox: Receiver<Command>,
    shared: Arc<Shared>,
    /// What is published after every step.
    now: Snapshot,
    /// When the pages in use were counted last.
    counted: Instant,
    /// By the engine's numbers.
    active: BTreeMap<RequestId, Active>,
    numbers: Numbers,
    /// Jobs that wait for a resume or for new weights.
    held: VecDeque<Job>,
    /// The newest weights that were not begun with: what came before them is not loaded any longer.
    next: Option<Pending>,
    /// Set while paused: what happens to requests in flight, and who is told when it has.
    paused: Option<InFlight>,
    told: Vec<oneshot::Sender<()>>,
    stopping: bool,
}

impl<D: Device> Worker<D> {
    pub fn new(
        queue: D::Queue,
        engine: Engine<D>,
        inbox: Receiver<Command>,
        shared: Arc<Shared>,
    ) -> Worker<D> {
        let mut worker = Worker {
            queue,
            engine,
            inbox,
            shared,
            now: Snapshot::default(),
            counted: Instant::now(),
            active: BTreeMap::new(),
            numbers: Numbers::new(),
            held: VecDeque::new(),
            next: None,
            paused: None,
            told: Vec::new(),
            stopping: false,
        };
        worker.publish();
        worker
    }

    /// Works until it is stopped and all has been finished, nobody can ask any longer, or the device fails.
    pub fn run(mut self) -> Result<(), String> {
        let ended = self.work();
        if let Err(reason) = &ended {
            let failed = |job: &Job| _ = job.news.send(News::Failed(Failure::Broken(reason.clone())));
            self.active.values().for_each(|active| failed(&active.job));
            self.held.iter().for_each(failed);
        }
        self.now.healthy = false;
        self.shared.publish(&self.now);
        ended
    }

    fn work(&mut self) -> Result<(), String> {
        loop {
            while let Ok(command) = self.inbox.try_recv() {
                self.take(command);
            }
            self.settle();
            if self.can_step() {
                self.step()?;
                self.publish();
                continue;
            }
            self.publish();
            if self.stopping {
                return Ok(());
            }
            // Only here, where nothing is left that could be settled: nobody else need ever speak.
            match self.inbox.recv() {
                Ok(command) => self.take(command),
                Err(_) => return Ok(()),
            }
        }
    }

    /// Does what waited for the end of the requests in flight.
    fn settle(&mut self) {
        // Whoever has gone does not want the weights, and nobody need wait for them.
        self.next.take_if(|next| next.reply.is_closed());
        if self.engine.unfinished() == 0 {
            for reply in std::mem::take(&mut self.told) {
                self.reply(reply, ());
            }
            self.load();
        }
        if self.paused.is_none() && self.next.is_none() {
            while let Some(job) = self.held.pop_front() {
                self.begin(job);
            }
        }
    }

    /// Answers an order: whoever asks how things are after that is told what has come of it.
    fn reply<T>(&mut self, to: oneshot::Sender<T>, what: T) {
        self.publish();
        _ = to.send(what);
    }

    /// Whether there is something to compute. Frozen requests are let go where new weights wait for them.
    fn can_step(&self) -> bool {
        let frozen = self.paused == Some(InFlight::Keep) && self.next.is_none() && !self.stopping;
        self.engine.unfinished() > 0 && !frozen
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Jobs(jobs) if self.paused.is_some() || self.next.is_some() => self.held.extend(jobs),
            Command::Jobs(jobs) => jobs.into_iter().for_each(|job| self.begin(job)),
            Command::Gone(number) => self.gone(number),
            Command::Abort(names, reply) => {
                let aborted = self.abort(names.as_ref());
                self.reply(reply, aborted);
            }
            Command::Pause(in_flight, reply) => {
                self.paused = Some(in_flight);
                match in_flight {
                    InFlight::Wait => self.told.push(reply), // told when all have ended
                    InFlight::Keep => self.reply(reply, ()),
                    InFlight::Abort => {
                        self.abort(None);
                        self.reply(reply, ());
                    }
                }
            }
            Command::Resume(reply) => {
                self.paused = None;
                // Who waits for the others to end need not any longer.
                for told in std::mem::take(&mut self.told) {
                    self.reply(told, ());
                }
                self.reply(reply, ());
            }
            Command::Load(weights, reply) => {
                if reply.is_closed() {
                    return;
                }
                if weights.in_flight == InFlight::Abort {
                    self.abort_active(None);
                }
                if let Some(older) = self.next.replace(Pending { weights, reply }) {
                    _ = older.reply.send(Err(LoadError::Superseded));
                }
            }
            Command::Flush(reply) => {
                self.engine.forget_prefixes();
                self.reply(reply, ());
            }
            Command::Stop => {
                self.stopping = true;
                self.paused = None;
            }
        }
    }

    /// Gives a job to the engine, which may refuse it.
    fn begin(&mut self, job: Job) {
        if job.news.is_closed() {
            self.now.gone += 1;
            return;
        }
        match self.engine.submit(job.request.clone()) {
            Ok(id) => {
                self.now.prompt_tokens += job.request.prompt.len() as u64;
                let weights = self.engine.weights().unwrap_or_default();
                _ = job.news.send(News::Began(weights));
                self.numbers.insert(job.number, id);
                let last = vec![None; job.request.n];
                self.active.insert(id, Active { job, tokens: Vec::new(), last });
            }
            Err(error) => {
                self.now.failed += 1;
                let reason = error.to_string();
                let failure = match error {
                    RolloutError::NoWeights | RolloutError::Device(_) => Failure::Broken(reason),
                    _ => Failure::Refused(reason),
                };
                _ = job.news.send(News::Failed(failure));
            }
        }
    }

    fn gone(&mut self, number: u64) {
        if let Some(id) = self.numbers.remove(&number) {
            self.engine.cancel(id);
            self.active.remove(&id);
            self.now.gone += 1;
        } else if let Some(at) = self.held.iter().position(|job| job.number == number) {
            self.held.remove(at);
            self.now.gone += 1;
        }
    }

    /// Aborts the jobs of some names, or all, those that are held included.
    fn abort(&mut self, names: Option<&BTreeSet<String>>) -> usize {
        let before = self.held.len();
        self.held.retain(|job| {
            let keep = names.is_some_and(|names| !names.contains(&job.name));
            if !keep {
                _ = job.news.send(News::Aborted);
            }
            keep
        });
        let held = before - self.held.len();
        self.now.aborted += held as u64;
        held + self.abort_active(names)
    }

    fn abort_active(&mut self, names: Option<&BTreeSet<String>>) -> usize {
        let named = self.active.iter().filter(|(_, a)| names.is_none_or(|names| names.contains(&a.job.name)));
        let ids: Vec<RequestId> = named.map(|(id, _)| *id).collect();
        for &id in &ids {
            self.engine.cancel(id);
            self.end(id, |_| News::Aborted);
        }
        self.now.aborted += ids.len() as u64;
        ids.len()
    }

    /// Tells the owner of a request the tokens that he has not heard of, and its end.
    fn end(&mut self, id: RequestId, news: impl FnOnce(&Active) -> News) {
        let Some(mut active) = self.active.remove(&id) else { return };
        self.numbers.remove(&active.job.number);
        let tokens = std::mem::take(&mut active.tokens);
        if !tokens.is_empty() {
            _ = active.job.news.send(News::Tokens(tokens));
        }
        _ = active.job.news.send(news(&active));
    }

    /// Takes over the weights that wait. Nothing is in flight.
    fn load(&mut self) {
        let Some(Pending { weights, reply }) = self.next.take() else { return };
        let NewWeights { params, version, .. } = *weights;
        let (engine, queue) = (&mut self.engine, &mut self.queue);
        let loaded =
            engine.load_with(version, |network| refresh::<D>(queue, network, &params, version.checksum));
        drop(params); // unmaps their files
        self.now.loads += u64::from(loaded.is_ok());
        self.reply(reply, loaded.map(|()| version).map_err(|error| LoadError::Failed(error.to_string())));
    }

    fn step(&mut self) -> Result<(), String> {
        let failed = match self.engine.step(&mut self.queue) {
            Ok(_) => None,
            Err(error @ RolloutError::BadLogits { request, .. }) => Some((request, error.to_string())),
            Err(error) => return Err(error.to_string()),
        };
        self.tell_tokens();
        for group in self.engine.finished() {
            self.finish(group);
        }
        if let Some((id, reason)) = failed {
            self.now.failed += 1;
            self.end(id, |_| News::Failed(Failure::Broken(reason)));
        }
        Ok(())
    }

    /// Hands the tokens of the last step out: one message for each request that streams.
    fn tell_tokens(&mut self) {
        let now = Instant::now();
        let (emitted, top) = (self.engine.emitted(), self.engine.top());
        for of_request in emitted.chunk_by(|a, b| a.request == b.request) {
            let Some(active) = self.active.get_mut(&of_request[0].request) else { continue };
            for token in of_request {
                let best = match top.binary_search_by_key(&(token.request, token.sample), |t| (t.0, t.1)) {
                    Ok(at) => top[at].2.clone(),
                    Err(_) => Vec::new(),
                };
                let (id, logp, finish) = (token.token, token.logp, token.finish);
                match finish.map(FinishReason::is_truncated) {
                    Some(true) => self.now.cut += 1,
                    Some(false) => self.now.stopped += 1,
                    None => {}
                }
                active.tokens.push(Token { sample: token.sample, id, logp, top: best, finish });
                match active.last[token.sample as usize].replace(now) {
                    None => self.now.first_token.add(now - active.job.arrived),
                    Some(before) => self.now.between_tokens.add(now - before),
                }
            }
            if active.job.streamed {
                _ = active.job.news.send(News::Tokens(std::mem::take(&mut active.tokens)));
            }
        }
    }

    fn finish(&mut self, group: Group) {
        let id = group.request;
        if let Some(active) = self.active.get(&id) {
            self.now.done += 1;
            self.now.whole.add(active.job.arrived.elapsed());
        }
        let (logprobs, top, cached) = (group.prompt_logprobs, group.prompt_top, group.cached_tokens);
        self.end(id, |_| News::Done(PromptScores { logprobs, top, cached }));
    }

    fn publish(&mut self) {
        let pages = self.engine.pages();
        let (total, free) = (pages.total(), pages.free());
        let now = &mut self.now;
        now.healthy = self.engine.weights().is_some();
        now.weights = self.engine.weights().unwrap_or_default();
        now.paused = self.paused.is_some();
        now.running = self.engine.running();
        (now.pages, now.pages_used) = (total, total - free);
        if now.running == 0 || self.counted.elapsed() >= COUNT_EVERY {
            (now.pages_in_use, self.counted) = (self.engine.pages_in_use(), Instant::now());
        }
        now.stats = self.engine.stats();
        self.shared.publish(now);
    }
}

/// Packs new weights. Files were read before, when their checksum was taken: what is packed must be that.
fn refresh<D: Device>(
    queue: &mut D::Queue,
    network: &mut Network<D>,
    params: &NewParams,
    checksum: u64,
) -> Result<(), DeviceError> {
    match params {
        NewParams::Host(params) => {
            network.refresh_leaves(queue, &mut BaseLeaves::new(Base::Host(params)), Rounding::Nearest)
        }
        NewParams::Files(model) => {
            let mut leaves = Summed::new(Base::Files(model));
            network.refresh_leaves(queue, &mut leaves, Rounding::Nearest)?;
            match leaves.total(queue)? == checksum {
                true => Ok(()),
                false => Err(DeviceError::Source("the files were changed while they were read".to_string())),
            }
        }
    }
}
