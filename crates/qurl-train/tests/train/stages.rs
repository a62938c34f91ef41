//! A stage with a new reference and a new optimizer trains as a run of its own would, from the same weights.

use crate::common::tiny::{self, cpu};
use qurl_kernels::Cpu;
use qurl_rollout::{FinishReason, Sample, WeightVersion};
use qurl_tasks::task::{Problem, Prompt, Verdict};
use qurl_train::rl::{RlTrainer, StepRecord};
use qurl_train::solve::{Response, Solved};
use serde_json::Value;

/// Two updates a step of two prompts with two responses each, from a fresh model.
const SMALL: &[&str] = &[
    "data.train_batch_size=2",
    "data.max_response_length=8",
    "rollout.n=2",
    "algorithm.kl_loss_coef=0.5",
    "actor.lr=1e-2",
    "actor.lr_warmup_steps=2",
    "actor.ppo_mini_batch_size=1",
    "run.total_steps=4",
];

fn trainer(overrides: &[&str]) -> RlTrainer<Cpu> {
    let sections = [&["model.new"], tiny::RL].concat();
    let recipe = tiny::parsed(&sections, &[SMALL, overrides].concat()).expect("a recipe");
    let (start, task) = tiny::start(&recipe);
    RlTrainer::new(&cpu(1), &recipe, "stages", start, task).expect("a trainer")
}

/// The same two prompts with two responses each, other ones at every step.
fn rollouts(step: u32) -> Vec<Solved> {
    let response = |sample: u32| {
        let tokens: Vec<u32> = (0..4 + sample).map(|i| 3 + (7 * i + 5 * sample + step) % 10).collect();
        let (logprobs, entropies) = (vec![-2.0; tokens.len()], vec![2.0; tokens.len()]);
        let weights = WeightVersion::default();
        let sample_ = Sample { tokens, logprobs, entropies, finish: FinishReason::Length, weights };
        Response { sample: sample_, text: String::new(), verdict: Verdict::new(sample == 0, true, 0.0, None) }
    };
    let solved = |prompt: u32| {
        let text = Prompt::Text(String::new());
        let problem =
            Problem { id: prompt.to_string(), prompt: text, answer: String::new(), extra: Value::Null };
        Solved { problem, prompt: vec![3 + prompt, 4], responses: vec![response(0), response(1)] }
    };
    vec![solved(0), solved(1)]
}

/// The numbers of a step that come from its weights, reference, moments and learning rate.
fn numbers(record: &StepRecord) -> (f64, f64, f64, Option<f64>) {
    (record.lr, record.loss, record.grad_norm, record.reference_kl)
}

fn bits(trainer: &mut RlTrainer<Cpu>) -> Vec<u32> {
    tiny::bits(&trainer.weights().expect("weights"))
}

#[test]
fn a_fresh_stage_is_a_run_of_its_own() {
    let stage = |more: &str| format!("run.stages=[{{ from_step = 3, max_response_length = 8{more} }}]");
    let fresh = stage(", new_reference = true, new_optimizer = true");
    let mut staged = trainer(&[&fresh]);
    for step in 1..=2 {
        staged.train_on(rollouts(step)).expect("step");
    }
    // Another run, from the weights after the first two steps.
    let mut alone = trainer(&["run.total_steps=2"]);
    let mut state = alone.snapshot("").expect("a snapshot");
    state.actor.weights = staged.weights().expect("weights");
    state.reference = Some(state.actor.weights.clone());
    alone.restore(state).expect("restored");
    for step in 3..=4 {
        let (a, b) =
            (staged.train_on(rollouts(step)).expect("step"), alone.train_on(rollouts(step)).expect("step"));
        assert_eq!(numbers(&a), numbers(&b), "step {step}");
    }
    assert_eq!(bits(&mut staged), bits(&mut alone));
    assert_eq!(staged.actor.optimizer.steps, 4, "two updates a step, counted from the stage's start");

    // Each of the two alone gives something else, and neither continues as if nothing were new.
    let others = ["", ", new_reference = true", ", new_optimizer = true"].map(|more| {
        let mut other = trainer(&[&stage(more)]);
        let records: Vec<StepRecord> =
            (1..=4).map(|step| other.train_on(rollouts(step)).expect("step")).collect();
        (numbers(&records[2]), bits(&mut other))
    });
    let all: Vec<&Vec<u32>> = others.iter().map(|(_, bits)| bits).collect();
    let staged = bits(&mut staged);
    assert!(all.iter().all(|other| **other != staged));
    assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
    // The first update of a stage meets a new reference at distance 0 (two updates a step are averaged here).
    let kl = |i: usize| others[i].0.3.expect("a reference");
    assert!(kl(1) < 0.5 * kl(0), "{} and {}", kl(1), kl(0));
    assert_eq!((others[0].0.0, others[2].0.0), (1e-2, 5e-3), "the schedule begins again with the optimizer");
}
