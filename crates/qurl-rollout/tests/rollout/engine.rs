//! What an engine promises whoever uses it: the same tokens whatever the batch, greedy is the argmax,
//! frequencies are probabilities, one prefill a prompt, weights only between requests, errors that name the
//! request.

use crate::common::*;
use qurl_kernels::Format;
use qurl_model::{Family, hf};
use qurl_rollout::{
    EngineOptions, FinishReason, FullBatches, Request, RolloutError, SampleKey, Sampling, WeightVersion,
};
use std::path::Path;
use std::sync::Arc;

const VOCABULARY: usize = 700;

#[test]
fn same_seed_same_tokens() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let requests = mixed_requests(VOCABULARY);
    let run = |threads: usize, options: EngineOptions, requests: &[Request]| {
        let cpu = cpu(threads);
        let net = network(&cpu, &config, &params, Format::Bf16, None);
        engine(&cpu, net, options).generate(requests).expect("generate")
    };
    let expected = run(2, roomy(), &requests);
    for (threads, page_size, max_num_seqs, max_num_batched_tokens) in
        [(1, 16, 64, 256), (3, 32, 3, 7), (2, 64, 1, 1), (1, 128, 5, 33)]
    {
        let options = EngineOptions { page_size, max_num_seqs, max_num_batched_tokens, ..roomy() };
        let what = format!("{threads} threads, {options:?}");
        assert_same(&what, &expected, &run(threads, options, &requests));
        let backwards: Vec<_> = requests.iter().rev().cloned().collect();
        let mut groups = run(threads, options, &backwards);
        groups.reverse();
        assert_same(&format!("{what}, backwards"), &expected, &groups);
    }
    // Another seed, step, prompt or sample gives other tokens.
    let one = |key: SampleKey| {
        let request = Request { n: 2, key, ..Request::new(vec![1, 2, 3], 30) };
        run(2, roomy(), &[request]).remove(0).samples.into_iter().map(|s| s.tokens).collect::<Vec<_>>()
    };
    let base = SampleKey { seed: 1, step: 1, prompt: 1 };
    let tokens = one(base);
    assert_ne!(tokens[0], tokens[1]);
    for other in
        [SampleKey { seed: 2, ..base }, SampleKey { step: 2, ..base }, SampleKey { prompt: 2, ..base }]
    {
        assert_ne!(one(other)[0], tokens[0], "{other:?}");
    }
    assert_eq!(one(base), tokens);
}

