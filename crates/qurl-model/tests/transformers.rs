//! Directories exchanged with transformers in both directions. Needs `QURL_PYTHON`.

mod common;

use common::{TempDir, python, small};
use qurl_model::hf::{SaveOptions, load, save};
use qurl_model::params::{hf_names, init};
use qurl_model::{Dtype, Family, GenerationConfig, ModelConfig, Params, RopeScaling};
use serde_json::Value;

/// The checksum of `tests/python/directory.py`.
fn checksum(values: &[f32]) -> String {
    let sum = (1u64..)
        .zip(values)
        .fold(0u64, |sum, (at, value)| sum.wrapping_add(at.wrapping_mul(u64::from(value.to_bits()))));
    sum.to_string()
}

/// Every tensor of the model is in what transformers printed, with the same shape and bits.
fn assert_same(printed: &Value, config: &ModelConfig, params: &Params<Vec<f32>>, prefix: &str) {
    let layout = hf_names(config, params.value_head.is_some());
    let mut compared = 0;
    for (leaf, values) in layout.zip(params.as_ref()).unwrap() {
        for tensor in &leaf.tensors {
            if tensor.name == "lm_head.weight" && params.value_head.is_some() {
                continue;
            }
            let theirs = &printed["tensors"][&tensor.name];
            let ours = checksum(&values[tensor.offset..tensor.offset + tensor.len()]);
            assert_eq!(theirs["checksum"].as_str(), Some(ours.as_str()), "{prefix}: {}", tensor.name);
            assert_eq!(theirs["shape"], serde_json::json!(tensor.shape), "{prefix}: {}", tensor.name);
            compared += 1;
        }
    }
    let theirs = printed["tensors"].as_object().unwrap();
    let tied = theirs.contains_key("lm_head.weight") && config.tie_word_embeddings;
    assert_eq!(theirs.len(), compared + usize::from(tied), "{prefix}: {:?}", theirs.keys());
}

#[test]
fn transformers_loads_what_we_save() {
    for (case, family) in Family::ALL.into_iter().enumerate() {
        let mut config = small(family);
        config.tie_word_embeddings = case % 2 == 0;
        config.rms_norm_eps = 3e-6;
        config.rope.theta = 12345.0;
        config.rope.scaling = match family {
            Family::Llama => RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 512,
            },
            Family::Mistral => RopeScaling::Linear { factor: 2.0 },
            _ => RopeScaling::None,
        };
        config.eos_token_ids = vec![2, 7];
        let generation = GenerationConfig::from_model(&config);
        let params = init(&config, 11, false);
        let dir = TempDir::new("to-transformers");
        let mut options = SaveOptions::new(Dtype::F32, &generation);
        options.max_shard_bytes = 4000;
        save(dir.path(), &config, &params, &options).unwrap();
        assert!(dir.file("model.safetensors.index.json").exists());
        let Some(output) = python("directory.py", &["read", &dir.path().to_string_lossy()]) else {
            return;
        };
        let printed: Value = serde_json::from_str(&output).unwrap();
        assert_same(&printed, &config, &params, config.family.model_type());
        assert_eq!(printed["output"], serde_json::json!([1, 5, 40]));
        // What transformers understood of the configuration, written by it and read by us, is the same.
        let again = ModelConfig::from_json(&printed["config"].to_string(), "theirs").unwrap();
        let mut expected = config.clone();
        expected.dtype = Dtype::F32;
        assert_eq!(again, expected);
    }
}

#[test]
fn transformers_loads_our_critic() {
    let config = small(Family::Qwen2);
    let params = init(&config, 12, true);
    let generation = GenerationConfig::from_model(&config);
    let dir = TempDir::new("critic");
    save(dir.path(), &config, &params, &SaveOptions::new(Dtype::F32, &generation)).unwrap();
    let path = dir.path().to_string_lossy().into_owned();
    let Some(output) = python("directory.py", &["read", &path, "score"]) else {
        return;
    };
    let printed: Value = serde_json::from_str(&output).unwrap();
    assert_same(&printed, &config, &params, "critic");
    assert_eq!(printed["output"], serde_json::json!([1, 1]));
}

#[test]
fn we_load_what_transformers_saves() {
    for (family, dtype) in
        [("qwen2", "float32"), ("qwen3", "bfloat16"), ("llama", "float16"), ("mistral", "bfloat16")]
    {
        let dir = TempDir::new("from-transformers");
        let path = dir.path().to_string_lossy().into_owned();
        let Some(output) = python("directory.py", &["make", &path, family, dtype]) else {
            return;
        };
        let printed: Value = serde_json::from_str(&output).unwrap();
        let model = load(dir.path()).unwrap();
        assert_eq!(model.config.family.model_type(), family);
        assert_eq!(model.config.dtype.name(), dtype);
        assert_eq!(model.unused_tensors, Vec::<String>::new());
        assert_same(&printed, &model.config, &model.params, family);
    }
}
