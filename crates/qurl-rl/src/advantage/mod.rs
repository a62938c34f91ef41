//! Advantages: how much better than expected a token was.
//!
//! The estimators are plain functions in [`group`] and [`token`]; [`Estimator`] is what a recipe names, and
//! [`Estimator::estimate`] chooses between them. It starts from rewards per token, so that a KL penalty or an
//! overlong penalty in the reward reaches every estimator the same way; estimators that want one score per
//! sequence sum them.

pub mod group;
pub mod token;

use crate::error::{RlError, same_length, setting};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
pub use token::Estimate;

/// Which estimator a recipe asks for (`adv_estimator`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Estimator {
    /// Generalised advantage estimation with a critic, normalised over the batch: PPO. Needs a section
    /// `[critic]`.
    Gae {
        /// Discount of the reward for every token that follows.
        #[serde(default = "one")]
        gamma: f64,
        /// Decay of the look-ahead: 0 trusts the critic alone, 1 the rewards alone.
        #[serde(default = "one")]
        lam: f64,
    },
    /// The reward against the mean over the responses to the same prompt, divided by their standard
    /// deviation.
    Grpo {
        /// Divide by the standard deviation of the group; `false` leaves the division out, as Dr. GRPO does.
        #[serde(default = "yes")]
        norm_adv_by_std_in_grpo: bool,
    },
    /// The reward against the mean of the group, not divided. The other half of Dr. GRPO is
    /// `algorithm.loss_agg_mode` = `seq-mean-token-sum-norm`.
    #[serde(alias = "dr_grpo")]
    #[schemars(extend("x-aliases" = ["dr_grpo"]))]
    DrGrpo {},
    /// The reward against the mean of the other responses to the same prompt.
    Rloo {},
    /// The discounted reward still to come, normalised over the batch.
    #[serde(alias = "reinforce_plus_plus")]
    #[schemars(extend("x-aliases" = ["reinforce_plus_plus"]))]
    ReinforcePlusPlus {
        /// Discount of the reward for every token that follows.
        #[serde(default = "one")]
        gamma: f64,
    },
    /// The reward against the mean of the group, normalised over the tokens of the batch.
    #[serde(alias = "reinforce_plus_plus_baseline")]
    #[schemars(extend("x-aliases" = ["reinforce_plus_plus_baseline"]))]
    ReinforcePlusPlusBaseline {},
}

fn one() -> f64 {
    1.0
}

fn yes() -> bool {
    true
}

impl Default for Estimator {
    fn default() -> Self {
        Self::Grpo { norm_adv_by_std_in_grpo: true }
    }
}

/// What a batch of finished rollouts offers to an estimator.
#[derive(Debug, Clone, Copy)]
pub struct Rollouts<'a, F> {
    /// Reward of every token; a reward for the whole answer sits on its last token.
    pub rewards: &'a [F],
    /// Which tokens count.
    pub mask: &'a [bool],
    /// Sequence of every token.
    pub seq: &'a [u32],
    /// Prompt of every sequence.
    pub groups: &'a [u32],
    /// The critic's value at every token, where there is a critic.
    pub values: Option<&'a [F]>,
    /// Those of the tokens that remain where an objective has rejected some
    /// ([`Objective::accepted`](crate::Objective::accepted)): whitening is over these alone. Baselines of
    /// groups are those of all responses.
    pub accepted: Option<&'a [bool]>,
}

impl Estimator {
    /// Whether the estimator needs a critic.
    pub fn needs_critic(&self) -> bool {
        matches!(self, Self::Gae { .. })
    }

    /// Checks the settings.
    pub fn check(&self) -> Result<(), RlError> {
        let share =
            |key, value: f64| setting((0.0..=1.0).contains(&value), key, value, "a number from 0 to 1");
        match *self {
            Self::Gae { gamma, lam } => share("gamma", gamma).and(share("lam", lam)),
            Self::ReinforcePlusPlus { gamma } => share("gamma", gamma),
            _ => Ok(()),
        }
    }