/// Requests that begin alike compute what they have in common once, and get the samples of requests alone.
#[test]
fn pages_of_common_beginnings_change_no_bit() {
    let (config, params) = model(Family::Qwen3, VOCABULARY, 4);
    let system: Vec<u32> = (0..50).map(|i| (i * 37 + 11) % VOCABULARY as u32).collect();
    let request = |i: u32| {
        let prompt = [&system[..10 + 8 * (i as usize % 6)], &[i, 2 * i, 3]].concat();
        let key = SampleKey { seed: 3, step: 0, prompt: u64::from(i) };
        let (n, prompt_logprobs) = (1 + i as usize % 2, i == 7);
        Request { n, key, prompt_logprobs, top_logprobs: i as usize % 3, ..Request::new(prompt, 20) }
    };
    let requests: Vec<Request> = (0..24).map(request).collect();
    let run = |share_prefixes: bool, options: EngineOptions| {
        let cpu = cpu(2);
        let net = network(&cpu, &config, &params, Format::Int8, None);
        let mut engine = engine(&cpu, net, EngineOptions { share_prefixes, ..options });
        let mut groups = engine.generate(&requests).expect("generate");
        // The conversation continues where a sample ended.
        let next = Request { key: requests[0].key, ..Request::new(Vec::new(), 9) };
        let turn = |group: &qurl_rollout::Group| {
            let prompt = [&group.prompt[..], &group.samples[0].tokens, &[5, 6]].concat();
            Request { prompt, ..next.clone() }
        };
        let turns: Vec<Request> = groups.iter().map(turn).collect();
        groups.extend(engine.generate(&turns).expect("generate"));
        (groups, engine.stats())
    };
    let (expected, alone) = run(false, roomy());
    assert_eq!(alone.shared_tokens, 0);
    for (max_num_seqs, max_num_batched_tokens) in [(64, 256), (3, 17), (1, 40)] {
        let options = EngineOptions { max_num_seqs, max_num_batched_tokens, ..roomy() };
        let (groups, stats) = run(true, options);
        assert_same(&format!("{options:?}"), &expected, &groups);
        assert!(stats.shared_tokens > 24 * 16, "{options:?}: {stats:?}");
        assert!(stats.prefill_tokens < alone.prefill_tokens, "{options:?}: {stats:?}");
    }

    // Other weights: nothing of the old ones is left.
    let cpu = cpu(1);
    let net = network(&cpu, &config, &params, Format::Int8, None);
    let mut served = engine(&cpu, net, EngineOptions { share_prefixes: true, ..roomy() });
    served.generate(&requests).expect("generate");
    let (_, others) = model(Family::Qwen3, VOCABULARY, 5);
    let fresh = network(&cpu, &config, &others, Format::Int8, None);
    served.load(&upload(&cpu, &others), WeightVersion { version: 2, checksum: 2 }).expect("loaded");
    let loaded = served.generate(&requests).expect("generate");
    let expected = engine(&cpu, fresh, roomy()).generate(&requests).expect("generate");
    for (a, b) in loaded.iter().zip(&expected) {
        assert_eq!(a.samples[0].tokens, b.samples[0].tokens);
        assert_eq!(bits(&a.samples[0].logprobs), bits(&b.samples[0].logprobs));
    }

    // Pages that were given back: what they held is gone.
    served.sleep().expect("nothing is in flight");
    served.wake().expect("memory");
    let again = served.generate(&requests).expect("generate");
    for (a, b) in again.iter().zip(&expected) {
        assert_eq!(bits(&a.samples[0].logprobs), bits(&b.samples[0].logprobs));
    }
}

/// The most probable tokens stand beside each sampled one, with the log-probs that scoring gives them.
#[test]
fn top_tokens_are_those_of_scoring() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(2);
    let net = network(&cpu, &config, &params, Format::Bf16, None);
    let sampling = |temperature| Sampling { temperature, ..Sampling::default() };
    let requests: Vec<Request> = [(1.0, 3), (0.0, 1), (0.5, 0), (0.7, 700)]
        .into_iter()
        .map(|(temperature, top_logprobs)| Request {
            n: 2,
            sampling: sampling(temperature),
            top_logprobs,
            prompt_logprobs: true,
            prompt_top_logprobs: top_logprobs.min(2),
            ..Request::new(vec![3, 1, 4, 1, 5], 6)
        })
        .collect();
    for ahead in [false, true] {
        let served = network(&cpu, &config, &params, Format::Bf16, None);
        let mut engine = engine(&cpu, served, roomy());
        engine.set_ahead(ahead);
        for request in &requests {
            engine.submit(request.clone()).expect("submitted");
        }
        let mut tops = std::collections::BTreeMap::<_, Vec<Vec<(u32, f32)>>>::new();
        while engine.unfinished() > 0 {
            engine.step().expect("a step");
            let emitted: Vec<_> = engine.emitted().iter().map(|e| (e.request, e.sample)).collect();
            for (request, sample, top) in engine.top() {
                if emitted.contains(&(*request, *sample)) {
                    tops.entry((*request, *sample)).or_default().push(top.clone());
                }
            }
        }
        for (request, group) in requests.iter().zip(engine.finished()) {
            let temperature = request.sampling.logp_temperature();
            let check = |sequence: &[u32], top: &[(u32, f32)], wanted: usize| {
                assert_eq!(top.len(), wanted);
                assert!(top.is_sorted_by(|a, b| a.1 >= b.1));
                let last = sequence.len();
                for (id, logp) in top.iter().take(3) {
                    let scored = score(&cpu, &net, &[[sequence, &[*id]].concat()], temperature, 64).remove(0);
                    assert_eq!(logp.to_bits(), scored.logp[last - 1].to_bits());
                    let argmax = *scored.argmax.last().expect("a row");
                    assert!(wanted == 0 || top[0].0 == argmax);
                }
            };
            for (i, sample) in group.samples.iter().enumerate() {
                let found = tops.get(&(group.request, i as u32));
                assert_eq!(found.map_or(0, Vec::len), if request.top_logprobs > 0 { 6 } else { 0 });
                for (at, top) in found.into_iter().flatten().enumerate() {
                    let sequence = [&group.prompt[..], &sample.tokens[..at]].concat();
                    check(&sequence, top, request.top_logprobs);
                }
            }
            let wanted = request.prompt_top_logprobs;
            assert_eq!(group.prompt_top.len(), if wanted > 0 { 4 } else { 0 });
            for (at, top) in group.prompt_top.iter().enumerate() {
                check(&group.prompt[..at + 1], top, wanted);
            }
        }
    }
}

