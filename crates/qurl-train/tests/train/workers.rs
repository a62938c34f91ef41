//! Rollout workers beside a trainer, in one process: however many there are and whatever they do, a run has
//! the bits of one without them, or ends with an error that says why.

use crate::common::tiny::{steps, trainer};
use qurl_kernels::Cpu;
use qurl_kernels::cpu::level::Level;
use qurl_model::Params;
use qurl_rollout::{FinishReason, Group, Request, Sample, SampleKey, WeightVersion};
use qurl_train::recipe::Workers;
use qurl_train::rl::StepRecord;
use qurl_train::workers::protocol::{Answer, Ask, Hello, Report, VersionName, Welcome, Work};
use qurl_train::workers::{
    Done, Link, LinkError, Pool, PoolError, Refused, Without, Worker, WorkerError, WorkerOptions,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PROGRAM: &str = "qurl test";

/// What a worker does wrong, if anything, from its `from`-th report on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// It takes prompts and is never heard of again.
    Hangs,
    Version,
    Checksum,
    Hash,
    Token,
    Logprob,
    /// Its random numbers are others; all that it says of its tokens is true.
    Seed,
    /// It says that it cannot sample, always.
    Fails,
    /// It is slow to say what it has done.
    Slow,
    /// It is so slow to fetch weights that they are gone, every other time.
    Late,
    /// The trainer is away from then on.
    CutOff,
}

/// A way to the trainer that does what its fault says.
struct Faulty {
    pool: Arc<Pool>,
    fault: Fault,
    /// Reports that are as they should be before.
    good: usize,
    /// Set where the fault was seen; who is faultless joins after that.
    seen: Arc<AtomicBool>,
}

impl Link for Faulty {
    fn join(&mut self, hello: &Hello) -> Result<Welcome, LinkError> {
        while self.fault == Fault::None && !self.seen.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Link::join(&mut self.pool, hello)
    }

    fn work(&mut self, ask: &Ask) -> Result<Work, LinkError> {
        let mut work = Link::work(&mut self.pool, ask)?;
        if let (Fault::Seed, Work::Prompts(requests)) = (self.fault, &mut work) {
            requests.iter_mut().for_each(|request| request.key.seed ^= 1);
        }
        Ok(work)
    }

    fn weights(
        &mut self,
        worker: u64,
        version: u64,
        have: Option<(u64, u128)>,
    ) -> Result<Vec<u8>, LinkError> {
        if self.fault == Fault::Late && self.good == 0 {
            self.good = 1;
            return Err(Refused::Gone("that version".to_string()).into());
        }
        if self.fault == Fault::Late {
            self.good = 0;
        }
        Link::weights(&mut self.pool, worker, version, have)
    }

    fn report(&mut self, mut report: Report) -> Result<(), LinkError> {
        if report.answers.is_empty() {
            return Link::report(&mut self.pool, report);
        }
        if self.good > 0 && self.fault != Fault::Late {
            self.good -= 1;
            return Link::report(&mut self.pool, report);
        }
        self.seen.store(true, Ordering::Relaxed);
        let weights = report.version.weights;
        let samples = report.answers.iter_mut().flat_map(|answer| &mut answer.samples);
        match self.fault {
            Fault::None | Fault::Late => {}
            Fault::CutOff => return Err(LinkError::Away("cut off".to_string())),
            Fault::Hangs => return Err(LinkError::Foreign("hung".to_string())),
            Fault::Version => {
                let other = WeightVersion { version: weights.version + 1, ..weights };
                samples.for_each(|sample| sample.weights = other);
            }
            Fault::Checksum => samples.for_each(|sample| sample.weights.checksum ^= 1),
            Fault::Hash => report.version = VersionName::of(weights, b"other weights"),
            Fault::Token => samples.for_each(|sample| {
                let first = &mut sample.tokens[0];
                *first = if *first == 3 { 4 } else { 3 };
            }),
            Fault::Logprob => samples.for_each(|sample| {
                let logp = &mut sample.logprobs[0];
                *logp = f32::from_bits(logp.to_bits() ^ 1);
            }),
            Fault::Seed => report.answers.iter_mut().for_each(|answer| answer.key.seed ^= 1),
            Fault::Fails => {
                let failed = report.answers.pop().map(|answer| (answer.key, "no memory".to_string()));
                report = Report { answers: Vec::new(), failed, ..report };
            }
            Fault::Slow => std::thread::sleep(Duration::from_millis(30)),
        }
        Link::report(&mut self.pool, report)
    }

    fn goodbye(&mut self, worker: u64) -> Result<(), LinkError> {
        Link::goodbye(&mut self.pool, worker)
    }
}

struct Outcome {
    records: Result<Vec<StepRecord>, String>,
    weights: Params<Vec<f32>>,
    notes: Vec<String>,
    workers: Vec<Result<Done, WorkerError>>,
}

