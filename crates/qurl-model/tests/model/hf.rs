//! Model directories: the round trip in every format, and every kind of damage named.

use std::fs;
use std::path::Path;

use crate::common::{TempDir, small};
use qurl_model::hf::{SaveOptions, load, open, open_update, save};
use qurl_model::params::init;
use qurl_model::rng::CounterRng;
use qurl_model::{Dtype, Family, GenerationConfig, HfError, MlpParams, ModelConfig, Params};
use serde_json::{Value, json};

fn save_with(dir: &Path, config: &ModelConfig, params: &Params<Vec<f32>>, dtype: Dtype, shard: u64) {
    let generation = GenerationConfig::from_model(config);
    let mut options = SaveOptions::new(dtype, &generation);
    options.max_shard_bytes = shard;
    save(dir, config, params, &options).unwrap();
}

/// A saved f32 model in one file.
fn saved(name: &str) -> (TempDir, ModelConfig) {
    let dir = TempDir::new(name);
    let config = small(Family::Qwen2);
    save_with(dir.path(), &config, &init(&config, 1, false), Dtype::F32, u64::MAX);
    (dir, config)
}

fn split_header(bytes: &[u8]) -> (Value, Vec<u8>) {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    (header, bytes[8 + length..].to_vec())
}

fn join_header(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(data);
    bytes
}

/// Rewrites `model.safetensors` through its parsed header and its data.
fn edit(dir: &TempDir, change: impl FnOnce(&mut Value, &mut Vec<u8>)) {
    let path = dir.file("model.safetensors");
    let (mut header, mut data) = split_header(&fs::read(&path).unwrap());
    change(&mut header, &mut data);
    fs::write(path, join_header(&header, &data)).unwrap();
}

fn error_of(dir: &TempDir) -> (HfError, String) {
    let error = load(dir.path()).unwrap_err();
    let text = error.to_string();
    (error, text)
}

#[test]
fn every_family_and_format_survives_the_round_trip() {
    for family in Family::ALL {
        for (dtype, rounded) in [
            (Dtype::F32, (|x| x) as fn(f32) -> f32),
            (Dtype::Bf16, |x| half::bf16::from_f32(x).to_f32()),
            (Dtype::F16, |x| half::f16::from_f32(x).to_f32()),
        ] {
            for (tied, value_head, shard) in [(false, false, u64::MAX), (true, true, 3000)] {
                let mut config = small(family);
                config.tie_word_embeddings = tied;
                let params = init(&config, 3, value_head);
                let dir = TempDir::new("round");
                save_with(dir.path(), &config, &params, dtype, shard);
                let back = load(dir.path()).unwrap();
                let expected = params.map(|leaf| leaf.into_iter().map(rounded).collect::<Vec<_>>());
                assert_eq!(back.params, expected, "{family:?} {dtype}");
                config.dtype = dtype;
                assert_eq!(back.config, config);
                assert!(back.unused_tensors.is_empty());
            }
        }
    }
}

#[test]
fn saving_again_replaces_shards_and_leaves_other_files_alone() {
    let dir = TempDir::new("again");
    let config = small(Family::Llama);
    fs::write(dir.file("optimizer.bin"), b"state").unwrap();
    save_with(dir.path(), &config, &init(&config, 1, false), Dtype::F32, 3000);
    assert!(dir.file("model.safetensors.index.json").exists());
    // What a process that was killed while saving has left.
    fs::write(dir.file(".model.safetensors.1.part"), b"half").unwrap();
    fs::write(dir.file(".config.json.1.part"), b"half").unwrap();
    fs::write(dir.file(".notes.1.part"), b"not ours").unwrap();
    let second = init(&config, 2, false);
    save_with(dir.path(), &config, &second, Dtype::F32, u64::MAX);
    assert_eq!(load(dir.path()).unwrap().params, second);
    let mut names: Vec<String> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let expected =
        [".notes.1.part", "config.json", "generation_config.json", "model.safetensors", "optimizer.bin"];
    assert_eq!(names, expected);
}

