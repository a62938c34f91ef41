//! `qurl generate` and `qurl score` on small models.

use crate::common::Run;
use crate::models::{TempDir, model, qurl, save, saved, tokenizer};
use qurl_model::{Family, MlpParams};
use serde_json::{Value, json};
use std::path::Path;

const FORMATS: [&str; 7] = ["f32", "bf16", "int8", "fp8", "fp8-block", "int4", "nvfp4"];

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|x| x.as_u64().expect("an id") as u32).collect()
}

/// Bits of the f32 numbers as a reader in f32 gets them.
fn bits(value: &Value) -> Vec<u32> {
    let numbers = value.as_array().expect("an array").iter();
    numbers.map(|x| x.to_string().parse::<f32>().expect("a number").to_bits()).collect()
}

/// Scores whole sequences with the same model options.
pub fn score(model: &str, options: &[&str], sequences: &[Vec<u32>]) -> Vec<Value> {
    let lines: Vec<String> = sequences.iter().map(|ids| json!({ "ids": ids }).to_string()).collect();
    let mut arguments = vec!["score", "--model", model];
    arguments.extend(options);
    let outcome = crate::common::qurl(&arguments, &lines.join("\n"));
    assert_eq!(outcome.status, 0, "{}", outcome.stderr);
    outcome.stdout.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

pub fn assert_scored_as_generated(dir: &str, options: &[&str]) {
    let mut arguments =
        vec!["generate", "--model", dir, "--n", "3", "--max-new", "40", "--json", "--seed", "5"];
    arguments.extend(options);
    arguments.push("12+34=");
    let document = qurl(&arguments).json();
    let samples = document["samples"].as_array().expect("samples");
    assert_eq!(samples.len(), 3);
    let whole: Vec<Vec<u32>> =
        samples.iter().map(|s| [ids(&s["prompt_ids"]), ids(&s["ids"])].concat()).collect();
    for (sample, scored) in samples.iter().zip(score(dir, options, &whole)) {
        let prompt = ids(&sample["prompt_ids"]).len();
        assert_eq!(scored["logprobs"][0], Value::Null);
        let tail = Value::Array(scored["logprobs"].as_array().expect("log-probs")[prompt..].to_vec());
        assert_eq!(bits(&sample["logprobs"]), bits(&tail), "{options:?}");
    }
}

#[test]
fn scores_are_the_reported_log_probs_in_every_format() {
    let dir = saved(Family::Qwen2);
    for format in FORMATS {
        assert_scored_as_generated(dir.text(), &["--format", format]);
        assert_scored_as_generated(dir.text(), &["--format", format, "--quantize-head"]);
    }
    for cache in ["f32", "bf16", "int8", "fp8"] {
        assert_scored_as_generated(dir.text(), &["--format", "int8", "--kv", cache]);
    }
}

#[test]
fn every_family_and_formats_differ() {
    for family in Family::ALL {
        let dir = saved(family);
        assert_scored_as_generated(dir.text(), &["--format", "int8"]);
        let scored = |format| score(dir.text(), &["--format", format], &[vec![3, 9, 14, 20, 7]]);
        assert_ne!(scored("f32"), scored("int4"), "{family:?}");
    }
}

#[test]
fn the_seed_alone_decides() {
    let dir = saved(Family::Qwen3);
    let run = |seed: &str, n: &str, environment: &[(&str, &str)]| {
        let arguments = [
            "generate",
            "--model",
            dir.text(),
            "--format",
            "int8",
            "--n",
            n,
            "--seed",
            seed,
            "--json",
            "a+b",
        ];
        crate::common::qurl_with(Path::new("."), &arguments, environment, "").json()
    };
    let two = run("1", "2", &[]);
    assert_eq!(two, run("1", "2", &[]), "again");
    assert_eq!(two, run("1", "2", &[("QURL_THREADS", "1")]), "one thread");
    assert_eq!(
        two["samples"][0],
        run("1", "1", &[])["samples"][0],
        "a sample does not depend on its siblings"
    );
    assert_ne!(two, run("2", "2", &[]), "another seed");
    assert_ne!(two["samples"][0]["ids"], two["samples"][1]["ids"]);
}

#[test]
fn the_document_has_its_form() {
    let dir = saved(Family::Llama);
    let document =
        qurl(&["generate", "--model", dir.text(), "--json", "--max-new", "9", "--n", "2", "3 + 4 = ?"])
            .json();
    for sample in document["samples"].as_array().expect("samples") {
        let keys: Vec<&str> = sample.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(keys, ["prompt_ids", "ids", "logprobs", "text", "finish"]);
        assert_eq!(
            ids(&sample["prompt_ids"]),
            tokenizer().encode("3 + 4 = ?", true).expect("known characters")
        );
        let sampled = ids(&sample["ids"]);
        assert_eq!(sampled.len(), sample["logprobs"].as_array().expect("log-probs").len());
        assert_eq!(sample["text"], tokenizer().decode(&sampled, true).expect("text"));
        let ended = sampled.last().copied() == tokenizer().eos();
        assert_eq!(sample["finish"], if ended { "stop" } else { "length" });
        assert!(sampled.len() == 9 || ended);
    }
}

#[test]
fn text_streams_and_ids_need_no_tokenizer() {
    let dir = saved(Family::Qwen2);
    let base = ["generate", "--model", dir.text(), "--max-new", "20", "--temperature", "0"];
    let greedy = |more: &[&str]| qurl(&[&base, more].concat());
    let text = greedy(&["1+1="]);
    let document = greedy(&["--json", "1+1="]).json();
    assert_eq!(text.status, 0);
    assert_eq!(text.stdout, format!("{}\n", document["samples"][0]["text"].as_str().expect("text")));
    assert!(text.stderr.contains("tokens/s"), "{}", text.stderr);

    for entry in std::fs::read_dir(dir.path()).expect("the directory") {
        let path = entry.expect("an entry").path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tokenizer")) {
            std::fs::remove_file(path).expect("removing");
        }
    }
    let prompt: Vec<String> = ids(&document["samples"][0]["prompt_ids"]).iter().map(u32::to_string).collect();
    let by_ids = greedy(&["--json", "--prompt-ids", &prompt.join(",")]).json();
    assert_eq!(by_ids["samples"][0]["ids"], document["samples"][0]["ids"]);
    assert_eq!(by_ids["samples"][0]["logprobs"], document["samples"][0]["logprobs"]);
    assert_eq!(by_ids["samples"][0]["text"], Value::Null);
    greedy(&["1+1="]).assert_bad(&["no tokenizer"]);
}

