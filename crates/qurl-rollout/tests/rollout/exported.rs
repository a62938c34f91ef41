//! Weights as bytes: a network that takes them over samples the same tokens with the same log-probs, on the
//! CPU and on a GPU, and both devices have the same bytes.

use crate::common::*;
use qurl_kernels::{Cuda, Device, Format};
use qurl_model::compute::{Network, NetworkOptions};
use qurl_model::{Family, ModelConfig, Params};
use std::sync::Arc;

const VOCABULARY: usize = 300;

fn packed<D: Device>(
    device: &Arc<D>,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    options: NetworkOptions,
) -> Network<D> {
    Network::new(&mut queue(device), config, &upload(device, params), options).expect("network")
}

/// Exports one network, imports it into one of other weights, and compares what both sample.
fn round_trip<D: Device>(
    device: &Arc<D>,
    (config, params, others): (&ModelConfig, &Params<Vec<f32>>, &Params<Vec<f32>>),
    options: NetworkOptions,
) -> Vec<u8> {
    let requests = mixed_requests(VOCABULARY);
    let own = packed(device, config, params, options);
    let bytes = own.export(&mut queue(device)).expect("exported");
    assert_eq!(bytes.len(), own.exported_bytes());
    let mut served = Served::new(device, packed(device, config, others, options), WEIGHTS, roomy());
    let Served { queue: lane, engine } = &mut served;
    engine.load_with(WEIGHTS, |network| network.import(lane, &bytes)).expect("imported");
    let found = served.generate(&requests).expect("generate");
    let expected = Served::new(device, own, WEIGHTS, roomy()).generate(&requests).expect("generate");
    assert_same(&format!("{options:?}"), &expected, &found);
    assert_eq!(served.engine.network().export(&mut served.queue).expect("exported"), bytes);
    bytes
}

#[test]
fn a_network_from_bytes_samples_the_same() {
    let gpu = Cuda::open(0).map_err(|reason| eprintln!("no GPU beside the CPU: {reason}")).ok().map(Arc::new);
    for (family, tied) in [(Family::Qwen2, true), (Family::Llama, false)] {
        let (mut config, mut params) = model(family, VOCABULARY, 1);
        let (_, mut others) = model(family, VOCABULARY, 2);
        if tied {
            config.tie_word_embeddings = true;
            (params.head, others.head) = (None, None);
        }
        for format in Format::ALL {
            for options in [options(&config, format), options(&config, format).quantize_head()] {
                let weights = (&config, &params, &others);
                let bytes = round_trip(&cpu(2), weights, options);
                // fp8-block, int4 and nvfp4 are for the CPU.
                let on_gpu = matches!(format, Format::F32 | Format::Bf16 | Format::Int8 | Format::Fp8);
                if let Some(gpu) = gpu.as_ref().filter(|_| on_gpu) {
                    assert!(round_trip(gpu, weights, options) == bytes, "{options:?}: bytes of a GPU");
                }
            }
        }
    }
}

#[test]
fn bytes_of_another_model_are_refused() {
    let (config, params) = model(Family::Qwen2, VOCABULARY, 1);
    let cpu = cpu(1);
    let mut own = packed(&cpu, &config, &params, options(&config, Format::Int8));
    let bytes = own.export(&mut queue(&cpu)).expect("exported");
    for wrong in [&bytes[1..], &[], &[&bytes[..], &[0]].concat()] {
        let refused = own.import(&mut queue(&cpu), wrong).expect_err("another length").to_string();
        assert!(refused.contains(&bytes.len().to_string()), "{refused}");
    }
}
