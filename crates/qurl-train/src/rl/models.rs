//! The models of a run: actor, critic, reference, and the engine with the quantized copy of the actor.
//!
//! Constructed in one place, for a run and for its memory plan ([`crate::memory`]), which constructs them on
//! a device that only counts.

use super::{TrainError, lag};
use crate::divided::Frozen;
use crate::learner::{Learner, LearnerOptions, LearnerStart};
use crate::optimizer::AdamWOptions;
use crate::ranks::Ranks;
use crate::recipe::{Forward, Recipe, RlPlan};
use crate::start::Start;
use qurl_kernels::{Device, Queue};
use qurl_model::compute::{Network, NetworkOptions, TapeOptions};
use qurl_model::{ModelConfig, Params, params};
use qurl_rollout::{Engine, WeightVersion};

/// The models of a run.
pub(crate) struct Models<D: Device> {
    /// theta: the model that is trained.
    pub actor: Learner<D>,
    pub critic: Option<Learner<D>>,
    pub reference: Option<Frozen<D>>,
    /// behav: the quantized copy that samples.
    pub engine: Engine<D>,
    /// Older weights in full precision, where rollouts lag behind and that is measured.
    pub old: Option<Network<D>>,
    pub tape: TapeOptions,
    /// Whether the engine's network runs the actor's forward passes.
    pub straight: bool,
}

impl<D: Device> Models<D> {
    /// Takes all memory. Without a start all weights are zero: for plans. `taken` is called with each part
    /// after it was taken.
    pub fn new(
        queue: &mut D::Queue,
        recipe: &Recipe,
        plan: &RlPlan,
        config: &ModelConfig,
        ranks: &Ranks,
        start: Option<&Start>,
        taken: &mut dyn FnMut(&str),
    ) -> Result<Models<D>, TrainError> {
        let (positions, compute) = (plan.longest(), recipe.trainer.compute);
        let (tape, pack_once) = (plan.tape(&recipe.trainer), recipe.trainer.pack_once);
        let device = queue.device().clone();
        if recipe.lora.is_some() {
            return Models::with_adapters(queue, recipe, plan, config, ranks, start, taken);
        }
        let weights = start.map(|start| &start.weights);
        let r = &plan.rollout;
        let mut options = NetworkOptions { positions, ..NetworkOptions::inference(config, r.format) };
        options.kv_format = r.kv_format().unwrap_or(options.kv_format);
        options.head_format = if r.quantize_head { r.format } else { options.head_format };
        let straight = recipe.trainer.forward == Forward::Rollout;
        let mut learner =
            |queue: &mut D::Queue, name: &str, value_head: Option<Vec<f32>>, adamw: AdamWOptions| {
                // A critic has no rollout to agree with.
                let kv_format = (straight && value_head.is_none()).then_some(options.kv_format);
                let shapes = params::shapes(config, value_head.is_some());
                let weights =
                    weights.map(|weights| Params { value_head: value_head.as_ref(), ..weights.as_ref() });
                let options =
                    LearnerOptions { compute, positions, pack_once, kv_format, tape, adamw, lora: None };
                let mut taken = |part: &str| taken(&format!("{name}: {part}"));
                Learner::of(queue, config, shapes, weights, None, options, ranks, &mut taken)
            };
        let mut actor = learner(queue, "actor", None, plan.actor.optim)?;
        let critic = match &plan.critic {
            Some(updates) => {
                let head = params::shapes(config, true).value_head;
                let value_head = head.map(|info| params::init_leaf(config, &info, recipe.trainer.seed));
                Some(learner(queue, "critic", value_head, updates.optim)?)
            }
            None => None,
        };
        let reference = match plan.algorithm.needs_reference() {
            true => {
                // As the actor runs forward, so that they agree at first.
                let full = NetworkOptions { positions, ..NetworkOptions::inference(config, compute) };
                let reference = actor.frozen(queue, if straight { options } else { full })?;
                taken("reference: packed weights");
                Some(reference)
            }
            false => None,
        };
        let old = match r.lag > 0 && plan.run.full_kl_positions > 0 {
            true => {
                let options = NetworkOptions { positions, ..NetworkOptions::inference(config, compute) };
                let old = actor.packed(queue, options)?;
                taken("older weights: packed weights");
                Some(old)
            }
            false => None,
        };
        let network = actor.packed(queue, options)?;
        taken("rollout: packed weights");
        let options = r.engine_options(&*device);
        let mut engine = Engine::new(device.clone(), network, WeightVersion::default(), options)?;
        taken("rollout: keys and values, buffers");
        if ranks.divides_weights() {
            engine.sleep()?;
            taken("rollout: keys and values, beside which nothing is trained");
        }
        Ok(Models { actor, critic, reference, engine, old, tape, straight })
    }

