//! Sequences that begin at a context nobody computed: no prefill, finite figures, and nothing else differs.

use crate::common::*;
use qurl_kernels::{Format, KvFormat};
use qurl_model::Family;
use qurl_rollout::{EngineOptions, Request, SampleKey};

const VOCABULARY: usize = 300;

#[test]
fn decoding_begins_at_the_context_without_prefill() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(2);
    for (format, kv) in [
        (Format::Bf16, None),
        (Format::Int8, Some(KvFormat::Int8)),
        (Format::Fp8, Some(KvFormat::Fp8)),
        (Format::F32, None),
    ] {
        // Chunks that are no whole pages, and a pool of more pages than are prefilled.
        let options = EngineOptions { max_num_batched_tokens: 24, ..roomy() };
        let mut engine = engine(&cpu, network(&cpu, &config, &params, format, kv), options);
        let Served { queue, engine: own } = &mut engine;
        own.fill_pages(queue, 7).expect("filled");
        for ahead in [false, true] {
            let before = engine.stats();
            engine.set_ahead(ahead);
            for prompt in 0..5 {
                let key = SampleKey { prompt, ..SampleKey::default() };
                let ids = (0..100 + prompt as u32).collect();
                engine.submit_at_context(Request { key, ..Request::new(ids, 9) }).expect("submitted");
            }
            let first = engine.step().expect("a step").len();
            assert_eq!(first, 5, "all of them decode from the first step on");
            while engine.unfinished() > 0 {
                engine.step().expect("a step");
            }
            let after = engine.stats();
            assert_eq!(after.prefill_tokens, before.prefill_tokens);
            assert_eq!(after.decode_tokens - before.decode_tokens, 5 * 9);
            for sample in engine.finished().iter().flat_map(|group| &group.samples) {
                assert_eq!(sample.tokens.len(), 9);
                assert!(sample.logprobs.iter().all(|x| x.is_finite()), "{format}: {:?}", sample.logprobs);
            }
        }
    }
}

/// What lies in the pages is what is attended to: where that is what a prefill of the same prompt left, the
/// sample is the prefill's.
#[test]
fn pages_are_taken_as_they_are() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(1);
    // One page, so that both requests get the same.
    let mut engine = engine_of_pages(&cpu, network(&cpu, &config, &params, Format::Bf16, None), 1, roomy());
    let request = Request::new((1..10).collect(), 6);
    let expected = engine.generate(std::slice::from_ref(&request)).expect("generate");
    engine.submit_at_context(request.clone()).expect("submitted");
    while engine.unfinished() > 0 {
        engine.step().expect("a step");
    }
    assert_same("from the pages", &expected, &engine.finished());
    let Served { queue, engine: own } = &mut engine;
    own.fill_pages(queue, 7).expect("filled");
    engine.submit_at_context(request).expect("submitted");
    while engine.unfinished() > 0 {
        engine.step().expect("a step");
    }
    let other = engine.finished();
    assert_ne!(expected[0].samples[0].logprobs, other[0].samples[0].logprobs, "other keys and values");
}
