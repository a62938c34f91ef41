//! Fresh weights for training from nothing.
//!
//! Normal with the configured standard deviation, norms at one, biases at zero. The two projections that
//! write into the residual stream are smaller by sqrt(2 L), so that the stream's variance does not grow
//! with depth. Every leaf has its own random stream named after it: the weights of one leaf do not
//! depend on which others exist.

use super::{ParamKind, Params, shapes};
use crate::config::ModelConfig;
use crate::rng::{CounterRng, text_key};

/// Random weights of a model, the same on every run with the same seed.
pub fn init(config: &ModelConfig, seed: u64, value_head: bool) -> Params<Vec<f32>> {
    let residual = config.initializer_range / (2.0 * config.num_layers as f32).sqrt();
    shapes(config, value_head).map(|info| {
        if info.kind.is_norm() {
            return vec![1.0; info.len()];
        }
        let mut values = vec![0.0; info.len()];
        let std = match info.kind {
            ParamKind::QkvBias => return values,
            ParamKind::AttnOut | ParamKind::Down => residual,
            _ => config.initializer_range,
        };
        CounterRng::new(&[seed, text_key("init"), text_key(&info.name)]).fill_normal(&mut values, std);
        values
    })
}