/// Three steps with these workers. Where some have faults, the others join after a fault was seen: on a busy
/// machine they would do all there is to do before.
fn run(set: &[&str], settings: Workers, faults: &[(Fault, usize)]) -> Outcome {
    let mut trainer = trainer(set, 2);
    let pool = trainer.open_pool(&settings, PROGRAM, |_| false);
    let stop = AtomicBool::new(false);
    let faulty = faults.iter().filter(|(fault, _)| *fault != Fault::None).count();
    let seen = Arc::new(AtomicBool::new(faulty == 0));
    let first = if faulty > 0 { faulty } else { faults.len() };
    let work = |number: usize, (fault, good): (Fault, usize)| {
        let link = Faulty { pool: pool.clone(), fault, good, seen: seen.clone() };
        let options = WorkerOptions {
            program: PROGRAM.to_string(),
            name: format!("w{number}"),
            kv_bytes: Some(8 << 20),
            max_num_seqs: Some(5),
            patience: Duration::ZERO,
            threads: 1,
        };
        let cpu = Arc::new(Cpu::new(Level::best(), 1));
        Worker::new(cpu, link, options).run(|| stop.load(Ordering::Relaxed), |_| ())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> =
            faults.iter().enumerate().map(|(i, &fault)| scope.spawn(move || work(i, fault))).collect();
        while pool.present() < first {
            std::thread::yield_now();
        }
        let records = (0..3).map(|_| {
            let mut record = trainer.step().map_err(|error| error.to_string())?;
            record.timing.clear();
            Ok(record)
        });
        let records = records.collect();
        pool.end();
        seen.store(true, Ordering::Relaxed);
        stop.store(true, Ordering::Relaxed);
        let workers = workers.into_iter().map(|worker| worker.join().expect("a worker that ends")).collect();
        Outcome { records, weights: trainer.weights().expect("weights"), notes: pool.notes(), workers }
    })
}

fn checked(spot_check: f64) -> Workers {
    Workers { spot_check, lease_s: 1, ..Workers::default() }
}

/// Without any worker the trainer does all of it, as it does without a pool.
fn alone(set: &[&str]) -> (Vec<StepRecord>, Params<Vec<f32>>) {
    let mut trainer = trainer(set, 2);
    let records = steps(&mut trainer, 3);
    (records, trainer.weights().expect("weights"))
}

const DAPO: &str = "algorithm.filter_groups={ max_num_gen_batches = 3 }";

#[test]
fn any_number_of_workers_gives_the_same_bits() {
    let cases: [&[&str]; 4] = [
        &[],
        &["rollout.lag=1", "rollout.stochastic_rounding=true"],
        &["rollout.lag=2", "rollout.format=fp8", "rollout.quantize_head=true"],
        &["rollout.lag=1", DAPO],
    ];
    for set in cases {
        let (records, weights) = alone(set);
        for workers in [0, 1, 3] {
            // With workers the trainer samples nothing itself.
            let without = if workers == 0 { Without::Trainer } else { Without::Wait };
            let settings = Workers { without, lease_s: 60, ..checked(0.3) };
            let found = run(set, settings, &vec![(Fault::None, 0); workers]);
            let what = format!("{set:?}, {workers} workers: {:?}", found.notes);
            assert_eq!(found.records.as_ref(), Ok(&records), "{what}");
            assert_eq!(found.weights, weights, "{what}");
            let done: Vec<Done> = found.workers.into_iter().map(|done| done.expect("no error")).collect();
            let prompts: u64 = done.iter().map(|done| done.prompts).sum();
            let sampled: usize = records.iter().map(|record| record.sampled_groups).sum();
            assert!(workers == 0 || prompts as usize >= sampled, "{what}: {done:?} of {sampled} prompts");
            // Of several, one may sleep through more versions than the trainer keeps.
            assert!(workers != 1 || done[0].whole_versions == 1, "the first whole, then changes: {done:?}");
        }
    }
}

#[test]
fn workers_that_fail_or_lie_change_no_bit() {
    let set = ["rollout.lag=1"];
    let (records, weights) = alone(&set);
    let faults = [
        (Fault::Hangs, "is silent"),
        (Fault::Version, "made with weight version"),
        (Fault::Checksum, "made with weight version"),
        (Fault::Hash, "of hash"),
        (Fault::Token, "w0 is sent away"),
        (Fault::Seed, "sampled again it is"),
        (Fault::Logprob, "scored again it is"),
        (Fault::Fails, "could not sample prompt"),
        (Fault::Slow, "has joined"),
    ];
    for (fault, said) in faults {
        // One that is as it should be stands beside it.
        let good = usize::from(fault != Fault::Seed);
        let settings = Workers { without: Without::Wait, ..checked(1.0) };
        let found = run(&set, settings, &[(fault, good), (Fault::None, 0)]);
        let what = format!("{fault:?}: {:?}", found.notes);
        assert_eq!(found.records.as_ref(), Ok(&records), "{what}");
        assert_eq!(found.weights, weights, "{what}");
        assert!(found.notes.iter().any(|note| note.contains(said)), "{what}");
        let sent_away = !matches!(fault, Fault::Hangs | Fault::Fails | Fault::Slow);
        let ended = found.notes.iter().any(|note| note.contains("w0 is sent away"));
        assert_eq!(ended, sent_away, "{what}");
    }
}

