//! Evaluation: every problem of every set is solved once greedily and k times by sampling, and judged.
//!
//! Problems are handed to the engine a few at a time and come back in any order; each is given to the caller
//! as soon as it is judged, so that an interrupted evaluation loses only what was in flight. A sample depends
//! on the weights, the prompt and its key (seed, set, number of the problem, sample) alone, so what is left
//! can be done later, or in another order, with the same result. [`record`] is what is kept of a problem,
//! [`summary`] makes figures of it.

pub mod record;
pub mod summary;

use crate::ranks::Ranks;
use crate::solve::attempt;
use crate::start::{Start, StartError};
use crate::wire::Wire;
use qurl_kernels::Device;
use qurl_kernels::collective::CollectiveError;
use qurl_model::tokenizer::TokenizerError;
use qurl_rollout::{Engine, Request, RequestId, RolloutError, Sample, SampleKey, Sampling};
use qurl_tasks::reward::RewardError;
use qurl_tasks::rng::mix_text;
use qurl_tasks::task::{Attempt, Problem, Prompt, Task};
use record::{ProblemRecord, ResponseRecord};
use std::collections::{BTreeMap, VecDeque};

/// Sequences that are given to the engine at the same time.
const IN_FLIGHT: usize = 512;
/// Sequences of a rank after which the ranks tell each other what they have: many, since a rank that is done
/// waits for the others, but not so many that much is lost where an evaluation is interrupted.
const ROUND: usize = 8 * IN_FLIGHT;

/// Problems that are evaluated together.
pub struct EvalSet<'a> {
    /// Unique among the sets.
    pub name: String,
    /// The judge.
    pub task: &'a dyn Task,
    /// In the order of the data set.
    pub problems: Vec<Problem>,
}

/// How problems are solved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalOptions {
    /// Samples per problem beside the greedy response; 0 for none.
    pub k: usize,
    /// How they are sampled.
    pub sampling: Sampling,
    /// Most new tokens of a response.
    pub max_new: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// Why an evaluation failed.
