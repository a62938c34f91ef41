//! The weight files of a directory as one read-only set of named tensors.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use qurl_kernels::cpu::quant::codec::e4m3_value;
use qurl_kernels::mmap::{Mapped, map_file};
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, SafeTensorError};
use serde_json::{Map, Value};

use super::convert::{NotFinite, quantized_to_f32, to_f32};
use super::error::HfError;
use crate::config::Dtype;
use crate::params::{HfTensor, LeafLayout};

/// The file of a model's weights.
pub const SINGLE: &str = "model.safetensors";
/// The list of the files of a model's weights, where there are several.
pub const INDEX: &str = "model.safetensors.index.json";

/// Bytes of an index: some hundred for each tensor.
const MAX_INDEX: u64 = 64 * qurl_files::MIB;

/// One mapped weight file.
struct Shard {
    path: PathBuf,
    bytes: Mapped,
    data_start: usize,
    metadata: Metadata,
}

/// All weight files, with every tensor's place.
pub(super) struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// tensor -> index into `shards`
    places: BTreeMap<String, usize>,
    /// tensor -> file, as the index promises; empty for a single file
    promised: BTreeMap<String, PathBuf>,
}

/// How the numbers of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    /// As they are.
    Float(Dtype),
    /// Signed bytes, to be multiplied by a scale.
    Int8,
    /// E4M3, to be multiplied by a scale.
    E4m3,
}

impl Number {
    fn name(self) -> &'static str {
        match self {
            Number::Float(dtype) => dtype.name(),
            Number::Int8 => "int8",
            Number::E4m3 => "fp8",
        }
    }
}

/// The tensor with the scales of another.
pub(super) fn scale_name(tensor: &str) -> String {
    format!("{tensor}_scale")
}

