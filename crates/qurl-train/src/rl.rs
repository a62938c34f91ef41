//! Reinforcement learning with a quantized rollout: the step, top to bottom.
//!
//! Three policies appear in every step. `behav` is the quantized copy of the actor that samples; `prox` is
//! the actor in full precision, frozen for the step; `theta` is the actor while it is updated. Trainer and
//! engine run the same kernels, so without quantization `behav` and `prox` agree bit for bit, and with it
//! their ratio measures quantization and nothing else.

mod batch;
mod health;
mod models;
mod prepare;
mod probe;
mod record;
mod rollouts;
mod sampled;
mod stages;
mod state;
mod test;
mod update;

pub use batch::RolloutBatch;
pub use health::{Health, Symptom};
pub use prepare::prepare;
pub use probe::RolloutSpeed;
pub use record::{Layered, Phases, RewardSpread, StepRecord};
pub use rollouts::Sampled;
pub use sampled::SampledRollout;
pub use test::Tested;

pub(crate) use models::Models;

use crate::learner::{Learner, micro_batches};
use crate::lengths::ForcedLengths;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RecipeError, RlPlan};
use crate::solve::{SolveError, Solved, Trouble};
use crate::start::Start;
use qurl_kernels::collective::CollectiveError;
use qurl_kernels::{Device, DeviceError, Queue, Rounding};
use qurl_model::Params;
use qurl_model::compute::{Batch, Network, TapeOptions, whole_batch};
use qurl_model::rng::CounterRng;
use qurl_quant::{QuantError, diagnostics, uaq};
use qurl_rl::advantage::Rollouts;
use qurl_rl::{KlCoefficient, RlError, to_f32};
use qurl_rollout::{Engine, RolloutError, WeightVersion};
use qurl_tasks::task::Task;
use rollouts::{Entropy, Rolled};
use std::ops::Range;
use std::sync::Arc;

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The computation.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// An exchange with other ranks.
    #[error(transparent)]
    Exchange(#[from] CollectiveError),
    /// The rollout engine.
    #[error(transparent)]
    Rollout(#[from] RolloutError),
    /// Prompts, responses and verdicts.
    #[error(transparent)]
    Solve(#[from] SolveError),
    /// Advantages and objectives.
    #[error(transparent)]
    Rl(#[from] RlError),
    /// Scaling and diagnostics of the weights.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// Dynamic sampling did not find enough.
    #[error(
        "key `algorithm.filter_groups.max_num_gen_batches` is {batches}: after so many batches of prompts \
         only {found} of {wanted} groups had responses with different rewards (the others: {right} all \
         right, {wrong} all wrong, {other} all alike otherwise); allow more batches, choose problems that \
         fit the model, or set `algorithm.filter_groups.allow_fewer = true` to train on whole mini-batches \
         of what was found"
    )]
    TooFewGroups {
        /// Batches of prompts sampled.
        batches: usize,
        /// Groups found.
        found: usize,
        /// Groups of a step.
        wanted: usize,
        /// Dropped groups whose responses were all right.
        right: usize,
        /// Dropped groups whose responses were all wrong.
        wrong: usize,
        /// Other groups that were dropped.
        other: usize,
        /// Mean entropy of all responses.
        entropy: f64,
    },
    /// A checkpoint of another kind of run.
    #[error(
        "the checkpoint has (critic, reference, measured weights) = {found:?}, the recipe asks for \
         {expected:?}"
    )]
    OtherState {
        /// What the checkpoint has.
        found: [bool; 3],
        /// What the recipe asks for.
        expected: [bool; 3],
    },
    /// A checkpoint of a run with other problems.
    #[error("the problems of the task are not those that the run was begun with: its files were changed")]
    OtherProblems,
}

impl TrainError {
    /// Whether the run was told to end while it waited for the scores of a reward command.
    pub fn is_cancelled(&self) -> bool {
        match self {
            TrainError::Solve(SolveError::Reward(error)) => error.is_cancelled(),
            TrainError::Solve(SolveError::OtherRank { trouble, .. }) => *trouble == Trouble::Cancelled,
            _ => false,
        }
    }
}

