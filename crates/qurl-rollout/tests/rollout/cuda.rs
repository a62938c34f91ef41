//! The engine on a GPU: trainer log-probs = prefill = decode bit for bit where GEMMs do not depend on the
//! batch, running ahead = not running ahead, and the same model on the CPU within the tolerance of its
//! format. Says so and passes where there is no device.

use crate::common::*;
use qurl_kernels::types::{HeadOutput, LossGradient};
use qurl_kernels::{Cuda, Device, DeviceError, Format, KvFormat, Queue};
use qurl_model::compute::{Network, NetworkOptions, Recompute, Tape, TapeOptions, Targets, whole_batch};
use qurl_model::{Family, ModelConfig, Params};
use qurl_rollout::{EngineOptions, Group, Request};
use std::ops::Range;
use std::sync::Arc;

const VOCABULARY: usize = 1111;

fn device() -> Option<Arc<Cuda>> {
    Cuda::open(0).map_err(|reason| eprintln!("skipped: {reason}")).ok().map(Arc::new)
}

fn pack<D: Device>(
    device: &Arc<D>,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    format: Format,
    kv: Option<KvFormat>,
    trained: bool,
) -> Network<D> {
    let params = upload(device, params);
    let mut options = options(config, format);
    options.kv_format = kv.unwrap_or(options.kv_format);
    options.trained = trained;
    let mut queue = queue(device);
    let net = Network::new(&mut queue, config, &params, options).expect("network");
    queue.synchronize().expect("packed");
    net
}

fn sequences(groups: &[Group]) -> Vec<Vec<u32>> {
    groups.iter().flat_map(|g| g.samples.iter().map(|s| [&g.prompt[..], &s.tokens].concat())).collect()
}

/// Log-probs of the samples' tokens, as scoring gives them.
fn scored<D: Device>(device: &Arc<D>, net: &Network<D>, requests: &[Request], groups: &[Group]) -> Vec<f32> {
    let mut all = Vec::new();
    for (request, group) in requests.iter().zip(groups) {
        let sequences = sequences(std::slice::from_ref(group));
        let temperature = request.sampling.logp_temperature();
        for out in score(device, net, &sequences, temperature, 37) {
            all.extend_from_slice(&out.logp[request.prompt.len() - 1..]);
        }
    }
    all
}

/// As the trainer's tape gives them.
fn taped<D: Device>(device: &Arc<D>, net: &Network<D>, requests: &[Request], groups: &[Group]) -> Vec<f32> {
    let mut all = Vec::new();
    for (request, group) in requests.iter().zip(groups) {
        let sequences = sequences(std::slice::from_ref(group));
        let rows = sequences.iter().map(Vec::len).sum();
        let options = TapeOptions { rows, sequences: sequences.len(), recompute: Recompute::None };
        let mut tape = Tape::new(&**device, net, options).expect("tape");
        let targets = Targets::of(&sequences, |_, position| position >= request.prompt.len());
        let temperature = request.sampling.logp_temperature();
        let forward = tape
            .forward(&mut queue(device), net, &whole_batch(&sequences), targets, temperature)
            .expect("forward");
        all.extend(forward.out.logp);
    }
    all
}

/// As the engine's prefill gives them.
fn prefilled<D: Device>(
    device: &Arc<D>,
    net: Network<D>,
    requests: &[Request],
    groups: &[Group],
) -> Vec<f32> {
    let options = EngineOptions { max_num_batched_tokens: 50, max_num_seqs: 5, ..roomy() };
    let mut engine = Served::new(device, net, WEIGHTS, options);
    let mut all = Vec::new();
    for (request, group) in requests.iter().zip(groups) {
        let again = sequences(std::slice::from_ref(group)).into_iter().map(|prompt| Request {
            sampling: request.sampling,
            prompt_logprobs: true,
            ..Request::new(prompt, 1)
        });
        for scored in engine.generate(&again.collect::<Vec<_>>()).expect("prefill") {
            all.extend_from_slice(&scored.prompt_logprobs[request.prompt.len() - 1..]);
        }
    }
    all
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, x| if x > m || x.is_nan() { x } else { m })
}

