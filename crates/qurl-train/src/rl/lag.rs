//! Fixed lag: step t trains on rollouts of the weights that step t - k began with (`rollout.lag = k`).
//!
//! Which weights a token comes from is decided by the recipe alone, so a run with a lag is as reproducible as
//! one without. Versions are counted by the step that begins with them; the first k steps use version 1. What
//! is kept for it are the master weights of k versions on the host, each rank its pieces: the copy that
//! samples and, for the split of ρ, old weights in full precision are packed from them. They are what a
//! checkpoint needs, too: rollouts are a function of weights, problems and keys, so none that is under way
//! has to be waited for or saved.
//!
//! With old weights in full precision, ρ = π_prox/π_behav is split into quantization, π_old/π_behav, and age,
//! π_prox/π_old ([`Scored::measure`]).

use super::record::Lagged;
use super::{RlTrainer, RolloutBatch, TrainError};
use crate::ranks::Ranks;
use crate::solve::Solved;
use qurl_kernels::checksum::{self, SEED, mix};
use qurl_kernels::ops::{AddPieces, AllGather};
use qurl_kernels::{Device, DeviceError, Queue, Rounding};
use qurl_model::compute::{Leaves, Network, TapeOptions, whole_batch};
use qurl_model::rng::{CounterRng, text_key};
use qurl_model::{Params, params};
use qurl_rl::Mismatch;
use qurl_rollout::{RolloutError, WeightVersion};
use std::collections::VecDeque;
use std::ops::Range;

/// Master weights of an older version.
#[derive(Clone, Debug, PartialEq)]
pub struct OldWeights {
    /// The step that began with them.
    pub version: u64,
    /// This rank's pieces of them.
    pub pieces: Params<Vec<f32>>,
}

/// What it takes to sample with older weights.
pub(super) struct Lag<D: Device> {
    /// Those that this or later steps sample with, the oldest first.
    versions: VecDeque<OldWeights>,
    /// The weights that sampled, in full precision, where that is measured.
    network: Option<Network<D>>,
}

impl<D: Device> Lag<D> {
    pub fn new(network: Option<Network<D>>) -> Lag<D> {
        Lag { versions: VecDeque::new(), network }
    }

    /// Copies of these versions, for a checkpoint.
    pub fn after(&self, versions: Range<u64>) -> Vec<OldWeights> {
        self.versions.iter().filter(|old| versions.contains(&old.version)).cloned().collect()
    }

    /// Takes over the versions of a checkpoint.
    pub fn restore(&mut self, versions: Vec<OldWeights>) {
        self.versions = versions.into();
    }
}

/// Leaves of weights on the host, in pieces.
struct HostLeaves<'a, D: Device> {
    pieces: &'a Params<Vec<f32>>,
    lengths: &'a Params<usize>,
    ranks: &'a Ranks,
    /// The leaf that was last asked for.
    leaf: Option<D::Tensor>,
}

impl<D: Device> Leaves<D> for HostLeaves<'_, D> {
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        let Some((piece, &len)) = self.pieces.iter().zip(self.lengths.iter()).nth(index) else {
            panic!("leaf {index} of {}", self.lengths.iter().len())
        };
        self.leaf = None;
        let own = queue.upload(piece)?;
        if self.ranks.size() == 1 {
            return Ok(self.leaf.insert(own));
        }
        let (cuts, at) = (self.ranks.cuts(len), self.ranks.piece(len).start);
        let mut whole = queue.device().zeros(len)?;
        queue.add_pieces(AddPieces { pieces: &own, count: 1, len: piece.len(), to: &mut whole, at });
        queue.all_gather(AllGather { ranks: self.ranks.collective(), cuts: &cuts, tensor: &mut whole })?;
        Ok(self.leaf.insert(whole))
    }
}

/// Takes the memory that packing from the host takes, for plans.
pub(super) fn rehearse<D: Device>(
    queue: &mut D::Queue,
    network: &mut Network<D>,
    ranks: &Ranks,
) -> Result<(), DeviceError> {
    let lengths = params::shapes(network.config(), false).map(|info| info.len());
    let pieces = lengths.clone().map(|len| vec![0.0; ranks.piece(len).len()]);
    let mut leaves = HostLeaves { pieces: &pieces, lengths: &lengths, ranks, leaf: None };
    network.refresh_leaves(queue, &mut leaves, Rounding::Nearest)
}

/// Response tokens of some sequences under the weights that sampled them, in full precision.
pub(super) struct Scored {
    version: u64,
    /// Sequences of the batch, in order.
    sequences: Vec<usize>,
    /// Log-probs of their response tokens.
    old: Vec<f32>,
}

impl Scored {
    /// The two parts of the mismatch; prox must be complete.
    pub fn measure(&self, batch: &RolloutBatch) -> Result<Lagged, TrainError> {
        let tokens: Vec<usize> = self.sequences.iter().flat_map(|&s| batch.token_range(s..s + 1)).collect();
        let some = |of: &[f32]| -> Vec<f32> { tokens.iter().map(|&token| of[token]).collect() };
        let (behav, prox) = (some(&batch.behav), some(&batch.prox));
        let mask = vec![true; tokens.len()];
        // Sequences numbered from 0.
        let lengths = self.sequences.iter().map(|&s| batch.token_range(s..s + 1).len());
        let seq: Vec<u32> =
            lengths.enumerate().flat_map(|(i, len)| std::iter::repeat_n(i as u32, len)).collect();
        Ok(Lagged {
            rollout_version: self.version,
            mismatch_quantization: Mismatch::measure(&behav, &self.old, &mask, &seq)?,
            mismatch_staleness: Mismatch::measure(&self.old, &prox, &mask, &seq)?,
        })
    }
}

