//! What goes wrong at one rank ends all of them, with an error that says where.

use super::{GRPO, on_ranks, recipe};
use crate::common::tiny::{self, cpu};
use qurl_tasks::reward::RewardError;
use qurl_tasks::task::{Attempt, Problem, Split, Task, Verdict};
use qurl_train::ranks::Ranks;
use qurl_train::rl::{RlTrainer, Symptom, TrainError};
use std::sync::Arc;

/// A task whose judge is broken.
struct Broken(Box<dyn Task>);

impl Task for Broken {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn draw(&self, split: Split, seed: u64, index: u64) -> Option<Problem> {
        self.0.draw(split, seed, index)
    }

    fn verify(&self, problem: &Problem, response: &str) -> Verdict {
        self.0.verify(problem, response)
    }

    fn judge(&self, _batch: &[Attempt]) -> Result<Vec<Verdict>, RewardError> {
        Err(RewardError::TwoJudges { first: "one".to_string(), second: "other".to_string() })
    }

    fn len(&self, split: Split) -> Option<u64> {
        self.0.len(split)
    }
}

#[test]
fn a_rank_that_cannot_judge_ends_all_with_an_error_that_names_it() {
    let recipe = recipe(GRPO);
    let ended = on_ranks(2, |collective| {
        let (start, mut task) = tiny::start(&recipe);
        if collective.rank() == 1 {
            task = Box::new(Broken(task));
        }
        let ranks = Ranks::new(Arc::new(collective), &recipe).expect("ranks");
        let mut trainer = RlTrainer::on_ranks(&cpu(1), &recipe, "tiny", start, task, ranks).expect("trainer");
        let error = trainer.step().expect_err("a broken judge");
        assert_eq!(trainer.steps_done(), 0, "nothing has changed");
        error
    });
    assert!(ended.iter().all(TrainError::is_of_all_ranks), "{ended:?}");
    let [first, second] = [&ended[0], &ended[1]].map(ToString::to_string);
    assert!(
        second.contains("`one` and `other`") && first == format!("rank 1: {second}"),
        "{first}\n{second}"
    );
}

#[test]
fn weights_that_are_not_finite_break_all_ranks_alike() {
    let recipe = recipe(GRPO);
    let symptoms = on_ranks(2, |collective| {
        let (mut start, task) = tiny::start(&recipe);
        start.weights.final_norm.fill(f32::NAN);
        let ranks = Ranks::new(Arc::new(collective), &recipe).expect("ranks");
        let vocabulary = start.config.vocab_size;
        let mut trainer = RlTrainer::on_ranks(&cpu(1), &recipe, "tiny", start, task, ranks).expect("trainer");
        Symptom::of_error(&trainer.step().expect_err("NaN"), vocabulary)
    });
    assert!(symptoms.iter().all(|s| matches!(s, Some(Symptom::NotFinite { .. }))), "{symptoms:?}");
}
