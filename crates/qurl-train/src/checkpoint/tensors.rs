//! Trees of tensors as one safetensors file, bit for bit.
//!
//! Leaves keep their fused names (`layers.0.qkv`) after the name of their tree (`first.layers.0.qkv`):
//! moments are nobody's business but ours, and a leaf is what the optimizer works on. A tree that several
//! ranks share is in as many files, each with the pieces of one of them (`[numbers]`, [`Pieces`]); whoever
//! reads it takes the numbers of the pieces that it has itself.

use super::CheckpointError;
use crate::ranks::cuts;
use qurl_files::disk::DiskFile;
use qurl_kernels::mmap::map_file;
use qurl_model::{ParamInfo, Params};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, SafeTensors, TensorInfo};
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

/// Numbers of a leaf, or of a piece of it.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// The bits of bf16.
    Bf16(&'a [u16]),
    /// Bytes.
    U8(&'a [u8]),
}

impl Values<'_> {
    fn dtype(self) -> Dtype {
        match self {
            Values::F32(_) => f32::DTYPE,
            Values::Bf16(_) => u16::DTYPE,
            Values::U8(_) => u8::DTYPE,
        }
    }

    fn len(self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::U8(values) => values.len(),
        }
    }

    /// Writes them in chunks.
    fn write(self, to: &mut impl Write) -> std::io::Result<()> {
        fn numbers<T: Number>(values: &[T], to: &mut impl Write) -> std::io::Result<()> {
            let mut bytes = Vec::with_capacity(size_of::<T>() * CHUNK.min(values.len()));
            for chunk in values.chunks(CHUNK) {
                bytes.clear();
                chunk.iter().for_each(|&x| x.put(&mut bytes));
                to.write_all(&bytes)?;
            }
            Ok(())
        }
        match self {
            Values::F32(values) => numbers(values, to),
            Values::Bf16(values) => numbers(values, to),
            Values::U8(values) => to.write_all(values),
        }
    }
}

/// A type of numbers in a file.
pub trait Number: Copy + Default {
    /// What the file calls it.
    const DTYPE: Dtype;
    /// Appends its bytes.
    fn put(self, to: &mut Vec<u8>);
    /// From as many bytes as it has.
    fn of(bytes: &[u8]) -> Self;
}

impl Number for f32 {
    const DTYPE: Dtype = Dtype::F32;
    fn put(self, to: &mut Vec<u8>) {
        to.extend(self.to_le_bytes());
    }
    fn of(bytes: &[u8]) -> f32 {
        f32::from_bits(bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte)))
    }
}

/// The bits of a bf16.
impl Number for u16 {
    const DTYPE: Dtype = Dtype::BF16;
    fn put(self, to: &mut Vec<u8>) {
        to.extend(self.to_le_bytes());
    }
    fn of(bytes: &[u8]) -> u16 {
        bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u16::from(byte))
    }
}

impl Number for u8 {
    const DTYPE: Dtype = Dtype::U8;
    fn put(self, to: &mut Vec<u8>) {
        to.push(self);
    }
    fn of(bytes: &[u8]) -> u8 {
        bytes.first().copied().unwrap_or_default()
    }
}

/// A tree of a file.
#[derive(Clone, Copy, Debug)]
pub struct Tree<'a> {
    /// Before the names of its leaves.
    pub name: &'a str,
    /// Numbers of a leaf that one of its values stands for: 1, or those of a block that share something.
    pub per: usize,
}

impl<'a> Tree<'a> {
    /// A value for each number.
    pub fn whole(name: &'a str) -> Self {
        Tree { name, per: 1 }
    }

    /// The values of these pieces of a leaf; pieces are whole blocks but for a leaf's end.
    fn of(self, pieces: Pieces, len: usize) -> Range<usize> {
        let numbers = pieces.of(len);
        numbers.start.div_ceil(self.per)..numbers.end.div_ceil(self.per)
    }

    /// The shape of a leaf in its file.
    fn shape(self, pieces: Pieces, info: &ParamInfo) -> Vec<usize> {
        if pieces == Pieces::ALL && self.per == 1 {
            vec![info.rows, info.cols]
        } else {
            vec![self.of(pieces, info.len()).len()]
        }
    }
}

