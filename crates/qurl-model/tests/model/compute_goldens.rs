//! Forward and backward against PyTorch/transformers (see `goldens/README.md`), at every instruction-set
//! level.

use crate::common::golden::*;
use qurl_kernels::cpu::level::Level;
use qurl_kernels::types::HeadGradient;
use qurl_kernels::{Cpu, Device, Format, KvFormat};
use qurl_model::compute::{
    Base, BaseLeaves, Network, NetworkOptions, Recompute, Tape, TapeOptions, Targets, score, whole_batch,
};
use qurl_model::lora::Modules;
use qurl_model::params::{Params, shapes};
use qurl_model::{Lora, ModelConfig, ParamInfo};
use std::sync::Arc;

/// How far a gradient may be off, as a share of its norm.
const TOLERANCE: f64 = 1e-4;

fn assert_gradients(
    what: &str,
    config: &ModelConfig,
    got: &Params<<Cpu as Device>::Tensor>,
    want: &Params<Vec<f32>>,
    tolerance: f64,
) {
    assert_gradients_of(what, &shapes(config, want.value_head.is_some()), got, want, tolerance);
}

fn assert_gradients_of(
    what: &str,
    infos: &Params<ParamInfo>,
    got: &Params<<Cpu as Device>::Tensor>,
    want: &Params<Vec<f32>>,
    tolerance: f64,
) {
    for ((got, want), info) in got.iter().zip(want.iter()).zip(infos.iter()) {
        assert_eq!(got.len(), want.len(), "{what}: {}", info.name);
        let norm = want.iter().map(|&x| x as f64 * x as f64).sum::<f64>().sqrt();
        let error = got.iter().zip(want).map(|(&a, &b)| (a as f64 - b as f64).powi(2)).sum::<f64>().sqrt();
        assert!(
            error <= tolerance * norm,
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
            let options = NetworkOptions::training(&case.config, Format::F32);
            let [twice, once] = [false, true].map(|pack_once| {
                let options = NetworkOptions { pack_once, ..options };
                Network::<Cpu>::new(queue, &case.config, &params, options).expect("network")
            });
            for scoring in &case.golden.scorings {
                let what = format!("{name} at {level}, T = {}", scoring.temperature);
                let ids = &case.golden.ids;
                let mut gradients = Vec::new();
                let choices = Recompute::ALL.map(|recompute| (recompute, &twice));
                for (recompute, net) in choices.into_iter().chain([(Recompute::None, &once)]) {
                    let options = TapeOptions { recompute, ..whole(&case.golden) };
                    let mut tape = Tape::new(&*cpu, net, options).expect("memory");
                    let targets = Targets::of(ids, |_, _| true);
                    let forward = tape
                        .forward(queue, net, &whole_batch(ids), targets, scoring.temperature)
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
                    tape.backward(queue, net, forward, gradient, &mut grads).expect("backward");
                    assert_gradients(
                        &what,
                        &case.config,
                        &grads,
                        &golden_gradients(&case, &scoring.gradients),
                        TOLERANCE,
                    );
                    gradients.push(grads.map(|g| g.iter().map(|x| x.to_bits()).collect::<Vec<_>>()));
                }
                for (recompute, of) in Recompute::ALL.iter().zip(&gradients) {
                    assert!(*of == gradients[0], "{what}: recompute = {recompute} changed the gradients");
                }
                assert!(gradients[0] == gradients[3], "{what}: one packed copy changed the gradients");
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
        tape.backward_values(queue, &net, &rows, &c, &mut grads).expect("backward");
        let want = golden_gradients(&case, &critic.gradients);
        assert_gradients("critic", &case.config, &grads, &want, TOLERANCE);
    }
}

/// Models, formats of weights and activations, formats of keys and values.
const STRAIGHT: [(&str, Format, KvFormat); 5] = [
    ("qwen2", Format::Int8, KvFormat::Int8),
    ("qwen3", Format::Fp8, KvFormat::Fp8),
    ("qwen3", Format::Fp8, KvFormat::Bf16),
    ("llama3", Format::Int4, KvFormat::Bf16),
    ("qwen2-untied", Format::Nvfp4, KvFormat::Bf16),
];

#[derive(serde::Deserialize)]
struct StraightThrough {
    sequences: Vec<StraightSequence>,
}

#[derive(serde::Deserialize)]
struct StraightSequence {
    ids: Vec<u32>,
    /// dL/dlogp of all tokens but the first, and their log-probs.
    g: Vec<f32>,
    logprobs: Vec<f32>,
}

/// A forward pass of quantized weights and a backward pass through full ones against PyTorch's
/// straight-through graph of the same roundings. No number of these sequences is so close to the middle
/// between two values of eight bits that sums in another order take it to the other one, so the tolerance is
/// that of the other goldens. Activations in bf16 may be rounded the other way here and there, by 1/256. The
/// gradients without rounding are 1e-2 to 8e-1 of their norm away.
#[test]
fn gradients_straight_through_quantized_weights() {
    for (name, format, kv_format) in STRAIGHT {
        let (case, file) = (load(name), format!("straight_through-{format}-{}", kv_format.name()));
        let text = std::fs::read_to_string(case.dir.join(format!("{file}.json"))).expect("golden");
        let golden: StraightThrough = serde_json::from_str(&text).expect("golden");
        let want = golden_gradients(&case, &format!("{file}.safetensors"));
        let ids: Vec<Vec<u32>> = golden.sequences.iter().map(|s| s.ids.clone()).collect();
        let dlogp: Vec<f32> = golden.sequences.iter().flat_map(|s| s.g.clone()).collect();
        let rows = ids.iter().map(Vec::len).sum();
        let (of_logp, of_gradients) = match format {
            Format::Int8 | Format::Fp8 => (1e-4, TOLERANCE),
            _ => (3e-3, 5e-3),
        };
        for level in Level::available() {
            let cpu = Arc::new(Cpu::new(level, 2));
            let queue = &mut cpu.queue().expect("a queue");
            let params = upload::<Cpu>(queue, &case.params);
            let full = NetworkOptions::training(&case.config, Format::F32);
            let net = Network::<Cpu>::new(queue, &case.config, &params, full).expect("network");
            let options = NetworkOptions { format, kv_format, trained: false, ..full };
            let ran = Network::<Cpu>::new(queue, &case.config, &params, options).expect("network");
            let what = format!("{name} in {format}, keys in {kv_format:?}, at {level}");
            let mut bits = Vec::new();
            for recompute in Recompute::ALL {
                let options = TapeOptions { rows, sequences: ids.len(), recompute };
                let mut tape = Tape::with_kv(&*cpu, &net, kv_format, options).expect("memory");
                let targets = || Targets::of(&ids, |_, _| true);
                let scored = tape.score(queue, &ran, &whole_batch(&ids), &targets(), 1.0).expect("scores");
                let forward = tape.forward(queue, &ran, &whole_batch(&ids), targets(), 1.0).expect("forward");
                assert_eq!(scored, forward.out, "{what}");
                let logprobs = golden.sequences.iter().flat_map(|s| &s.logprobs);
                for (got, want) in forward.out.logp.iter().zip(logprobs) {
                    assert!((got - want).abs() < of_logp, "{what}: {got} is not {want}");
                }
                let gradient = HeadGradient { dlogp: &dlogp, dentropy: &[] };
                let mut grads = zeros_like(&*cpu, &case.params);
                tape.backward_straight(queue, Some(&ran), &net, forward, gradient, &mut grads)
                    .expect("backward");
                assert_gradients(&what, &case.config, &grads, &want, of_gradients);
                bits.push(grads.map(|g| g.iter().map(|x| x.to_bits()).collect::<Vec<_>>()));
            }
            assert!(bits.iter().all(|of| *of == bits[0]), "{what}: recomputation changed the gradients");
        }
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

/// A network with adapters beside a frozen base, and another one for inference that shares the base.
fn adapted(
    queue: &mut <Cpu as Device>::Queue,
    case: &Case,
    (lora, adapters): (Lora, &Params<Vec<f32>>),
    format: Format,
) -> [Network<Cpu>; 2] {
    let options = NetworkOptions { lora: Some(lora), ..NetworkOptions::training(&case.config, format) };
    let mut base = BaseLeaves::new(Base::Host(&case.params));
    let mut net = Network::<Cpu>::of_leaves(queue, &case.config, false, &mut base, options).expect("network");
    let options = NetworkOptions { trained: false, ..options };
    let mut sharing = net.sharing(queue, options).expect("network");
    let adapters = upload::<Cpu>(queue, adapters);
    net.refresh(queue, &adapters).expect("adapters");
    sharing.refresh(queue, &adapters).expect("adapters");
    [net, sharing]
}

#[test]
fn log_probs_and_gradients_of_adapters() {
    for level in Level::available() {
        let cpu = Arc::new(Cpu::new(level, 2));
        let queue = &mut cpu.queue().expect("a queue");
        for name in ADAPTED {
            let (case, adapter) = load_adapted(name);
            let lora = adapter.lora;
            let [net, sharing] = adapted(queue, &case, (lora, &adapter.params), Format::F32);
            let ids = &case.golden.ids;
            for scoring in &case.golden.scorings {
                let what = format!("adapters of {name} at {level}, T = {}", scoring.temperature);
                let mut tape = Tape::new(&*cpu, &net, whole(&case.golden)).expect("memory");
                let targets = Targets::of(ids, |_, _| true);
                let forward = tape
                    .forward(queue, &net, &whole_batch(ids), targets, scoring.temperature)
                    .expect("forward");
                let want = flatten(&scoring.sequences, |s| s.logprobs.clone());
                for (i, (got, want)) in forward.out.logp.iter().zip(&want).enumerate() {
                    let want = want.expect("a log-prob");
                    assert!((got - want).abs() < 1e-4, "{what}: log-prob {i} is {got}, expected {want}");
                }
                let dlogp = flatten(&scoring.sequences, |s| s.g.clone());
                let dentropy = flatten(&scoring.sequences, |s| s.e.clone());
                let mut grads = zeros_like(&*cpu, &adapter.params);
                let gradient = HeadGradient { dlogp: &dlogp, dentropy: &dentropy };
                tape.backward(queue, &net, forward, gradient, &mut grads).expect("backward");
                let want = gradients_of(&case, &scoring.gradients, lora.names(&case.config));
                assert_gradients_of(&what, &lora.shapes(&case.config), &grads, &want, TOLERANCE);
            }
            // Merged into the weights they give the same log-probs.
            let mut merged = case.params.clone();
            lora.merge(&case.config, &adapter.params, &mut merged);
            let merged = upload::<Cpu>(queue, &merged);
            let options = NetworkOptions::inference(&case.config, Format::F32);
            let merged = Network::new(queue, &case.config, &merged, options).expect("network");
            let [one, other] =
                [&merged, &sharing].map(|net| score(queue, net, ids, 1.0, 1000).expect("score"));
            for (one, other) in one.iter().zip(&other).flat_map(|(a, b)| a.logp.iter().zip(&b.logp)) {
                assert!((one - other).abs() < 1e-5, "{name} at {level}: merged {one}, unmerged {other}");
            }
        }
    }
}

#[test]
fn adapters_have_the_same_bits_in_training_and_inference_beside_a_base_in_any_format() {
    for format in Format::ALL {
        for level in Level::available() {
            let case = load("qwen3");
            let lora = Lora { rank: 5, alpha: 7.0, rslora: false, targets: Modules::ALL };
            let mut adapters = lora.init(&case.config, 1);
            let random = qurl_model::rng::CounterRng::new(&[7]);
            let leaves = adapters.iter_mut().flatten().enumerate();
            leaves.for_each(|(i, x)| *x += 0.1 * random.normal_at(i as u64) as f32);
            let ids = &case.golden.ids;
            let one = Arc::new(Cpu::new(level, 1));
            let queue = &mut one.queue().expect("a queue");
            let [net, sharing] = adapted(queue, &case, (lora, &adapters), format);
            let bits = |logp: &[f32]| logp.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let mut tape = Tape::new(&*one, &net, whole(&case.golden)).expect("memory");
            let targets = || Targets::of(ids, |_, _| true);
            let forward = tape.forward(queue, &net, &whole_batch(ids), targets(), 1.0).expect("forward");
            let trained = bits(&forward.out.logp);
            let scored = tape.score(queue, &net, &whole_batch(ids), &targets(), 1.0).expect("scores");
            assert!(trained == bits(&scored.logp), "{format} {level}: training and scoring differ");
            for threads in [1, 3] {
                let queue = &mut Arc::new(Cpu::new(level, threads)).queue().expect("a queue");
                for chunk in [1, 7, 1000] {
                    let outs = score(queue, &sharing, ids, 1.0, chunk).expect("score");
                    let logp: Vec<f32> = outs.iter().flat_map(|out| out.logp.clone()).collect();
                    assert!(trained == bits(&logp), "{format} {level}: chunks of {chunk}, {threads} threads");
                }
            }
            // They do something, and the base alone is the reference that shares it.
            let options = NetworkOptions { lora: None, ..*sharing.options() };
            let reference = sharing.sharing(queue, options).expect("network");
            let weights = upload::<Cpu>(queue, &case.params);
            let alone = Network::new(queue, &case.config, &weights, options).expect("network");
            let [shared, own] =
                [&reference, &alone].map(|net| score(queue, net, ids, 1.0, 1000).expect("score"));
            assert!(shared[0].logp == own[0].logp, "{format} {level}: the reference is not the base");
            assert!(bits(&shared[0].logp) != trained[..shared[0].logp.len()], "{format} {level}: no update");
            // Gradients of all adapters, of nothing else, and finite.
            let mut grads = zeros_like(&*one, &adapters);
            let dlogp = vec![1.0; trained.len()];
            let forward = tape.forward(queue, &net, &whole_batch(ids), targets(), 1.0).expect("forward");
            let gradient = HeadGradient { dlogp: &dlogp, dentropy: &[] };
            tape.backward(queue, &net, forward, gradient, &mut grads).expect("backward");
            for (grad, info) in grads.iter().zip(lora.shapes(&case.config).iter()) {
                let fine = grad.iter().all(|x| x.is_finite()) && grad.iter().any(|x| *x != 0.0);
                assert!(grad.is_empty() || fine, "{format} {level}: gradient of {}", info.name);
            }
        }
    }
}
