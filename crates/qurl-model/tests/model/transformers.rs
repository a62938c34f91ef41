//! Directories exchanged with transformers in both directions. Needs `QURL_PYTHON`.

use crate::common::{TempDir, python, small};
use qurl_kernels::cpu::level::Level;
use qurl_kernels::{Cpu, Device, Format, Queue};
use qurl_model::compute::{Base, BaseLeaves, Network, NetworkOptions, score};
use qurl_model::hf::peft::{self, LoadedAdapter};
use qurl_model::hf::{SaveOptions, load, save};
use qurl_model::lora::{Module, Modules};
use qurl_model::params::{hf_names, init};
use qurl_model::rng::CounterRng;
use qurl_model::{Dtype, Family, GenerationConfig, Lora, ModelConfig, Params, RopeScaling};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

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

/// A base and an adapter beside it in two directories, and what is computed with both.
fn with_adapter(base: &Path, adapter: &Path, ids: &[u32]) -> Vec<f32> {
    let cpu = Arc::new(Cpu::new(Level::best(), 2));
    let queue = &mut cpu.queue().unwrap();
    let model = load(base).unwrap();
    let adapter = peft::load(adapter, &model.config).unwrap();
    let options =
        NetworkOptions { lora: Some(adapter.lora), ..NetworkOptions::inference(&model.config, Format::F32) };
    let mut leaves = BaseLeaves::<Cpu>::new(Base::Host(&model.params));
    let mut net = Network::of_leaves(queue, &model.config, false, &mut leaves, options).unwrap();
    let adapters = adapter.params.try_map(|leaf| queue.upload(&leaf)).unwrap();
    net.refresh(queue, &adapters).unwrap();
    score(queue, &net, &[ids], 1.0, 100).unwrap().remove(0).logp
}

/// What PEFT prints of an adapter; none where there is no PEFT.
fn of_peft(what: &str, base: &Path, adapter: &Path, ids: &[u32]) -> Option<Value> {
    let (base, adapter) = (base.to_string_lossy(), adapter.to_string_lossy());
    let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    let printed = python("adapter.py", &[what, &base, &adapter, &ids])?;
    let printed: Value = serde_json::from_str(&printed).unwrap();
    if let Some(why) = printed["skipped"].as_str() {
        println!("skipped: {why}");
        return None;
    }
    Some(printed)
}

fn assert_log_probs(ours: &[f32], printed: &Value) {
    let theirs = printed["logprobs"].as_array().unwrap();
    assert_eq!(ours.len(), theirs.len());
    for (ours, theirs) in ours.iter().zip(theirs) {
        let theirs = theirs.as_f64().unwrap();
        assert!((f64::from(*ours) - theirs).abs() < 1e-4, "{ours} here, {theirs} there");
    }
}