#[test]
fn greedy_is_the_argmax_of_scoring() {
    let (config, params) = model(Family::Llama, VOCABULARY, 2);
    let cpu = cpu(2);
    let net = network(&cpu, &config, &params, Format::F32, None);
    let request = Request { sampling: Sampling::greedy(), ..Request::new(vec![3, 1, 4, 1, 5], 12) };
    let mut sequence = request.prompt.clone();
    let mut logprobs = Vec::new();
    for _ in 0..request.max_new {
        let scored = score(&cpu, &net, &[[&sequence[..], &[0]].concat()], 1.0, 64).remove(0);
        sequence.push(*scored.argmax.last().expect("a row"));
        let scored = score(&cpu, &net, &[&sequence], 1.0, 64).remove(0);
        logprobs.push(*scored.logp.last().expect("a row"));
    }
    let group = engine(&cpu, net, roomy()).generate(&[request]).expect("generate").remove(0);
    assert_eq!(group.samples[0].tokens, sequence[5..]);
    assert_eq!(bits(&group.samples[0].logprobs), bits(&logprobs));
    assert_eq!(group.samples[0].finish, FinishReason::Length);
}

#[test]
fn the_real_model_tells_its_story() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/models/stories260K-hf");
    let Ok(text) = std::fs::read_to_string(dir.join("reference.json")) else {
        println!("skipped: {} is not there", dir.display());
        return;
    };
    let reference: serde_json::Value = serde_json::from_str(&text).expect("reference.json");
    let numbers = |key: &str| reference[key].as_array().expect(key).clone();
    let ids: Vec<u32> = numbers("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect();
    let logprobs: Vec<f64> =
        numbers("logprob_of_chosen").iter().map(|x| x.as_f64().expect("a number")).collect();
    let model = hf::load(&dir).expect("model");
    let cpu = cpu(2);
    let options = qurl_model::compute::NetworkOptions::inference(&model.config, Format::F32);
    let net = qurl_model::compute::Network::new(
        &mut queue(&cpu),
        &model.config,
        &upload(&cpu, &model.params),
        options,
    )
    .expect("network");
    let request = Request { n: 2, sampling: Sampling::greedy(), ..Request::new(vec![ids[0]], ids.len() - 1) };
    let group = engine(&cpu, net, roomy()).generate(&[request]).expect("generate").remove(0);
    for sample in &group.samples {
        assert_eq!(sample.tokens, ids[1..]);
        for (got, want) in sample.logprobs.iter().zip(&logprobs) {
            assert!((f64::from(*got) - want).abs() < 1e-4, "{got} {want}");
        }
    }
}

