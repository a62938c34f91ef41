//! Writing a directory that transformers loads.

use std::collections::{BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};

use super::checkpoint::{INDEX, SINGLE};
use super::convert::from_f32;
use super::error::HfError;
use super::staged::{self, Staged};
use crate::config::{Dtype, ModelConfig, Purpose};
use crate::generation::{GENERATION_CONFIG, GenerationConfig};
use crate::params::{HfTensor, LeafLayout, Params, hf_names};
use crate::tokenizer;

/// Shards hold at most this many bytes of weights, as in published models.
pub(super) const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// How to write a model directory.
#[derive(Clone, Debug)]
pub struct SaveOptions<'a> {
    /// Number format of the weights on disk.
    pub dtype: Dtype,
    /// Sampling defaults that go along.
    pub generation: &'a GenerationConfig,
    /// Tokenizer files (name and contents) that go along, see [`crate::tokenizer::Tokenizer::files`].
    pub tokenizer_files: &'a [(String, Vec<u8>)],
    /// Most bytes of weights per file.
    pub max_shard_bytes: u64,
}

impl<'a> SaveOptions<'a> {
    /// Options with shards of at most 5 GB and no tokenizer.
    pub fn new(dtype: Dtype, generation: &'a GenerationConfig) -> SaveOptions<'a> {
        SaveOptions { dtype, generation, tokenizer_files: &[], max_shard_bytes: MAX_SHARD_BYTES }
    }
}

/// A tensor as it will be stored.
struct Part<'a> {
    tensor: HfTensor,
    values: &'a [f32],
}

/// Writes `config.json`, the weights, `generation_config.json` and the tokenizer files into `dir`.
///
/// Nothing is visible under its final name before everything is on disk. Weight and tokenizer files of an
/// earlier model in the same directory that the new one does not have are removed; other files are left
/// alone.
pub fn save(
    dir: &Path,
    config: &ModelConfig,
    params: &Params<Vec<f32>>,
    options: &SaveOptions,
) -> Result<(), HfError> {
    config.check("configuration to save")?;
    let parts = parts(dir, hf_names(config, params.value_head.is_some()), params)?;
    let shards = split(parts, options.dtype, options.max_shard_bytes);
    let names = shard_names(shards.len());
    let mut staged = Staged::new(dir)?;
    let mut weight_map = Map::new();
    let mut total_bytes = 0;
    for (name, shard) in names.iter().zip(&shards) {
        for part in shard {
            weight_map.insert(part.tensor.name.clone(), json!(name));
            total_bytes += (part.tensor.len() * options.dtype.bytes()) as u64;
        }
        write_shard(&mut staged, dir, name, shard, options.dtype)?;
    }
    let mut written: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    written.extend([GENERATION_CONFIG, "config.json"]);
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": total_bytes}, "weight_map": weight_map});
        staged.write_bytes(INDEX, pretty(&index).as_bytes())?;
        written.insert(INDEX);
    }
    for (name, contents) in options.tokenizer_files {
        staged.write_bytes(name, contents)?;
        written.insert(name);
    }
    let generation = pretty(&options.generation.to_json());
    staged.write_bytes(GENERATION_CONFIG, generation.as_bytes())?;
    let purpose = match params.value_head {
        Some(_) => Purpose::Critic,
        None => Purpose::CausalLm,
    };
    let mut stored = config.clone();
    stored.dtype = options.dtype;
    let config_json = pretty(&stored.to_json_for(purpose));
    staged.write_bytes("config.json", config_json.as_bytes())?;
    staged.publish(&stale_files(dir, &written)?)
}

/// Writes the tensors of these leaves into one file.
pub(super) fn write_tensors(
    staged: &mut Staged,
    dir: &Path,
    name: &str,
    layout: Params<LeafLayout>,
    params: &Params<Vec<f32>>,
    dtype: Dtype,
) -> Result<(), HfError> {
    write_shard(staged, dir, name, &parts(dir, layout, params)?, dtype)
}

