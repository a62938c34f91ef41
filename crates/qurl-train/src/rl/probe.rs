//! What is measured beside the step: the mismatch over the whole vocabulary, and what the rollout would cost
//! in another format. Neither changes anything that training sees.

use super::{RlTrainer, RolloutBatch, TrainError};
use crate::ranks::Ranks;
use crate::shards::micro_batches;
use crate::solve::{SolveError, SolveOptions, draw_problems, solve};
use crate::start::Start;
use qurl_kernels::{Device, Format};
use qurl_model::compute::{NetworkOptions, whole_batch};
use qurl_model::rng::{CounterRng, text_key};
use qurl_rl::{RlError, full_vocabulary_kls};
use qurl_rollout::Engine;
use qurl_tasks::task::{Problem, Split, Task};
use std::time::{Duration, Instant};

/// Longest responses of the speed probe, and the time after which it begins no further round: a run whose
/// rollouts take an hour must not pay six more hours for one line of its summary.
const PROBED_TOKENS: usize = 1024;
const PROBED_TIME: Duration = Duration::from_secs(20);
/// Rollouts in each format; the best counts.
const PROBED_ROUNDS: usize = 3;

/// Tokens of one sequence for which the whole vocabulary is looked at: few sequences, several tokens each.
const PER_SEQUENCE: usize = 8;

/// How fast the same rollouts are in two formats.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct RolloutSpeed {
    /// Sequences that were sampled.
    pub sequences: usize,
    /// Most tokens of a response.
    pub max_new: usize,
    /// Response tokens a second in the recipe's format.
    pub tokens_per_s: f64,
    /// Response tokens a second in bf16.
    pub bf16_tokens_per_s: f64,
}

/// Logits of both policies at this rank's part of a few response tokens, `[tokens, vocabulary]` each.
pub(super) struct FullKl {
    behav: Vec<f32>,
    prox: Vec<f32>,
}

impl FullKl {
    /// KL(behav||prox) over the whole vocabulary at each token.
    pub fn measure(&self, vocabulary: usize, temperature: f64) -> Result<Vec<f64>, RlError> {
        full_vocabulary_kls(&self.behav, &self.prox, vocabulary, temperature)
    }

    /// Its mean over the tokens of all ranks; nothing where there is none.
    pub fn mean(ranks: &Ranks, own: Vec<f64>) -> Result<Option<f64>, TrainError> {
        let all = ranks.join(own)?;
        Ok((!all.is_empty()).then(|| all.iter().fold(0.0, |sum, kl| sum + kl) / all.len() as f64))
    }
}

impl<D: Device> RlTrainer<D> {
    /// What KL(behav||prox) is measured from, at a few response tokens of the batch.
    pub(super) fn full_kl(&mut self, batch: &RolloutBatch) -> Result<FullKl, TrainError> {
        let picked = self.probed_rows(batch);
        let lengths: Vec<usize> = picked.iter().map(|(sequence, _)| batch.lengths()[*sequence]).collect();
        let own = self.ranks.part_of(&lengths);
        let (mut behav, mut prox) = (Vec::new(), Vec::new());
        let mut micros = micro_batches(&lengths[own.clone()], self.tape).into_iter();
        for _ in 0..self.ranks.passes_of(&lengths, self.tape) {
            let Some(range) = micros.next() else {
                self.actor.idle(&mut self.queue)?;
                continue;
            };
            let (mut ids, mut rows, mut first) = (Vec::new(), Vec::new(), 0);
            for (sequence, of_sequence) in &picked[own.start + range.start..own.start + range.end] {
                rows.extend(of_sequence.iter().map(|row| row + first));
                let sequence = batch.ids(*sequence..sequence + 1)[0];
                first += sequence.len() as u32;
                ids.push(sequence);
            }
            let forward = self.straight.then(|| self.engine.network());
            if rows.is_empty() {
                self.actor.idle(&mut self.queue)?;
            } else {
                let ids = whole_batch(&ids);
                let (actor, queue, engine) = (&mut self.actor, &mut self.queue, &self.engine);
                prox.extend(actor.logits_with(queue, forward, &ids, &rows)?);
                behav.extend(actor.logits_with(queue, Some(engine.network()), &ids, &rows)?);
            }
        }
        Ok(FullKl { behav, prox })
    }

