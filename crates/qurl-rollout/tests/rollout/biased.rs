//! Biases of logits and minimal lengths: what is sampled is the biased distribution, told with its own
//! log-probs, whatever else is computed.

use crate::common::*;
use qurl_kernels::Format;
use qurl_rollout::{EngineOptions, FinishReason, Group, Request, SampleKey, Sampling};
use std::collections::BTreeMap;

const VOCABULARY: usize = 700;
const EOS: u32 = 5;

/// A request that its bias ends with the first token, unless it may not.
fn eager(min_new: usize) -> Request {
    let (logit_bias, stop_ids) = (vec![(EOS, 100.0)], vec![9, EOS, EOS]);
    let key = SampleKey { seed: 3, step: 0, prompt: min_new as u64 };
    Request { n: 3, logit_bias, stop_ids, min_new, key, ..Request::new(vec![3, 1, 4, 1], 12) }
}

fn lengths(groups: &[Group]) -> Vec<usize> {
    groups.iter().flat_map(|group| group.samples.iter().map(|sample| sample.tokens.len())).collect()
}

#[test]
fn a_model_that_would_end_at_once_ends_when_it_may() {
    let model = Small::new(VOCABULARY, Format::Bf16);
    for ahead in [false, true] {
        let mut engine = model.engine(roomy(), ahead);
        for min_new in [0, 1, 5] {
            let groups = engine.generate(&[eager(min_new)]).expect("generate");
            assert_eq!(lengths(&groups), [min_new + 1; 3]);
            for sample in &groups[0].samples {
                assert_eq!(sample.finish, FinishReason::StopId(EOS));
                let (last, before) = sample.tokens.split_last().expect("tokens");
                assert!(*last == EOS && before.iter().all(|token| ![9, EOS].contains(token)), "{sample:?}");
                assert!(
                    sample.logprobs[min_new] > -1e-6 && sample.logprobs[..min_new].iter().all(|p| *p < 0.0)
                );
            }
        }
        let whole = engine.generate(&[eager(12)]).expect("generate");
        assert_eq!(lengths(&whole), [12; 3]);
        assert_eq!(whole[0].samples[0].finish, FinishReason::Length);
    }
}

/// Every token has a decimal for its text, so that the stop string is there in every token.
#[test]
fn stop_strings_are_not_looked_for_too_early() {
    let mut engine = Small::new(VOCABULARY, Format::Bf16).engine(roomy(), false);
    for (min_new, length) in [(0, 1), (1, 2), (5, 6), (12, 12)] {
        let request =
            Request { min_new, stop_strings: vec![">".to_string()], ..Request::new(vec![3, 1, 4], 12) };
        let groups = engine.generate(&[request]).expect("generate");
        assert_eq!(lengths(&groups), [length], "{min_new}");
    }
}

/// Log-probs are those of the whole distribution with its biases, made anew.
#[test]
fn log_probs_are_of_what_is_sampled() {
    let model = Small::new(VOCABULARY, Format::Bf16);
    let biases: Vec<(u32, f32)> = (0..300)
        .map(|i| ((i * 7) % VOCABULARY as u32, [1.5, -2.0, f32::NEG_INFINITY][i as usize % 3]))
        .chain([(1, 4.0)])
        .filter(|(token, _)| *token != 9)
        .collect::<BTreeMap<_, _>>()
        .into_iter()
        .collect();
    let of: BTreeMap<u32, f32> = biases.iter().copied().collect();
    for temperature in [0.0, 0.7, 1.0] {
        let request = Request {
            sampling: Sampling { temperature, ..Sampling::default() },
            logit_bias: biases.clone(),
            stop_ids: vec![9],
            min_new: 20,
            top_logprobs: VOCABULARY,
            ..Request::new(vec![3, 1, 4, 1, 5], 20)
        };
        let mut engine = model.engine(roomy(), false);
        engine.submit(request.clone()).expect("submitted");
        let (mut tops, mut tokens) = (Vec::new(), Vec::new());
        while engine.unfinished() > 0 {
            tokens.extend(engine.step().expect("a step").to_vec());
            tops.extend(engine.top().iter().map(|top| top.2.clone()));
        }
        assert_eq!((tokens.len(), tops.len()), (20, 20));
        let factor = 1.0 / f64::from(request.sampling.logp_temperature());
        for (emitted, top) in tokens.iter().zip(tops) {
            let biased = |&(token, logp): &(u32, f32)| {
                let bias = if token == 9 { f32::NEG_INFINITY } else { *of.get(&token).unwrap_or(&0.0) };
                (token, f64::from(logp) + factor * f64::from(bias))
            };
            let all: BTreeMap<u32, f64> = top.iter().map(biased).collect();
            let sum: f64 = all.values().map(|x| x.exp()).sum();
            let expected = all[&emitted.token] - sum.ln();
            assert!((f64::from(emitted.logp) - expected).abs() < 1e-4, "{emitted:?} is {expected}");
            if temperature == 0.0 {
                assert!(all.values().all(|x| *x <= all[&emitted.token]), "{emitted:?}");
            }
        }
    }
}

/// The same bits alone, in batches of any size and a step ahead; and rows beside biased ones have their own.
#[test]
fn biases_are_a_rows_own() {
    let model = Small::new(VOCABULARY, Format::Bf16);
    let plain = mixed_requests(VOCABULARY);
    let mut requests = plain.clone();
    requests.extend([0, 1, 4].map(eager));
    for (request, i) in requests.iter_mut().zip(0..) {
        if i % 2 == 1 {
            request.logit_bias.push((7, 3.0));
            request.min_new = request.max_new.min(3);
            request.sampling.top_k = 40 * (i % 4 / 3);
        }
    }
    let alone: Vec<Group> = requests
        .iter()
        .flat_map(|request| {
            model.engine(roomy(), false).generate(std::slice::from_ref(request)).expect("generate")
        })
        .collect();
    for (max_num_seqs, max_num_batched_tokens) in [(64, 256), (3, 7), (10, 33)] {
        let options = EngineOptions { max_num_seqs, max_num_batched_tokens, ..roomy() };
        for ahead in [false, true] {
            let groups = model.engine(options, ahead).generate(&requests).expect("generate");
            assert_same(&format!("{options:?}, ahead: {ahead}"), &alone, &groups);
        }
    }
    let expected = model.engine(roomy(), false).generate(&plain).expect("generate");
    for (i, (own, beside)) in expected.iter().zip(&alone).enumerate().step_by(2) {
        assert_same(&format!("request {i}"), std::slice::from_ref(own), std::slice::from_ref(beside));
    }
}
