//! New weights as a trainer broadcasts them (files without a configuration), and the memory that weights take
//! on their way from files into the engine.

use super::Server;
use crate::models::{TempDir, model, save};
use qurl_model::params::{self, hf_names};
use qurl_model::{Dims, Family, ModelConfig};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

/// A tensor of a file: its name, shape and bytes of f32.
type Tensor = (String, Vec<u64>, Vec<u8>);

/// The tensors of a directory's only file.
fn tensors(dir: &Path) -> Vec<Tensor> {
    let bytes = std::fs::read(dir.join("model.safetensors")).expect("weights");
    let (length, rest) = bytes.split_first_chunk().expect("a length");
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
    let numbers = |value: &Value| -> Vec<u64> {
        value.as_array().expect("numbers").iter().map(|n| n.as_u64().expect("a number")).collect()
    };
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
    let tensors = tensors.map(|(name, info)| {
        let place = numbers(&info["data_offsets"]);
        (name.clone(), numbers(&info["shape"]), data[place[0] as usize..place[1] as usize].to_vec())
    });
    tensors.collect()
}

fn write_file(path: &Path, tensors: &[Tensor]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    header.insert("__metadata__".to_string(), json!({"format": "pt"}));
    for (name, shape, bytes) in tensors {
        let place = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": place}));
        data.extend_from_slice(bytes);
    }
    let header = Value::Object(header).to_string();
    let whole = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    std::fs::write(path, whole).expect("written");
}

/// Writes what prime-rl's trainer does: two shards with their index and a mark that they are complete.
fn broadcast(dir: &Path, tensors: &[Tensor]) {
    std::fs::create_dir_all(dir).expect("made");
    let mut places = Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(2)).enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", i + 1);
        write_file(&dir.join(&file), part);
        places.extend(part.iter().map(|(name, ..)| (name.clone(), json!(file))));
    }
    let index = json!({"metadata": {"total_size": 1}, "weight_map": places});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).expect("written");
    std::fs::write(dir.join("STABLE"), "").expect("written");
}

/// prime-rl's layout is taken with the configuration that is served, head and embedding may stand there twice
/// where they are one, and what is wrong is named by file and tensor before anything changes.
#[test]
fn a_trainers_broadcast_needs_no_configuration() {
    let (mut config, _) = model(Family::Qwen2);
    config.tie_word_embeddings = true;
    let root = TempDir::new();
    let [first, other] = ["first", "other"].map(|name| root.path().join(name));
    for (dir, seed) in [(&first, 7), (&other, 8)] {
        std::fs::create_dir(dir).expect("made");
        save(dir, &config, &params::init(&config, seed, false));
    }
    let server = Server::start(first.to_str().expect("UTF-8"), &["--format", "int8"]);
    let ask = || {
        let body = json!({"prompt": "1+1=", "max_tokens": 20, "seed": 4, "return_token_ids": true});
        server.post("/v1/completions", body, 200)["choices"].clone()
    };
    let update = |dir: &Path, status| server.post("/update_weights", json!({"weight_dir": dir}), status);
    let before = ask();
    let whole = update(&other, 200);
    let expected = ask();
    assert_ne!(before, expected);
    update(&first, 200);

    let good = tensors(&other);
    let position = |name: &str| good.iter().position(|tensor| tensor.0 == name).expect(name);
    let (embed, up) = (position("model.embed_tokens.weight"), position("model.layers.1.mlp.up_proj.weight"));
    let mut tied = good.clone();
    tied.push(("lm_head.weight".to_string(), good[embed].1.clone(), good[embed].2.clone()));
    let step = |name: &str, tensors: &[Tensor]| {
        let dir = root.path().join("broadcasts").join(name);
        broadcast(&dir, tensors);
        dir
    };
    let changed = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = tied.clone();
        change(&mut tensors);
        tensors
    };
    for (name, change, told) in [
        ("missing", &(|t: &mut Vec<Tensor>| drop(t.remove(up))) as &dyn Fn(&mut Vec<Tensor>), "is missing"),
        ("shape", &|t| t[up].1.reverse(), "has shape"),
        ("nan", &|t| t[up].2[8..12].copy_from_slice(&f32::NAN.to_le_bytes()), "NaN at element 2"),
        ("head", &|t| t.last_mut().expect("a head").2[0] ^= 1, "lm_head.weight"),
    ] {
        let dir = step(name, &changed(change));
        let error = update(&dir, 400)["error"]["message"].as_str().expect("a message").to_string();
        let tensor = if name == "head" { "lm_head.weight" } else { "model.layers.1.mlp.up_proj.weight" };
        for part in [dir.to_str().expect("UTF-8"), tensor, told] {
            assert!(error.contains(part), "{name}: no {part} in {error}");
        }
        assert_eq!(ask(), before, "{name}");
    }
    let taken = update(&step("step_8", &tied), 200);
    assert_eq!(taken["checksum"], whole["checksum"]);
    assert_eq!(ask(), expected);
}