    /// Some sequences, and the rows of theirs that are looked at: the same at all ranks.
    pub(super) fn probed_rows(&self, batch: &RolloutBatch) -> Vec<(usize, Vec<u32>)> {
        let mut left = self.plan.run.full_kl_positions;
        let count = left.div_ceil(PER_SEQUENCE).min(batch.sequences());
        let rng = CounterRng::new(&[self.seed, text_key("full_kl"), self.step]);
        let pick = |i: usize| {
            let sequence = rng.below_at(i as u64, batch.sequences() as u64) as usize;
            let targets = batch.targets(sequence..sequence + 1);
            let step = (targets.len() / PER_SEQUENCE).max(1);
            let rows: Vec<u32> =
                targets.rows.into_iter().step_by(step).take(PER_SEQUENCE.min(left)).collect();
            left -= rows.len();
            (sequence, rows)
        };
        (0..count).map(pick).collect()
    }

    /// Samples the same problems with the weights as they are now in the recipe's format and in bf16,
    /// alternating, and takes the best of a few rounds. At most as many sequences as run at the same time,
    /// and `PROBED_TOKENS` each. Training continues afterwards as if nothing had happened.
    ///
    /// All ranks call it, since weights may have to be gathered; the first one measures.
    /// Beside a frozen base there is no copy in bf16 to compare with.
    pub fn rollout_speed(&mut self) -> Result<Option<RolloutSpeed>, TrainError> {
        if self.start.adapters.is_some() {
            return Ok(None);
        }
        let version = self.version()?;
        let plan = &self.plan;
        let (longest, n) = plan.sizes_at(self.step.max(1));
        let max_new = longest.min(PROBED_TOKENS);
        let prompts = plan.data.train_batch_size.min(plan.rollout.max_num_seqs.div_ceil(n));
        let problems = draw_problems(&*self.task, Split::Train, self.seed, 0, prompts as u64)?;
        let max_prompt = plan.data.max_prompt_length;
        let options = SolveOptions {
            max_prompt,
            n,
            sampling: plan.rollout.sampling(),
            max_new,
            seed: self.seed,
            step: 0,
            lengths: None,
        };
        // A trainer that computes in bf16 lends its own network.
        let mut packed = None;
        self.engine.wake()?;
        let bf16 = match self.actor.network().options().format {
            Format::Bf16 => self.actor.whole_network(&mut self.queue, &mut packed)?,
            _ => {
                let (config, positions) = (&self.start.config, self.plan.longest());
                let options = NetworkOptions { positions, ..NetworkOptions::inference(config, Format::Bf16) };
                packed.insert(self.actor.packed(&mut self.queue, options)?)
            }
        };
        if !self.ranks.is_first() {
            self.rest_engine()?;
            return Ok(None);
        }
        // Pages of another format are made anew, and steps in them recorded anew: the first rollout pays for
        // that.
        let same_pages = bf16.options().kv_format == self.engine.network().options().kv_format;
        let passes = if same_pages { 1 } else { 2 };
        let queue = &mut self.queue;
        let (start, task, began) = (&self.start, &*self.task, Instant::now());
        let mut best = [0.0f64; 2];
        for round in 0..PROBED_ROUNDS {
            if round > 0 && began.elapsed() > PROBED_TIME {
                break;
            }
            for _ in 0..passes {
                best[0] =
                    best[0].max(tokens_per_s(queue, &mut self.engine, start, task, &problems, options)?);
            }
            let other = self.engine.with_network(bf16, version, |engine| {
                (0..passes).try_fold(0.0f64, |best, _| {
                    Ok::<_, SolveError>(
                        best.max(tokens_per_s(queue, engine, start, task, &problems, options)?),
                    )
                })
            })?;
            best[1] = best[1].max(other?);
        }
        self.rest_engine()?;
        let sequences = prompts * n;
        Ok(Some(RolloutSpeed { sequences, max_new, tokens_per_s: best[0], bf16_tokens_per_s: best[1] }))
    }
}

/// Response tokens a second of one rollout.
fn tokens_per_s<D: Device>(
    queue: &mut D::Queue,
    engine: &mut Engine<D>,
    start: &Start,
    task: &dyn Task,
    problems: &[Problem],
    options: SolveOptions,
) -> Result<f64, SolveError> {
    let began = Instant::now();
    let (solved, judging) = solve(queue, engine, start, task, problems.to_vec(), options, &Ranks::alone())?;
    let seconds = began.elapsed().as_secs_f64() - judging;
    let tokens: usize = solved.iter().flat_map(|s| &s.responses).map(|r| r.sample.tokens.len()).sum();
    Ok(tokens as f64 / seconds)
}
