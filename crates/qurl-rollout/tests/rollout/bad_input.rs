//! Bad settings and requests get an error that names them, and change nothing.

use crate::common::*;
use qurl_kernels::Format;
use qurl_model::Family;
use qurl_rollout::{Engine, EngineOptions, Request, RolloutError, Sampling};

const VOCABULARY: usize = 50;

fn text(error: Result<impl Sized, RolloutError>) -> String {
    error.err().map(|e| e.to_string()).unwrap_or_else(|| "no error".to_string())
}

#[test]
fn requests() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(1);
    let mut engine = engine_of_pages(&cpu, network(&cpu, &config, &params, Format::F32, None), 4, roomy());
    let good = Request::new(vec![1, 2, 3], 8);
    let sampling = |change: fn(&mut Sampling)| {
        let mut request = good.clone();
        change(&mut request.sampling);
        request
    };
    let biased = |biases: &[(u32, f32)]| Request { logit_bias: biases.to_vec(), ..good.clone() };
    let all: Vec<(u32, f32)> = (0..VOCABULARY as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
    let cases = [
        (Request { prompt: vec![], ..good.clone() }, "prompt is empty"),
        (
            Request { prompt: vec![1; POSITIONS], ..good.clone() },
            "160 tokens, but a context of 160 tokens takes at most 159",
        ),
        (
            Request { prompt: vec![1, 50], ..good.clone() },
            "prompt token at position 1, 50 is outside of the vocabulary of 50",
        ),
        (
            Request { stop_ids: vec![2, 77], ..good.clone() },
            "stop token 77 is outside of the vocabulary of 50",
        ),
        (Request { n: 0, ..good.clone() }, "n = 0: expected at least 1"),
        (Request { n: usize::MAX, ..good.clone() }, "expected at most 1048576"),
        (Request { max_new: 0, ..good.clone() }, "max_new = 0: expected at least 1"),
        (
            Request { max_new: 63, ..good.clone() },
            "66 tokens needs 81920 bytes (5 pages), the budget has 65536 bytes (4 pages)",
        ),
        (Request { max_new: usize::MAX, ..good.clone() }, "160 tokens needs"),
        (Request { stop_strings: vec!["x".into()], ..good.clone() }, "no text decoder"),
        (
            Request { stop_strings: vec![String::new()], ..good.clone() },
            "stop string = \"\": expected some text",
        ),
        (sampling(|s| s.temperature = -1.0), "temperature = -1: expected 0, or"),
        (sampling(|s| s.temperature = 1e-9), "temperature = 0.000000001"),
        (sampling(|s| s.temperature = f32::NAN), "temperature = NaN"),
        (sampling(|s| s.temperature = f32::INFINITY), "temperature = inf"),
        (sampling(|s| s.top_p = 0.0), "top_p = 0: expected a number above 0, at most 1"),
        (sampling(|s| s.top_p = 1.5), "top_p = 1.5"),
        (sampling(|s| s.top_p = f32::NAN), "top_p = NaN"),
        (sampling(|s| s.top_k = 51), "top_k = 51: expected 0 for all, or at most the 50"),
        (sampling(|s| s.min_p = -0.1), "min_p = -0.1: expected a number from 0 to 1"),
        (sampling(|s| s.min_p = f32::NAN), "min_p = NaN"),
        (biased(&[(50, 1.0)]), "biased token 50 is outside of the vocabulary of 50"),
        (biased(&[(4, 101.0)]), "logit_bias = 101 for token 4: expected a number from -100 to 100"),
        (biased(&[(4, f32::NAN)]), "logit_bias = NaN for token 4"),
        (biased(&[(4, f32::INFINITY)]), "logit_bias = inf for token 4"),
        (biased(&[(4, 1.0), (4, 2.0)]), "logit_bias = two numbers for token 4: expected one for each"),
        (biased(&all), "logit_bias = 50 tokens that may not be sampled: expected at least one"),
        (
            Request { min_new: 1, stop_ids: (0..50).collect(), ..good.clone() },
            "50 tokens that may not be sampled",
        ),
        (Request { min_new: 9, ..good.clone() }, "min_new = 9: expected at most max_new = 8"),
    ];
    for (request, expected) in cases {
        let message = text(engine.submit(request.clone()));
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
        let message = text(engine.generate(&[good.clone(), request]));
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
        assert_eq!((engine.unfinished(), engine.pages().free()), (0, 4), "{expected}");
    }
    // The most that fits, fits.
    let groups = engine.generate(&[Request { max_new: 62, ..good }]).expect("generate");
    assert_eq!(groups[0].samples[0].tokens.len(), 62);
    assert_eq!(engine.stats().peak_pages, 4);
}

#[test]
fn options() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(1);
    let cases = [
        (EngineOptions { page_size: 0, ..roomy() }, "page_size = 0: expected a multiple of 16"),
        (EngineOptions { page_size: 24, ..roomy() }, "page_size = 24: expected a multiple of 16"),
        (EngineOptions { max_num_seqs: 0, ..roomy() }, "max_num_seqs = 0: expected at least 1"),
        (EngineOptions { max_num_batched_tokens: 0, ..roomy() }, "max_num_batched_tokens = 0"),
        (
            EngineOptions { kv_bytes: 16383, ..roomy() },
            "kv_bytes = 16383: expected at least the 16384 bytes of one page",
        ),
    ];
    for (options, expected) in cases {
        let net = network(&cpu, &config, &params, Format::F32, None);
        let message = text(Engine::new(cpu.clone(), net, WEIGHTS, options));
        assert!(message.contains(expected), "{message:?} lacks {expected:?}");
    }
}
