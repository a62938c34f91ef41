//! One transformer block ready to compute, and its leaves.

use super::NetworkOptions;
use crate::config::ModelConfig;
use crate::lora::no_adapters;
use crate::params::{LayerAdapters, LayerParams, ParamInfo, shapes};
use qurl_kernels::ops::Pack;
use qurl_kernels::types::{Heads, WeightShape};
use qurl_kernels::{Device, DeviceError, Queue, Rounding};
use std::sync::Arc;

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
pub(super) fn own<T>(shared: &mut Arc<T>) -> &mut T {
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
                    trained: options.packs_twice(),
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

/// The heads of a layer.
pub(super) fn heads(config: &ModelConfig, layer: usize) -> Heads {
    let scale = 1.0 / (config.head_dim as f32).sqrt();
    Heads {
        heads: config.num_heads,
        kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        scale,
        window: config.window(layer),
    }
}
