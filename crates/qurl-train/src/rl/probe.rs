//! What is measured beside the step: the mismatch over the whole vocabulary, and what the rollout would cost in another
//! format. Neither changes anything that training sees.

use super::{RlTrainer, RolloutBatch, TrainError, rollout_engine};
use crate::solve::{Draw, draw_problems, solve};
use qurl_kernels::{Backend, Format};
use qurl_model::compute::logit_rows;
use qurl_model::rng::{CounterRng, text_key};
use qurl_rl::full_vocabulary_kl;
use qurl_rollout::WeightVersion;
use qurl_tasks::task::Split;
use std::time::Instant;

/// Tokens of one sequence for which the whole vocabulary is looked at: few sequences, several tokens each.
const PER_SEQUENCE: usize = 8;

/// How fast the same rollouts are in two formats.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct RolloutSpeed {
    /// Response tokens a second in the recipe's format.
    pub tokens_per_s: f64,
    /// Response tokens a second in bf16.
    pub bf16_tokens_per_s: f64,
}

impl<B: Backend> RlTrainer<B> {
    /// KL(behav||prox) over the whole vocabulary at a few response tokens of the batch.
    pub(super) fn full_kl(&self, batch: &RolloutBatch) -> Result<Option<f64>, TrainError> {
        let wanted = self.plan.run.full_kl_positions;
        let count = wanted.div_ceil(PER_SEQUENCE).min(batch.sequences());
        let rng = CounterRng::new(&[self.seed, text_key("full_kl"), self.step]);
        let picked: Vec<usize> =
            (0..count).map(|i| rng.below_at(i as u64, batch.sequences() as u64) as usize).collect();
        let (mut ids, mut rows, mut first) = (Vec::new(), Vec::new(), 0);
        for sequence in picked {
            let targets = batch.targets(sequence..sequence + 1);
            let step = (targets.len() / PER_SEQUENCE).max(1);
            rows.extend(targets.rows.iter().step_by(step).take(PER_SEQUENCE).map(|row| row + first));
            let sequence = batch.ids(sequence..sequence + 1)[0];
            first += sequence.len() as u32;
            ids.push(sequence);
        }
        rows.truncate(wanted);
        let logits = |net| logit_rows(&*self.backend, net, &ids, &rows, self.chunk);
        let (behav, prox) = (logits(self.engine.network())?, logits(self.actor.network())?);
        let temperature = self.plan.rollout.temperature as f64;
        Ok(full_vocabulary_kl(&behav, &prox, self.start.config.vocab_size, temperature)?)
    }

    /// Samples the same problems with the weights as they are now in the recipe's format and in bf16, in turns, and
    /// takes the best of `rounds`. Training goes on afterwards as if nothing had happened.
    pub fn rollout_speed(&mut self, rounds: usize) -> Result<RolloutSpeed, TrainError> {
        let mut plan = self.plan.clone();
        plan.rollout.format = Format::Bf16;
        let mut bf16 = rollout_engine(&self.backend, &self.start.config, &self.actor.params, &plan)?;
        bf16.load(&self.actor.params, WeightVersion::default())?;
        let mut best = [0.0f64; 2];
        for _ in 0..rounds {
            for (engine, best) in [&mut self.engine, &mut bf16].into_iter().zip(&mut best) {
                let problems =
                    draw_problems(&*self.task, Split::Train, self.seed, 0, plan.data.train_batch_size as u64)?;
                let (max_new, n) = plan.sizes_at(self.step.max(1));
                let max_prompt = plan.data.max_prompt_length;
                let draw = Draw { max_prompt, n, sampling: plan.rollout.sampling(), max_new, seed: self.seed, step: 0 };
                let began = Instant::now();
                let (solved, _) = solve(engine, &self.start, &*self.task, problems, draw)?;
                let tokens: usize = solved.iter().flat_map(|s| &s.responses).map(|r| r.sample.tokens.len()).sum();
                *best = best.max(tokens as f64 / began.elapsed().as_secs_f64());
            }
        }
        Ok(RolloutSpeed { tokens_per_s: best[0], bf16_tokens_per_s: best[1] })
    }
}