impl TrainError {
    /// Whether every rank of the run has failed with this error, or with one that names the rank that did.
    pub fn is_of_all_ranks(&self) -> bool {
        matches!(self, TrainError::TooFewGroups { .. } | TrainError::Rl(_))
            || matches!(self, TrainError::Solve(error) if !error.is_exchange())
    }
}

/// A run of reinforcement learning.
pub struct RlTrainer<D: Device> {
    plan: RlPlan,
    seed: u64,
    start: Start,
    task: Box<dyn Task>,
    /// Tells the task's problems from others.
    problems: u64,
    ranks: Ranks,
    queue: D::Queue,
    /// theta: the model that is trained.
    pub actor: Learner<D>,
    critic: Option<Learner<D>>,
    reference: Option<Network<D>>,
    /// behav: the quantized copy that samples.
    engine: Engine<D>,
    kl: Option<KlCoefficient>,
    tape: TapeOptions,
    step: u64,
    /// Problems drawn so far.
    drawn: u64,
    /// The weights when the update was last measured.
    measured: Option<Params<Vec<f32>>>,
    /// Lengths of responses that are set in advance.
    lengths: Option<ForcedLengths>,
    /// The rollouts of the last step, for those who want to look at them.
    last: (Vec<Solved>, RolloutBatch),
}

impl<D: Device> RlTrainer<D> {
    /// Sets up actor, critic, reference and engine from the weights of `start`, on one rank.
    pub fn new(
        device: &Arc<D>,
        recipe: &Recipe,
        file: &str,
        start: Start,
        task: Box<dyn Task>,
    ) -> Result<Self, TrainError> {
        Self::on_ranks(device, recipe, file, start, task, Ranks::one(recipe))
    }

    /// The same on one of several ranks, all of which give it the same.
    pub fn on_ranks(
        device: &Arc<D>,
        recipe: &Recipe,
        file: &str,
        mut start: Start,
        task: Box<dyn Task>,
        ranks: Ranks,
    ) -> Result<Self, TrainError> {
        let plan = recipe.rl(file)?;
        prepare::check_uaq(&plan, recipe, file, &start.config)?;
        // Once, before training (Eq. 11); the configuration is marked, and checkpoints with it.
        uaq::rescale(&mut start.weights, &mut start.config, plan.rollout.uaq as f32)?;
        let measured = (plan.run.update_metrics_freq > 0).then(|| start.weights.clone());
        prepare::check_context(&plan, recipe, file, &start.config)?;
        let mut queue = device.queue()?;
        let weights = Some(&start.weights);
        let Models { actor, critic, reference, engine, tape } =
            Models::new(&mut queue, recipe, &plan, &start.config, &ranks, weights, &mut |_| ())?;
        let kl = plan.algorithm.kl_in_reward.as_ref().map(|k| KlCoefficient::new(k.kl_ctrl)).transpose()?;
        Ok(RlTrainer {
            plan,
            seed: recipe.trainer.seed,
            start,
            problems: task.fingerprint(),
            task,
            ranks,
            queue,
            actor,
            critic,
            reference,
            engine,
            kl,
            tape,
            step: 0,
            drawn: 0,
            measured,
            lengths: None,
            last: Default::default(),
        })
    }

    /// The checked plan.
    pub fn plan(&self) -> &RlPlan {
        &self.plan
    }

    /// The actor's weights, on the host.
    pub fn weights(&mut self) -> Result<Params<Vec<f32>>, DeviceError> {
        self.actor.weights(&mut self.queue)
    }

    /// Who trains.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Where it computes.
    pub fn device(&self) -> &D {
        self.queue.device()
    }

    /// Model sizes, tokenizer and what is saved beside the weights.
    pub fn start(&self) -> &Start {
        &self.start
    }

    /// Sets the lengths of all responses from now on, for benchmarks.
    pub fn force_lengths(&mut self, lengths: ForcedLengths) {
        self.lengths = Some(lengths);
    }

    /// The engine that samples.
    pub fn engine(&self) -> &Engine<D> {
        &self.engine
    }

    /// The rollouts of the last step.
    pub fn last_batch(&self) -> &RolloutBatch {
        &self.last.1
    }

