//! The mathematics of RL on token slices: no model, no device, no files.
//!
//! Everything here is a pure function of numbers that belong to tokens. The loss leaves this crate as one
//! number per token, `dL/dlogp`, and the model's log-prob head turns it into gradients; that is the whole
//! contract between the two, so every variant of every objective can be read, tested and compared here.
//!
//! # Where to start
//!
//! - [`Objective`] is the loss a recipe names; [`Objective::evaluate`] gives loss, `dL/dlogp` and facts. Its
//!   parts are [`objective::surrogate`] (clipping) and [`objective::correction`] (weights of ρ).
//! - [`Estimator`] makes advantages of rewards, within groups or with a critic ([`advantage`], [`value`]).
//! - [`Aggregation`] says what a token of a mini-batch weighs; [`kl`], [`entropy`] and [`overlong`] are what
//!   may be added to a loss or a reward.
//! - [`Mismatch`] measures how far rollout and trainer are apart.
//!
//! Two responses of one token each, the first good and the second bad, sampled by a policy (`behav`) that is
//! a little off; the first has already moved far enough, so it does not push any more:
//! ```
//! use qurl_rl::{Aggregation, Objective, Tokens};
//!
//! let (mask, seq) = ([true, true], [0, 1]);
//! let weight = Aggregation::default().weights_of(&mask, &seq)?;
//! let tokens = Tokens {
//!     theta: &[-0.5, -2.0],
//!     prox: &[-1.0, -2.0],
//!     behav: &[-1.0, -2.1],
//!     adv: &[1.0, -1.0],
//!     mask: &mask,
//!     seq: &seq,
//! };
//! let outcome = Objective::default().evaluate(&tokens, &weight)?;
//! assert_eq!(outcome.dlogp[0], 0.0); // clipped: e^0.5 is above 1.2
//! assert!(outcome.dlogp[1] > 0.5); // half the batch, weighted by rho = e^0.1
//! assert_eq!(outcome.facts.clip_fraction(), 0.5);
//! # Ok::<(), qurl_rl::RlError>(())
//! ```
//!
//! # Conventions
//!
//! The same in every module:
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
#![forbid(unsafe_code)]

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
pub use mismatch::{Mismatch, full_vocabulary_kl, full_vocabulary_kls};
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
