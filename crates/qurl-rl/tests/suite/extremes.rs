//! Finite in, finite out: log-ratios up to ±1e4, empty batches, batches that are masked as a whole.

use crate::common::{Batch, MODES, Random, all_objectives};
use qurl_rl::advantage::{Estimator, Rollouts};
use qurl_rl::value::value_loss;
use qurl_rl::{KlEstimator, LossAggMode, Mismatch};

fn extreme(random: &mut Random) -> Batch {
    let mut batch = Batch::random(random, 40, 2.0);
    for t in 0..40 {
        let far = || [-1e4, -710.0, -21.0, -20.0, 0.0, 20.0, 21.0, 710.0, 1e4];
        batch.theta[t] += far()[random.below(9)];
        batch.behav[t] += far()[random.below(9)];
        batch.adv[t] *= [0.0, 1.0, 1e6, 1e-30][random.below(4)];
    }
    batch
}

#[test]
fn objectives_stay_finite() {
    let mut random = Random(21);
    for objective in all_objectives() {
        for _ in 0..50 {
            let batch = extreme(&mut random);
            for mode in MODES {
                let out = batch.evaluate(&objective, mode);
                assert!(out.loss.is_finite(), "{}", objective.name());
                assert!(out.dlogp.iter().all(|d| d.is_finite()), "{}", objective.name());
                let f = &out.facts;
                for x in [f.ratio_mean(), f.ratio_max, f.ppo_kl(), f.weight_mean(), f.weight_max] {
                    assert!(x.is_finite(), "{}", objective.name());
                }
                for share in [
                    f.clip_fraction(),
                    f.clip_fraction_dual(),
                    f.rejected_fraction(),
                    f.effective_sample_share(),
                ] {
                    assert!((0.0..=1.0 + 1e-12).contains(&share), "{}", objective.name());
                }
            }
        }
    }
}

#[test]
fn masked_tokens_are_never_read() {
    let mut random = Random(22);
    for objective in all_objectives() {
        let clean = Batch::random(&mut random, 30, 1.0);
        let mut dirty = clean.clone();
        for t in (0..30).filter(|&t| !clean.mask[t]) {
            dirty.theta[t] = f64::NAN;
            dirty.prox[t] = f64::INFINITY;
            dirty.behav[t] = f64::NEG_INFINITY;
            dirty.adv[t] = f64::NAN;
        }
        for mode in MODES {
            assert_eq!(dirty.evaluate(&objective, mode), clean.evaluate(&objective, mode));
        }
    }
}

#[test]
fn metrics_and_penalties_stay_finite() {
    let mut random = Random(23);
    for _ in 0..100 {
        let b = extreme(&mut random);
        let Some(m) = Mismatch::measure(&b.behav, &b.prox, &b.mask, &b.seq).unwrap() else {
            continue;
        };
        for (name, value) in serde_json::to_value(m).unwrap().as_object().unwrap() {
            // Non-finite numbers become null; only the correlation may be absent.
            assert!(value.is_number() || name == "probs_pearson_corr", "{name}");
        }
        let weights = b.weights(LossAggMode::TokenMean);
        for name in ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] {
            let k: KlEstimator = serde_json::from_value(name.into()).unwrap();
            let out = k.in_loss(0.1, &b.theta, &b.behav, &b.mask, &weights).unwrap();
            assert!(out.loss.is_finite() && out.dlogp.iter().all(|d| d.is_finite()), "{name}");
            let out = k.in_reward(0.1, &b.adv, &b.theta, &b.behav, &b.mask, &b.seq).unwrap();
            assert!(out.mean_kl.is_finite() && out.rewards.iter().all(|r| r.is_finite()));
        }
        let out = value_loss(&b.theta, &b.behav, &b.prox, &b.mask, &weights, Some(0.5)).unwrap();
        assert!(out.loss.is_finite() && out.dvalue.iter().all(|d| d.is_finite()));
    }
}

#[test]
fn advantages_stay_finite_and_respect_the_mask() {
    let mut random = Random(24);
    for _ in 0..100 {
        let b = extreme(&mut random);
        let groups: Vec<u32> = (0..8).map(|_| random.below(3) as u32).collect();
        let rollouts = Rollouts {
            rewards: &b.adv,
            mask: &b.mask,
            seq: &b.seq,
            groups: &groups,
            values: Some(&b.theta),
            accepted: None,
        };
        for estimator in [
            Estimator::Gae { gamma: 0.99, lam: 0.95 },
            Estimator::default(),
            Estimator::DrGrpo {},
            Estimator::Rloo {},
            Estimator::ReinforcePlusPlus { gamma: 1.0 },
            Estimator::ReinforcePlusPlusBaseline {},
        ] {
            let e = estimator.estimate(&rollouts).unwrap();
            assert!(e.advantages.iter().chain(&e.returns).all(|a| a.is_finite()), "{estimator:?}");
            let masked = e.advantages.iter().zip(&b.mask).filter(|(_, m)| !**m);
            assert!(masked.into_iter().all(|(a, _)| *a == 0.0), "{estimator:?}");
        }
    }
}

#[test]
fn nothing_in_nothing_out() {
    let mut masked = Batch::random(&mut Random(25), 10, 1.0);
    masked.mask = vec![false; 10];
    let empty = Batch::random(&mut Random(26), 0, 1.0);
    for batch in [masked, empty] {
        for objective in all_objectives() {
            for mode in MODES {
                let out = batch.evaluate(&objective, mode);
                assert_eq!((out.loss, out.facts.tokens, out.facts.clip_fraction()), (0.0, 0, 0.0));
                assert!(out.dlogp.iter().all(|d| *d == 0.0));
            }
        }
        let m = Mismatch::measure(&batch.behav, &batch.prox, &batch.mask, &batch.seq);
        assert_eq!(m.unwrap(), None);
    }
}
