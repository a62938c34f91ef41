//! An engine that runs with another network for a while: the pages and the workspace are its own, the tokens
//! are the other network's, and afterwards it is what it was.

use crate::common::*;
use qurl_kernels::{Format, KvFormat};
use qurl_model::Family;
use qurl_rollout::{Request, RolloutError, WeightVersion};

const VOCABULARY: usize = 300;
const LENT: WeightVersion = WeightVersion { version: 9, checksum: 0x1234 };

#[test]
fn another_network_in_the_same_pages() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let (_, other_params) = model(Family::Qwen2, VOCABULARY, 2);
    let cpu = cpu(2);
    let requests = mixed_requests(VOCABULARY);
    for kv in [None, Some(KvFormat::Int8)] {
        let own = || network(&cpu, &config, &params, Format::Int8, kv);
        let other = || network(&cpu, &config, &other_params, Format::Bf16, None);
        let expected = engine(&cpu, own(), roomy()).generate(&requests).expect("generate");
        let mut alone = engine(&cpu, other(), roomy());
        alone.load_with(LENT, |_| Ok(())).expect("a version");
        let expected_other = alone.generate(&requests).expect("generate");

        let mut engine = engine(&cpu, own(), roomy());
        let mut lent = other();
        assert_same("before", &expected, &engine.generate(&requests).expect("generate"));
        for _ in 0..2 {
            let Served { queue, engine: own } = &mut engine;
            let found = own.with_network(&mut lent, LENT, |engine| engine.generate(queue, &requests));
            let found = found.expect("lent");
            assert_same("lent", &expected_other, &found.expect("generate"));
            assert_eq!(engine.weights(), Some(WEIGHTS));
            assert_same("after", &expected, &engine.generate(&requests).expect("generate"));
        }
    }
}

#[test]
fn what_is_left_in_flight_is_dropped_and_a_busy_engine_refuses() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(1);
    let net = |format| network(&cpu, &config, &params, format, None);
    let mut engine = engine(&cpu, net(Format::Int8), roomy());
    let mut lent = net(Format::Bf16);
    let request = Request::new(vec![1, 2, 3], 20);
    let left = engine
        .with_network(&mut lent, LENT, |engine| engine.submit(request.clone()).map(|_| engine.unfinished()));
    assert_eq!(left.expect("lent").expect("submitted"), 1);
    assert_eq!((engine.unfinished(), lent.options().format), (0, Format::Bf16));
    engine.submit(request).expect("submitted");
    let refused = engine.with_network(&mut lent, LENT, |_| ());
    assert!(matches!(refused, Err(RolloutError::Busy { unfinished: 1 })), "{refused:?}");
    assert_eq!(lent.options().format, Format::Bf16, "nothing was swapped");
}
