//! Reinforcement learning with a quantized rollout: the step, top to bottom.
//!
//! Three policies appear in every step. `behav` is the quantized copy of the actor that samples; `prox` is the actor
//! in full precision, frozen for the step; `theta` is the actor while it is updated. Trainer and engine run the same
//! kernels, so without quantization `behav` and `prox` agree bit for bit, and with it their ratio measures
//! quantization and nothing else.

mod batch;
mod prepare;
mod probe;
mod record;
mod sampled;
mod stages;
mod state;

pub use batch::RolloutBatch;
pub use prepare::prepare;
pub use probe::RolloutSpeed;
pub use record::{Layered, Phases, StepRecord};
pub use sampled::SampledRollout;

use crate::learner::{Learner, LearnerOptions, LossGradient, micro_batches};
use crate::recipe::{Recipe, RecipeError, RlPlan};
use crate::solve::{Draw, SolveError, Solved, accuracy, draw_problems, held_out, solve};
use crate::start::Start;
use qurl_kernels::{Backend, BackendError, Rounding};
use qurl_model::compute::{Network, NetworkOptions, TapeOptions, score_targets, value_rows};
use qurl_model::rng::CounterRng;
use qurl_model::{ModelConfig, Params, params};
use qurl_quant::{QuantError, checksum, diagnostics, uaq};
use qurl_rl::advantage::{Rollouts, group::in_mixed_group};
use qurl_rl::entropy::entropy_bonus;
use qurl_rl::value::value_loss;
use qurl_rl::{Aggregation, Denominator, KlCoefficient, Mismatch, RlError, Tokens, to_f32};
use qurl_rollout::{Engine, EngineOptions, RolloutError, Sampling, WeightVersion};
use qurl_tasks::task::{Split, Task};
use std::sync::Arc;

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The recipe.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The computation.
    #[error(transparent)]
    Backend(#[from] BackendError),
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
    /// A checkpoint of another kind of run.
    #[error("the checkpoint has (critic, reference, measured weights) = {found:?}, the recipe asks for {expected:?}")]
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

/// A run of reinforcement learning.
pub struct RlTrainer<B: Backend> {
    plan: RlPlan,
    seed: u64,
    chunk: usize,
    start: Start,
    task: Box<dyn Task>,
    /// Tells the task's problems from others.
    problems: u64,
    backend: Arc<B>,
    /// theta: the model that is trained.
    pub actor: Learner<B>,
    critic: Option<Learner<B>>,
    reference: Option<Network<B>>,
    /// behav: the quantized copy that samples.
    engine: Engine<B>,
    kl: Option<KlCoefficient>,
    tape: TapeOptions,
    step: u64,
    /// Problems drawn so far.
    drawn: u64,
    /// The weights when the update was last measured.
    measured: Option<Params<Vec<f32>>>,
    /// The rollouts of the last step, for those who want to look at them.
    last: (Vec<Solved>, RolloutBatch),
}

impl<B: Backend> RlTrainer<B> {
    /// Sets up actor, critic, reference and engine from the weights of `start`.
    pub fn new(
        backend: Arc<B>,
        recipe: &Recipe,
        file: &str,
        mut start: Start,
        task: Box<dyn Task>,
    ) -> Result<Self, TrainError> {
        let plan = recipe.rl(file)?;
        if plan.rollout.uaq != 1.0 {
            uaq::apply(&mut start.weights, &start.config, plan.rollout.uaq as f32)?; // once, before training (Eq. 11)
        }
        let measured = (plan.run.update_metrics_freq > 0).then(|| start.weights.clone());
        prepare::check_context(&plan, file, &start.config)?;
        let (config, positions) = (&start.config, plan.longest());
        let rows = recipe.trainer.micro_tokens.max(positions);
        let tape = TapeOptions { rows, sequences: rows, recompute: recipe.trainer.recompute };
        let compute = recipe.trainer.compute;
        let learner = |weights: &Params<Vec<f32>>, adamw| {
            Learner::new(backend.clone(), config, weights, LearnerOptions { compute, positions, tape, adamw })
        };
        let actor = learner(&start.weights, plan.actor.optim)?;
        let critic = match &plan.critic {
            Some(updates) => {
                let value_head = params::init(config, recipe.trainer.seed, true).value_head;
                Some(learner(&Params { value_head, ..start.weights.clone() }, updates.optim)?)
            }
            None => None,
        };
        let reference = match plan.algorithm.needs_reference() {
            true => {
                let options = NetworkOptions { positions, ..NetworkOptions::inference(config, compute) };
                Some(Network::new(&*backend, config, &actor.params, options)?)
            }
            false => None,
        };
        let engine = rollout_engine(&backend, config, &actor.params, &plan)?;
        let kl = plan.algorithm.kl_in_reward.as_ref().map(|k| KlCoefficient::new(k.kl_ctrl)).transpose()?;
        let (seed, chunk) = (recipe.trainer.seed, recipe.trainer.micro_tokens);
        Ok(RlTrainer {
            plan,
            seed,
            chunk,
            start,
            problems: task.fingerprint(),
            task,
            backend,
            actor,
            critic,
            reference,
            engine,
            kl,
            tape,
            step: 0,
            drawn: 0,
            measured,
            last: Default::default(),
        })
    }

    /// The checked plan.
    pub fn plan(&self) -> &RlPlan {
        &self.plan
    }

    /// Model sizes, tokenizer and what is saved beside the weights.
    pub fn start(&self) -> &Start {
        &self.start
    }

    /// One step: sample with the quantized actor, judge, score, update.
    pub fn step(&mut self) -> Result<StepRecord, TrainError> {
        let mut phases = Phases::start();
        self.step += 1;
        self.begin_stage()?;
        tracing::debug!(step = self.step, "step begins");
        let version = self.version()?;
        let rounding = self.rounding();
        let actor = &self.actor.params;
        self.engine.load_with(version, |backend, net| net.refresh_rounded(backend, actor, rounding))?; // behav = Q(theta_old)
        phases.end("quantize");

        let (solved, gen_batches, verifying) = self.rollouts()?;
        phases.end("rollout");
        phases.split("rollout", "verify", verifying);
        self.learn(solved, gen_batches, phases)
    }

    /// The second half of a step on rollouts from elsewhere, as if this step had sampled them.
    pub fn train_on(&mut self, solved: Vec<Solved>) -> Result<StepRecord, TrainError> {
        self.step += 1;
        self.begin_stage()?;
        self.learn(solved, 1, Phases::start())
    }

    fn learn(&mut self, solved: Vec<Solved>, gen_batches: usize, mut phases: Phases) -> Result<StepRecord, TrainError> {
        let mut batch = RolloutBatch::pack(&solved, &self.plan, self.step);
        let mut record = StepRecord::new(self.step, &solved, &batch, gen_batches);
        if batch.tokens() == 0 {
            record.timing = phases.finish();
            self.last = (solved, batch);
            return Ok(record);
        }

        batch.prox = self.logprobs(self.actor.network(), &batch)?; // theta_old in full precision
        if let Some(reference) = &self.reference {
            batch.reference = self.logprobs(reference, &batch)?;
        }
        if let Some(critic) = &self.critic {
            batch.values = self.values(critic, &batch)?;
        }
        record.mismatch = Mismatch::measure(&batch.behav, &batch.prox, &batch.mask, &batch.seq)?;
        record.full_kl = self.full_kl(&batch)?;
        self.advantages(&mut batch, &mut record)?;
        phases.end("score");

        if let Some(kept) =
            self.plan.algorithm.objective.accepted(&batch.behav, &batch.prox, &batch.mask, &batch.seq)?
        {
            batch.mask = kept;
        }
        record.lr = self.plan.lr_at(&self.plan.actor, self.step);
        for _ in 0..self.plan.actor.ppo_epochs {
            for mini in batch.mini_batches(self.plan.actor.ppo_mini_batch_size) {
                self.update_actor(&batch, mini, &mut record)?;
            }
        }
        self.update_critic(&batch, &mut record)?;
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
    fn version(&self) -> Result<WeightVersion, TrainError> {
        Ok(WeightVersion { version: self.step, checksum: checksum::params(&*self.backend, &self.actor.params)? })
    }

    /// Every so many steps: how far the weights moved (Eq. 13), how far their quantized copy is off (Eq. 14), and how
    /// many of its codes changed.
    fn measure_update(&mut self, record: &mut StepRecord) -> Result<(), TrainError> {
        let every = self.plan.run.update_metrics_freq;
        let Some(before) = self.measured.as_ref().filter(|_| every > 0 && self.step.is_multiple_of(every)) else {
            return Ok(());
        };
        let (config, r) = (&self.start.config, &self.plan.rollout);
        let scope = diagnostics::Scope { head: r.quantize_head };
        let after = self.actor.weights()?;
        let layers_and_total = |m: diagnostics::Measure| Layered { total: m.total(), layers: m.layers() };
        record.weight_update = Some(layers_and_total(diagnostics::weight_update(before, &after, config, scope)?));
        if r.format.is_quantized() {
            let error = diagnostics::quantization_error(&after, config, r.format, scope)?;
            record.quantization_error = Some(layers_and_total(error));
            let flipped = diagnostics::flipped_codes(before, &after, config, r.format, scope)?;
            record.flipped_codes = Some(layers_and_total(flipped));
        }
        self.measured = Some(after);
        Ok(())
    }

    /// Samples groups until the batch is full; with dynamic sampling, groups whose rewards are all equal are dropped.
    /// Returns them with the number of batches drawn and the seconds that judging took.
    fn rollouts(&mut self) -> Result<(Vec<Solved>, usize, f64), TrainError> {
        let mut verifying = 0.0;
        let wanted = self.plan.data.train_batch_size;
        let (max_new, n) = self.plan.sizes_at(self.step);
        let most = self.plan.algorithm.filter_groups.as_ref().map_or(1, |f| f.max_num_gen_batches);
        let mut kept: Vec<Solved> = Vec::with_capacity(wanted);
        for batch in 0..most {
            let problems = draw_problems(&*self.task, Split::Train, self.seed, self.drawn, wanted as u64)?;
            self.drawn += wanted as u64;
            let step = self.step * most as u64 + batch as u64; // its own random numbers for every batch drawn
            let max_prompt = self.plan.data.max_prompt_length;
            let draw = Draw { max_prompt, n, sampling: self.plan.rollout.sampling(), max_new, seed: self.seed, step };
            let (solved, seconds) = solve(&mut self.engine, &self.start, &*self.task, problems, draw)?;
            verifying += seconds;
            if self.plan.algorithm.filter_groups.is_none() {
                return Ok((solved, 1, verifying));
            }
            for group in solved {
                let scores: Vec<f64> = group.responses.iter().map(|r| r.verdict.reward).collect();
                if in_mixed_group(&scores, &vec![0; scores.len()])?.contains(&true) {
                    kept.push(group);
                }
            }
            if kept.len() >= wanted {
                kept.truncate(wanted);
                return Ok((kept, batch + 1, verifying));
            }
        }
        Ok((kept, most, verifying))
    }

    /// Log-probs of the response tokens at the sampling temperature.
    fn logprobs(&self, net: &Network<B>, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let mut logp = Vec::with_capacity(batch.tokens());
        for range in micro_batches(&batch.lengths(), self.tape) {
            let ids = batch.ids(range.clone());
            let targets = batch.targets(range);
            let out = score_targets(&*self.backend, net, &ids, &targets, self.plan.rollout.temperature, self.chunk)?;
            logp.extend(out.logp);
        }
        Ok(logp)
    }

    /// The critic's value of the state before each response token.
    fn values(&self, critic: &Learner<B>, batch: &RolloutBatch) -> Result<Vec<f32>, TrainError> {
        let mut values = Vec::with_capacity(batch.tokens());
        for range in micro_batches(&batch.lengths(), self.tape) {
            let ids = batch.ids(range.clone());
            let rows = batch.targets(range).rows;
            values.extend(value_rows(&*self.backend, critic.network(), &ids, &rows, self.chunk)?);
        }
        Ok(values)
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

    /// One update of the actor on the sequences `mini`; the denominator belongs to the whole mini-batch.
    fn update_actor(
        &mut self,
        batch: &RolloutBatch,
        mini: std::ops::Range<usize>,
        record: &mut StepRecord,
    ) -> Result<(), TrainError> {
        let algorithm = &self.plan.algorithm;
        let whole = batch.view(mini.clone());
        let denominator = Denominator::count(whole.mask, &whole.seq)?;
        if denominator.tokens == 0 {
            return Ok(());
        }
        let mode = algorithm.objective.loss_agg_mode(algorithm.loss_agg_mode);
        let aggregation = Aggregation { mode, loss_scale_factor: algorithm.loss_scale_factor };
        let mut failure = None;
        for micro in micro_batches(&batch.lengths()[mini.clone()], self.tape) {
            let micro = mini.start + micro.start..mini.start + micro.end;
            let ids = batch.ids(micro.clone());
            let part = batch.view(micro.clone());
            let weights = aggregation.token_weights(&denominator, part.mask, &part.seq)?;
            let packed = qurl_model::compute::Batch::whole(&ids);
            self.actor.accumulate(packed, batch.targets(micro), self.plan.rollout.temperature, |out| {
                let result = (|| {
                    let tokens = Tokens {
                        theta: &out.logp,
                        prox: part.prox,
                        behav: part.behav,
                        adv: part.advantages,
                        mask: part.mask,
                        seq: &part.seq,
                    };
                    let mut outcome = algorithm.objective.evaluate(&tokens, &weights)?;
                    if algorithm.kl_loss_coef != 0.0 {
                        let (kind, coef) = (algorithm.kl_loss_type, algorithm.kl_loss_coef);
                        let kl = kind.in_loss(coef, &out.logp, part.reference, part.mask, &weights)?;
                        outcome.loss += kl.loss;
                        outcome.dlogp.iter_mut().zip(&kl.dlogp).for_each(|(a, b)| *a += b);
                        record.add_reference_kl(kl.kl_sum, kl.tokens);
                    }
                    let bonus = entropy_bonus(algorithm.entropy_coeff, &out.entropy, part.mask, &weights)?;
                    outcome.loss += bonus.loss;
                    record.add_outcome(&outcome, bonus.entropy_sum, bonus.tokens);
                    let dentropy = if algorithm.entropy_coeff == 0.0 { Vec::new() } else { to_f32(&bonus.dentropy) };
                    Ok(LossGradient { dlogp: to_f32(&outcome.dlogp), dentropy })
                })();
                result.unwrap_or_else(|e: RlError| {
                    failure = Some(e);
                    LossGradient { dlogp: vec![0.0; out.logp.len()], dentropy: Vec::new() }
                })
            })?;
            if let Some(e) = failure {
                return Err(e.into());
            }
        }
        record.add_update(self.actor.update(record.lr)?);
        Ok(())
    }

    /// The critic's updates on the same batch.
    fn update_critic(&mut self, batch: &RolloutBatch, record: &mut StepRecord) -> Result<(), TrainError> {
        let (Some(critic), Some(updates)) = (&mut self.critic, &self.plan.critic) else { return Ok(()) };
        let lr = self.plan.lr_at(updates, self.step);
        for _ in 0..updates.ppo_epochs {
            for mini in batch.mini_batches(updates.ppo_mini_batch_size) {
                let whole = batch.view(mini.clone());
                let denominator = Denominator::count(whole.mask, &whole.seq)?;
                let mut failure = None;
                for micro in micro_batches(&batch.lengths()[mini.clone()], self.tape) {
                    let micro = mini.start + micro.start..mini.start + micro.end;
                    let part = batch.view(micro.clone());
                    let weights = Aggregation::default().token_weights(&denominator, part.mask, &part.seq)?;
                    let packed = qurl_model::compute::Batch::whole(&batch.ids(micro.clone()));
                    critic.accumulate_values(&packed, &batch.targets(micro).rows, |values| {
                        match value_loss(
                            values,
                            part.values,
                            part.returns,
                            part.mask,
                            &weights,
                            updates.cliprange_value,
                        ) {
                            Ok(loss) => {
                                record.value_loss = Some(record.value_loss.unwrap_or(0.0) + loss.loss);
                                to_f32(&loss.dvalue)
                            }
                            Err(e) => {
                                failure = Some(e);
                                vec![0.0; values.len()]
                            }
                        }
                    })?;
                    if let Some(e) = failure {
                        return Err(e.into());
                    }
                }
                let report = critic.update(lr)?;
                record.value_grad_norm = Some(report.grad_norm);
            }
        }
        Ok(())
    }

    /// Held-out problems of an evaluation.
    pub fn held_out(&self) -> u64 {
        held_out(&*self.task, self.plan.run.test_problems)
    }

    /// Greedy accuracy of the actor in full precision on held-out problems.
    pub fn evaluate(&mut self) -> Result<f64, TrainError> {
        let options = *self.actor.network().options();
        let options = NetworkOptions { trained: false, ..options };
        let network = Network::new(&*self.backend, &self.start.config, &self.actor.params, options)?;
        let version = self.version()?;
        let engine_options =
            EngineOptions { kv_bytes: self.plan.rollout.kv_cache_mb << 20, ..EngineOptions::default() };
        let mut engine = Engine::new(self.backend.clone(), network, version, engine_options)?;
        let problems = draw_problems(&*self.task, Split::Test, self.seed, 0, self.held_out())?;
        let (max_new, _) = self.plan.sizes_at(self.step);
        let max_prompt = self.plan.data.max_prompt_length;
        let draw = Draw { max_prompt, n: 1, sampling: Sampling::greedy(), max_new, seed: self.seed, step: 0 };
        Ok(accuracy(&solve(&mut engine, &self.start, &*self.task, problems, draw)?.0))
    }
}

/// An engine for the plan's rollouts, packed in the plan's format.
fn rollout_engine<B: Backend>(
    backend: &Arc<B>,
    config: &ModelConfig,
    params: &Params<B::Tensor>,
    plan: &RlPlan,
) -> Result<Engine<B>, TrainError> {
    let r = &plan.rollout;
    let mut options = NetworkOptions { positions: plan.longest(), ..NetworkOptions::inference(config, r.format) };
    options.kv_format = r.kv_cache.unwrap_or(options.kv_format);
    options.head_format = if r.quantize_head { r.format } else { options.head_format };
    let network = Network::new(&**backend, config, params, options)?;
    let engine_options = EngineOptions {
        kv_bytes: r.kv_cache_mb << 20,
        page_size: r.page_size,
        max_num_seqs: r.max_num_seqs,
        max_num_batched_tokens: r.max_num_batched_tokens,
    };
    Ok(Engine::new(backend.clone(), network, WeightVersion::default(), engine_options)?)
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v as f64).collect()
}