/// A worker that comes too late for weights asks again, and one whose trainer is gone says so in the end.
#[test]
fn a_worker_that_comes_too_late_goes_on_and_one_that_is_left_ends() {
    let (records, _) = alone(&[]);
    let settings = Workers { without: Without::Wait, lease_s: 60, ..checked(0.0) };
    let mut found = run(&[], settings, &[(Fault::Late, 0)]);
    assert_eq!(found.records.as_ref(), Ok(&records), "{:?}", found.notes);
    let done = found.workers.remove(0).expect("no error");
    assert_eq!((done.whole_versions, done.changed_versions), (1, 2), "what it had is not lost");

    let mut found = run(&[], checked(0.0), &[(Fault::CutOff, 1)]);
    assert_eq!(found.records.as_ref(), Ok(&records), "{:?}", found.notes);
    let error = found.workers.remove(0).expect_err("its trainer is gone").to_string();
    assert!(error.contains("cut off; it did not come back within 0 s"), "{error}");
}

/// Rollouts of a worker that were used before anyone looked make the run's bits doubtful: it ends.
#[test]
fn a_lie_after_unchecked_rollouts_ends_the_run() {
    let settings = Workers { lease_s: 60, ..checked(0.5) };
    let found = run(&[], settings, &[(Fault::Logprob, 6)]);
    let error = found.records.expect_err("a lie");
    for part in ["worker w0 lied", "scored again it is", "used in steps [1"] {
        assert!(error.contains(part), "{error}");
    }
}

/// A worker that is spoken for, message by message.
struct Spoken {
    pool: Arc<Pool>,
    number: u64,
    has: VersionName,
}

impl Spoken {
    /// Joins and has the weights.
    fn joins(pool: &Arc<Pool>, name: &str, has: VersionName) -> Spoken {
        let kind = format!("cpu, {}", Level::best());
        let hello = Hello { program: PROGRAM.to_string(), kind, name: name.to_string() };
        let welcome = Pool::join(pool, &hello).expect("welcome");
        Spoken { pool: pool.clone(), number: welcome.worker, has }
    }

    fn asks(&self, busy: bool) -> Work {
        let ask = Ask { worker: self.number, samples: 1, has: Some(self.has), busy };
        Pool::work(&self.pool, &ask).expect("an answer")
    }

    /// Answers a request with one token, over and over.
    fn answers(&self, request: &Request, token: u32) {
        let sample = Sample {
            tokens: vec![token; request.max_new],
            logprobs: vec![-1.0; request.max_new],
            entropies: vec![1.0; request.max_new],
            finish: FinishReason::Length,
            weights: self.has.weights,
        };
        let answers = vec![Answer { key: request.key, samples: vec![sample] }];
        let report = Report { worker: self.number, version: self.has, answers, failed: None };
        Pool::report(&self.pool, report).expect("taken or dropped");
    }
}

/// A pool with leases of a second and one prompt, and what its weights are called.
fn with_one_prompt() -> (Arc<Pool>, VersionName, Request) {
    let mut trainer = trainer(&[], 1);
    let pool = trainer.open_pool(&checked(0.0), PROGRAM, |_| false);
    let (weights, bytes) = (WeightVersion { version: 1, checksum: 7 }, b"weights");
    pool.publish(weights, bytes.to_vec());
    let request = Request::new(vec![1, 2], 3);
    pool.submit(1, std::slice::from_ref(&request));
    (pool, VersionName::of(weights, bytes), request)
}

/// The first token of what the pool has collected.
fn collected(pool: &Pool, request: &Request) -> u32 {
    let own = |_: &[Request]| -> Result<Vec<Group>, PoolError> { panic!("a worker has sampled it") };
    let groups = pool.collect(1, std::slice::from_ref(request), own, |_| Ok(Vec::new())).expect("groups");
    groups[0].samples[0].tokens[0]
}

