//! Launching a step before the tokens of the last one are read changes nothing but the time: the same tokens,
//! log-probs, entropies and reasons to end. Here on the CPU, which gains nothing by it; `cuda.rs` has the
//! same on a device.

use crate::common::*;
use qurl_kernels::{Cpu, Format};
use qurl_rollout::{EngineOptions, FinishReason, Group, Request, RolloutError};
use std::collections::BTreeMap;
use std::sync::Arc;

const VOCABULARY: usize = 700;

/// Stop ids, stop strings, lengths, groups, prompts whose log-probs are wanted.
fn requests() -> Vec<Request> {
    let mut requests = mixed_requests(VOCABULARY);
    for (request, i) in requests.iter_mut().zip(0..) {
        if i % 3 == 1 {
            request.stop_ids.clear();
            request.stop_strings = vec!["never".into(), format!("{}>", i % 10), "77".into()];
        }
    }
    requests.push(Request { n: 2, ..Request::new(vec![7; POSITIONS - 5], 30) });
    requests
}

fn taken(groups: &[Group]) -> u64 {
    groups.iter().flat_map(|g| &g.samples).map(|s| s.tokens.len() as u64).sum()
}

#[test]
fn the_same_groups_whatever_the_size_of_a_step() {
    let model = Small::new(VOCABULARY, Format::Int8);
    let requests = requests();
    let expected = model.engine(roomy(), false).generate(&requests).expect("generate");
    let reasons: Vec<FinishReason> =
        expected.iter().flat_map(|g| g.samples.iter().map(|s| s.finish)).collect();
    for wanted in ["StopId", "StopString", "Length", "Context"] {
        assert!(
            reasons.iter().any(|reason| format!("{reason:?}").starts_with(wanted)),
            "{wanted}: {reasons:?}"
        );
    }
    for (max_num_seqs, max_num_batched_tokens) in [(64, 256), (6, 256), (64, 9), (3, 7), (1, 1), (10, 33)] {
        let options = EngineOptions { max_num_seqs, max_num_batched_tokens, ..roomy() };
        let [mut lockstep, mut ahead] = [false, true].map(|ahead| model.engine(options, ahead));
        let what = format!("{options:?}");
        assert_same(&what, &expected, &lockstep.generate(&requests).expect("generate"));
        // Twice: nothing may be left over from the first time.
        for round in 1..=2 {
            assert_same(&format!("{what} ahead"), &expected, &ahead.generate(&requests).expect("generate"));
            assert_eq!(
                ahead.stats().decode_tokens,
                round * taken(&expected),
                "{what}: void rows are not counted"
            );
            assert_eq!(ahead.pages().free(), ahead.pages().total(), "{what}: pages leaked");
        }
        assert_eq!(ahead.stats().prefill_tokens, 2 * lockstep.stats().prefill_tokens, "{what}");
        assert!(ahead.stats().steps >= 2 * lockstep.stats().steps, "{what}");
    }
}

#[test]
fn the_same_groups_when_pages_run_out() {
    let model = Small::new(VOCABULARY, Format::Int8);
    let requests = requests();
    let expected = model.engine(roomy(), false).generate(&requests).expect("generate");
    for pages in [10, 12, 15] {
        let options = EngineOptions { max_num_seqs: 10, max_num_batched_tokens: 23, ..roomy() };
        let net = network(&model.cpu, &model.config, &model.params, Format::Int8, None);
        let mut small = engine_of_pages(&model.cpu, net, pages, options);
        small.set_text_decoder(Arc::new(|ids| ids.iter().map(|id| format!("<{id}>")).collect()));
        small.set_ahead(true);
        assert_same(&format!("{pages} pages"), &expected, &small.generate(&requests).expect("generate"));
        let stats = small.stats();
        assert!(stats.preemptions > 0 && stats.peak_pages <= pages, "{stats:?}");
        assert_eq!(small.pages().free(), pages, "pages leaked");
    }
}

