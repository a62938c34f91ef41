//! `--adapter` in the commands that have it, `qurl merge`, and what is said where adapters and models are
//! mixed up.

use crate::common::Run;
use crate::generate::{assert_scored_as_generated, score};
use crate::models::{TempDir, model, qurl, saved, tokenizer};
use qurl_model::hf::peft;
use qurl_model::lora::{Lora, Modules};
use qurl_model::rng::CounterRng;
use qurl_model::{Family, Params};
use serde_json::Value;
use std::path::Path;

pub const FAMILY: Family = Family::Qwen2;

/// Adapters of the small model that change what it says; another seed, other numbers.
pub fn adapter(dir: &Path, seed: u64) -> (Lora, Params<Vec<f32>>) {
    let (config, _) = model(FAMILY);
    let lora = Lora { rank: 4, alpha: 8.0, rslora: false, targets: Modules::ALL };
    let mut adapters = lora.init(&config, seed);
    let random = CounterRng::new(&[seed]);
    let numbers = adapters.iter_mut().flatten().enumerate();
    numbers.for_each(|(i, x)| *x += 0.2 * random.normal_at(i as u64) as f32);
    peft::save(dir, &config, &lora, &adapters, Some("the/base"), tokenizer().files()).expect("saved");
    (lora, adapters)
}

fn log_probs(scored: &[Value]) -> Vec<f64> {
    let of = |line: &Value| line["logprobs"].as_array().expect("log-probs").clone();
    scored.iter().flat_map(of).filter_map(|x| x.as_f64()).collect()
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn a_model_with_adapters_says_what_the_merged_one_says() {
    let (base, place) = (saved(FAMILY), TempDir::new());
    let (dir, merged) = (place.path().join("adapter"), place.path().join("merged"));
    adapter(&dir, 3);
    let [dir, merged] = [&dir, &merged].map(|path| path.to_str().expect("UTF-8"));
    let merge = ["merge", "--model", base.text(), "--adapter", dir, "--json", merged];
    let summary = qurl(&merge).json();
    assert_eq!((&summary["dtype"], &summary["out"]), (&"float32".into(), &merged.into()), "{summary}");
    let (config, _) = model(FAMILY);
    let adapters = Lora { rank: 4, alpha: 8.0, rslora: false, targets: Modules::ALL }.param_count(&config);
    assert_eq!(summary["adapter_parameters"], adapters);
    qurl(&merge).assert_bad(&[merged, "--force"]);
    qurl(&["merge", "--model", base.text(), "--adapter", dir, dir]).assert_bad(&[dir]);

    // score
    let sequences = [vec![3, 9, 14, 20, 7], vec![1, 2, 3]];
    let with = score(base.text(), &["--format", "f32", "--adapter", dir], &sequences);
    let whole = log_probs(&score(merged, &["--format", "f32"], &sequences));
    let plain = log_probs(&score(base.text(), &["--format", "f32"], &sequences));
    let with = log_probs(&with);
    assert!(largest_difference(&with, &whole) < 1e-4, "{with:?} {whole:?}");
    assert!(largest_difference(&with, &plain) > 0.1, "{with:?} {plain:?}");

    // generate: its log-probs are those of score, beside a quantized base, too.
    for format in ["f32", "int8"] {
        assert_scored_as_generated(base.text(), &["--format", format, "--adapter", dir]);
    }
    let answer = |model: &[&str]| {
        let rest = ["--format", "f32", "--temperature", "0", "--max-new", "12", "--json", "12+34="];
        let document = qurl(&[&["generate", "--model"], model, &rest].concat()).json();
        document["samples"][0]["ids"].clone()
    };
    let with = answer(&[base.text(), "--adapter", dir]);
    assert_eq!(with, answer(&[merged]));
    assert_ne!(with, answer(&[base.text()]));

    // eval
    let file = place.path().join("sums.jsonl");
    let row = |i: u64| format!("{{\"problem\": \"{i}+1=\", \"answer\": \"{}\"}}\n", i % 10);
    std::fs::write(&file, (0..6).map(row).collect::<String>()).expect("written");
    let evaluated = |name: &str, model: &[&str]| {
        let (out, file) = (place.path().join(name), file.to_str().expect("UTF-8"));
        let out = out.to_str().expect("UTF-8");
        let rest = ["--format", "f32", "--data", file, "--k", "2", "--max-new", "12", "--out", out, "--json"];
        qurl(&[&["eval", "--model"], model, &rest].concat()).json();
        let text = std::fs::read_to_string(Path::new(out).join("responses.jsonl")).expect("responses");
        let greedy = |line: &str| serde_json::from_str::<Value>(line).expect("JSON")["greedy"].clone();
        text.lines().map(greedy).collect::<Vec<_>>()
    };
    let with = evaluated("with", &[base.text(), "--adapter", dir]);
    assert_eq!(with.len(), 6);
    assert_eq!(with, evaluated("merged-eval", &[merged]));
    assert_ne!(with, evaluated("base-eval", &[base.text()]));
}

#[test]
fn adapters_and_models_that_are_mixed_up_are_told_apart() {
    let (base, run) = (saved(FAMILY), TempDir::new());
    let dir = run.path().join("model");
    adapter(&dir, 3);
    let dir = dir.to_str().expect("UTF-8");
    let ask = |model: &str, adapter: &str| -> Run {
        qurl(&["generate", "--model", model, "--adapter", adapter, "1+1="])
    };
    // An adapter where its base is meant.
    let expected = ["LoRA adapters (adapter_config.json)", "--model the/base --adapter", dir, "lora.path"];
    qurl(&["generate", "--model", dir, "1+1="]).assert_bad(&expected);
    qurl(&["score", "--model", dir]).assert_bad(&expected);
    // A run where its model is meant, a whole model, and nothing at all.
    ask(base.text(), run.text()).assert_bad(&["no adapters", &format!("as is {dir}")]);
    ask(base.text(), base.text()).assert_bad(&["a whole model (config.json)", "adapter_config.json"]);
    ask(base.text(), "/nowhere").assert_bad(&["/nowhere: no adapters", "adapter_model.safetensors"]);
    // Weights as PEFT wrote them once.
    let weights = Path::new(dir).join(peft::WEIGHTS);
    std::fs::rename(&weights, Path::new(dir).join("adapter_model.bin")).expect("renamed");
    ask(base.text(), dir).assert_bad(&["adapter_model.bin", "safe_serialization=True"]);
}
