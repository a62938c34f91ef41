//! A model ready to compute: packed linear layers, norms, biases, embedding, rotary tables.
//!
//! The master weights stay with their owner (the trainer); [`Network::refresh`] packs their newest values into the
//! memory that is already there. The same type serves as the trainer's full-precision network and as the engine's
//! quantized copy: only the format differs.

use super::rope;
use crate::config::ModelConfig;
use crate::params::{LayerParams, ParamInfo, ParamKind, Params, shapes};
use crate::rng::{CounterRng, text_key};
use qurl_kernels::backend::{Heads, KvFormat, Rope};
use qurl_kernels::{Backend, BackendError, Format, Rounding};
use std::time::Instant;

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
        NetworkOptions { format, head_format, kv_format, trained: false, positions: config.max_position_embeddings }
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

/// One transformer block ready to compute.
pub struct Block<B: Backend> {
    pub(crate) attn_norm: B::Tensor,
    pub(crate) qkv: B::Weight,
    pub(crate) qkv_bias: Option<B::Tensor>,
    pub(crate) q_norm: Option<B::Tensor>,
    pub(crate) k_norm: Option<B::Tensor>,
    pub(crate) o: B::Weight,
    pub(crate) mlp_norm: B::Tensor,
    pub(crate) gate_up: B::Weight,
    pub(crate) down: B::Weight,
}

/// A model ready to compute.
pub struct Network<B: Backend> {
    pub(crate) config: ModelConfig,
    pub(crate) options: NetworkOptions,
    pub(crate) embed: B::Tensor,
    pub(crate) blocks: Vec<Block<B>>,
    pub(crate) final_norm: B::Tensor,
    pub(crate) head: B::Weight,
    pub(crate) value_head: Option<B::Tensor>,
    cos: B::Tensor,
    sin: B::Tensor,
}

/// Weights that [`Network::randomize`] makes before it packs them.
const GROUP_BYTES: usize = 512 << 20;

impl<B: Backend> Network<B> {
    /// Packs the weights.
    pub fn new(
        backend: &B,
        config: &ModelConfig,
        params: &Params<B::Tensor>,
        options: NetworkOptions,
    ) -> Result<Self, BackendError> {
        Self::build(backend, config, options, params, |leaf| Ok(Leaf::Given(leaf)))
    }

    /// Random weights, made leaf by leaf where they are packed: never is more than one leaf there in full.
    pub fn random(backend: &B, config: &ModelConfig, options: NetworkOptions, seed: u64) -> Result<Self, BackendError> {
        let shapes = shapes(config, false);
        Self::build(backend, config, options, &shapes, |info| random_leaf(backend, config, info, seed).map(Leaf::Made))
    }