#[test]
fn a_failed_save_leaves_the_old_model_whole() {
    let (dir, config) = saved("failed");
    let before = load(dir.path()).unwrap().params;
    let generation = GenerationConfig::from_model(&config);
    let mut diverged = init(&config, 9, false);
    let MlpParams::Dense(mlp) = &mut diverged.layers[1].mlp;
    mlp.down[5] = f32::NAN;
    let error = save(dir.path(), &config, &diverged, &SaveOptions::new(Dtype::F32, &generation));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("model.layers.1.mlp.down_proj.weight has NaN at element 5"), "{error}");
    let mut huge = init(&config, 9, false);
    huge.embed[3] = 1e5;
    let error = save(dir.path(), &config, &huge, &SaveOptions::new(Dtype::F16, &generation));
    assert!(error.unwrap_err().to_string().contains("expected finite float16 weights"));
    let mut short = init(&config, 9, false);
    short.final_norm.pop();
    let error = save(dir.path(), &config, &short, &SaveOptions::new(Dtype::F32, &generation));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("final_norm: 15 numbers, expected 1 x 16"), "{error}");
    assert_eq!(load(dir.path()).unwrap().params, before);
    let leftovers = fs::read_dir(dir.path())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().ends_with(".part"));
    assert_eq!(leftovers.count(), 0);
}

#[test]
fn a_missing_tensor_is_named_with_its_shape() {
    let (dir, _) = saved("missing");
    edit(&dir, |header, _| {
        let map = header.as_object_mut().unwrap();
        let info = map.remove("model.layers.1.self_attn.k_proj.bias").unwrap();
        map.insert("something.else".to_string(), info);
    });
    let (error, text) = error_of(&dir);
    assert!(matches!(error, HfError::MissingTensor { .. }));
    assert!(
        text.contains(
            "model.safetensors: tensor model.layers.1.self_attn.k_proj.bias is missing, expected shape [8]"
        ),
        "{text}"
    );
}

#[test]
fn a_wrong_shape_is_named() {
    let (dir, _) = saved("shape");
    edit(&dir, |header, _| header["model.layers.0.self_attn.q_proj.weight"]["shape"] = json!([8, 32]));
    let (_, text) = error_of(&dir);
    assert!(text.contains("q_proj.weight has shape [8, 32], expected [16, 16]"), "{text}");
}

#[test]
fn damaged_files_are_named() {
    let (dir, _) = saved("damage");
    let path = dir.file("model.safetensors");
    let whole = fs::read(&path).unwrap();
    for keep in [whole.len() - 1, whole.len() / 2, 100, 8] {
        fs::write(&path, &whole[..keep]).unwrap();
        let (error, text) = error_of(&dir);
        assert!(matches!(error, HfError::Length { found, .. } if found == keep as u64), "{text}");
        assert!(text.contains("model.safetensors"), "{text}");
    }
    for contents in [
        &b""[..],
        b"abc",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x04\0\0\0\0\0\0\0{[}]",
        b"\x02\0\0\0\0\0\0\0\xff\xff",
    ] {
        fs::write(&path, contents).unwrap();
        let (error, text) = error_of(&dir);
        assert!(matches!(error, HfError::Length { .. } | HfError::Header { .. }), "{text}");
    }
}

/// Whatever bytes change, loading ends in a model or in an error, never in a panic.
#[test]
fn random_damage_never_panics() {
    let (dir, _) = saved("random");
    let files = ["model.safetensors", "config.json", "generation_config.json"];
    let (mut errors, mut loads) = (0, 0);
    for (file, name) in (0u64..).zip(files) {
        let path = dir.file(name);
        let whole = fs::read(&path).unwrap();
        let header = whole.len().min(4000) as u64;
        for round in 0..400 {
            let rng = CounterRng::new(&[file, round]);
            let mut bytes = whole.clone();
            for change in 0..1 + rng.below_at(0, 3) {
                let at = rng.below_at(3 * change + 1, header) as usize;
                let digit = b'0' + rng.below_at(3 * change + 2, 10) as u8;
                let any = rng.u64_at(3 * change + 3) as u8;
                bytes[at] = if bytes[at].is_ascii_digit() { digit } else { any };
            }
            fs::write(&path, &bytes).unwrap();
            match load(dir.path()) {
                Ok(_) => loads += 1,
                Err(_) => errors += 1,
            }
        }
        fs::write(&path, &whole).unwrap();
    }
    assert!(errors > 0 && loads > 0, "{errors} {loads}");
}

