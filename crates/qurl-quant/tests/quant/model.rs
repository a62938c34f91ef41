//! Whole models: update-aware scaling, diagnostics, checksums, export.

use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Device, Format, Queue};
use qurl_model::compute::{Network, NetworkOptions, score};
use qurl_model::rng::CounterRng;
use qurl_model::{Dims, Dtype, Family, MlpParams, ModelConfig, Params, params};
use qurl_quant::diagnostics::{self, Scope};
use qurl_quant::export::{self, StoredDtype};
use qurl_quant::{QuantError, checksum, reference, uaq};
use std::sync::Arc;

/// A small model whose norms and biases are not what they are at the start.
fn model(family: Family, seed: u64) -> (ModelConfig, Params<Vec<f32>>) {
    let dims = Dims {
        vocab_size: 96,
        hidden_size: 64,
        intermediate_size: 144,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
    };
    let mut config = ModelConfig::from_dims(family, dims).expect("valid");
    config.max_position_embeddings = 64;
    config.initializer_range = 0.2;
    let mut weights = params::init(&config, seed, false);
    for (i, leaf) in weights.iter_mut().enumerate() {
        let mut noise = vec![0.0; leaf.len()];
        CounterRng::new(&[seed, i as u64]).fill_normal(&mut noise, 0.1);
        leaf.iter_mut().zip(noise).for_each(|(w, n)| *w += n);
    }
    (config, weights)
}

fn log_probs(config: &ModelConfig, weights: &Params<Vec<f32>>, format: Format) -> Vec<f32> {
    let queue = &mut Arc::new(Cpu::new(Level::best(), 2)).queue().expect("a queue");
    let tensors = weights.clone().try_map(|leaf| queue.upload(&leaf)).expect("memory");
    let net = Network::<Cpu>::new(queue, config, &tensors, NetworkOptions::inference(config, format))
        .expect("network");
    let ids: Vec<Vec<u32>> = (0..3).map(|s| (0..20).map(|i| (i * 7 + s * 31) % 96).collect()).collect();
    score(queue, &net, &ids, 1.0, 64).expect("scores").into_iter().flat_map(|out| out.logp).collect()
}

#[test]
fn uaq_leaves_every_family_as_it_was() {
    for family in Family::ALL {
        let (config, weights) = model(family, 3);
        assert!(
            weights.layers[0].qkv_bias.as_ref().is_none_or(|b| b.iter().any(|x| *x != 0.0)),
            "biases take part"
        );
        let before = log_probs(&config, &weights, Format::F32);
        let mut scaled = weights.clone();
        uaq::apply(&mut scaled, &config, 1.5).expect("valid");
        assert_ne!(scaled, weights);
        let after = log_probs(&config, &scaled, Format::F32);
        for (b, a) in before.iter().zip(&after) {
            assert!((b - a).abs() < 2e-5, "{family:?}: {b} became {a}");
        }
        // A power of two rounds nothing: not in the model, not on the backward pass, not in any code.
        let mut doubled = weights.clone();
        uaq::apply(&mut doubled, &config, 2.0).expect("valid");
        assert_eq!(log_probs(&config, &doubled, Format::F32), before, "{family:?}: s = 2");
        for format in [Format::Int8, Format::Fp8] {
            let flips = diagnostics::flipped_codes(&weights, &doubled, &config, format, Scope::default());
            assert_eq!(flips.expect("same layout").total(), 0.0, "{family:?} {format}");
            let quantized = log_probs(&config, &weights, format);
            assert_eq!(log_probs(&config, &doubled, format), quantized, "{family:?} {format}");
        }
        uaq::undo(&mut doubled, &config, 2.0).expect("valid");
        assert_eq!(doubled, weights, "{family:?}: undone");
    }
}

