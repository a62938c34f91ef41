//! A model ready to compute: packed linear layers, norms, biases, embedding, rotary tables.
//!
//! The master weights stay with their owner (the trainer); [`Network::refresh`] packs their newest values
//! into the memory that is already there. The same type serves as the trainer's full-precision network and as
//! the engine's quantized copy: only the format differs.
//!
//! With adapters ([`Lora`]) the base is frozen: it is packed once, in any format, and shared by all networks
//! that are made of the same one ([`Network::sharing`]): that of the trainer, that of the engine, and the base
//! without adapters as the reference. A refresh then takes over the adapters alone.

use super::adapters::Adapters;
use super::leaves::Leaves;
use super::rope;
use crate::config::ModelConfig;
use crate::lora::{Lora, no_adapters};
use crate::params::{LayerAdapters, LayerParams, ParamInfo, ParamKind, Params, shapes};
use crate::rng::{CounterRng, text_key};
use qurl_kernels::ops::{Pack, Rope};
use qurl_kernels::types::{Heads, KvShape, WeightShape};
use qurl_kernels::{Device, DeviceError, Format, KvFormat, Queue, Rounding, canonical};
use std::sync::Arc;
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
    /// Whether gradients will be computed: of the adapters alone where there are some.
    pub trained: bool,
    /// Longest sequence.
    pub positions: usize,
    /// Adapters beside the blocks' linear layers, which then are frozen like all else.
    pub lora: Option<Lora>,
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
            lora: None,
        }
    }

    /// The same with the output head in the format of the blocks.
    pub fn quantize_head(self) -> Self {
        NetworkOptions { head_format: self.format, ..self }
    }

    /// The format of adapters: in full beside a base in full, else bf16.
    pub fn adapter_format(&self) -> Format {
        if self.format == Format::F32 { Format::F32 } else { Format::Bf16 }
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
    /// A linear layer in the network's number format; several networks may share a frozen one.
    Weight(Arc<D::Weight>),
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
    pub(crate) adapters: LayerAdapters<D::Weight>,
}

/// What this network alone has.
///
/// # Panics
/// If networks share it: a bug, since what they share is frozen.
fn own<T>(shared: &mut Arc<T>) -> &mut T {
    Arc::get_mut(shared).unwrap_or_else(|| panic!("weights that networks share are frozen"))
}

impl<D: Device> Block<D> {
    /// Memory for the weights of a block, to be filled by [`Block::refresh`].
    pub fn empty(device: &D, config: &ModelConfig, options: &NetworkOptions) -> Result<Self, DeviceError> {
        let params = shapes(config, false).layers.swap_remove(0).try_map(&mut |info: ParamInfo| {
            Ok::<_, DeviceError>(match info.kind.is_block_linear() {
                true => Packed::Weight(Arc::new(device.weight(WeightShape {
                    n: info.rows,
                    k: info.cols,
                    format: options.format,
                    trained: options.trained,
                })?)),
                false => Packed::Tensor(device.zeros(info.len())?),
            })
        })?;
        Ok(Block { heads: heads(config, 0), params, adapters: no_adapters() })
    }

    /// Takes over the weights of a layer of its shape.
    pub fn refresh(
        &mut self,
        queue: &mut D::Queue,
        config: &ModelConfig,
        layer: usize,
        leaves: &LayerParams<D::Tensor>,
    ) -> Result<(), DeviceError> {
        self.heads = heads(config, layer);
        let to = self.params.as_mut().into_leaves();
        for (from, to) in leaves.as_ref().into_leaves().into_iter().zip(to) {
            match to {
                Packed::Tensor(to) => queue.copy(from, to, D::len(from)),
                Packed::Weight(to) => {
                    queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: own(to) })?;
                }
            }
        }
        Ok(())
    }
}