/// What a configuration says decides how much memory is taken: more than there is, is refused before any is.
#[cfg(target_os = "linux")]
#[test]
fn weights_that_do_not_fit_into_memory_are_refused() {
    let (dir, _) = saved("memory");
    let path = dir.file("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["vocab_size"] = json!(1 << 24);
    config["hidden_size"] = json!(1 << 22);
    fs::write(&path, config.to_string()).unwrap();
    let (error, text) = error_of(&dir);
    assert!(matches!(error, HfError::Memory { need, .. } if need > 1 << 47), "{text}");
    assert!(text.contains("MiB of memory that are free"), "{text}");
}

/// A file that is cut after it was opened is an error of the leaf that is read, not the end of the process.
#[test]
fn a_file_that_is_cut_while_it_is_open_is_an_error() {
    let (dir, config) = saved("cut");
    fs::remove_file(dir.file("config.json")).unwrap();
    assert!(matches!(open(dir.path()), Err(HfError::Config(_))));
    let model = open_update(dir.path(), &config).unwrap();
    assert_eq!(model.leaves(), init(&config, 1, false).iter().len());
    assert_eq!(&model.leaf(0).unwrap(), init(&config, 1, false).iter().next().unwrap());
    fs::OpenOptions::new().write(true).open(dir.file("model.safetensors")).unwrap().set_len(4096).unwrap();
    let error = model.leaf(0).unwrap_err();
    assert!(matches!(error, HfError::Length { found: 4096, .. }), "{error}");
}

#[test]
fn numbers_that_are_not_finite_are_found() {
    for (bits, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let (dir, _) = saved("nan");
        edit(&dir, |header, data| {
            let info = &header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0];
            let at = info.as_u64().unwrap() as usize + 4 * 17;
            data[at..at + 4].copy_from_slice(&bits.to_le_bytes());
        });
        let (_, text) = error_of(&dir);
        let expected = format!("tensor model.layers.0.mlp.up_proj.weight has {shown} at element 17");
        assert!(text.contains(&expected), "{text}");
    }
}

#[test]
fn other_stored_formats_are_refused() {
    let (dir, _) = saved("dtype");
    edit(&dir, |header, _| header["model.norm.weight"]["dtype"] = json!("I32"));
    let (_, text) = error_of(&dir);
    assert!(text.contains("tensor model.norm.weight is stored as I32, expected F32, BF16 or F16"), "{text}");
}

