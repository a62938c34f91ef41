//! A model that is being trained.
//!
//! It owns the master weights in f32 ([`Master`]), their gradients and moments, and the packed network that
//! computes. A step adds up gradients over micro-batches ([`Learner::accumulate`]), shard by shard
//! ([`Learner::end_shard`]), and ends with one [`Learner::update`], after which the network is packed again
//! from the new weights. What the loss is, is the caller's business: it sees the log-probs of a micro-batch,
//! or of some of its targets, and answers with their derivatives.

mod networks;
mod options;
mod passes;
mod rehearse;

pub use options::{LearnerOptions, LearnerStart, LoraOptions, LossScope};
pub use passes::Passes;
pub use qurl_kernels::types::LossGradient;

use crate::checkpoint::LearnerSnapshot;
use crate::divided::Slot;
use crate::gradients::Gradients;
use crate::master::Master;
use crate::optimizer::{Optimizer, UpdateReport};
use crate::ranks::Ranks;
use qurl_kernels::types::HeadOutput;
use qurl_kernels::{Device, DeviceError, KvFormat, Queue, Rounding};
use qurl_model::compute::{Base, BaseLeaves, Batch, Network, Tape, TapeOptions, Targets, idle_training};
use qurl_model::{ModelConfig, ParamInfo, Params, params};
use std::ops::Range;

/// A model that is being trained.
pub struct Learner<D: Device> {
    /// Master weights.
    pub master: Master<D>,
    /// None while it rests.
    grads: Option<Gradients<D>>,
    /// Without blocks where they are divided among the ranks.
    net: Network<D>,
    /// The block at hand, where they are.
    slot: Option<Slot<D>>,
    /// How many of the network's blocks have the newest weights.
    fresh: usize,
    /// Whether those that have not are gathered while the next forward pass runs.
    catches_up: bool,
    /// Moments and the number of updates.
    pub optimizer: Optimizer<D>,
    /// None while it rests.
    tape: Option<Tape<D>>,
    /// What its tape is made of.
    rested: (TapeOptions, KvFormat),
    ranks: Ranks,
    /// Passes of the shard at hand that are to come.
    passes: usize,
    /// Passes so far.
    passed: Passes,
    /// Checksums of the frozen base's leaves, where adapters are trained beside one.
    base: Option<Vec<u64>>,
}

impl<D: Device> Learner<D> {
    /// Takes over weights, on one rank.
    pub fn new(
        queue: &mut D::Queue,
        config: &ModelConfig,
        weights: &Params<Vec<f32>>,
        options: LearnerOptions,
    ) -> Result<Self, DeviceError> {
        Self::on_ranks(queue, config, weights, options, &Ranks::alone())
    }

    /// Takes over weights, which are the same on all ranks.
    pub fn on_ranks(
        queue: &mut D::Queue,
        config: &ModelConfig,
        weights: &Params<Vec<f32>>,
        options: LearnerOptions,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        Self::from_start(queue, config, LearnerStart::Whole(weights), options, ranks)
    }

    /// Takes over what is there, which is the same on all ranks.
    pub fn from_start(
        queue: &mut D::Queue,
        config: &ModelConfig,
        start: LearnerStart,
        options: LearnerOptions,
        ranks: &Ranks,
    ) -> Result<Self, DeviceError> {
        let (base, weights) = match start {
            LearnerStart::Whole(weights) => (None, weights),
            LearnerStart::Adapters(base, adapters) => (Some(base), adapters),
        };
        let shapes = match weights.value_head {
            Some(_) => params::shapes(config, true),
            None => options.shapes(config),
        };
        Self::of(queue, config, shapes, Some(weights.as_ref()), base, options, ranks, &mut |_| ())
    }

