//! Fresh weights for training from nothing.
//!
//! Normal with the configured standard deviation, norms at one, biases at zero. The two projections that
//! write into the residual stream are smaller by sqrt(2 L), so that the stream's variance does not grow
//! with depth. Every leaf has its own random stream named after it: the weights of one leaf do not
//! depend on which others exist.

use super::{ParamInfo, ParamKind, Params, shapes};
use crate::config::ModelConfig;
use crate::rng::{CounterRng, text_key};

/// Random weights of a model, the same on every run with the same seed.
pub fn init(config: &ModelConfig, seed: u64, value_head: bool) -> Params<Vec<f32>> {
    shapes(config, value_head).map(|info| init_leaf(config, &info, seed))
}

/// Random weights of one leaf, those that it has in [`init`].
pub fn init_leaf(config: &ModelConfig, info: &ParamInfo, seed: u64) -> Vec<f32> {
    if info.kind.is_norm() {
        return vec![1.0; info.len()];
    }
    let mut values = vec![0.0; info.len()];
    let std = match info.kind {
        ParamKind::QkvBias => return values,
        ParamKind::AttnOut | ParamKind::Down => {
            config.initializer_range / (2.0 * config.num_layers as f32).sqrt()
        }
        _ => config.initializer_range,
    };
    CounterRng::new(&[seed, text_key("init"), text_key(&info.name)]).fill_normal(&mut values, std);
    values
}
