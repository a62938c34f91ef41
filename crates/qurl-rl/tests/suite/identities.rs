//! What must hold exactly: the relations between the objectives, and that splitting a batch changes nothing.

use crate::common::{Batch, MODES, Random, all_objectives, close, objective};
use qurl_rl::{Aggregation, Denominator, Facts, LossAggMode, Objective, Outcome, Tokens};

fn bits(out: &Outcome) -> Vec<u64> {
    std::iter::once(out.loss).chain(out.dlogp.iter().copied()).map(f64::to_bits).collect()
}

/// The paper's objectives with the same clip range.
fn paper(name: &str) -> Objective {
    let c = if matches!(name, "tis" | "acr") { r#""c":2.0,"# } else { "" };
    objective(&format!(r#"{{"type":"{name}",{c}"clip_ratio_low":0.2,"clip_ratio_high":0.28}}"#))
}

#[test]
fn without_quantization_all_are_equal_bit_for_bit() {
    let mut random = Random(1);
    for _ in 0..200 {
        let mut batch = Batch::random(&mut random, 40, 1.5);
        batch.behav = batch.prox.clone();
        for mode in MODES {
            let naive = bits(&batch.evaluate(&paper("naive"), mode));
            for name in ["quantized-is", "decoupled", "tis", "acr"] {
                assert_eq!(bits(&batch.evaluate(&paper(name), mode)), naive, "{name}");
            }
        }
    }
}

#[test]
fn with_one_update_per_rollout_acr_is_tis_bit_for_bit() {
    let mut random = Random(2);
    for _ in 0..200 {
        let mut batch = Batch::random(&mut random, 40, 6.0);
        batch.theta = batch.prox.clone();
        for mode in MODES {
            let (acr, tis) = (batch.evaluate(&paper("acr"), mode), batch.evaluate(&paper("tis"), mode));
            assert_eq!(bits(&acr), bits(&tis));
            assert_eq!(acr.facts.clip_fraction(), 0.0);
        }
    }
}

#[test]
fn acr_differs_from_tis_only_where_the_paper_says() {
    let mut random = Random(3);
    let (mut differing, mut widened_and_clipped) = (0, 0);
    for _ in 0..200 {
        let batch = Batch::random(&mut random, 40, 2.5);
        let acr = batch.evaluate(&paper("acr"), LossAggMode::TokenSum);
        let tis = batch.evaluate(&paper("tis"), LossAggMode::TokenSum);
        for t in (0..40).filter(|&t| batch.mask[t]) {
            let rho = (batch.prox[t] - batch.behav[t]).exp();
            let r = (batch.theta[t] - batch.prox[t]).exp();
            let region = batch.adv[t] > 0.0 && rho > 2.0 && r > 1.28;
            let kept_by_acr = region && r <= 1.28 * rho / 2.0;
            assert_eq!(acr.dlogp[t] != tis.dlogp[t], kept_by_acr, "token {t}");
            differing += usize::from(kept_by_acr);
            widened_and_clipped += usize::from(region && !kept_by_acr);
            if kept_by_acr {
                assert_eq!(tis.dlogp[t], 0.0);
                assert!((acr.dlogp[t] + 2.0 * r * batch.adv[t]).abs() < 1e-12);
            }
        }
        assert!(acr.loss <= tis.loss); // ACR lets more of the good tokens count
    }
    assert!(differing > 50 && widened_and_clipped > 50, "{differing} {widened_and_clipped}");
}

#[test]
fn a_large_c_makes_tis_and_acr_decoupled() {
    let mut random = Random(4);
    for _ in 0..50 {
        let batch = Batch::random(&mut random, 30, 2.0);
        let decoupled = bits(&batch.evaluate(&objective(r#"{"type":"decoupled"}"#), MODES[0]));
        for name in ["tis", "acr"] {
            let large = objective(&format!(r#"{{"type":"{name}","c":1e6}}"#));
            assert_eq!(bits(&batch.evaluate(&large, MODES[0])), decoupled);
        }
    }
}

#[test]
fn tis_is_decoupled_with_the_truncated_behaviour_policy() {
    // Eq. 6 and 7: replace π_behav by max(π_behav, π_prox/C) and the two are the same objective.
    let mut random = Random(5);
    for _ in 0..50 {
        let batch = Batch::random(&mut random, 30, 3.0);
        let mut truncated = batch.clone();
        for t in 0..30 {
            truncated.behav[t] = batch.behav[t].max(batch.prox[t] - 2f64.ln());
        }
        let tis = batch.evaluate(&objective(r#"{"type":"tis"}"#), MODES[3]);
        let decoupled = truncated.evaluate(&objective(r#"{"type":"decoupled"}"#), MODES[3]);
        assert!(close(tis.loss, decoupled.loss));
        assert!(tis.dlogp.iter().zip(&decoupled.dlogp).all(|(a, b)| close(*a, *b)));
    }
}

/// What the newer corrections become at their limits, bit for bit.
#[test]
fn corrections_at_their_limits() {
    let mut random = Random(10);
    for _ in 0..100 {
        let mut batch = Batch::random(&mut random, 40, 2.0);
        for (limit, same) in [
            // No divergence is too large, no weight, no mean of log-ratios, no second moment.
            (r#"{"type":"kpop","phi":1e6}"#, r#"{"type":"decoupled"}"#),
            (r#"{"type":"sequence-mis","c":1e30}"#, r#"{"type":"sequence-tis","c":1e30}"#),
            (r#"{"type":"off-policy-mask","tau":1e6}"#, r#"{"type":"naive"}"#),
            (
                r#"{"type":"off-policy-mask","tau":1e6,"correction":{"type":"token-tis","c":2.0}}"#,
                r#"{"type":"tis","c":2.0}"#,
            ),
            (r#"{"type":"acr","off_policy_mask":1e6}"#, r#"{"type":"acr"}"#),
            (
                r#"{"type":"m2po","tau":1e6}"#,
                r#"{"type":"naive","clip_ratio_low":1.0,"clip_ratio_high":1e9}"#,
            ),
            // Importance sampling without a clip.
            (
                r#"{"type":"dppo","delta_low":1e6,"delta_high":1e6,"ratio_max":1e9}"#,
                r#"{"type":"quantized-is","clip_ratio_low":1.0,"clip_ratio_high":1e9}"#,
            ),
            (
                r#"{"type":"dppo","divergence":"kl","delta_low":1e6,"delta_high":1e6,"ratio_max":1e9}"#,
                r#"{"type":"m2po","tau":1e6,"ratio":"behav"}"#,
            ),
        ] {
            for mode in MODES {
                let got = batch.evaluate(&objective(limit), mode);
                assert_eq!(bits(&got), bits(&batch.evaluate(&objective(same), mode)), "{limit}");
            }
        }
        // A sequence of one token is masked as a token is.
        batch.seq = (0..40).collect();
        let (sequence, token) =
            (r#"{"type":"sequence-mis","c":2.0}"#, r#"{"type":"icepop","low":0.0,"high":2.0}"#);
        for mode in MODES {
            let got = batch.evaluate(&objective(sequence), mode);
            assert_eq!(bits(&got), bits(&batch.evaluate(&objective(token), mode)));
            assert!(got.facts.rejected > 0);
        }
        // On the policy that sampled, nothing is dropped and DPPO is REINFORCE with the ratio 1.
        batch.behav = batch.theta.clone();
        let dppo =
            batch.evaluate(&objective(r#"{"type":"dppo","delta_low":0.0,"delta_high":0.0}"#), MODES[1]);
        for t in (0..40).filter(|&t| batch.mask[t]) {
            assert_eq!(dppo.dlogp[t], -batch.adv[t] + 0.0);
        }
    }
}

/// What is dropped weighs nothing, and all others weigh what they did.
#[test]
fn dropped_tokens_stay_in_the_denominator() {
    let mut random = Random(11);
    let mut dropped = [0; 3];
    for _ in 0..50 {
        let batch = Batch::random(&mut random, 40, 1.5);
        let cases = [
            (r#"{"type":"kpop","phi":0.1}"#, r#"{"type":"decoupled"}"#),
            (r#"{"type":"acr","off_policy_mask":0.1}"#, r#"{"type":"acr"}"#),
            (
                r#"{"type":"m2po","tau":0.2}"#,
                r#"{"type":"naive","clip_ratio_low":1.0,"clip_ratio_high":1e9}"#,
            ),
        ];
        for ((masking, all), dropped) in cases.into_iter().zip(&mut dropped) {
            for mode in MODES {
                let some = batch.evaluate(&objective(masking), mode);
                let all = batch.evaluate(&objective(all), mode);
                for t in 0..40 {
                    assert!(some.dlogp[t] == all.dlogp[t] || some.dlogp[t] == 0.0);
                }
                *dropped += some.facts.rejected;
                assert_eq!(some.facts.tokens, all.facts.tokens);
            }
        }
    }
    assert!(dropped.iter().all(|&n| n > 100), "{dropped:?}");
}

/// Pieces of sequences say what the whole says, unless the objective looks at sequences; some that do say
/// something else.
#[test]
fn tokens_one_by_one_add_up_unless_the_objective_looks_at_sequences() {
    let mut random = Random(8);
    for objective in all_objectives() {
        let batch = Batch::random(&mut random, 60, 1.0);
        let whole = batch.evaluate(&objective, MODES[0]);
        let denominator = Denominator::count(&batch.mask, &batch.seq).unwrap();
        let aggregation = Aggregation { mode: MODES[0], loss_scale_factor: None };
        let weights = aggregation.token_weights(&denominator, &batch.mask, &batch.seq).unwrap();
        let mut dlogp = Vec::new();
        for t in 0..batch.seq.len() {
            let part = Tokens {
                theta: &batch.theta[t..=t],
                prox: &batch.prox[t..=t],
                behav: &batch.behav[t..=t],
                adv: &batch.adv[t..=t],
                mask: &batch.mask[t..=t],
                seq: &batch.seq[t..=t],
            };
            dlogp.extend(objective.evaluate(&part, &weights[t..=t]).unwrap().dlogp);
        }
        let name = objective.name();
        let alone = !objective.looks_at_sequences() && !objective.looks_at_mini_batch();
        assert!(dlogp == whole.dlogp || !alone, "{name}");
        assert!(dlogp != whole.dlogp || !["gspo", "sequence-tis"].contains(&name), "{name}");
    }
}

#[test]
fn micro_batches_add_up_to_the_mini_batch() {
    let mut random = Random(6);
    for objective in all_objectives() {
        for mode in MODES {
            let batch = Batch::random(&mut random, 60, 1.0);
            let denominator = Denominator::count(&batch.mask, &batch.seq).unwrap();
            let whole = batch.evaluate(&objective, mode);
            let kept = objective.kept(&batch.tokens());
            let (mut loss, mut dlogp, mut facts) = (0.0, Vec::new(), Facts::default());
            for s in 0..=*batch.seq.last().unwrap() {
                let range = batch.seq.partition_point(|&x| x < s)..batch.seq.partition_point(|&x| x <= s);
                let part = Tokens {
                    theta: &batch.theta[range.clone()],
                    prox: &batch.prox[range.clone()],
                    behav: &batch.behav[range.clone()],
                    adv: &batch.adv[range.clone()],
                    mask: &batch.mask[range.clone()],
                    seq: &batch.seq[range.clone()],
                };
                let aggregation = Aggregation { mode, loss_scale_factor: None };
                let weights = aggregation.token_weights(&denominator, part.mask, part.seq).unwrap();
                let kept = kept.as_ref().map(|kept| &kept[range]);
                let out = objective.evaluate_kept(&part, &weights, kept).unwrap();
                loss += out.loss;
                dlogp.extend(out.dlogp);
                facts.merge(&out.facts);
            }
            assert_eq!(dlogp, whole.dlogp, "{} {mode:?}", objective.name());
            assert!((loss - whole.loss).abs() <= 1e-12 * whole.loss.abs().max(1.0));
            assert_eq!(facts.tokens, whole.facts.tokens);
            assert_eq!(facts.clip_fraction(), whole.facts.clip_fraction());
            assert_eq!(facts.ratio_max, whole.facts.ratio_max);
        }
    }
}

#[test]
fn rejection_in_the_mask_is_the_rejection_of_the_objective() {
    let objective = objective(r#"{"type":"geo-mask","low":0.8,"high":1.25}"#);
    let mut random = Random(7);
    let mut rejected = 0;
    for _ in 0..50 {
        let batch = Batch::random(&mut random, 30, 1.0);
        let mut filtered = batch.clone();
        filtered.mask =
            objective.accepted(&batch.behav, &batch.prox, &batch.mask, &batch.seq).unwrap().unwrap();
        let again = objective.accepted(&filtered.behav, &filtered.prox, &filtered.mask, &filtered.seq);
        assert_eq!(again.unwrap().unwrap(), filtered.mask);
        let before = batch.evaluate(&objective, LossAggMode::TokenSum);
        let after = filtered.evaluate(&objective, LossAggMode::TokenSum);
        assert_eq!(bits(&before), bits(&after));
        assert_eq!(after.facts.rejected, 0);
        rejected += before.facts.rejected;
    }
    assert!(rejected > 100);
    assert_eq!(paper("acr").accepted(&[0.0], &[1.0], &[true], &[0]), Ok(None));
}

#[test]
fn f32_and_f64_inputs_agree() {
    let batch = Batch::random(&mut Random(8), 50, 1.0);
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
    let (theta, prox) = (narrow(&batch.theta), narrow(&batch.prox));
    let (behav, adv) = (narrow(&batch.behav), narrow(&batch.adv));
    let small =
        Tokens { theta: &theta, prox: &prox, behav: &behav, adv: &adv, mask: &batch.mask, seq: &batch.seq };
    let large = Batch {
        theta: wide(&theta),
        prox: wide(&prox),
        behav: wide(&behav),
        adv: wide(&adv),
        ..batch.clone()
    };
    let acr = paper("acr");
    let weights = batch.weights(MODES[0]);
    assert_eq!(acr.evaluate(&small, &weights).unwrap(), large.evaluate(&acr, MODES[0]));
}

#[test]
fn slices_of_different_lengths_are_refused() {
    let batch = Batch::random(&mut Random(9), 5, 1.0);
    let weights = batch.weights(MODES[0]);
    let short = Tokens { behav: &batch.behav[..4], ..batch.tokens() };
    let error = paper("acr").evaluate(&short, &weights).unwrap_err();
    assert_eq!(error.to_string(), "`behav` has 4 entries, expected 5, as many as `theta`");
    assert!(paper("acr").evaluate(&batch.tokens(), &weights[..4]).is_err());
}

/// UAQ in one dimension. Y = w·x is computed as (w/s)·(s·x), so the gradient of the scaled weight is s times
/// that of w. Under plain SGD the scaled weight moves s² times as far relative to its size; Adam's first step
/// is lr·sign(g) whatever the scale of g, so it moves s times as far: the paper's s² holds for SGD only.
#[test]
fn uaq_gains_s_squared_under_sgd_but_s_under_adam() {
    let (w, g, s, lr) = (0.37, -0.02, 1.5, 1e-3);
    let relative = |w: f64, step: f64| (step / w).abs();
    let sgd = relative(w / s, lr * s * g) / relative(w, lr * g);
    let adam_step = |g: f64| {
        let (m, v) = ((1.0 - 0.9) * g, (1.0 - 0.999) * g * g);
        lr * (m / (1.0 - 0.9)) / ((v / (1.0 - 0.999)).sqrt() + 1e-12)
    };
    let adam = relative(w / s, adam_step(s * g)) / relative(w, adam_step(g));
    assert!((sgd - s * s).abs() < 1e-9);
    assert!((adam - s).abs() < 1e-6);
}
