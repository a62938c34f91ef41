//! The RL step as a whole, on a tiny model: reproducible, and without quantization exactly on-policy.

use crate::common::tiny::{self, steps, trainer};
use qurl_train::rl::{StepRecord, Symptom};

fn run(overrides: &[&str], threads: usize) -> Vec<StepRecord> {
    steps(&mut trainer(overrides, threads), 3)
}

#[test]
fn same_recipe_same_seed_same_records() {
    let first = run(&[], 1);
    assert!(first.iter().all(|r| r.updates > 0 && r.grad_norm > 0.0), "nothing was learned: {first:?}");
    assert_eq!(run(&[], 2), first);
    assert_ne!(run(&["trainer.seed=2"], 2), first);
}

/// Where weights and moments lie, and what is kept of a forward pass, changes no bit.
#[test]
fn one_packed_copy_moments_on_the_host_and_recomputation_have_the_same_records() {
    for (compute, again) in [("f32", "mlp"), ("bf16", "block"), ("bf16", "mlp")] {
        let (compute, again) = (&*format!("trainer.compute={compute}"), format!("trainer.recompute={again}"));
        let more = ["trainer.pack_once=true", "actor.optim.offload=true", compute, &again];
        assert_eq!(run(&more, 2), run(&[compute], 2), "{compute}");
    }
}

#[test]
fn an_unquantized_rollout_is_exactly_on_policy() {
    for format in ["f32", "bf16"] {
        let records = run(&[&format!("rollout.format={format}"), &format!("trainer.compute={format}")], 2);
        for record in &records {
            let mismatch = record.mismatch.expect("tokens");
            assert_eq!((mismatch.kl, mismatch.rho_max, mismatch.rho_min), (0.0, 1.0, 1.0), "{format}");
        }
        // Then all objectives are one.
        for objective in ["naive", "quantized-is", "decoupled", "tis"] {
            let other = format!("algorithm.objective={{ type = \"{objective}\" }}");
            let others =
                run(&[&format!("rollout.format={format}"), &format!("trainer.compute={format}"), &other], 2);
            assert_eq!(others, records, "{objective} in {format}");
        }
    }
    let quantized = run(&[], 2);
    assert!(quantized.iter().all(|r| r.mismatch.expect("tokens").rho_max > 1.0), "int8 must differ");
}

/// With the engine's weights in the trainer's forward pass, what samples is what is trained, to the bit: in
/// every format, with caches of eight bits, invariant scaling, a quantized head and stochastic rounding,
/// through several mini-batches, and where all sequences are scored before the updates.
#[test]
fn a_forward_pass_of_the_rollout_is_exactly_on_policy() {
    let straight = ["trainer.forward=rollout", "trainer.compute=bf16"];
    let cases: [&[&str]; 7] = [
        &["rollout.format=int8", "actor.ppo_epochs=2"],
        &["rollout.format=int8", "rollout.kv_cache=bf16", "rollout.stochastic_rounding=true"],
        &["rollout.format=fp8", "rollout.quantize_head=true", "trainer.recompute=true"],
        &["rollout.format=fp8-block", "rollout.kv_cache=fp8"],
        &["rollout.format=int4", "rollout.uaq=1.5"],
        &["rollout.format=nvfp4", "rollout.quantize_head=true", "algorithm.kl_loss_coef=0.1"],
        &[
            "rollout.format=int8",
            "algorithm.objective={ type = \"sequence-tis\" }",
            "algorithm.kl_in_reward={ kl_ctrl = { type = \"fixed\", kl_coef = 0.01 } }",
        ],
    ];
    for case in cases {
        for record in run(&[&straight, case].concat(), 2) {
            let mismatch = record.mismatch.expect("tokens");
            assert_eq!((mismatch.kl, mismatch.rho_max, mismatch.rho_min), (0.0, 1.0, 1.0), "{case:?}");
            assert_eq!((record.full_kl, mismatch.probs_diff_max), (Some(0.0), 0.0), "{case:?}");
            assert!(record.updates > 0 && record.grad_norm > 0.0, "{case:?}");
            assert!(
                record.step > 1 || record.kl_coef.is_none() || record.reference_kl == Some(0.0),
                "{case:?}"
            );
        }
    }
    // Nothing is left to correct, so all objectives are one; and where nothing is quantized, this forward
    // pass is the other.
    let with = |objective: &str| {
        let objective = format!("algorithm.objective={{ type = \"{objective}\" }}");
        run(&[&straight, [objective.as_str(), "rollout.format=int8"].as_slice()].concat(), 2)
    };
    assert_eq!(with("acr"), with("naive"));
    let plain = ["rollout.format=bf16", "trainer.compute=bf16", "actor.ppo_epochs=2"];
    assert_eq!(run(&[&plain[..], &straight[..1]].concat(), 2), run(&plain, 2));
}

