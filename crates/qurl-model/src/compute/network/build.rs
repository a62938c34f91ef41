//! How a network is made: from leaves that are there or come one by one, from random numbers, or of the
//! frozen base of another one.

use super::block::{Block, Packed, heads};
use super::{NETWORKS, Network, NetworkOptions, numbered};
use crate::compute::adapters::Adapters;
use crate::compute::leaves::Leaves;
use crate::compute::rope;
use crate::config::ModelConfig;
use crate::lora::no_adapters;
use crate::params::{ParamInfo, ParamKind, Params};
use crate::rng::{CounterRng, text_key};
use qurl_kernels::ops::Pack;
use qurl_kernels::types::WeightShape;
use qurl_kernels::{Device, DeviceError, Format, Queue, Rounding};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Where the numbers of leaves come from.
enum Source<'a, D: Device> {
    /// They are there, or can be gathered.
    Leaves(&'a mut dyn Leaves<D>),
    /// [`random_leaf`] with this seed.
    Random(u64),
}

impl<D: Device> Network<D> {
    /// Packs the weights.
    pub fn new(
        queue: &mut D::Queue,
        config: &ModelConfig,
        mut params: &Params<D::Tensor>,
        options: NetworkOptions,
    ) -> Result<Self, DeviceError> {
        let value_head = params.value_head.is_some();
        Self::of_leaves(queue, config, value_head, &mut params, options)
    }

    /// [`Network::new`] from weights that come leaf by leaf. Adapters that the options ask for change nothing
    /// before they are refreshed.
    pub fn of_leaves(
        queue: &mut D::Queue,
        config: &ModelConfig,
        value_head: bool,
        leaves: &mut impl Leaves<D>,
        options: NetworkOptions,
    ) -> Result<Self, DeviceError> {
        Self::build(queue, config, options, value_head, config.num_layers, Source::Leaves(leaves))
    }

    /// The same without blocks, which are to come one at a time ([`Block::empty`]).
    pub fn without_blocks(
        queue: &mut D::Queue,
        config: &ModelConfig,
        value_head: bool,
        leaves: &mut impl Leaves<D>,
        options: NetworkOptions,
    ) -> Result<Self, DeviceError> {
        Self::build(queue, config, options, value_head, 0, Source::Leaves(leaves))
    }