/// Writes trees of the same layout, or these pieces of them, into one file and syncs it.
pub fn write(
    path: &Path,
    layout: &Params<ParamInfo>,
    pieces: Pieces,
    trees: &[(Tree, Params<Values>)],
) -> Result<(), CheckpointError> {
    let mut offset = 0;
    let mut header = Vec::new();
    for (tree, params) in trees {
        for (info, values) in pairs(layout, pieces, *tree, params.clone())? {
            let end = offset + values.len() * values.dtype().bitsize() / 8;
            let shape = tree.shape(pieces, info);
            let tensor = TensorInfo { dtype: values.dtype(), shape, data_offsets: (offset, end) };
            header.push((format!("{}.{}", tree.name, info.name), tensor));
            offset = end;
        }
    }
    let invalid = |e: String| CheckpointError::damaged(path, e, "a header of tensors");
    let metadata = Metadata::new(None, header).map_err(|e| invalid(e.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| invalid(e.to_string()))?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let failed = || CheckpointError::io(path, "be written");
    let mut file = BufWriter::with_capacity(1 << 20, DiskFile::create(path).map_err(failed())?);
    file.write_all(&(json.len() as u64).to_le_bytes()).map_err(failed())?;
    file.write_all(&json).map_err(failed())?;
    for values in trees.iter().flat_map(|(_, params)| params.iter()) {
        values.write(&mut file).map_err(failed())?;
    }
    let file = file.into_inner().map_err(|e| failed()(e.into_error()))?;
    file.sync_contents().map_err(failed())
}

/// Reads these pieces of one tree, which `written` ranks have written as `dir/name` or parts of it.
pub fn read<T: Number>(
    dir: &Path,
    name: &str,
    written: usize,
    layout: &Params<ParamInfo>,
    pieces: Pieces,
    tree: Tree,
) -> Result<Params<Vec<T>>, CheckpointError> {
    let mut values = layout.as_ref().map(|info| vec![T::default(); tree.of(pieces, info.len()).len()]);
    for rank in 0..written {
        let part = Pieces { rank, ranks: written };
        read_part(&dir.join(part.file(name)), part, layout, pieces, tree, &mut values)?;
    }
    Ok(values)
}

/// Takes what a file has of the pieces that are wanted.
fn read_part<T: Number>(
    path: &Path,
    part: Pieces,
    layout: &Params<ParamInfo>,
    wanted: Pieces,
    tree: Tree,
    to: &mut Params<Vec<T>>,
) -> Result<(), CheckpointError> {
    let regular = qurl_files::open(path).and_then(|_| map_file(path));
    let bytes = regular.map_err(CheckpointError::io(path, "be read"))?;
    let wrong = |found: String, expected: String| CheckpointError::damaged(path, found, expected);
    let tensors = SafeTensors::deserialize(&bytes)
        .map_err(|e| wrong(e.to_string(), "a safetensors file".to_string()))?;
    for (info, to) in layout.iter().zip(to.iter_mut()) {
        let name = format!("{}.{}", tree.name, info.name);
        let tensor = tensors.tensor(&name).map_err(|e| wrong(e.to_string(), format!("a tensor {name}")))?;
        let shape = tree.shape(part, info);
        if tensor.dtype() != T::DTYPE || tensor.shape() != shape {
            let found = format!("tensor {name} is {:?} {:?}", tensor.dtype(), tensor.shape());
            return Err(wrong(found, format!("{:?} {shape:?}", T::DTYPE)));
        }
        let (there, here) = (tree.of(part, info.len()), tree.of(wanted, info.len()));
        let both = there.start.max(here.start)..there.end.min(here.end);
        if !both.is_empty() {
            let size = size_of::<T>();
            let from = &tensor.data()[(both.start - there.start) * size..(both.end - there.start) * size];
            let to = &mut to[both.start - here.start..both.end - here.start];
            to.iter_mut().zip(from.chunks_exact(size)).for_each(|(to, from)| *to = T::of(from));
        }
    }
    Ok(())
}

/// The type of the numbers of a tree, by its first leaf in the file `dir/name` or the first of its `written`
/// parts.
pub fn dtype(
    dir: &Path,
    name: &str,
    written: usize,
    layout: &Params<ParamInfo>,
    tree: Tree,
) -> Result<Dtype, CheckpointError> {
    let path = dir.join(Pieces { rank: 0, ranks: written }.file(name));
    let regular = qurl_files::open(&path).and_then(|_| map_file(&path));
    let bytes = regular.map_err(CheckpointError::io(&path, "be read"))?;
    let name = format!("{}.{}", tree.name, layout.embed.name);
    let tensors = SafeTensors::deserialize(&bytes);
    let tensor = tensors.as_ref().ok().and_then(|tensors| tensors.tensor(&name).ok());
    let found = || CheckpointError::damaged(&path, "no such tensor", format!("a tensor {name}"));
    tensor.map(|tensor| tensor.dtype()).ok_or_else(found)
}

/// An error where a tree does not have the leaves and sizes of the layout.
pub fn check(layout: &Params<ParamInfo>, params: &Params<Vec<f32>>) -> Result<(), CheckpointError> {
    pairs(layout, Pieces::ALL, Tree::whole("weights"), floats(params)).map(|_| ())
}

/// Weights as they are written.
pub fn floats(params: &Params<Vec<f32>>) -> Params<Values<'_>> {
    params.as_ref().map(|values| Values::F32(values))
}

