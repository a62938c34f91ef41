//! A model that is being trained.
//!
//! It owns the master weights in f32 ([`Master`]), their gradients and moments, and the packed network that
//! computes. A step adds up gradients over micro-batches ([`Learner::accumulate`]), shard by shard
//! ([`Learner::end_shard`]), and ends with one [`Learner::update`], after which the network is packed again
//! from the new weights. What the loss is, is the caller's business: it sees the log-probs of a micro-batch,
//! or of some of its targets, and answers with their derivatives.

use crate::checkpoint::LearnerSnapshot;
use crate::divided::{Frozen, PassWeights, Slot};
use crate::gradients::Gradients;
use crate::master::Master;
use crate::optimizer::{AdamWOptions, Optimizer, UpdateReport};
use crate::ranks::Ranks;
use qurl_kernels::types::HeadOutput;
pub use qurl_kernels::types::LossGradient;
use qurl_kernels::{Device, DeviceError, Format, KvFormat, Queue, Rounding};
use qurl_model::compute::{
    Base, BaseLeaves, Batch, Network, NetworkOptions, Tape, TapeOptions, Targets, idle_forward,
    idle_training, whole_batch,
};
use qurl_model::{Lora, ModelConfig, ParamInfo, Params, params};
use std::ops::Range;

/// How a learner computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearnerOptions {
    /// f32, or bf16 with f32 master weights and sums.
    pub compute: Format,
    /// Longest sequence.
    pub positions: usize,
    /// Format of keys and values, where a forward pass of training is run by a network that stores them in
    /// another than `compute` does ([`Learner::accumulate_straight`]).
    pub kv_format: Option<KvFormat>,
    /// Micro-batches and recomputation.
    pub tape: TapeOptions,
    /// The optimizer.
    pub adamw: AdamWOptions,
    /// Adapters that are trained beside a frozen base, instead of all weights.
    pub lora: Option<LoraOptions>,
}

/// Adapters beside a frozen base.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraOptions {
    /// The adapters.
    pub lora: Lora,
    /// Number format of the base.
    pub base_format: Format,
}

impl LearnerOptions {
    /// Names and shapes of what is trained; a critic has a value head beside it.
    pub(crate) fn shapes(&self, config: &ModelConfig) -> Params<ParamInfo> {
        self.lora.map_or_else(|| params::shapes(config, false), |lora| lora.lora.shapes(config))
    }

    fn network(&self, config: &ModelConfig) -> NetworkOptions {
        let format = self.lora.map_or(self.compute, |lora| lora.base_format);
        let mut options =
            NetworkOptions { positions: self.positions, ..NetworkOptions::training(config, format) };
        if let Some(lora) = self.lora {
            options.lora = Some(lora.lora);
            options.kv_format = self.kv_format.unwrap_or(options.kv_format);
        }
        options
    }
}

/// What a learner starts from.
#[derive(Clone, Copy)]
pub enum LearnerStart<'a> {
    /// Weights that are all trained.
    Whole(&'a Params<Vec<f32>>),
    /// A frozen base, and adapters beside it.
    Adapters(Base<'a>, &'a Params<Vec<f32>>),
}

/// What the derivatives of a loss by the log-prob and entropy of a target depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossScope {
    /// That target alone: the loss may be asked for some targets at a time, and the head computes its logits
    /// once.
    Token,
    /// All targets of its sequence: the loss is asked once for the whole micro-batch, and the head computes
    /// its logits again for the gradients.
    Sequence,
}

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
}

/// Passes through a model, those without rows included: what gathers blocks where they are divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passes {
    /// Forward alone.
    pub forward: u64,
    /// Forward and backward.
    pub training: u64,
}

impl std::ops::Add for Passes {
    type Output = Passes;

    fn add(self, other: Passes) -> Passes {
        Passes { forward: self.forward + other.forward, training: self.training + other.training }
    }
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
        let net = match options.lora {
            None if ranks.divides_weights() => {
                Network::without_blocks(queue, config, value_head, &mut master, network)?
            }
            None => Network::of_leaves(queue, config, value_head, &mut master, network)?,
            Some(_) => {
                let zeros: Vec<usize> = params::shapes(config, false).iter().map(ParamInfo::len).collect();
                let mut base = BaseLeaves::new(base.unwrap_or(Base::Zeros(&zeros)));
                let mut net = Network::of_leaves(queue, config, false, &mut base, network)?;
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

    /// Who trains it.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// The network, which may be waiting for its newest weights ([`Learner::catch_up`]); without blocks where
    /// they are divided among the ranks.
    pub fn network(&self) -> &Network<D> {
        &self.net
    }

    /// A whole network of the newest weights, to be lent to an engine
    /// ([`Engine::with_network`](qurl_rollout::Engine::with_network)): its own, or one packed into `memory`
    /// where blocks are divided. All ranks call it.
    pub fn whole_network<'a>(
        &'a mut self,
        queue: &mut D::Queue,
        memory: &'a mut Option<Network<D>>,
    ) -> Result<&'a mut Network<D>, DeviceError> {
        self.catch_up(queue)?;
        match self.slot {
            None => Ok(&mut self.net),
            Some(_) => {
                let options = NetworkOptions { trained: false, ..*self.net.options() };
                Ok(memory.insert(self.packed(queue, options)?))
            }
        }
    }