impl<D: Device> RlTrainer<D> {
    /// Lets the engine take over the weights that this step samples with. Workers get those of all versions
    /// that this and the next steps use.
    pub(super) fn load_behav(&mut self) -> Result<(), TrainError> {
        let newest = self.version()?;
        let wanted = self.plan.rollout.version_at(self.step);
        if self.plan.rollout.lag > 0 {
            self.keep_version(newest.version, wanted)?;
        }
        let unpublished = self.unpublished(wanted, newest.version);
        for version in unpublished.iter().copied().filter(|&version| version != wanted) {
            self.load_version(version, newest)?;
            self.publish()?;
        }
        self.load_version(wanted, newest)?;
        if unpublished.contains(&wanted) { self.publish() } else { Ok(()) }
    }

    fn load_version(&mut self, version: u64, newest: WeightVersion) -> Result<(), TrainError> {
        let rounding = self.rounding(version);
        let noise = self.plan.rollout.norm_noise;
        let sigma = noise.map(|noise| noise.sigma_at(version, self.plan.run.total_steps));
        let seed = CounterRng::new(&[self.seed, text_key("norm noise"), version]).u64_at(0);
        let noisy = |net: &mut Network<D>, queue: &mut D::Queue| {
            sigma.map_or(Ok(()), |sigma| net.add_norm_noise(queue, sigma as f32, seed))
        };
        if version == newest.version {
            let (queue, master) = (&mut self.queue, &mut self.actor.master);
            self.engine.load_with(newest, |net| {
                net.refresh_leaves(queue, master, rounding)?;
                noisy(net, queue)
            })?;
            return Ok(());
        }
        let old = self.lag.versions.iter().find(|old| old.version == version);
        let old = old.ok_or_else(|| TrainError::OtherLag {
            found: self.lag.versions.iter().map(|old| old.version).collect(),
            expected: vec![version],
        })?;
        // The checksum of Master::checksum.
        let own: Vec<u64> = old.pieces.iter().map(|piece| checksum::values(piece)).collect();
        let checksum = self.ranks.join(own)?.into_iter().fold(SEED, mix);
        let (queue, lengths) = (&mut self.queue, self.actor.master.lengths());
        let mut leaves = HostLeaves { pieces: &old.pieces, lengths, ranks: &self.ranks, leaf: None };
        if let Some(network) = &mut self.lag.network {
            network.refresh_leaves(queue, &mut leaves, Rounding::Nearest)?;
        }
        let weights = WeightVersion { version, checksum };
        Ok(self.engine.load_with(weights, |net| {
            net.refresh_leaves(queue, &mut leaves, rounding)?;
            noisy(net, queue)
        })?)
    }

    /// Copies the weights that this step begins with, and forgets those that nothing samples with any more.
    fn keep_version(&mut self, newest: u64, oldest: u64) -> Result<(), TrainError> {
        let versions = &mut self.lag.versions;
        versions.retain(|old| old.version >= oldest);
        // A step that is tried again has kept them already.
        if versions.back().is_none_or(|old| old.version != newest) {
            let (queue, master) = (&mut self.queue, &self.actor.master);
            let pieces = master.pieces.as_ref().try_map(|piece| queue.read(piece, D::len(piece)))?;
            versions.push_back(OldWeights { version: newest, pieces });
        }
        Ok(())
    }

    /// Refuses rollouts of any other weights than those that this step trains on.
    pub(super) fn check_versions(&self, solved: &[Solved]) -> Result<(), TrainError> {
        let asked = self.engine.weights().ok_or(RolloutError::NoWeights)?;
        let wanted = self.plan.rollout.version_at(self.step);
        let asked = WeightVersion { version: wanted, ..asked };
        let made = solved.iter().flat_map(|s| &s.responses).map(|r| r.sample.weights);
        match made.into_iter().find(|&made_with| made_with != asked) {
            Some(made_with) => Err(RolloutError::WrongWeights { made_with, asked }.into()),
            None => Ok(()),
        }
    }

    /// Scores some sequences, those of [`RlTrainer::full_kl`], under the weights that sampled them in full
    /// precision (none with `run.full_kl_positions = 0`); nothing where rollouts do not lag.
    pub(super) fn score_lagged(&mut self, batch: &RolloutBatch) -> Result<Option<Scored>, TrainError> {
        if self.plan.rollout.lag == 0 {
            return Ok(None);
        }
        let mut sequences: Vec<usize> = self.probed_rows(batch).into_iter().map(|(s, _)| s).collect();
        sequences.sort_unstable();
        sequences.dedup();
        let lengths: Vec<usize> = sequences.iter().map(|&s| batch.lengths()[s]).collect();
        let part = self.ranks.part_of(&lengths);
        let version = self.plan.rollout.version_at(self.step);
        let temperature = self.plan.rollout.temperature;
        let mut own = Vec::new();
        let one = TapeOptions { sequences: 1, ..self.tape };
        let mut mine = sequences[part].iter();
        for _ in 0..self.ranks.passes_of(&lengths, one) {
            let Some(&sequence) = mine.next() else {
                if self.lag.network.is_none() || version == self.step {
                    self.actor.idle(&mut self.queue)?;
                }
                continue;
            };
            let sequence = sequence..sequence + 1;
            let (ids, targets) = (whole_batch(&batch.ids(sequence.clone())), batch.targets(sequence));
            let (queue, actor) = (&mut self.queue, &mut self.actor);
            let scored = match &self.lag.network {
                Some(old) if version != self.step => {
                    actor.score_with(queue, Some(old), &ids, &targets, temperature)
                }
                _ => actor.score(queue, &ids, &targets, temperature),
            };
            own.extend(scored?.logp);
        }
        Ok(Some(Scored { version, sequences, old: self.ranks.join(own)? }))
    }
}
