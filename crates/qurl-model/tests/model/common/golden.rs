//! The golden models of transformers (see `goldens/README.md`): loading, and what every comparison with them
//! needs.

use qurl_kernels::{Device, Queue};
use qurl_model::compute::{Recompute, TapeOptions};
use qurl_model::hf::peft::{self, LoadedAdapter};
use qurl_model::params::{LeafLayout, Params, hf_names};
use qurl_model::{ModelConfig, hf};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Models with log-probs and gradients.
pub const CASES: [&str; 11] = [
    "qwen2",
    "qwen2-untied",
    "qwen3",
    "llama2",
    "llama3",
    "llama3-long",
    "llama-linear",
    "mistral",
    "deepseek-r1-distill",
    "mistral-window",
    "qwen3-window",
];

#[derive(Deserialize)]
pub struct Golden {
    pub ids: Vec<Vec<u32>>,
    #[serde(default)]
    pub scorings: Vec<Scoring>,
    pub critic: Option<Critic>,
}

#[derive(Deserialize)]
pub struct Scoring {
    pub temperature: f32,
    pub loss: f64,
    pub gradients: String,
    pub sequences: Vec<Scored>,
}

#[derive(Deserialize)]
pub struct Scored {
    pub g: Vec<f32>,
    pub e: Vec<f32>,
    pub logprobs: Vec<Option<f32>>,
    pub entropies: Vec<Option<f32>>,
    pub argmax: Vec<Option<u32>>,
}

#[derive(Deserialize)]
pub struct Critic {
    pub gradients: String,
    pub sequences: Vec<Valued>,
}

#[derive(Deserialize)]
pub struct Valued {
    pub c: Vec<f32>,
    pub values: Vec<f32>,
}

fn dir(case: &str) -> PathBuf {
    super::package().join("tests/goldens").join(case)
}

pub struct Case {
    pub golden: Golden,
    pub config: ModelConfig,
    pub params: Params<Vec<f32>>,
    pub dir: PathBuf,
}

impl Case {
    /// A model directory with sequences to score and nothing to compare them with.
    pub fn without_golden(dir: &Path, ids: Vec<Vec<u32>>) -> Case {
        let model = hf::load(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let golden = Golden { ids, scorings: Vec::new(), critic: None };
        Case { golden, config: model.config, params: model.params, dir: dir.to_path_buf() }
    }
}

pub fn load(case: &str) -> Case {
    load_with(case, "golden.json")
}

/// The model with 0.7 of its weights, in numbers that bf16 has, and what transformers computes with those.
pub fn load_softer(case: &str) -> Case {
    let case = load_with(case, "softer.json");
    let soften = |x: &f32| half::bf16::from_f32(0.7 * x).to_f32();
    Case { params: case.params.as_ref().map(|weights| weights.iter().map(soften).collect()), ..case }
}

/// Models with adapters of PEFT beside them.
pub const ADAPTED: [&str; 3] = ["qwen2", "qwen3", "llama3"];

/// A model with the adapter beside it, and what PEFT computes with both.
pub fn load_adapted(case: &str) -> (Case, LoadedAdapter) {
    let case = load_with(case, "lora/golden.json");
    let dir = case.dir.join("lora");
    let adapter = peft::load(&dir, &case.config).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    (Case { dir, ..case }, adapter)
}

fn load_with(case: &str, file: &str) -> Case {
    let dir = dir(case);
    let golden = serde_json::from_str(&std::fs::read_to_string(dir.join(file)).expect(file)).expect(case);
    let model = hf::load(&dir).unwrap_or_else(|e| panic!("{case}: {e}"));
    Case { golden, config: model.config, params: model.params, dir }
}

pub fn upload<D: Device>(queue: &mut D::Queue, params: &Params<Vec<f32>>) -> Params<D::Tensor> {
    params.as_ref().map(|p| queue.upload(p).expect("memory"))
}

pub fn zeros_like<D: Device>(device: &D, params: &Params<Vec<f32>>) -> Params<D::Tensor> {
    params.as_ref().map(|p| device.zeros(p.len()).expect("memory"))
}

/// The golden gradients in the layout of our fused leaves.
pub fn golden_gradients(case: &Case, file: &str) -> Params<Vec<f32>> {
    gradients_of(case, file, hf_names(&case.config, case.params.value_head.is_some()))
}

/// The golden gradients of these leaves.
pub fn gradients_of(case: &Case, file: &str, leaves: Params<LeafLayout>) -> Params<Vec<f32>> {
    let bytes = std::fs::read(case.dir.join(file)).expect("gradients");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    leaves.map(|leaf| {
        let values = leaf.tensors.iter().flat_map(|part| {
            let tensor = tensors.tensor(&part.name).unwrap_or_else(|e| panic!("{}: {e}", part.name));
            let (words, _) = tensor.data().as_chunks::<4>();
            words.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
        });
        values.collect()
    })
}

pub fn whole(golden: &Golden) -> TapeOptions {
    let rows = golden.ids.iter().map(Vec::len).sum();
    TapeOptions { rows, sequences: golden.ids.len(), recompute: Recompute::None }
}

pub fn flatten<T: Copy>(sequences: &[Scored], f: impl Fn(&Scored) -> Vec<T>) -> Vec<T> {
    sequences.iter().flat_map(|s| f(s)[1..].to_vec()).collect()
}
