//! `config.json` in both spellings, refusals by name, and the round trip through what we write.

use qurl_model::{ConfigError, Dims, Dtype, Family, ModelConfig, RopeScaling};
use serde_json::{Value, json};

/// A config in the old spelling with `changes` merged in; a JSON null in `changes` stays a null.
fn old_config(model_type: &str, changes: Value) -> String {
    let mut config = json!({
        "model_type": model_type,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "sliding_window": null,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

fn read(model_type: &str, changes: Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(&old_config(model_type, changes), "dir/config.json")
}

#[test]
fn old_and_new_spelling_give_the_same_config() {
    let old = read(
        "llama",
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 128}}),
    )
    .unwrap();
    let mut text: Value = serde_json::from_str(&old_config("llama", json!({"dtype": "bfloat16"}))).unwrap();
    let map = text.as_object_mut().unwrap();
    map.remove("rope_theta");
    map.remove("torch_dtype");
    map.insert(
        "rope_parameters".to_string(),
        json!({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 128}),
    );
    let new = ModelConfig::from_json(&text.to_string(), "dir/config.json").unwrap();
    assert_eq!(old, new);
    assert_eq!(old.dtype, Dtype::Bf16);
    assert_eq!(old.rope.theta, 500000.0);
    assert_eq!(old.eos_token_ids, [2, 3]);
    assert!(matches!(old.rope.scaling, RopeScaling::Llama3 { factor: 8.0, .. }));
}