/// A tensor in a mapped file.
struct Stored<'a> {
    file: &'a Path,
    number: Number,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl Checkpoint {
    /// Maps `model.safetensors`, or every shard that `model.safetensors.index.json` names.
    pub fn open(dir: &Path) -> Result<Checkpoint, HfError> {
        let single = dir.join(SINGLE);
        let index = dir.join(INDEX);
        let (files, promised) = if single.exists() {
            (vec![single], BTreeMap::new())
        } else if index.exists() {
            let promised = read_index(dir, &index)?;
            let files: BTreeSet<PathBuf> = promised.values().cloned().collect();
            if let Some(missing) = files.iter().find(|file| !file.exists()) {
                let shard = missing.file_name().unwrap_or_default();
                return Err(HfError::MissingShard { index, shard: shard.to_string_lossy().into_owned() });
            }
            (files.into_iter().collect(), promised)
        } else {
            let pickled =
                dir.join("pytorch_model.bin").exists() || dir.join("pytorch_model.bin.index.json").exists();
            return Err(HfError::NoWeights {
                dir: dir.to_path_buf(),
                hint: if pickled { "; pytorch_model.bin is not read, convert it to safetensors" } else { "" },
            });
        };
        Checkpoint::of(dir, files, promised)
    }

    /// Maps one file.
    pub fn open_file(file: PathBuf) -> Result<Checkpoint, HfError> {
        let dir = file.parent().unwrap_or(Path::new("")).to_path_buf();
        Checkpoint::of(&dir, vec![file], BTreeMap::new())
    }

    fn of(
        dir: &Path,
        files: Vec<PathBuf>,
        promised: BTreeMap<String, PathBuf>,
    ) -> Result<Checkpoint, HfError> {
        let (dir, shards) = (dir.to_path_buf(), Vec::with_capacity(files.len()));
        let mut checkpoint = Checkpoint { dir, shards, places: BTreeMap::new(), promised };
        for file in files {
            checkpoint.add(Shard::open(file)?)?;
        }
        Ok(checkpoint)
    }

    fn add(&mut self, shard: Shard) -> Result<(), HfError> {
        let at = self.shards.len();
        for name in shard.metadata.offset_keys() {
            if let Some(&earlier) = self.places.get(&name) {
                return Err(HfError::Duplicate {
                    tensor: name,
                    first: self.shards[earlier].path.clone(),
                    second: shard.path,
                });
            }
            self.places.insert(name, at);
        }
        self.shards.push(shard);
        Ok(())
    }

    /// All tensor names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// A number that tells a tensor's shape and first bytes from others.
    pub fn fingerprint(&self, tensor: &str) -> u64 {
        const LOOKED_AT: usize = 4096;
        let Ok(Some(stored)) = self.find(tensor) else { return 0 };
        let first = &stored.bytes[..stored.bytes.len().min(LOOKED_AT)];
        let sum = first.iter().fold(0u64, |sum, &byte| sum.wrapping_mul(1099511628211) ^ u64::from(byte));
        stored.shape.iter().fold(sum, |sum, &len| sum.wrapping_mul(1099511628211) ^ len as u64)
    }

    /// Whether any file holds the tensor.
    pub fn contains(&self, tensor: &str) -> bool {
        self.places.contains_key(tensor)
    }

    /// How a tensor of plain numbers is stored; `None` where it is missing or quantized.
    pub fn dtype(&self, tensor: &str) -> Result<Option<Dtype>, HfError> {
        Ok(self.find(tensor)?.and_then(|stored| match stored.number {
            Number::Float(dtype) => Some(dtype),
            Number::Int8 | Number::E4m3 => None,
        }))
    }

    /// Whether a tensor is stored in eight bits, with scales beside it.
    pub fn is_quantized(&self, tensor: &str) -> bool {
        matches!(self.find(tensor), Ok(Some(stored)) if !matches!(stored.number, Number::Float(_)))
    }

    /// An error unless both tensors are stored with the same bytes.
    pub fn check_equal(&self, a: &str, b: &str) -> Result<(), HfError> {
        match (self.find(a)?, self.find(b)?) {
            (Some(one), Some(other)) if one.bytes != other.bytes => Err(HfError::TiedHeadDiffers {
                file: other.file.to_path_buf(),
                tensor: b.to_string(),
                tied_to: a.to_string(),
            }),
            _ => Ok(()),
        }
    }

    /// An error unless all tensors of a leaf are there with the shapes that the model asks for.
    pub fn check_leaf(&self, leaf: &LeafLayout) -> Result<(), HfError> {
        leaf.tensors.iter().try_for_each(|tensor| self.find_shaped(tensor).map(drop))
    }

    /// Gathers the tensors of one fused leaf into one vector.
    pub fn read_leaf(&self, leaf: &LeafLayout) -> Result<Vec<f32>, HfError> {
        let stored =
            leaf.tensors.iter().map(|tensor| self.find_shaped(tensor)).collect::<Result<Vec<_>, _>>()?;
        // A leaf may be read long after its file was opened.
        for tensor in &leaf.tensors {
            self.places.get(&tensor.name).map_or(Ok(()), |&at| self.shards[at].check_length())?;
        }
        let mut values = vec![0.0; leaf.info.len()];
        let mut rest = values.as_mut_slice();
        for (tensor, stored) in leaf.tensors.iter().zip(stored) {
            let (part, after) = rest.split_at_mut(tensor.len());
            rest = after;
            self.read(tensor, &stored, part)?;
        }
        Ok(values)
    }

    /// The numbers that a stored tensor stands for.
    fn read(&self, tensor: &HfTensor, stored: &Stored, out: &mut [f32]) -> Result<(), HfError> {
        let of_scales = |value: fn(u8) -> f32, out: &mut [f32]| -> Result<Result<(), NotFinite>, HfError> {
            Ok(quantized_to_f32(stored.bytes, value, &self.scales(tensor)?, out))
        };
        let read = match stored.number {
            Number::Float(dtype) => to_f32(stored.bytes, dtype, out),
            Number::Int8 => of_scales(|code| f32::from(code as i8), out)?,
            Number::E4m3 => {
                of_scales(|code| if code & 0x7f == 0x7f { f32::NAN } else { e4m3_value(code) }, out)?
            }
        };
        read.map_err(|bad| HfError::NotFinite {
            file: stored.file.to_path_buf(),
            tensor: tensor.name.clone(),
            index: bad.index,
            value: bad.value,
            dtype: stored.number.name(),
        })
    }

    /// The scales of a quantized tensor: one for every row, or one for all.
    fn scales(&self, tensor: &HfTensor) -> Result<Vec<f32>, HfError> {
        let (rows, name) = (tensor.shape.first().copied().unwrap_or(1), scale_name(&tensor.name));
        let found = self.find(&name)?.map(|stored| stored.shape.to_vec());
        let one = found.as_ref().is_some_and(|shape| shape.iter().product::<usize>() == 1);
        let shape = match &found {
            Some(shape) if one || shape.iter().product::<usize>() == rows => shape.clone(),
            _ => vec![rows, 1],
        };
        let scale = HfTensor { name, shape, ..tensor.clone() };
        let stored = self.find_shaped(&scale)?;
        let mut scales = vec![0.0; if one { 1 } else { rows }];
        match stored.number {
            Number::Float(_) => self.read(&scale, &stored, &mut scales)?,
            other => {
                let (file, tensor) = (stored.file.to_path_buf(), scale.name);
                return Err(HfError::StoredAs { file, tensor, found: other.name().to_string() });
            }
        }
        Ok(if one { vec![scales[0]; rows] } else { scales })
    }

    /// The stored tensor with the shape that the model asks for.
    fn find_shaped(&self, tensor: &HfTensor) -> Result<Stored<'_>, HfError> {
        let Some(stored) = self.find(&tensor.name)? else {
            let single = (self.shards.len() == 1).then(|| self.shards[0].path.clone());
            let promised = self.promised.get(&tensor.name).cloned();
            return Err(HfError::MissingTensor {
                file: promised.or(single).unwrap_or_else(|| self.dir.clone()),
                tensor: tensor.name.clone(),
                expected: tensor.shape.clone(),
            });
        };
        if stored.shape != tensor.shape {
            return Err(HfError::Shape {
                file: stored.file.to_path_buf(),
                tensor: tensor.name.clone(),
                expected: tensor.shape.clone(),
                found: stored.shape.to_vec(),
            });
        }
        Ok(stored)
    }

    fn find(&self, tensor: &str) -> Result<Option<Stored<'_>>, HfError> {
        let Some(shard) = self.places.get(tensor).map(|&at| &self.shards[at]) else {
            return Ok(None);
        };
        let Some(info) = shard.metadata.info(tensor) else {
            return Ok(None);
        };
        let number = match info.dtype {
            safetensors::Dtype::F32 => Number::Float(Dtype::F32),
            safetensors::Dtype::BF16 => Number::Float(Dtype::Bf16),
            safetensors::Dtype::F16 => Number::Float(Dtype::F16),
            safetensors::Dtype::I8 => Number::Int8,
            safetensors::Dtype::F8_E4M3 => Number::E4m3,
            other => {
                return Err(HfError::StoredAs {
                    file: shard.path.clone(),
                    tensor: tensor.to_string(),
                    found: format!("{other:?}"),
                });
            }
        };
        let (start, end) = info.data_offsets;
        let data = &shard.bytes[shard.data_start..];
        let bytes = data.get(start..end).ok_or_else(|| HfError::Header {
            file: shard.path.clone(),
            reason: format!("tensor {tensor} lies at bytes {start}..{end} of {}", data.len()),
        })?;
        Ok(Some(Stored { file: &shard.path, number, shape: &info.shape, bytes }))
    }
}