    /// Advantages and returns of all tokens. Without a critic the returns are the advantages.
    pub fn estimate<F: Copy + Into<f64>>(&self, r: &Rollouts<F>) -> Result<Estimate, RlError> {
        let on_tokens = |scores: Vec<f64>| broadcast(&scores, r.mask, r.seq);
        let counted = r.accepted.unwrap_or(r.mask);
        let advantages = match *self {
            Self::Gae { gamma, lam } => {
                let values = r.values.ok_or(RlError::NoValues)?;
                let raw = token::gae(r.rewards, values, r.mask, r.seq, gamma, lam)?;
                return Ok(Estimate {
                    advantages: token::whiten(&raw.advantages, counted)?,
                    returns: raw.returns,
                });
            }
            Self::Grpo { norm_adv_by_std_in_grpo } => {
                on_tokens(group::grpo(&scores(r)?, r.groups, norm_adv_by_std_in_grpo)?)?
            }
            Self::DrGrpo {} => on_tokens(group::grpo(&scores(r)?, r.groups, false)?)?,
            Self::Rloo {} => on_tokens(group::rloo(&scores(r)?, r.groups)?)?,
            Self::ReinforcePlusPlus { gamma } => {
                let returns = token::reward_to_go(r.rewards, r.mask, r.seq, gamma)?;
                let advantages = token::whiten(&returns, counted)?;
                return Ok(Estimate { advantages, returns });
            }
            Self::ReinforcePlusPlusBaseline {} => {
                let centred = on_tokens(group::grpo(&scores(r)?, r.groups, false)?)?;
                token::whiten(&centred, counted)?
            }
        };
        Ok(Estimate { returns: advantages.clone(), advantages })
    }
}

/// Sum of the rewards of every sequence, over the tokens that count.
fn scores<F: Copy + Into<f64>>(r: &Rollouts<F>) -> Result<Vec<f64>, RlError> {
    same_length("mask", r.mask.len(), "rewards", r.rewards.len())?;
    same_length("seq", r.seq.len(), "rewards", r.rewards.len())?;
    let mut scores = vec![0.0; r.groups.len()];
    let count = scores.len();
    for (t, &s) in r.seq.iter().enumerate() {
        let score =
            scores.get_mut(s as usize).ok_or(RlError::Sequence { token: t, index: s as usize, count })?;
        if r.mask[t] {
            *score += r.rewards[t].into();
        }
    }
    Ok(scores)
}