/// A model of zeros in bf16, which takes no place on the disk; its bytes, and those of its largest leaf in
/// f32.
fn zeros(dir: &Path, config: &ModelConfig) -> (u64, u64) {
    let (mut header, mut end, mut largest) = (Map::new(), 0, 0);
    for leaf in hf_names(config, false).iter() {
        largest = largest.max(leaf.info.len() * 4);
        for tensor in &leaf.tensors {
            let place = [end, end + 2 * tensor.len()];
            let info = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": place});
            header.insert(tensor.name.clone(), info);
            end = place[1];
        }
    }
    let header = Value::Object(header).to_string();
    let mut file = std::fs::File::create(dir.join("model.safetensors")).expect("created");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("written");
    file.write_all(header.as_bytes()).expect("written");
    file.set_len((8 + header.len() + end) as u64).expect("made longer");
    std::fs::write(dir.join("config.json"), config.to_json().to_string()).expect("written");
    (end as u64, largest as u64)
}

/// Bytes of a line of a process's status.
#[cfg(target_os = "linux")]
fn memory(server: &Server, line: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).expect("a status");
    let line = status.lines().find_map(|l| l.strip_prefix(line)).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

/// On their way from files to the engine, weights take no more of the host's memory than the files (which are
/// mapped) and some leaves: not their f32 values, of twice the files' size.
#[cfg(target_os = "linux")]
#[test]
fn weights_go_from_files_to_the_engine_leaf_by_leaf() {
    let dims = Dims {
        vocab_size: 64,
        hidden_size: 512,
        intermediate_size: 2048,
        num_layers: 14,
        num_heads: 8,
        num_kv_heads: 2,
    };
    let mut config = ModelConfig::from_dims(Family::Llama, dims).expect("sizes that fit together");
    config.max_position_embeddings = 64;
    let dir = TempDir::new();
    let (file, leaf) = zeros(dir.path(), &config);
    assert!(file > 90 << 20 && leaf < 10 << 20, "{file} {leaf}");
    let server = Server::start(dir.text(), &["--format", "int8", "--kv-cache-mb", "16"]);
    // The leaf as it is read, its copy on the device, what packing it takes, and stacks of threads.
    let most = file + 5 * leaf;
    let (now, peak) = (memory(&server, "VmRSS:"), memory(&server, "VmHWM:"));
    assert!(peak < now + most, "at the start: {} MB, {} MB stay", peak >> 20, now >> 20);
    for _ in 0..2 {
        std::fs::write(format!("/proc/{}/clear_refs", server.child.id()), "5").expect("the peak begins anew");
        let before = memory(&server, "VmRSS:");
        server.post("/update_weights", json!({"weight_dir": dir.path()}), 200);
        let peak = memory(&server, "VmHWM:");
        assert!(peak < before + most, "at an update: {} MB, {} MB before", peak >> 20, before >> 20);
    }
}