/// A model ready to compute.
pub struct Network<D: Device> {
    /// Unlike that of any other network of this process.
    id: u32,
    config: ModelConfig,
    options: NetworkOptions,
    pub(crate) embed: Arc<D::Tensor>,
    /// All of them, or none where they come one at a time.
    pub(crate) blocks: Vec<Block<D>>,
    pub(crate) final_norm: D::Tensor,
    pub(crate) head: Arc<D::Weight>,
    pub(crate) value_head: Option<D::Tensor>,
    cos: Arc<D::Tensor>,
    sin: Arc<D::Tensor>,
    /// How its adapters are packed, where it has some.
    adapters: Option<Adapters<D>>,
    /// Gains of the blocks' norms before noise came to them, where no refresh brings them back.
    clean_norms: Vec<Vec<f32>>,
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
                    format: Format| {
            // The gradient of the head's input is taken with every token, so a frozen head is packed for it.
            let trained = options.trained && (options.lora.is_none() || !info.kind.is_block_linear());
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
                    true => Packed::Weight(pack(queue, &mut source, leaf, options.format)?),
                    false => Packed::Tensor(own(queue, &mut source, leaf)?),
                })
            })?;
            blocks.push(Block { heads: heads(config, index), params, adapters: no_adapters() });
        }
        let (cos, sin) = rope::tables(&config.rope, config.head_dim, options.positions);
        let head = leaves.head.as_ref().unwrap_or(&leaves.embed);
        let mut network = Network {
            id: NETWORKS.fetch_add(1, Ordering::Relaxed),
            config: config.clone(),
            options,
            embed: Arc::new(own(queue, &mut source, &leaves.embed)?),
            blocks,
            final_norm: own(queue, &mut source, &leaves.final_norm)?,
            head: pack(queue, &mut source, head, options.head_format)?,
            value_head: leaves.value_head.as_ref().map(|leaf| own(queue, &mut source, leaf)).transpose()?,
            cos: Arc::new(queue.upload(&cos)?),
            sin: Arc::new(queue.upload(&sin)?),
            adapters: None,
            clean_norms: Vec::new(),
        };
        network.make_adapters(queue)?;
        Ok(network)
    }

    /// The packed matrices of all linear layers, blocks first, the head last, with what they are.
    pub fn matrices_mut(&mut self) -> Vec<(ParamInfo, &mut D::Weight)> {
        let shapes = shapes(&self.config, false);
        let mut matrices = Vec::new();
        for (infos, block) in shapes.layers.into_iter().zip(&mut self.blocks) {
            let leaves = infos.into_leaves().into_iter().zip(block.params.as_mut().into_leaves());
            matrices.extend(leaves.filter_map(|(info, leaf)| match leaf {
                Packed::Weight(weight) => Some((info, own(weight))),
                Packed::Tensor(_) => None,
            }));
        }
        matrices.push((shapes.head.unwrap_or(shapes.embed), own(&mut self.head)));
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
        if let Some(adapters) = &mut self.adapters {
            return self
                .blocks
                .iter_mut()
                .enumerate()
                .try_for_each(|(layer, block)| adapters.refresh(queue, leaves, layer, &mut block.adapters));
        }
        let mut matrices = 0;
        let mut next = || {
            matrices += 1;
            match rounding {
                Rounding::Nearest => rounding,
                Rounding::Stochastic { seed } => {
                    Rounding::Stochastic { seed: CounterRng::new(&[seed, matrices]).u64_at(0) }
                }
            }
        };
        let numbers = numbered(&self.config, self.value_head.is_some());
        let format = match rounding {
            Rounding::Nearest => self.options.format,
            Rounding::Stochastic { .. } => Format::F32,
        };
        for (layer, block) in numbers.layers.iter().zip(&mut self.blocks) {
            let to = layer.as_ref().into_leaves().into_iter().zip(block.params.as_mut().into_leaves());
            for ((index, info), to) in to {
                let from = leaves.leaf_for(queue, *index, format)?;
                match to {
                    Packed::Tensor(to) => queue.copy(from, to, info.len()),
                    Packed::Weight(to) => {
                        queue.pack(Pack { from, rounding: next(), copy: None, to: own(to) })?;
                    }
                }
            }
        }
        self.refresh_tables(queue, leaves, next())
    }

    /// Takes over the newest weights of a block alone.
    pub fn refresh_block(
        &mut self,
        queue: &mut D::Queue,
        index: usize,
        leaves: &LayerParams<D::Tensor>,
    ) -> Result<(), DeviceError> {
        self.blocks[index].refresh(queue, &self.config, index, leaves)
    }

    /// Takes over the newest weights of all but the blocks: norm, embedding, and the head with this rounding.
    pub fn refresh_tables(
        &mut self,
        queue: &mut D::Queue,
        leaves: &mut impl Leaves<D>,
        rounding: Rounding,
    ) -> Result<(), DeviceError> {
        let numbers = numbered(&self.config, self.value_head.is_some());
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
                queue.copy(from, own(&mut self.embed), info.len());
                (*head, None)
            }
            None => (numbers.embed.0, Some(own(&mut self.embed))),
        };
        let from = leaves.leaf(queue, head)?;
        queue.pack(Pack { from, rounding, copy, to: own(&mut self.head) })
    }

    /// Sets the gains of the norms before attention and MLP to those of the model plus normal noise of this
    /// deviation: gains that were noisy before are not again. The noise follows from seed and layer alone.
    pub fn add_norm_noise(&mut self, queue: &mut D::Queue, sigma: f32, seed: u64) -> Result<(), DeviceError> {
        let frozen = self.adapters.is_some();
        for (layer, block) in self.blocks.iter_mut().enumerate() {
            let norms = [&mut block.params.attn_norm, &mut block.params.mlp_norm];
            for (nth, norm) in norms.into_iter().enumerate() {
                let Packed::Tensor(gain) = norm else { continue };
                let clean = match self.clean_norms.get(2 * layer + nth) {
                    Some(clean) if frozen => clean.clone(),
                    _ => {
                        let clean = queue.read(gain, D::len(gain))?;
                        if frozen {
                            self.clean_norms.push(clean.clone());
                        }
                        clean
                    }
                };
                let random = CounterRng::new(&[seed, layer as u64, nth as u64]);
                let noisy = |(i, &x): (usize, &f32)| x + sigma * random.normal_at(i as u64) as f32;
                let noisy: Vec<f32> = clean.iter().enumerate().map(noisy).collect();
                queue.write(gain, &noisy);
            }
        }
        Ok(())
    }

    /// A block; a network without blocks has none.
    pub fn block(&self, index: usize) -> &Block<D> {
        &self.blocks[index]
    }

    /// The weights as bytes that are the same on every device ([`qurl_kernels::canonical`]): vectors and the
    /// embedding in f32, matrices as they are packed, leaf by leaf in the order of [`Params`]. A tied head in
    /// full is left out: it is packed from the embedding. Adapters come last.
    pub fn export(&self, queue: &mut D::Queue) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = Vec::with_capacity(self.exported_bytes());
        let vector = |queue: &mut D::Queue, from: &D::Tensor, bytes: &mut Vec<u8>| {
            let values = queue.read(from, D::len(from))?;
            bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
            Ok::<_, DeviceError>(())
        };
        vector(queue, &self.embed, &mut bytes)?;
        for leaf in self.blocks.iter().flat_map(|block| block.params.as_ref().into_leaves()) {
            match leaf {
                Packed::Tensor(from) => vector(queue, from, &mut bytes)?,
                Packed::Weight(from) => queue.export(from, &mut bytes)?,
            }
        }
        vector(queue, &self.final_norm, &mut bytes)?;
        if !self.head_is_embedding() {
            queue.export(&self.head, &mut bytes)?;
        }
        if let Some(from) = &self.value_head {
            vector(queue, from, &mut bytes)?;
        }
        for block in &self.blocks {
            block.adapters.as_ref().try_map(&mut |from: &D::Weight| queue.export(from, &mut bytes))?;
        }
        Ok(bytes)
    }

    /// Takes over the weights of a network of the same model and options; an error where the bytes are not
    /// such weights, after which they are of no use.
    pub fn import(&mut self, queue: &mut D::Queue, bytes: &[u8]) -> Result<(), DeviceError> {
        let (format, expected) = (self.options.format, self.exported_bytes());
        if bytes.len() != expected {
            let reason = format!("{} bytes of a model; expected {expected}", bytes.len());
            return Err(DeviceError::Pack { format, reason });
        }
        let mut rest = bytes;
        let mut next = |len: usize| {
            let (part, after) = rest.split_at(len);
            rest = after;
            part
        };
        let vector = |queue: &mut D::Queue, bytes: &[u8], to: &mut D::Tensor| {
            let (values, _) = bytes.as_chunks::<4>();
            let values: Vec<f32> = values.iter().map(|x| f32::from_le_bytes(*x)).collect();
            queue.write(to, &values);
        };
        vector(queue, next(4 * D::len(&self.embed)), own(&mut self.embed));
        for leaf in self.blocks.iter_mut().flat_map(|block| block.params.as_mut().into_leaves()) {
            match leaf {
                Packed::Tensor(to) => vector(queue, next(4 * D::len(to)), to),
                Packed::Weight(to) => queue.import(next(canonical::bytes(D::weight_shape(to))), own(to))?,
            }
        }
        vector(queue, next(4 * D::len(&self.final_norm)), &mut self.final_norm);
        match self.head_is_embedding() {
            true => {
                let (from, to) = (&*self.embed, own(&mut self.head));
                queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to })?;
            }
            false => {
                queue.import(next(canonical::bytes(D::weight_shape(&self.head))), own(&mut self.head))?
            }
        }
        if let Some(to) = &mut self.value_head {
            vector(queue, next(4 * D::len(to)), to);
        }
        for block in &mut self.blocks {
            block.adapters.as_mut().try_map(&mut |to: &mut D::Weight| {
                queue.import(next(canonical::bytes(D::weight_shape(to))), to)
            })?;
        }
        Ok(())
    }

    /// Bytes of [`Network::export`].
    pub fn exported_bytes(&self) -> usize {
        let leaf = |leaf: &Packed<D>| match leaf {
            Packed::Tensor(tensor) => 4 * D::len(tensor),
            Packed::Weight(weight) => canonical::bytes(D::weight_shape(weight)),
        };
        let blocks = self.blocks.iter().flat_map(|block| block.params.as_ref().into_leaves()).map(leaf);
        let vectors = [Some(&*self.embed), Some(&self.final_norm), self.value_head.as_ref()];
        let vectors = vectors.into_iter().flatten().map(|tensor| 4 * D::len(tensor));
        let head = if self.head_is_embedding() { 0 } else { canonical::bytes(D::weight_shape(&self.head)) };
        let mut adapters = 0;
        for block in &self.blocks {
            let Ok(_) = block.adapters.as_ref().try_map(&mut |weight: &D::Weight| {
                adapters += canonical::bytes(D::weight_shape(weight));
                Ok::<_, std::convert::Infallible>(())
            });
        }
        blocks.chain(vectors).sum::<usize>() + head + adapters
    }

    /// Whether the head is packed from the embedding without a scale or a random number.
    fn head_is_embedding(&self) -> bool {
        self.config.tie_word_embeddings && !self.options.head_format.is_quantized()
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

    /// How the gradients of its adapters are laid out, where it has some.
    pub(crate) fn adapters(&self) -> Option<&Adapters<D>> {
        self.adapters.as_ref()
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