#[test]
fn stop_strings_and_truncation() {
    let dir = saved(Family::Qwen2);
    let base = ["generate", "--model", dir.text(), "--json", "--n", "8", "--max-new", "80"];
    let run = |more: &[&str]| qurl(&[&base, more].concat()).json();
    for sample in run(&["--stop", "1", "--stop", "e", "0"])["samples"].as_array().expect("samples") {
        let text = sample["text"].as_str().expect("text");
        let stops = text.matches(['1', 'e']).count();
        assert!(stops <= 1, "{text:?} continues after a stop string");
        assert_eq!(stops == 1, text.ends_with(['1', 'e']));
        assert!(stops == 0 || sample["finish"] == "stop");
    }
    let one = |options: &[&str]| run(&[options, &["0"]].concat())["samples"][0].clone();
    for options in [["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"]] {
        let sample = one(&options);
        assert_eq!(sample["ids"], one(&["--temperature", "0"])["ids"], "{options:?}");
        assert!(
            bits(&sample["logprobs"]).iter().all(|&b| f32::from_bits(b) == 0.0),
            "{options:?}: only one is left"
        );
    }
}

#[test]
fn bad_input_is_named() {
    let dir = saved(Family::Qwen2);
    let run = |more: &[&str]| -> Run { qurl(&[&["generate", "--model", dir.text()], more].concat()) };
    run(&["--format", "int3", "a"]).assert_bad(&["int3", "fp8-block"]);
    run(&["--kv", "int4", "a"]).assert_bad(&["int4", "bf16"]);
    run(&[""]).assert_bad(&["prompt is empty"]);
    run(&["--prompt-ids", ""]).assert_bad(&["--prompt-ids"]);
    run(&["--prompt-ids", "1,x"]).assert_bad(&["x"]);
    run(&["--prompt-ids", "1,2", "text"]).assert_bad(&["cannot be used with"]);
    run(&[]).assert_bad(&["PROMPT"]);
    run(&["~"]).assert_bad(&["~"]);
    run(&["--chat", "a"]).assert_bad(&["chat template"]);
    run(&["--n", "0", "a"]).assert_bad(&["n = 0"]);
    run(&["--max-new", "0", "a"]).assert_bad(&["max_new = 0"]);
    run(&["--temperature=-1", "a"]).assert_bad(&["temperature"]);
    run(&["--top-p", "0", "a"]).assert_bad(&["top_p"]);
    run(&["--stop", "", "a"]).assert_bad(&["stop string"]);
    run(&["--prompt-ids", "1,99999"]).assert_bad(&["99999", "vocabulary", "position 1"]);
    run(&[&"1".repeat(200)]).assert_bad(&["200", "96"]);
    let many = [("QURL_THREADS", "many")];
    crate::common::qurl_with(dir.path(), &["generate", "--model", ".", "a"], &many, "")
        .assert_bad(&["QURL_THREADS"]);
    crate::common::qurl(&["score", "--model", dir.text()], "{\"ids\":[]}").assert_bad(&["line 1", "ids"]);
    crate::common::qurl(&["score", "--model", dir.text()], "{\"ids\":[1,2]}\n{\"id\":[1]}")
        .assert_bad(&["line 2", "id"]);
    crate::common::qurl(&["score", "--model", dir.text()], "{\"ids\":[1,99999]}")
        .assert_bad(&["99999", "vocabulary"]);
    qurl(&["generate", "--model", "no/such/directory", "a"]).assert_bad(&["no/such/directory"]);
    qurl(&["generate", "--model", dir.text(), "--nonsense", "a"]).assert_bad(&["--nonsense"]);
}