#[test]
fn uaq_scales_what_it_should_and_nothing_else() {
    let (config, weights) = model(Family::Qwen2, 5);
    let mut scaled = weights.clone();
    uaq::apply(&mut scaled, &config, 1.5).expect("valid");
    for (old, new) in weights.layers.iter().zip(&scaled.layers) {
        let (MlpParams::Dense(old_mlp), MlpParams::Dense(new_mlp)) = (&old.mlp, &new.mlp);
        assert!(old.qkv.iter().zip(&new.qkv).all(|(o, n)| *n == o / 1.5));
        assert!(old_mlp.gate_up.iter().zip(&new_mlp.gate_up).all(|(o, n)| *n == o / 1.5));
        assert!(old.attn_norm.iter().zip(&new.attn_norm).all(|(o, n)| *n == o * 1.5));
        assert!(old.mlp_norm.iter().zip(&new.mlp_norm).all(|(o, n)| *n == o * 1.5));
        assert_eq!((&old.qkv_bias, &old.o, &old_mlp.down), (&new.qkv_bias, &new.o, &new_mlp.down));
    }
    assert_eq!(
        (&weights.embed, &weights.final_norm, &weights.head),
        (&scaled.embed, &scaled.final_norm, &scaled.head)
    );
    for s in [0.0, -1.5, 1.0 / 65.0, 65.0, 1e38, f32::NAN, f32::INFINITY] {
        let mut untouched = weights.clone();
        let error = uaq::apply(&mut untouched, &config, s).expect_err("refused");
        assert!(matches!(error, QuantError::UaqScale { .. }), "{error}");
        assert_eq!(untouched, weights);
    }
    let (other, _) = model(Family::Llama, 5);
    assert!(matches!(uaq::apply(&mut scaled, &other, 1.5), Err(QuantError::Layout { .. })));
}

#[test]
fn measures_are_what_their_equations_say() {
    let (config, before) = model(Family::Llama, 8);
    let mut after = before.clone();
    // Double one matrix and leave the others.
    after.layers[1].o.iter_mut().for_each(|w| *w *= 2.0);
    let scope = Scope { head: true };
    let update = diagnostics::weight_update(&before, &after, &config, scope).expect("same layout");
    let squares = |values: &[f32]| values.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
    assert_eq!(update.matrices.len(), 2 * 4 + 1);
    for matrix in &update.matrices {
        assert_eq!(matrix.ratio(), if matrix.name == "layers.1.o" { 1.0 } else { 0.0 }, "{}", matrix.name);
    }
    let layer = &before.layers[1];
    let MlpParams::Dense(mlp) = &layer.mlp;
    let whole: f64 = [&layer.qkv, &layer.o, &mlp.gate_up, &mlp.down].iter().map(|w| squares(w)).sum();
    assert_eq!(update.layers()[0], 0.0);
    assert!((update.layers()[1] - squares(&layer.o) / whole).abs() < 1e-12);
    assert!(update.total() < update.layers()[1]);

    for format in Format::ALL {
        let error = diagnostics::quantization_error(&before, &config, format, scope).expect("finite");
        let budget = qurl_quant::budget::normalized_error(format);
        assert!(error.total() <= 1.5 * budget, "{format}: {:e}", error.total());
        if !format.is_quantized() {
            continue;
        }
        // A matrix by hand.
        let rows = config.qkv_dim();
        let by_hand =
            reference::quantize(format, "qkv", &layer.qkv, rows, config.hidden_size).expect("finite");
        let wrong: f64 =
            by_hand.dequantize().iter().zip(&layer.qkv).map(|(q, w)| f64::from(q - w).powi(2)).sum();
        let measured = error.matrices.iter().find(|m| m.name == "layers.1.qkv").expect("measured");
        assert!((measured.ratio() - wrong / squares(&layer.qkv)).abs() < 1e-9, "{format}");
    }
}