    /// One step: sample with the quantized actor, judge, score, update. A step that fails before its first
    /// update leaves the trainer as it was, [`RlTrainer::steps_done`] included.
    pub fn step(&mut self) -> Result<StepRecord, TrainError> {
        let mut phases = Phases::start();
        let before = (self.step, self.drawn);
        self.step += 1;
        tracing::debug!(step = self.step, "step begins");
        match self.sample(&mut phases) {
            Ok(rolled) => self.learn(rolled, phases),
            Err(error) => {
                (self.step, self.drawn) = before;
                Err(error)
            }
        }
    }

    /// The first half of a step: the engine takes over the actor's weights, samples and judges.
    fn sample(&mut self, phases: &mut Phases) -> Result<Rolled, TrainError> {
        self.begin_stage()?;
        let version = self.version()?;
        let rounding = self.rounding();
        // behav = Q(theta_old)
        let (queue, actor) = (&mut self.queue, &mut self.actor.master);
        self.engine.load_with(version, |net| net.refresh_leaves(queue, actor, rounding))?;
        phases.end("quantize");
        let rolled = self.rollouts()?;
        phases.end("rollout");
        phases.split("rollout", "verify", rolled.verifying);
        Ok(rolled)
    }

    /// The second half of a step on rollouts from elsewhere, as if this step had sampled them.
    pub fn train_on(&mut self, solved: Vec<Solved>) -> Result<StepRecord, TrainError> {
        self.step += 1;
        self.begin_stage()?;
        let mut entropy = Entropy::default();
        entropy.add(&solved);
        let mut sampled = Sampled::default();
        sampled.add(&solved)?;
        let rolled = Rolled { groups: solved, sampled, verifying: 0.0, entropy: entropy.mean() };
        self.learn(rolled, Phases::start())
    }

    fn learn(&mut self, rolled: Rolled, mut phases: Phases) -> Result<StepRecord, TrainError> {
        let Rolled { groups: solved, sampled, entropy, .. } = rolled;
        let mut batch = RolloutBatch::pack(&solved, &self.plan, self.step);
        let mut record = StepRecord::new(self.step, &solved, &batch, sampled, entropy);
        if batch.tokens() == 0 {
            record.timing = phases.finish();
            self.last = (solved, batch);
            return Ok(record);
        }

        batch.prox = self.prox(&batch)?; // theta_old in full precision
        batch.reference = self.reference_logprobs(&batch)?;
        batch.values = self.values(&batch)?;
        let full_kl = self.full_kl(&batch)?;
        self.advantages(&mut batch, &mut record)?;
        record.learnable = batch.advantages.iter().zip(&batch.mask).any(|(&a, &counts)| counts && a != 0.0);
        phases.end("score");

        self.updates(&mut batch, full_kl, &mut record)?;
        phases.end("update");
        self.measure_update(&mut record)?;
        phases.end("measure");
        record.timing = phases.finish();
        tracing::debug!(step = self.step, reward = record.reward, timing = ?record.timing, "step done");
        self.last = (solved, batch);
        Ok(record)
    }

    fn rounding(&self) -> Rounding {
        match self.plan.rollout.stochastic_rounding {
            true => Rounding::Stochastic { seed: CounterRng::new(&[self.seed, self.step]).u64_at(0) },
            false => Rounding::Nearest,
        }
    }

    /// Names the actor's weights as they are now.
    fn version(&mut self) -> Result<WeightVersion, TrainError> {
        Ok(WeightVersion { version: self.step, checksum: self.actor.master.checksum(&mut self.queue)? })
    }

    /// Every so many steps: how far the weights moved (Eq. 13), how far their quantized copy is off (Eq. 14),
    /// and how many of its quantized values changed.
    fn measure_update(&mut self, record: &mut StepRecord) -> Result<(), TrainError> {
        let every = self.plan.run.update_metrics_freq;
        let Some(before) = self.measured.as_ref().filter(|_| every > 0 && self.step.is_multiple_of(every))
        else {
            return Ok(());
        };
        let (config, r) = (&self.start.config, &self.plan.rollout);
        let scope = diagnostics::Scope { head: r.quantize_head };
        let after = self.actor.weights(&mut self.queue)?;
        let layers_and_total = |m: diagnostics::Measure| Layered { total: m.total(), layers: m.layers() };
        record.weight_update =
            Some(layers_and_total(diagnostics::weight_update(before, &after, config, scope)?));
        if r.format.is_quantized() {
            let error = diagnostics::quantization_error(&after, config, r.format, scope)?;
            record.quantization_error = Some(layers_and_total(error));
            let flipped = diagnostics::flipped_codes(before, &after, config, r.format, scope)?;
            record.flipped_codes = Some(layers_and_total(flipped));
        }
        self.measured = Some(after);
        Ok(())
    }