/// Probabilities of the first sampled token, by scoring every token.
fn probabilities(vocabulary: usize, temperature: f32) -> (Served<qurl_kernels::Cpu>, Vec<f64>, Vec<f32>) {
    let (mut config, params) = model(Family::Qwen3, vocabulary, 4);
    config.max_position_embeddings = 64;
    let cpu = cpu(2);
    let net = network(&cpu, &config, &params, Format::F32, None);
    let sequences: Vec<[u32; 3]> = (0..vocabulary as u32).map(|t| [1, 2, t]).collect();
    let scored = score(&cpu, &net, &sequences, temperature, 512);
    let logp: Vec<f32> = scored.iter().map(|s| s.logp[1]).collect();
    let options = EngineOptions { max_num_seqs: 512, ..roomy() };
    (engine(&cpu, net, options), logp.iter().map(|&x| f64::from(x).exp()).collect(), logp)
}

/// How far counts are from expectation, in standard deviations of chi-square.
fn chi_square(counts: &[f64], probabilities: &[f64]) -> f64 {
    let n: f64 = counts.iter().sum();
    let (mut sum, mut cells) = (0.0, 0.0);
    for (&count, &p) in counts.iter().zip(probabilities) {
        if p * n > 4.0 {
            sum += (count - p * n).powi(2) / (p * n);
            cells += 1.0;
        }
    }
    assert!(cells > 2.0);
    (sum - (cells - 1.0)) / (2.0 * (cells - 1.0)).sqrt()
}

#[test]
fn frequencies_are_probabilities() {
    let n = 3000;
    for (vocabulary, buckets) in [(13, 13), (1500, 40)] {
        let (mut engine, probabilities, logp) = probabilities(vocabulary, 0.8);
        assert!((probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-4);
        let mut order: Vec<usize> = (0..vocabulary).collect();
        order.sort_by(|&a, &b| probabilities[b].total_cmp(&probabilities[a]));
        let full = Sampling { temperature: 0.8, ..Sampling::default() };
        let cases = [
            full,
            Sampling { top_k: 6, ..full },
            Sampling { top_p: 0.8, ..full },
            Sampling { min_p: 0.1, ..full },
            Sampling { top_k: 9, top_p: 0.9, min_p: 0.05, ..full },
        ];
        for sampling in cases {
            // What truncation keeps, by its definition.
            let mut kept = order.clone();
            if sampling.top_k > 0 {
                kept.truncate(sampling.top_k as usize);
            }
            let base: f64 = kept.iter().map(|&t| probabilities[t]).sum();
            let mut sum = 0.0;
            kept.retain(|&t| {
                let inside = sampling.top_p >= 1.0 || sum < f64::from(sampling.top_p) * base;
                sum += probabilities[t];
                inside
            });
            kept.retain(|&t| probabilities[t] >= f64::from(sampling.min_p) * probabilities[order[0]]);
            let mass: f64 = kept.iter().map(|&t| probabilities[t]).sum();

            let request = Request { n, sampling, ..Request::new(vec![1, 2], 1) };
            let group = engine.generate(&[request]).expect("generate").remove(0);
            let (mut counts, mut expected) = (vec![0.0; buckets], vec![0.0; buckets]);
            for &token in &kept {
                expected[token * buckets / vocabulary] += probabilities[token] / mass;
            }
            for sample in &group.samples {
                let token = sample.tokens[0] as usize;
                assert!(kept.contains(&token), "{sampling:?}: token {token} should have been cut off");
                counts[token * buckets / vocabulary] += 1.0;
                if sampling.is_full() {
                    assert_eq!(sample.logprobs[0].to_bits(), logp[token].to_bits());
                } else {
                    let want = (probabilities[token] / mass).ln();
                    assert!(
                        (f64::from(sample.logprobs[0]) - want).abs() < 1e-4,
                        "{sampling:?}: log-prob of {token}"
                    );
                }
            }
            let deviations = chi_square(&counts, &expected);
            assert!(
                deviations.abs() < 4.5,
                "{vocabulary} tokens, {sampling:?}: {deviations} standard deviations"
            );
        }
    }
}

#[test]
fn the_samples_of_a_prompt_cost_one_prefill_and_share_memory() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(2);
    let prompt: Vec<u32> = (0..100).collect();
    for max_num_seqs in [1, 3, 16] {
        let net = network(&cpu, &config, &params, Format::Bf16, None);
        let mut engine = engine(&cpu, net, EngineOptions { max_num_seqs, ..roomy() });
        engine.generate(&[Request { n: 16, ..Request::new(prompt.clone(), 10) }]).expect("generate");
        let stats = engine.stats();
        assert_eq!((stats.prefill_tokens, stats.decode_tokens), (99, 160), "{max_num_seqs}");
        // Six full pages are shared; every running sample has one of its own.
        assert_eq!(stats.peak_pages, 6 + max_num_seqs, "{max_num_seqs}");
    }
}

