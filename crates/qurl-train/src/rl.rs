//! Reinforcement learning with a quantized rollout: the step, top to bottom.
//!
//! Three policies appear in every step. `behav` is the quantized copy of the actor that samples; `prox` is
//! the actor in full precision, frozen for the step; `theta` is the actor while it is updated. Trainer and
//! engine run the same kernels, so without quantization `behav` and `prox` agree bit for bit, and with it
//! their ratio measures quantization and nothing else. With `trainer.forward = "rollout"` the engine's
//! network runs the trainer's forward passes, and all three are the quantized actor: they agree bit for bit
//! until the first update.

mod batch;
mod error;
mod health;
mod lag;
mod models;
mod prepare;
mod probe;
mod record;
mod rollouts;
mod sampled;
mod score;
mod stages;
mod state;
mod test;
mod update;
mod workers;

pub use batch::RolloutBatch;
pub use error::TrainError;
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
use crate::recipe::{Recipe, RlPlan};
use crate::solve::Solved;
use crate::start::Start;
use crate::workers::Pool;
use lag::Lag;
use qurl_kernels::{Device, DeviceError, Queue, Rounding};
use qurl_model::Params;
use qurl_model::compute::TapeOptions;
use qurl_model::rng::CounterRng;
use qurl_quant::{diagnostics, uaq};
use qurl_rl::KlCoefficient;
use qurl_rollout::{Engine, RolloutError, WeightVersion};
use qurl_tasks::task::Task;
use rollouts::{Entropy, Rolled};
use std::sync::Arc;

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
        device.limit_memory(recipe.memory_limit());
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
}