    /// The same where adapters are trained: actor, reference (the base without them) and engine share the
    /// frozen base.
    fn with_adapters(
        queue: &mut D::Queue,
        recipe: &Recipe,
        plan: &RlPlan,
        config: &ModelConfig,
        ranks: &Ranks,
        start: Option<&Start>,
        taken: &mut dyn FnMut(&str),
    ) -> Result<Models<D>, TrainError> {
        let (positions, compute, tape) = (plan.longest(), recipe.trainer.compute, plan.tape(&recipe.trainer));
        let (lora, adamw, pack_once) = (recipe.lora_options(), plan.actor.optim, recipe.trainer.pack_once);
        let kv_format = plan.rollout.kv_format();
        let options = LearnerOptions { compute, positions, pack_once, kv_format, tape, adamw, lora };
        let mut part = |part: &str| taken(&format!("actor: {part}"));
        let mut actor = match start.map(Start::learner) {
            Some(LearnerStart::Adapters(base, adapters)) => {
                let (shapes, weights) = (options.shapes(config), Some(adapters.as_ref()));
                Learner::of(queue, config, shapes, weights, Some(base), options, ranks, &mut part)?
            }
            Some(LearnerStart::Whole(_)) => panic!("a recipe with adapters starts from some"),
            None => {
                let shapes = options.shapes(config);
                Learner::of(queue, config, shapes, None, None, options, ranks, &mut part)?
            }
        };
        let own = NetworkOptions { trained: false, ..*actor.network().options() };
        let without = NetworkOptions { lora: None, ..own };
        let reference = plan.algorithm.needs_reference();
        let reference = reference.then(|| actor.sharing(queue, without)).transpose()?;
        let reference = reference.map(Frozen::whole);
        taken("reference: norms");
        let network = actor.sharing(queue, own)?;
        taken("rollout: adapters");
        let (device, version) = (queue.device().clone(), WeightVersion::default());
        let options = plan.rollout.engine_options(&*device);
        let engine = Engine::new(device, network, version, options)?;
        taken("rollout: keys and values, buffers");
        Ok(Models { actor, critic: None, reference, engine, old: None, tape, straight: false })
    }

    /// Does the largest thing of every kind that a run does, once: a micro-batch of the actor and of the
    /// critic with its update, scoring by the reference, prefill and decoding by the engine with its own
    /// network and with the actor's. `phase` is called with each phase of a step while its memory is taken.
    pub fn rehearse(
        &mut self,
        queue: &mut D::Queue,
        recipe: &Recipe,
        plan: &RlPlan,
        phase: &mut dyn FnMut(&str),
    ) -> Result<(), TrainError> {
        let Models { actor, critic, reference, engine, old, tape, straight } = self;
        let passes = |of| plan.passes_of_shard(of, &recipe.trainer);
        let ran = straight.then(|| engine.network());
        let of_actor = passes(&plan.actor);
        actor.rehearse(queue, *tape, plan.longest(), ran, reference.as_ref(), of_actor)?;
        if let (Some(critic), Some(updates)) = (&mut *critic, &plan.critic) {
            critic.rehearse_values(queue, *tape, plan.longest(), passes(updates))?;
        }
        phase("updates");
        actor.rest();
        critic.iter_mut().for_each(Learner::rest);
        engine.wake()?;
        if plan.rollout.lag > 0 {
            engine.load_with(WeightVersion::default(), |net| lag::rehearse(queue, net, actor.ranks()))?;
        }
        if let Some(old) = old {
            lag::rehearse(queue, old, actor.ranks())?;
        }
        let version = WeightVersion::default();
        let sampling = [plan.rollout.sampling(), plan.test_sampling()];
        engine.rehearse(queue, &sampling);
        phase("rollouts");
        let mut packed = None;
        let whole = actor.whole_network(queue, &mut packed)?;
        engine.with_network(whole, version, |engine| engine.rehearse(queue, &sampling))?;
        phase("evaluations");
        Ok(queue.synchronize()?)
    }
}
