//! What tests share: rollouts of the goldens of whole steps, as the trainer gets them from its engine, and a
//! recipe of a second ([`tiny`]).

pub mod tiny;

use qurl_rollout::{FinishReason, Sample, WeightVersion};
use qurl_tasks::task::{Problem, Prompt, Verdict};
use qurl_train::solve::{Response, Solved};
use serde_json::Value;

/// A list of a golden.
pub fn list<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
    serde_json::from_value(value.clone()).expect("a list")
}

/// The rollouts of a golden's group.
pub fn solved(group: &Value) -> Solved {
    let samples = list::<Vec<u32>>(&group["responses"]).into_iter().zip(list::<Vec<f32>>(&group["behav"]));
    let rewards = list::<f64>(&group["rewards"]);
    let responses = samples.zip(rewards).map(|((tokens, logprobs), reward)| Response {
        sample: Sample {
            entropies: vec![0.0; tokens.len()],
            tokens,
            logprobs,
            finish: FinishReason::Length,
            weights: WeightVersion::default(),
        },
        text: String::new(),
        verdict: Verdict { reward, ..Verdict::new(false, true, 0.0, None) },
    });
    let responses = responses.collect();
    let prompt = Prompt::Text(String::new());
    let problem = Problem { id: "golden".into(), prompt, answer: String::new(), extra: Value::Null };
    Solved { problem, prompt: list(&group["prompt"]), responses }
}