#[test]
fn peft_loads_what_we_save_and_we_what_it_saves() {
    let ids = [3, 1, 4, 1, 5, 9, 2, 6];
    for family in [Family::Qwen2, Family::Qwen3, Family::Llama] {
        let config = small(family);
        let params = init(&config, 11, false);
        let base = TempDir::new("lora-base");
        let generation = GenerationConfig::from_model(&config);
        save(base.path(), &config, &params, &SaveOptions::new(Dtype::F32, &generation)).unwrap();
        for (rslora, targets) in [(false, Modules::ALL), (true, Modules::of([Module::QProj, Module::UpProj]))]
        {
            let lora = Lora { rank: 5, alpha: 7.5, rslora, targets };
            let mut adapters = lora.init(&config, 2);
            let random = CounterRng::new(&[4]);
            let numbers = adapters.iter_mut().flatten().enumerate();
            numbers.for_each(|(i, x)| *x += 0.2 * random.normal_at(i as u64) as f32);
            let dir = TempDir::new("lora-ours");
            peft::save(dir.path(), &config, &lora, &adapters, Some("the base"), &[]).unwrap();
            let again = peft::load(dir.path(), &config).unwrap();
            assert_eq!(
                (again.lora, &again.params, again.base.as_deref()),
                (lora, &adapters, Some("the base"))
            );
            let ours = with_adapter(base.path(), dir.path(), &ids);
            let Some(printed) = of_peft("score", base.path(), dir.path(), &ids) else { return };
            assert_log_probs(&ours, &printed);
            let count = 2 * targets.iter().count() * config.num_layers;
            assert_eq!(printed["trained"], count, "{}", printed["modules"]);
        }
        // Begun in other ways they are the same for all families.
        let (begun, changed) = match family {
            Family::Qwen2 => (
                &["make", "make-gaussian", "make-orthogonal", "make-mica", "regex", "plain-olora"][..],
                &["make-olora", "make-pissa", "make-pissa_niter_4"][..],
            ),
            _ => (&["make"][..], &[][..]),
        };
        for what in begun {
            let theirs = TempDir::new("lora-theirs");
            let Some(printed) = of_peft(what, base.path(), theirs.path(), &ids) else { return };
            let loaded = peft::load(theirs.path(), &config).unwrap();
            if *what == "regex" {
                assert_eq!(
                    loaded.lora.targets,
                    Modules::of([Module::QProj, Module::OProj, Module::DownProj])
                );
            }
            assert_log_probs(&with_adapter(base.path(), theirs.path(), &ids), &printed);
        }
        for what in changed {
            let theirs = TempDir::new("lora-of-another-base");
            if of_peft(what, base.path(), theirs.path(), &ids).is_none() {
                return;
            }
            let error = peft::load(theirs.path(), &config).unwrap_err().to_string();
            let init = what.trim_start_matches("make-");
            assert!(error.contains(&format!("`init_lora_weights` is \"{init}\"")), "{error}");
        }
    }
}

/// The settings of a directory with one key changed, and what loading it says.
fn reload(dir: &Path, config: &ModelConfig, changes: &[(&str, Value)]) -> Result<LoadedAdapter, String> {
    let lora = Lora { rank: 2, alpha: 4.0, rslora: false, targets: Modules::ALL };
    peft::save(dir, config, &lora, &lora.init(config, 1), None, &[]).unwrap();
    let file = dir.join(peft::CONFIG);
    let mut settings: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    changes.iter().for_each(|(key, value)| settings[key] = value.clone());
    std::fs::write(&file, settings.to_string()).unwrap();
    peft::load(dir, config).map_err(|e| e.to_string())
}

#[test]
fn an_adapter_of_a_base_that_peft_changed_is_refused() {
    let config = small(Family::Qwen2);
    let dir = TempDir::new("lora-init");
    let of = |init: Value| reload(dir.path(), &config, &[("init_lora_weights", init)]);
    for init in ["olora", "OLoRA", "pissa", "pissa_niter_16", "corda", "loftq", "lora_ga", "another"] {
        let error = of(init.into()).unwrap_err();
        let found = format!("adapter_config.json: `init_lora_weights` is \"{init}\", expected true");
        assert!(error.contains(&found), "{error}");
        assert!(error.contains("path_initial_model_for_weight_conversion"), "{error}");
    }
    for init in ["gaussian", "Gaussian", "eva", "orthogonal", "mica"] {
        assert!(of(init.into()).is_ok(), "{init}");
    }
    for init in [Value::Bool(true), Value::Bool(false), Value::Null] {
        assert!(of(init).is_ok());
    }
    // The settings of an initialization that is not used are not read, here as in PEFT.
    let settings = serde_json::json!({"rho": 2.0});
    let eva = reload(dir.path(), &config, &[("init_lora_weights", "eva".into()), ("eva_config", settings)]);
    assert!(eva.is_ok(), "{eva:?}");
}

