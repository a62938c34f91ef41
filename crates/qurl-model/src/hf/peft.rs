//! Adapter directories as PEFT writes them, in and out: `adapter_config.json` and
//! `adapter_model.safetensors`.
//!
//! What PEFT can ask for and we do not compute (DoRA, biases, other ranks for some layers, layers left out)
//! is refused by its key: an adapter that loads is the whole adapter. Keys that are not known are accepted
//! where they say nothing (`null`, `false`, `{}`), since new versions of PEFT add such keys. So is an adapter
//! that was trained beside a base that PEFT had changed first ([`leaves_the_base`]): beside the base as it is
//! it would be another model.

mod targets;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::check_memory;
use super::checkpoint::Checkpoint;
use super::error::HfError;
use super::hub;
use super::save::{pretty, write_tensors};
use super::staged::Staged;
use crate::config::{Dtype, ModelConfig};
use crate::lora::{Lora, Module};
use crate::params::Params;
use crate::tokenizer;
use targets::Refused;

/// The file with the settings.
pub const CONFIG: &str = "adapter_config.json";
/// The file with the weights.
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// Bytes of the settings.
const MAX_CONFIG: u64 = 16 * qurl_files::MIB;

/// Keys whose values say nothing about what is computed.
///
/// The settings of an initialization are among them: where `init_lora_weights` names another one, PEFT does
/// not read them, and what PEFT has converted to plain LoRA keeps them.
const NEUTRAL: [&str; 16] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
];

/// An adapter as it came from a directory.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedAdapter {
    /// Which layers it is for, and how large it is.
    pub lora: Lora,
    /// Its weights; the leaves of the base have no numbers.
    pub params: Params<Vec<f32>>,
    /// The model that it was trained beside, where the directory says.
    pub base: Option<String>,
}

/// Whether a directory holds an adapter.
pub fn is_adapter(dir: &Path) -> bool {
    dir.join(CONFIG).exists()
}

/// Where PEFT put weights before it wrote safetensors; a pickle can run code, and is not read.
const PICKLED: &str = "adapter_model.bin";

/// Refuses a directory that is not one of adapters, and says where they are if they are near.
fn check_directory(dir: &Path) -> Result<(), HfError> {
    let wrong = |found: &str, expected: String| {
        Err(HfError::Adapter { file: dir.to_path_buf(), found: found.to_string(), expected })
    };
    if !is_adapter(dir) {
        let files = format!("a directory of LoRA adapters, with {CONFIG} and {WEIGHTS}");
        // A run, or a checkpoint.
        let model = dir.join("model");
        return match (is_adapter(&model), dir.join("config.json").exists()) {
            (true, _) => wrong("no adapters", format!("{files}, as is {}", model.display())),
            (false, true) => wrong("a whole model (config.json)", files),
            (false, false) => wrong("no adapters", files),
        };
    }
    if !dir.join(WEIGHTS).exists() && dir.join(PICKLED).exists() {
        let how = format!("{WEIGHTS}: load the adapter in PEFT and save it with safe_serialization=True");
        return wrong(PICKLED, how);
    }
    Ok(())
}

/// What to say of a directory of adapters where a whole model is expected.
pub(super) fn instead_of_model(dir: &Path) -> HfError {
    let base = qurl_files::read_text(&dir.join(CONFIG), MAX_CONFIG)
        .ok()
        .and_then(|text| serde_json::from_str::<Value>(&text).ok())
        .and_then(|config| config["base_model_name_or_path"].as_str().map(str::to_string));
    let (base, dir) = (base.unwrap_or_else(|| "BASE".to_string()), dir.to_path_buf());
    let expected = format!(
        "a whole model with config.json; adapters go beside their base: `--model {base} --adapter {}` on a \
         command line, `model.path` and `lora.path` in a recipe",
        dir.display()
    );
    HfError::Adapter { file: dir, found: format!("LoRA adapters ({CONFIG})"), expected }
}

/// Loads an adapter of this model.
pub fn load(dir: &Path, config: &ModelConfig) -> Result<LoadedAdapter, HfError> {
    check_directory(dir)?;
    let (lora, base) = read_config(&dir.join(CONFIG), config)?;
    let checkpoint = Checkpoint::open_file(dir.join(WEIGHTS))?;
    let layout = lora.names(config);
    let used: BTreeSet<&str> =
        layout.iter().flat_map(|leaf| leaf.tensors.iter().map(|tensor| tensor.name.as_str())).collect();
    if let Some(unused) = checkpoint.names().find(|name| !used.contains(name)) {
        let (file, tensor) = (dir.join(WEIGHTS), unused.to_string());
        let expected = format!("A and B of {} in {} blocks alone", lora.targets, config.num_layers);
        return Err(HfError::Adapter { file, found: format!("tensor {tensor}"), expected });
    }
    check_memory(dir, lora.param_count(config))?;
    let params = layout.try_map(|leaf| checkpoint.read_leaf(&leaf))?;
    Ok(LoadedAdapter { lora, params, base })
}