fn parity(
    cuda: &Arc<Cuda>,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    format: Format,
    kv: Option<KvFormat>,
) {
    let what = format!("{:?} {format} {kv:?} window {:?}", config.family, config.window(0));
    let requests = mixed_requests(VOCABULARY);
    let mut engine = Served::new(cuda, pack(cuda, config, params, format, kv, false), WEIGHTS, roomy());
    let groups = engine.generate(&requests).expect("generate");
    let decoded: Vec<f32> = groups.iter().flat_map(|g| &g.samples).flat_map(|s| s.logprobs.clone()).collect();
    let scored_here = scored(cuda, &pack(cuda, config, params, format, kv, false), &requests, &groups);
    // The trainer's network, where the format can be trained: with other weights in memory, and the same
    // bits.
    let net = pack(cuda, config, params, format, kv, !format.is_quantized());
    let taped_here = taped(cuda, &net, &requests, &groups);
    assert_eq!(
        bits(&taped_here),
        bits(&scored(cuda, &net, &requests, &groups)),
        "{what}: trainer = its scoring"
    );
    let prefilled_here = prefilled(cuda, pack(cuda, config, params, format, kv, false), &requests, &groups);
    let cpu = cpu(2);
    let on_cpu = scored(&cpu, &pack(&cpu, config, params, format, kv, false), &requests, &groups);
    let same = |other: &[f32]| if bits(&decoded) == bits(other) { "same bits" } else { "other bits" };
    println!(
        "{what}: {} tokens; decode = scoring: {} ({:.1e}), = trainer: {} ({:.1e}), = prefill: {} ({:.1e}); \
         CPU within {:.1e}",
        decoded.len(),
        same(&scored_here),
        largest(&decoded, &scored_here),
        same(&taped_here),
        largest(&decoded, &taped_here),
        same(&prefilled_here),
        largest(&decoded, &prefilled_here),
        largest(&decoded, &on_cpu),
    );
    assert!(
        groups.iter().flat_map(|g| &g.samples).any(|s| s.tokens.len() > 20),
        "{what}: only short samples"
    );
    assert_eq!(bits(&decoded), bits(&scored_here), "{what}: decode = scoring");
    assert_eq!(bits(&decoded), bits(&taped_here), "{what}: decode = trainer");
    assert_eq!(bits(&decoded), bits(&prefilled_here), "{what}: decode = prefill");
    // A code may fall to the other side of a rounding where sums differ in their last bits.
    // Hopper's tensor cores keep fewer bits than f32 while they sum fp8 products.
    let tolerance = match (format, kv) {
        (Format::F32, None) => 1e-3,
        (Format::Fp8, _) => 1.0,
        _ => 0.5,
    };
    assert!(largest(&decoded, &on_cpu) < tolerance, "{what}: CPU {}", largest(&decoded, &on_cpu));
}

#[test]
fn every_format() {
    let Some(cuda) = device() else { return };
    let (config, params) = model(Family::Qwen2, VOCABULARY, 5);
    for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8] {
        parity(&cuda, &config, &params, format, None);
    }
    // Heads of 64 and 128 are for the tensor cores.
    for width in [256, 512] {
        let (config, params) = model_of(Family::Qwen2, VOCABULARY, width, 5);
        for format in [Format::Bf16, Format::Int8, Format::Fp8] {
            parity(&cuda, &config, &params, format, None);
        }
        for kv in [KvFormat::Int8, KvFormat::Fp8] {
            parity(&cuda, &config, &params, Format::Int8, Some(kv));
        }
    }
}

/// Layers that see everything beside those that do not; heads of 32 for the plain kernels, of 64 and 128 for
/// the tensor cores.
#[test]
fn windows_in_every_format() {
    let Some(cuda) = device() else { return };
    for width in [128, 256, 512] {
        let (config, params) = model_of(Family::Qwen3, VOCABULARY, width, 9);
        let config = windowed(config);
        for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8] {
            parity(&cuda, &config, &params, format, None);
        }
        for kv in KvFormat::ALL {
            parity(&cuda, &config, &params, Format::Int8, Some(kv));
        }
    }
}

#[test]
fn every_family() {
    let Some(cuda) = device() else { return };
    for family in [Family::Qwen3, Family::Llama, Family::Mistral] {
        let (config, params) = model(family, VOCABULARY, 6);
        parity(&cuda, &config, &params, Format::Int8, None);
    }
}

