//! Objectives: what a batch of sampled tokens says the policy should change.
//!
//! All of them are one per-token function with different parameters. Six things vary:
//! 1. the **ratio** that is clipped: π_θ/π_prox, π_θ/π_behav, or the geometric mean of a whole sequence;
//! 2. the **bounds** of the clip, which ACR widens for tokens whose behaviour probability was truncated;
//! 3. the **surrogate**: PPO's pessimistic minimum, CISPO's weighted log-likelihood, or the ratio itself,
//!    for DPPO of tokens near the policy that sampled them;
//! 4. the **dual clip**, an optional cap for bad tokens that became much likelier;
//! 5. the **correction** for having sampled from `behav`, a constant weight on the clipped result;
//! 6. the **selection** of tokens by where θ is now: those that are dropped stay in the denominator.
//!
//! [`Objective`] (in [`recipe`]) is what a user names; it is resolved into these six parameters, and
//! [`Objective::evaluate`] returns the loss, its derivative by the log-prob of every token, and the facts
//! worth logging.

pub mod correction;
pub mod facts;
pub mod recipe;
mod selection;
pub mod settings;
pub mod surrogate;

pub use correction::Correction;
pub use facts::Facts;
pub use recipe::{Clip, Objective};

use crate::error::{RlError, same_length};
use crate::{LossAggMode, ratio};
use surrogate::{Bounds, Surrogate, TokenLoss};

/// The tokens of a micro-batch. It must hold whole sequences where ratio or correction belong to sequences.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a, F> {
    /// Log-prob under the actor being updated.
    pub theta: &'a [F],
    /// Log-prob under the full-precision old actor.
    pub prox: &'a [F],
    /// Log-prob under the policy that sampled the token.
    pub behav: &'a [F],
    /// Advantage.
    pub adv: &'a [F],
    /// Which tokens count.
    pub mask: &'a [bool],
    /// Sequence of every token.
    pub seq: &'a [u32],
}

/// What an objective says about a micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// The part of the mini-batch's loss that these tokens make up.
    pub loss: f64,
    /// dL/dlogp of every token.
    pub dlogp: Vec<f64>,
    /// Clip fractions and ratio statistics.
    pub facts: Facts,
}

/// Which log-ratio enters the surrogate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ratio {
    /// θ against the proximal policy, per token.
    Prox,
    /// θ against the behaviour policy, per token.
    Behav,
    /// θ against the proximal policy, geometric mean over the sequence.
    Sequence,
}

/// An objective resolved into its parameters.
#[derive(Debug, Clone, Copy)]
struct Resolved {
    ratio: Ratio,
    surrogate: Surrogate,
    clip: Clip,
    correction: Correction,
    /// ACR: the truncation C beyond which the upper bound grows with ρ.
    widen_beyond: Option<f64>,
    /// M2PO: the largest second moment of the log-ratio.
    second_moment: Option<f64>,
}

impl Resolved {
    /// The clip range of a token with proximal-to-behaviour log-ratio `log_rho`. Eq. 9: the upper bound is
    /// (1+ε_high)/r with r = min(1, C/ρ), written as (1+ε_high)·max(1, ρ/C) so that it is exact when ρ ≤ C.
    fn bounds(&self, log_rho: f64) -> Bounds {
        let widening = self.widen_beyond.map_or(1.0, |c| (ratio(log_rho) / c).max(1.0));
        Bounds {
            low: 1.0 - self.clip.clip_ratio_low,
            high: (1.0 + self.clip.clip_ratio_high) * widening,
            dual: self.clip.clip_ratio_c,
        }
    }

    fn token(&self, (theta, behav): (f64, f64), log_ratio: f64, adv: f64, bounds: &Bounds) -> TokenLoss {
        match (self.surrogate, self.ratio) {
            (Surrogate::Cispo, _) => surrogate::cispo(theta, log_ratio, adv, bounds),
            (Surrogate::Unclipped, _) => surrogate::unclipped(log_ratio, adv),
            (Surrogate::Dppo { divergence, delta_low, delta_high, ratio_max }, _) => {
                match surrogate::dppo_drops(theta, behav, adv, divergence, (delta_low, delta_high)) {
                    None => surrogate::truncated_slope(log_ratio, adv, ratio_max),
                    side => TokenLoss { loss: 0.0, slope: 0.0, side },
                }
            }
            (Surrogate::Ppo, Ratio::Sequence) => surrogate::gspo(log_ratio, adv, bounds),
            (Surrogate::Ppo, _) => surrogate::ppo(log_ratio, adv, bounds),
        }
    }
}

impl Objective {
    /// The aggregation to use where a recipe asks for `mode`: a sequence-level ratio is only a gradient of
    /// anything under `seq-mean-token-mean`, so GSPO insists on it.
    pub fn loss_agg_mode(&self, mode: LossAggMode) -> LossAggMode {
        match self {
            Self::Gspo(_) => LossAggMode::SeqMeanTokenMean,
            _ => mode,
        }
    }

    /// Whether the loss of a token depends on other tokens of its sequence, by its ratio, its correction or
    /// the off-policy mask: then [`Objective::evaluate`] must see whole sequences. Others may be given in any
    /// pieces, but see [`Objective::looks_at_mini_batch`].
    pub fn looks_at_sequences(&self) -> bool {
        let Resolved { ratio, correction, clip, .. } = self.resolve();
        ratio == Ratio::Sequence || correction.looks_at_sequences() || clip.off_policy_mask.is_some()
    }