/// Names beside values; an error where they do not belong together.
fn pairs<'a>(
    layout: &'a Params<ParamInfo>,
    pieces: Pieces,
    tree: Tree,
    params: Params<Values<'a>>,
) -> Result<Vec<(&'a ParamInfo, Values<'a>)>, CheckpointError> {
    let zipped = layout.as_ref().zip(params).map_err(|e| CheckpointError::Layout(e.to_string()))?;
    let pairs = zipped.into_leaves();
    let expected = |info: &ParamInfo| tree.of(pieces, info.len()).len();
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
        let trees = [(Tree::whole("first"), floats(&weights)), (Tree::whole("second"), floats(&odd))];
        write(&path, &layout, Pieces::ALL, &trees).expect("written");
        let bits = |p: &Params<Vec<f32>>| -> Vec<u32> { p.iter().flatten().map(|x| x.to_bits()).collect() };
        let all = |layout: &Params<ParamInfo>, tree: &str| {
            read::<f32>(&dir, "x.safetensors", 1, layout, Pieces::ALL, Tree::whole(tree))
        };
        assert_eq!(bits(&all(&layout, "first").expect("read")), bits(&weights));
        assert_eq!(bits(&all(&layout, "second").expect("read")), bits(&odd));
        let missing = all(&layout, "third").expect_err("no such tree").to_string();
        assert!(missing.contains("third.embed"), "{missing}");
        let other = params::shapes(&ModelConfig { hidden_size: 4, ..config.clone() }, true);
        assert!(all(&other, "first").is_err());
        let foreign = params::init(&config_without_value(), 1, false);
        assert!(write(&path, &layout, Pieces::ALL, &[(Tree::whole("x"), floats(&foreign))]).is_err());

        // Leaves of several blocks, written by some ranks and read by others.
        let config = ModelConfig { vocab_size: 40_000, ..config };
        let (layout, weights) = (params::shapes(&config, true), params::init(&config, 4, true));
        let cut = |pieces: Pieces| weights.clone().map(|leaf| leaf[pieces.of(leaf.len())].to_vec());
        let first = Tree::whole("first");
        for written in [1, 2, 4] {
            for rank in 0..written {
                let part = Pieces { rank, ranks: written };
                let path = dir.join(part.file("moments.safetensors"));
                write(&path, &layout, part, &[(first, floats(&cut(part)))]).expect("written");
            }
            for ranks in [1, 2, 4] {
                for pieces in (0..ranks).map(|rank| Pieces { rank, ranks }) {
                    let name = "moments.safetensors";
                    let found = read(&dir, name, written, &layout, pieces, first).expect("read");
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
