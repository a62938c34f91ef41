//! `qurl quantize` and `qurl inspect` on small models.

use crate::models::{TempDir, model, qurl, save, saved};
use qurl_model::{Dtype, Family, MlpParams, hf};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Number format, shape and bytes of every tensor in a weight file.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let bytes = std::fs::read(dir.join("model.safetensors")).expect("weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
    let tensors = json.as_object().expect("an object").iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, info)| {
            let numbers = |key: &str| -> Vec<u64> {
                info[key].as_array().expect("numbers").iter().map(|x| x.as_u64().expect("a number")).collect()
            };
            let range = numbers("data_offsets");
            let data = bytes[8 + header..][range[0] as usize..range[1] as usize].to_vec();
            (name.clone(), (info["dtype"].as_str().expect("a name").to_string(), numbers("shape"), data))
        })
        .collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .expect("the directory")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn int8_directories_hold_codes_and_scales_of_the_weights() {
    let dir = saved(Family::Qwen2);
    let out = TempDir::new();
    let target = out.path().join("int8");
    let target_text = target.to_str().expect("UTF-8");
    let summary =
        qurl(&["quantize", "--model", dir.text(), "--format", "int8", "--json", target_text]).json();
    assert_eq!(summary["format"], "int8");
    assert_eq!(
        names(&target),
        names(dir.path()),
        "config, generation, tokenizer and weights, and nothing else"
    );

    let config: Value = serde_json::from_slice(&std::fs::read(target.join("config.json")).expect("config"))
        .expect("a JSON document");
    assert_eq!(config["quantization_config"]["quant_method"], "compressed-tensors");
    assert_eq!(config["quantization_config"]["format"], "int-quantized");
    assert_eq!(config["hidden_size"], 64);

    let (full, quantized) = (tensors(dir.path()), tensors(&target));
    let name = "model.layers.1.self_attn.k_proj.weight";
    let (dtype, shape, codes) = &quantized[name];
    assert_eq!((dtype.as_str(), shape.as_slice()), ("I8", [32, 64].as_slice()));
    let (scale_dtype, scale_shape, scales) = &quantized[&format!("{name}_scale")];
    assert_eq!((scale_dtype.as_str(), scale_shape.as_slice()), ("F32", [32, 1].as_slice()));
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    };
    for ((weights, codes), scale) in
        numbers(&full[name].2).chunks(64).zip(codes.chunks(64)).zip(numbers(scales))
    {
        for (weight, code) in weights.iter().zip(codes) {
            let read_back = f32::from(code.cast_signed()) * scale;
            assert!((weight - read_back).abs() <= 0.5001 * scale, "{weight} is read as {read_back}");
        }
    }
    assert_eq!(quantized["model.embed_tokens.weight"], full["model.embed_tokens.weight"]);
    assert!(quantized.keys().filter(|name| name.ends_with("_scale")).count() == 2 * 7);

    let fp8 = out.path().join("fp8");
    let fp8_text = fp8.to_str().expect("UTF-8");
    qurl(&["quantize", "--model", dir.text(), "--format", "fp8", "--uaq", "2", "--json", fp8_text]).json();
    assert_eq!(tensors(&fp8)[name].0, "F8_E4M3");
}

