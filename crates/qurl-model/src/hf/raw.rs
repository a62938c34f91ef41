//! Writing a directory whose tensors are bytes already: quantized checkpoints for other engines.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::checkpoint::INDEX;
use super::error::HfError;
use super::save::{Entry, MAX_SHARD_BYTES, header, pretty, shard_names, stale_files};
use super::staged::Staged;
use crate::generation::{GENERATION_CONFIG, GenerationConfig};

/// A tensor as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawTensor {
    /// Name in the file.
    pub name: String,
    /// Number format, as the headers of weight files name it: `F32`, `BF16`, `I8`, `F8_E4M3`, ...
    pub dtype: &'static str,
    /// Shape.
    pub shape: Vec<usize>,
    /// Values in little-endian order, row-major.
    pub bytes: Vec<u8>,
}

/// Writes weights, `config.json`, `generation_config.json` and the tokenizer's files, as
/// [`save`](super::save()) does: nothing is visible under its final name before everything is on disk.
pub fn save_raw(
    dir: &Path,
    config: &Value,
    tensors: &[RawTensor],
    generation: &GenerationConfig,
    tokenizer_files: &[(String, Vec<u8>)],
) -> Result<(), HfError> {
    let shards = split(tensors);
    let names = shard_names(shards.len());
    let mut staged = Staged::new(dir)?;
    let mut weight_map = Map::new();
    for (name, shard) in names.iter().zip(&shards) {
        weight_map.extend(shard.iter().map(|tensor| (tensor.name.clone(), json!(name))));
        write_shard(&mut staged, &dir.join(name), name, shard)?;
    }
    let mut written: BTreeSet<&str> = names.iter().map(String::as_str).collect();
    written.extend([GENERATION_CONFIG, "config.json"]);
    if shards.len() > 1 {
        let total: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        staged.write_bytes(INDEX, pretty(&index).as_bytes())?;
        written.insert(INDEX);
    }
    for (name, contents) in tokenizer_files {
        staged.write_bytes(name, contents)?;
        written.insert(name);
    }
    staged.write_bytes(GENERATION_CONFIG, pretty(&generation.to_json()).as_bytes())?;
    staged.write_bytes("config.json", pretty(config).as_bytes())?;
    staged.publish(&stale_files(dir, &written)?)
}

/// Fills shards in order.
fn split(tensors: &[RawTensor]) -> Vec<Vec<&RawTensor>> {
    let mut shards = vec![Vec::new()];
    let mut used = 0;
    for tensor in tensors {
        let bytes = tensor.bytes.len() as u64;
        if used > 0 && used + bytes > MAX_SHARD_BYTES {
            shards.push(Vec::new());
            used = 0;
        }
        used += bytes;
        if let Some(last) = shards.last_mut() {
            last.push(tensor);
        }
    }
    shards
}

fn write_shard(staged: &mut Staged, path: &Path, name: &str, shard: &[&RawTensor]) -> Result<(), HfError> {
    let entry = |tensor: &&RawTensor| {
        let dtype = serde_json::from_value(json!(tensor.dtype));
        let invalid =
            |e: serde_json::Error| HfError::Header { file: path.to_path_buf(), reason: e.to_string() };
        let dtype: safetensors::Dtype = dtype.map_err(invalid)?;
        Ok(Entry { name: tensor.name.clone(), dtype, shape: tensor.shape.clone(), bytes: tensor.bytes.len() })
    };
    let entries = shard.iter().map(entry).collect::<Result<Vec<_>, HfError>>()?;
    let header = header(path, entries.into_iter())?;
    staged.write(name, |file| {
        let failed = |source| HfError::Io { file: path.to_path_buf(), action: "be written", source };
        file.write_all(&header).map_err(failed)?;
        for tensor in shard {
            file.write_all(&tensor.bytes).map_err(failed)?;
        }
        Ok(())
    })
}
