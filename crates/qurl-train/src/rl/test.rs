//! Held-out problems, solved by the policy that is trained: the actor in full precision, or the rollout's
//! copy of it where that runs the trainer's forward passes.
//!
//! The rollout engine lends its pages and workspace: for an evaluation in full precision it runs with the
//! trainer's own network, so that nothing is packed or allocated beside what training has.

use super::{RlTrainer, TrainError};
use crate::solve::{SolveOptions, accuracy, draw_problems, held_out, reward, solve};
use qurl_kernels::Device;
use qurl_rollout::{Engine, Sampling};
use qurl_tasks::task::Split;

/// What an evaluation found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tested {
    /// Accuracy of one greedy response to each problem.
    pub accuracy: f64,
    /// Mean reward of these responses; not known of the start of a run that was resumed.
    pub reward: Option<f64>,
    /// Mean accuracy of `run.test_k` samples of each problem (Avg@k), where asked for.
    pub avg_at_k: Option<f64>,
}

impl Tested {
    /// What models are compared by: Avg@k where it is measured, else the greedy accuracy.
    pub fn score(&self) -> f64 {
        self.avg_at_k.unwrap_or(self.accuracy)
    }
}

impl<D: Device> RlTrainer<D> {
    /// Held-out problems of an evaluation.
    pub fn held_out(&self) -> u64 {
        held_out(&*self.task, self.plan.run.test_problems)
    }

    /// Accuracy of the policy that is trained on held-out problems: greedy, and of `run.test_k` samples. All
    /// evaluations of a run use the same problems and random numbers.
    pub fn evaluate(&mut self) -> Result<Tested, TrainError> {
        let version = self.version()?;
        let problems = draw_problems(&*self.task, Split::Test, self.seed, 0, self.held_out())?;
        let (max_new, _) = self.plan.sizes_at(self.step);
        let (max_prompt, seed) = (self.plan.data.max_prompt_length, self.seed);
        let greedy = SolveOptions {
            max_prompt,
            n: 1,
            sampling: Sampling::greedy(),
            max_new,
            seed,
            step: 0,
            lengths: None,
        };
        let sampled = SolveOptions { n: self.plan.run.test_k, sampling: self.plan.test_sampling(), ..greedy };
        if self.straight {
            self.quantize()?;
        }
        let (queue, start, task, ranks) = (&mut self.queue, &self.start, &*self.task, &self.ranks);
        self.engine.wake()?;
        let solve_all = |queue: &mut D::Queue, engine: &mut Engine<D>| {
            let mut measure = |options: SolveOptions| -> Result<(f64, f64), TrainError> {
                let (solved, _) = solve(queue, engine, start, task, problems.clone(), options, ranks)?;
                Ok((accuracy(&solved), reward(&solved)))
            };
            let (accuracy, reward) = measure(greedy)?;
            let avg_at_k = if sampled.n > 0 { Some(measure(sampled)?.0) } else { None };
            Ok(Tested { accuracy, reward: Some(reward), avg_at_k })
        };
        let tested = if self.straight {
            solve_all(queue, &mut self.engine)
        } else {
            let mut packed = None;
            let network = self.actor.whole_network(queue, &mut packed)?;
            self.engine.with_network(network, version, |engine| solve_all(queue, engine))?
        };
        self.rest_engine()?;
        tested
    }
}