/// Gives every token that counts the number of its sequence, the others 0.
pub fn broadcast(of_sequence: &[f64], mask: &[bool], seq: &[u32]) -> Result<Vec<f64>, RlError> {
    same_length("seq", seq.len(), "mask", mask.len())?;
    let on_token = |(token, (&m, &s)): (usize, (&bool, &u32))| {
        let value = of_sequence.get(s as usize).ok_or(RlError::Sequence {
            token,
            index: s as usize,
            count: of_sequence.len(),
        })?;
        Ok(if m { *value } else { 0.0 })
    };
    mask.iter().zip(seq).enumerate().map(on_token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rollouts<'a>() -> Rollouts<'a, f32> {
        Rollouts {
            rewards: &[0.0, 1.0, 0.0, 0.0, 0.5],
            mask: &[true, true, true, false, true],
            seq: &[0, 0, 1, 1, 2],
            groups: &[4, 4, 9],
            values: None,
            accepted: None,
        }
    }

    #[test]
    fn masked_tokens_get_nothing_and_sequences_share_their_advantage() {
        let e = Estimator::DrGrpo {}.estimate(&rollouts()).unwrap();
        assert_eq!(e.advantages, [0.5, 0.5, -0.5, 0.0, 0.5]);
        assert_eq!(e.returns, e.advantages);
        let off = Estimator::Grpo { norm_adv_by_std_in_grpo: false };
        assert_eq!(off.estimate(&rollouts()).unwrap(), e);
    }

    #[test]
    fn the_two_whitened_estimators_have_mean_zero() {
        for e in [Estimator::ReinforcePlusPlus { gamma: 0.9 }, Estimator::ReinforcePlusPlusBaseline {}] {
            let a = e.estimate(&rollouts()).unwrap().advantages;
            assert!(a.iter().sum::<f64>().abs() < 1e-12, "{e:?}");
            assert_eq!(a[3], 0.0);
        }
    }

    /// What an objective rejects is no part of the mean and the deviation, and is part of the baseline.
    #[test]
    fn rejected_tokens_are_whitened_out() {
        let accepted = [true, true, false, false, true];
        let (rewards, values) = ([0.0, 1.0, 0.0, 0.0, 0.75], [0.25, 0.5, 0.75, 0.0, 2.0]);
        for e in [
            Estimator::ReinforcePlusPlus { gamma: 0.9 },
            Estimator::ReinforcePlusPlusBaseline {},
            Estimator::Gae { gamma: 1.0, lam: 0.9 },
        ] {
            let all = Rollouts { rewards: &rewards, values: Some(&values), ..rollouts() };
            let some = e.estimate(&Rollouts { accepted: Some(&accepted), ..all }).unwrap();
            let kept: Vec<f64> = (0..5).filter(|&t| accepted[t]).map(|t| some.advantages[t]).collect();
            assert!(kept.iter().sum::<f64>().abs() < 1e-12, "{e:?}: {kept:?}");
            assert!((kept.iter().map(|a| a * a).sum::<f64>() - 2.0).abs() < 1e-4, "{e:?}: {kept:?}");
            assert_eq!((some.advantages[2], some.advantages[3]), (0.0, 0.0), "{e:?}");
            assert_ne!(some.advantages[0], e.estimate(&all).unwrap().advantages[0], "{e:?}");
        }
        // Sequence 1 is rejected; sequence 0 is still compared with it.
        let grouped = Rollouts { accepted: Some(&accepted), ..rollouts() };
        assert_eq!(Estimator::DrGrpo {}.estimate(&grouped), Estimator::DrGrpo {}.estimate(&rollouts()));
    }

    #[test]
    fn gae_needs_a_critic() {
        let gae = Estimator::Gae { gamma: 1.0, lam: 1.0 };
        assert!(gae.needs_critic() && !Estimator::default().needs_critic());
        assert_eq!(gae.estimate(&rollouts()), Err(RlError::NoValues));
    }

    #[test]
    fn a_sequence_without_a_group_is_an_error() {
        let r = Rollouts { groups: &[4, 4], ..rollouts() };
        let error = Estimator::default().estimate(&r).unwrap_err();
        assert_eq!(error, RlError::Sequence { token: 4, index: 2, count: 2 });
    }

    #[test]
    fn recipes_name_estimators() {
        let parse = |s: &str| serde_json::from_str::<Estimator>(s);
        assert_eq!(parse(r#"{"type":"grpo"}"#).unwrap(), Estimator::default());
        assert_eq!(parse(r#"{"type":"gae","lam":0.95}"#).unwrap(), Estimator::Gae { gamma: 1.0, lam: 0.95 });
        assert_eq!(
            parse(r#"{"type":"reinforce_plus_plus"}"#).unwrap(),
            Estimator::ReinforcePlusPlus { gamma: 1.0 }
        );
        assert_eq!(parse(r#"{"type":"dr-grpo"}"#).unwrap(), Estimator::DrGrpo {});
        assert!(parse(r#"{"type":"rloo","gamma":1}"#).is_err());
        assert!(parse(r#"{"type":"a2c"}"#).is_err());
        assert!(Estimator::Gae { gamma: 1.5, lam: 1.0 }.check().is_err());
        assert!(Estimator::Gae { gamma: 1.0, lam: 0.95 }.check().is_ok());
    }
}
