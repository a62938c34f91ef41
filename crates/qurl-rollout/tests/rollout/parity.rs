//! Parity by transitivity: the trainer's log-probs = the engine's prefill = the engine's decode, bit for bit,
//! in every format, for any batch and with preemption; so what differs between trainer and rollout is
//! quantization alone.

use crate::common::*;
use qurl_kernels::{Cpu, Format, KvFormat};
use qurl_model::compute::{Network, NetworkOptions, Recompute, Tape, TapeOptions, Targets, whole_batch};
use qurl_model::{Family, ModelConfig, Params};
use qurl_rollout::{EngineOptions, Group, Request};
use std::sync::Arc;

const VOCABULARY: usize = 1111;

fn sequences(groups: &[Group]) -> Vec<Vec<u32>> {
    groups.iter().flat_map(|g| g.samples.iter().map(|s| [&g.prompt[..], &s.tokens].concat())).collect()
}

/// Behaviour log-probs against the two ways of scoring that the trainer has.
fn assert_scores(what: &str, cpu: &Arc<Cpu>, net: &Network<Cpu>, requests: &[Request], groups: &[Group]) {
    for (request, group) in requests.iter().zip(groups) {
        let group = std::slice::from_ref(group);
        let (sequences, prompt) = (sequences(group), request.prompt.len());
        let temperature = request.sampling.logp_temperature();
        let scored = score(cpu, net, &sequences, temperature, 37);
        let rows = sequences.iter().map(Vec::len).sum();
        let options = TapeOptions { rows, sequences: sequences.len(), recompute: Recompute::None };
        let mut tape = Tape::new(&**cpu, net, options).expect("tape");
        let targets = Targets::of(&sequences, |_, _| true);
        let forward = tape
            .forward(&mut queue(cpu), net, &whole_batch(&sequences), targets, temperature)
            .expect("forward");
        let mut trained = forward.out.logp.as_slice();
        for ((sample, scored), sequence) in group[0].samples.iter().zip(&scored).zip(&sequences) {
            assert_eq!(bits(&sample.logprobs), bits(&scored.logp[prompt - 1..]), "{what}: decode = scoring");
            assert_eq!(bits(&sample.entropies), bits(&scored.entropy[prompt - 1..]), "{what}: entropies");
            let (ours, rest) = trained.split_at(sequence.len() - 1);
            assert_eq!(bits(ours), bits(&scored.logp), "{what}: training = scoring");
            trained = rest;
            if request.prompt_logprobs {
                assert_eq!(
                    bits(&group[0].prompt_logprobs),
                    bits(&scored.logp[..prompt - 1]),
                    "{what}: prompts"
                );
            }
        }
    }
}

/// The finished samples as prompts: what the engine's prefill says about them.
fn assert_prefill(what: &str, cpu: &Arc<Cpu>, net: Network<Cpu>, requests: &[Request], groups: &[Group]) {
    let options = EngineOptions { max_num_batched_tokens: 50, max_num_seqs: 5, ..roomy() };
    let mut engine = engine(cpu, net, options);
    for (request, group) in requests.iter().zip(groups) {
        let prompts = sequences(std::slice::from_ref(group));
        let again = prompts.iter().map(|prompt| Request {
            sampling: request.sampling,
            prompt_logprobs: true,
            ..Request::new(prompt.clone(), 1)
        });
        let scored = engine.generate(&again.collect::<Vec<_>>()).expect("prefill");
        for (sample, scored) in group.samples.iter().zip(&scored) {
            let prefill = &scored.prompt_logprobs[request.prompt.len() - 1..];
            assert_eq!(bits(&sample.logprobs), bits(prefill), "{what}: decode = prefill");
        }
    }
}

fn parity(config: &ModelConfig, params: &Params<Vec<f32>>, format: Format, kv: Option<KvFormat>) {
    let what = format!("{:?} {format} {kv:?} window {:?}", config.family, config.window(0));
    let cpu = cpu(2);
    let pack = || network(&cpu, config, params, format, kv);
    let requests = mixed_requests(VOCABULARY);
    let net = pack();
    let mut large = engine(&cpu, pack(), roomy());
    let groups = large.generate(&requests).expect("generate");
    assert_eq!(large.stats().preemptions, 0, "{what}");
    assert!(
        groups.iter().flat_map(|g| &g.samples).any(|s| s.tokens.len() > 20),
        "{what}: only short samples"
    );
    assert_scores(&what, &cpu, &net, &requests, &groups);
    assert_prefill(&what, &cpu, pack(), &requests, &groups);

    // Pages for little more than the longest sequence: most are preempted on their way.
    let tokens = requests.iter().map(|r| r.prompt.len() + r.max_new - 1).max().unwrap_or(0);
    let options = EngineOptions { max_num_seqs: 10, max_num_batched_tokens: 23, ..roomy() };
    let mut small = engine_of_pages(&cpu, pack(), tokens.div_ceil(16) + 1, options);
    let preempted = small.generate(&requests).expect("generate");
    let stats = small.stats();
    assert!(stats.preemptions > 0 && stats.peak_pages <= small.pages().total(), "{what}: {stats:?}");
    assert_eq!(small.pages().free(), small.pages().total(), "{what}: pages leaked");
    assert_same(&format!("{what}: preempted"), &groups, &preempted);

    if matches!(format, Format::F32 | Format::Bf16) && kv.is_none() {
        let options = NetworkOptions { positions: POSITIONS, ..NetworkOptions::training(config, format) };
        let trainer =
            Network::new(&mut queue(&cpu), config, &upload(&cpu, params), options).expect("network");
        assert_scores(&format!("{what}: trainer"), &cpu, &trainer, &requests, &groups);
    }
}

#[test]
fn every_format_of_one_family() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 5);
    for format in Format::ALL {
        parity(&config, &params, format, None);
    }
}

#[test]
fn every_family() {
    for family in [Family::Qwen3, Family::Llama, Family::Mistral] {
        let (config, params) = model(family, VOCABULARY, 6);
        parity(&config, &params, Format::Bf16, None);
    }
}

#[test]
fn windows_in_every_format() {
    let (config, params) = model(Family::Qwen3, VOCABULARY, 9);
    let config = windowed(config);
    for format in Format::ALL {
        parity(&config, &params, format, None);
    }
    for kv in KvFormat::ALL {
        parity(&config, &params, Format::Bf16, Some(kv));
    }
}

/// What a window does not hide has the bits of a model without one, and what it hides matters.
#[test]
fn a_window_hides_what_lies_before_it() {
    let (config, params) = model(Family::Qwen3, VOCABULARY, 9);
    let cpu = cpu(2);
    let sequence: Vec<u32> = (0..60).map(|i| i * 37 % VOCABULARY as u32).collect();
    let logp = |config: &ModelConfig| {
        let net = network(&cpu, config, &params, Format::F32, None);
        bits(&score(&cpu, &net, std::slice::from_ref(&sequence), 1.0, 64)[0].logp)
    };
    let (everything, window) = (logp(&config), logp(&windowed(config)));
    assert_eq!(everything[..21], window[..21]);
    assert!(everything[21..].iter().zip(&window[21..]).all(|(a, b)| a != b));
}

#[test]
fn a_narrower_cache_than_the_compute_precision() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 7);
    parity(&config, &params, Format::F32, Some(KvFormat::Bf16));
}