    /// Takes over weights of these shapes, which where there are adapters are theirs; without any they are
    /// zero, like the base: for plans. `taken` is called with each part of the memory after it was taken.
    pub(crate) fn of(
        queue: &mut D::Queue,
        config: &ModelConfig,
        shapes: Params<ParamInfo>,
        weights: Option<Params<&Vec<f32>>>,
        base: Option<Base>,
        options: LearnerOptions,
        ranks: &Ranks,
        taken: &mut dyn FnMut(&str),
    ) -> Result<Self, DeviceError> {
        let (device, value_head) = (queue.device().clone(), shapes.value_head.is_some());
        let mut master = Master::new(queue, &shapes, options.compute, weights, ranks)?;
        taken("weights in f32");
        let works = !ranks.divides_weights();
        let grads = works.then(|| Gradients::new(&*device, master.lengths(), ranks)).transpose()?;
        if works {
            taken("gradients");
        }
        let network = options.network(config);
        let mut sums = None;
        let net = match options.lora {
            None if ranks.divides_weights() => {
                Network::without_blocks(queue, config, value_head, &mut master, network)?
            }
            None => Network::of_leaves(queue, config, value_head, &mut master, network)?,
            Some(_) => {
                let zeros: Vec<usize> = params::shapes(config, false).iter().map(ParamInfo::len).collect();
                let mut base = BaseLeaves::summed(base.unwrap_or(Base::Zeros(&zeros)));
                let mut net = Network::of_leaves(queue, config, false, &mut base, network)?;
                sums = Some(base.into_sums());
                net.refresh_leaves(queue, &mut master, Rounding::Nearest)?;
                net
            }
        };
        let slot = ranks.divides_weights().then(|| Slot::new(&*device, &net)).transpose()?;
        taken("packed weights");
        let optimizer = Optimizer::new(&*device, &shapes, options.adamw, ranks)?;
        taken("moments");
        let kv_format = options.kv_format.unwrap_or(net.options().kv_format);
        let tape = works.then(|| Tape::with_kv(&*device, &net, kv_format, options.tape)).transpose()?;
        if works {
            taken("activations");
        }
        let (ranks, tape_options) = (ranks.clone(), options.tape);
        let (passes, passed) = (0, Passes::default());
        let rested = (tape_options, kv_format);
        // Where another network runs the forward passes, nothing is gained.
        let catches_up =
            ranks.size() > 1 && slot.is_none() && options.lora.is_none() && options.kv_format.is_none();
        let fresh = config.num_layers;
        Ok(Learner {
            master,
            grads,
            net,
            slot,
            fresh,
            catches_up,
            optimizer,
            tape,
            rested,
            ranks,
            passes,
            passed,
            base: sums,
        })
    }

    /// Takes the memory for activations, if it has rested. Gradients take theirs where a shard begins.
    pub fn work(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        if self.tape.is_none() {
            let (options, kv_format) = self.rested;
            self.tape = Some(Tape::with_kv(&**queue.device(), &self.net, kv_format, options)?);
        }
        Ok(())
    }

    /// Gives the memory of activations and gradients back where a model is divided because there is too
    /// little, until [`Learner::work`]. Only between updates.
    pub fn rest(&mut self) {
        if self.slot.is_some() {
            (self.tape, self.grads) = (None, None);
        }
    }

    /// Checksums of the frozen base's leaves, in the order of [`Params`], where adapters are trained beside
    /// one.
    pub fn base_sums(&self) -> Option<&[u64]> {
        self.base.as_deref()
    }

    /// Who trains it.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Begins one of this rank's shards ([`Ranks::own_shards_of`]), which takes so many passes at the rank
    /// that takes the most. Where gradients are whole it may be left out: they leave later then.
    pub fn begin_shard(&mut self, queue: &mut D::Queue, passes: usize) -> Result<(), DeviceError> {
        self.passes = passes.max(1);
        let device = queue.device().clone();
        if self.grads.is_none() {
            self.grads = Some(Gradients::new(&*device, self.master.lengths(), &self.ranks)?);
        }
        at_work(&mut self.grads).begin_shard(&*device, self.passes)
    }

    /// A pass begins, maybe the last one of its shard.
    fn begin_pass(&mut self) {
        if self.passes == 1 {
            at_work(&mut self.grads).begin_last_pass();
        }
        self.passes = self.passes.saturating_sub(1);
        self.passed.training += 1;
    }