#[test]
fn stops_by_token_text_length_and_context() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(2);
    let net = network(&cpu, &config, &params, Format::F32, None);
    let mut engine = engine(&cpu, net, roomy());
    let free = Request { key: SampleKey { seed: 9, step: 0, prompt: 0 }, ..Request::new(vec![7; 20], 30) };
    let tokens =
        engine.generate(std::slice::from_ref(&free)).expect("generate").remove(0).samples.remove(0).tokens;
    let stop = tokens[11];
    let first = tokens.iter().position(|&t| t == stop).expect("it is there") + 1;
    let stopped = Request { stop_ids: vec![stop], ..free.clone() };
    let sample = engine.generate(&[stopped]).expect("generate").remove(0).samples.remove(0);
    assert_eq!((sample.finish, &sample.tokens[..]), (FinishReason::StopId(stop), &tokens[..first]));

    let with_text =
        Request { stop_strings: vec!["never".into(), format!("<{}><{}>", tokens[4], tokens[5])], ..free };
    assert_eq!(engine.check(&with_text), Err(RolloutError::NoTextDecoder));
    engine.set_text_decoder(Arc::new(|ids| ids.iter().map(|id| format!("<{id}>")).collect()));
    let sample = engine.generate(&[with_text]).expect("generate").remove(0).samples.remove(0);
    assert_eq!((sample.finish, &sample.tokens[..]), (FinishReason::StopString(1), &tokens[..6]));

    let long = Request::new(vec![7; POSITIONS - 5], 30);
    let sample = engine.generate(&[long]).expect("generate").remove(0).samples.remove(0);
    assert_eq!((sample.finish, sample.tokens.len()), (FinishReason::Context, 5));
    assert_eq!((sample.finish.name(), sample.finish.is_truncated()), ("length", true));
}

#[test]
fn requests_arrive_while_others_run() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let requests = mixed_requests(VOCABULARY);
    let cpu = cpu(2);
    let net = || network(&cpu, &config, &params, Format::Bf16, None);
    let expected = engine(&cpu, net(), roomy()).generate(&requests).expect("generate");
    let mut engine = engine(&cpu, net(), EngineOptions { max_num_seqs: 6, ..roomy() });
    let (mut groups, mut streamed) = (Vec::new(), std::collections::BTreeMap::<_, Vec<u32>>::new());
    for request in &requests {
        engine.submit(request.clone()).expect("submit");
        for _ in 0..3 {
            for token in engine.step().expect("step") {
                streamed.entry((token.request, token.sample)).or_default().push(token.token);
            }
        }
        groups.extend(engine.finished());
    }
    // A request in the middle is given up: the others do not notice.
    let dropped = engine.submit(Request { n: 3, ..Request::new(vec![5; 40], 50) }).expect("submit");
    for token in engine.step().expect("step").iter().filter(|t| t.request != dropped) {
        streamed.entry((token.request, token.sample)).or_default().push(token.token);
    }
    engine.cancel(dropped);
    while engine.unfinished() > 0 {
        for token in engine.step().expect("step") {
            streamed.entry((token.request, token.sample)).or_default().push(token.token);
        }
        groups.extend(engine.finished());
    }
    groups.sort_by_key(|g| g.request);
    assert_same("one after the other", &expected, &groups);
    for group in &groups {
        for (sample, i) in group.samples.iter().zip(0..) {
            assert_eq!(streamed[&(group.request, i)], sample.tokens);
        }
    }
    assert_eq!(engine.pages().free(), engine.pages().total());
    assert!(engine.step().expect("nothing to do").is_empty());
}

