//! Trees of f32 tensors as one safetensors file, bit for bit.
//!
//! Leaves keep their fused names (`layers.0.qkv`) after the name of their tree (`first.layers.0.qkv`):
//! moments are nobody's business but ours, and a leaf is what the optimizer works on. A tree that several
//! ranks share is in as many files, each with the pieces of one of them (`[numbers]`, [`Pieces`]); whoever
//! reads it takes the numbers of the pieces that it has itself.

use super::CheckpointError;
use crate::ranks::cuts;
use qurl_kernels::mmap::map_file;
use qurl_model::{ParamInfo, Params};
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

/// Numbers that are turned into bytes in one go.
const CHUNK: usize = 1 << 16;

/// Which pieces of its leaves a tree has: those of one of several ranks, or everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Whose.
    pub rank: usize,
    /// How many ranks there are.
    pub ranks: usize,
}

impl Pieces {
    /// Everything.
    pub const ALL: Pieces = Pieces { rank: 0, ranks: 1 };

    /// The numbers of a leaf of this length.
    fn of(self, len: usize) -> Range<usize> {
        let cuts = cuts(len, self.ranks);
        cuts[self.rank]..cuts[self.rank + 1]
    }

    /// The shape of a leaf in its file.
    fn shape(self, info: &ParamInfo) -> Vec<usize> {
        if self == Pieces::ALL { vec![info.rows, info.cols] } else { vec![self.of(info.len()).len()] }
    }

    /// A file's name with the number of its part, as in `optimizer-00002-of-00004.safetensors`.
    pub fn file(self, name: &str) -> String {
        match name.rsplit_once('.') {
            Some((stem, extension)) if self != Pieces::ALL => {
                format!("{stem}-{:05}-of-{:05}.{extension}", self.rank + 1, self.ranks)
            }
            _ => name.to_string(),
        }
    }
}