    fn build<S>(
        backend: &B,
        config: &ModelConfig,
        options: NetworkOptions,
        source: &Params<S>,
        leaf: impl for<'s> Fn(&'s S) -> Result<Leaf<'s, B>, BackendError>,
    ) -> Result<Self, BackendError> {
        let c = config;
        let (d, f) = (c.hidden_size, c.intermediate_size);
        let pack = |w: &S, n, k, format| backend.pack(leaf(w)?.tensor(), n, k, format, options.trained);
        let own = |x: &S| leaf(x)?.into_own(backend);
        let own_option = |x: &Option<S>| x.as_ref().map(own).transpose();
        let blocks = source.layers.iter().map(|p| {
            Ok(Block {
                attn_norm: own(&p.attn_norm)?,
                qkv: pack(&p.qkv, c.qkv_dim(), d, options.format)?,
                qkv_bias: own_option(&p.qkv_bias)?,
                q_norm: own_option(&p.q_norm)?,
                k_norm: own_option(&p.k_norm)?,
                o: pack(&p.o, d, c.q_dim(), options.format)?,
                mlp_norm: own(&p.mlp_norm)?,
                gate_up: pack(&p.gate_up, 2 * f, d, options.format)?,
                down: pack(&p.down, d, f, options.format)?,
            })
        });
        let (cos, sin) = rope::tables(&c.rope, c.head_dim, options.positions);
        let head = source.head.as_ref().unwrap_or(&source.embed);
        Ok(Network {
            config: config.clone(),
            options,
            embed: own(&source.embed)?,
            blocks: blocks.collect::<Result<_, BackendError>>()?,
            final_norm: own(&source.final_norm)?,
            head: pack(head, c.vocab_size, d, options.head_format)?,
            value_head: own_option(&source.value_head)?,
            cos: backend.upload(&cos)?,
            sin: backend.upload(&sin)?,
        })
    }

    /// Packs other random weights and tells how long that took, [`GROUP_BYTES`] of them at a time: more than the caches hold, as a
    /// trainer's are, and less than all of a large model. `made` is called with each group before it is packed. A group is packed three
    /// times, and the median counts: touching memory for the first time in a while may cost more than packing it.
    pub fn randomize(
        &mut self,
        backend: &B,
        seed: u64,
        mut made: impl FnMut(&[&B::Tensor]),
        mut packed: impl FnMut(f64),
    ) -> Result<(), BackendError> {
        let shapes = shapes(&self.config, false);
        let mut weights: Vec<(&ParamInfo, &mut B::Weight)> = Vec::new();
        for (p, block) in shapes.layers.iter().zip(&mut self.blocks) {
            weights.push((&p.qkv, &mut block.qkv));
            weights.push((&p.o, &mut block.o));
            weights.push((&p.gate_up, &mut block.gate_up));
            weights.push((&p.down, &mut block.down));
        }
        weights.push((shapes.head.as_ref().unwrap_or(&shapes.embed), &mut self.head));
        let mut weights = weights.into_iter().peekable();
        while weights.peek().is_some() {
            let (mut group, mut bytes) = (Vec::new(), 0);
            while bytes < GROUP_BYTES
                && let Some((info, weight)) = weights.next()
            {
                let leaf = random_leaf(backend, &self.config, info, seed)?;
                bytes += 4 * backend.len(&leaf);
                group.push((leaf, weight));
            }
            backend.synchronize()?;
            made(&group.iter().map(|(leaf, _)| leaf).collect::<Vec<_>>());
            let mut seconds = [0.0; 3];
            for seconds in &mut seconds {
                let start = Instant::now();
                for (leaf, weight) in &mut group {
                    backend.repack(leaf, weight)?;
                }
                backend.synchronize()?;
                *seconds = start.elapsed().as_secs_f64();
            }
            seconds.sort_by(f64::total_cmp);
            packed(seconds[1]);
        }
        Ok(())
    }

    /// Takes over changed weights of the same model, without new memory.
    pub fn refresh(&mut self, backend: &B, params: &Params<B::Tensor>) -> Result<(), BackendError> {
        self.refresh_rounded(backend, params, Rounding::Nearest)
    }

    /// [`Network::refresh`] with a choice of rounding; stochastic rounding draws every matrix with a seed of its own.
    pub fn refresh_rounded(
        &mut self,
        backend: &B,
        params: &Params<B::Tensor>,
        rounding: Rounding,
    ) -> Result<(), BackendError> {
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
        let copy = |from: &B::Tensor, to: &mut B::Tensor| backend.copy(from, to, backend.len(from));
        let copy_option = |from: &Option<B::Tensor>, to: &mut Option<B::Tensor>| {
            if let (Some(from), Some(to)) = (from, to) {
                copy(from, to);
            }
        };
        for (p, block) in params.layers.iter().zip(&mut self.blocks) {
            let LayerParams { attn_norm, qkv, qkv_bias, q_norm, k_norm, o, mlp_norm, gate_up, down } = p;
            copy(attn_norm, &mut block.attn_norm);
            copy(mlp_norm, &mut block.mlp_norm);
            copy_option(qkv_bias, &mut block.qkv_bias);
            copy_option(q_norm, &mut block.q_norm);
            copy_option(k_norm, &mut block.k_norm);
            backend.repack_rounded(qkv, &mut block.qkv, rounding())?;
            backend.repack_rounded(o, &mut block.o, rounding())?;
            backend.repack_rounded(gate_up, &mut block.gate_up, rounding())?;
            backend.repack_rounded(down, &mut block.down, rounding())?;
        }
        copy(&params.final_norm, &mut self.final_norm);
        copy_option(&params.value_head, &mut self.value_head);
        match &params.head {
            Some(head) => {
                copy(&params.embed, &mut self.embed);
                backend.repack_rounded(head, &mut self.head, rounding())
            }
            None => backend.repack_and_copy(&params.embed, &mut self.head, rounding(), &mut self.embed),
        }
    }

    /// The model's sizes.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// How the network is packed.
    pub fn options(&self) -> &NetworkOptions {
        &self.options
    }

    /// The heads of its attention layers.
    pub fn heads(&self) -> Heads {
        let c = &self.config;
        let scale = 1.0 / (c.head_dim as f32).sqrt();
        Heads { heads: c.num_heads, kv_heads: c.num_kv_heads, head_dim: c.head_dim, scale }
    }

    /// Bytes of weights that one forward pass of a few rows reads: blocks and head.
    pub fn weight_bytes(&self, backend: &B) -> usize {
        let blocks = self.blocks.iter().flat_map(|b| [&b.qkv, &b.o, &b.gate_up, &b.down]);
        blocks.chain([&self.head]).map(|w| backend.weight_bytes(w)).sum()
    }

    pub(crate) fn rope(&self) -> Rope<'_, B::Tensor> {
        Rope { cos: &self.cos, sin: &self.sin }
    }
}

/// A leaf that is somebody's or made for the purpose.
enum Leaf<'a, B: Backend> {
    Given(&'a B::Tensor),
    Made(B::Tensor),
}

impl<B: Backend> Leaf<'_, B> {
    fn tensor(&self) -> &B::Tensor {
        match self {
            Leaf::Given(tensor) => tensor,
            Leaf::Made(tensor) => tensor,
        }
    }

    fn into_own(self, backend: &B) -> Result<B::Tensor, BackendError> {
        match self {
            Leaf::Given(tensor) => duplicate(backend, tensor),
            Leaf::Made(tensor) => Ok(tensor),
        }
    }
}

/// Gains of one, biases of zero, the rest with the spread of fresh weights.
fn random_leaf<B: Backend>(
    backend: &B,
    config: &ModelConfig,
    info: &ParamInfo,
    seed: u64,
) -> Result<B::Tensor, BackendError> {
    match info.kind {
        kind if kind.is_norm() => backend.upload(&vec![1.0; info.len()]),
        ParamKind::QkvBias => backend.zeros(info.len()),
        _ => {
            let mut leaf = backend.zeros(info.len())?;
            let key = CounterRng::new(&[seed, text_key(&info.name)]).below_at(0, u64::MAX);
            backend.fill_random(&mut leaf, key, config.initializer_range);
            Ok(leaf)
        }
    }
}

fn duplicate<B: Backend>(backend: &B, x: &B::Tensor) -> Result<B::Tensor, BackendError> {
    let len = backend.len(x);
    let mut copy = backend.zeros(len)?;
    backend.copy(x, &mut copy, len);
    Ok(copy)
}