impl Shard {
    fn open(path: PathBuf) -> Result<Shard, HfError> {
        let regular = qurl_files::open(&path).and_then(|_| map_file(&path));
        let bytes =
            regular.map_err(|source| HfError::Io { file: path.clone(), action: "be read", source })?;
        match SafeTensors::read_metadata(&bytes) {
            Ok((header, metadata)) => Ok(Shard { data_start: 8 + header, path, bytes, metadata }),
            Err(error) => Err(header_error(path, &bytes, &error)),
        }
    }

    /// An error where the file has become shorter since it was mapped.
    fn check_length(&self) -> Result<(), HfError> {
        let (file, expected) = (self.path.clone(), self.bytes.len() as u64);
        match self.bytes.file_len() {
            Ok(found) if found < expected => Err(HfError::Length { file, expected, found }),
            Ok(_) => Ok(()),
            Err(source) => Err(HfError::Io { file, action: "be read", source }),
        }
    }
}

/// A damaged file: says how long it should be where the header is readable.
fn header_error(file: PathBuf, bytes: &[u8], error: &SafeTensorError) -> HfError {
    let found = bytes.len() as u64;
    match error {
        SafeTensorError::HeaderTooSmall => HfError::Length { file, expected: 8, found },
        SafeTensorError::InvalidHeaderLength | SafeTensorError::MetadataIncompleteBuffer => {
            match promised_length(bytes) {
                Some(expected) => HfError::Length { file, expected, found },
                None => HfError::Header { file, reason: error.to_string() },
            }
        }
        _ => HfError::Header { file, reason: error.to_string() },
    }
}

/// 8 bytes of length, the header, and data up to the largest offset (as far as the header is there).
fn promised_length(bytes: &[u8]) -> Option<u64> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let length = u64::from_le_bytes(*length);
    let Some(header) = usize::try_from(length).ok().and_then(|n| rest.get(..n)) else {
        return length.checked_add(8);
    };
    let header: Map<String, Value> = serde_json::from_slice(header).ok()?;
    let end = |info: &Value| info.get("data_offsets")?.get(1)?.as_u64();
    let data = header.values().filter_map(end).max().unwrap_or(0);
    length.checked_add(8)?.checked_add(data)
}

/// The names of the files that a directory's index lists.
pub fn shards(dir: &Path) -> Result<BTreeSet<String>, HfError> {
    let names = read_index(dir, &dir.join(INDEX))?;
    Ok(names.values().filter_map(|file| Some(file.file_name()?.to_string_lossy().into_owned())).collect())
}

/// `weight_map` of the index, with file names turned into paths inside `dir`.
fn read_index(dir: &Path, index: &Path) -> Result<BTreeMap<String, PathBuf>, HfError> {
    let text = qurl_files::read_text(index, MAX_INDEX).map_err(|source| HfError::Io {
        file: index.to_path_buf(),
        action: "be read",
        source,
    })?;
    let wrong = |found: String, expected| HfError::Index { file: index.to_path_buf(), found, expected };
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("invalid JSON ({error})"), "a JSON object"))?;
    let Some(map) = value.get("weight_map").and_then(Value::as_object) else {
        let expected = "an object `weight_map` from tensors to files";
        return Err(wrong("no `weight_map`".to_string(), expected));
    };
    map.iter()
        .map(|(tensor, file)| {
            let plain = file.as_str().filter(|name| Path::new(name).file_name().is_some_and(|f| f == *name));
            match plain {
                Some(name) => Ok((tensor.clone(), dir.join(name))),
                None => {
                    let found = format!("`weight_map` sends {tensor} to {file}");
                    Err(wrong(found, "the name of a file in the same directory"))
                }
            }
        })
        .collect()
}