/// Sequences of the first mini-batch get their prox from the update's forward. `geo-mask` rejects sequences
/// before the updates, so it has to score all of them; where it accepts every one it is `naive`, to the bit.
#[test]
fn prox_of_the_first_mini_batch_is_what_the_update_computes() {
    let naive = "algorithm.objective={ type = \"naive\" }";
    let geo_mask = "algorithm.objective={ type = \"geo-mask\", low = 0.0, high = 1e300 }";
    let critic = "critic={ lr = 1e-3, ppo_mini_batch_size = 2, cliprange_value = 0.5 }";
    let cases: [&[&str]; 4] = [
        // Two mini-batches of two prompts each, of which one is scored; int8 rollouts, so that prox matters.
        &["actor.ppo_epochs=2"],
        // One update a step: nothing is scored.
        &["actor.ppo_mini_batch_size=4", "trainer.compute=bf16", "trainer.recompute=true"],
        &["algorithm.adv_estimator={ type = \"gae\" }", critic],
        &["algorithm.kl_loss_coef=0.1", "rollout.temperature=0.7", "trainer.micro_tokens=64"],
    ];
    for case in cases {
        let with = run(&[case, &[naive]].concat(), 2);
        let without = run(&[case, &[geo_mask]].concat(), 2);
        // Every figure of metrics.jsonl, bit for bit, and the weights behind those of the later steps.
        assert_eq!(with, without, "{case:?}");
        assert!(with.iter().all(|r| r.mismatch.expect("tokens").rho_max > 1.0), "{case:?}: {with:?}");
        assert!(with.iter().all(|r| r.full_kl.is_some_and(|kl| kl > 0.0)), "{case:?}");
    }
}

/// What is rejected before the updates is counted, and is no part of what advantages are whitened over. A
/// step that rejects everything changes nothing, not even the critic, and is a symptom.
#[test]
fn rejected_sequences_are_counted_and_without_others_nothing_changes() {
    let gae = "algorithm.adv_estimator={ type = \"gae\" }";
    let critic = "critic={ lr = 1e-3, ppo_mini_batch_size = 2, optim = { weight_decay = 0.1 } }";
    let some = "algorithm.objective={ type = \"geo-mask\", low = 0.0, high = 1.0 }";
    let mut trainer = tiny::trainer(&[gae, critic, some], 2);
    let vocabulary = trainer.start().config.vocab_size;
    let record = trainer.step().expect("a step");
    let batch = trainer.last_batch();
    let kept: Vec<f64> = batch
        .advantages
        .iter()
        .zip(&batch.mask)
        .filter(|(_, kept)| **kept)
        .map(|(a, _)| f64::from(*a))
        .collect();
    let share = (batch.tokens() - kept.len()) as f64 / batch.tokens() as f64;
    assert!(share > 0.0 && share < 1.0, "this test needs sequences on both sides: {share}");
    assert_eq!(record.rejected_fraction, share);
    assert_eq!(Symptom::of(&record, vocabulary), None);
    let mean = kept.iter().sum::<f64>() / kept.len() as f64;
    assert!(mean.abs() < 1e-6, "whitened over what is kept: {mean}");

    let band = "correction = { type = \"geo-mask\", low = 2.0, high = 3.0 }";
    for objective in [
        "{ type = \"geo-mask\", low = 2.0, high = 3.0 }".to_string(),
        format!("{{ type = \"cispo\", {band} }}"),
        format!("{{ type = \"gspo\", {band} }}"),
    ] {
        let objective = format!("algorithm.objective={objective}");
        let mut trainer = tiny::trainer(&[gae, critic, &objective], 2);
        let before = tiny::bits(&trainer.weights().expect("weights"));
        for record in steps(&mut trainer, 2) {
            assert_eq!((record.updates, record.rejected_fraction), (0, 1.0), "{objective}");
            assert_eq!((record.value_loss, record.value_grad_norm), (None, None), "{objective}");
            assert_eq!(Symptom::of(&record, vocabulary), Some(Symptom::AllRejected), "{objective}");
        }
        assert_eq!(tiny::bits(&trainer.weights().expect("weights")), before, "{objective}");
    }
}