/// A worker that samples a prompt for longer than a lease, and asks for more meanwhile, keeps it.
#[test]
fn a_prompt_that_takes_longer_than_a_lease_is_sampled_once() {
    let (pool, has, request) = with_one_prompt();
    let slow = Spoken::joins(&pool, "slow", has);
    assert_eq!(slow.asks(false), Work::Prompts(vec![request.clone()]));
    let other = Spoken::joins(&pool, "other", has);
    for _ in 0..16 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(slow.asks(true), Work::Nothing);
        // As if at work, so that it need not wait for something to do.
        assert_eq!(other.asks(true), Work::Nothing, "{:?}", pool.notes());
    }
    slow.answers(&request, 4);
    assert_eq!(collected(&pool, &request), 4);
    let notes = pool.notes();
    assert!(notes.iter().all(|note| note.contains("has joined")), "{notes:?}");
}

/// What a worker says of a prompt that was taken from it is dropped where another one has it, and counts
/// where nobody has.
#[test]
fn a_late_answer_is_dropped_where_somebody_else_has_the_prompt() {
    for taken in [true, false] {
        let (pool, has, request) = with_one_prompt();
        let late = Spoken::joins(&pool, "late", has);
        assert_eq!(late.asks(false), Work::Prompts(vec![request.clone()]));
        std::thread::sleep(Duration::from_millis(1100));
        let other = Spoken::joins(&pool, "other", has);
        if taken {
            assert_eq!(other.asks(false), Work::Prompts(vec![request.clone()]));
        }
        late.answers(&request, 4);
        other.answers(&request, 5);
        assert_eq!(collected(&pool, &request), if taken { 5 } else { 4 });
    }
}

/// A trainer waits for workers until they say that they know that the run is over.
#[test]
fn a_worker_says_goodbye_when_the_run_is_over() {
    let mut trainer = trainer(&[], 1);
    let pool = trainer.open_pool(&Workers { lease_s: 60, ..checked(0.0) }, PROGRAM, |_| false);
    let has = VersionName::of(WeightVersion { version: 1, checksum: 7 }, b"weights");
    let [first, second] = ["first", "second"].map(|name| Spoken::joins(&pool, name, has));
    assert_eq!(pool.waiting(), 0, "the run goes on");
    pool.end();
    assert_eq!(pool.waiting(), 2);
    assert_eq!(first.asks(false), Work::End);
    assert_eq!(pool.waiting(), 2, "the answer may not have come");
    Pool::goodbye(&pool, first.number);
    assert_eq!(pool.waiting(), 1);
    Pool::goodbye(&pool, second.number);
    assert_eq!(pool.waiting(), 0);
}

/// Which token is looked at does not follow from what a worker has sent: the same answer, looked at often.
#[test]
fn no_worker_can_foresee_where_the_trainer_looks() {
    let mut trainer = trainer(&[], 1);
    let pool = trainer.open_pool(&checked(1.0), PROGRAM, |_| false);
    let (weights, bytes) = (WeightVersion { version: 1, checksum: 7 }, b"weights");
    pool.publish(weights, bytes.to_vec());
    let key = |prompt| SampleKey { prompt, ..SampleKey::default() };
    let requests: Vec<Request> =
        (0..12).map(|i| Request { key: key(i), ..Request::new(vec![1, 2], 24) }).collect();
    pool.submit(1, &requests);
    let worker = Spoken::joins(&pool, "worker", VersionName::of(weights, bytes));
    requests.iter().for_each(|request| worker.answers(request, 4));
    let mut looked = BTreeSet::new();
    let own = |_: &[Request]| -> Result<Vec<Group>, PoolError> { panic!("a worker has sampled it") };
    let groups = pool.collect(1, &requests, own, |spots| {
        looked.extend(spots.iter().map(|spot| spot.again));
        Ok(vec![None; spots.len()])
    });
    assert_eq!(groups.expect("groups").len(), 12);
    assert!(looked.len() > 1 && looked.iter().all(|&at| at < 24), "{looked:?}");
}

#[test]
fn workers_of_another_program_or_device_are_refused() {
    let mut trainer = trainer(&[], 1);
    let pool = trainer.open_pool(&checked(0.0), PROGRAM, |_| false);
    let hello = |program: &str, kind: &str| {
        let hello = Hello { program: program.to_string(), kind: kind.to_string(), name: "w".to_string() };
        Pool::join(&pool, &hello).map(|_| ()).map_err(|refused| refused.to_string())
    };
    let kind = format!("cpu, {}", Level::best());
    assert_eq!(hello(PROGRAM, &kind), Ok(()));
    assert!(hello("qurl 0.0.1", &kind).is_err_and(|e| e.contains("use the same")));
    assert!(hello(PROGRAM, "cuda, H200").is_err_and(|e| e.contains("any_device")));
    let unknown = Ask { worker: 7, samples: 1, has: None, busy: false };
    assert!(Pool::work(&pool, &unknown).is_err_and(|e| e.to_string().contains("join again")));
    pool.end();
    assert!(hello(PROGRAM, &kind).is_err_and(|e| e.contains("over")));
}
