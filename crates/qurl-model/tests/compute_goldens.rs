//! Forward and backward against PyTorch/transformers (see `goldens/README.md`), at every instruction-set
//! level.

mod common;

use common::golden::*;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::types::HeadGradient;
use qurl_kernels::{Cpu, Device, Format};
use qurl_model::ModelConfig;
use qurl_model::compute::{Network, NetworkOptions, Tape, TapeOptions, Targets, score, whole_batch};
use qurl_model::params::{Params, shapes};
use std::sync::Arc;

fn assert_gradients(
    what: &str,
    config: &ModelConfig,
    got: &Params<<Cpu as Device>::Tensor>,
    want: &Params<Vec<f32>>,
) {
    let infos = shapes(config, want.value_head.is_some());
    for ((got, want), info) in got.iter().zip(want.iter()).zip(infos.iter()) {
        assert_eq!(got.len(), want.len(), "{what}: {}", info.name);
        let norm = want.iter().map(|&x| x as f64 * x as f64).sum::<f64>().sqrt();
        let error = got.iter().zip(want).map(|(&a, &b)| (a as f64 - b as f64).powi(2)).sum::<f64>().sqrt();
        assert!(
            error <= 1e-4 * norm,
            "{what}: gradient of {} is off by {error:e} of a norm of {norm:e}",
            info.name
        );
    }
}

#[test]
fn log_probs_and_gradients_of_every_family() {
    for level in Level::available() {
        let cpu = Arc::new(Cpu::new(level, 2));
        let queue = &mut cpu.queue().expect("a queue");
        for name in CASES {
            let case = load(name);
            let params = upload::<Cpu>(queue, &case.params);
            let net = Network::<Cpu>::new(
                queue,
                &case.config,
                &params,
                NetworkOptions::training(&case.config, Format::F32),
            )
            .expect("network");
            for scoring in &case.golden.scorings {
                let what = format!("{name} at {level}, T = {}", scoring.temperature);
                let ids = &case.golden.ids;
                let mut gradients = Vec::new();
                for recompute in [false, true] {
                    let options = TapeOptions { recompute, ..whole(&case.golden) };
                    let mut tape = Tape::new(&*cpu, &net, options).expect("memory");
                    let targets = Targets::of(ids, |_, _| true);
                    let forward = tape
                        .forward(queue, &net, &whole_batch(ids), targets, scoring.temperature)
                        .expect("forward");
                    let dlogp = flatten(&scoring.sequences, |s| s.g.clone());
                    let dentropy = flatten(&scoring.sequences, |s| s.e.clone());
                    let out = &forward.out;
                    let want = flatten(&scoring.sequences, |s| s.logprobs.clone());
                    for (i, (got, want)) in out.logp.iter().zip(&want).enumerate() {
                        let want = want.expect("a log-prob");
                        assert!((got - want).abs() < 1e-4, "{what}: log-prob {i} is {got}, expected {want}");
                    }
                    let want = flatten(&scoring.sequences, |s| s.entropies.clone());
                    for (i, (got, want)) in out.entropy.iter().zip(&want).enumerate() {
                        let want = want.expect("an entropy");
                        assert!((got - want).abs() < 1e-4, "{what}: entropy {i} is {got}, expected {want}");
                    }
                    let want: Vec<u32> =
                        flatten(&scoring.sequences, |s| s.argmax.clone()).into_iter().flatten().collect();
                    assert_eq!(out.argmax, want, "{what}");
                    let loss: f64 = (0..dlogp.len())
                        .map(|i| {
                            dlogp[i] as f64 * out.logp[i] as f64 + dentropy[i] as f64 * out.entropy[i] as f64
                        })
                        .sum();
                    assert!(
                        (loss - scoring.loss).abs() < 1e-4 * (1.0 + scoring.loss.abs()),
                        "{what}: loss {loss}"
                    );

                    let mut grads = zeros_like(&*cpu, &case.params);
                    let gradient = HeadGradient { dlogp: &dlogp, dentropy: &dentropy };
                    tape.backward(queue, &net, forward, gradient, &mut grads);
                    assert_gradients(
                        &what,
                        &case.config,
                        &grads,
                        &golden_gradients(&case, &scoring.gradients),
                    );
                    gradients.push(grads.map(|g| g.iter().map(|x| x.to_bits()).collect::<Vec<_>>()));
                }
                assert!(gradients[0] == gradients[1], "{what}: recomputation changed the gradients");
            }
        }
    }
}