#[test]
fn weights_change_only_between_requests() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let (_, other) = model(Family::Qwen2, VOCABULARY, 2);
    let cpu = cpu(2);
    let request = Request::new(vec![1, 2, 3], 8);
    let mut engine = engine(&cpu, network(&cpu, &config, &params, Format::Bf16, None), roomy());
    let before = engine.generate(std::slice::from_ref(&request)).expect("generate").remove(0);
    assert_eq!(before.samples[0].weights, WEIGHTS);

    engine.submit(request.clone()).expect("submit");
    engine.step().expect("step");
    let newer = WeightVersion { version: 4, checksum: 1 };
    let busy = engine.load(&upload(&cpu, &other), newer);
    assert_eq!(busy, Err(RolloutError::Busy { unfinished: 1 }));
    while engine.unfinished() > 0 {
        engine.step().expect("step");
    }
    assert_same("the refused load changed nothing", &engine.finished(), std::slice::from_ref(&before));

    engine.load(&upload(&cpu, &other), newer).expect("load");
    let after = engine.generate(std::slice::from_ref(&request)).expect("generate").remove(0);
    assert_eq!(after.require_weights(newer), Ok(()));
    assert_eq!(
        after.require_weights(WEIGHTS),
        Err(RolloutError::WrongWeights { made_with: newer, asked: WEIGHTS })
    );
    assert_ne!(after.samples[0].logprobs, before.samples[0].logprobs);
    let fresh = network(&cpu, &config, &other, Format::Bf16, None);
    let expected = Served::new(&cpu, fresh, newer, roomy()).generate(&[request]);
    assert_same("loaded = packed anew", &[after], &expected.expect("generate"));
}

#[test]
fn a_logit_that_is_not_finite_names_its_request() {
    let (config, mut params) = model(Family::Qwen2, VOCABULARY, 1);
    let healthy = params.clone();
    let width = config.hidden_size;
    params.embed[5 * width] = f32::NAN;
    let (config, mut params) = {
        // A head of its own, so that only prompts with the token are ill.
        let mut config = config;
        config.tie_word_embeddings = false;
        params.head = Some(healthy.embed.clone());
        (config, params)
    };
    let cpu = cpu(2);
    let net = network(&cpu, &config, &params, Format::F32, None);
    let mut engine = engine(&cpu, net, roomy());
    let well = Request { stop_ids: vec![5], ..Request::new((10..30).collect(), 12) };
    let expected = engine.generate(std::slice::from_ref(&well)).expect("generate");

    let key = SampleKey { seed: 1, step: 2, prompt: 3 };
    let ill = engine.submit(Request { key, n: 2, ..Request::new(vec![6, 5, 6], 4) }).expect("submit");
    let fine = engine.submit(well.clone()).expect("submit");
    let mut error = None;
    while engine.unfinished() > 0 {
        if let Err(e) = engine.step() {
            assert!(error.replace(e).is_none(), "one error only");
        }
    }
    let error = error.expect("an error");
    let expected_error =
        RolloutError::BadLogits { request: ill, sample: 0, position: 3, seed: 1, step: 2, prompt: 3 };
    assert_eq!(error, expected_error);
    assert!(error.to_string().contains(&ill.to_string()), "{error}");
    let groups = engine.finished();
    assert_eq!(groups.len(), 1);
    assert_eq!(groups[0].request, fine);
    assert_same("the other request", &expected, &groups);
    assert_same("in pages that held the ill one", &expected, &engine.generate(&[well]).expect("generate"));
    assert_eq!(engine.pages().free(), engine.pages().total());
    // Several that fail in the same step are told of one by one; one that is cancelled is not.
    let ids =
        [(); 4].map(|()| engine.submit(Request { n: 2, ..Request::new(vec![5, 6], 4) }).expect("submit"));
    let [first, second, cancelled, last] = ids;
    let failed = |error: Result<(), RolloutError>| match error {
        Err(RolloutError::BadLogits { request, sample: 0, position: 2, .. }) => request,
        other => panic!("{other:?}"),
    };
    assert_eq!(failed(engine.step().map(|_| ())), first);
    engine.cancel(cancelled);
    assert_eq!(engine.unfinished(), 2);
    assert_eq!(failed(engine.step().map(|_| ())), second);
    assert_eq!(failed(engine.step().map(|_| ())), last);
    assert_eq!((engine.unfinished(), engine.pages().free()), (0, engine.pages().total()));
    params.final_norm[0] = f32::INFINITY;
    engine.load(&upload(&cpu, &params), WEIGHTS).expect("norms are not checked");
    let error = engine.generate(&[Request { sampling: Sampling::greedy(), ..Request::new(vec![1], 2) }]);
    assert!(matches!(error, Err(RolloutError::BadLogits { .. })), "{error:?}");
    assert_eq!(engine.unfinished(), 0);
}

