//! A model ready to compute: packed linear layers, norms, biases, embedding, rotary tables.
//!
//! The master weights stay with their owner (the trainer); [`Network::refresh`] packs their newest values
//! into the memory that is already there. The same type serves as the trainer's full-precision network and as
//! the engine's quantized copy: only the format differs.
//!
//! With adapters ([`Lora`](crate::lora::Lora)) the base is frozen: it is packed once, in any format, and
//! shared by all networks that are made of the same one ([`Network::sharing`]): that of the trainer, that of
//! the engine, and the base without adapters as the reference. A refresh then takes over the adapters alone.

mod block;
mod build;
mod export;
mod options;
mod refresh;

pub use block::{Block, Packed};
pub use build::random_leaf;
pub use options::NetworkOptions;

use super::adapters::Adapters;
use crate::config::ModelConfig;
use crate::params::{ParamInfo, Params, shapes};
use block::own;
use qurl_kernels::Device;
use qurl_kernels::ops::Rope;
use qurl_kernels::types::KvShape;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Networks so far.
static NETWORKS: AtomicU32 = AtomicU32::new(0);

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
    /// The same in full, where adapters are trained below a quantized head ([`Network::trained_head`]).
    head_for_gradient: Option<Arc<D::Weight>>,
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

    /// A block; a network without blocks has none.
    pub fn block(&self, index: usize) -> &Block<D> {
        &self.blocks[index]
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

    /// The head that gradients of hidden rows pass through: of a quantized one the weights as they were,
    /// straight through the rounding.
    pub(crate) fn trained_head(&self) -> &D::Weight {
        self.head_for_gradient.as_ref().unwrap_or(&self.head)
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