    /// Runs one micro-batch of the shard at hand forward, asks for the loss's derivatives, and adds the
    /// gradients. The loss is asked for ranges of targets, in order: for all at once where its scope is a
    /// sequence.
    pub fn accumulate<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        targets: Targets,
        temperature: f32,
        scope: LossScope,
        loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
    ) -> Result<(), E> {
        self.accumulate_straight(queue, None, batch, targets, temperature, scope, loss)
    }

    /// [`Learner::accumulate`] with a forward pass of another network of the same weights, where there is
    /// one: gradients go straight through its rounding, to this learner's own weights.
    pub fn accumulate_straight<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        ran: Option<&Network<D>>,
        batch: &Batch,
        targets: Targets,
        temperature: f32,
        scope: LossScope,
        mut loss: impl FnMut(Range<usize>, &HeadOutput) -> Result<LossGradient, E>,
    ) -> Result<(), E> {
        if targets.is_empty() {
            return Ok(());
        }
        self.begin_pass();
        let (mut weights, tape, grads) = self.weights_of_pass();
        let grads = at_work(grads);
        let weights = &mut weights;
        match scope {
            LossScope::Token => {
                tape.train_straight(queue, ran, weights, batch, &targets, temperature, loss, grads)
            }
            LossScope::Sequence => {
                let forward = match ran {
                    Some(ran) => tape.forward(queue, ran, batch, targets, temperature)?,
                    None => tape.forward(queue, &mut *weights, batch, targets, temperature)?,
                };
                let gradient = loss(0..forward.out.logp.len(), &forward.out)?;
                Ok(tape.backward_straight(queue, ran, weights, forward, gradient.borrowed(), grads)?)
            }
        }
    }

    /// Runs one micro-batch of a critic forward, asks for the derivatives by the values of `rows`, adds the
    /// gradients.
    pub fn accumulate_values<E: From<DeviceError>>(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        rows: &[u32],
        loss: impl FnOnce(&[f32]) -> Result<Vec<f32>, E>,
    ) -> Result<(), E> {
        if rows.is_empty() {
            return Ok(());
        }
        self.begin_pass();
        let (mut weights, tape, grads) = self.weights_of_pass();
        let grads = at_work(grads);
        let values = tape.forward_values(queue, &mut weights, batch, rows)?;
        let gradient = loss(&values)?;
        Ok(tape.backward_values(queue, &mut weights, rows, &gradient, grads)?)
    }

    /// What was added so far was one of this rank's shards; the next begins at zero.
    pub fn end_shard(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        self.catch_up(queue)?;
        while self.slot.is_some() && self.passes > 0 {
            self.begin_pass();
            let (weights, _, grads) = self.weights_of_pass();
            idle_training(queue, weights, at_work(grads))?;
        }
        self.passes = 0;
        at_work(&mut self.grads).end_shard(queue)
    }

    /// One optimizer update with the gradients of all shards, at all ranks.
    pub fn update(&mut self, queue: &mut D::Queue, lr: f64) -> Result<UpdateReport, DeviceError> {
        self.catch_up(queue)?;
        let grads = at_work(&mut self.grads);
        grads.end(queue)?;
        let (lengths, pieces) = self.master.parts_mut();
        let report = self.optimizer.step(queue, lr, lengths, pieces, &grads.sum())?;
        grads.clear(queue);
        match (report.applied, self.catches_up) {
            (false, _) => {}
            (true, true) => {
                self.net.refresh_tables(queue, &mut self.master, Rounding::Nearest)?;
                self.fresh = 0;
            }
            (true, false) => self.net.refresh_leaves(queue, &mut self.master, Rounding::Nearest)?,
        }
        Ok(report)
    }

    /// The weights, on the host of every rank.
    pub fn weights(&mut self, queue: &mut D::Queue) -> Result<Params<Vec<f32>>, DeviceError> {
        self.master.read(queue)
    }

    /// Zero moments, no updates made.
    pub fn reset_optimizer(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        self.optimizer.reset(queue, self.master.lengths())
    }

    /// Weights, moments and the number of updates, on the host. Gradients are not part of it: take it between
    /// updates.
    pub fn snapshot(&mut self, queue: &mut D::Queue) -> Result<LearnerSnapshot, DeviceError> {
        let weights = self.weights(queue)?;
        let moments = self.optimizer.moments.as_ref().try_map(|moments| queue.read_moments(moments))?;
        Ok(LearnerSnapshot { weights, moments, updates: self.optimizer.steps })
    }

    /// Takes over the state of a model of the same layout.
    pub fn restore(&mut self, queue: &mut D::Queue, from: &LearnerSnapshot) -> Result<(), DeviceError> {
        self.master.write(queue, &from.weights);
        for (to, from) in self.optimizer.moments.iter_mut().zip(from.moments.iter()) {
            queue.write_moments(to, from)?;
        }
        self.optimizer.steps = from.updates;
        self.fresh = self.net.config().num_layers;
        self.net.refresh_leaves(queue, &mut self.master, Rounding::Nearest)
    }
}

/// What a learner has while it works.
fn at_work<T>(memory: &mut Option<T>) -> &mut T {
    memory.as_mut().unwrap_or_else(|| panic!("a learner that rests"))
}