#[derive(Debug, thiserror::Error)]
pub enum EvaluateError {
    /// The engine.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// A problem that the model cannot be given.
    #[error("{set}, problem {id}: {reason}")]
    Problem {
        /// The set.
        set: String,
        /// The problem.
        id: String,
        /// What is wrong.
        reason: String,
    },
    /// Turning tokens into text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A reward of one's own.
    #[error(transparent)]
    Reward(#[from] RewardError),
    /// An exchange with other ranks.
    #[error(transparent)]
    Exchange(#[from] CollectiveError),
    /// A finished problem could not be saved.
    #[error("saving a response: {0}")]
    Save(#[from] std::io::Error),
    /// A record of an earlier evaluation does not belong to this one.
    #[error("the record of problem {index} ({id}) of set {set} does not belong to this evaluation: {reason}")]
    Stray {
        /// The set.
        set: String,
        /// Number of the problem.
        index: u64,
        /// Its id.
        id: String,
        /// What does not fit.
        reason: &'static str,
    },
}

/// The tokens of a prompt. A chat for a tokenizer without a chat template is given as plain text.
pub fn encode(start: &Start, prompt: &Prompt) -> Result<Vec<u32>, StartError> {
    match prompt {
        Prompt::Chat(_) if start.template.is_none() => start.encode(&Prompt::Text(prompt.plain())),
        _ => start.encode(prompt),
    }
}

/// Set and number of a problem.
type Key = (usize, u64);

/// Solves and judges all problems but those that are `done` already. `save` is called with each new record,
/// in the order of finishing; all records come back in the order of the sets.
///
/// Several ranks solve neighbouring problems each, round by round, and have all records after each round;
/// those of other ranks are saved then.
pub fn evaluate<D: Device>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    start: &Start,
    sets: &[EvalSet],
    options: EvalOptions,
    done: Vec<ProblemRecord>,
    ranks: &Ranks,
    mut save: impl FnMut(&ProblemRecord) -> std::io::Result<()>,
) -> Result<Vec<ProblemRecord>, EvaluateError> {
    let mut records = BTreeMap::new();
    for record in done {
        records.insert((place_of(&record, sets, options.k)?, record.index), record);
    }
    let mut work = plan(engine, start, sets, options)?;
    work.retain(|(key, _)| !records.contains_key(key));
    let round = match ranks.size() {
        1 => work.len(),
        size => size * (ROUND / (options.k + 1)).max(1),
    };
    while !work.is_empty() {
        let mut now: Vec<_> = work.drain(..round.min(work.len())).collect();
        let own = ranks.part(now.len());
        let now = now.drain(own).collect();
        let (mut owners, mut solved) = (BTreeMap::new(), BTreeMap::new());
        let result = run(queue, engine, start, sets, now, &mut owners, &mut solved, &mut save);
        for &id in owners.keys() {
            engine.cancel(id);
        }
        result?;
        for (rank, of_rank) in ranks.gather(solved.into_values().map(Sent).collect())?.into_iter().enumerate()
        {
            for Sent(record) in of_rank {
                if rank != ranks.rank() {
                    save(&record)?;
                }
                records.insert((place_of(&record, sets, options.k)?, record.index), record);
            }
        }
    }
    Ok(records.into_values().collect())
}

/// The records that rank 0 has read, at all ranks.
pub fn of_first(ranks: &Ranks, read: Vec<ProblemRecord>) -> Result<Vec<ProblemRecord>, EvaluateError> {
    let sent = ranks.of_first(read.into_iter().map(Sent).collect::<Vec<_>>())?;
    Ok(sent.into_iter().map(|Sent(record)| record).collect())
}

/// A record in flight to other ranks: the line of its file.
struct Sent(ProblemRecord);

impl Wire for Sent {
    fn put(&self, to: &mut Vec<u8>) {
        // Plain text and numbers: there is nothing in it that JSON does not have.
        serde_json::to_string(&self.0).unwrap_or_default().put(to);
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        serde_json::from_str(&String::take(from)?).ok().map(Sent)
    }
}

/// Whether all problems can be given to the engine; changes nothing.
pub fn check<D: Device>(
    engine: &Engine<D>,
    start: &Start,
    sets: &[EvalSet],
    options: EvalOptions,
) -> Result<(), EvaluateError> {
    plan(engine, start, sets, options).map(|_| ())
}

/// The checked requests of all problems.
fn plan<D: Device>(
    engine: &Engine<D>,
    start: &Start,
    sets: &[EvalSet],
    options: EvalOptions,
) -> Result<Vec<(Key, Vec<Request>)>, EvaluateError> {
    let mut work = Vec::new();
    for (place, set) in sets.iter().enumerate() {
        for (index, problem) in (0..).zip(&set.problems) {
            let wrong = |reason: String| EvaluateError::Problem {
                set: set.name.clone(),
                id: problem.id.clone(),
                reason,
            };
            let prompt = encode(start, &problem.prompt).map_err(|e| wrong(e.to_string()))?;
            let requests = requests(start, &set.name, index, prompt, options);
            for request in &requests {
                engine.check(request).map_err(|e| wrong(e.to_string()))?;
            }
            work.push(((place, index), requests));
        }
    }
    Ok(work)
}

/// Which set a record belongs to.
fn place_of(record: &ProblemRecord, sets: &[EvalSet], k: usize) -> Result<usize, EvaluateError> {
    let stray = |reason| {
        let (set, id) = (record.set.clone(), record.id.clone());
        EvaluateError::Stray { set, index: record.index, id, reason }
    };
    let place =
        sets.iter().position(|s| s.name == record.set).ok_or_else(|| stray("there is no such set"))?;
    match sets[place].problems.get(record.index as usize) {
        None => Err(stray("the set has fewer problems")),
        Some(problem) if problem.id != record.id => Err(stray("the set has another problem there")),
        Some(_) if record.samples.len() != k => Err(stray("the number of samples differs")),
        Some(_) => Ok(place),
    }
}

/// The greedy request and, where samples are wanted, the one for them.
fn requests(start: &Start, set: &str, index: u64, prompt: Vec<u32>, options: EvalOptions) -> Vec<Request> {
    let greedy = Request {
        sampling: Sampling::greedy(),
        // The name of the set takes the place of the step: its samples do not depend on the other sets.
        key: SampleKey { seed: options.seed, step: mix_text(set), prompt: index },
        stop_ids: start.stop_ids(),
        ..Request::new(prompt, options.max_new)
    };
    let samples = Request { n: options.k, sampling: options.sampling, ..greedy.clone() };
    if options.k == 0 { vec![greedy] } else { vec![greedy, samples] }
}

/// Keeps the engine busy until all work is done. `owners` are the requests in flight.
fn run<D: Device>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    start: &Start,
    sets: &[EvalSet],
    work: Vec<(Key, Vec<Request>)>,
    owners: &mut BTreeMap<RequestId, Key>,
    records: &mut BTreeMap<Key, ProblemRecord>,
    save: &mut impl FnMut(&ProblemRecord) -> std::io::Result<()>,
) -> Result<(), EvaluateError> {
    let mut work = work.into_iter();
    let mut parts: BTreeMap<Key, BTreeMap<RequestId, Vec<Sample>>> = BTreeMap::new();
    loop {
        while engine.unfinished() < IN_FLIGHT
            && let Some((key, requests)) = work.next()
        {
            for request in requests {
                owners.insert(engine.submit(request)?, key);
            }
        }
        if owners.is_empty() {
            return Ok(());
        }
        engine.step(queue)?;
        for group in engine.finished() {
            let Some(key) = owners.remove(&group.request) else { continue };
            parts.entry(key).or_default().insert(group.request, group.samples);
            if owners.values().any(|owner| *owner == key) {
                continue;
            }
            // The greedy request is the older one.
            let samples = parts.remove(&key).unwrap_or_default().into_values().flatten().collect();
            let record = judge(start, &sets[key.0], key.1, samples)?;
            save(&record)?;
            records.insert(key, record);
        }
    }
}

/// Texts and verdicts of a problem's responses, the greedy one first.
fn judge(
    start: &Start,
    set: &EvalSet,
    index: u64,
    samples: Vec<Sample>,
) -> Result<ProblemRecord, EvaluateError> {
    let problem = &set.problems[index as usize];
    let decode = |sample: &Sample| start.tokenizer.decode(&sample.tokens, true);
    let texts = samples.iter().map(decode).collect::<Result<Vec<String>, _>>()?;
    let batch: Vec<Attempt> =
        samples.iter().zip(&texts).map(|(sample, text)| attempt(problem, sample, text)).collect();
    let verdicts = set.task.judge(&batch)?;
    let mut responses: VecDeque<ResponseRecord> = samples
        .iter()
        .zip(texts)
        .zip(verdicts)
        .map(|((sample, text), verdict)| ResponseRecord {
            text,
            correct: f64::from(verdict.correct),
            reward: verdict.reward,
            extracted: verdict.extracted,
            tokens: sample.tokens.len(),
            truncated: sample.finish.is_truncated(),
        })
        .collect();
    Ok(ProblemRecord {
        set: set.name.clone(),
        index,
        id: problem.id.clone(),
        prompt: problem.prompt.clone(),
        answer: problem.answer.clone(),
        greedy: responses.pop_front(),
        samples: responses.into(),
    })
}
