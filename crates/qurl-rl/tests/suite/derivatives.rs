//! Every derivative against central differences in f64.

use crate::common::{Batch, MODES, Random, all_objectives};
use qurl_rl::entropy::entropy_bonus;
use qurl_rl::value::value_loss;
use qurl_rl::{Correction, KlEstimator, LossAggMode, Objective};

const STEP: f64 = 1e-6;

/// Slope of `f` at `x`, or nothing where the two one-sided slopes differ: a kink within the step.
fn slope(x: f64, f: impl Fn(f64) -> f64) -> Option<f64> {
    let (down, here, up) = (f(x - STEP), f(x), f(x + STEP));
    let (left, right) = ((here - down) / STEP, (up - here) / STEP);
    let scale = left.abs().max(right.abs()).max(1.0);
    ((left - right).abs() < 1e-3 * scale).then_some((up - down) / (2.0 * STEP))
}

#[track_caller]
fn agree(got: f64, numeric: Option<f64>, what: &str) -> usize {
    let Some(numeric) = numeric else { return 0 };
    let scale = got.abs().max(numeric.abs()).max(1.0);
    assert!((got - numeric).abs() < 1e-5 * scale, "{what}: {got} is not {numeric}");
    1
}

#[test]
fn objectives_per_token() {
    let mut random = Random(11);
    let mut checked = 0;
    // CISPO's ratio and GSPO's sequence are constants to the gradient: they have tests of their own.
    let differentiable = |o: &Objective| !matches!(o, Objective::Cispo(_) | Objective::Gspo(_));
    for objective in all_objectives().iter().filter(|o| differentiable(o)) {
        for mode in MODES {
            let batch = Batch::random(&mut random, 24, 1.5);
            let out = batch.evaluate(objective, mode);
            for t in 0..24 {
                let numeric = slope(batch.theta[t], |x| {
                    let mut moved = batch.clone();
                    moved.theta[t] = x;
                    moved.evaluate(objective, mode).loss
                });
                checked += agree(out.dlogp[t], numeric, objective.name());
            }
        }
    }
    assert!(checked > 1500, "{checked}");
}

#[test]
fn cispo_is_the_derivative_at_a_frozen_ratio() {
    let objective: Objective =
        serde_json::from_str(r#"{"type":"cispo","correction":{"type":"token-tis"}}"#).unwrap();
    let batch = Batch::random(&mut Random(12), 24, 1.5);
    let weights = batch.weights(LossAggMode::TokenMean);
    let correction =
        Correction::TokenTis { c: 2.0 }.weights(&batch.behav, &batch.prox, &batch.mask, &batch.seq).unwrap();
    let out = batch.evaluate(&objective, LossAggMode::TokenMean);
    for t in (0..24).filter(|&t| batch.mask[t]) {
        let frozen = (batch.theta[t] - batch.prox[t]).exp().clamp(0.8, 1.2);
        let numeric = slope(batch.theta[t], |x| -weights[t] * correction[t] * frozen * batch.adv[t] * x);
        assert_eq!(agree(out.dlogp[t], numeric, "cispo"), 1);
    }
}

#[test]
fn gspo_is_the_derivative_of_the_sequence_loss() {
    // With one advantage per sequence, as GRPO gives, the per-token rule is the exact gradient.
    let mut random = Random(13);
    let objective: Objective =
        serde_json::from_str(r#"{"type":"gspo","clip_ratio_low":0.1,"clip_ratio_high":0.1}"#).unwrap();
    let mode = objective.loss_agg_mode(LossAggMode::TokenMean);
    assert_eq!(mode, LossAggMode::SeqMeanTokenMean);
    let mut checked = 0;
    for _ in 0..20 {
        let mut batch = Batch::random(&mut random, 24, 0.6);
        let of_sequence: Vec<f64> = (0..6).map(|_| random.within(-2.0, 2.0)).collect();
        batch.adv = batch.seq.iter().map(|&s| of_sequence[s as usize]).collect();
        let out = batch.evaluate(&objective, mode);
        for t in 0..24 {
            let numeric = slope(batch.theta[t], |x| {
                let mut moved = batch.clone();
                moved.theta[t] = x;
                moved.evaluate(&objective, mode).loss
            });
            checked += agree(out.dlogp[t], numeric, "gspo");
        }
    }
    assert!(checked > 400);
}

#[test]
fn kl_estimators() {
    let mut random = Random(14);
    for k in [KlEstimator::K1, KlEstimator::Abs, KlEstimator::K2, KlEstimator::K3] {
        for _ in 0..200 {
            let (theta, reference) = (random.within(-5.0, 0.0), random.within(-5.0, 0.0));
            agree(k.at(theta, reference).1, slope(theta, |x| k.at(x, reference).0), "kl");
        }
        let batch = Batch::random(&mut random, 20, 1.0);
        let weights = batch.weights(LossAggMode::SeqMeanTokenMean);
        let loss = |theta: &[f64]| k.in_loss(0.3, theta, &batch.prox, &batch.mask, &weights).unwrap();
        let out = loss(&batch.theta);
        for t in 0..20 {
            let numeric = slope(batch.theta[t], |x| {
                let mut moved = batch.theta.clone();
                moved[t] = x;
                loss(&moved).loss
            });
            agree(out.dlogp[t], numeric, "kl in the loss");
        }
    }
}

#[test]
fn critic_and_entropy() {
    let mut random = Random(15);
    let mut checked = 0;
    for range in [None, Some(0.5)] {
        let batch = Batch::random(&mut random, 40, 1.5);
        let weights = batch.weights(LossAggMode::TokenMean);
        let loss =
            |v: &[f64]| value_loss(v, &batch.prox, &batch.behav, &batch.mask, &weights, range).unwrap();
        let out = loss(&batch.theta);
        let bonus = |h: &[f64]| entropy_bonus(0.01, h, &batch.mask, &weights).unwrap();
        for t in 0..40 {
            let moved = |x| {
                let mut moved = batch.theta.clone();
                moved[t] = x;
                moved
            };
            checked += agree(out.dvalue[t], slope(batch.theta[t], |x| loss(&moved(x)).loss), "value");
            let numeric = slope(batch.theta[t], |x| bonus(&moved(x)).loss);
            checked += agree(bonus(&batch.theta).dentropy[t], numeric, "entropy");
        }
    }
    assert!(checked > 150, "{checked}");
}
