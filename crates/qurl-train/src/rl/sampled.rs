//! A few rollouts of a step for people to read: text, reward and what happened to every token.

use super::{RlTrainer, TrainError};
use crate::solve::SolveError;
use crate::start::Start;
use qurl_kernels::Device;
use qurl_model::rng::{CounterRng, permutation, text_key};
use qurl_model::tokenizer::{StreamDecoder, TokenizerError};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// One response with its prompt: a line of `rollouts/step-000010.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SampledRollout {
    /// The step.
    pub step: u64,
    /// Name of the problem.
    pub problem: String,
    /// What the model read, special tokens included.
    pub prompt: String,
    /// What it wrote.
    pub response: String,
    /// `stop` or `length`.
    pub finish: &'static str,
    /// The right answer.
    pub answer: String,
    /// The answer that was found in the response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extracted: Option<String>,
    /// Whether the response is right.
    pub correct: bool,
    /// Reward of the response.
    pub reward: f64,
    /// Its named parts, before their weights.
    pub reward_parts: Map<String, Value>,
    /// Advantage; the mean over the tokens where they differ.
    pub advantage: f64,
    /// Advantages of the tokens, where they differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub advantages: Vec<f32>,
    /// Token ids of the response.
    pub ids: Vec<u32>,
    /// Their texts, which together are the response with its special tokens.
    pub tokens: Vec<String>,
    /// Probability under the actor in full precision over that under the policy that sampled.
    pub rho: Vec<f32>,
    /// Log-probs under the policy that sampled.
    pub behav: Vec<f32>,
    /// Log-probs under the actor in full precision.
    pub prox: Vec<f32>,
}

impl<D: Device> RlTrainer<D> {
    /// Up to `count` rollouts of the last step, chosen at random by seed and step, in the order of the batch.
    pub fn sampled_rollouts(&self, count: usize) -> Result<Vec<SampledRollout>, TrainError> {
        let (solved, batch) = &self.last;
        let responses: Vec<_> = solved.iter().flat_map(|s| s.responses.iter().map(move |r| (s, r))).collect();
        let rng = CounterRng::new(&[self.seed, text_key("rollout log"), self.step]);
        let mut chosen = permutation(&rng, responses.len());
        chosen.truncate(count);
        chosen.sort_unstable();
        let sampled = chosen.into_iter().map(|i| {
            let (solved, response) = responses[i];
            let view = batch.view(i..i + 1);
            let advantages = view.advantages;
            let uniform = advantages.windows(2).all(|w| w[0] == w[1]);
            let sum: f64 = advantages.iter().map(|&a| a as f64).sum();
            let rho =
                view.prox.iter().zip(view.behav).map(|(&p, &b)| qurl_rl::ratio(p as f64 - b as f64) as f32);
            Ok(SampledRollout {
                step: self.step,
                problem: solved.problem.id.clone(),
                prompt: self.start.tokenizer.decode(&solved.prompt, false)?,
                response: response.text.clone(),
                finish: response.sample.finish.name(),
                answer: solved.problem.answer.clone(),
                extracted: response.verdict.extracted.clone(),
                correct: response.verdict.correct,
                reward: response.verdict.reward,
                reward_parts: response
                    .verdict
                    .parts
                    .iter()
                    .map(|(name, x)| (name.clone(), json!(x)))
                    .collect(),
                advantage: sum / advantages.len().max(1) as f64,
                advantages: if uniform { Vec::new() } else { advantages.to_vec() },
                ids: response.sample.tokens.clone(),
                tokens: texts(&self.start, &response.sample.tokens)?,
                rho: rho.collect(),
                behav: view.behav.to_vec(),
                prox: view.prox.to_vec(),
            })
        });
        Ok(sampled.collect::<Result<_, TokenizerError>>().map_err(SolveError::from)?)
    }
}

/// The text that each token adds; a character spread over several tokens appears at its last.
fn texts(start: &Start, ids: &[u32]) -> Result<Vec<String>, TokenizerError> {
    let mut decoder = StreamDecoder::new(false);
    let mut texts =
        ids.iter().map(|&id| decoder.push(&start.tokenizer, id)).collect::<Result<Vec<_>, _>>()?;
    if let Some(last) = texts.last_mut() {
        last.push_str(&decoder.finish(&start.tokenizer)?);
    }
    Ok(texts)
}