/// Steps launched before the last one is read, with groups, stops, chunks of prompts, places and pages that
/// run out. Every engine serves its requests three times, so that steps are run directly, recorded and
/// replayed.
#[test]
fn running_ahead_changes_nothing() {
    let Some(cuda) = device() else { return };
    assert!(cuda.info().asynchronous);
    let (config, params) = model_of(Family::Qwen2, VOCABULARY, 256, 5);
    let mut requests = mixed_requests(VOCABULARY);
    requests.push(Request { n: 2, ..Request::new(vec![7; POSITIONS - 5], 30) });
    for format in [Format::F32, Format::Bf16, Format::Int8, Format::Fp8] {
        let serve = |options: EngineOptions, ahead: bool| {
            let net = pack(&cuda, &config, &params, format, None, false);
            let mut engine = Served::new(&cuda, net, WEIGHTS, options);
            engine.set_ahead(ahead);
            let rounds = [(); 3].map(|()| engine.generate(&requests).expect("generate"));
            assert_eq!(engine.pages().free(), engine.pages().total(), "{format} {options:?}: pages leaked");
            let tokens: usize =
                rounds.iter().flatten().flat_map(|g| &g.samples).map(|s| s.tokens.len()).sum();
            let stats = engine.stats();
            assert_eq!(stats.decode_tokens, tokens as u64, "{format} {options:?}");
            println!("{format}, ahead {ahead}, {} pages: {stats:?}", engine.pages().total());
            (rounds, stats)
        };
        let ([expected, ..], _) = serve(roomy(), false);
        let layer_page =
            cuda.kv_page_bytes(pack(&cuda, &config, &params, format, None, false).kv_shape(1, 16));
        let small = EngineOptions {
            kv_bytes: layer_page * config.num_layers * 12,
            max_num_seqs: 10,
            max_num_batched_tokens: 23,
            ..roomy()
        };
        let cases = [
            (roomy(), true),
            (EngineOptions { max_num_seqs: 6, ..roomy() }, true),
            (EngineOptions { max_num_batched_tokens: 9, ..roomy() }, true),
            (small, false),
            (small, true),
        ];
        for (options, ahead) in cases {
            let (rounds, stats) = serve(options, ahead);
            for round in rounds {
                assert_same(&format!("{format} {options:?} ahead {ahead}"), &expected, &round);
            }
            assert!(options != small || stats.preemptions > 0, "{format}: {stats:?}");
        }
    }
}

/// Networks that an engine alternates between have recorded steps of their own, in the same pages.
#[test]
fn a_lent_network_has_its_own_steps() {
    let Some(cuda) = device() else { return };
    let (config, params) = model_of(Family::Qwen2, VOCABULARY, 256, 5);
    let (_, other_params) = model_of(Family::Qwen2, VOCABULARY, 256, 6);
    let requests = mixed_requests(VOCABULARY);
    let own = || pack(&cuda, &config, &params, Format::Int8, None, false);
    let other = || pack(&cuda, &config, &other_params, Format::Bf16, None, false);
    let serve = |net| Served::new(&cuda, net, WEIGHTS, roomy()).generate(&requests).expect("generate");
    let (expected, expected_other) = (serve(own()), serve(other()));
    let (mut engine, mut lent) = (Served::new(&cuda, own(), WEIGHTS, roomy()), other());
    for round in 0..4 {
        let what = format!("round {round}");
        assert_same(&what, &expected, &engine.generate(&requests).expect("generate"));
        let Served { queue, engine } = &mut engine;
        let found = engine.with_network(&mut lent, WEIGHTS, |engine| engine.generate(queue, &requests));
        assert_same(&what, &expected_other, &found.expect("lent").expect("generate"));
    }
}