#[test]
fn quantized_directories_are_read() {
    let dir = saved(Family::Qwen2);
    let out = TempDir::new();
    let scores = |model: &str, format: &str| {
        let args = ["score", "--model", model, "--format", format];
        let outcome = crate::common::qurl(&args, "{\"ids\":[3,9,14,20,7,11,30,4]}");
        assert_eq!((outcome.status, outcome.stderr.as_str()), (0, ""), "and no tensor is unused");
        let line: Value = serde_json::from_str(&outcome.stdout).expect("a line of JSON");
        let numbers = line["logprobs"].as_array().expect("log-probs").iter();
        numbers.filter_map(Value::as_f64).collect::<Vec<f64>>()
    };
    for format in ["int8", "fp8"] {
        let (target, again) = (out.path().join(format), out.path().join(format!("{format}-again")));
        let (text, again_text) = (target.to_str().expect("UTF-8"), again.to_str().expect("UTF-8"));
        qurl(&["quantize", "--model", dir.text(), "--format", format, "--json", text]).json();
        // In its own format it is the quantized model, but for the last bit of a scale; and it can be
        // quantized again.
        for (from, to) in scores(dir.text(), format).iter().zip(scores(text, format)) {
            assert!((from - to).abs() < 1e-3, "{format}: {from} is read as {to}");
        }
        assert_ne!(scores(text, "f32"), scores(dir.text(), "f32"), "what was rounded stays rounded");
        qurl(&["quantize", "--model", text, "--format", format, "--json", again_text]).json();
        let (once, twice) = (tensors(&target), tensors(&again));
        for (name, (dtype, _, codes)) in &once {
            assert!(dtype == "F32" || twice[name].2 == *codes, "{format}: {name} changed");
        }
        for args in
            [vec!["generate", "--model", text, "--max-new", "4", "a"], vec!["inspect", text, dir.text()]]
        {
            let outcome = qurl(&args);
            assert_eq!(outcome.status, 0, "{args:?}: {}", outcome.stderr);
        }
    }

    let target = out.path().join("int8");
    let path = target.join("config.json");
    let config: Value = serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    let weights = "/quantization_config/config_groups/group_0/weights";
    let activations = "/quantization_config/config_groups/group_0/input_activations";
    for (place, key, value, texts) in [
        ("/quantization_config", "quant_method", json!("awq"), ["quant_method", "awq"]),
        ("/quantization_config", "format", json!("pack-quantized"), ["format", "pack-quantized"]),
        (weights, "num_bits", json!(4), ["weights.num_bits", "4"]),
        (weights, "symmetric", json!(false), ["weights.symmetric", "false"]),
        (weights, "strategy", json!("group"), ["weights.strategy", "group"]),
        (activations, "dynamic", json!(false), ["input_activations.dynamic", "per token"]),
    ] {
        let mut other = config.clone();
        other.pointer_mut(place).expect("a place")[key] = value;
        std::fs::write(&path, other.to_string()).expect("written");
        qurl(&["generate", "--model", target.to_str().expect("UTF-8"), "a"]).assert_bad(&texts);
    }
}

#[test]
fn uaq_alone_writes_the_same_model() {
    let dir = saved(Family::Qwen2);
    let out = TempDir::new();
    let scores = |model: &str| {
        let outcome = crate::common::qurl(&["score", "--model", model], "{\"ids\":[3,9,14,20,7,11,30,4]}");
        assert_eq!(outcome.status, 0, "{}", outcome.stderr);
        let line: Value = serde_json::from_str(&outcome.stdout).expect("a line of JSON");
        let numbers = line["logprobs"].as_array().expect("log-probs").iter();
        numbers.filter_map(Value::as_f64).collect::<Vec<f64>>()
    };
    let before = scores(dir.text());
    for s in ["1.5", "4"] {
        let target = out.path().join(s);
        let text = target.to_str().expect("UTF-8");
        qurl(&["quantize", "--model", dir.text(), "--uaq", s, "--json", text]).json();
        let after = scores(text);
        for (b, a) in before.iter().zip(&after) {
            assert!((b - a).abs() < 2e-5, "--uaq {s}: {b} became {a}");
        }
        let inspected = qurl(&["inspect", dir.text(), text, "--json"]).json();
        assert!(inspected["total"]["weight_update"].as_f64().is_some_and(|x| x > 0.01), "{inspected}");
        let flipped = inspected["total"]["flipped_codes"].as_f64().expect("a share");
        assert!(if s == "4" { flipped == 0.0 } else { flipped < 0.05 }, "--uaq {s} flips {flipped}");
    }
}