/// Writes named trees of the same layout, or these pieces of them, into one file and syncs it.
pub fn write(
    path: &Path,
    layout: &Params<ParamInfo>,
    pieces: Pieces,
    trees: &[(&str, &Params<Vec<f32>>)],
) -> Result<(), CheckpointError> {
    let mut offset = 0;
    let mut header = Vec::new();
    for (tree, params) in trees {
        for (info, values) in pairs(layout, pieces, params)? {
            let end = offset + values.len() * 4;
            let shape = pieces.shape(info);
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

/// Reads these pieces of one tree, which `written` ranks have written as `dir/name` or parts of it.
pub fn read(
    dir: &Path,
    name: &str,
    written: usize,
    layout: &Params<ParamInfo>,
    pieces: Pieces,
    tree: &str,
) -> Result<Params<Vec<f32>>, CheckpointError> {
    let mut values = layout.as_ref().map(|info| vec![0.0; pieces.of(info.len()).len()]);
    for rank in 0..written {
        let part = Pieces { rank, ranks: written };
        read_part(&dir.join(part.file(name)), part, layout, pieces, tree, &mut values)?;
    }
    Ok(values)
}

/// Takes what a file has of the pieces that are wanted.
fn read_part(
    path: &Path,
    part: Pieces,
    layout: &Params<ParamInfo>,
    wanted: Pieces,
    tree: &str,
    to: &mut Params<Vec<f32>>,
) -> Result<(), CheckpointError> {
    let bytes = map_file(path).map_err(CheckpointError::io(path, "be read"))?;
    let wrong = |found: String, expected: String| CheckpointError::damaged(path, found, expected);
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|e| wrong(e.to_string(), "a safetensors file".to_string()))?;
    for (info, to) in layout.iter().zip(to.iter_mut()) {
        let name = format!("{tree}.{}", info.name);
        let tensor = tensors.tensor(&name).map_err(|e| wrong(e.to_string(), format!("a tensor {name}")))?;
        if tensor.dtype() != safetensors::Dtype::F32 || tensor.shape() != part.shape(info) {
            let found = format!("tensor {name} is {:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(wrong(found, format!("F32 {:?}", part.shape(info))));
        }
        let (numbers, _) = tensor.data().as_chunks::<4>();
        let (there, here) = (part.of(info.len()), wanted.of(info.len()));
        let both = there.start.max(here.start)..there.end.min(here.end);
        if !both.is_empty() {
            let from = &numbers[both.start - there.start..both.end - there.start];
            let to = &mut to[both.start - here.start..both.end - here.start];
            to.iter_mut().zip(from).for_each(|(to, from)| *to = f32::from_le_bytes(*from));
        }
    }
    Ok(())
}

/// An error where a tree does not have the leaves and sizes of the layout.
pub fn check(layout: &Params<ParamInfo>, params: &Params<Vec<f32>>) -> Result<(), CheckpointError> {
    pairs(layout, Pieces::ALL, params).map(|_| ())
}

/// Names beside values; an error where they do not belong together.
fn pairs<'a>(
    layout: &'a Params<ParamInfo>,
    pieces: Pieces,
    params: &'a Params<Vec<f32>>,
) -> Result<Vec<(&'a ParamInfo, &'a Vec<f32>)>, CheckpointError> {
    let zipped = layout.as_ref().zip(params.as_ref()).map_err(|e| CheckpointError::Layout(e.to_string()))?;
    let pairs = zipped.into_leaves();
    let expected = |info: &ParamInfo| pieces.of(info.len()).len();
    match pairs.iter().find(|(info, values)| expected(info) != values.len()) {
        Some((info, values)) => {
            let what = format!("{} has {} numbers instead of {}", info.name, values.len(), expected(info));
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
        let dir = std::env::temp_dir().join(format!("qurl-tensors-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let path = dir.join("x.safetensors");
        write(&path, &layout, Pieces::ALL, &[("first", &weights), ("second", &odd)]).expect("written");
        let bits = |p: &Params<Vec<f32>>| -> Vec<u32> { p.iter().flatten().map(|x| x.to_bits()).collect() };
        let all = |layout: &Params<ParamInfo>, tree: &str| {
            read(&dir, "x.safetensors", 1, layout, Pieces::ALL, tree)
        };
        assert_eq!(bits(&all(&layout, "first").expect("read")), bits(&weights));
        assert_eq!(bits(&all(&layout, "second").expect("read")), bits(&odd));
        let missing = all(&layout, "third").expect_err("no such tree").to_string();
        assert!(missing.contains("third.embed"), "{missing}");
        let other = params::shapes(&ModelConfig { hidden_size: 4, ..config.clone() }, true);
        assert!(all(&other, "first").is_err());
        let foreign = params::init(&config_without_value(), 1, false);
        assert!(write(&path, &layout, Pieces::ALL, &[("x", &foreign)]).is_err());

        // Leaves of several blocks, written by some ranks and read by others.
        let config = ModelConfig { vocab_size: 40_000, ..config };
        let (layout, weights) = (params::shapes(&config, true), params::init(&config, 4, true));
        let cut = |pieces: Pieces| weights.clone().map(|leaf| leaf[pieces.of(leaf.len())].to_vec());
        for written in [1, 2, 4] {
            for rank in 0..written {
                let part = Pieces { rank, ranks: written };
                let path = dir.join(part.file("moments.safetensors"));
                write(&path, &layout, part, &[("first", &cut(part))]).expect("written");
            }
            for ranks in [1, 2, 4] {
                for pieces in (0..ranks).map(|rank| Pieces { rank, ranks }) {
                    let name = "moments.safetensors";
                    let found = read(&dir, name, written, &layout, pieces, "first").expect("read");
                    assert_eq!(bits(&found), bits(&cut(pieces)), "{written} ranks wrote, {pieces:?} reads");
                }
            }
        }
        assert!(dir.join("moments-00003-of-00004.safetensors").exists());
        std::fs::remove_dir_all(&dir).expect("removed");
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
