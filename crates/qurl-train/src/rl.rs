//! Reinforcement learning with a quantized rollout: the step, top to bottom.
//!
//! Three policies appear in every step. `behav` is the quantized copy of the actor that samples; `prox` is
//! the actor in full precision, frozen for the step; `theta` is the actor while it is updated. Trainer and
//! engine run the same kernels, so without quantization `behav` and `prox` agree bit for bit, and with it
//! their ratio measures quantization and nothing else. With `trainer.forward = "rollout"` the engine's
//! network runs the trainer's forward passes, and all three are the quantized actor: they agree bit for bit
//! until the first update.

mod batch;
mod health;
mod lag;
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
mod workers;

pub use batch::RolloutBatch;
pub use health::{Health, Symptom};
pub use lag::OldWeights;
pub use prepare::prepare;
pub use probe::RolloutSpeed;
pub use record::{Lagged, Layered, Phases, RewardSpread, StepRecord};
pub use rollouts::Sampled;
pub use sampled::SampledRollout;
pub use test::Tested;

pub(crate) use models::Models;

use crate::divided::Frozen;
use crate::learner::{Learner, Passes};
use crate::lengths::ForcedLengths;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RecipeError, RlPlan};
use crate::shards::micro_batches;
use crate::solve::{SolveError, Solved, Trouble};
use crate::start::Start;
use crate::workers::{Pool, PoolError};
use lag::Lag;
use qurl_kernels::collective::CollectiveError;
use qurl_kernels::{Device, DeviceError, Queue, Rounding};
use qurl_model::Params;
use qurl_model::compute::{Batch, TapeOptions, whole_batch};
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
    /// A checkpoint of a run with another lag.
    #[error("the checkpoint has the weights of versions {found:?}, `rollout.lag` asks for {expected:?}")]
    OtherLag {
        /// What the checkpoint has.
        found: Vec<u64>,
        /// What the recipe asks for.
        expected: Vec<u64>,
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
            TrainError::Solve(SolveError::Workers(error)) => *error == PoolError::Stopped,
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
    reference: Option<Frozen<D>>,
    /// behav: the quantized copy that samples.
    engine: Engine<D>,
    /// Whether the engine's network runs the actor's forward passes, too.
    straight: bool,
    /// What it takes to sample with older weights.
    lag: Lag<D>,
    /// Other processes that sample.
    pool: Option<Arc<Pool>>,
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
        if start.adapters.is_none() {
            uaq::rescale(&mut start.weights, &mut start.config, plan.rollout.uaq as f32)?;
        }
        // A frozen base has no update to measure.
        let measures = plan.run.update_metrics_freq > 0 && start.adapters.is_none();
        let measured = measures.then(|| start.weights.clone());
        prepare::check_context(&plan, recipe, file, &start.config)?;
        let mut queue = device.queue()?;
        let Models { actor, critic, reference, engine, old, tape, straight } =
            Models::new(&mut queue, recipe, &plan, &start.config, &ranks, Some(&start), &mut |_| ())?;
        if reference.is_none() {
            // The learners have them; only a reference is saved as it was.
            start.weights = start.weights.map(|_| Vec::new());
        }
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
            straight,
            lag: Lag::new(old),
            pool: None,
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

    /// Passes through actor, critic and reference so far.
    pub fn passed(&self) -> Passes {
        self.critic.as_ref().map(Learner::passed).unwrap_or_default() + self.actor.passed()
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
        self.load_behav()?; // behav = Q(theta_old)
        phases.end("quantize");
        self.engine.wake()?;
        let rolled = self.rollouts()?;
        self.rest_engine()?;
        self.hand_out_ahead()?;
        phases.end("rollout");
        phases.split("rollout", "verify", rolled.verifying);
        Ok(rolled)
    }

    /// The engine takes over the actor's weights as they are now; within a step, stochastic rounding samples
    /// the same numbers.
    fn quantize(&mut self) -> Result<(), TrainError> {
        let version = self.version()?;
        let rounding = self.rounding(version.version);
        let (queue, actor) = (&mut self.queue, &mut self.actor.master);
        Ok(self.engine.load_with(version, |net| net.refresh_leaves(queue, actor, rounding))?)
    }

    /// The second half of a step on rollouts from elsewhere, as if this step had sampled them.
    pub fn train_on(&mut self, solved: Vec<Solved>) -> Result<StepRecord, TrainError> {
        self.step += 1;
        self.begin_stage()?;
        if self.straight {
            self.quantize()?; // sampling would have done it
        }
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

        self.actor.work(&mut self.queue)?;
        if let Some(critic) = &mut self.critic {
            critic.work(&mut self.queue)?;
        }
        batch.prox = self.prox(&batch)?; // theta_old in full precision, or as the engine has it
        batch.reference = self.reference_logprobs(&batch)?;
        batch.values = self.values(&batch)?;
        let full_kl = self.full_kl(&batch)?;
        let lagged = self.score_lagged(&batch)?;
        let sampled = batch.mask.clone();
        self.advantages(&mut batch, &mut record)?;
        record.learnable = batch.advantages.iter().zip(&batch.mask).any(|(&a, &counts)| counts && a != 0.0);
        phases.end("score");

        self.updates(&mut batch, &sampled, full_kl, &mut record)?;
        self.actor.rest();
        self.critic.iter_mut().for_each(Learner::rest);
        record.lagged = lagged.map(|scored| scored.measure(&batch)).transpose()?;
        phases.end("update");
        self.measure_update(&mut record)?;
        phases.end("measure");
        record.timing = phases.finish();
        tracing::debug!(step = self.step, reward = record.reward, timing = ?record.timing, "step done");
        self.last = (solved, batch);
        Ok(record)
    }

    /// Where weights are divided because there is too little memory, keys and values are there only while the
    /// engine samples.
    fn rest_engine(&mut self) -> Result<(), RolloutError> {
        if self.ranks.divides_weights() { self.engine.sleep() } else { Ok(()) }
    }

    /// How the weights of a version are rounded for the copy that samples.
    fn rounding(&self, version: u64) -> Rounding {
        match self.plan.rollout.stochastic_rounding {
            true => Rounding::Stochastic { seed: CounterRng::new(&[self.seed, version]).u64_at(0) },
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
        let forward = self.straight.then(|| self.engine.network());
        let temperature = self.plan.rollout.temperature;
        let mut prox = vec![f32::NAN; batch.token_range(unscored.clone()).len()];
        let sequences = unscored.end..batch.sequences();
        let scored = by_micro_batches(&self.ranks, batch, sequences, self.tape, |micro| match micro {
            Some((ids, range)) => {
                let targets = batch.targets(range);
                actor.score_with(queue, forward, &ids, &targets, temperature).map(|out| out.logp)
            }
            None => actor.idle(queue).map(|()| Vec::new()),
        })?;
        prox.extend(scored);
        Ok(prox)
    }

    /// The same under the reference model; empty where there is none.
    fn reference_logprobs(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let Some(reference) = &self.reference else { return Ok(Vec::new()) };
        let (actor, queue) = (&mut self.actor, &mut self.queue);
        let temperature = self.plan.rollout.temperature;
        by_micro_batches(&self.ranks, batch, 0..batch.sequences(), self.tape, |micro| match micro {
            Some((ids, range)) => {
                let targets = batch.targets(range);
                actor.score_frozen(queue, reference, &ids, &targets, temperature).map(|out| out.logp)
            }
            None => actor.idle_with(queue, reference).map(|()| Vec::new()),
        })
    }

    /// The critic's value of the state before each response token; empty where there is no critic.
    fn values(&mut self, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let Some(critic) = &mut self.critic else { return Ok(Vec::new()) };
        let queue = &mut self.queue;
        by_micro_batches(&self.ranks, batch, 0..batch.sequences(), self.tape, |micro| match micro {
            Some((ids, range)) => critic.values(queue, &ids, &batch.targets(range).rows),
            None => critic.idle(queue).map(|()| Vec::new()),
        })
    }

    /// Rewards of tokens (with KL to the reference taken off where asked), then advantages and returns. What
    /// the objective rejects leaves the mask.
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
        let algorithm = &self.plan.algorithm;
        let accepted = algorithm.objective.accepted(&batch.behav, &batch.prox, &batch.mask, &batch.seq)?;
        let estimate = algorithm.adv_estimator.estimate(&Rollouts {
            rewards: &rewards,
            mask: &batch.mask,
            seq: &batch.seq,
            groups: &batch.groups,
            values,
            accepted: accepted.as_deref(),
        })?;
        batch.advantages = to_f32(&estimate.advantages);
        batch.returns = to_f32(&estimate.returns);
        if let Some(accepted) = accepted {
            batch.mask = accepted;
        }
        Ok(())
    }
}

/// Collects what `score` says of each micro-batch of these sequences, in order. Each rank asks for its part
/// of them; a sequence's scores do not depend on what is computed with it. Where all ranks must pass alike,
/// those that have fewer micro-batches are asked for none.
fn by_micro_batches(
    ranks: &Ranks,
    batch: &RolloutBatch,
    sequences: Range<usize>,
    tape: TapeOptions,
    mut score: impl FnMut(Option<(Batch, Range<usize>)>) -> Result<Vec<f32>, DeviceError>,
) -> Result<Vec<f32>, TrainError> {
    let (first, lengths) = (sequences.start, &batch.lengths()[sequences]);
    let part = ranks.part_of(lengths);
    let mut own = Vec::with_capacity(batch.token_range(first + part.start..first + part.end).len());
    let mut micros = micro_batches(&lengths[part.clone()], tape).into_iter();
    for _ in 0..ranks.passes_of(lengths, tape) {
        own.extend(score(micros.next().map(|micro| {
            let first = first + part.start;
            let range = first + micro.start..first + micro.end;
            (whole_batch(&batch.ids(range.clone())), range)
        }))?);
    }
    Ok(ranks.join(own)?)
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v as f64).collect()
}
