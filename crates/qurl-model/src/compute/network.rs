//! A model ready to compute: packed linear layers, norms, biases, embedding, rotary tables.
//!
//! The master weights stay with their owner (the trainer); [`Network::refresh`] packs their newest values
//! into the memory that is already there. The same type serves as the trainer's full-precision network and as
//! the engine's quantized copy: only the format differs.

use super::rope;
use crate::config::ModelConfig;
use crate::params::{LayerParams, ParamInfo, ParamKind, Params, shapes};
use crate::rng::{CounterRng, text_key};
use qurl_kernels::ops::{Pack, Rope};
use qurl_kernels::types::{Heads, KvShape, WeightShape};
use qurl_kernels::{Device, DeviceError, Format, KvFormat, Queue, Rounding};
use std::sync::atomic::{AtomicU32, Ordering};

/// How a network is packed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NetworkOptions {
    /// Format of the blocks' linear layers.
    pub format: Format,
    /// Format of the output head.
    pub head_format: Format,
    /// Number format of keys and values.
    pub kv_format: KvFormat,
    /// Whether gradients will be computed.
    pub trained: bool,
    /// Longest sequence.
    pub positions: usize,
}

impl NetworkOptions {
    /// Inference in one format of the blocks; the head stays in full (f32 or bf16).
    pub fn inference(config: &ModelConfig, format: Format) -> Self {
        let head_format = if format == Format::F32 { Format::F32 } else { Format::Bf16 };
        let kv_format = if format == Format::F32 { KvFormat::F32 } else { KvFormat::Bf16 };
        NetworkOptions {
            format,
            head_format,
            kv_format,
            trained: false,
            positions: config.max_position_embeddings,
        }
    }

    /// The same with the output head in the format of the blocks.
    pub fn quantize_head(self) -> Self {
        NetworkOptions { head_format: self.format, ..self }
    }

    /// Training in f32 or bf16.
    pub fn training(config: &ModelConfig, format: Format) -> Self {
        NetworkOptions { trained: true, ..Self::inference(config, format) }
    }
}

/// Networks so far.
static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// A leaf of a block ready to compute.
pub enum Packed<D: Device> {
    /// A linear layer in the network's number format.
    Weight(D::Weight),
    /// Gains and biases, in full.
    Tensor(D::Tensor),
}

impl<D: Device> Packed<D> {
    /// The packed weights.
    ///
    /// # Panics
    /// If it is a gain or a bias: a bug.
    pub(crate) fn weight(&self) -> &D::Weight {
        match self {
            Packed::Weight(weight) => weight,
            Packed::Tensor(_) => panic!("a vector is no linear layer"),
        }
    }

    /// The vector.
    ///
    /// # Panics
    /// If it is a linear layer: a bug.
    pub(crate) fn tensor(&self) -> &D::Tensor {
        match self {
            Packed::Tensor(tensor) => tensor,
            Packed::Weight(_) => panic!("a linear layer is no vector"),
        }
    }
}

/// One transformer block ready to compute.
pub struct Block<D: Device> {
    pub(crate) heads: Heads,
    pub(crate) params: LayerParams<Packed<D>>,
}

/// A model ready to compute.
pub struct Network<D: Device> {
    /// Unlike that of any other network of this process.
    id: u32,
    config: ModelConfig,
    options: NetworkOptions,
    pub(crate) embed: D::Tensor,
    pub(crate) blocks: Vec<Block<D>>,
    pub(crate) final_norm: D::Tensor,
    pub(crate) head: D::Weight,
    pub(crate) value_head: Option<D::Tensor>,
    cos: D::Tensor,
    sin: D::Tensor,
}

