//! Invariant scaling under Adam is a learning rate: "What UAQ does under Adam" of `docs/math.md`, in the
//! trainer itself. With a power of two nothing is rounded by the scaling, so the two runs are the same to the
//! bit.

use crate::common::tiny::{steps, trainer};
use qurl_model::Params;
use qurl_quant::uaq;

/// What the derivation leaves out: the optimizer's eps, clipping by the norm of all gradients, weight decay.
const ALONE: &str = "actor.optim={ eps = 1e-30, clip_grad = 1e9, weight_decay = 0.0";

/// Three steps, with these settings of the optimizer beside those: weights without scaling, and for each step
/// reward, loss, KL and largest ratio of the mismatch.
fn run(format: &str, s: f32, optim: &str) -> (Params<Vec<f32>>, Vec<[f64; 4]>) {
    let (format, scale) = (format!("rollout.format={format}"), format!("rollout.uaq={s}"));
    let overrides = [&format, &scale, "trainer.compute=bf16", "actor.ppo_epochs=2", optim];
    let mut trainer = trainer(&overrides, 2);
    let facts = steps(&mut trainer, 3).into_iter().map(|record| {
        let mismatch = record.mismatch.expect("tokens");
        [record.reward, record.loss, mismatch.kl, mismatch.rho_max]
    });
    let facts = facts.collect();
    let mut weights = trainer.weights().expect("weights");
    let mut config = trainer.start().config.clone();
    uaq::rescale(&mut weights, &mut config, 1.0).expect("scaled by s");
    (weights, facts)
}

fn bits(weights: &Params<Vec<f32>>) -> Vec<Vec<u32>> {
    weights.iter().map(|leaf| leaf.iter().map(|x| x.to_bits()).collect()).collect()
}

#[test]
fn scaling_by_two_is_a_learning_rate_of_two_and_a_half_bit_for_bit() {
    for format in ["int8", "fp8", "nvfp4"] {
        let scaled = run(format, 2.0, &format!("{ALONE} }}"));
        let both = "lr_factor_matrices = 2.0, lr_factor_norms = 0.5";
        let rates = run(format, 1.0, &format!("{ALONE}, {both} }}"));
        assert_eq!(scaled.1, rates.1, "{format}");
        assert!(bits(&scaled.0) == bits(&rates.0), "{format}: other weights");
        // Without the factors, or with one of them, it is another run.
        for other in ["", ", lr_factor_matrices = 2.0", ", lr_factor_norms = 0.5"] {
            let other = run(format, 1.0, &format!("{ALONE}{other} }}"));
            assert!(bits(&scaled.0) != bits(&other.0), "{format}");
        }
    }
    // An eps that is not small beside the gradients tells them apart.
    let large = ALONE.replace("1e-30", "1e-3");
    let scaled = run("int8", 2.0, &format!("{large} }}"));
    let rates = run("int8", 1.0, &format!("{large}, lr_factor_matrices = 2.0, lr_factor_norms = 0.5 }}"));
    assert!(bits(&scaled.0) != bits(&rates.0));
}
