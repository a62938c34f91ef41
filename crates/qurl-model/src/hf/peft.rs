//! Adapter directories as PEFT writes them, in and out: `adapter_config.json` and
//! `adapter_model.safetensors`.
//!
//! What PEFT can ask for and we do not compute (DoRA, biases, other ranks for some layers, layers left out)
//! is refused by its key: an adapter that loads is the whole adapter. Keys that are not known are accepted
//! where they say nothing (`null`, `false`, `{}`), since new versions of PEFT add such keys.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::checkpoint::Checkpoint;
use super::error::HfError;
use super::save::{pretty, write_tensors};
use super::staged::Staged;
use crate::config::{Dtype, ModelConfig};
use crate::lora::{Lora, Module, Modules};
use crate::params::Params;
use crate::tokenizer;

/// The file with the settings.
pub const CONFIG: &str = "adapter_config.json";
/// The file with the weights.
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// Keys whose values say nothing about what is computed.
const NEUTRAL: [&str; 14] = [
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "lora_dropout",
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

/// Loads an adapter of this model.
pub fn load(dir: &Path, config: &ModelConfig) -> Result<LoadedAdapter, HfError> {
    let (lora, base) = read_config(&dir.join(CONFIG))?;
    let checkpoint = Checkpoint::open_file(dir.join(WEIGHTS))?;
    let layout = lora.names(config);
    let used: BTreeSet<&str> =
        layout.iter().flat_map(|leaf| leaf.tensors.iter().map(|tensor| tensor.name.as_str())).collect();
    if let Some(unused) = checkpoint.names().find(|name| !used.contains(name)) {
        let (file, tensor) = (dir.join(WEIGHTS), unused.to_string());
        let expected = format!("A and B of {} in {} blocks alone", lora.targets, config.num_layers);
        return Err(HfError::Adapter { file, found: format!("tensor {tensor}"), expected });
    }
    let params = layout.try_map(|leaf| checkpoint.read_leaf(&leaf))?;
    Ok(LoadedAdapter { lora, params, base })
}

/// The settings of an adapter, and the name of its base.
fn read_config(file: &Path) -> Result<(Lora, Option<String>), HfError> {
    let text = std::fs::read_to_string(file).map_err(|source| HfError::Io {
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
    let targets = targets(value("target_modules"));
    let Some(targets) = targets else {
        return refuse("target_modules", &format!("\"all-linear\", or a list of some of {}", Modules::ALL));
    };
    let known = ["peft_type", "r", "lora_alpha", "bias", "target_modules", "use_rslora"];
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

fn targets(value: &Value) -> Option<Modules> {
    if value == "all-linear" {
        return Some(Modules::ALL);
    }
    let names: Option<Vec<&str>> = value.as_array()?.iter().map(Value::as_str).collect();
    // Names of modules or, where PEFT was asked for all of them, their places in the model; whether all
    // blocks have theirs shows when the tensors are read.
    let last = |name: &str| Module::of_name(name.rsplit('.').next().unwrap_or(name));
    let modules: Option<Vec<Module>> = names?.into_iter().map(last).collect();
    modules.filter(|modules| !modules.is_empty()).map(Modules::of)
}

/// Writes an adapter that PEFT loads, in f32, and the tokenizer files. `base` names the model it belongs to.
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
    let settings = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
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