#[test]
fn requests_come_and_go_while_a_step_is_in_flight() {
    let model = Small::new(VOCABULARY, Format::Int8);
    let requests = requests();
    let expected = model.engine(roomy(), false).generate(&requests).expect("generate");
    let mut engine = model.engine(EngineOptions { max_num_seqs: 6, ..roomy() }, true);
    let (mut groups, mut streamed) = (Vec::new(), BTreeMap::<_, Vec<u32>>::new());
    let mut step = |engine: &mut Served<Cpu>| {
        for token in engine.step().expect("step") {
            streamed.entry((token.request, token.sample)).or_default().push(token.token);
        }
        groups.extend(engine.finished());
    };
    let mut dropped = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        engine.submit(request.clone()).expect("submit");
        for _ in 0..3 {
            step(&mut engine);
        }
        // In the middle of its prompt, or of its tokens; the engine may change its mind about running ahead,
        // too.
        let given_up = engine.submit(Request { n: 3, ..Request::new(vec![5; 40], 50) }).expect("submit");
        dropped.push(given_up);
        for _ in 0..i {
            step(&mut engine);
        }
        engine.set_ahead(i % 4 != 2);
        engine.cancel(given_up);
    }
    while engine.unfinished() > 0 {
        step(&mut engine);
    }
    assert!(engine.step().expect("nothing to do").is_empty());
    assert_eq!(engine.pages().free(), engine.pages().total());
    groups.retain(|g: &Group| !dropped.contains(&g.request));
    groups.sort_by_key(|g| g.request);
    assert_same("one after the other", &expected, &groups);
    for group in &groups {
        for (sample, i) in group.samples.iter().zip(0..) {
            assert_eq!(streamed[&(group.request, i)], sample.tokens);
        }
    }
    // All given up with a step in flight: nothing keeps weights from being changed, and nothing is left of
    // it.
    let last = engine.submit(requests[5].clone()).expect("submit");
    engine.step().expect("step");
    assert!(engine.load(&upload(&model.cpu, &model.params), WEIGHTS).is_err(), "busy");
    engine.cancel(last);
    engine.load(&upload(&model.cpu, &model.params), WEIGHTS).expect("load");
    assert_same("after a load", &expected, &engine.generate(&requests).expect("generate"));
}

#[test]
fn a_logit_that_is_not_finite_ends_its_request_alone() {
    let mut model = Small::new(VOCABULARY, Format::Int8);
    // A head of its own, so that only sequences with the token are ill, which some sample sooner or later.
    let ill_token = 5;
    model.config.tie_word_embeddings = false;
    model.params.head = Some(model.params.embed.clone());
    model.params.embed[ill_token * model.config.hidden_size] = f32::NAN;
    let run = |ahead: bool| {
        let net = network(&model.cpu, &model.config, &model.params, Format::F32, None);
        let mut engine = engine(&model.cpu, net, EngineOptions { max_num_seqs: 9, ..roomy() });
        engine.set_ahead(ahead);
        for prompt in 0..120 {
            let key = qurl_rollout::SampleKey { seed: 3, step: 0, prompt };
            engine
                .submit(Request { key, n: 2, ..Request::new(vec![1 + prompt as u32, 9], 30) })
                .expect("submit");
        }
        let mut errors = BTreeMap::new();
        while engine.unfinished() > 0 {
            match engine.step().map(|_| ()) {
                Ok(()) => {}
                Err(RolloutError::BadLogits { request, sample, position, prompt, .. }) => {
                    assert!(
                        errors.insert(request, (sample, position, prompt)).is_none(),
                        "one error a request"
                    );
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(engine.pages().free(), engine.pages().total());
        let mut groups = engine.finished();
        groups.sort_by_key(|g| g.request);
        (errors, groups)
    };
    let ((errors, groups), (errors_ahead, groups_ahead)) = (run(false), run(true));
    assert!(errors.len() > 3 && groups.len() > 3, "{} ill, {} well", errors.len(), groups.len());
    assert_eq!(errors, errors_ahead);
    assert_same("the others", &groups, &groups_ahead);
}