#[test]
fn families_differ_where_they_should() {
    let qwen2 = read("qwen2", json!({"use_sliding_window": false, "sliding_window": 32768})).unwrap();
    assert!(qwen2.qkv_bias && !qwen2.qk_norm);
    let qwen3 = read("qwen3", json!({"head_dim": 32, "tie_word_embeddings": true})).unwrap();
    assert!(!qwen3.qkv_bias && qwen3.qk_norm && qwen3.tie_word_embeddings);
    assert_eq!((qwen3.head_dim, qwen3.q_dim(), qwen3.qkv_dim()), (32, 128, 256));
    assert_eq!(read("qwen3", json!({})).unwrap().head_dim, 128);
    let llama = read(
        "llama",
        json!({"num_key_value_heads": null, "rope_scaling": {"type": "linear", "factor": 4.0}}),
    );
    let llama = llama.unwrap();
    assert_eq!(llama.num_kv_heads, 4);
    assert_eq!(llama.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(read("mistral", json!({"pad_token_id": -1})).unwrap().pad_token_id, None);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases = [
        ("mistral", json!({"sliding_window": 7, "layer_types": ["full_attention"]}), "layer_types"),
        ("qwen2", json!({"layer_types": ["chunked_attention"]}), "layer_types"),
        ("qwen3_moe", json!({}), "model_type"),
        ("mixtral", json!({}), "model_type"),
        ("gpt2", json!({}), "model_type"),
        ("llama", json!({"num_local_experts": 8}), "num_local_experts"),
        ("qwen3", json!({"num_experts": 128}), "num_experts"),
        ("llama", json!({"attention_bias": true}), "attention_bias"),
        ("llama", json!({"mlp_bias": true}), "mlp_bias"),
        ("llama", json!({"hidden_act": "gelu"}), "hidden_act"),
        ("llama", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("qwen2", json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "rope_scaling.type"),
        ("llama", json!({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}), "rope_scaling.rope_type"),
        ("llama", json!({"rope_parameters": {"rope_type": "longrope"}}), "rope_parameters.rope_type"),
        ("qwen2", json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types"),
        ("llama", json!({"torch_dtype": "float8_e4m3fn"}), "torch_dtype"),
        (
            "llama",
            json!({"quantization_config": {"quant_method": "awq"}}),
            "quantization_config.quant_method",
        ),
    ];
    for (model_type, changes, expected_key) in cases {
        match read(model_type, changes.clone()) {
            Err(error @ ConfigError::Unsupported { .. }) => {
                let text = error.to_string();
                assert!(text.starts_with("dir/config.json: key `"), "{text}");
                assert!(text.contains(&format!("`{expected_key}`")), "{changes}: {text}");
            }
            other => panic!("{model_type} {changes}: {other:?}"),
        }
    }
}

#[test]
fn wrong_values_are_named() {
    let cases = [
        (json!({"hidden_size": "64"}), "key `hidden_size` is \"64\", expected a whole number"),
        (json!({"hidden_size": null}), "key `hidden_size` is missing"),
        (
            json!({"hidden_size": 66}),
            "key `hidden_size` is 66, expected a multiple of num_attention_heads = 4",
        ),
        (json!({"num_attention_heads": 0}), "num_attention_heads"),
        (json!({"num_key_value_heads": 3}), "a divisor of num_attention_heads = 4"),
        (json!({"num_hidden_layers": 1u64 << 40}), "num_hidden_layers"),
        (json!({"vocab_size": u64::MAX}), "vocab_size"),
        (json!({"head_dim": 1 << 23}), "head_dim"),
        (json!({"head_dim": 7}), "an even number"),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps"),
        (json!({"rope_theta": -1.0}), "rope_theta"),
        (json!({"eos_token_id": "</s>"}), "eos_token_id"),
        (json!({"rope_scaling": {"type": "linear"}}), "key `rope_scaling.factor` is missing"),
        (json!({"rope_parameters": {"rope_theta": 1.0}}), "rope_parameters.rope_theta"),
        (
            json!({"rope_theta": 1e308, "rope_parameters": {"rope_theta": 1.0}}),
            "is 1.0, expected the same value as the other rope_theta, 1e308",
        ),
        (json!({"qurl": {"uaq": 0}}), "key `qurl.uaq` is 0, expected a number from 1/64 to 64"),
        (json!({"qurl": {"uaq": "2"}}), "key `qurl.uaq` is \"2\", expected a number"),
        (json!({"qurl": {"scale": 2}}), "qurl.scale"),
        (json!({"qurl": 2}), "key `qurl` is 2, expected an object"),
    ];
    for (changes, expected) in cases {
        let error = read("llama", changes.clone()).expect_err(&changes.to_string()).to_string();
        assert!(error.contains(expected), "{changes}: {error}");
    }
    let garbage = ModelConfig::from_json("[1, 2]", "x.json").unwrap_err().to_string();
    assert!(garbage.starts_with("x.json: expected a JSON object"), "{garbage}");
}

#[test]
fn sliding_windows_are_those_of_the_published_classes() {
    let windows = |model_type: &str, changes: Value| {
        let config = read(model_type, changes.clone()).unwrap_or_else(|e| panic!("{changes}: {e}"));
        let again = ModelConfig::from_json(&config.to_json().to_string(), "again").unwrap();
        assert_eq!(again, config, "{changes}");
        (0..config.num_layers).map(|layer| config.window(layer)).collect::<Vec<_>>()
    };
    let layers = windows("mistral", json!({})).len();
    assert_eq!(windows("mistral", json!({"sliding_window": 7})), vec![Some(7); layers]);
    let mut text: Value = serde_json::from_str(&old_config("mistral", json!({}))).unwrap();
    text.as_object_mut().unwrap().remove("sliding_window");
    let absent = ModelConfig::from_json(&text.to_string(), "x.json").unwrap();
    assert_eq!(absent.window(0), Some(4096), "absent means 4096");
    let unused = json!({"use_sliding_window": false, "sliding_window": 7});
    assert_eq!(windows("qwen2", unused), vec![None; layers]);
    let later = json!({"use_sliding_window": true, "sliding_window": 7, "max_window_layers": 1});
    let mut expected = vec![Some(7); layers];
    expected[0] = None;
    assert_eq!(windows("qwen2", later), expected);
    let kinds: Vec<&str> = (0..layers).map(|i| ["sliding_attention", "full_attention"][i % 2]).collect();
    let listed = json!({"use_sliding_window": true, "sliding_window": 9, "layer_types": kinds});
    assert_eq!(windows("qwen3", listed), (0..layers).map(|i| [Some(9), None][i % 2]).collect::<Vec<_>>());
    let kinds = vec!["sliding_attention"; 99];
    let short = json!({"use_sliding_window": true, "sliding_window": 9, "layer_types": kinds});
    let error = read("qwen3", short).unwrap_err().to_string();
    assert!(error.contains("`layer_types` is a list of 99, expected one for each of"), "{error}");
    let error = read("mistral", json!({"sliding_window": 0})).unwrap_err().to_string();
    assert!(error.contains("`sliding_window` is 0, expected a whole number from 1"), "{error}");
}

#[test]
fn what_we_write_reads_back_equal() {
    let dims = Dims {
        vocab_size: 512,
        hidden_size: 64,
        intermediate_size: 96,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
    };
    for family in Family::ALL {
        for scaling in [
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.5 },
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8192,
            },
        ] {
            let mut config = ModelConfig::from_dims(family, dims).unwrap();
            config.rope.scaling = scaling;
            config.head_dim = 32;
            config.eos_token_ids = vec![7, 9];
            config.bos_token_id = Some(1);
            config.tie_word_embeddings = true;
            config.initializer_range = 0.03;
            config.dtype = Dtype::F16;
            config.uaq = 1.1;
            let text = config.to_json().to_string();
            assert_eq!(ModelConfig::from_json(&text, "config.json").unwrap(), config, "{text}");
        }
    }
}

#[test]
fn published_shapes_have_published_sizes() {
    let counts = [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("Qwen2.5-32B", 32_763_876_352),
    ];
    for (name, count) in counts {
        let config = ModelConfig::named(name).unwrap();
        assert_eq!(config.param_count(), count, "{name}");
        assert_eq!((config.rope.theta, config.rms_norm_eps), (1e6, 1e-6));
    }
    let error = ModelConfig::named("gpt-5").unwrap_err().to_string();
    assert!(error.contains("`gpt-5`") && error.contains("qwen2.5-14b"), "{error}");
}
