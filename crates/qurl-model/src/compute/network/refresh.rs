//! How a network takes over changed weights, without new memory: all of them, a block, all but the blocks, or
//! the adapters alone; and noise on its norms.

use super::block::{Packed, own};
use super::{Network, numbered};
use crate::compute::leaves::Leaves;
use crate::params::{LayerParams, Params};
use crate::rng::CounterRng;
use qurl_kernels::ops::Pack;
use qurl_kernels::{Device, DeviceError, Format, Queue, Rounding};

impl<D: Device> Network<D> {
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
}
