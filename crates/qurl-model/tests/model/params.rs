//! The parameter tree: order, names, shapes, the tensors of each leaf, fresh weights.

use qurl_model::params::{hf_names, init, shapes};
use qurl_model::{Dims, Family, ModelConfig, ParamKind};

fn small(family: Family) -> ModelConfig {
    let dims = Dims {
        vocab_size: 40,
        hidden_size: 16,
        intermediate_size: 24,
        num_layers: 2,
        num_heads: 4,
        num_kv_heads: 2,
    };
    ModelConfig::from_dims(family, dims).unwrap()
}

#[test]
fn leaves_come_in_one_order_with_the_counted_size() {
    let names = |config: &ModelConfig| -> Vec<String> {
        shapes(config, false).iter().map(|info| info.name.clone()).collect()
    };
    let config = small(Family::Qwen2);
    assert_eq!(
        names(&config)[..8],
        [
            "embed",
            "layers.0.attn_norm",
            "layers.0.qkv",
            "layers.0.qkv_bias",
            "layers.0.o",
            "layers.0.mlp_norm",
            "layers.0.gate_up",
            "layers.0.down"
        ]
    );
    for family in Family::ALL {
        for tied in [false, true] {
            let mut config = small(family);
            config.tie_word_embeddings = tied;
            let total: usize = shapes(&config, false).iter().map(|info| info.len()).sum();
            assert_eq!(total as u64, config.param_count(), "{family:?}");
            assert_eq!(names(&config).contains(&"head".to_string()), !tied);
            assert_eq!(names(&config).contains(&"layers.1.k_norm".to_string()), family == Family::Qwen3);
        }
    }
    let with_value = shapes(&config, true);
    assert_eq!(with_value.into_leaves().last().map(|info| (info.rows, info.cols)), Some((1, 16)));
}

#[test]
fn parts_fill_each_leaf_exactly() {
    for family in Family::ALL {
        for leaf in hf_names(&small(family), true) {
            let mut next = 0;
            for tensor in &leaf.tensors {
                assert_eq!(tensor.offset, next, "{}", tensor.name);
                next += tensor.len();
            }
            assert_eq!(next, leaf.info.len(), "{}", leaf.info.name);
        }
    }
    let tree = hf_names(&small(Family::Qwen2), false);
    let names: Vec<&str> = tree.layers[1].qkv.tensors.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.1.self_attn.v_proj.weight"
        ]
    );
    assert_eq!((tree.layers[1].qkv.info.rows, tree.layers[1].qkv.info.cols), (32, 16));
}

#[test]
fn fresh_weights_are_reproducible_and_scaled() {
    let mut config = small(Family::Qwen2);
    config.vocab_size = 2000;
    let a = init(&config, 5, false);
    assert_eq!(a, init(&config, 5, false));
    let with_value = init(&config, 5, true);
    assert_eq!(a.embed, with_value.embed);
    assert!(with_value.value_head.is_some());
    assert_ne!(a.embed, init(&config, 6, false).embed);
    let paired = a.as_ref().zip(shapes(&config, false)).unwrap();
    for (values, info) in paired {
        assert_eq!(values.len(), info.len());
        let rms = (values.iter().map(|x| f64::from(x * x)).sum::<f64>() / values.len() as f64).sqrt();
        let expected = match info.kind {
            ParamKind::QkvBias => 0.0,
            kind if kind.is_norm() => 1.0,
            ParamKind::AttnOut | ParamKind::Down => 0.01,
            _ => 0.02,
        };
        assert!((rms - expected).abs() <= 0.15 * expected, "{}: {rms} {expected}", info.name);
    }
}

#[test]
fn zip_names_the_first_difference() {
    let (qwen2, qwen3) = (shapes(&small(Family::Qwen2), false), shapes(&small(Family::Qwen3), false));
    let error = qwen2.clone().zip(qwen3).unwrap_err().to_string();
    assert!(error.contains("qkv_bias against q_norm in or after layer 0"), "{error}");
    let mut shorter = qwen2.clone();
    shorter.layers.pop();
    assert!(qwen2.zip(shorter).unwrap_err().to_string().contains("2 layers against 1"));
}