    /// Another network of the same frozen base, which both hold together: with adapters of its own, which
    /// change nothing before they are refreshed, or without.
    pub fn sharing(&self, queue: &mut D::Queue, options: NetworkOptions) -> Result<Self, DeviceError> {
        let vector = |queue: &mut D::Queue, from: &D::Tensor| {
            let mut copy = queue.device().zeros(D::len(from))?;
            queue.copy(from, &mut copy, D::len(from));
            Ok::<_, DeviceError>(copy)
        };
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let params = block.params.as_ref().try_map(&mut |leaf: &Packed<D>| {
                Ok::<_, DeviceError>(match leaf {
                    Packed::Weight(weight) => Packed::Weight(weight.clone()),
                    Packed::Tensor(tensor) => Packed::Tensor(vector(queue, tensor)?),
                })
            })?;
            blocks.push(Block { heads: block.heads, params, adapters: no_adapters() });
        }
        let mut network = Network {
            id: NETWORKS.fetch_add(1, Ordering::Relaxed),
            config: self.config.clone(),
            options,
            embed: self.embed.clone(),
            blocks,
            final_norm: vector(queue, &self.final_norm)?,
            head: self.head.clone(),
            head_for_gradient: self.head_for_gradient.clone().filter(|_| options.trained),
            value_head: self.value_head.as_ref().map(|head| vector(queue, head)).transpose()?,
            cos: self.cos.clone(),
            sin: self.sin.clone(),
            adapters: None,
            clean_norms: Vec::new(),
        };
        network.make_adapters(queue)?;
        Ok(network)
    }

    /// Memory for the adapters that the options ask for.
    fn make_adapters(&mut self, queue: &mut D::Queue) -> Result<(), DeviceError> {
        let Some(lora) = self.options.lora else { return Ok(()) };
        let adapters = Adapters::new(queue, &self.config, lora)?;
        for block in &mut self.blocks {
            block.adapters = adapters.zeros(queue, &self.options)?;
        }
        self.adapters = Some(adapters);
        Ok(())
    }

    /// Random weights, made leaf by leaf where they are packed: never is more than one leaf there in full.
    pub fn random(
        queue: &mut D::Queue,
        config: &ModelConfig,
        options: NetworkOptions,
        seed: u64,
    ) -> Result<Self, DeviceError> {
        Self::build(queue, config, options, false, config.num_layers, Source::Random(seed))
    }

    fn build(
        queue: &mut D::Queue,
        config: &ModelConfig,
        options: NetworkOptions,
        value_head: bool,
        blocks: usize,
        mut source: Source<D>,
    ) -> Result<Self, DeviceError> {
        let pack = |queue: &mut D::Queue,
                    source: &mut Source<D>,
                    (index, info): &(usize, ParamInfo),
                    (format, trained): (Format, bool)| {
            let shape = WeightShape { n: info.rows, k: info.cols, format, trained };
            let mut to = queue.device().weight(shape)?;
            let made;
            let from = match source {
                Source::Leaves(leaves) if info.layer.is_some() => {
                    leaves.leaf_for(queue, *index, options.format)?
                }
                Source::Leaves(leaves) => leaves.leaf(queue, *index)?,
                Source::Random(seed) => {
                    made = random_leaf::<D>(queue, config, info, *seed)?;
                    &made
                }
            };
            queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: &mut to })?;
            Ok::<_, DeviceError>(Arc::new(to))
        };
        let own =
            |queue: &mut D::Queue, source: &mut Source<D>, (index, info): &(usize, ParamInfo)| match source {
                Source::Leaves(leaves) => {
                    let mut copy = queue.device().zeros(info.len())?;
                    let leaf = match info.layer {
                        Some(_) => leaves.leaf_for(queue, *index, options.format)?,
                        None => leaves.leaf(queue, *index)?,
                    };
                    queue.copy(leaf, &mut copy, info.len());
                    Ok(copy)
                }
                Source::Random(seed) => random_leaf::<D>(queue, config, info, *seed),
            };
        let leaves = numbered(config, value_head);
        let layers = leaves.layers.iter().take(blocks).enumerate();
        let mut blocks = Vec::with_capacity(blocks);
        for (index, layer) in layers {
            let params = layer.as_ref().try_map(&mut |leaf: &(usize, ParamInfo)| {
                Ok::<_, DeviceError>(match leaf.1.kind.is_block_linear() {
                    true => {
                        let packing = (options.format, options.packs_twice());
                        Packed::Weight(pack(queue, &mut source, leaf, packing)?)
                    }
                    false => Packed::Tensor(own(queue, &mut source, leaf)?),
                })
            })?;
            blocks.push(Block { heads: heads(config, index), params, adapters: no_adapters() });
        }
        let (cos, sin) = rope::tables(&config.rope, config.head_dim, options.positions);
        let head = leaves.head.as_ref().unwrap_or(&leaves.embed);
        // The gradient of the head's input is taken with every token, so a frozen head is packed for it, a
        // quantized one beside its own packing.
        let beside = options.packs_head_beside();
        let for_gradient =
            beside.then(|| pack(queue, &mut source, head, (Format::Bf16, true))).transpose()?;
        let mut network = Network {
            id: NETWORKS.fetch_add(1, Ordering::Relaxed),
            config: config.clone(),
            options,
            embed: Arc::new(own(queue, &mut source, &leaves.embed)?),
            blocks,
            final_norm: own(queue, &mut source, &leaves.final_norm)?,
            head: pack(queue, &mut source, head, (options.head_format, options.trained && !beside))?,
            head_for_gradient: for_gradient,
            value_head: leaves.value_head.as_ref().map(|leaf| own(queue, &mut source, leaf)).transpose()?,
            cos: Arc::new(queue.upload(&cos)?),
            sin: Arc::new(queue.upload(&sin)?),
            adapters: None,
            clean_norms: Vec::new(),
        };
        network.make_adapters(queue)?;
        Ok(network)
    }
}

/// Gains of one, biases of zero, the rest with the spread of fresh weights.
pub fn random_leaf<D: Device>(
    queue: &mut D::Queue,
    config: &ModelConfig,
    info: &ParamInfo,
    seed: u64,
) -> Result<D::Tensor, DeviceError> {
    match info.kind {
        kind if kind.is_norm() => queue.upload(&vec![1.0; info.len()]),
        ParamKind::QkvBias => queue.device().zeros(info.len()),
        _ => {
            let mut leaf = queue.device().zeros(info.len())?;
            let key = CounterRng::new(&[seed, text_key(&info.name)]).below_at(0, u64::MAX);
            queue.fill_random(&mut leaf, key, config.initializer_range);
            Ok(leaf)
        }
    }
}
