//! What the backward pass computes again instead of keeping it, and the second passes.
//!
//! The last block keeps everything in any case, in the buffers that the others share: the backward pass
//! begins with it, before anything else is written there.

use super::Tape;
use crate::compute::layer;
use crate::compute::network::{Block, Network};
use qurl_kernels::ops::MlpPass;
use qurl_kernels::{Device, Queue};
use std::fmt;
use std::str::FromStr;

/// What the backward pass computes again, in the order of how much that is. It changes no bit of log-probs
/// and gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recompute {
    /// Nothing: all that it needs is kept.
    #[default]
    None,
    /// The gate and up projections of each block, which are most of what is kept: one GEMM.
    Mlp,
    /// Each block but for its down projection: only the inputs of blocks are kept.
    Block,
}

impl Recompute {
    /// All there are, the least work first.
    pub const ALL: [Recompute; 3] = [Recompute::None, Recompute::Mlp, Recompute::Block];

    /// Its name in recipes.
    pub fn name(self) -> &'static str {
        match self {
            Recompute::None => "none",
            Recompute::Mlp => "mlp",
            Recompute::Block => "block",
        }
    }

    /// What is computed again of a block.
    pub(super) fn of_block(self, last: bool) -> Recompute {
        if last { Recompute::None } else { self }
    }

    /// Buffers for activations of blocks and for those of their MLPs.
    pub(super) fn kept(self, layers: usize) -> (usize, usize) {
        match self {
            Recompute::None => (layers, layers),
            Recompute::Mlp => (layers, 1),
            Recompute::Block => (1, 1),
        }
    }

    /// Those of a block.
    pub(super) fn places(self, index: usize) -> (usize, usize) {
        match self {
            Recompute::None => (index, index),
            Recompute::Mlp => (index, 0),
            Recompute::Block => (0, 0),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Recompute {
    type Err = String;

    fn from_str(name: &str) -> Result<Recompute, String> {
        let found = Recompute::ALL.into_iter().find(|recompute| recompute.name() == name);
        found.ok_or_else(|| format!("unknown recomputation {name}, expected none, mlp or block"))
    }
}

impl<D: Device> Tape<D> {
    /// Computes again what was not kept of a block, by the network that ran it; `x`, the gradient of the
    /// residual stream, stays as it is.
    pub(super) fn run_again(
        &mut self,
        queue: &mut D::Queue,
        net: &Network<D>,
        block: &Block<D>,
        index: usize,
    ) {
        let (rows, c) = (self.rows, net.config());
        let (at, mlp) = self.options.recompute.places(index);
        let pass = MlpPass::KeepOnly(&mut self.mlps[mlp]);
        match self.options.recompute.of_block(index + 1 == c.num_layers) {
            Recompute::None => (),
            Recompute::Mlp => {
                let Some(kept) = &mut self.acts[at].kept else { panic!("activations were not kept") };
                layer::mlp(queue, net, block, rows, &mut kept.middle, pass);
            }
            Recompute::Block => {
                // `hidden` has done its work: the block runs in it, from its input.
                queue.copy(&self.inputs[index], &mut self.hidden, rows * c.hidden_size);
                let written = self.acts[at].keep(pass);
                layer::forward(
                    queue,
                    net,
                    block,
                    (&self.batch, rows),
                    &mut self.kv,
                    &mut self.hidden,
                    written,
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_is_never_run_again_and_names_are_read_as_they_are_written() {
        for recompute in Recompute::ALL {
            assert_eq!(recompute.of_block(true), Recompute::None);
            assert_eq!(recompute.of_block(false), recompute);
            assert_eq!(recompute.name().parse(), Ok(recompute));
            // Every block has a place of its own where something of it is kept.
            let (blocks, mlps) = recompute.kept(5);
            let places = (0..5).map(|index| recompute.places(index)).collect::<Vec<_>>();
            assert_eq!(places.last(), Some(&(blocks - 1, mlps - 1)));
            assert!(recompute == Recompute::Block || (0..5).all(|index| places[index].0 == index));
        }
        assert!("true".parse::<Recompute>().is_err());
    }
}