#[test]
fn extra_tensors_are_listed_and_old_buffers_ignored() {
    let (dir, _) = saved("extra");
    edit(&dir, |header, data| {
        for name in ["model.layers.0.self_attn.rotary_emb.inv_freq", "visual.patch.weight"] {
            let start = data.len();
            data.extend([0; 8]);
            header[name] = json!({"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]});
        }
    });
    let model = load(dir.path()).unwrap();
    assert_eq!(model.unused_tensors, ["visual.patch.weight"]);
    let warning = model.warning(dir.path()).unwrap();
    assert!(warning.ends_with("the model does not use the tensor visual.patch.weight"), "{warning}");
}

#[test]
fn weights_of_blocks_are_never_left_out() {
    for (name, key) in [
        ("model.layers.9.mlp.up_proj.weight", "`num_hidden_layers` = 2"),
        ("model.layers.0.self_attn.q_norm.extra", "`model_type` = "),
    ] {
        let (dir, _) = saved("blocks");
        edit(&dir, |header, data| {
            let start = data.len();
            data.extend([0; 8]);
            header[name] = json!({"dtype": "F32", "shape": [2], "data_offsets": [start, start + 8]});
        });
        let (_, text) = error_of(&dir);
        let directory = dir.path().display().to_string();
        assert!(text.contains(key) && text.contains(name) && text.contains(&directory), "{text}");
    }
}

#[test]
fn shards_are_checked_against_the_index() {
    let sharded = || {
        let dir = TempDir::new("shards");
        let config = small(Family::Qwen3);
        save_with(dir.path(), &config, &init(&config, 1, false), Dtype::Bf16, 3000);
        let mut shards: Vec<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
            .collect();
        shards.sort();
        (dir, shards)
    };
    let (dir, shards) = sharded();
    assert!(shards.len() > 2);
    fs::remove_file(&shards[1]).unwrap();
    let (error, text) = error_of(&dir);
    assert!(matches!(error, HfError::MissingShard { .. }));
    assert!(text.contains("index.json: names the shard model-00002-of-"), "{text}");

    let (dir, shards) = sharded();
    fs::copy(&shards[0], &shards[1]).unwrap();
    let (error, text) = error_of(&dir);
    assert!(matches!(error, HfError::Duplicate { .. }), "{text}");

    let (dir, _) = sharded();
    let index = dir.file("model.safetensors.index.json");
    for (contents, expected) in [
        ("{", "invalid JSON"),
        ("{}", "no `weight_map`"),
        (r#"{"weight_map": {"a": "../b.safetensors"}}"#, "the name of a file in the same directory"),
        (r#"{"weight_map": {"a": 3}}"#, "the name of a file in the same directory"),
    ] {
        fs::write(&index, contents).unwrap();
        let (error, text) = error_of(&dir);
        assert!(matches!(error, HfError::Index { .. }) && text.contains(expected), "{text}");
    }
}

#[test]
fn a_directory_without_weights_says_what_it_looked_for() {
    let (dir, _) = saved("none");
    fs::remove_file(dir.file("model.safetensors")).unwrap();
    assert!(error_of(&dir).1.contains("expected model.safetensors or model.safetensors.index.json"));
    fs::write(dir.file("pytorch_model.bin"), b"").unwrap();
    assert!(error_of(&dir).1.contains("convert it to safetensors"));
    fs::remove_file(dir.file("config.json")).unwrap();
    assert!(error_of(&dir).1.contains("config.json: cannot be read"));
}

#[test]
fn a_tied_model_accepts_an_equal_head_and_refuses_another() {
    let (dir, mut config) = saved("tied");
    config.tie_word_embeddings = true;
    fs::write(dir.file("config.json"), config.to_json().to_string()).unwrap();
    let (error, text) = error_of(&dir);
    assert!(matches!(error, HfError::TiedHeadDiffers { .. }), "{text}");
    edit(&dir, |header, data| {
        let range = |name: &str| {
            let at = |i: usize| header[name]["data_offsets"][i].as_u64().unwrap() as usize;
            at(0)..at(1)
        };
        let embed = data[range("model.embed_tokens.weight")].to_vec();
        data[range("lm_head.weight")].copy_from_slice(&embed);
    });
    let model = load(dir.path()).unwrap();
    assert!(model.params.head.is_none() && model.unused_tensors.is_empty());
}

#[test]
fn generation_config_overrides_the_stop_tokens_and_keeps_unknown_keys() {
    let (dir, config) = saved("generation");
    let text = r#"{"eos_token_id": [5, 6], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": true,
                   "repetition_penalty": 1.05, "cache_implementation": "hybrid"}"#;
    fs::write(dir.file("generation_config.json"), text).unwrap();
    let generation = load(dir.path()).unwrap().generation;
    assert_eq!(generation.eos_token_ids, [5, 6]);
    assert_eq!(
        (generation.temperature, generation.top_p, generation.top_k),
        (Some(0.6), Some(0.95), Some(20))
    );
    let written = generation.to_json();
    assert_eq!(written, serde_json::from_str::<Value>(text).unwrap());
    assert_eq!(GenerationConfig::from_json(&written.to_string(), "g", &config).unwrap(), generation);
    fs::write(dir.file("generation_config.json"), r#"{"top_p": 1.5}"#).unwrap();
    let text = error_of(&dir).1;
    assert!(
        text.contains("generation_config.json: key `top_p` is 1.5, expected a number from 0 to 1"),
        "{text}"
    );
    fs::remove_file(dir.file("generation_config.json")).unwrap();
    assert_eq!(load(dir.path()).unwrap().generation, GenerationConfig::from_model(&config));
}
