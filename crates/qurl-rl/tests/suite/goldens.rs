//! Agreement with PyTorch: `../goldens/make_goldens.py` computes the same quantities by autograd in float64.

use crate::common::close;
use qurl_rl::advantage::{Estimator, Rollouts, token};
use qurl_rl::value::{explained_variance, value_loss};
use qurl_rl::{Aggregation, KlEstimator, LossAggMode, Mismatch, Objective, Tokens};
use serde_json::Value;

fn goldens() -> Value {
    serde_json::from_str(include_str!("../goldens/goldens.json")).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn float(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

fn mask(goldens: &Value) -> Vec<bool> {
    floats(&goldens["tokens"]["mask"]).iter().map(|&m| m == 1.0).collect()
}

fn indices(value: &Value) -> Vec<u32> {
    floats(value).iter().map(|&s| s as u32).collect()
}

#[track_caller]
fn all_close(got: &[f64], want: &Value, what: &str) {
    let want = floats(want);
    assert_eq!(got.len(), want.len(), "{what}");
    for (t, (g, w)) in got.iter().zip(&want).enumerate() {
        assert!(close(*g, *w), "{what}[{t}]: {g} is not {w}");
    }
}

#[test]
fn objectives() {
    let g = goldens();
    let list = |key: &str| floats(&g["tokens"][key]);
    let (theta, prox, behav, adv) = (list("theta"), list("prox"), list("behav"), list("adv"));
    let (mask, seq) = (mask(&g), indices(&g["tokens"]["seq"]));
    for case in g["objectives"].as_array().unwrap() {
        let what = case["objective"].to_string();
        let objective: Objective = serde_json::from_value(case["objective"].clone()).unwrap();
        let mode: LossAggMode = serde_json::from_value(case["loss_agg_mode"].clone()).unwrap();
        let loss_scale_factor = case.get("loss_scale_factor").map(float);
        let kept = objective.accepted(&behav, &prox, &mask, &seq).unwrap().unwrap_or(mask.clone());
        let tokens = Tokens { theta: &theta, prox: &prox, behav: &behav, adv: &adv, mask: &kept, seq: &seq };
        let weights = Aggregation { mode, loss_scale_factor }.weights_of(&kept, &seq).unwrap();
        let out = objective.evaluate(&tokens, &weights).unwrap();
        assert!(close(out.loss, float(&case["loss"])), "{what}: {}", out.loss);
        all_close(&out.dlogp, &case["dlogp"], &what);
        assert!(close(out.facts.clip_fraction_upper(), float(&case["upper"])), "{what}");
        assert!(close(out.facts.clip_fraction_lower(), float(&case["lower"])), "{what}");
        assert!(close(out.facts.clip_fraction_dual(), float(&case["dual"])), "{what}");
    }
}

#[test]
fn advantages() {
    let g = goldens();
    let a = &g["advantages"];
    let (rewards, values) = (floats(&a["rewards"]), floats(&a["values"]));
    let (mask, seq, groups) = (mask(&g), indices(&g["tokens"]["seq"]), indices(&a["groups"]));
    let (gamma, lam) = (float(&a["gamma"]), float(&a["lam"]));
    let rollouts = Rollouts {
        rewards: &rewards,
        mask: &mask,
        seq: &seq,
        groups: &groups,
        values: Some(&values),
        accepted: None,
    };
    let raw = token::gae(&rewards, &values, &mask, &seq, gamma, lam).unwrap();
    all_close(&raw.advantages, &a["gae_raw"], "gae_raw");
    for (name, estimator, returns) in [
        ("gae", Estimator::Gae { gamma, lam }, "gae_returns"),
        ("grpo", Estimator::Grpo { norm_adv_by_std_in_grpo: true }, "grpo"),
        ("dr-grpo", Estimator::DrGrpo {}, "dr-grpo"),
        ("rloo", Estimator::Rloo {}, "rloo"),
        ("reinforce-plus-plus", Estimator::ReinforcePlusPlus { gamma }, "reinforce-plus-plus-returns"),
        (
            "reinforce-plus-plus-baseline",
            Estimator::ReinforcePlusPlusBaseline {},
            "reinforce-plus-plus-baseline",
        ),
    ] {
        let e = estimator.estimate(&rollouts).unwrap();
        all_close(&e.advantages, &a[name], name);
        all_close(&e.returns, &a[returns], returns);
    }
}

#[test]
fn kl_in_loss_and_reward() {
    let g = goldens();
    let (theta, reference) = (floats(&g["tokens"]["theta"]), floats(&g["kl"]["reference"]));
    let (mask, seq) = (mask(&g), indices(&g["tokens"]["seq"]));
    let rewards = floats(&g["advantages"]["rewards"]);
    let coefficient = float(&g["kl"]["coefficient"]);
    let mode = LossAggMode::SeqMeanTokenMean;
    let weights = Aggregation { mode, loss_scale_factor: None }.weights_of(&mask, &seq).unwrap();
    for case in g["kl"]["cases"].as_array().unwrap() {
        let what = case["type"].to_string();
        let k: KlEstimator = serde_json::from_value(case["type"].clone()).unwrap();
        let out = k.in_loss(coefficient, &theta, &reference, &mask, &weights).unwrap();
        assert!(close(out.loss, float(&case["loss"])), "{what}");
        all_close(&out.dlogp, &case["dlogp"], &what);
        let out = k.in_reward(coefficient, &rewards, &theta, &reference, &mask, &seq).unwrap();
        all_close(&out.rewards, &case["rewards"], &what);
        assert!(close(out.mean_kl, float(&case["mean_kl"])), "{what}");
    }
}

#[test]
fn critic() {
    let g = goldens();
    let (values, old) = (floats(&g["value"]["values"]), floats(&g["advantages"]["values"]));
    let returns = floats(&g["advantages"]["gae_returns"]);
    let (mask, seq) = (mask(&g), indices(&g["tokens"]["seq"]));
    let weights = Aggregation::default().weights_of(&mask, &seq).unwrap();
    for case in g["value"]["cases"].as_array().unwrap() {
        let range = case["cliprange_value"].as_f64();
        let out = value_loss(&values, &old, &returns, &mask, &weights, range).unwrap();
        assert!(close(out.loss, float(&case["loss"])), "{range:?}");
        all_close(&out.dvalue, &case["dvalue"], "dvalue");
        assert_eq!(out.clipped as f64, float(&case["clipped"]), "{range:?}");
    }
    let explained = explained_variance(&values, &returns, &mask).unwrap().unwrap();
    assert!(close(explained, float(&g["value"]["explained_variance"])));
}

#[test]
fn mismatch() {
    let g = goldens();
    let list = |key: &str| floats(&g["tokens"][key]);
    let (mask, seq) = (mask(&g), indices(&g["tokens"]["seq"]));
    let measured = Mismatch::measure(&list("behav"), &list("prox"), &mask, &seq).unwrap().unwrap();
    let measured = serde_json::to_value(measured).unwrap();
    for (name, want) in g["mismatch"].as_object().unwrap() {
        assert!(close(float(&measured[name]), float(want)), "{name}: {} {want}", measured[name]);
    }
}
