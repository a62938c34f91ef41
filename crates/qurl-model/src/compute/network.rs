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
    pub fn random(
        backend: &B,
        config: &ModelConfig,
        options: NetworkOptions,
        seed: u64,
    ) -> Result<Self, BackendError> {
        let shapes = shapes(config, false);
        Self::build(backend, config, options, &shapes, |info| {
            random_leaf(backend, config, info, seed).map(Leaf::Made)
        })
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

    /// The packed matrices of all linear layers, blocks first, the head last, with what they are.
    pub fn matrices_mut(&mut self) -> Vec<(ParamInfo, &mut B::Weight)> {
        let shapes = shapes(&self.config, false);
        let mut matrices = Vec::with_capacity(4 * self.blocks.len() + 1);
        for (p, block) in shapes.layers.into_iter().zip(&mut self.blocks) {
            matrices.push((p.qkv, &mut block.qkv));
            matrices.push((p.o, &mut block.o));
            matrices.push((p.gate_up, &mut block.gate_up));
            matrices.push((p.down, &mut block.down));
        }
        matrices.push((shapes.head.unwrap_or(shapes.embed), &mut self.head));
        matrices
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
pub fn random_leaf<B: Backend>(
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
