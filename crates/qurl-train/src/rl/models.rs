//! The models of a run: actor, critic, reference, and the engine with the quantized copy of the actor.
//!
//! Constructed in one place, for a run and for its memory plan ([`crate::memory`]), which constructs them on
//! a device that only counts.

use super::TrainError;
use crate::learner::{Learner, LearnerOptions};
use crate::optimizer::AdamWOptions;
use crate::ranks::Ranks;
use crate::recipe::{Recipe, RlPlan};
use qurl_kernels::{Device, Queue};
use qurl_model::compute::{Network, NetworkOptions, TapeOptions};
use qurl_model::{ModelConfig, Params, params};
use qurl_rollout::{Engine, WeightVersion};

/// The models of a run.
pub(crate) struct Models<D: Device> {
    /// theta: the model that is trained.
    pub actor: Learner<D>,
    pub critic: Option<Learner<D>>,
    pub reference: Option<Network<D>>,
    /// behav: the quantized copy that samples.
    pub engine: Engine<D>,
    pub tape: TapeOptions,
}

impl<D: Device> Models<D> {
    /// Takes all memory. Without weights they are zero: for plans. `taken` is called with each part after it
    /// was taken.
    pub fn new(
        queue: &mut D::Queue,
        recipe: &Recipe,
        plan: &RlPlan,
        config: &ModelConfig,
        ranks: &Ranks,
        weights: Option<&Params<Vec<f32>>>,
        taken: &mut dyn FnMut(&str),
    ) -> Result<Models<D>, TrainError> {
        let (positions, compute) = (plan.longest(), recipe.trainer.compute);
        let tape = plan.tape(&recipe.trainer);
        let device = queue.device().clone();
        let mut learner =
            |queue: &mut D::Queue, name: &str, value_head: Option<Vec<f32>>, adamw: AdamWOptions| {
                let shapes = params::shapes(config, value_head.is_some());
                let weights =
                    weights.map(|weights| Params { value_head: value_head.as_ref(), ..weights.as_ref() });
                let options = LearnerOptions { compute, positions, tape, adamw };
                let mut taken = |part: &str| taken(&format!("{name}: {part}"));
                Learner::of(queue, config, shapes, weights, options, ranks, &mut taken)
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
                let options = NetworkOptions { positions, ..NetworkOptions::inference(config, compute) };
                let reference = actor.packed(queue, options)?;
                taken("reference: packed weights");
                Some(reference)
            }
            false => None,
        };
        let r = &plan.rollout;
        let mut options = NetworkOptions { positions, ..NetworkOptions::inference(config, r.format) };
        options.kv_format = r.kv_format().unwrap_or(options.kv_format);
        options.head_format = if r.quantize_head { r.format } else { options.head_format };
        let network = actor.packed(queue, options)?;
        taken("rollout: packed weights");
        let engine = Engine::new(device.clone(), network, WeightVersion::default(), r.engine_options())?;
        taken("rollout: keys and values, buffers");
        Ok(Models { actor, critic, reference, engine, tape })
    }

    /// Does the largest thing of every kind that a run does, once: a micro-batch of the actor and of the
    /// critic with its update, scoring by the reference, prefill and decoding by the engine with its own
    /// network and with the actor's.
    pub fn rehearse(&mut self, queue: &mut D::Queue, plan: &RlPlan) -> Result<(), TrainError> {
        let Models { actor, critic, reference, engine, tape } = self;
        actor.rehearse(queue, *tape, plan.longest(), reference.as_ref())?;
        if let Some(critic) = critic {
            critic.rehearse_values(queue, *tape, plan.longest())?;
        }
        let version = WeightVersion::default();
        let sampling = [plan.rollout.sampling(), plan.test_sampling()];
        engine.rehearse(queue, &sampling);
        engine.with_network(actor.network_mut(), version, |engine| engine.rehearse(queue, &sampling))?;
        Ok(queue.synchronize()?)
    }
}