    /// Passes so far.
    pub fn passed(&self) -> Passes {
        self.passed
    }

    /// Takes over the newest weights, where the next forward pass would do it. All ranks call it at the same
    /// places: before they exchange anything else after passes that not all of them may have made.
    pub fn catch_up(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        match self.fresh < self.net.config().num_layers {
            true => idle_forward(queue, self.weights_of_pass().0),
            false => Ok(()),
        }
    }

    /// The weights of a pass.
    fn weights_of_pass(&mut self) -> (PassWeights<'_, D>, &mut Tape<D>, &mut Option<Gradients<D>>) {
        let Learner { net, slot, fresh, master, tape, grads, .. } = self;
        let (pieces, gather) = (&master.pieces.layers, &mut master.gather);
        let weights = match *fresh < net.config().num_layers {
            true => PassWeights::Behind { net, pieces, gather, fresh },
            false => PassWeights::of(net, pieces, slot.as_mut(), gather),
        };
        (weights, at_work(tape), grads)
    }

    /// The same of another network of the same model.
    fn weights_of<'a>(&'a mut self, other: &'a Frozen<D>) -> (PassWeights<'a, D>, &'a mut Tape<D>) {
        let Learner { slot, master, tape, .. } = self;
        (PassWeights::of(&other.net, &other.pieces, slot.as_mut(), &mut master.gather), at_work(tape))
    }

    /// Scores targets with the newest weights, without gradients and in the memory of the updates.
    ///
    /// Where weights are divided, all ranks pass alike: one that has nothing to score is
    /// [idle](Learner::idle).
    pub fn score(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.passed.forward += 1;
        let (weights, tape, _) = self.weights_of_pass();
        tape.score(queue, weights, batch, targets, temperature)
    }

    /// [`Learner::score`] with another network of the same model, or with its own where there is none.
    pub fn score_with(
        &mut self,
        queue: &mut D::Queue,
        net: Option<&Network<D>>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        if let Some(net) = net {
            return at_work(&mut self.tape).score(queue, net, batch, targets, temperature);
        }
        self.score(queue, batch, targets, temperature)
    }

    /// [`Learner::score`] with a frozen network, which is divided as the own one is.
    pub fn score_frozen(
        &mut self,
        queue: &mut D::Queue,
        other: &Frozen<D>,
        batch: &Batch,
        targets: &Targets,
        temperature: f32,
    ) -> Result<HeadOutput, DeviceError> {
        self.passed.forward += 1;
        let (weights, tape) = self.weights_of(other);
        tape.score(queue, weights, batch, targets, temperature)
    }

    /// A critic's values of rows, without gradients and in the memory of the updates.
    pub fn values(
        &mut self,
        queue: &mut D::Queue,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        self.passed.forward += 1;
        let (weights, tape, _) = self.weights_of_pass();
        tape.values(queue, weights, batch, rows)
    }

    /// Does what the other ranks need of this one while they pass with the newest weights.
    pub fn idle(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        self.passed.forward += 1;
        idle_forward(queue, self.weights_of_pass().0)
    }

    /// [`Learner::idle`] with a frozen network.
    pub fn idle_with(&mut self, queue: &mut D::Queue, other: &Frozen<D>) -> Result<(), DeviceError> {
        self.passed.forward += 1;
        idle_forward(queue, self.weights_of(other).0)
    }

    /// Logits of rows with the newest weights, or with another network of the same model.
    pub fn logits_with(
        &mut self,
        queue: &mut D::Queue,
        net: Option<&Network<D>>,
        batch: &Batch,
        rows: &[u32],
    ) -> Result<Vec<f32>, DeviceError> {
        if let Some(net) = net {
            return at_work(&mut self.tape).logits(queue, net, batch, rows);
        }
        self.passed.forward += 1;
        let (weights, tape, _) = self.weights_of_pass();
        tape.logits(queue, weights, batch, rows)
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

    /// Does the largest things that training does, for what they allocate: a full micro-batch with its
    /// update, by the network that runs forward passes where that is another, and scoring by it and by
    /// `other`. A shard takes so many passes.
    pub(crate) fn rehearse(
        &mut self,
        queue: &mut D::Queue,
        tape: TapeOptions,
        longest: usize,
        ran: Option<&Network<D>>,
        other: Option<&Frozen<D>>,
        passes: usize,
    ) -> Result<(), DeviceError> {
        self.work(queue)?;
        let ids = full_batch(tape, longest);
        let (batch, targets) = (whole_batch(&ids), Targets::of(&ids, |_, _| true));
        self.score_with(queue, ran, &batch, &targets, 1.0)?;
        if let Some(other) = other {
            self.score_frozen(queue, other, &batch, &targets, 1.0)?;
        }
        // The head in one pass: it holds more logits at a time than in two.
        self.begin_shard(queue, passes)?;
        self.accumulate_straight(queue, ran, &batch, targets, 1.0, LossScope::Token, |_, out| {
            let zeros = vec![0.0; out.logp.len()];
            Ok::<_, DeviceError>(LossGradient { dlogp: zeros.clone(), dentropy: zeros })
        })?;
        self.rehearse_update(queue)
    }

    /// [`Learner::rehearse`] of a critic.
    pub(crate) fn rehearse_values(
        &mut self,
        queue: &mut D::Queue,
        tape: TapeOptions,
        longest: usize,
        passes: usize,
    ) -> Result<(), DeviceError> {
        self.work(queue)?;
        let ids = full_batch(tape, longest);
        let batch = whole_batch(&ids);
        let rows: Vec<u32> = (0..batch.rows() as u32).collect();
        self.values(queue, &batch, &rows)?;
        let zeros = |values: &[f32]| Ok::<_, DeviceError>(vec![0.0; values.len()]);
        self.begin_shard(queue, passes)?;
        self.accumulate_values(queue, &batch, &rows, zeros)?;
        self.rehearse_update(queue)
    }

    /// Ends the first shard and all others, and updates.
    fn rehearse_update(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        self.end_shard(queue)?;
        for _ in 1..self.ranks.shards_each() {
            self.begin_shard(queue, 1)?;
            self.end_shard(queue)?;
        }
        self.update(queue, 0.0).map(|_| ())
    }

    /// The weights, on the host of every rank.
    pub fn weights(&mut self, queue: &mut D::Queue) -> Result<Params<Vec<f32>>, DeviceError> {
        self.master.read(queue)
    }

    /// Another network of the same weights; where there are adapters, of the same base in the same memory,
    /// without them unless the options have them.
    pub fn sharing(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Network<D>, DeviceError> {
        self.catch_up(queue)?;
        let mut network = self.net.sharing(queue, options)?;
        if options.lora.is_some() {
            network.refresh_leaves(queue, &mut self.master, Rounding::Nearest)?;
        }
        Ok(network)
    }

    /// Another network of the same weights, packed anew.
    pub fn packed(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Network<D>, DeviceError> {
        let value_head = self.master.lengths().value_head.is_some();
        Network::of_leaves(queue, &self.net.config().clone(), value_head, &mut self.master, options)
    }

    /// Another network of the same weights, to be scored with ([`Learner::score_with`]): divided as the own
    /// one is.
    pub fn frozen(
        &mut self,
        queue: &mut D::Queue,
        options: NetworkOptions,
    ) -> Result<Frozen<D>, DeviceError> {
        if self.slot.is_none() {
            return Ok(Frozen { net: self.packed(queue, options)?, pieces: Vec::new() });
        }
        let (config, master) = (self.net.config().clone(), &mut self.master);
        let value_head = master.lengths().value_head.is_some();
        let net = Network::without_blocks(queue, &config, value_head, master, options)?;
        let device = queue.device().clone();
        let pieces = master.pieces.layers.iter().map(|layer| {
            layer.as_ref().try_map(&mut |piece| {
                let mut copy = device.zeros(D::len(piece))?;
                queue.copy(piece, &mut copy, D::len(piece));
                Ok(copy)
            })
        });
        let pieces = pieces.collect::<Result<_, DeviceError>>()?;
        Ok(Frozen { net, pieces })
    }

    /// Lets such a network have the newest weights.
    pub fn refreeze(&mut self, queue: &mut D::Queue, frozen: &mut Frozen<D>) -> Result<(), DeviceError> {
        for (from, to) in self.master.pieces.layers.iter().zip(&mut frozen.pieces) {
            for (from, to) in from.as_ref().into_leaves().into_iter().zip(to.as_mut().into_leaves()) {
                queue.copy(from, to, D::len(from));
            }
        }
        frozen.net.refresh_leaves(queue, &mut self.master, Rounding::Nearest)
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

/// Sequences that fill a micro-batch, as long as they may be.
fn full_batch(tape: TapeOptions, longest: usize) -> Vec<Vec<u32>> {
    let starts = (0..tape.rows).step_by(longest.max(1)).take(tape.sequences);
    starts.map(|start| vec![0; longest.min(tape.rows - start)]).collect()
}

/// Splits whole sequences into micro-batches of at most `rows` tokens and `sequences` sequences, in order. A
/// sequence longer than `rows` is an error of the caller.
pub fn micro_batches(lengths: &[usize], options: TapeOptions) -> Vec<std::ops::Range<usize>> {
    let mut batches = Vec::new();
    let (mut start, mut rows) = (0, 0);
    for (i, &length) in lengths.iter().enumerate() {
        if i > start && (rows + length > options.rows || i - start == options.sequences) {
            batches.push(start..i);
            (start, rows) = (i, 0);
        }
        rows += length;
    }
    if start < lengths.len() {
        batches.push(start..lengths.len());
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn micro_batches_keep_order_and_bounds() {
        let options = TapeOptions { rows: 10, sequences: 3, recompute: false };
        assert_eq!(micro_batches(&[4, 4, 4, 1, 1, 1, 1, 10], options), [0..2, 2..5, 5..7, 7..8]);
        assert!(micro_batches(&[], options).is_empty());
    }
}