#[test]
fn codes_flip_one_by_one() {
    let (config, before) = model(Family::Qwen3, 9);
    let none =
        diagnostics::flipped_codes(&before, &before, &config, Format::Int8, Scope::default()).expect("same");
    assert_eq!(none.total(), 0.0);
    let mut after = before.clone();
    let cols = config.intermediate_size;
    let MlpParams::Dense(mlp) = &mut after.layers[0].mlp;
    let row = &mut mlp.down[..cols];
    let largest = row.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    // Two steps for one small weight of the first row; its scale stays.
    let small = row.iter().position(|w| w.abs() < 0.5 * largest).expect("a small weight");
    row[small] += 2.0 * largest / 127.0;
    let one =
        diagnostics::flipped_codes(&before, &after, &config, Format::Int8, Scope::default()).expect("same");
    let down = one.matrices.iter().find(|m| m.name == "layers.0.down").expect("measured");
    assert_eq!((down.part, down.whole), (1.0, (config.hidden_size * cols) as f64));
    assert_eq!(one.matrices.iter().map(|m| m.part).sum::<f64>(), 1.0);
    after.layers[0].qkv[0] = f32::NAN;
    let error = diagnostics::flipped_codes(&before, &after, &config, Format::Int8, Scope::default());
    assert!(matches!(error, Err(QuantError::NotFinite { row: 0, column: 0, .. })), "{error:?}");
}

#[test]
fn checksums_tell_models_apart() {
    let (_, weights) = model(Family::Llama, 1);
    let (_, other) = model(Family::Llama, 2);
    let sum = checksum::host_params(&weights);
    for threads in [1, 3] {
        let queue = &mut Arc::new(Cpu::new(Level::best(), threads)).queue().expect("a queue");
        let uploaded = weights.as_ref().map(|w| queue.upload(w).expect("memory"));
        assert_eq!(checksum::params(queue, &uploaded), Ok(sum));
    }
    assert_ne!(sum, checksum::host_params(&other));
    let mut swapped = weights.clone();
    swapped.layers.swap(0, 1);
    assert_ne!(sum, checksum::host_params(&swapped));
}

#[test]
fn compressed_tensors() {
    let (mut config, weights) = model(Family::Qwen2, 4);
    config.dtype = Dtype::Bf16;
    for (format, dtype, kind) in
        [(Format::Int8, StoredDtype::I8, "int"), (Format::Fp8, StoredDtype::F8E4m3, "float")]
    {
        let tensors = export::tensors(&weights, &config, format).expect("finite");
        let find =
            |name: &str| tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"));
        for tensor in &tensors {
            let bytes = match tensor.dtype {
                StoredDtype::F32 => 4,
                StoredDtype::Bf16 | StoredDtype::F16 => 2,
                StoredDtype::I8 | StoredDtype::F8E4m3 => 1,
            };
            assert_eq!(tensor.bytes.len(), bytes * tensor.shape.iter().product::<usize>(), "{}", tensor.name);
        }
        // Queries are the first rows of the fused projection, keys follow.
        let (d, q) = (config.hidden_size, config.q_dim());
        let whole =
            reference::quantize(format, "qkv", &weights.layers[1].qkv, config.qkv_dim(), d).expect("finite");
        let keys = find("model.layers.1.self_attn.k_proj.weight");
        assert_eq!((keys.dtype, &keys.shape), (dtype, &vec![config.kv_dim(), d]));
        assert_eq!(keys.bytes, whole.codes[q * d..(q + config.kv_dim()) * d]);
        let scales = find("model.layers.1.self_attn.k_proj.weight_scale");
        assert_eq!((scales.dtype, &scales.shape), (StoredDtype::F32, &vec![config.kv_dim(), 1]));
        assert_eq!(scales.bytes[..4], whole.scales[q].to_le_bytes());
        for full in ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"] {
            assert_eq!(find(full).dtype, StoredDtype::Bf16, "{full}");
        }
        let config = export::quantization_config(format).expect("exported");
        assert_eq!(config["config_groups"]["group_0"]["weights"]["type"], kind);
        assert_eq!(config["config_groups"]["group_0"]["weights"]["strategy"], "channel");
        assert_eq!(config["config_groups"]["group_0"]["input_activations"]["strategy"], "token");
        assert_eq!(config["ignore"][0], "lm_head");
    }
    for format in [Format::Bf16, Format::Int4] {
        let error = export::tensors(&weights, &config, format).expect_err("not exported").to_string();
        assert!(error.contains(format.name()) && error.contains("int8, fp8"), "{error}");
    }
}
