//! Solving problems with the rollout engine, and judging what came out: the rollouts of a training step and
//! every evaluation are this. Ranks take neighbouring problems each and then have the responses to all:
//! random numbers belong to a problem's number, so it does not matter who samples it.

mod exchange;
mod judging;

pub use exchange::Trouble;
pub(crate) use exchange::is_not_finite;

use crate::lengths::ForcedLengths;
use crate::ranks::Ranks;
use crate::start::{Start, StartError};
use crate::workers::PoolError;
use qurl_kernels::{Device, DeviceError};
use qurl_model::tokenizer::TokenizerError;
use qurl_rollout::{Engine, Group, Request, RolloutError, Sample, SampleKey, Sampling};
use qurl_tasks::reward::RewardError;
use qurl_tasks::task::{Attempt, Problem, Split, Task, Verdict};
use std::collections::BTreeMap;
use std::ops::Range;

/// Why problems could not be solved.
#[derive(Debug, thiserror::Error)]
pub enum SolveError {
    /// The engine.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// Turning a prompt into tokens.
    #[error("problem {id}: {source}")]
    Prompt {
        /// The problem.
        id: String,
        /// What went wrong.
        source: Box<StartError>,
    },
    /// A prompt that does not fit.
    #[error(
        "problem {id}: its prompt has {found} tokens, expected at most the {max} of `data.max_prompt_length`"
    )]
    PromptTooLong {
        /// The problem.
        id: String,
        /// Its length.
        found: usize,
        /// The limit.
        max: usize,
    },
    /// Turning tokens into text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A reward of one's own.
    #[error(transparent)]
    Reward(#[from] RewardError),
    /// Another rank failed.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// Which.
        rank: usize,
        /// In what way.
        trouble: Trouble,
        /// What it said.
        reason: String,
    },
    /// Rollout workers.
    #[error(transparent)]
    Workers(#[from] PoolError),
    /// The task has no problems in this split.
    #[error("the task {task:?} has no {split:?} problems")]
    NoProblems {
        /// The task.
        task: String,
        /// The split.
        split: Split,
    },
}

impl SolveError {
    /// Whether the ranks could not tell each other what happened.
    pub(crate) fn is_exchange(&self) -> bool {
        matches!(self, SolveError::Rollout(RolloutError::Device(DeviceError::Exchange(_))))
    }
}

/// How responses are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SolveOptions {
    /// Longest prompt in tokens.
    pub max_prompt: usize,
    /// Samples per problem.
    pub n: usize,
    /// Temperature and truncation.
    pub sampling: Sampling,
    /// Most new tokens.
    pub max_new: usize,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Step of the training, or any other number that sets this call apart.
    pub step: u64,
    /// Lengths that are set in advance, for benchmarks.
    pub lengths: Option<ForcedLengths>,
}

/// One response with its verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// Tokens, log-probs and why it ended.
    pub sample: Sample,
    /// Its text.
    pub text: String,
    /// The task's judgement.
    pub verdict: Verdict,
}

/// A problem with its responses.
#[derive(Clone, Debug, PartialEq)]
pub struct Solved {
    /// The problem.
    pub problem: Problem,
    /// Tokens of its prompt.
    pub prompt: Vec<u32>,
    /// In the order of the samples.
    pub responses: Vec<Response>,
}

/// Draws `count` problems of a split, from number `first` on.
pub fn draw_problems(
    task: &dyn Task,
    split: Split,
    seed: u64,
    first: u64,
    count: u64,
) -> Result<Vec<Problem>, SolveError> {
    let problems = (first..first + count).map(|i| task.draw(split, seed, i));
    problems
        .collect::<Option<_>>()
        .ok_or_else(|| SolveError::NoProblems { task: task.name().to_string(), split })
}

/// So many different held-out problems there are of those asked for.
pub fn held_out(task: &dyn Task, wanted: u64) -> u64 {
    task.len(Split::Test).map_or(wanted, |there| there.min(wanted))
}

/// Samples responses to all problems and judges them, each rank its part; the second result is how many
/// seconds judging took here after the last sample.
pub fn solve<D: Device>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    start: &Start,
    task: &dyn Task,
    problems: Vec<Problem>,
    options: SolveOptions,
    ranks: &Ranks,
) -> Result<(Vec<Solved>, f64), SolveError> {
    let own = ranks.part(problems.len());
    let generate = |requests: &[Request], give: &mut dyn FnMut(usize, Group) -> bool| {
        Ok(engine.generate_each(queue, requests, give)?)
    };
    solve_with(start, task, problems, options, own, ranks, generate)
}