/// Master weights, leaf by leaf: never need all of them be in one place.
pub trait Leaves<D: Device> {
    /// A whole leaf, by its number in the order of [`Params`].
    fn leaf(&mut self, queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError>;
}

impl<D: Device> Leaves<D> for &Params<D::Tensor> {
    fn leaf(&mut self, _queue: &mut D::Queue, index: usize) -> Result<&D::Tensor, DeviceError> {
        Ok(self.iter().nth(index).unwrap_or_else(|| panic!("weights of another model: no leaf {index}")))
    }
}

/// Names and shapes with the numbers of the leaves.
fn numbered(config: &ModelConfig, value_head: bool) -> Params<(usize, ParamInfo)> {
    let mut next = 0..;
    shapes(config, value_head).map(|info| (next.next().unwrap_or_default(), info))
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

    /// [`Network::new`] from weights that come leaf by leaf.
    pub fn of_leaves(
        queue: &mut D::Queue,
        config: &ModelConfig,
        value_head: bool,
        leaves: &mut impl Leaves<D>,
        options: NetworkOptions,
    ) -> Result<Self, DeviceError> {
        Self::build(queue, config, options, value_head, Source::Leaves(leaves))
    }

    /// Random weights, made leaf by leaf where they are packed: never is more than one leaf there in full.
    pub fn random(
        queue: &mut D::Queue,
        config: &ModelConfig,
        options: NetworkOptions,
        seed: u64,
    ) -> Result<Self, DeviceError> {
        Self::build(queue, config, options, false, Source::Random(seed))
    }

    fn build(
        queue: &mut D::Queue,
        config: &ModelConfig,
        options: NetworkOptions,
        value_head: bool,
        mut source: Source<D>,
    ) -> Result<Self, DeviceError> {
        let pack = |queue: &mut D::Queue,
                    source: &mut Source<D>,
                    (index, info): &(usize, ParamInfo),
                    format: Format| {
            let shape = WeightShape { n: info.rows, k: info.cols, format, trained: options.trained };
            let mut to = queue.device().weight(shape)?;
            let made;
            let from = match source {
                Source::Leaves(leaves) => leaves.leaf(queue, *index)?,
                Source::Random(seed) => {
                    made = random_leaf::<D>(queue, config, info, *seed)?;
                    &made
                }
            };
            queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: &mut to })?;
            Ok::<_, DeviceError>(to)
        };
        let own =
            |queue: &mut D::Queue, source: &mut Source<D>, (index, info): &(usize, ParamInfo)| match source {
                Source::Leaves(leaves) => {
                    let mut copy = queue.device().zeros(info.len())?;
                    let leaf = leaves.leaf(queue, *index)?;
                    queue.copy(leaf, &mut copy, info.len());
                    Ok(copy)
                }
                Source::Random(seed) => random_leaf::<D>(queue, config, info, *seed),
            };
        let leaves = numbered(config, value_head);
        let mut blocks = Vec::with_capacity(leaves.layers.len());
        for (index, layer) in leaves.layers.iter().enumerate() {
            let params = layer.as_ref().try_map(&mut |leaf: &(usize, ParamInfo)| {
                Ok::<_, DeviceError>(match leaf.1.kind.is_block_linear() {
                    true => Packed::Weight(pack(queue, &mut source, leaf, options.format)?),
                    false => Packed::Tensor(own(queue, &mut source, leaf)?),
                })
            })?;
            blocks.push(Block { heads: heads(config, index), params });
        }
        let (cos, sin) = rope::tables(&config.rope, config.head_dim, options.positions);
        let head = leaves.head.as_ref().unwrap_or(&leaves.embed);
        Ok(Network {
            id: NETWORKS.fetch_add(1, Ordering::Relaxed),
            config: config.clone(),
            options,
            embed: own(queue, &mut source, &leaves.embed)?,
            blocks,
            final_norm: own(queue, &mut source, &leaves.final_norm)?,
            head: pack(queue, &mut source, head, options.head_format)?,
            value_head: leaves.value_head.as_ref().map(|leaf| own(queue, &mut source, leaf)).transpose()?,
            cos: queue.upload(&cos)?,
            sin: queue.upload(&sin)?,
        })
    }

    /// The packed matrices of all linear layers, blocks first, the head last, with what they are.
    pub fn matrices_mut(&mut self) -> Vec<(ParamInfo, &mut D::Weight)> {
        let shapes = shapes(&self.config, false);
        let mut matrices = Vec::new();
        for (infos, block) in shapes.layers.into_iter().zip(&mut self.blocks) {
            let leaves = infos.into_leaves().into_iter().zip(block.params.as_mut().into_leaves());
            matrices.extend(leaves.filter_map(|(info, leaf)| match leaf {
                Packed::Weight(weight) => Some((info, weight)),
                Packed::Tensor(_) => None,
            }));
        }
        matrices.push((shapes.head.unwrap_or(shapes.embed), &mut self.head));
        matrices
    }

    /// Takes over changed weights of the same model, without new memory.
    pub fn refresh(&mut self, queue: &mut D::Queue, params: &Params<D::Tensor>) -> Result<(), DeviceError> {
        self.refresh_rounded(queue, params, Rounding::Nearest)
    }

    /// [`Network::refresh`] with a choice of rounding; stochastic rounding samples every matrix with a seed
    /// of its own.
    pub fn refresh_rounded(
        &mut self,
        queue: &mut D::Queue,
        mut params: &Params<D::Tensor>,
        rounding: Rounding,
    ) -> Result<(), DeviceError> {
        self.refresh_leaves(queue, &mut params, rounding)
    }

    /// [`Network::refresh_rounded`] from weights that come leaf by leaf.
    pub fn refresh_leaves(
        &mut self,
        queue: &mut D::Queue,
        leaves: &mut impl Leaves<D>,
        rounding: Rounding,
    ) -> Result<(), DeviceError> {
        let mut matrices = 0;
        let mut rounding = || {
            matrices += 1;
            match rounding {
                Rounding::Nearest => rounding,
                Rounding::Stochastic { seed } => {
                    Rounding::Stochastic { seed: CounterRng::new(&[seed, matrices]).u64_at(0) }
                }
            }
        };
        let numbers = numbered(&self.config, self.value_head.is_some());
        for (layer, block) in numbers.layers.iter().zip(&mut self.blocks) {
            let to = layer.as_ref().into_leaves().into_iter().zip(block.params.as_mut().into_leaves());
            for ((index, info), to) in to {
                let from = leaves.leaf(queue, *index)?;
                match to {
                    Packed::Tensor(to) => queue.copy(from, to, info.len()),
                    Packed::Weight(to) => {
                        queue.pack(Pack { from, rounding: rounding(), copy: None, to })?;
                    }
                }
            }
        }
        let vectors = [(Some(&numbers.final_norm), Some(&mut self.final_norm))];
        let vectors = vectors.into_iter().chain([(numbers.value_head.as_ref(), self.value_head.as_mut())]);
        for ((index, info), to) in vectors.filter_map(|(leaf, to)| leaf.zip(to)) {
            let from = leaves.leaf(queue, *index)?;
            queue.copy(from, to, info.len());
        }
        let (head, copy) = match &numbers.head {
            Some((head, _)) => {
                let (index, info) = &numbers.embed;
                let from = leaves.leaf(queue, *index)?;
                queue.copy(from, &mut self.embed, info.len());
                (*head, None)
            }
            None => (numbers.embed.0, Some(&mut self.embed)),
        };
        let from = leaves.leaf(queue, head)?;
        queue.pack(Pack { from, rounding: rounding(), copy, to: &mut self.head })
    }

    /// Names the memory of its weights: another number for every network, and the same after a refresh.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How the network is packed.
    pub fn options(&self) -> &NetworkOptions {
        &self.options
    }

    /// Pages for the keys and values of one layer.
    pub fn kv_shape(&self, pages: usize, page_size: usize) -> KvShape {
        let c = &self.config;
        let format = self.options.kv_format;
        KvShape { format, pages, page_size, kv_heads: c.num_kv_heads, head_dim: c.head_dim }
    }

    /// Bytes of weights that one forward pass of a few rows reads: blocks and head.
    pub fn weight_bytes(&self) -> usize {
        let bytes = |leaf: &Packed<D>| match leaf {
            Packed::Weight(weight) => D::weight_bytes(weight),
            Packed::Tensor(_) => 0,
        };
        let blocks = self.blocks.iter().flat_map(|block| block.params.as_ref().into_leaves());
        blocks.map(bytes).sum::<usize>() + D::weight_bytes(&self.head)
    }

    pub(crate) fn rope(&self) -> Rope<'_, D> {
        Rope { cos: &self.cos, sin: &self.sin }
    }
}

/// The heads of a layer.
fn heads(config: &ModelConfig, layer: usize) -> Heads {
    let scale = 1.0 / (config.head_dim as f32).sqrt();
    Heads {
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        scale,
        window: config.window(layer),
    }
}

/// Where the numbers of leaves come from.
enum Source<'a, D: Device> {
    /// They are there, or can be gathered.
    Leaves(&'a mut dyn Leaves<D>),
    /// [`random_leaf`] with this seed.
    Random(u64),
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