#[test]
fn values_and_gradients_of_a_critic() {
    for level in Level::available() {
        let cpu = Arc::new(Cpu::new(level, 2));
        let queue = &mut cpu.queue().expect("a queue");
        let case = load("critic");
        let critic = case.golden.critic.as_ref().expect("critic");
        let params = upload::<Cpu>(queue, &case.params);
        let net = Network::<Cpu>::new(
            queue,
            &case.config,
            &params,
            NetworkOptions::training(&case.config, Format::F32),
        )
        .expect("network");
        let mut tape = Tape::new(&*cpu, &net, whole(&case.golden)).expect("memory");
        let batch = whole_batch(&case.golden.ids);
        let rows: Vec<u32> = (0..batch.rows() as u32).collect();
        let values = tape.forward_values(queue, &net, &batch, &rows).expect("values");
        // The golden head has a bias, ours has none: it shifts all values alike.
        let want: Vec<f32> = critic.sequences.iter().flat_map(|s| s.values.clone()).collect();
        let bias = want[0] - values[0];
        for (i, (got, want)) in values.iter().zip(&want).enumerate() {
            assert!((got + bias - want).abs() < 1e-4, "value {i} at {level}: {} != {want}", got + bias);
        }
        let c: Vec<f32> = critic.sequences.iter().flat_map(|s| s.c.clone()).collect();
        let mut grads = zeros_like(&*cpu, &case.params);
        tape.backward_values(queue, &net, &rows, &c, &mut grads);
        assert_gradients("critic", &case.config, &grads, &golden_gradients(&case, &critic.gradients));
    }
}

#[test]
fn scores_have_the_same_bits_alone_in_a_batch_in_chunks_and_on_any_threads() {
    for format in Format::ALL {
        for level in Level::available() {
            for name in ["llama3-long", "qwen3"] {
                let case = load(name);
                let ids = &case.golden.ids;
                let bits = |cpu: &Arc<Cpu>, ids: &[Vec<u32>], chunk: usize| -> Vec<Vec<u32>> {
                    let queue = &mut cpu.queue().expect("a queue");
                    let params = upload::<Cpu>(queue, &case.params);
                    let options = NetworkOptions::inference(&case.config, format);
                    let net = Network::<Cpu>::new(queue, &case.config, &params, options).expect("network");
                    let outs = score(queue, &net, ids, 1.0, chunk).expect("score");
                    outs.iter().map(|o| o.logp.iter().map(|x| x.to_bits()).collect()).collect()
                };
                let one = Arc::new(Cpu::new(level, 1));
                let all = bits(&one, ids, 100_000);
                for threads in [1, 2, 3] {
                    let cpu = Arc::new(Cpu::new(level, threads));
                    for chunk in [1, 5, 64, 1000] {
                        assert!(
                            bits(&cpu, ids, chunk) == all,
                            "{name} {format} {level}: chunks of {chunk}, {threads} threads"
                        );
                    }
                    for (i, sequence) in ids.iter().enumerate() {
                        assert!(
                            bits(&cpu, std::slice::from_ref(sequence), 1000)[0] == all[i],
                            "{name} {format} {level}: sequence {i} alone"
                        );
                    }
                }
                // The trainer's forward pass is the same function of the row.
                let queue = &mut one.queue().expect("a queue");
                let params = upload::<Cpu>(queue, &case.params);
                let trainable = matches!(format, Format::F32 | Format::Bf16);
                if trainable {
                    let options = NetworkOptions::training(&case.config, format);
                    let net = Network::<Cpu>::new(queue, &case.config, &params, options).expect("network");
                    let mut tape = Tape::new(&*one, &net, whole(&case.golden)).expect("memory");
                    let targets = Targets::of(ids, |_, _| true);
                    let forward =
                        tape.forward(queue, &net, &whole_batch(ids), targets, 1.0).expect("forward");
                    let trained: Vec<u32> = forward.out.logp.iter().map(|x| x.to_bits()).collect();
                    assert!(trained == all.concat(), "{name} {format} {level}: trainer and scorer differ");
                }
            }
        }
    }
}