/// [`solve`] where `generate` samples this rank's part of the problems: it hands over groups by their numbers
/// in this part, and ends early where it is told that no more are wanted.
pub(crate) fn solve_with(
    start: &Start,
    task: &dyn Task,
    problems: Vec<Problem>,
    options: SolveOptions,
    own: Range<usize>,
    ranks: &Ranks,
    generate: impl FnOnce(&[Request], &mut dyn FnMut(usize, Group) -> bool) -> Result<(), SolveError>,
) -> Result<(Vec<Solved>, f64), SolveError> {
    let requests = requests(start, &problems, options)?;
    let (asked, problems_here) = (&requests[own.clone()], &problems[own]);
    let judged = judging::beside_sampling(
        asked.len(),
        |give| generate(asked, give),
        |part, groups| judge(start, task, &problems_here[part], groups),
    );
    let (responses, seconds) = match judged {
        Ok((responses, seconds)) => (Ok(responses), seconds),
        Err(error) => (Err(error), 0.0),
    };
    let responses = exchange::gather(ranks, responses)?;
    let solved = problems.into_iter().zip(requests).zip(responses);
    let solved = solved.map(|((problem, r), responses)| Solved { problem, prompt: r.prompt, responses });
    Ok((solved.collect(), seconds))
}

/// The requests of all problems.
pub(crate) fn requests(
    start: &Start,
    problems: &[Problem],
    options: SolveOptions,
) -> Result<Vec<Request>, SolveError> {
    let stop_ids = if options.lengths.is_some() { Vec::new() } else { start.stop_ids() };
    let mut requests = Vec::with_capacity(problems.len());
    for (i, problem) in problems.iter().enumerate() {
        let prompt = start
            .encode(&problem.prompt)
            .map_err(|e| SolveError::Prompt { id: problem.id.clone(), source: Box::new(e) })?;
        if prompt.len() > options.max_prompt {
            let (id, found) = (problem.id.clone(), prompt.len());
            return Err(SolveError::PromptTooLong { id, found, max: options.max_prompt });
        }
        let key = (options.seed, options.step, i as u64);
        requests.push(Request {
            n: options.n,
            max_new_of: options
                .lengths
                .map_or(Vec::new(), |lengths| lengths.of(key, options.n, options.max_new)),
            sampling: options.sampling,
            key: SampleKey { seed: options.seed, step: options.step, prompt: i as u64 },
            stop_ids: stop_ids.clone(),
            ..Request::new(prompt, options.max_new)
        });
    }
    Ok(requests)
}

/// Texts and verdicts of the responses to problems.
fn judge(
    start: &Start,
    task: &dyn Task,
    problems: &[Problem],
    groups: Vec<Group>,
) -> Result<Vec<Vec<Response>>, SolveError> {
    let decode = |sample: &Sample| start.tokenizer.decode(&sample.tokens, true);
    let texts = groups.iter().flat_map(|g| &g.samples).map(decode).collect::<Result<Vec<String>, _>>()?;
    let owners = problems.iter().zip(&groups).flat_map(|(p, g)| g.samples.iter().map(move |s| (p, s)));
    let batch: Vec<Attempt> =
        owners.zip(&texts).map(|((problem, sample), text)| attempt(problem, sample, text)).collect();
    let verdicts = task.judge(&batch)?;
    let mut judged = verdicts.into_iter().zip(texts);
    let responses = groups.into_iter().map(|group| {
        let samples = group.samples.into_iter().zip(&mut judged);
        samples.map(|(sample, (verdict, text))| Response { sample, text, verdict }).collect()
    });
    Ok(responses.collect())
}

/// A response as it is judged.
pub(crate) fn attempt<'a>(problem: &'a Problem, sample: &Sample, text: &'a str) -> Attempt<'a> {
    Attempt { problem, response: text, tokens: sample.tokens.len(), truncated: sample.finish.is_truncated() }
}

/// Share of responses that are right; rewards play no part.
pub fn accuracy(solved: &[Solved]) -> f64 {
    mean(solved, |verdict| f64::from(verdict.correct))
}

/// Mean reward of the responses, before any penalty.
pub fn reward(solved: &[Solved]) -> f64 {
    mean(solved, |verdict| verdict.reward)
}

/// Means of the named parts of the rewards, before their weights.
pub fn reward_parts(solved: &[Solved]) -> BTreeMap<String, f64> {
    let first = solved.iter().flat_map(|s| &s.responses).next();
    let names = first.map_or(&[][..], |response| &response.verdict.parts);
    let part = |name: &str| mean(solved, |verdict| verdict.part(name).unwrap_or(0.0));
    names.iter().map(|(name, _)| (name.clone(), part(name))).collect()
}

fn mean(solved: &[Solved], of: impl Fn(&Verdict) -> f64) -> f64 {
    let all: Vec<f64> = solved.iter().flat_map(|s| s.responses.iter().map(|r| of(&r.verdict))).collect();
    all.iter().sum::<f64>() / all.len().max(1) as f64
}
