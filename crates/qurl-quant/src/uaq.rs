//! Update-aware quantization (Eq. 11, 12): once before RL, the matrices after a norm are divided by `s` and
//! the norm's gain is multiplied by it.
//!
//! `W x = (W / s)(s x)`: the model computes the same. What changes is training: an optimizer whose steps do
//! not depend on the size of the weights (Adam) now moves `W / s` by `s` times more relative to its
//! quantization step. Scaled are the query, key and value projections after the input norm and the gate and
//! up projections after the post-attention norm. Biases are added after the GEMM and are not scaled.
//!
//! With a power of two nothing is rounded (short of underflow), so [`undo`] restores every bit.
//!
//! Weights do not show that they were scaled, and scaling them twice is another scale. So configurations
//! carry it as a mark ([`ModelConfig::uaq`]) wherever weights are stored, and [`rescale`] is the way to
//! change both.

use qurl_model::config::UAQ_SCALES;
use qurl_model::{MlpParams, ModelConfig, Params, params};

use crate::error::QuantError;

/// Brings weights to the scale `s`, and their mark with them: 1 takes the scaling off. From one scale to
/// another is a second scaling and refused.
pub fn rescale(weights: &mut Params<Vec<f32>>, config: &mut ModelConfig, s: f32) -> Result<(), QuantError> {
    match config.uaq {
        found if found == s => return Ok(()),
        1.0 => apply(weights, config, s)?,
        found if s == 1.0 => undo(weights, config, found)?,
        found => return Err(QuantError::Scaled { found, asked: s }),
    }
    config.uaq = s;
    Ok(())
}

/// Divides the matrices after norms by `s` and multiplies the norms' gains by it.
pub fn apply(weights: &mut Params<Vec<f32>>, config: &ModelConfig, s: f32) -> Result<(), QuantError> {
    scale(weights, config, s, |w| w / s, |gain| gain * s)
}

/// Takes [`apply`] with the same `s` back.
pub fn undo(weights: &mut Params<Vec<f32>>, config: &ModelConfig, s: f32) -> Result<(), QuantError> {
    scale(weights, config, s, |w| w * s, |gain| gain / s)
}

fn scale(
    weights: &mut Params<Vec<f32>>,
    config: &ModelConfig,
    s: f32,
    matrix: impl Fn(f32) -> f32,
    gain: impl Fn(f32) -> f32,
) -> Result<(), QuantError> {
    if !UAQ_SCALES.contains(&s) {
        return Err(QuantError::UaqScale { found: s });
    }
    check_layout(weights, config)?;
    for layer in &mut weights.layers {
        let MlpParams::Dense(mlp) = &mut layer.mlp;
        for values in [&mut layer.qkv, &mut mlp.gate_up] {
            values.iter_mut().for_each(|w| *w = matrix(*w));
        }
        for values in [&mut layer.attn_norm, &mut layer.mlp_norm] {
            values.iter_mut().for_each(|g| *g = gain(*g));
        }
    }
    Ok(())
}

/// Every leaf that the configuration asks for is there and has its size.
pub(crate) fn check_layout(weights: &Params<Vec<f32>>, config: &ModelConfig) -> Result<(), QuantError> {
    let shapes = params::shapes(config, weights.value_head.is_some());
    let pairs = weights
        .as_ref()
        .zip(shapes)
        .map_err(|difference| QuantError::Layout { what: difference.to_string() })?;
    for (values, info) in pairs {
        if values.len() != info.len() {
            let (rows, cols) = (info.rows, info.cols);
            return Err(QuantError::Shape { name: info.name, found: values.len(), rows, cols });
        }
    }
    Ok(())
}