/// A model keeps its number format when it is only scaled, and is told where that rounds; a format that is
/// asked for is the one that is written.
#[test]
fn uaq_alone_keeps_the_number_format_of_the_model() {
    for (dtype, stored) in [(Dtype::Bf16, "BF16"), (Dtype::F16, "F16"), (Dtype::F32, "F32")] {
        let (mut config, weights) = model(Family::Llama);
        config.dtype = dtype;
        let dir = TempDir::new();
        let generation = Default::default();
        hf::save(dir.path(), &config, &weights, &hf::SaveOptions::new(dtype, &generation)).expect("saving");
        let out = TempDir::new();
        for s in ["2", "1.5"] {
            let target = out.path().join(s);
            let text = target.to_str().expect("UTF-8");
            let summary = qurl(&["quantize", "--model", dir.text(), "--uaq", s, "--json", text]).json();
            let rounded = dtype != Dtype::F32 && s == "1.5";
            assert_eq!((&summary["format"], &summary["rounded"]), (&dtype.name().into(), &rounded.into()));
            assert!(tensors(&target).values().all(|(found, ..)| found == stored), "{stored}, --uaq {s}");
            let config = std::fs::read_to_string(target.join("config.json")).expect("a configuration");
            assert!(config.contains(&format!("\"{}\"", dtype.name())), "{config}");
            let run = qurl(&["quantize", "--model", dir.text(), "--uaq", s, "--force", text]);
            assert_eq!(run.stdout.contains("are rounded to"), rounded, "{}", run.stdout);
        }
        let wide = out.path().join("wide");
        let wide = wide.to_str().expect("UTF-8");
        let args = ["quantize", "--model", dir.text(), "--uaq", "1.5", "--format", "f32", "--json", wide];
        let summary = qurl(&args).json();
        assert_eq!((&summary["format"], &summary["rounded"]), (&"float32".into(), &false.into()));
    }
}

/// Scaled directories say so, are not scaled again, and can be scaled back.
#[test]
fn uaq_is_marked_and_does_not_stack() {
    let dir = saved(Family::Qwen3);
    let out = TempDir::new();
    let at = |name: &str| out.path().join(name).to_str().expect("UTF-8").to_string();
    let mark = |dir: &str| {
        let text = std::fs::read_to_string(format!("{dir}/config.json")).expect("a configuration");
        serde_json::from_str::<Value>(&text).expect("JSON")["qurl"].clone()
    };
    let quantize = |from: &str, to: &str, more: &[&str]| {
        let run = qurl(&[&["quantize", "--model", from], more, &[to]].concat());
        assert_eq!(run.status, 0, "{}", run.stderr);
        run.stdout
    };
    for s in ["2", "1.5"] {
        let [scaled, again, int8, back] =
            ["scaled", "again", "int8", "back"].map(|name| at(&format!("{name}-{s}")));
        assert!(quantize(dir.text(), &scaled, &["--uaq", s]).contains(&format!("scaled by {s}")));
        let expected = serde_json::json!({"uaq": s.parse::<f64>().expect("a number")});
        assert_eq!(mark(&scaled), expected);
        for asked in [s, "3"] {
            let refused = qurl(&["quantize", "--model", &scaled, "--uaq", asked, &again]);
            refused.assert_bad(&[
                &format!("--uaq {asked}"),
                &scaled,
                &format!("scaled by {s}"),
                "qurl.uaq",
                "1 to take",
            ]);
        }
        assert!(!out.path().join(format!("again-{s}")).exists());
        // Other commands keep the mark.
        quantize(&scaled, &again, &["--format", "f32"]);
        quantize(&scaled, &int8, &["--format", "int8"]);
        assert_eq!((mark(&again), mark(&int8)), (expected.clone(), expected));
        quantize(&again, &back, &["--uaq", "1"]);
        assert_eq!(mark(&back), Value::Null);
        let (was, is) = (tensors(dir.path()), tensors(Path::new(&back)));
        for (name, (_, _, bytes)) in &was {
            let numbers = |bytes: &[u8]| -> Vec<f32> {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
            };
            let pairs = numbers(bytes).into_iter().zip(numbers(&is[name].2));
            // A power of two comes back to the last bit, others within the two roundings.
            let most = if s == "2" { 0.0 } else { 1.2e-7 };
            assert!(
                pairs.into_iter().all(|(a, b)| (a - b).abs() <= most * a.abs()),
                "{name}, scaled by {s} and back"
            );
        }
    }
}

