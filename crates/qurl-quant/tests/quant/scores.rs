//! The runtime, the export and PyTorch say the same about a quantized model: log-probs in int8 and fp8, and
//! every exported code and scale, against an emulation in float64 (`tests/python/scores.py`, which says what
//! it emulates).
//!
//! **Tolerance**: 5e-6 for a log-prob. That is the rounding of f32 sums in models of two layers (without
//! quantization it is as large); no number of the golden is near enough to the middle between two codes for
//! it to change one. A code that is off by one anywhere moves log-probs by 1e-4 to 1e-1.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Device, Format, Queue};
use qurl_model::compute::{Network, NetworkOptions, score};
use qurl_model::hf;
use qurl_quant::export;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn here() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn golden() -> Vec<Value> {
    let text = std::fs::read_to_string(here().join("tests/goldens/scores.json")).expect("golden");
    serde_json::from_str(&text).expect("JSON")
}

/// The model of a case, and its number format.
fn case(golden: &Value) -> (hf::LoadedModel, Format, String) {
    let [name, format] = ["model", "format"].map(|key| golden[key].as_str().expect(key));
    let model = hf::load(&here().join("../qurl-model/tests/goldens").join(Path::new(name))).expect(name);
    (model, format.parse().expect(format), format!("{name} {format}"))
}

/// FNV-1a.
fn fnv(bytes: &[u8]) -> String {
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[test]
fn log_probs_are_those_of_pytorch() {
    for golden in golden() {
        let (model, format, name) = case(&golden);
        let ids: Vec<u32> = serde_json::from_value(golden["ids"].clone()).expect("ids");
        let wanted: Vec<f64> = serde_json::from_value(golden["logprobs"].clone()).expect("log-probs");
        for level in Level::available() {
            let queue = &mut Arc::new(Cpu::new(level, 2)).queue().expect("a queue");
            let params = model.params.as_ref().try_map(|leaf| queue.upload(leaf)).expect("memory");
            let options = NetworkOptions::inference(&model.config, format);
            let net = Network::<Cpu>::new(queue, &model.config, &params, options).expect("network");
            let got = score(queue, &net, &[&ids], 1.0, 64).expect("scores").remove(0).logp;
            assert_eq!(got.len(), wanted.len());
            for (t, (&got, &want)) in got.iter().zip(&wanted).enumerate() {
                let off = (f64::from(got) - want).abs();
                assert!(
                    off < 5e-6 * want.abs().max(1.0),
                    "{name}, {level}, token {t}: {got}, expected {want}"
                );
            }
        }
    }
}

#[test]
fn exported_codes_and_scales_are_those_of_pytorch() {
    for golden in golden() {
        let (model, format, name) = case(&golden);
        let wanted: BTreeMap<String, String> =
            serde_json::from_value(golden["tensors"].clone()).expect("tensors");
        let exported = export::tensors(&model.params, &model.config, format).expect("export");
        let linear = exported.iter().filter(|t| wanted.contains_key(&t.name));
        let got: BTreeMap<String, String> = linear.map(|t| (t.name.clone(), fnv(&t.bytes))).collect();
        assert_eq!(got, wanted, "{name}");
    }
}