/// Gradients of a small model on the device and on the CPU: all of them as one vector, and the tensor that is
/// worst.
#[test]
fn gradients_equal_the_cpu() {
    let Some(cuda) = device() else { return };
    for (family, width, format, ran, sharpness, tolerance, windows) in [
        (Family::Qwen2, 128, Format::F32, Format::F32, 1.0, 1e-4, false),
        (Family::Qwen3, 128, Format::F32, Format::F32, 1.0, 1e-4, false),
        (Family::Qwen3, 128, Format::F32, Format::F32, 1.0, 1e-4, true),
        (Family::Qwen2, 128, Format::Bf16, Format::Bf16, 1.0, 1e-2, false),
        // Attention on tensor cores has bf16 operands, on the CPU f32 queries: what that costs grows with the
        // logits, whose deviation is about 4 and 5 here, and 15 and 20 in the sharp models.
        (Family::Qwen2, 256, Format::Bf16, Format::Bf16, 0.5, 1e-2, false),
        (Family::Qwen2, 512, Format::Bf16, Format::Bf16, 0.5, 1e-2, false),
        (Family::Qwen2, 256, Format::Bf16, Format::Bf16, 0.5, 1e-2, true),
        (Family::Qwen2, 512, Format::Bf16, Format::Bf16, 0.5, 1e-2, true),
        (Family::Qwen2, 256, Format::Bf16, Format::Bf16, 1.0, 3e-2, false),
        (Family::Qwen3, 512, Format::Bf16, Format::Bf16, 1.0, 3e-2, false),
        // Straight through quantized weights: a number between two quantized values may go either way here
        // and there.
        (Family::Qwen2, 256, Format::Bf16, Format::Int8, 0.5, 1e-1, false),
        (Family::Qwen2, 512, Format::Bf16, Format::Fp8, 0.5, 1e-1, true),
        (Family::Qwen3, 512, Format::Bf16, Format::Int8, 0.5, 1e-1, false),
    ] {
        let (config, mut params) = model_of(family, VOCABULARY, width, 8);
        let config = if windows { windowed(config) } else { config };
        for (leaf, info) in params.iter_mut().zip(qurl_model::params::shapes(&config, false).iter()) {
            let factor = if info.rows > 1 { sharpness } else { 1.0 };
            leaf.iter_mut().for_each(|x| *x *= factor);
        }
        let got = gradients(&cuda, &config, &params, format, ran);
        let want = gradients(&cpu(2), &config, &params, format, ran);
        let (mut off, mut size, mut worst) = (0.0, 0.0, (0.0, String::new()));
        for ((got, want), info) in
            got.iter().zip(want.iter()).zip(qurl_model::params::shapes(&config, false).iter())
        {
            let squares: f64 = want.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
            let error: f64 = got.iter().zip(want).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
            (off, size) = (off + error, size + squares);
            let relative = (error / squares.max(1e-24)).sqrt();
            if relative > worst.0 || relative.is_nan() {
                worst = (relative, info.name.clone());
            }
        }
        let whole = (off / size).sqrt();
        let (of_worst, name) = worst;
        println!(
            "{family:?} of width {width}, {ran} through {format}, matrices x {sharpness}: gradient within {whole:.1e} of \
             the CPU's, relative; worst tensor {name}: {of_worst:.1e}"
        );
        assert!(
            whole < tolerance && of_worst < 2.0 * tolerance,
            "{family:?} {width} {format}: {whole}, {name} {of_worst}"
        );
    }
}

fn gradients<D: Device>(
    device: &Arc<D>,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    format: Format,
    ran: Format,
) -> Params<Vec<f32>> {
    let mut queue = queue(device);
    let uploaded = upload(device, params);
    let mut grads = params.as_ref().map(|p| device.zeros(p.len()).expect("memory"));
    let options = NetworkOptions { positions: POSITIONS, ..NetworkOptions::training(config, format) };
    let net = Network::new(&mut queue, config, &uploaded, options).expect("network");
    // The network that runs forward: a quantized one stores keys and values in eight bits.
    let kv_format = if ran == Format::Int8 { KvFormat::Int8 } else { options.kv_format };
    let options = NetworkOptions { format: ran, kv_format, trained: false, ..options };
    let other = Network::new(&mut queue, config, &uploaded, options).expect("network");
    let ran = if ran == format { &net } else { &other };
    let sequences: Vec<Vec<u32>> = [40usize, 97, 3]
        .iter()
        .map(|&n| (0..n).map(|i| ((i * 37 + n) % VOCABULARY) as u32).collect())
        .collect();
    for recompute in [Recompute::None, Recompute::Block] {
        let options = TapeOptions { rows: 140, sequences: 3, recompute };
        let mut tape = Tape::with_kv(&**device, &net, kv_format, options).expect("tape");
        let targets = Targets::of(&sequences, |_, _| true);
        let batch = whole_batch(&sequences);
        let gradient = |targets: Range<usize>| LossGradient {
            dentropy: vec![0.01; targets.len()],
            dlogp: targets.map(|i| ((i * 7 % 13) as f32 - 6.0) / 50.0).collect(),
        };
        // The head in two passes, and in one.
        if recompute == Recompute::Block {
            let loss = |targets: Range<usize>, _: &HeadOutput| Ok::<_, DeviceError>(gradient(targets));
            tape.train_straight(&mut queue, Some(ran), &net, &batch, &targets, 1.0, loss, &mut grads)
                .expect("gradients");
        } else {
            let scored = tape.score(&mut queue, ran, &batch, &targets, 1.0).expect("scores");
            let forward = tape.forward(&mut queue, ran, &batch, targets, 1.0).expect("forward");
            assert_eq!(scored, forward.out, "what is kept changes no bit");
            let gradient = gradient(0..forward.out.logp.len());
            tape.backward_straight(&mut queue, Some(ran), &net, forward, gradient.borrowed(), &mut grads)
                .expect("backward");
        }
    }
    grads.as_ref().map(|g| queue.read(g, D::len(g)).expect("memory"))
}