/// Corrections that drop nothing train as what they correct, to the bit, through whole steps of several
/// mini-batches; `m2po` sees all of a mini-batch, however it is cut into micro-batches.
#[test]
fn corrections_that_drop_nothing_and_some_that_do() {
    let with = |objective: &str, more: &[&str]| {
        let objective = format!("algorithm.objective={objective}");
        run(&[&[objective.as_str(), "actor.ppo_epochs=2"], more].concat(), 2)
    };
    let same = [
        (r#"{ type = "kpop", phi = 1e6 }"#, r#"{ type = "decoupled" }"#),
        (r#"{ type = "acr", off_policy_mask = 1e6 }"#, r#"{ type = "acr" }"#),
        (
            r#"{ type = "m2po", tau = 1e6 }"#,
            r#"{ type = "naive", clip_ratio_low = 1.0, clip_ratio_high = 1e9 }"#,
        ),
    ];
    for (limit, plain) in same {
        assert_eq!(with(limit, &[]), with(plain, &[]), "{limit}");
    }
    // Other micro-batches lead to other weights, so: the first step, one update in it, and batches of the
    // warm start that are one micro-batch either way.
    let m2po = r#"{ type = "m2po", tau = 1e-7, ratio = "behav" }"#;
    let rejected = |micro_tokens: &str| {
        let one = ["actor.ppo_epochs=1", "actor.ppo_mini_batch_size=4", "sft.batch_size=2", micro_tokens];
        with(m2po, &one)[0].rejected_fraction
    };
    let share = rejected("trainer.micro_tokens=4096");
    assert!(share > 0.1 && share < 1.0, "{share}");
    assert_eq!(rejected("trainer.micro_tokens=64"), share);
}

#[test]
fn ppo_with_a_critic_and_dapo() {
    let critic = "critic={ lr = 1e-3, ppo_mini_batch_size = 2, cliprange_value = 0.5 }";
    let records = run(
        &[
            "algorithm.adv_estimator={ type = \"gae\" }",
            critic,
            "algorithm.kl_in_reward={ kl_ctrl = { type = \"fixed\", kl_coef = 0.01 } }",
        ],
        2,
    );
    assert!(records.iter().all(|r| r.value_loss.is_some_and(f64::is_finite) && r.reference_kl.is_some()));
    assert_eq!(records[0].reference_kl, Some(0.0), "the reference is the actor at first");
    assert!(records[2].reference_kl != Some(0.0));

    let records = run(
        &[
            "algorithm.filter_groups={ max_num_gen_batches = 3 }",
            "algorithm.overlong_buffer={ len = 8 }",
            "algorithm.entropy_coeff=0.01",
            "algorithm.kl_loss_coef=0.001",
            "actor.ppo_epochs=2",
        ],
        2,
    );
    assert!(records.iter().all(|r| (1..=3).contains(&r.gen_batches) && r.groups <= 4));
    for record in &records {
        assert_eq!(record.sampled_groups, record.gen_batches * 4, "all that was sampled is counted");
        assert!(
            (record.groups..=record.sampled_groups).contains(&record.mixed_groups),
            "what was kept is mixed"
        );
    }
}

#[test]
fn stages_change_the_sizes_of_a_step() {
    let records = run(
        &["run.stages=[{ from_step = 2, max_response_length = 6, n = 2 }, { from_step = 3, \
             max_response_length = 9 }]"],
        1,
    );
    // The last stage does not say how many: those of the rollout, not of the stage before.
    for (record, (length, n)) in records.iter().zip([(24, 4), (6, 2), (9, 4)]) {
        let responses = record.response_tokens as f64 / record.response_length;
        assert_eq!(responses.round() as usize, 4 * n, "step {}", record.step);
        assert!(
            record.response_tokens <= 4 * n * length,
            "step {}: {} tokens",
            record.step,
            record.response_tokens
        );
    }
    // A model of twenty supervised steps writes on to the limit now and then.
    assert!(records[1].truncated > 0.0 && records[1].response_length <= 6.0, "{:?}", records[1]);
}

#[test]
fn stochastic_rounding_is_seeded_and_differs_from_the_nearest() {
    let kl = |records: &[StepRecord]| records[0].mismatch.expect("mismatch").k3_kl;
    let nearest = run(&[], 1);
    let stochastic = run(&["rollout.stochastic_rounding=true"], 1);
    assert_eq!(run(&["rollout.stochastic_rounding=true"], 2), stochastic);
    assert!(kl(&stochastic) > kl(&nearest), "{} and {}", kl(&stochastic), kl(&nearest));
}

#[test]
fn kl_over_the_whole_vocabulary_is_there_and_zero_without_quantization() {
    assert!(run(&[], 1).iter().all(|r| r.full_kl.is_some_and(|kl| kl > 0.0 && kl < 0.1)));
    assert!(run(&["rollout.format=f32"], 1).iter().all(|r| r.full_kl == Some(0.0)));
    assert!(run(&["run.full_kl_positions=0"], 1).iter().all(|r| r.full_kl.is_none()));
}

/// With a lag of k, step t trains on rollouts of version t - k; the parts of ρ say what of it is age.
#[test]
fn a_lag_is_fixed_and_its_part_of_the_mismatch_is_told_apart() {
    let lag = |k: u64, more: &[&str]| run(&[&[&*format!("rollout.lag={k}")], more].concat(), 2);
    let plain = run(&[], 2);
    assert!(plain.iter().all(|r| r.lagged.is_none()));
    for k in [1, 2] {
        let records = lag(k, &[]);
        assert_eq!(run(&[&format!("rollout.lag={k}")], 1), records, "threads");
        let mut first = records[0].clone();
        first.lagged = None;
        assert_eq!(first, plain[0], "the first step has nothing older");
        assert_ne!(records[1].mismatch, plain[1].mismatch);
        for (record, step) in records.iter().zip(1u64..) {
            let lagged = record.lagged.expect("a lag");
            assert_eq!(lagged.rollout_version, step.saturating_sub(k).max(1));
            let quantization = lagged.mismatch_quantization.expect("tokens");
            let staleness = lagged.mismatch_staleness.expect("tokens");
            assert!(quantization.rho_max > 1.0 && quantization.rho_max < 1.2, "{quantization:?}");
            let fresh = (staleness.kl, staleness.rho_max, staleness.rho_min) == (0.0, 1.0, 1.0);
            assert_eq!(fresh, step == 1, "step {step}: {staleness:?}");
        }
    }
    // Without quantization the whole mismatch is age.
    for (record, step) in lag(1, &["rollout.format=f32", "run.full_kl_positions=10000"]).iter().zip(1..) {
        let lagged = record.lagged.expect("a lag");
        let quantization = lagged.mismatch_quantization.expect("tokens");
        assert_eq!((quantization.kl, quantization.rho_max, quantization.rho_min), (0.0, 1.0, 1.0));
        let (all, staleness) = (record.mismatch.expect("tokens"), lagged.mismatch_staleness.expect("tokens"));
        assert_eq!(staleness.rho_max > 1.0, step > 1, "step {step}");
        assert!(staleness.tokens <= all.tokens && staleness.rho_max <= all.rho_max, "step {step}");
    }
    let unmeasured = lag(1, &["run.full_kl_positions=0"])[2].lagged.expect("a lag");
    assert_eq!((unmeasured.rollout_version, unmeasured.mismatch_staleness), (2, None));
}

/// A checkpoint holds the older weights that the next steps sample with.
#[test]
fn a_run_with_a_lag_resumes_exactly() {
    let set = ["rollout.lag=2", "run.total_steps=6", "algorithm.filter_groups={ max_num_gen_batches = 3 }"];
    let mut whole = trainer(&set, 2);
    let records = steps(&mut whole, 6);
    for done in [1, 3] {
        let mut first = trainer(&set, 2);
        steps(&mut first, done);
        let snapshot = first.snapshot("recipe").expect("a snapshot");
        let versions: Vec<u64> = snapshot.old.iter().map(|old| old.version).collect();
        assert_eq!(versions, if done == 1 { vec![1] } else { vec![2, 3] });
        let mut without = snapshot.clone();
        without.old.pop();
        let mut second = trainer(&set, 1);
        let refused = second.restore(without).expect_err("a version is missing").to_string();
        assert!(refused.contains("rollout.lag"), "{refused}");
        second.restore(snapshot).expect("restored");
        assert_eq!(steps(&mut second, 6 - done), records[done..], "after {done} steps");
        assert_eq!(second.weights().expect("weights"), whole.weights().expect("weights"));
    }
}

#[test]
fn a_lag_that_never_ends_is_refused() {
    let sections = [tiny::WARM_START, tiny::RL].concat();
    let refused = tiny::parsed(&sections, &["rollout.lag=3"]).expect_err("three steps").to_string();
    assert!(refused.contains("rollout.lag") && refused.contains("run.total_steps = 3"), "{refused}");
}