#[test]
fn modules_are_matched_as_peft_matches_them() {
    let config = small(Family::Qwen2);
    let dir = TempDir::new("lora-targets");
    let of = |targets: Value, excluded: Value| {
        reload(dir.path(), &config, &[("target_modules", targets), ("exclude_modules", excluded)])
            .map(|adapter| adapter.lora.targets)
    };
    // What Unsloth writes.
    let parts = "self_attn|attention|attn|mlp|feed_forward|ffn|dense";
    let modules = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj";
    let unsloth = format!(
        "(?:.*?(?:language|text).*?(?:{parts}).*?(?:{modules}).*?)|\
         (?:\\bmodel\\.layers\\.[\\d]{{1,}}\\.(?:{parts})\\.(?:(?:{modules})))"
    );
    assert_eq!(of(unsloth.into(), Value::Null), Ok(Modules::ALL));
    assert_eq!(of("All-Linear".into(), serde_json::json!(["lm_head", "visual"])), Ok(Modules::ALL));
    assert_eq!(of("all-linear".into(), "".into()), Ok(Modules::ALL));
    let every: Vec<String> = (0..config.num_layers)
        .flat_map(|i| Module::ALL.map(|m| format!("layers.{i}.{}.{}", part_of(m), m.name())))
        .collect();
    assert_eq!(of(serde_json::json!(every), Value::Null), Ok(Modules::ALL));
    // A whole match, in every block, and of what has adapters here.
    let refused = |targets: Value, excluded: Value| of(targets, excluded).unwrap_err();
    for (targets, excluded, key, why) in [
        (Value::from("q_proj"), Value::Null, "target_modules", "regular expression"),
        ("(?!lm_head).*proj".into(), Value::Null, "target_modules", "without lookaround"),
        (".*".into(), Value::Null, "target_modules", "lm_head"),
        ("model.layers.0.*_proj".into(), Value::Null, "target_modules", "q_proj is meant in 1 of"),
        (
            "all-linear".into(),
            serde_json::json!(["layers.1.mlp.up_proj"]),
            "target_modules",
            "up_proj is meant",
        ),
        (serde_json::json!(["q_proj", "c_attn"]), Value::Null, "target_modules", "has no c_attn"),
        (serde_json::json!([]), Value::Null, "target_modules", "a list of some of"),
        ("all-linear".into(), 3.into(), "exclude_modules", "a list of names"),
    ] {
        let error = refused(targets, excluded);
        assert!(error.contains(&format!("`{key}` is ")) && error.contains(why), "{error}");
    }
    // Modules that are excluded have no tensors: those that the file has are then too many.
    assert!(refused("all-linear".into(), serde_json::json!(["q_proj"])).contains("q_proj.lora_A"));
}

fn part_of(module: Module) -> &'static str {
    match module {
        Module::QProj | Module::KProj | Module::VProj | Module::OProj => "self_attn",
        Module::GateProj | Module::UpProj | Module::DownProj => "mlp",
    }
}

#[test]
fn an_adapter_that_asks_for_more_is_refused_by_its_key() {
    let config = small(Family::Qwen2);
    let lora = Lora { rank: 2, alpha: 4.0, rslora: false, targets: Modules::ALL };
    let dir = TempDir::new("lora-refused");
    peft::save(dir.path(), &config, &lora, &lora.init(&config, 1), None, &[]).unwrap();
    let file = dir.path().join(peft::CONFIG);
    let good: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    let refused = |key: &str, value: Value| {
        let mut changed = good.clone();
        changed[key] = value;
        std::fs::write(&file, changed.to_string()).unwrap();
        let error = peft::load(dir.path(), &config).unwrap_err().to_string();
        assert!(error.contains("adapter_config.json") || error.contains("adapter_model"), "{error}");
        error
    };
    assert!(refused("use_dora", Value::Bool(true)).contains("`use_dora` is true"));
    assert!(refused("peft_type", "IA3".into()).contains("expected \"LORA\""));
    assert!(refused("rank_pattern", serde_json::json!({"q_proj": 4})).contains("rank_pattern"));
    assert!(refused("target_modules", serde_json::json!(["q_proj", "c_attn"])).contains("c_attn"));
    assert!(refused("r", 0.into()).contains("`r` is 0"));
    assert!(refused("lora_alpha", "x".into()).contains("lora_alpha"));
    assert!(refused("bias", "all".into()).contains("bias"));
    // Another rank or other layers than the tensors have.
    assert!(refused("r", 3.into()).contains("has shape [2, "));
    assert!(refused("target_modules", serde_json::json!(["q_proj"])).contains("lora_A"));
    std::fs::write(&file, "{").unwrap();
    assert!(peft::load(dir.path(), &config).unwrap_err().to_string().contains("invalid JSON"));
    std::fs::remove_file(&file).unwrap();
    assert!(peft::load(dir.path(), &config).is_err());
}
