//! The adapters of a network: packed from the leaves that are trained, and how their gradients lie.

use super::leaves::Leaves;
use super::network::NetworkOptions;
use crate::config::ModelConfig;
use crate::lora::{Lora, Module};
use crate::params::{Adapter, LayerAdapters, ParamKind, shapes};
use qurl_kernels::ops::{self, AdapterBackward, Pack, Spread};
use qurl_kernels::types::{AdapterBlocks, WeightShape};
use qurl_kernels::{Device, DeviceError, Queue, Rounding};

/// The adapter of a fused linear layer `[n, k]`.
pub(crate) struct Slot {
    n: usize,
    k: usize,
    blocks: AdapterBlocks,
}

impl Slot {
    fn of(config: &ModelConfig, lora: &Lora, leaf: ParamKind) -> Option<Slot> {
        let (modules, k) = Module::of_leaf(config, leaf);
        let n = modules.iter().map(|(_, outputs)| outputs).sum();
        lora.blocks(config, leaf).map(|blocks| Slot { n, k, blocks })
    }

    fn zeros<D: Device>(
        &self,
        queue: &mut D::Queue,
        options: &NetworkOptions,
    ) -> Result<Adapter<D::Weight>, DeviceError> {
        let (format, trained) = (options.adapter_format(), options.trained);
        let mut zeros = |n: usize, k: usize| {
            let device = queue.device().clone();
            let mut to = device.weight(WeightShape { n, k, format, trained })?;
            let from = &device.zeros(n * k)?;
            queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: &mut to })?;
            Ok::<_, DeviceError>(to)
        };
        let width = self.blocks.width;
        Ok(Adapter { a: zeros(width, self.k)?, b: zeros(self.n, width)? })
    }
}

/// The adapters of a block, of which all blocks have the same.
pub(crate) struct Slots {
    pub qkv: Option<Slot>,
    pub o: Option<Slot>,
    pub gate_up: Option<Slot>,
    pub down: Option<Slot>,
}

/// How a network's adapters are packed.
pub(crate) struct Adapters<D: Device> {
    slots: Slots,
    /// Leaves of the base: in the order of all leaves they come before the adapters.
    base: usize,
    /// A block-diagonal matrix on its way into the packed one.
    spread: D::Tensor,
}

impl<D: Device> Adapters<D> {
    pub(super) fn new(queue: &mut D::Queue, config: &ModelConfig, lora: Lora) -> Result<Self, DeviceError> {
        let slot = |leaf| Slot::of(config, &lora, leaf);
        let slots = Slots {
            qkv: slot(ParamKind::Qkv),
            o: slot(ParamKind::AttnOut),
            gate_up: slot(ParamKind::GateUp),
            down: slot(ParamKind::Down),
        };
        let all = [&slots.qkv, &slots.o, &slots.gate_up, &slots.down];
        let largest = all.into_iter().flatten().map(|slot| slot.n * slot.blocks.width).max().unwrap_or(0);
        let spread = queue.device().zeros(largest)?;
        Ok(Adapters { slots, base: shapes(config, false).iter().len(), spread })
    }

    /// Adapters of a block that change nothing.
    pub(super) fn zeros(
        &self,
        queue: &mut D::Queue,
        options: &NetworkOptions,
    ) -> Result<LayerAdapters<D::Weight>, DeviceError> {
        let mut zeros =
            |slot: &Option<Slot>| slot.as_ref().map(|slot| slot.zeros::<D>(queue, options)).transpose();
        let Slots { qkv, o, gate_up, down } = &self.slots;
        Ok(LayerAdapters { qkv: zeros(qkv)?, o: zeros(o)?, gate_up: zeros(gate_up)?, down: zeros(down)? })
    }

    /// Takes over the newest adapters of a block.
    pub(super) fn refresh(
        &mut self,
        queue: &mut D::Queue,
        leaves: &mut impl Leaves<D>,
        layer: usize,
        to: &mut LayerAdapters<D::Weight>,
    ) -> Result<(), DeviceError> {
        let Adapters { slots, base, spread } = self;
        let slots = [&slots.qkv, &slots.o, &slots.gate_up, &slots.down];
        let to = [&mut to.qkv, &mut to.o, &mut to.gate_up, &mut to.down];
        let mut leaf = *base + layer * 2 * slots.into_iter().flatten().count();
        for (slot, to) in slots.into_iter().zip(to) {
            let Some((Slot { n, blocks, .. }, Adapter { a, b })) = slot.as_ref().zip(to.as_mut()) else {
                continue;
            };
            let from = leaves.leaf(queue, leaf)?;
            queue.pack(Pack { from, rounding: Rounding::Nearest, copy: None, to: a })?;
            let from = leaves.leaf(queue, leaf + 1)?;
            queue.spread(Spread { from, blocks, n: *n, to: spread });
            queue.pack(Pack { from: spread, rounding: Rounding::Nearest, copy: None, to: b })?;
            leaf += 2;
        }
        Ok(())
    }

    pub(crate) fn slots(&self) -> &Slots {
        &self.slots
    }
}

/// An adapter for the forward pass.
pub(super) fn beside<D: Device>(adapter: &Option<Adapter<D::Weight>>) -> Option<ops::Adapter<'_, D>> {
    adapter.as_ref().map(|Adapter { a, b }| ops::Adapter { a, b })
}

/// An adapter for the backward pass.
pub(super) fn gradient<'a, D: Device>(
    adapter: &'a Option<Adapter<D::Weight>>,
    slot: Option<&'a Slot>,
    to: Option<Adapter<&'a mut D::Tensor>>,
) -> Option<AdapterBackward<'a, D>> {
    let (Adapter { a, b }, blocks, Adapter { a: da, b: db }) = (adapter.as_ref()?, &slot?.blocks, to?);
    Some(AdapterBackward { a, b, blocks, da, db })
}
