//! Solving problems with the rollout engine, and judging what came out: the rollouts of a training step and every
//! evaluation are this.

use crate::start::{Start, StartError};
use qurl_kernels::Backend;
use qurl_model::tokenizer::TokenizerError;
use qurl_rollout::{Engine, Request, RolloutError, Sample, SampleKey, Sampling};
use qurl_tasks::task::{Problem, Split, Task, Verdict};

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
        source: StartError,
    },
    /// Turning tokens into text.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The task has no problems in this split.
    #[error("the task {task:?} has no {split:?} problems")]
    NoProblems {
        /// The task.
        task: String,
        /// The split.
        split: Split,
    },
}

/// How samples are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
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

impl Solved {
    /// Mean reward of the responses.
    pub fn mean_reward(&self) -> f64 {
        self.responses.iter().map(|r| r.verdict.reward).sum::<f64>() / self.responses.len().max(1) as f64
    }
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
    problems.collect::<Option<_>>().ok_or_else(|| SolveError::NoProblems { task: task.name().to_string(), split })
}

/// Samples responses to all problems and judges them.
pub fn solve<B: Backend>(
    engine: &mut Engine<B>,
    start: &Start,
    task: &dyn Task,
    problems: Vec<Problem>,
    draw: Draw,
) -> Result<Vec<Solved>, SolveError> {
    let stop_ids = start.stop_ids();
    let mut requests = Vec::with_capacity(problems.len());
    for (i, problem) in problems.iter().enumerate() {
        let prompt =
            start.encode(&problem.prompt).map_err(|source| SolveError::Prompt { id: problem.id.clone(), source })?;
        requests.push(Request {
            n: draw.n,
            sampling: draw.sampling,
            key: SampleKey { seed: draw.seed, step: draw.step, prompt: i as u64 },
            stop_ids: stop_ids.clone(),
            ..Request::new(prompt, draw.max_new)
        });
    }
    let groups = engine.generate(&requests)?;
    let mut solved = Vec::with_capacity(problems.len());
    for (problem, group) in problems.into_iter().zip(groups) {
        let mut responses = Vec::with_capacity(group.samples.len());
        for sample in group.samples {
            let text = start.tokenizer.decode(&sample.tokens, true)?;
            let verdict = task.verify(&problem, &text);
            responses.push(Response { sample, text, verdict });
        }
        solved.push(Solved { problem, prompt: group.prompt, responses });
    }
    Ok(solved)
}

/// Share of problems whose responses are right, by the part `correct` of the verdicts (or the reward where there is none).
pub fn accuracy(solved: &[Solved]) -> f64 {
    let right = |r: &Response| r.verdict.part("correct").unwrap_or(r.verdict.reward);
    let all: Vec<f64> = solved.iter().flat_map(|s| s.responses.iter().map(right)).collect();
    all.iter().sum::<f64>() / all.len().max(1) as f64
}