    /// Whether the loss of a token depends on all tokens of its mini-batch (`m2po`): then
    /// [`Objective::evaluate`] must see all of them, or [`Objective::evaluate_kept`] what
    /// [`Objective::kept`] says of them.
    pub fn looks_at_mini_batch(&self) -> bool {
        self.resolve().second_moment.is_some()
    }

    /// Which tokens of a mini-batch are kept where θ is now (`m2po`, the off-policy mask); nothing where an
    /// objective drops none for that. What is dropped stays in the denominator.
    pub fn kept<F: Copy + Into<f64>>(&self, tokens: &Tokens<F>) -> Option<Vec<bool>> {
        selection::kept(&self.resolve(), tokens)
    }

    /// Whether this objective rejects sequences, so that [`Objective::accepted`] needs `prox` before any loss
    /// is computed.
    pub fn rejects(&self) -> bool {
        matches!(self.resolve().correction, Correction::GeoMask { .. })
    }

    /// The mask that remains after this objective has rejected sequences (`geo-mask`), or nothing where it
    /// rejects none. Apply it to the whole batch before counting a [`Denominator`](crate::Denominator), so
    /// that what was rejected leaves the mean as well; [`Objective::evaluate`] rejects the same tokens either
    /// way.
    pub fn accepted<F: Copy + Into<f64>>(
        &self,
        behav: &[F],
        prox: &[F],
        mask: &[bool],
        seq: &[u32],
    ) -> Result<Option<Vec<bool>>, RlError> {
        match self.resolve().correction {
            rejecting @ Correction::GeoMask { .. } => {
                let weights = rejecting.weights(behav, prox, mask, seq)?;
                Ok(Some(weights.iter().map(|&w| w > 0.0).collect()))
            }
            _ => Ok(None),
        }
    }

    /// Loss, dL/dlogp and facts of a micro-batch; `weight` are its tokens' aggregation weights, from
    /// [`Aggregation::token_weights`](crate::Aggregation::token_weights) of the whole mini-batch.
    pub fn evaluate<F: Copy + Into<f64>>(
        &self,
        tokens: &Tokens<F>,
        weight: &[f64],
    ) -> Result<Outcome, RlError> {
        check_lengths(tokens, weight)?;
        self.evaluate_kept(tokens, weight, self.kept(tokens).as_deref())
    }

    /// [`Objective::evaluate`] where it is known which tokens are kept.
    pub fn evaluate_kept<F: Copy + Into<f64>>(
        &self,
        tokens: &Tokens<F>,
        weight: &[f64],
        kept: Option<&[bool]>,
    ) -> Result<Outcome, RlError> {
        let n = check_lengths(tokens, weight)?;
        if let Some(kept) = kept {
            same_length("kept", kept.len(), "theta", n)?;
        }
        let resolved = self.resolve();
        let correction = resolved.correction.weights(tokens.behav, tokens.prox, tokens.mask, tokens.seq)?;
        let log_ratios = log_ratios(resolved.ratio, tokens);
        let mut out = Outcome { loss: 0.0, dlogp: vec![0.0; n], facts: Facts::default() };
        for t in (0..n).filter(|&t| tokens.mask[t]) {
            let log_rho = tokens.prox[t].into() - tokens.behav[t].into();
            let bounds = resolved.bounds(log_rho);
            let policies = (tokens.theta[t].into(), tokens.behav[t].into());
            let token = resolved.token(policies, log_ratios[t], tokens.adv[t].into(), &bounds);
            let correction = if kept.is_none_or(|kept| kept[t]) { correction[t] } else { 0.0 };
            let scale = weight[t] * correction;
            out.loss += scale * token.loss;
            out.dlogp[t] = scale * token.slope + 0.0; // no negative zeros
            out.facts.add(log_ratios[t], token.side, correction);
        }
        Ok(out)
    }
}

/// The number of tokens, where all slices have as many.
fn check_lengths<F>(tokens: &Tokens<F>, weight: &[f64]) -> Result<usize, RlError> {
    let n = tokens.theta.len();
    for (name, len) in [
        ("prox", tokens.prox.len()),
        ("behav", tokens.behav.len()),
        ("adv", tokens.adv.len()),
        ("mask", tokens.mask.len()),
        ("seq", tokens.seq.len()),
        ("weight", weight.len()),
    ] {
        same_length(name, len, "theta", n)?;
    }
    Ok(n)
}

/// The log-ratio of every token; 0 for masked ones.
fn log_ratios<F: Copy + Into<f64>>(kind: Ratio, tokens: &Tokens<F>) -> Vec<f64> {
    let base = if kind == Ratio::Behav { tokens.behav } else { tokens.prox };
    let mut of_token: Vec<f64> = tokens
        .theta
        .iter()
        .zip(base)
        .zip(tokens.mask)
        .map(|((&a, &b), &m)| if m { a.into() - b.into() } else { 0.0 })
        .collect();
    if kind == Ratio::Sequence {
        let (sums, counts) = correction::sequence_sums(&of_token, tokens.mask, tokens.seq);
        for (value, &s) in of_token.iter_mut().zip(tokens.seq) {
            *value = sums[s as usize] / counts[s as usize].max(1) as f64;
        }
    }
    of_token
}
