//! DAPO's rewards of 1 and -1 with its penalty for overlong responses, from verdicts to advantages: verl's
//! numbers.

use qurl_rl::advantage::Rollouts;
use qurl_rollout::{FinishReason, Sample, WeightVersion};
use qurl_tasks::task::{Problem, Prompt, Verdict};
use qurl_train::recipe::Recipe;
use qurl_train::rl::{RolloutBatch, Sampled, StepRecord};
use qurl_train::solve::{Response, Solved};
use serde_json::Value;

const TINY_DAPO: &str = include_str!("../../../../recipes/tiny-dapo.toml");

/// A response of so many tokens, judged as the recipe's task judges.
fn response(recipe: &Recipe, right: bool, length: usize) -> Response {
    let task = recipe.task().expect("[task]").task().expect("a task");
    let problem = Problem { answer: "7".into(), ..problem() };
    let verdict: Verdict = task.verify(&problem, if right { "#### 7" } else { "#### 8" });
    let tokens = vec![1; length];
    let (logprobs, entropies) = (vec![-1.0; length], vec![0.0; length]);
    let sample = Sample {
        tokens,
        logprobs,
        entropies,
        finish: FinishReason::Length,
        weights: WeightVersion::default(),
    };
    Response { sample, text: String::new(), verdict }
}

fn problem() -> Problem {
    Problem { id: "p".into(), prompt: Prompt::Text("3+4=".into()), answer: "7".into(), extra: Value::Null }
}

/// Advantages of 4 right and short, 2 right at the limit, 8 wrong and short, 2 wrong at the limit; and their
/// record.
fn advantages(overrides: &[&str]) -> ([f64; 4], StepRecord) {
    let overrides: Vec<String> = overrides.iter().map(|s| s.to_string()).collect();
    let recipe = Recipe::parse(TINY_DAPO, "tiny-dapo", &overrides).expect("recipe");
    let plan = recipe.rl("tiny-dapo").expect("a plan");
    let (limit, _) = plan.sizes_at(1);
    let kinds = [(true, 3, 4), (true, limit, 2), (false, 3, 8), (false, limit, 2)];
    let of_kind = |&(right, length, count)| (0..count).map(move |_| (right, length));
    let responses: Vec<Response> =
        kinds.iter().flat_map(of_kind).map(|(right, length)| response(&recipe, right, length)).collect();
    let solved = [Solved { problem: problem(), prompt: vec![1, 2], responses }];
    let batch = RolloutBatch::pack(&solved, &plan, 1);
    let mut sampled = Sampled::default();
    sampled.add(&solved).expect("rewards");
    let record = StepRecord::new(1, &solved, &batch, sampled, 0.5);
    let rewards: Vec<f64> = batch.rewards.iter().map(|&r| f64::from(r)).collect();
    let (mask, seq, groups) = (&batch.mask[..], &batch.seq[..], &batch.groups[..]);
    let rollouts = Rollouts { rewards: &rewards, mask, seq, groups, values: None, accepted: None };
    let estimate = plan.algorithm.adv_estimator.estimate(&rollouts).expect("advantages");
    let of_sequence = |sequence: u32| {
        let tokens =
            estimate.advantages.iter().zip(&batch.seq).filter(|(_, s)| **s == sequence).map(|(a, _)| *a);
        let tokens: Vec<f64> = tokens.collect();
        assert!(tokens.iter().all(|a| *a == tokens[0]), "one advantage for all tokens of a response");
        tokens[0]
    };
    ([0, 4, 6, 14].map(of_sequence), record)
}

#[test]
fn advantages_are_those_of_verl() {
    let (found, record) = advantages(&[]);
    let expected = [1.452, 0.484, -0.484, -1.452];
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3), "{found:?}");
    // A right response at the limit is still better than a wrong one, and accuracy is no reward.
    assert_eq!((record.accuracy, record.reward), (6.0 / 16.0, -4.0 / 16.0));
    // Rewards are 1 (six) and -1 (ten); of one group, so that both spreads are the same.
    let spread = record.reward_spread.expect("responses");
    let deviation = (1.0f64 - 0.25 * 0.25).sqrt();
    assert!((spread.reward_std - deviation).abs() < 1e-12 && spread.reward_group_std == spread.reward_std);
    assert_eq!((spread.reward_min, spread.reward_max), (-1.0, 1.0));
    assert_eq!((record.gen_batches, record.sampled_groups, record.mixed_groups), (1, 1, 1));
    let line = serde_json::to_value(&record).expect("JSON");
    assert_eq!(line["reward_group_std"], spread.reward_group_std, "beside the reward, not below it");
}

#[test]
fn with_rewards_of_1_and_0_the_penalty_makes_right_as_bad_as_wrong() {
    let (found, record) = advantages(&["task.reward={ right = 1.0, wrong = 0.0 }"]);
    let expected = [1.413, -0.202, -0.202, -1.817];
    assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3), "{found:?}");
    assert_eq!((record.accuracy, record.reward), (6.0 / 16.0, 6.0 / 16.0));
}