#[test]
fn samples_of_a_request_may_have_limits_of_their_own() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(2);
    let net = || network(&cpu, &config, &params, Format::Bf16, None);
    let request = |max_new_of: Vec<usize>| Request { n: 3, max_new_of, ..Request::new(vec![1, 2, 3], 20) };
    let whole = engine(&cpu, net(), roomy()).generate(&[request(Vec::new())]).expect("generate");
    for ahead in [false, true] {
        let mut engine = engine(&cpu, net(), roomy());
        engine.set_ahead(ahead);
        let cut = engine.generate(&[request(vec![1, 20, 7])]).expect("generate");
        for ((cut, whole), length) in cut[0].samples.iter().zip(&whole[0].samples).zip([1, 20, 7]) {
            assert_eq!((cut.tokens.as_slice(), cut.finish), (&whole.tokens[..length], FinishReason::Length));
        }
        for wrong in [vec![1, 2], vec![1, 2, 3, 4], vec![1, 0, 3], vec![1, 21, 3]] {
            let refused = engine.submit(request(wrong.clone()));
            assert!(matches!(refused, Err(RolloutError::OutOfRange { .. })), "{wrong:?}: {refused:?}");
        }
    }
}

#[test]
fn full_batches_are_clocked_without_the_tail() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(1);
    let net = || network(&cpu, &config, &params, Format::Bf16, None);
    let full = |max_num_seqs, lengths: [usize; 4]| {
        let mut engine = engine(&cpu, net(), EngineOptions { max_num_seqs, ..roomy() });
        let request = Request { n: 4, max_new_of: lengths.to_vec(), ..Request::new(vec![1, 2, 3], 20) };
        engine.generate(&[request]).expect("generate");
        engine.stats().full
    };
    // Four places decode together from the second step to the end of the shortest; the first of these steps
    // has no full one before it.
    let short = full(4, [20, 8, 20, 20]);
    assert!(short.tokens > 0 && short.tokens < 4 * 8 && short.tokens.is_multiple_of(4), "{short:?}");
    assert!(full(4, [20; 4]).tokens > short.tokens);
    assert!(short.tokens_per_s_since(FullBatches::default()).is_some_and(|rate| rate > 0.0));
    assert_eq!(full(5, [20; 4]), FullBatches::default(), "five places are never full");
    assert_eq!(FullBatches::default().tokens_per_s_since(FullBatches::default()), None);
}
