//! The mathematics of RL on token slices: no model, no device, no files.
//!
//! Everything here is a pure function of numbers that belong to tokens. The loss leaves this crate as one
//! number per token, `dL/dlogp`, and the model's log-prob head turns it into gradients; that is the whole
//! contract between the two, so every variant of every objective can be read, tested and compared here.
//!
//! Conventions, the same in every module:
//! * **Layout**: tokens are flat slices. `seq[t]` is the sequence of token `t` (dense indices from 0),
//!   `mask[t]` says whether the token counts; the tokens of a sequence stand in order of time but need not be
//!   contiguous. What a masked token carries is never read.
//! * **Precision**: inputs are `f32` (what a model produces) or `f64` (what a JSON line holds); everything is
//!   computed in `f64`, every sum runs in token order, and results are `f64`. The same input gives the same
//!   bits.
//! * **Finite in, finite out**: log-ratios are limited to ±[`LOG_RATIO_LIMIT`] before they are exponentiated,
//!   and a limited ratio has no derivative, as a clamp has in any automatic differentiation.
//! * **Names** of settings are the ones users of other RL libraries know: `clip_ratio_low`, `loss_agg_mode`,
//!   `kl_loss_type`, `norm_adv_by_std_in_grpo`, ...
//!
//! Three policies appear: `behav` sampled the tokens (the quantized old actor), `prox` is the full-precision
//! old actor, `theta` is the actor being updated. `docs/math.md` maps the equations of the paper to
//! functions.

pub mod advantage;
pub mod aggregate;
pub mod entropy;
pub mod error;
pub mod kl;
pub mod kl_control;
pub mod mismatch;
pub mod objective;
pub mod overlong;
pub mod stats;
pub mod value;

pub use advantage::Estimator;
pub use aggregate::{Aggregation, Denominator, LossAggMode};
pub use error::RlError;
pub use kl::KlEstimator;
pub use kl_control::{KlCoefficient, KlControl};
pub use mismatch::{Mismatch, full_vocabulary_kl};
pub use objective::{Correction, Facts, Objective, Outcome, Tokens};
pub use overlong::OverlongBuffer;

/// Log-ratios are limited to plus or minus this before `exp`: e^20 is about 5e8, far beyond any healthy
/// ratio.
pub const LOG_RATIO_LIMIT: f64 = 20.0;

/// `exp` of a log-ratio limited to ±[`LOG_RATIO_LIMIT`].
pub fn ratio(log_ratio: f64) -> f64 {
    log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
}

/// Whether a log-ratio is inside ±[`LOG_RATIO_LIMIT`], where [`ratio`] has its derivative.
pub fn inside_limit(log_ratio: f64) -> bool {
    log_ratio.abs() <= LOG_RATIO_LIMIT
}

/// Results in the precision of the model: advantages for storage, `dlogp` for the backward pass.
pub fn to_f32(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&v| v as f32).collect()
}