#[test]
fn nothing_is_overwritten_and_bad_input_is_named() {
    let dir = saved(Family::Qwen2);
    let out = TempDir::new();
    std::fs::write(out.path().join("notes.txt"), "mine").expect("writing");
    let run = |more: &[&str]| qurl(&[&["quantize", "--model", dir.text()], more].concat());
    run(&["--format", "int8", out.text()]).assert_bad(&["not empty", "--force"]);
    run(&["--format", "int8", dir.text()]).assert_bad(&["the model itself"]);
    run(&["--format", "int8", "--force", dir.text()]).assert_bad(&["the model itself"]);
    run(&["--format", "int4", "--force", out.text()]).assert_bad(&["int4", "int8, fp8"]);
    run(&["--uaq", "0", "--force", out.text()]).assert_bad(&["UAQ scale is 0"]);
    for s in ["1e-40", "1e38", "65.0"] {
        run(&["--uaq", s, "--force", out.text()]).assert_bad(&["UAQ scale", s, "1/64 to 64"]);
    }
    run(&[out.text()]).assert_bad(&["--format"]);
    qurl(&["quantize", "--model", "no/such", "--format", "int8", "--force", out.text()])
        .assert_bad(&["no/such"]);
    assert_eq!(names(out.path()), ["notes.txt"], "a refused command leaves nothing");

    assert_eq!(run(&["--format", "int8", "--force", out.text()]).status, 0);
    assert!(names(out.path()).contains(&"notes.txt".to_string()));
    assert!(names(out.path()).iter().all(|name| !name.ends_with(".part")));
}

/// A tokenizer of another model would be read beside the new weights.
#[test]
fn a_replaced_model_leaves_no_tokenizer_behind() {
    let (out, bare) = (TempDir::new(), TempDir::new());
    let (config, weights) = model(Family::Qwen2);
    let generation = Default::default();
    hf::save(bare.path(), &config, &weights, &hf::SaveOptions::new(Dtype::F32, &generation)).expect("saving");
    for format in ["int8", "f32"] {
        save(out.path(), &config, &weights);
        for name in ["merges.txt", "chat_template.jinja"] {
            std::fs::write(out.path().join(name), "of another model").expect("writing");
        }
        let run = qurl(&["quantize", "--model", bare.text(), "--format", format, "--force", out.text()]);
        assert_eq!(run.status, 0, "{}", run.stderr);
        assert_eq!(names(out.path()), names(bare.path()), "{format}");
    }
}

#[test]
fn inspect_measures_errors_updates_and_flips() {
    let (config, weights) = model(Family::Qwen3);
    let (a, b) = (TempDir::new(), TempDir::new());
    save(a.path(), &config, &weights);
    let mut changed = weights.clone();
    let MlpParams::Dense(mlp) = &mut changed.layers[1].mlp;
    mlp.down.iter_mut().for_each(|w| *w *= 1.1);
    mlp.down[5] = 2.0;
    save(b.path(), &config, &changed);

    let alone = qurl(&["inspect", a.text(), "--json"]).json();
    assert_eq!(alone["total"]["weight_update"], Value::Null);
    let error = |document: &Value| document["total"]["quantization_error"].as_f64().expect("a number");
    let of = |format: &str| error(&qurl(&["inspect", a.text(), "--format", format, "--json"]).json());
    assert!(of("f32") == 0.0 && of("bf16") < of("int8") && of("int8") < of("fp8") && of("fp8") < of("int4"));

    let both = qurl(&["inspect", a.text(), b.text(), "--json"]).json();
    assert_eq!(both["layers"].as_array().map(Vec::len), Some(2));
    assert_eq!(both["layers"][0]["weight_update"], 0.0);
    assert_eq!(both["layers"][0]["flipped_codes"], 0.0);
    assert!(both["layers"][1]["flipped_codes"].as_f64().is_some_and(|x| x > 0.0));
    let changed = both["matrices"].as_array().expect("matrices").iter().filter(|m| m["weight_update"] != 0.0);
    assert_eq!(changed.map(|m| m["name"].as_str().expect("a name")).collect::<Vec<_>>(), ["layers.1.down"]);

    let table = qurl(&["inspect", a.text(), b.text()]);
    assert_eq!((table.status, table.stdout.lines().count()), (0, 6), "{}", table.stdout);
    let other = saved(Family::Llama);
    qurl(&["inspect", a.text(), other.text()]).assert_bad(&[other.text(), "not another checkpoint"]);
    qurl(&["inspect", "no/such"]).assert_bad(&["no/such"]);
}