/// Whether PEFT leaves the weights of the base as they are with this `init_lora_weights`, when training
/// begins and when the adapter is loaded again.
///
/// OLoRA, PiSSA, CorDA and LoftQ take the first product of B and A (or an error of rounding) out of the base;
/// the first two do so again on loading, from the base's own weights. LoRA-GA does so in training alone, so
/// that even PEFT computes something else with what it has saved. EVA, orthogonal and MiCA only choose A and
/// B, which are then read from the file.
fn leaves_the_base(init: &Value) -> bool {
    match init {
        Value::Null | Value::Bool(_) => true,
        Value::String(name) => {
            // PEFT takes these two in any case.
            let any_case = ["gaussian", "mica"].iter().any(|known| name.eq_ignore_ascii_case(known));
            any_case || name == "eva" || name == "orthogonal"
        }
        _ => false,
    }
}

/// The settings of an adapter, and the name of its base.
fn read_config(file: &Path, model: &ModelConfig) -> Result<(Lora, Option<String>), HfError> {
    let text = qurl_files::read_text(file, MAX_CONFIG).map_err(|source| HfError::Io {
        file: file.to_path_buf(),
        action: "be read",
        source,
    })?;
    let wrong = |found: String, expected: &str| HfError::Adapter {
        file: file.to_path_buf(),
        found,
        expected: expected.to_string(),
    };
    let config: Map<String, Value> =
        serde_json::from_str(&text).map_err(|e| wrong(format!("invalid JSON ({e})"), "a JSON object"))?;
    let value = |key: &str| config.get(key).unwrap_or(&Value::Null);
    let refuse = |key: &str, expected: &str| Err(wrong(format!("`{key}` is {}", value(key)), expected));
    if value("peft_type") != "LORA" {
        return refuse("peft_type", "\"LORA\"");
    }
    let Some(rank) = value("r").as_u64().filter(|r| (1..=1 << 16).contains(r)) else {
        return refuse("r", "a rank of at least 1");
    };
    let Some(alpha) = value("lora_alpha").as_f64().filter(|alpha| alpha.is_finite() && *alpha > 0.0) else {
        return refuse("lora_alpha", "a positive number");
    };
    if !matches!(value("bias"), Value::Null) && value("bias") != "none" {
        return refuse("bias", "\"none\": biases are not trained here");
    }
    if !leaves_the_base(value("init_lora_weights")) {
        let expected = "true, false, \"gaussian\", \"eva\", \"orthogonal\" or \"mica\": this one changes \
                        the weights of the base before training, so beside the base as it is the adapter is \
                        another model; save it in PEFT as plain LoRA \
                        (`save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL)`), or \
                        merge it there";
        return refuse("init_lora_weights", expected);
    }
    let targets = targets::matched(value("target_modules"), value("exclude_modules"), model)
        .map_err(|Refused { key, why }| wrong(format!("`{key}` is {}", value(key)), &why))?;
    let known = [
        "peft_type",
        "r",
        "lora_alpha",
        "bias",
        "target_modules",
        "exclude_modules",
        "init_lora_weights",
        "use_rslora",
    ];
    let says_nothing = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        _ => false,
    };
    let other = |key: &&String| !known.contains(&key.as_str()) && !NEUTRAL.contains(&key.as_str());
    if let Some(key) = config.keys().filter(other).find(|key| !says_nothing(value(key))) {
        return refuse(key, "nothing there: what it asks for is not computed here");
    }
    let lora = Lora { rank: rank as usize, alpha, rslora: value("use_rslora") == true, targets };
    Ok((lora, value("base_model_name_or_path").as_str().map(str::to_string)))
}

/// Writes an adapter that PEFT loads, in f32, and the tokenizer files. `base` names the model it belongs to;
/// a snapshot in the cache of the hub by its id and revision, which are the same on every machine.
///
/// Nothing is visible under its final name before everything is on disk.
pub fn save(
    dir: &Path,
    config: &ModelConfig,
    lora: &Lora,
    params: &Params<Vec<f32>>,
    base: Option<&str>,
    tokenizer_files: &[(String, Vec<u8>)],
) -> Result<(), HfError> {
    let mut staged = Staged::new(dir)?;
    write_tensors(&mut staged, dir, WEIGHTS, lora.names(config), params, Dtype::F32)?;
    let mut written: BTreeSet<&str> = BTreeSet::from([WEIGHTS, CONFIG]);
    for (name, contents) in tokenizer_files {
        staged.write_bytes(name, contents)?;
        written.insert(name);
    }
    let targets: Vec<&str> = lora.targets.iter().map(Module::name).collect();
    let alpha = if lora.alpha.fract() == 0.0 { json!(lora.alpha as i64) } else { json!(lora.alpha) };
    let snapshot = base.and_then(|base| hub::of_snapshot(Path::new(base)));
    let (base, revision) = match &snapshot {
        Some((id, revision)) => (Some(id.as_str()), Some(revision.as_str())),
        None => (base, None),
    };
    let settings = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "modules_to_save": null,
    });
    staged.write_bytes(CONFIG, pretty(&settings).as_bytes())?;
    staged.publish(&stale(dir, &written)?)
}

/// Tokenizer files of an earlier adapter that the new one does not have.
fn stale(dir: &Path, written: &BTreeSet<&str>) -> Result<Vec<PathBuf>, HfError> {
    let files = tokenizer::FILES.iter().filter(|name| !written.contains(*name)).map(|name| dir.join(name));
    Ok(files.filter(|path| path.exists()).collect())
}