/// Overwrites one number of the file of weights, which holds f32.
fn poison(dir: &Path, tensor: &str, value: f32) {
    let file = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header");
    let at = 8 + header + json[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize + 40;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(&file, bytes).expect("writing");
}

#[test]
fn a_model_that_is_wrong_is_refused() {
    let name = "model.layers.1.mlp.down_proj.weight";
    for value in [f32::NAN, f32::INFINITY] {
        let dir = saved(Family::Qwen2);
        poison(dir.path(), name, value);
        for format in ["f32", "int8"] {
            qurl(&["generate", "--model", dir.text(), "--format", format, "a"]).assert_bad(&[name]);
            crate::common::qurl(&["score", "--model", dir.text(), "--format", format], "{\"ids\":[1]}")
                .assert_bad(&[name]);
        }
    }

    let (mut config, _) = model(Family::Qwen2);
    config.vocab_size = 20;
    config.eos_token_ids = vec![2];
    let dir = TempDir::new();
    save(dir.path(), &config, &qurl_model::params::init(&config, 1, false));
    qurl(&["generate", "--model", dir.text(), "a"]).assert_bad(&["vocabulary", "45", "20"]);
}

/// A channel of zeros has no scale of its own and must not become NaN.
#[test]
fn zero_rows_are_fine_in_every_format() {
    let (config, mut weights) = model(Family::Qwen2);
    let MlpParams::Dense(mlp) = &mut weights.layers[0].mlp;
    mlp.down[..192].fill(0.0);
    weights.layers[1].qkv.fill(0.0);
    let dir = TempDir::new();
    save(dir.path(), &config, &weights);
    for format in FORMATS {
        assert_scored_as_generated(dir.text(), &["--format", format, "--quantize-head"]);
    }
}