/// Checks the weights against their layout and cuts every leaf into its tensors.
fn parts<'a>(
    dir: &Path,
    layout: Params<LeafLayout>,
    params: &'a Params<Vec<f32>>,
) -> Result<Vec<Part<'a>>, HfError> {
    let wrong = |name: &str, found: String, expected: String| HfError::Leaf {
        dir: dir.to_path_buf(),
        name: name.to_string(),
        found,
        expected,
    };
    let pairs = layout.zip(params.as_ref()).map_err(|mismatch| {
        let expected = "the leaves that the configuration asks for".to_string();
        wrong("tree", mismatch.what, expected)
    })?;
    let mut parts = Vec::new();
    for (leaf, values) in pairs {
        if values.len() != leaf.info.len() {
            let found = format!("{} numbers", values.len());
            let expected = format!("{} x {}", leaf.info.rows, leaf.info.cols);
            return Err(wrong(&leaf.info.name, found, expected));
        }
        for tensor in leaf.tensors {
            let values = &values[tensor.offset..tensor.offset + tensor.len()];
            parts.push(Part { tensor, values });
        }
    }
    Ok(parts)
}

/// Fills shards in order; a tensor larger than the limit gets a shard of its own.
fn split(parts: Vec<Part>, dtype: Dtype, max_bytes: u64) -> Vec<Vec<Part>> {
    let mut shards = vec![Vec::new()];
    let mut used = 0;
    for part in parts {
        let bytes = (part.tensor.len() * dtype.bytes()) as u64;
        if used > 0 && used + bytes > max_bytes {
            shards.push(Vec::new());
            used = 0;
        }
        used += bytes;
        if let Some(last) = shards.last_mut() {
            last.push(part);
        }
    }
    shards
}

pub(super) fn shard_names(count: usize) -> Vec<String> {
    if count == 1 {
        return vec![SINGLE.to_string()];
    }
    (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors")).collect()
}

/// Header, then the tensors one after the other, each converted just before it is written.
fn write_shard(
    staged: &mut Staged,
    dir: &Path,
    name: &str,
    shard: &[Part],
    dtype: Dtype,
) -> Result<(), HfError> {
    let path = dir.join(name);
    let stored = match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::F16 => safetensors::Dtype::F16,
    };
    let entry = |part: &Part| Entry {
        name: part.tensor.name.clone(),
        dtype: stored,
        shape: part.tensor.shape.clone(),
        bytes: part.tensor.len() * dtype.bytes(),
    };
    let header = header(&path, shard.iter().map(entry))?;
    staged.write(name, |file| {
        let failed = |source| HfError::Io { file: path.clone(), action: "be written", source };
        file.write_all(&header).map_err(failed)?;
        let mut bytes = Vec::new();
        for part in shard {
            from_f32(part.values, dtype, &mut bytes).map_err(|bad| HfError::NotFinite {
                file: path.clone(),
                tensor: part.tensor.name.clone(),
                index: bad.index,
                value: bad.value,
                dtype: dtype.name(),
            })?;
            file.write_all(&bytes).map_err(failed)?;
        }
        Ok(())
    })
}

/// A tensor as the header of its file describes it.
pub(super) struct Entry {
    pub name: String,
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub bytes: usize,
}

/// The length and the JSON header, padded with spaces so that the data is aligned to 8 bytes.
pub(super) fn header(path: &Path, entries: impl Iterator<Item = Entry>) -> Result<Vec<u8>, HfError> {
    let mut offset = 0;
    let mut tensors = Vec::new();
    for Entry { name, dtype, shape, bytes } in entries {
        let data_offsets = (offset, offset + bytes);
        offset += bytes;
        tensors.push((name, TensorInfo { dtype, shape, data_offsets }));
    }
    let invalid = |reason: String| HfError::Header { file: path.to_path_buf(), reason };
    // transformers asks for this key to know which library's layout the tensors have.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format.into_iter().collect()), tensors)
        .map_err(|error| invalid(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| invalid(error.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    Ok(header)
}

/// Weight and tokenizer files of an earlier model that would be read in place of, or beside, the new ones,
/// and what an attempt that was killed has left.
pub(super) fn stale_files(dir: &Path, written: &BTreeSet<&str>) -> Result<Vec<PathBuf>, HfError> {
    let failed = |source| HfError::Io { file: dir.to_path_buf(), action: "be listed", source };
    let mut stale = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let weights =
            name == SINGLE || name == INDEX || (name.starts_with("model-") && name.ends_with(".safetensors"));
        let tokenizer = tokenizer::FILES.contains(&name.as_ref());
        let replaced = (weights || tokenizer) && !written.contains(name.as_ref());
        if replaced || staged::is_left_over(&name, written) {
            stale.push(entry.path());
        }
    }
    Ok(stale)
}

pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
