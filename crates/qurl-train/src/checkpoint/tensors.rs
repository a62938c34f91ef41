//! Trees of f32 tensors as one safetensors file, bit for bit.
//!
//! Leaves keep their fused names (`layers.0.qkv`) after the name of their tree (`first.layers.0.qkv`):
//! moments are nobody's business but ours, and a leaf is what the optimizer works on.

use super::CheckpointError;
use qurl_kernels::mmap::map_file;
use qurl_model::{ParamInfo, Params};
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Numbers that are turned into bytes in one go.
const CHUNK: usize = 1 << 16;

/// Writes named trees of the same layout into one file and syncs it.
pub fn write(
    path: &Path,
    layout: &Params<ParamInfo>,
    trees: &[(&str, &Params<Vec<f32>>)],
) -> Result<(), CheckpointError> {
    let mut offset = 0;
    let mut header = Vec::new();
    for (tree, params) in trees {
        for (info, values) in pairs(layout, params)? {
            let end = offset + values.len() * 4;
            let shape = vec![info.rows, info.cols];
            let tensor = TensorInfo { dtype: safetensors::Dtype::F32, shape, data_offsets: (offset, end) };
            header.push((format!("{tree}.{}", info.name), tensor));
            offset = end;
        }
    }
    let invalid = |e: String| CheckpointError::damaged(path, e, "a header of tensors");
    let metadata = Metadata::new(None, header).map_err(|e| invalid(e.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| invalid(e.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let failed = || CheckpointError::io(path, "be written");
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(failed())?);
    file.write_all(&(json.len() as u64).to_le_bytes()).map_err(failed())?;
    file.write_all(&json).map_err(failed())?;
    let mut bytes = Vec::with_capacity(4 * CHUNK);
    for (_, params) in trees {
        for chunk in params.iter().flat_map(|values| values.chunks(CHUNK)) {
            bytes.clear();
            bytes.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
            file.write_all(&bytes).map_err(failed())?;
        }
    }
    let file = file.into_inner().map_err(|e| failed()(e.into_error()))?;
    file.sync_all().map_err(failed())
}

/// Reads one tree of a file.
pub fn read(
    path: &Path,
    layout: &Params<ParamInfo>,
    tree: &str,
) -> Result<Params<Vec<f32>>, CheckpointError> {
    let bytes = map_file(path).map_err(CheckpointError::io(path, "be read"))?;
    let wrong = |found: String, expected: String| CheckpointError::damaged(path, found, expected);
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|e| wrong(e.to_string(), "a safetensors file".to_string()))?;
    layout.as_ref().try_map(|info| {
        let name = format!("{tree}.{}", info.name);
        let tensor = tensors.tensor(&name).map_err(|e| wrong(e.to_string(), format!("a tensor {name}")))?;
        if tensor.dtype() != safetensors::Dtype::F32 || tensor.shape() != [info.rows, info.cols] {
            let found = format!("tensor {name} is {:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(wrong(found, format!("F32 [{}, {}]", info.rows, info.cols)));
        }
        let (numbers, _) = tensor.data().as_chunks::<4>();
        Ok(numbers.iter().map(|&x| f32::from_le_bytes(x)).collect())
    })
}

/// An error where a tree does not have the leaves and sizes of the layout.
pub fn check(layout: &Params<ParamInfo>, params: &Params<Vec<f32>>) -> Result<(), CheckpointError> {
    pairs(layout, params).map(|_| ())
}

/// Names beside values; an error where they do not belong together.
fn pairs<'a>(
    layout: &'a Params<ParamInfo>,
    params: &'a Params<Vec<f32>>,
) -> Result<Vec<(&'a ParamInfo, &'a Vec<f32>)>, CheckpointError> {
    let zipped = layout.as_ref().zip(params.as_ref()).map_err(|e| CheckpointError::Layout(e.to_string()))?;
    let pairs = zipped.into_leaves();
    match pairs.iter().find(|(info, values)| info.len() != values.len()) {
        Some((info, values)) => {
            let what = format!("{} has {} numbers instead of {}", info.name, values.len(), info.len());
            Err(CheckpointError::Layout(what))
        }
        None => Ok(pairs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qurl_model::config::Dims;
    use qurl_model::{Family, ModelConfig, params};

    #[test]
    fn every_bit_survives() {
        let dims = Dims {
            vocab_size: 11,
            hidden_size: 8,
            intermediate_size: 16,
            num_layers: 2,
            num_heads: 2,
            num_kv_heads: 1,
        };
        let config = ModelConfig::from_dims(Family::Qwen2, dims).expect("a configuration");
        let layout = params::shapes(&config, true);
        let weights = params::init(&config, 3, true);
        let odd = weights.clone().map(|leaf| {
            let odd = [f32::MIN_POSITIVE / 3.0, -0.0, f32::INFINITY, f32::from_bits(0x7fc0_1234), f32::MAX];
            leaf.iter().enumerate().map(|(i, _)| odd[i % odd.len()]).collect::<Vec<f32>>()
        });
        let path = std::env::temp_dir().join(format!("qurl-tensors-{}.safetensors", std::process::id()));
        write(&path, &layout, &[("first", &weights), ("second", &odd)]).expect("written");
        let bits = |p: &Params<Vec<f32>>| -> Vec<u32> { p.iter().flatten().map(|x| x.to_bits()).collect() };
        assert_eq!(bits(&read(&path, &layout, "first").expect("read")), bits(&weights));
        assert_eq!(bits(&read(&path, &layout, "second").expect("read")), bits(&odd));
        let missing = read(&path, &layout, "third").expect_err("no such tree").to_string();
        assert!(missing.contains("third.embed"), "{missing}");
        let other = params::shapes(&ModelConfig { hidden_size: 4, ..config }, true);
        assert!(read(&path, &other, "first").is_err());
        assert!(write(&path, &layout, &[("x", &params::init(&config_without_value(), 1, false))]).is_err());
        std::fs::remove_file(&path).expect("removed");
    }

    fn config_without_value() -> ModelConfig {
        ModelConfig::from_dims(
            Family::Llama,
            Dims {
                vocab_size: 5,
                hidden_size: 8,
                intermediate_size: 8,
                num_layers: 1,
                num_heads: 2,
                num_kv_heads: 2,
            },
        )
        .expect("a configuration")
    }
}