    /// Log-probs of the response tokens under the actor, at the sampling temperature; NaN for those that the
    /// first update computes anyway.
    fn prox(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let unscored = self.scored_by_update(batch);
        let (actor, queue) = (&mut self.actor, &mut self.queue);
        let temperature = self.plan.rollout.temperature;
        let mut prox = vec![f32::NAN; batch.token_range(unscored.clone()).len()];
        let scored = by_micro_batches(&self.ranks, batch, unscored.end, self.tape, |ids, range| {
            Ok(actor.score(queue, &ids, &batch.targets(range), temperature)?.logp)
        })?;
        prox.extend(scored);
        Ok(prox)
    }

    /// The same under the reference model; empty where there is none.
    fn reference_logprobs(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let Some(reference) = &self.reference else { return Ok(Vec::new()) };
        let (actor, queue) = (&mut self.actor, &mut self.queue);
        let temperature = self.plan.rollout.temperature;
        by_micro_batches(&self.ranks, batch, 0, self.tape, |ids, range| {
            Ok(actor.score_with(queue, reference, &ids, &batch.targets(range), temperature)?.logp)
        })
    }

    /// The critic's value of the state before each response token; empty where there is no critic.
    fn values(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let Some(critic) = &mut self.critic else { return Ok(Vec::new()) };
        let queue = &mut self.queue;
        by_micro_batches(&self.ranks, batch, 0, self.tape, |ids, range| {
            Ok(critic.values(queue, &ids, &batch.targets(range).rows)?)
        })
    }

    /// Rewards of tokens (with KL to the reference taken off where asked), then advantages and returns.
    fn advantages(&mut self, batch: &mut RolloutBatch, record: &mut StepRecord) -> Result<(), TrainError> {
        let mut rewards: Vec<f64> = batch.rewards.iter().map(|&r| r as f64).collect();
        if let (Some(settings), Some(coefficient)) = (&self.plan.algorithm.kl_in_reward, &mut self.kl) {
            let (prox, reference): (Vec<f64>, Vec<f64>) = (wide(&batch.prox), wide(&batch.reference));
            let kl = settings.kl_penalty.in_reward(
                coefficient.value(),
                &rewards,
                &prox,
                &reference,
                &batch.mask,
                &batch.seq,
            )?;
            rewards = kl.rewards;
            record.reference_kl = Some(kl.mean_kl);
            record.kl_coef = Some(coefficient.value());
            coefficient.update(kl.mean_kl, batch.sequences());
        }
        let values = wide(&batch.values);
        let values = self.critic.is_some().then_some(values.as_slice());
        let rollouts =
            Rollouts { rewards: &rewards, mask: &batch.mask, seq: &batch.seq, groups: &batch.groups, values };
        let estimate = self.plan.algorithm.adv_estimator.estimate(&rollouts)?;
        batch.advantages = to_f32(&estimate.advantages);
        batch.returns = to_f32(&estimate.returns);
        Ok(())
    }
}

/// Collects what `score` says of each micro-batch of the sequences from `first` on, in order. Each rank asks
/// for its part of them; a sequence's scores do not depend on what is computed with it.
fn by_micro_batches(
    ranks: &Ranks,
    batch: &RolloutBatch,
    first: usize,
    tape: TapeOptions,
    mut score: impl FnMut(Batch, Range<usize>) -> Result<Vec<f32>, TrainError>,
) -> Result<Vec<f32>, TrainError> {
    let lengths = &batch.lengths()[first..];
    let part = ranks.part_of(lengths);
    let mut own = Vec::with_capacity(batch.token_range(first + part.start..first + part.end).len());
    for range in micro_batches(&lengths[part.clone()], tape) {
        let first = first + part.start;
        let range = first + range.start..first + range.end;
        own.extend(score(whole_batch(&batch.ids(range.clone())), range)?);
    }
    Ok(ranks.join(own)?)
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v as f64).collect()
}
